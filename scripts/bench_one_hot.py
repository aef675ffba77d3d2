"""The loss over a vocabulary: as written, and picked by comparison: python scripts/bench_one_hot.py. → results/one_hot.md.

As written is what the compiler makes of jax.value_and_grad, one device; jaxauto is its plan with nothing recomputed (``jaxauto/one_hot.py``
writes the scatter of the gradient as a comparison).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import jaxauto  # noqa: E402
from jaxauto import aot, hlo  # noqa: E402
from jaxauto.targets import Target  # noqa: E402
from jaxauto.verify import compile_ahead, schedule_of, schedule_on  # noqa: E402

SEQUENCES, LENGTH, WIDTH, VOCABULARY = 8, 1024, 1024, 50304
TARGETS = {"h100:1": (1,), "v5p:1x1x1": (1, 1, 1), "v5e:1": (1,)}


def summed(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def normalised(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1).mean()


def by_position(logits: jax.Array, labels: jax.Array) -> jax.Array:
    rows = jax.nn.log_softmax(logits.reshape(-1, logits.shape[-1]))
    return -rows[jnp.arange(labels.size), labels.reshape(-1)].mean()


LOSSES = {
    "optax, integer labels": summed,
    "log_softmax, take_along_axis": normalised,
    "log_softmax, [arange, labels]": by_position,
}
ARGS = (
    jax.ShapeDtypeStruct((WIDTH, VOCABULARY), jnp.bfloat16),
    jax.ShapeDtypeStruct((SEQUENCES, LENGTH, WIDTH), jnp.bfloat16),
    jax.ShapeDtypeStruct((SEQUENCES, LENGTH), jnp.int32),
)


def head(loss: str):  # noqa: ANN201
    """The last projection and its loss: its value, the gradients of weights and of what is projected."""

    def step(weights: jax.Array, x: jax.Array, labels: jax.Array) -> list[jax.Array]:
        fun = lambda w, x: LOSSES[loss]((x @ w).astype(jnp.float32), labels)  # noqa: E731
        value, gradients = jax.value_and_grad(fun, (0, 1))(weights, x)
        return [value, *gradients]

    return step


def rows(target: str) -> list[str]:
    axes = tuple(f"x{k}" for k in range(len(TARGETS[target])))
    found = []
    for loss in LOSSES:
        step = head(loss)
        written = aot.compile_step(lambda _, s=step: s, ARGS, [P()] * 3, [P()] * 3, (), Target(target), TARGETS[target], axes)
        seconds = schedule_on(Target(target), dict(zip(axes, TARGETS[target], strict=True)), hlo.parse(written.text)).total_seconds
        plan = jaxauto.plan(step, *ARGS, target=target, remat="off", certify=False, progress=False)
        ours = compile_ahead(plan, 900)
        planned = schedule_of(plan, hlo.parse(ours.text)).total_seconds
        before, after, told = (b / 2**20 for b in (written.device_bytes, ours.device_bytes, plan.estimate.peak_memory))
        found.append(f"| {target} | {loss} | {before:,.0f} | {after:,.0f} | {told:,.0f} | {1e3 * seconds:.2f} | {1e3 * planned:.2f} |")
        print(found[-1], flush=True)
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    lines = [
        "# A loss over a vocabulary, as written and picked by comparison",
        "",
        f"Made by scripts/bench_one_hot.py; jax {jax.__version__}. {SEQUENCES} x {LENGTH:,} tokens of {WIDTH:,}, {VOCABULARY:,} words,",
        "bfloat16, the loss in float32; the value and both gradients. Milliseconds are of the compiled schedule (roofline).",
        "",
        "| target | loss | MiB as written | MiB of jaxauto | estimated | ms as written | ms of jaxauto |",
        "|---|---|---|---|---|---|---|",
        *(row for target in TARGETS for row in rows(target)),
    ]
    (HERE / "results" / "one_hot.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
