"""Scattered sums as XLA:TPU writes them, beside jaxauto/cost/reshard.py: python scripts/bench_sums.py. Writes results/sums.md.

The gradient of one weight [4096, 8192] that is summed over mesh axes and split by them, with too little to compute for a windowed einsum:
over all devices of a topology to one dimension and to two, and over one of two axes. The compiler has a reduce-scatter, or it makes an
all-reduce and each device keeps its piece.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from jaxauto import aot, hlo  # noqa: E402
from jaxauto.cost.reshard import passage_tables  # noqa: E402
from jaxauto.options import mesh_axes  # noqa: E402
from jaxauto.strategies import WHOLE  # noqa: E402
from jaxauto.targets.compilers import COMPILER_OPTIONS  # noqa: E402
from jaxauto.targets.target import Target  # noqa: E402
from jaxauto.verify import schedule_on  # noqa: E402

SHAPE, TOKENS = (4096, 8192), 8  # tokens of one device
ALL = (("a", "b"), None), (None, ("a", "b")), ("a", "b")
ONE = ("a", "b"), (None, ("a", "b"))  # summed over "a"; the second dimension of the gradient is split by "b" already
CASES = [
    *(("v5e:2x2", (2, 2), s) for s in ALL),
    *(("v5e:2x4", (4, 2), s) for s in ALL),
    *(("v5e:4x4", (4, 4), s) for s in ALL),
    *(("v5e:4x8", (16, 2), s) for s in ALL),
    *(("v5e:8x8", (8, 8), s) for s in ALL),
    *(("v5e:8x16", (64, 2), s) for s in ALL),
    *(("v5e:16x16", (16, 16), s) for s in ALL),
    *(("v6e:4x4", (4, 4), s) for s in ALL),
    *(("v5p:2x2x2", (4, 2), s) for s in ALL),
    *(("v5p:4x4x2", (16, 2), s) for s in ALL),
    *(("v5p:4x4x4", (8, 8), s) for s in ALL),
    *(("v5p:4x8x8", (16, 16), s) for s in ALL),
]
SPLIT = [(t, m, s) for t, m in (("v5e:2x4", (4, 2)), ("v5e:8x8", (8, 8)), ("v5p:4x4x4", (8, 8)), ("v5p:4x4x4", (16, 4))) for s in ONE]


def step_on(spec: PartitionSpec) -> Callable:
    def make(mesh: jax.sharding.AbstractMesh) -> Callable:
        def step(weight: jax.Array, given: jax.Array, gradient: jax.Array) -> list[jax.Array]:
            found = jax.lax.with_sharding_constraint(jnp.einsum("bx,by->xy", given, gradient), NamedSharding(mesh, spec))
            return [weight - 0.1 * found.astype(jnp.float32)]

        return step

    return make


def told(target: Target, mesh: tuple[int, int], entries: tuple, summed: tuple[bool, bool]) -> float:
    """Seconds of the passage in the cost model."""
    axes = mesh_axes(dict(zip("ab", mesh, strict=True)), target)
    there = np.array([[next(d for d, e in enumerate(entries) if e and name in e) for name in "ab"]], np.int8)
    source = np.where(summed, WHOLE, there).astype(np.int8)
    return float(passage_tables(source, there, 2.0 * np.prod(SHAPE), axes, np.array([summed])).sum())


def measure(name: str, mesh: tuple[int, int], entries: tuple, *, split: bool) -> str:
    """A table row; ``split``: the second axis splits the gradient's second dimension, the sum is over the first axis alone."""
    target, spec, rows = Target(name), PartitionSpec(*entries), PartitionSpec("a" if split else ("a", "b"))
    count = TOKENS * (mesh[0] if split else mesh[0] * mesh[1])
    args = [
        jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        *(jax.ShapeDtypeStruct((count, n), jnp.bfloat16) for n in SHAPE),
    ]
    given = [spec, rows, PartitionSpec("a", "b") if split else rows]
    options = dict(COMPILER_OPTIONS[target.chip.platform])
    compiled = aot.compile_step(step_on(spec), args, given, [spec], [0], target, mesh, ("a", "b"), options=options)
    module = hlo.parse(compiled.text)
    found = schedule_on(target, {"a": mesh[0], "b": mesh[1]}, module).exposed_collective_seconds
    kinds = " + ".join(sorted({c.kind for c in module.collectives}))
    expected = told(target, mesh, entries, (True, not split))
    cells = [name, "x".join(map(str, mesh)), "a" if split else "a, b", spec, kinds, f"{1e3 * expected:.3f}", f"{1e3 * found:.3f}"]
    return f"| {' | '.join(map(str, cells))} | {expected / found - 1:+.1%} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    lines = ["# Scattered sums as compiled", "", f"Made by scripts/bench_sums.py; jax {jax.__version__}.", ""]
    lines += [
        "| target | mesh a x b | summed over | gradient | collectives | ms estimated | of the schedule | error |",
        "|---|" + "---|" * 7,
    ]
    for cases, split in ((CASES, False), (SPLIT, True)):
        for case in cases:
            lines.append(measure(*case, split=split))
            print(lines[-1], flush=True)
    (HERE / "results" / "sums.md").write_text("\n".join(lines) + "\n")
    aot.close_workers()


if __name__ == "__main__":
    main()
