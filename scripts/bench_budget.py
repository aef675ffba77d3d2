"""Memory budgets, kept and how far down: python scripts/bench_budget.py [--targets h100:1,h100:8] [--only NAME] [--renew]

For each step of remat_cases.py: compiled as written (data-parallel, state replicated) and with full ``jax.checkpoint`` of every block; then
``jaxauto.plan(..., memory_budget=b, certify=True)`` for b = 100 %, 90 %, ... of what the step as written takes, down to the least that the
planner calls feasible: what its refusal of a budget of nothing names; then for that least. Everything is compiled ahead of time; bytes are
arguments + outputs - aliases + temporaries of one device, as allocated by the compiler; seconds are the referee's, the roofline of the
compiled schedule. Writes results/budget.json as it goes, keeps what is there, and writes results/budget.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from remat_cases import CASES, as_written, judged_plan, mesh_of, step_of, sweep  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto.aot import CompilerFailure  # noqa: E402
from jaxauto.verify import compile_plan  # noqa: E402

SOLVER_SECONDS = 30.0
WANTED = ("h100:1", "h100:8", "v5p:1x1x1", "v5p:2x2x2")
_STEP = 10
_TINY = 1e6  # bytes: no plan fits
_ROUNDING = 1 + 1e-6


def planned(name: str, target: str, budget: float, *, certify: bool = True, remat: str = "auto") -> dict[str, Any]:
    """A plan within ``budget`` bytes, compiled and judged; or what was said in refusal."""
    step, args = step_of(name, target)
    started = time.monotonic()
    try:
        options = {"target": target, "mesh": mesh_of(target), "memory_budget": budget, "certify": certify, "time_limit": SOLVER_SECONDS}
        plan = jaxauto.plan(step, *args, remat=remat, progress=False, **options)
        compile_plan(plan, 900)
    except (jaxauto.InfeasibleError, CompilerFailure) as error:
        return {"budget": budget, "refused": str(error)}
    return {"budget": budget, **judged_plan(plan), "took": time.monotonic() - started}


def least_told(name: str, target: str, *, certify: bool = True) -> dict[str, Any]:
    """The least bytes that the planner says any plan needs."""
    step, args = step_of(name, target)
    started = time.monotonic()
    try:
        options = {"memory_budget": _TINY, "certify": certify, "time_limit": SOLVER_SECONDS, "progress": False}
        jaxauto.plan(step, *args, target=target, mesh=mesh_of(target), **options)
    except jaxauto.InfeasibleError as error:
        return {"least": error.least_bytes, "said": str(error), "took": time.monotonic() - started}
    raise AssertionError(f"{name} fits into {_TINY:g} bytes")


def tried(judge: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return judge()
    except CompilerFailure as error:
        return {"refused": str(error)}


def run(name: str, target: str, found: dict[str, Any], save: Callable[[], None]) -> None:
    """One step on one target, budgets ``_STEP`` percent apart: what is not there yet."""
    rows = found.setdefault(f"{name} @ {target}", {"case": name, "target": target, "budgets": {}})

    def measured(place: dict, key: str, judge: Callable[[], Any], what: str) -> Any:
        if key not in place:
            place[key] = judge()
            print(f"{name} @ {target} | {what} | {told(place[key])}", flush=True)
            save()
        return place[key]

    written = measured(rows, "written", lambda: tried(lambda: as_written(name, target, "everything")), "as written")
    if "refused" in written:
        return
    measured(rows, "checkpoint", lambda: tried(lambda: as_written(name, target, "nothing")), "jax.checkpoint")
    least = measured(rows, "told", lambda: least_told(name, target), "the least told")["least"]
    measured(rows, "least", lambda: planned(name, target, least * _ROUNDING), "least")
    for percent in range(100, 0, -_STEP):
        budget = written["bytes"] * percent / 100
        if budget >= least:
            measured(rows["budgets"], str(percent), lambda b=budget: planned(name, target, b), f"{percent} %")


def told(row: Any) -> str:
    if "least" in row:
        return gib(row["least"])
    if "refused" in row:
        return row["refused"]
    budget = f" of {gib(row['budget'])}, {row['rounds']} rounds" if "budget" in row else ""
    return f"{gib(row['bytes'])}{budget}, {1e3 * row['seconds']:.2f} ms"


def gib(bytes_: float) -> str:
    return f"{bytes_ / 2**30:.2f} GiB"


# --------------------------------------------------------------------------------------------------------------- tables


def summary(found: dict[str, Any]) -> list[str]:
    """One line for each step and target."""
    lines = [
        "| step | target | as written GiB | jax.checkpoint of all GiB | ms | least plan GiB | ms | least / checkpoint | budgets kept |"
    ]
    lines.append("|---|" + "---|" * 8)
    for rows in found.values():
        cells = [rows["case"], rows["target"]]
        if "bytes" not in rows.get("written", {}):
            lines.append(f"| {' | '.join(cells)} | {rows.get('written', {}).get('refused', 'not run')} |")
            continue
        full, least = rows.get("checkpoint", {}), least_compiled(rows)
        budgets = [b for _, b in budgets_of(rows)]
        kept = [b for b in budgets if "bytes" in b and b["bytes"] <= b["budget"]]
        cells += [f"{rows['written']['bytes'] / 2**30:.2f}"]
        cells += [f"{full['bytes'] / 2**30:.2f}", f"{1e3 * full['seconds']:.2f}"] if "bytes" in full else ["refused", ""]
        cells += [f"{least['bytes'] / 2**30:.2f}", f"{1e3 * least['seconds']:.2f}"] if least else ["", ""]
        ratio = least["bytes"] / full["bytes"] if least and "bytes" in full else None
        cells += ["" if ratio is None else f"**{ratio:.3f}**" if ratio > 1 else f"{ratio:.3f}"]
        cells += [f"{len(kept)} of {len(budgets)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def least_compiled(rows: dict[str, Any]) -> dict[str, Any] | None:
    """The plan of a step that the compiler gave the least memory."""
    compiled = [r for r in (rows.get("least", {}), *rows["budgets"].values()) if "bytes" in r]
    return min(compiled, key=lambda r: r["bytes"]) if compiled else None


def budgets_of(rows: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(name, what came of it) of every budget of one step, the largest first."""
    budgets = sorted(rows["budgets"].items(), key=lambda b: -int(b[0]))
    least = [("the least", rows["least"])] if "least" in rows and not is_uncertified(rows["least"]) else []
    return [*((f"{percent} %", row) for percent, row in budgets), *least]


