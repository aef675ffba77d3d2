"""How long a profile takes and how much memory: python scripts/bench_profile.py [--cases 405b-scanned,…] [--out scripts/results/profile]

Each case runs in a process of its own. ``growth`` is what the process's largest resident size grew by after the imports; ``process`` is
that size. ``tracing`` is of ``jax.make_jaxpr`` alone, run before; the profile traces again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import jax  # noqa: E402
from models import LLAMA, step_and_args  # noqa: E402

import jaxauto  # noqa: E402

CASES = {  # name → (model, seconds allowed: None if no goal was set)
    "8b-scanned": (LLAMA["8b"], None),
    "8b-unrolled": (LLAMA["8b"].with_(scan=False), None),
    "70b-scanned": (LLAMA["70b"], None),
    "70b-unrolled": (LLAMA["70b"].with_(scan=False), 15.0),
    "405b-scanned": (LLAMA["405b"], 3.0),
}
MEMORY_GOAL_GB = 1.0


def largest_gb() -> float:
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def run(name: str) -> dict:
    """Profile one case, in this process."""
    model, goal = CASES[name]
    step, args = step_and_args(model)
    before = largest_gb()
    started = time.perf_counter()
    jax.make_jaxpr(step)(*args)
    tracing = time.perf_counter() - started
    wall, processor = time.perf_counter(), time.process_time()
    found = jaxauto.profile(step, *args)
    return {
        "case": name,
        "goal_s": goal,
        "parameters": sum(x.size for x in jax.tree.leaves(args[0])),
        "equations": len(found.equations),
        "tracing_s": tracing,
        "wall_s": time.perf_counter() - wall,
        "processor_s": time.process_time() - processor,
        "growth_gb": largest_gb() - before,
        "process_gb": largest_gb(),
        "live_arrays": len(jax.live_arrays()),
        "matmul_flops": found.matmul_flops,
        "peak_memory_bytes": found.peak_memory,
    }


def table(rows: list[dict]) -> str:
    """The results for people."""
    lines = [
        (
            f"Time and memory of `jaxauto.profile`, jax {jax.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, "
            f"load {os.getloadavg()[0]:.1f}. Batch of 8 × 1,024 tokens; a goal of {MEMORY_GOAL_GB:.0f} GB for the memory."
        ),
        "",
        (
            "| case | parameters | equations | goal s | profile s, wall | processor | tracing alone, wall | memory: growth GB | process GB "
            "| arrays alive |"
        ),
        "|" + "---|" * 10,
    ]
    for r in rows:
        goal = f"{r['goal_s']:.0f}" if r["goal_s"] else ""
        lines.append(
            f"| {r['case']} | {r['parameters'] / 1e9:.1f} B | {r['equations']} | {goal} | {r['wall_s']:.2f} | {r['processor_s']:.2f} | "
            f"{r['tracing_s']:.2f} | {r['growth_gb']:.2f} | {r['process_gb']:.2f} | {r['live_arrays']} |"
        )
    missed = [
        r["case"] for r in rows if (r["goal_s"] and r["wall_s"] > r["goal_s"]) or r["process_gb"] > MEMORY_GOAL_GB or r["live_arrays"]
    ]
    lines += ["", f"Missed: {', '.join(missed)}." if missed else "All goals met: time, memory, and no array allocated."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", default=str(HERE / "results" / "profile"))
    parser.add_argument("--one", help="profile this case here and print JSON")
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(run(chosen.one)))
        return
    rows = []
    for name in chosen.cases.split(","):
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(done.stdout.splitlines()[-1], flush=True)
    Path(f"{chosen.out}.json").write_text(json.dumps(rows, indent=1) + "\n")
    Path(f"{chosen.out}.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
