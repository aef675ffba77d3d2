"""A vocabulary's gradient, told its layout and not: python scripts/bench_turned.py [--only NAME]. Writes results/turned.md.

``jaxauto.swapped.turned``: the transpose of a dot whose cotangent is too wide to exchange its operands. XLA:TPU folds it into the layout of
the result, and where that is summed over devices first, keeps the weight and its moments in that layout for the update: three copies there
and three back. Where the sum is scattered beside the dot it does not, and nothing is told. One plan for eight v5p of each step
(remat_cases.py), compiled ahead of time without what it tells, and as applied: peak memory of a device, seconds by the roofline of the
schedule, and those of them that large copies outside of loops take.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from unittest import mock

import jax

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import remat_cases  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto import aot, hlo  # noqa: E402
from jaxauto.verify import compile_ahead, schedule_of  # noqa: E402

TARGET = "v5p:2x2x2"
STEPS = ("GPT-2 medium, unrolled", "Llama 1B", "MoE", "LSTM", "SSM", "ViT-L")
LARGE = 2**24  # bytes of HBM traffic


def measured(plan: jaxauto.Plan) -> tuple[float, float, float]:
    """GiB, milliseconds, and milliseconds of large copies outside of loops."""
    compilation = compile_ahead(plan, 900)
    schedule = schedule_of(plan, hlo.parse(compilation.text))
    copies = sum(r.total_seconds for r in schedule.breakdown if r.name.startswith("copy.") and r.count == 1 and r.hbm_bytes >= LARGE)
    return compilation.peak_bytes / 2**30, 1e3 * schedule.total_seconds, 1e3 * copies


def line(name: str) -> str:
    step, args = remat_cases.step_of(name, TARGET)
    mesh = remat_cases.mesh_of(TARGET)
    plan = jaxauto.plan(step, *args, target=TARGET, mesh=mesh, certify=False, progress=False)
    told = measured(plan)
    with mock.patch("jaxauto.rewrite.apply.turned", return_value={}):
        untold = measured(plan)
    cells = [f"{x:.2f}" for pair in zip(untold, told, strict=True) for x in pair]
    return f"| {name} | {' | '.join(cells)} | {told[1] / untold[1]:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--keep", type=Path, help="a folder for compiled programs: the same program is compiled once")
    options = parser.parse_args()
    remat_cases.compile_once(options.keep)
    lines = [
        "# Gradients of a vocabulary, told their layout",
        "",
        f"Made by scripts/bench_turned.py for {TARGET}; jax {jax.__version__}.",
        "",
    ]
    lines += ["| step | GiB | told | ms | told | of it copies | told | ratio of ms |", "|---|" + "---|" * 7]
    for name in STEPS:
        if options.only in name:
            lines.append(line(name))
            print(lines[-1], flush=True)
    aot.close_workers()
    (remat_cases.RESULTS / "turned.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
