"""What experts know, found in plain models: python scripts/discovery.py. Writes results/discovery.md, from the cases of tests/discovery.

Each row: a step written for one device, planned without a hint for a target, mesh and memory budget, and compiled; the shardings that
tell, and the collectives of the compiled program: bytes of the whole array on one group of devices, summed over a step.
"""

from __future__ import annotations

import fnmatch
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent)]

from discovery.cases import CASES, Case, planned, traffic  # noqa: E402

SHOWN = 0.01  # of all bytes: what moves less is left out
HEAD = "| strategy | model | target, mesh, budget | specs that tell | collectives in the compiled program | step ms | peak MiB |"


def setting(case: Case) -> str:
    mesh = " × ".join(f"{axis} {size}" for axis, size in case.mesh.items())
    return ", ".join(filter(None, (case.target, mesh, case.memory_budget)))


def specs(case: Case) -> str:
    """For each pattern the specs that match, without those that are alike."""
    plan, told = planned(case.name), {}
    for pattern in case.specs:
        found = {str(spec) for path, spec in plan.specs.items() if fnmatch.fnmatchcase(path, pattern)}
        told.setdefault(" or ".join(sorted(found)), []).append(pattern)
    return "; ".join(f"{', '.join(f'`{p}`' for p in patterns)} {spec}" for spec, patterns in told.items())


def collectives(case: Case) -> str:
    """By kind and mesh axes, the most bytes first."""
    found = sorted(traffic(case.name).items(), key=lambda item: -item[1].bytes_)
    total = sum(moved.bytes_ for _, moved in found)
    told = []
    for (kind, axes, inside), moved in found:
        if moved.bytes_ > SHOWN * total:
            where = f"{', '.join(axes or ('other groups',))}, {'in loops' if inside else 'once'}"
            told.append(f"{kind} over {where}: {moved.bytes_ / 2**20:,.1f} MiB in {moved.calls:g}")
    return "; ".join(told) or "none"


def main() -> None:
    lines = [
        "# What experts know, found without a hint",
        "",
        f"Made by scripts/discovery.py. {(__doc__ or '').split(chr(10) * 2)[1].strip()}",
        "",
    ]
    lines += [HEAD, "|---|" + "---|" * 6]
    for case in CASES.values():
        estimate = planned(case.name).estimate
        numbers = f"{1e3 * estimate.step_time:,.2f} | {estimate.peak_memory / 2**20:,.0f}"
        lines.append(f"| {case.name} | {case.model} | {setting(case)} | {specs(case)} | {collectives(case)} | {numbers} |")
        print(lines[-1], flush=True)
    (HERE / "results" / "discovery.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
