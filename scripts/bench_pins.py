"""What gradients that are not pinned save, compiled: python scripts/bench_pins.py [--target v5e] [--only Llama] [--keep FOLDER].

→ results/pins.md; for other chips than v5e: pins_CHIP.md. Plans of bench_accuracy.py on eight devices that recompute nothing, compiled as
they are and with every dot's result pinned (``rewrite/implied.py``).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import bench_accuracy  # noqa: E402
import remat_cases  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto import hlo  # noqa: E402
from jaxauto.aot import CompilerFailure, close_workers  # noqa: E402
from jaxauto.rewrite import implied  # noqa: E402
from jaxauto.verify import compile_ahead, schedule_of  # noqa: E402

SHARDINGS = ("data", "FSDP", "tensor", "solver")


def compiled(plan: jaxauto.Plan, *, pinned: bool) -> tuple[float, float]:
    """MiB of a device and milliseconds of the schedule."""
    known = implied.is_over_all
    try:
        implied.is_over_all = (lambda *_: False) if pinned else known
        found = compile_ahead(plan, 900)
    finally:
        implied.is_over_all = known
    return found.device_bytes / 2**20, 1e3 * schedule_of(plan, hlo.parse(found.text)).total_seconds


def measure(group: str, model: str, sharding: str, chip: str) -> str | None:
    """A table row; None where nothing fits."""
    try:
        plan = bench_accuracy.plan_of(group, model, sharding, "off", chip)
        pairs = zip(compiled(plan, pinned=True), compiled(plan, pinned=False), strict=True)
    except (jaxauto.InfeasibleError, CompilerFailure):
        return None
    figures = (f"{before:,.1f} | {after:,.1f} | {after / before - 1:+.1%}" for before, after in pairs)
    return f"| {model} | {sharding} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="v5e")
    parser.add_argument("--groups", default="flax,published")
    parser.add_argument("--only", default="", help="models whose name contains one of these, parted by commas")
    parser.add_argument("--keep", type=Path, help="a folder for compiled programs: the same program is compiled once")
    options = parser.parse_args()
    remat_cases.compile_once(options.keep)
    lines = ["# Gradients that are not pinned", "", f"Made by scripts/bench_pins.py on eight {options.target}; jax {jax.__version__}."]
    lines += ["Compiled with every dot's result pinned, and as plans are now; nothing is recomputed.", ""]
    lines += ["| model | sharding | MiB, all pinned | now | | ms of the schedule, all pinned | now | |", "|---|" + "---|" * 7]
    for group in options.groups.split(","):
        for model in bench_accuracy.models(group, 8):
            if not any(part in model for part in options.only.split(",")):
                continue
            for sharding in SHARDINGS:
                if row := measure(group, model, sharding, options.target):
                    lines.append(row)
                    print(row, flush=True)
    suffix = "" if options.target == "v5e" else f"_{options.target}"
    (HERE / "results" / f"pins{suffix}.md").write_text("\n".join(lines) + "\n")
    close_workers()


if __name__ == "__main__":
    main()
