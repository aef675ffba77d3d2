"""What dots that XLA:GPU merges take and save: python scripts/bench_merged_dots.py

XLA:GPU makes one dot of several that read one array, if they are smaller than a threshold (32 MiB by default). Their results are then one
array: what a plan keeps of one of them keeps all. Plans of generated train steps (generated.py), each compiled for H100s ahead of time with
the default, with a lower threshold, and with none merged: memory, and seconds by the roofline of the compiled schedule, which says nothing
of how well a matrix unit is filled: small dots fill it better merged. Writes results/merged_dots.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import jax

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import bench_accuracy  # noqa: E402

from jaxauto import hlo  # noqa: E402
from jaxauto.aot import close_workers  # noqa: E402
from jaxauto.verify import compile_ahead, schedule_of  # noqa: E402

FLAG = "xla_gpu_dot_merger_threshold_mb"
THRESHOLDS = {"by default": None, "8 MiB": "8", "none": "0"}
PLANS = [("one device", "full"), ("tensor", "chosen"), ("solver", "off"), ("solver", "full")]


def measure(model: str, sharding: str, setting: str) -> tuple[float, list[tuple[float, float]]]:
    """(bytes told, (bytes, seconds) as compiled for each threshold) of one plan."""
    plan = bench_accuracy.plan_of("generated", model, sharding, setting, "h100")
    known, found = {name: value for name, value in plan.compiler_options.items() if name != FLAG}, []
    for threshold in THRESHOLDS.values():
        plan.__dict__["compiler_options"] = known | ({} if threshold is None else {FLAG: threshold})
        compiled = compile_ahead(plan, 900)
        found.append((compiled.peak_bytes, schedule_of(plan, hlo.parse(compiled.text)).total_seconds))
    return plan.estimate.peak_memory, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(map(str, bench_accuracy.SEEDS["generated"])))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "merged_dots.md")
    options = parser.parse_args()
    head = ["# Dots that XLA:GPU merges", "", f"Made by scripts/bench_merged_dots.py; jax {jax.__version__}."]
    head += ["Told and compiled memory in MiB; milliseconds by the roofline of the compiled schedule. Models: see accuracy.md.", ""]
    names = " | ".join(f"{name}: MiB | ms" for name in THRESHOLDS)
    head += [f"| model | sharding | remat | told | {names} |", "|---|---|---|---|" + "---|" * 2 * len(THRESHOLDS)]
    lines: list[str] = []
    ratios: list[list[tuple[float, float]]] = [[] for _ in THRESHOLDS]
    for model in options.models.split(","):
        for sharding, setting in PLANS:
            told, found = measure(model, sharding, setting)
            for column, (bytes_, seconds) in zip(ratios, found, strict=True):
                column.append((bytes_ / found[0][0], seconds / found[0][1]))
            cells = " | ".join(f"{bytes_ / 2**20:,.1f} | {seconds * 1e3:.3f}" for bytes_, seconds in found)
            lines.append(f"| {model} | {sharding} | {setting} | {told / 2**20:,.1f} | {cells} |")
            print(lines[-1], flush=True)
            means = [" | ".join(f"{statistics.geometric_mean(ratio):.3f}" for ratio in zip(*column, strict=True)) for column in ratios]
            options.out.write_text("\n".join([*head, *lines, f"| geometric mean, to default | | | | {' | '.join(means)} |"]) + "\n")
    close_workers()


if __name__ == "__main__":
    main()
