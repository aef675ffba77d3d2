"""Deep scans: layers that differ, or run again in segments, against layers that are all alike: python scripts/bench_segments.py

A decoder of 96 layers, scanned, for which what lies between the layers is most of the memory. Budgets are shares of the least that is told
where all trips of a scan keep the same. Each budget is planned with and without cutting the scan; both are compiled ahead of time. Bytes:
live at the peak of the compiled program, and as allocated; seconds: the referee's. Writes results/segments.md.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from models import Decoder, step_and_args  # noqa: E402
from remat_cases import compile_once, judged, mesh_of  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto import aot  # noqa: E402
from jaxauto.aot import CompilerFailure  # noqa: E402
from jaxauto.solve.mixing import Mixer  # noqa: E402
from jaxauto.targets import Target  # noqa: E402
from jaxauto.verify import compile_plan  # noqa: E402

DEEP = Decoder(96, 512, 8, 8, 2048, 8192, length=512)
BATCH = 96  # of one device
SHARES = (1.5, 1.2, 1.0, 0.9, 0.8, 0.7)
GIB = 2.0**30


@contextlib.contextmanager
def all_alike() -> Iterator[None]:
    """Trips of a scan keep the same."""
    before = Mixer.splitting
    Mixer.splitting = lambda *_: (False,)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Mixer.splitting = before  # type: ignore[method-assign]


def planned(target: str, budget: float) -> jaxauto.Plan:
    step, args = step_and_args(DEEP.with_(batch=BATCH * Target(target).num_devices))
    options: dict[str, Any] = {"mesh": mesh_of(target), "certify": False, "progress": False}
    return jaxauto.plan(step, *args, target=target, memory_budget=budget, **options)


def least(target: str) -> float:
    try:
        planned(target, 1e6)
    except jaxauto.InfeasibleError as error:
        assert error.least_bytes is not None
        return error.least_bytes
    raise AssertionError("a decoder fits into a megabyte")


def cells(target: str, budget: float) -> list[str]:
    """Of one plan: estimated and compiled."""
    started = time.monotonic()
    try:
        plan = planned(target, budget)
    except jaxauto.InfeasibleError:
        return ["does not fit", "", "", "", ""]
    took = time.monotonic() - started
    told = [f"{1e3 * plan.estimate.step_time:.1f}", f"{plan.estimate.peak_memory / GIB:.2f}"]
    try:
        found = compile_plan(plan, 900)
    except CompilerFailure as error:
        return [*told, str(error)[:60], "", f"{took:.1f}"]
    row = judged(target, plan.mesh.shape, found.text, found.device_bytes)
    return [*told, f"{1e3 * row['seconds']:.1f}", f"{found.peak_bytes / GIB:.2f} ({found.device_bytes / GIB:.2f})", f"{took:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="h100:1,h100:8,v5p:1x1x1")
    parser.add_argument("--keep", type=Path, help="a folder for compiled programs: the same program is compiled once")
    options = parser.parse_args()
    compile_once(options.keep)
    lines = [
        "# Deep scans, cut",
        "",
        f"Made by scripts/bench_segments.py; jax {jax.__version__}. {DEEP.layers} layers, {DEEP.width} wide.",
        "",
    ]
    lines += ["| target | budget GiB | trips | told ms | told GiB | ms | live GiB (allocated) | planned in s |", "|---|" + "---|" * 7]
    for target in options.targets.split(","):
        with all_alike():
            alike = least(target)
        lines.append(f"| {target} | least | alike | | {alike / GIB:.2f} | | | |")
        lines.append(f"| {target} | least | cut | | {least(target) / GIB:.2f} | | | |")
        for share in SHARES:
            budget = share * alike * (1 + 1e-6)
            with all_alike():
                lines.append(f"| {target} | {budget / GIB:.2f} | alike | {' | '.join(cells(target, budget))} |")
            lines.append(f"| {target} | {budget / GIB:.2f} | cut | {' | '.join(cells(target, budget))} |")
            print("\n".join(lines[-2:]), flush=True)
            (HERE / "results" / "segments.md").write_text("\n".join(lines) + "\n")
    aot.close_workers()


if __name__ == "__main__":
    main()
