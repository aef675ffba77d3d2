"""Attention over short rows: python scripts/bench_short_rows.py [--target v5e:1x1] [--keep FOLDER]. Writes results/short_rows.md,
of another chip than a v5e short_rows_CHIP.md.

What ``jaxauto/cost/lanes.py`` says of copies between dots over a batch (examples and heads) and dots by weights. Train steps of two flax
blocks, examples × rows × heads × columns of a head, nothing recomputed, compiled ahead of time: the estimate of their seconds as it is and
without those copies, beside the roofline of the compiled schedule, and what copies, transposes and reshapes that are instructions of their
own write there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import flax_models  # noqa: E402
import remat_cases  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto import aot, hlo  # noqa: E402
from jaxauto.verify import compile_ahead  # noqa: E402

SHAPES = (
    (64, 64, 6, 64), (128, 64, 6, 64), (192, 64, 6, 64), (256, 64, 6, 64), (384, 64, 6, 64), (500, 64, 6, 64), (512, 64, 6, 64),
    (1024, 16, 6, 64), (512, 32, 6, 64), (512, 77, 6, 64), (512, 120, 6, 64), (256, 128, 6, 64), (512, 136, 3, 64), (512, 192, 3, 64),
    (512, 64, 12, 32), (2048, 64, 3, 32), (512, 64, 3, 128), (128, 256, 6, 32),
)  # fmt: skip
COPIES = ("copy", "transpose", "reshape")


class Blocks(nn.Module):
    heads: int
    columns: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = flax_models.Block(self.heads * self.columns, self.heads)(x)
        return nn.Dense(1000)(x.mean(1).astype(jnp.float32))


def step_of(examples: int, rows: int, heads: int, columns: int) -> tuple[Callable, tuple]:
    module = Blocks(heads, columns)
    x = jax.ShapeDtypeStruct((examples, rows, heads * columns), jnp.bfloat16)
    y = flax_models.ints(examples)
    init = flax_models.init_of(module, x)
    return flax_models.step_of(lambda p, x, y: flax_models.classes(module.apply(p, x), y), init, (x, y))


def line(shape: tuple[int, ...], target: str) -> str:
    step, args = step_of(*shape)
    make = lambda: jaxauto.plan(step, *args, target=target, mesh={"data": 1}, remat="off", certify=False, progress=False)  # noqa: E731
    plan = make()
    with mock.patch("jaxauto.cost.onchip.copied_between", return_value={}):
        without = make()
    compilation = compile_ahead(plan, 900)
    (told, schedule), (untold, _) = seconds(plan, compilation), seconds(without, compilation)
    instructions = hlo.parse(compilation.text).entry.instructions
    copied = sum(s.padded_bytes for i in instructions if i.opcode in COPIES for s in i.shapes)
    cells = [f"{1e3 * told:.2f}", f"{1e3 * untold:.2f}", f"{1e3 * schedule:.2f}", f"{told / schedule - 1:+.0%}"]
    return f"| {' × '.join(map(str, shape))} | {' | '.join(cells)} | {untold / schedule - 1:+.0%} | {copied / 2**20:,.0f} |"


def seconds(plan: jaxauto.Plan, compilation: Any) -> tuple[float, float]:
    """Of a step: estimated, without what feeds the batch, and by the schedule."""
    plan.__dict__["compilation"] = compilation
    (row,) = (row for row in plan.verify().rows if row.name == "step time (roofline of the schedule)")
    return row.estimated, row.compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e:1x1")
    parser.add_argument("--keep", type=Path, help="a folder for compiled programs: the same program is compiled once")
    options = parser.parse_args()
    remat_cases.compile_once(options.keep)
    lines = ["# Attention over short rows", "", f"Made by scripts/bench_short_rows.py for {options.target}; jax {jax.__version__}.", ""]
    lines += ["| examples × rows × heads × columns | estimate ms | without copies | schedule | error | without | copies MiB |"]
    lines += ["|---|" + "---|" * 6]
    for shape in SHAPES:
        lines.append(line(shape, options.target))
        print(lines[-1], flush=True)
    aot.close_workers()
    chip = jaxauto.Target(options.target).chip.name
    (remat_cases.RESULTS / f"short_rows{'' if chip == 'v5e' else f'_{chip}'}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
