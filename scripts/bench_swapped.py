"""Dots made the other way round against dots as written: python scripts/bench_swapped.py [--targets v5e,h100] [--only NAME]

``jaxauto.swapped`` exchanges the operands of a dot that is only read transposed, as a weight's gradient is. The same step, planned with the
same sharding by hand (bench_accuracy.py), with and without, compiled ahead of time for eight devices: peak memory of one, seconds by the
roofline of the compiled schedule, the compiler's own cycles. Writes results/swapped.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import jax

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

import bench_accuracy  # noqa: E402
import remat_cases  # noqa: E402

from jaxauto.aot import close_workers  # noqa: E402

Plan = tuple[str, str, str, str]  # a row of bench_accuracy.py
PLANS: tuple[Plan, ...] = (
    ("published", "GPT-2 medium, unrolled", "data", "full"),
    ("published", "LSTM", "data", "full"),
    ("generated", "0", "FSDP", "full"),
    ("generated", "3", "FSDP", "full"),
    ("generated", "4", "data", "full"),
    ("generated", "5", "data", "off"),
    ("generated", "6", "data", "off"),
)
SHOWN = ("peak memory", "step time (roofline of the schedule)", "step time (compiler's cycles)")


def compiled(plan: Plan, chip: str) -> list[float | None]:
    """Bytes, seconds and cycles in seconds of the compiled step."""
    row = bench_accuracy.measure(*plan, chip)
    return [row["rows"][name][1] if name in row.get("rows", {}) else None for name in SHOWN]


def line(plan: Plan, chip: str, without: Callable[[], AbstractContextManager]) -> str:
    with without():
        before = compiled(plan, chip)
    after = compiled(plan, chip)
    cells = []
    for k, unit in enumerate((2**20, 1e-3, 1e-3)):
        cells += [f"{x[k] / unit:,.2f}" if x[k] else "" for x in (before, after)]
    ratio = after[1] / before[1] if after[1] and before[1] else float("nan")
    return f"| {', '.join(plan)} | {chip} | {' | '.join(cells)} | {ratio:.3f} |"


def compare(
    description: str, title: str, plans: Sequence[Plan], without: Callable[[], AbstractContextManager], *, how: str = "exchanged"
) -> None:
    """The command line of a benchmark of a rewriting: ``without()``, as written; then as ``how`` says. A table as the script is named."""
    script = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="v5e,h100")
    parser.add_argument("--only", default="", help="plans whose name contains this")
    parser.add_argument("--keep", type=Path, help="a folder for compiled programs: the same program is compiled once")
    parser.add_argument("--out", type=Path, default=bench_accuracy.RESULTS / f"{script.removeprefix('bench_').removesuffix('.py')}.md")
    options = parser.parse_args()
    remat_cases.compile_once(options.keep)
    lines = [f"# {title}", "", f"Made by scripts/{script}; jax {jax.__version__}.", ""]
    lines += [f"As written, then {how}; ratio: of the schedules' seconds.", ""]
    lines += [f"| plan | target | MiB | {how} | ms | {how} | cycles, ms | {how} | ratio |", "|---|---|" + "---|" * 7]
    for chip in options.targets.split(","):
        for plan in plans:
            if options.only in ", ".join(plan):
                lines.append(line(plan, chip, without))
                print(lines[-1], flush=True)
        close_workers()
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    assert __doc__
    compare(__doc__, "Dots made the other way round", PLANS, lambda: mock.patch("jaxauto.graph.swaps", return_value={}))
