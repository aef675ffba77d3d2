"""How planning grows with depth: tracing, solving and peak memory of a decoder of Llama 8B's shape, 2 to 256 layers. Nothing is compiled.

    python scripts/bench_depth.py [--depths 2,4,…] [--forms scanned,unrolled] [--out scripts/results/depth]

Every depth is planned in a process of its own: peak memory is of that plan alone. Writes a JSON file and a table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent))

import jax
from models import LLAMA, step_and_args

import jaxauto
from jaxauto import planner

DEPTHS = (2, 4, 8, 16, 32, 64, 128, 256)
FORMS = {"scanned": True, "unrolled": False}
TARGET, MESH = "v5e:8x8", {"data": 8, "model": 8}
BUDGET = "32GiB"  # what 256 layers need; a v5e has 16
TIME_LIMIT = 600.0  # never reached: no search is cut short on a busy machine
LIMIT_GB = 4.0


def run(form: str, layers: int) -> dict:
    """Plan one depth in this process; tracing (with reading the graph) is timed apart from the rest."""
    step, args = step_and_args(LLAMA["8b"].with_(layers=layers, scan=FORMS[form], batch=64, length=4096))
    traced = 0.0
    read = planner.read

    def timed(*rest):
        nonlocal traced
        started = time.process_time()
        found = read(*rest)
        traced = time.process_time() - started
        return found

    planner.read = timed
    row = {"form": form, "layers": layers}
    wall, processor = time.perf_counter(), time.process_time()
    try:
        plan = jaxauto.plan(step, *args, target=TARGET, mesh=MESH, memory_budget=BUDGET, time_limit=TIME_LIMIT, certify=False)
        row |= {"equations": len(plan.program.graph.nodes), "gap": plan.solver.gap}
    except jaxauto.InfeasibleError as error:
        row |= {"infeasible": str(error).split(",")[0]}
    total = time.process_time() - processor
    return row | {
        "wall_s": time.perf_counter() - wall,
        "total_s": total,
        "trace_s": traced,
        "solve_s": total - traced,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def table(rows: list[dict]) -> str:
    """The results for people."""
    peak = max(r["peak_gb"] for r in rows)
    head = (
        f"Planning a decoder of Llama 8B's shape on {TARGET}, mesh 8x8, {BUDGET} for each chip, by depth; processor seconds; "
        f"jax {jax.__version__}, {os.cpu_count()} cores. Peak memory of the process at most {peak:.2f} GB (goal: {LIMIT_GB:.0f})."
    )
    lines = [
        head,
        "",
        "Growth: the time divided by that of half the depth; less than 2 is less than linear.",
        "",
        "| form | layers | trace s | solve s | total s | growth | wall s | peak GB | gap |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    total = {(r["form"], r["layers"]): r["total_s"] for r in rows}
    for r in rows:
        half = total.get((r["form"], r["layers"] // 2))
        growth = f"{r['total_s'] / half:.2f}" if half else ""
        gap = f"{r['gap']:.2%}" if "gap" in r else "does not fit"
        lines.append(
            f"| {r['form']} | {r['layers']} | {r['trace_s']:.2f} | {r['solve_s']:.2f} | {r['total_s']:.2f} | {growth} | "
            f"{r['wall_s']:.1f} | {r['peak_gb']:.2f} | {gap} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--one", help="form,layers: plan this one and print its row")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "depth"))
    chosen = parser.parse_args()
    if chosen.one:
        form, layers = chosen.one.split(",")
        print(json.dumps(run(form, int(layers))))
        return
    rows: list[dict] = []
    for form in chosen.forms.split(","):
        for layers in chosen.depths.split(","):
            command = [sys.executable, __file__, "--one", f"{form},{layers}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(rows[-1]), flush=True)
            Path(f"{chosen.out}.json").write_text(json.dumps(rows, indent=1) + "\n")
            Path(f"{chosen.out}.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
