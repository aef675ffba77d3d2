"""From how much work on XLA:TPU takes a dot apart to scatter its sum beside it: python scripts/bench_ring_limits.py. Writes
results/ring_limits.md.

A dot whose contracted dimension is split over all devices, its result split in one of its two dimensions; of ever narrower bounds for the
contracted dimension the compiled program tells whether it has the loop (``jaxauto/cost/windowed.py``). Flops for each byte of the result
are that dimension in two bytes, half of it in four.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from jaxauto import aot  # noqa: E402
from jaxauto.cost.windowed import least_flops  # noqa: E402
from jaxauto.targets.target import Target  # noqa: E402

TARGETS = ("v5e:2x4", "v5e:4x4", "v5p:2x2x2", "v6e:2x4")
SHAPES = (  # rows, columns, which of them is split, dtype
    (16384, 4096, 0, jnp.bfloat16),
    (16384, 4096, 1, jnp.bfloat16),
    (2048, 2048, 0, jnp.bfloat16),
    (4096, 4096, 0, jnp.float32),
)
STEP = 64  # of the contracted dimension, or a multiple of the devices


def is_taken_apart(target: Target, rows: int, contracted: int, columns: int, split: int, dtype: jnp.dtype) -> bool:
    """Whether the compiled dot is a loop."""
    mesh = aot.abstract_mesh((target.num_devices,), ("a",))
    result = NamedSharding(mesh, PartitionSpec(*("a" if d == split else None for d in range(2))))
    given = NamedSharding(mesh, PartitionSpec(None, "a")), NamedSharding(mesh, PartitionSpec("a"))
    dot = jax.jit(lambda x, y: jax.lax.with_sharding_constraint(x @ y, result), in_shardings=given)
    shapes = jax.ShapeDtypeStruct((rows, contracted), dtype), jax.ShapeDtypeStruct((contracted, columns), dtype)
    text = dot.trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    return "windowed_dot_general" in aot.compile_module(text, target, (target.num_devices,)).text


def bounds(target: Target, rows: int, columns: int, split: int, dtype: jnp.dtype) -> tuple[int, int]:
    """The largest contracted dimension found that is waited for, the smallest that is not."""
    wide = jnp.dtype(dtype).itemsize / 2
    step = max(STEP, target.num_devices * 8)
    low, high = (int(least_flops(target.chip) * wide * part) // step * step for part in (0.5, 2))
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (low, middle) if is_taken_apart(target, rows, middle, columns, split, dtype) else (middle, high)
    return low, high


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    lines = ["# From which contracted dimension on a sum is scattered beside its dot", ""]
    lines += [f"Made by scripts/bench_ring_limits.py; jax {jax.__version__}.", ""]
    lines += ["| target | rows | columns | split | dtype | waited for | not | flops for each byte | told from |", "|---|" + "---|" * 8]
    for name in TARGETS:
        target = Target(name)
        for rows, columns, split, dtype in SHAPES:
            low, high = bounds(target, rows, columns, split, dtype)
            bytes_ = jnp.dtype(dtype).itemsize / 2
            cells = name, rows, columns, ("rows", "columns")[split], jnp.dtype(dtype).name, low, high
            lines.append(f"| {' | '.join(map(str, cells))} | {low / bytes_:g} to {high / bytes_:g} | {least_flops(target.chip):g} |")
            print(lines[-1], flush=True)
    aot.close_workers()
    (HERE / "results" / "ring_limits.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
