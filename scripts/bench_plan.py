"""How long planning takes: tracing, grouping, solving, from a step to a Plan; nothing is compiled.

    python scripts/bench_plan.py [--cases gpt2-unrolled,…] [--out scripts/results/plan]

Writes a JSON file and a table. Wall-clock and processor seconds are both given: on a busy machine only the second means something.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parent))

import jax
from models import LLAMA, Decoder, step_and_args

import jaxauto

GPT2 = Decoder(12, 768, 12, 12, 2048, 50304, batch=8, length=1024)
DEMO = Decoder(4, 256, 8, 8, 1024, 256, batch=16, length=128, scan=False)
CASES = {
    "demo": (DEMO, {"mesh": {"data": 4, "model": 2}}, 3.0),
    "gpt2-unrolled": (GPT2.with_(scan=False), {"mesh": {"data": 4, "model": 2}}, 10.0),
    "gpt2-scanned": (GPT2, {"mesh": {"data": 4, "model": 2}}, 5.0),
    "8b-unrolled-8x8": (
        LLAMA["8b"].with_(scan=False, batch=64, length=8192),
        {"target": "v5p:4x4x4", "mesh": {"data": 8, "model": 8}},
        10.0,
    ),
    "70b-scanned-512": (LLAMA["70b"].with_(batch=512, length=4096), {"target": "v5p:8x8x8"}, 30.0),
    "70b-unrolled-4x8x16": (
        LLAMA["70b"].with_(scan=False, batch=512, length=4096),
        {"target": "v5p:8x8x8", "mesh": {"data": 16, "model": 8, "expert": 4}},
        40.0,
    ),
    "405b-scanned-2048": (LLAMA["405b"].with_(batch=2048, length=4096), {"target": "v5p:8x16x16"}, 30.0),
}


def run(name: str) -> dict:
    """Plan one case; seconds, sizes and the outcome."""
    decoder, options, goal = CASES[name]
    step, args = step_and_args(decoder)
    wall, processor = time.perf_counter(), time.process_time()
    plan = jaxauto.plan(step, *args, certify=False, **options)
    row = {
        "case": name,
        "goal_s": goal,
        "wall_s": time.perf_counter() - wall,
        "processor_s": time.process_time() - processor,
        "equations": len(plan.program.graph.nodes),
        "mesh": dict(plan.mesh.shape),
        "gap": plan.solver.gap,
        "variables": plan.solver.variables,
        "solver_s": dict(plan.solver.seconds),
        "step_time_s": plan.estimate.step_time,
        "mfu": plan.estimate.mfu,
        "peak_memory_gib": plan.estimate.peak_memory / 2**30,
        "process_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    print(json.dumps({k: v for k, v in row.items() if k != "solver_s"}), flush=True)
    return row


def table(rows: list[dict]) -> str:
    """The results for people."""
    lines = [
        f"Planning time, jax {jax.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "",
        "| case | equations | mesh | goal s | wall s | processor s | gap | step s | MFU | peak GiB | process GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        mesh = "x".join(map(str, r["mesh"].values()))
        lines.append(
            f"| {r['case']} | {r['equations']} | {mesh} | {r['goal_s']:.0f} | {r['wall_s']:.1f} | {r['processor_s']:.1f} | "
            f"{r['gap']:.2%} | {r['step_time_s']:.4g} | {r['mfu']:.1%} | {r['peak_memory_gib']:.2f} | {r['process_gib']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "plan"))
    chosen = parser.parse_args()
    rows = [run(name) for name in chosen.cases.split(",")]
    Path(chosen.out).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{chosen.out}.json").write_text(json.dumps(rows, indent=1) + "\n")
    Path(f"{chosen.out}.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
