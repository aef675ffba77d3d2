"""Levels of rematerialisation for cheap and for dear elementwise equations: python scripts/bench_levels.py [--only NAME] [--targets …]

What an elementwise equation that is made again costs depends on what reads it: matrix products hide it, a scan over a state does not
(``solve/remat.py``, ``_ELEMENTWISE``). Each step of remat_cases.py is planned without pressure and within half the memory that the step as
written takes in that sharding, with levels for dear ones alone (a quarter of their traffic), and as the planner has them (both); compiled
ahead of time, seconds are the referee's, the roofline of the compiled schedule. Writes results/levels.json as it goes, keeps what is
there, and writes results/levels.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import numpy as np  # noqa: E402
from remat_cases import judged_plan, mesh_of, step_of, sweep  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto.aot import CompilerFailure  # noqa: E402
from jaxauto.solve import remat  # noqa: E402
from jaxauto.verify import compile_plan  # noqa: E402

WAYS = {"dear": {**remat._ELEMENTWISE, "tpu": (0.25,)}, "both": remat._ELEMENTWISE}
SHARES = (None, 0.5)


def planned(name: str, target: str, budget: float | None, way: str) -> dict[str, Any]:
    """A plan, compiled and judged; or what was said in refusal."""
    step, args = step_of(name, target)
    remat._ELEMENTWISE = WAYS[way]
    try:
        plan = jaxauto.plan(step, *args, target=target, mesh=mesh_of(target), memory_budget=budget, certify=False, progress=False)
        compile_plan(plan, 900)
    except (jaxauto.InfeasibleError, CompilerFailure) as error:
        return {"refused": str(error)}
    finally:
        remat._ELEMENTWISE = WAYS["both"]
    return {"budget": budget, **judged_plan(plan)}


def as_written(name: str, target: str) -> float:
    """Bytes that the step takes with nothing made again, as the planner tells."""
    step, args = step_of(name, target)
    plan = jaxauto.plan(step, *args, target=target, mesh=mesh_of(target), remat="off", memory_budget=1e15, certify=False, progress=False)
    return plan.estimate.peak_memory


def run(name: str, target: str, found: dict[str, Any], save: Callable[[], None]) -> None:
    """One step on one target: what is not there yet."""
    rows = found.setdefault(f"{name} @ {target}", {"case": name, "target": target})
    rows.setdefault("written", as_written(name, target))
    for share in SHARES:
        for way in WAYS:
            key = f"{share or 'free'} {way}"
            if key not in rows:
                rows[key] = planned(name, target, share and share * rows["written"], way)
                print(f"{name} @ {target} | {key} | {rows[key].get('seconds', rows[key].get('refused'))}", flush=True)
                save()


def table(found: dict[str, Any]) -> str:
    """results/levels.md."""
    pairs: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    for where, rows in found.items():
        for share in SHARES:
            one, other = (rows.get(f"{share or 'free'} {way}", {}) for way in WAYS)
            if "seconds" in one and "seconds" in other:
                pairs.append((f"{where} | {'no pressure' if share is None else f'{share:.0%} of as written'}", one, other))
    lines = ["# Levels for cheap elementwise equations too", "", "Made by scripts/bench_levels.py: see there.", ""]
    if pairs:
        compiled = np.array([other["seconds"] / one["seconds"] for _, one, other in pairs])
        told = np.array([other["estimated seconds"] / one["estimated seconds"] for _, one, other in pairs])
        for name, ratio in ("by the referee", compiled), ("as told", told):
            mean, best, worst = math.exp(np.log(ratio).mean()), ratio.min(), ratio.max()
            lines += [f"- With both / with dear ones alone, {name}: geometric mean of {len(pairs)} {mean:.3f}, {best:.3f} to {worst:.3f}."]
    lines += ["", "| step | budget | dear ms | told | GiB | both ms | told | GiB | both / dear |", "|---|---|" + "---|" * 7]
    for where, *both in pairs:
        cells = [f"{1e3 * r['seconds']:.2f} | {1e3 * r['estimated seconds']:.2f} | {r['bytes'] / 2**30:.2f}" for r in both]
        lines += [f"| {where} | {' | '.join(cells)} | {both[1]['seconds'] / both[0]['seconds']:.3f} |"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    assert __doc__
    sweep(__doc__, "levels", run, table)
