"""Results gathered at the end of a step, beside jaxauto/cost/turning.py: python scripts/bench_endings.py. Writes results/endings.md.

Weights of eight layers [2048, 2048] and their momentum lie whole on eight devices, donated; the update is computed in pieces along one
dimension and gathered (ZeRO-2, arXiv 1910.02054, section 5). Does the compiler gather into the donated memory, or beside it?
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from jaxauto import aot  # noqa: E402
from jaxauto.cost.turning import turned  # noqa: E402
from jaxauto.strategies import WHOLE  # noqa: E402
from jaxauto.targets.compilers import COMPILER_OPTIONS  # noqa: E402
from jaxauto.targets.target import Target  # noqa: E402

LAYERS, WIDTH, TOKENS, DEVICES = 8, 2048, 512, 8
MIB = 2**20


def step_on(dim: int, mesh: jax.sharding.AbstractMesh) -> Callable:
    """A step of momentum whose update is cut along a dimension of the stacked weights."""
    cut, whole = (NamedSharding(mesh, PartitionSpec(*[None] * dim, "d")), NamedSharding(mesh, PartitionSpec()))

    def step(weights: jax.Array, momentum: jax.Array, x: jax.Array) -> list[jax.Array]:
        def loss(weights: jax.Array) -> jax.Array:
            out = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(x.dtype)), None), x, weights)[0]
            return jnp.mean(jnp.square(out.astype(jnp.float32)))

        gradient, w, m = (jax.lax.with_sharding_constraint(a, cut) for a in (jax.grad(loss)(weights), weights, momentum))
        m = 0.9 * m + gradient
        return [jax.lax.with_sharding_constraint(a, whole) for a in (w - 0.1 * m, m)]

    return step


def measure(name: str, dim: int) -> str:
    """A table row."""
    target = Target(name)
    args = [jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)] * 2
    args += [jax.ShapeDtypeStruct((TOKENS * DEVICES, WIDTH), jnp.bfloat16)]
    here = [PartitionSpec(), PartitionSpec(), PartitionSpec("d")]
    options = dict(COMPILER_OPTIONS[target.chip.platform])
    compiled = aot.compile_step(partial(step_on, dim), args, here, here[:2], [0, 1], target, (DEVICES,), ("d",), options=options)
    told = bool(turned(np.array([[dim]]), np.array([[WHOLE]]), 3, target.chip.platform)[0, 0])
    results = 2 * 4 * LAYERS * WIDTH**2
    return f"| {name} | {dim} | {results / MIB:.0f} | {compiled.memory['temp'] / MIB:.0f} | {'yes' if told else 'no'} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    lines = ["# Results gathered at the end of a step", "", "Made by scripts/bench_endings.py: see there.", ""]
    lines += ["| target | cut along | results MiB | temporaries MiB | counted beside the donated memory |", "|---|---|---|---|---|"]
    for name in ("v5e:2x4", "v5p:2x2x2", "h100:8"):
        lines += [measure(name, dim) for dim in range(3)]
        print(*lines[-3:], sep="\n", flush=True)
    (HERE / "results" / "endings.md").write_text("\n".join(lines) + "\n")
    aot.close_workers()


if __name__ == "__main__":
    main()
