"""Plans near the least memory, as told: python scripts/bench_near.py [--targets v5p:2x2x2] [--only LSTM,SSM] [--out …]

For each step of remat_cases.py: the least bytes that the planner says any plan needs, then plans for shares of it, on every mesh of the
target. Who has more room loses nothing: a plan for a larger budget that is slower than one for a smaller budget is a miss of the search.
Nothing is compiled. Writes a JSON file as it goes, keeps what is there, and writes a table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import jax  # noqa: E402
from remat_cases import CASES, step_of  # noqa: E402

import jaxauto  # noqa: E402

SHARES = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5)
_ROUNDING = 1 + 1e-6
_NOTHING = 1.5  # bytes: no plan fits
SAME = 0.01  # relative difference of seconds that is none


def run(case: str, target: str) -> dict[str, Any]:
    """Least bytes, and seconds told for each share of it."""
    step, args = step_of(case, target)
    started = time.process_time()
    try:
        jaxauto.plan(step, *args, target=target, memory_budget=_NOTHING, certify=False, progress=False)
    except jaxauto.InfeasibleError as error:
        assert error.least_bytes is not None
        least = error.least_bytes * _ROUNDING
    seconds = [
        jaxauto.plan(step, *args, target=target, memory_budget=least * share, certify=False, progress=False).estimate.step_time
        for share in SHARES
    ]
    return {"case": case, "target": target, "least": least, "seconds": seconds, "took": time.process_time() - started}


def behind(seconds: list[float]) -> list[float]:
    """How much slower than the fastest plan for no more memory each is."""
    return [one / min(seconds[: k + 1]) - 1 for k, one in enumerate(seconds)]


def table(found: dict[str, dict]) -> str:
    """results/near.md."""
    worse = [(r["case"], r["target"], share, x) for r in found.values() for share, x in zip(SHARES, behind(r["seconds"]), strict=True)]
    missed = [w for w in worse if w[-1] > SAME]
    lines = [
        "# Plans near the least memory",
        "",
        f"Made by scripts/bench_near.py; jax {jax.__version__}. Milliseconds as told, all meshes.",
        "",
    ]
    lines += [f"- Slower than a plan for less memory, by more than {SAME:.0%}: {len(missed)} of {len(worse)}."]
    lines += [f"  - {case}, {target}, {share:g} times the least: {x:.1%}" for case, target, share, x in missed] + [""]
    lines += [
        f"| step | target | least GiB | {' | '.join(f'{s:g}' for s in SHARES)} | processor s, all |",
        "|---|" + "---|" * (len(SHARES) + 3),
    ]
    for r in found.values():
        cells = [r["case"], r["target"], f"{r['least'] / 2**30:.2f}", *(f"{1e3 * s:.2f}" for s in r["seconds"]), f"{r['took']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="v5p:2x2x2")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "near.json")
    options = parser.parse_args()
    found: dict[str, dict] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for target in options.targets.split(","):
        for case in options.only.split(","):
            key = f"{case} @ {target}"
            found[key] = found.get(key) or run(case, target)
            print(key, [round(1e3 * s, 3) for s in found[key]["seconds"]], flush=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            options.out.with_suffix(".md").write_text(table(found))


if __name__ == "__main__":
    main()