def is_uncertified(least: dict[str, Any]) -> bool:
    """Whether the least is of a run in which nobody was told of it before it was compiled: a plan, not a budget."""
    return least.get("rounds") == 0


def details(rows: dict[str, Any]) -> list[str]:
    """All budgets of one step."""
    lines = [f"### {rows['case']} @ {rows['target']}", "", CASES[rows["case"]].size + ".", ""]
    lines += ["| budget | GiB | compiled GiB | of budget | estimated GiB | rounds | recomputed | ms | estimated ms | against as written |"]
    lines += ["|---|" + "---|" * 9]
    estimated = [("least, not certified", rows["least"])] if is_uncertified(rows.get("least", {})) else []
    for label, row in [*budgets_of(rows), *estimated]:
        if "refused" in row:
            lines.append(f"| {label} | {row['budget'] / 2**30:.2f} | refused: {row['refused']} |")
            continue
        cells = [label, f"{row['budget'] / 2**30:.2f}", f"{row['bytes'] / 2**30:.2f}", f"{row['bytes'] / row['budget']:.3f}"]
        cells += [f"{row['estimated bytes'] / 2**30:.2f}", str(row["rounds"]), f"{row['recomputed']} of {row['residuals']}"]
        cells += [f"{1e3 * row['seconds']:.2f}", f"{1e3 * row['estimated seconds']:.2f}"]
        cells += [f"{row['seconds'] / rows['written']['seconds']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def head(found: dict[str, Any]) -> list[str]:
    """What holds and what does not."""
    full = [r for r in found.values() if "written" in r]
    asked = [(f"{r['case']} @ {r['target']} at {p}", b) for r in full for p, b in budgets_of(r)]
    budgets = [b for _, b in asked]
    over = [b for b in budgets if "bytes" in b and b["bytes"] > b["budget"]]
    refused = [where for where, b in asked if "refused" in b]
    worse = []
    for rows in full:
        least, checkpoint = least_compiled(rows), rows.get("checkpoint", {})
        if least and "bytes" in checkpoint and least["bytes"] > checkpoint["bytes"]:
            worse.append(f"{rows['case']} @ {rows['target']} ({least['bytes'] / checkpoint['bytes'] - 1:+.1%})")
    lines = ["# Memory budgets", "", "Made by scripts/bench_budget.py: see there for the rules.", ""]
    lines += [f"- {len(budgets)} budgets on {len(full)} steps and targets: {len(over)} plans over their budget, {len(refused)} refused."]
    lines += ["- Refused (the planner called them feasible, the compiler's programs did not fit): " + ("; ".join(refused) or "none") + "."]
    stale = [f"{r['case']} @ {r['target']}" for r in full if is_uncertified(r.get("least", {}))]
    lines += [f"- The least was told before it was compiled, and is no budget, in {len(stale)} of them (made before the planner asked)."]
    lines += ["- Least plan above full `jax.checkpoint` of every block: " + ("; ".join(worse) or "none") + "."]
    absent = [f"{name} @ {target}" for target in WANTED for name in CASES if not found.get(f"{name} @ {target}", {}).get("budgets")]
    lines += ["- Not run: " + ("; ".join(absent) or "nothing") + "."]
    lines += ["- Models are smaller than published where it says so under their headings, so that a compile takes seconds."]
    lines += ["- On eight devices the step as written and `jax.checkpoint` have the state replicated; plans may split it.", ""]
    return lines


def table(found: dict[str, Any]) -> str:
    """results/budget.md."""
    lines = [*head(found), *summary(found), ""]
    for rows in found.values():
        if "bytes" in rows.get("written", {}):
            lines += details(rows)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    assert __doc__
    sweep(__doc__, "budget", run, table)
