"""What XLA:GPU keeps of an activation for the backward pass, against what is told: python scripts/bench_activations.py

Three residual blocks of two products and an activation between, on one H100, nothing recomputed; compiled ahead of time. Writes
results/activations_h100.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import jaxauto  # noqa: E402
from jaxauto.aot import close_workers  # noqa: E402

ROWS, WIDTH, HIDDEN, LAYERS = 8192, 768, 3072, 3
ACTIVATIONS: dict[str, Callable] = {
    "gelu, by tanh": jax.nn.gelu,
    "gelu, exact": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
}


def step_of(activation: Callable, dtype: jnp.dtype, *, biased: bool) -> tuple[Callable, tuple]:
    """A step of plain gradient descent, and its arguments."""

    def loss(params: list, x: jax.Array) -> jax.Array:
        y = x.astype(dtype)
        for first, bias, second in params:
            h = y @ first.astype(dtype)
            h = h + bias.astype(dtype) if biased else h
            y = y + activation(h) @ second.astype(dtype)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def step(params: list, x: jax.Array) -> list:
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))

    shapes = ((WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, WIDTH))
    params = [tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes) for _ in range(LAYERS)]
    return step, (params, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))


def main() -> None:
    """Measure and write the table."""
    lines = ["# What XLA:GPU keeps of an activation", "", f"Made by scripts/bench_activations.py; jax {jax.__version__}. Peak, MiB.", ""]
    lines += ["| activation | type | bias | told | compiled | error |", "|---|---|---|---|---|---|"]
    for dtype in (jnp.bfloat16, jnp.float32):
        for name, activation in ACTIVATIONS.items():
            for biased in (False, True):
                step, args = step_of(activation, jnp.dtype(dtype), biased=biased)
                plan = jaxauto.plan(step, *args, target="h100:1", remat="off", certify=False, progress=False)
                told, compiled = next((row.estimated, row.compiled) for row in plan.verify().rows if row.name == "peak memory")
                row = (name, jnp.dtype(dtype).name, "yes" if biased else "no", f"{told / 2**20:.0f}", f"{compiled / 2**20:.0f}")
                lines.append(f"| {' | '.join(row)} | {told / compiled - 1:+.1%} |")
                print(lines[-1], flush=True)
    (HERE / "results" / "activations_h100.md").write_text("\n".join(lines) + "\n")
    close_workers()


if __name__ == "__main__":
    main()
