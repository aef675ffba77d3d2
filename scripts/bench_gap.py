"""How far plans can be from the optimum: the solver's own bound against what it found, over the whole zoo. Nothing is compiled.

    python scripts/bench_gap.py [--models "moe,dlrm"] [--sizes small,medium] [--targets v5e:2x4,v5p:2x2x2] [--time-limit 60] [--out …/gap]

Writes a JSON file and a table. A gap of 1 % says: no sharding on this mesh, with any of the levels of rematerialisation that were searched,
is more than 1 % faster by the planner's own estimate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent))

import jax
from bench_models import MODELS

import jaxauto

TARGETS = ("v5e:2x4", "v5p:2x2x2")
GOAL = 0.01


def run(family: str, size: str, target: str, time_limit: float = 60.0) -> dict:
    """Plan one model for one target."""
    step, args = MODELS[family][size]()
    started, processor = time.perf_counter(), time.process_time()
    try:
        plan = jaxauto.plan(step, *args, target=target, certify=False, time_limit=time_limit)
    except jaxauto.InfeasibleError as error:
        return {"model": f"{family} {size}", "target": target, "error": str(error).split(":")[0]}
    solver = plan.solver
    return {
        "model": f"{family} {size}",
        "target": target,
        "time_limit": time_limit,
        "mesh": "x".join(map(str, plan.mesh.shape.values())),
        "seconds": time.perf_counter() - started,
        "processor_s": time.process_time() - processor,
        "solver": dict(solver.seconds),
        "objective": solver.objective,
        "bound": solver.bound,
        "gap": solver.gap,
        "status": solver.status,
        "variables": solver.variables,
        "constraints": solver.constraints,
    }


def table(rows: list[dict]) -> str:
    """The results for people."""
    solved = [r for r in rows if "gap" in r]
    within = sum(r["gap"] <= GOAL for r in solved)
    head = (
        f"Gap between plan and bound, jax {jax.__version__}, {os.cpu_count()} cores: {within} of {len(solved)} within {GOAL:.0%}, "
        f"largest {max((r['gap'] for r in solved), default=0.0):.2%}."
    )
    lines = [
        head,
        "",
        "| model | target | mesh | planning s | processor s | objective ms | bound ms | gap | status | variables | constraints |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "gap" not in r:
            lines.append(f"| {r['model']} | {r['target']} | {r['error']} ||||||||||")
            continue
        lines.append(
            f"| {r['model']} | {r['target']} | {r['mesh']} | {r['seconds']:.1f} | {r['processor_s']:.1f} | "
            f"{1e3 * r['objective']:.4g} | {1e3 * r['bound']:.4g} | "
            f"{r['gap']:.2%} | {r['status']} | {r['variables']} | {r['constraints']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sizes", default="small,medium")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--time-limit", type=float, default=60.0, help="of jaxauto.plan: the work on gaps is in proportion")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "gap"))
    chosen = parser.parse_args()
    rows: list[dict] = []
    for size in chosen.sizes.split(","):
        for family in chosen.models.split(","):
            for target in chosen.targets.split(",") if size in MODELS[family] else ():
                rows.append(run(family, size, target, chosen.time_limit))
                print(json.dumps({k: v for k, v in rows[-1].items() if k != "solver"}), flush=True)
                Path(f"{chosen.out}.json").write_text(json.dumps(rows, indent=1) + "\n")
                Path(f"{chosen.out}.md").write_text(table(rows))


if __name__ == "__main__":
    main()
