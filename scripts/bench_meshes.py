"""What it costs, and saves, to refine the meshes alone that may have the best answer. Nothing is compiled.

    python scripts/bench_meshes.py [--models "moe,dlrm"] [--targets v5e:8x8,h100:64] [--out scripts/results/meshes]

Each model is planned on all meshes of a target under budgets of what the best answer takes and half of that: refining those
that are not far behind (``planner.BEHIND``, ``ABREAST``), and refining every one. Writes a JSON file and a table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from bench_models import MODELS

from jaxauto import planner
from jaxauto.errors import InfeasibleError
from jaxauto.options import Options
from jaxauto.targets.target import resolve

TARGETS = ("v5e:8x8", "h100:64")
SHARES = (1.0, 0.5)  # of the memory of the best answer
FAMILIES = ("decoder scan", "decoder unrolled", "moe", "ssm", "encoder-decoder", "lstm", "dlrm", "unet")
BEHIND = planner.BEHIND, planner.ABREAST
EVERY = math.inf, math.inf


def searched(step: planner.Step, target: str, budget: float, behind: tuple[float, float]) -> tuple[planner.Solved | None, float]:
    """The answer, None if there is none, and processor seconds."""
    planner.BEHIND, planner.ABREAST, started = *behind, time.process_time()
    try:
        solved = planner.searched(step, resolve(target), budget, Options(target=target), lambda _: None)
    except InfeasibleError:
        solved = None
    return solved, time.process_time() - started


def run(family: str, target: str) -> list[dict]:
    """A row for each budget."""
    build, args = MODELS[family]["medium"]()
    step = planner.read(build, args, {})
    free, _ = searched(step, target, math.inf, BEHIND)
    assert free is not None
    rows = []
    for share in SHARES:
        budget = share * free.best.peak_bytes
        (some, quick), (every, slow) = searched(step, target, budget, BEHIND), searched(step, target, budget, EVERY)
        row = {"model": family, "target": target, "share": share, "quick_s": quick, "slow_s": slow, "meshes": len(free.meshes)}
        if some is not None and every is not None:
            row |= {"some": some.best.seconds, "every": every.best.seconds, "mesh": "x".join(map(str, some.best.model.mesh.sizes))}
        rows.append(row | {"fits": [some is not None, every is not None]})
    return rows


def table(rows: list[dict]) -> str:
    """The results for people."""
    both = [r for r in rows if "some" in r]
    lost = np.array([r["some"] / r["every"] - 1 for r in both])
    spent = np.array([r["quick_s"] / r["slow_s"] for r in rows])
    mean = np.exp(np.log(spent).mean())
    lines = [
        "# Meshes that are refined",
        "",
        f"Made by scripts/bench_meshes.py. Refined: meshes up to {BEHIND[0] - 1:.0%} behind, of those up to {BEHIND[1] - 1:.0%} behind",
        f"before they are looked at closer; against every mesh. {len(rows)} budgets:",
        "",
        f"- Slower by the estimate: {int((lost > 1e-3).sum())} of {len(both)} by more than 0.1 %; the worst by {max(lost.max(), 0.0):.2%}.",
        f"- A plan with one way of searching alone: {sum(r['fits'][0] != r['fits'][1] for r in rows)}.",
        f"- Processor time, of that for every mesh: geometric mean {mean:.2f}, {spent.min():.2f} to {spent.max():.2f}.",
        "",
        "| model | target | meshes | budget, of the best one's memory | mesh | ms | refining every mesh | slower | s | every mesh |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        found = ["no plan"] * 2 + ["", ""]
        if "some" in r:
            found = [r["mesh"], f"{r['some'] * 1e3:,.3f}", f"{r['every'] * 1e3:,.3f}", f"{r['some'] / r['every'] - 1:.2%}"]
        cells = [r["model"], r["target"], str(r["meshes"]), str(r["share"]), *found, f"{r['quick_s']:.1f}", f"{r['slow_s']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """See the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(FAMILIES))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "meshes")
    chosen = parser.parse_args()
    rows: list[dict] = []
    for family in chosen.models.split(","):
        for target in chosen.targets.split(","):
            rows += run(family, target)
            for r in rows[-len(SHARES) :]:
                print(f"{r['model']} {r['target']} {r['share']} {r['quick_s']:.1f} {r['slow_s']:.1f}", flush=True)
            chosen.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
            chosen.out.with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main()
