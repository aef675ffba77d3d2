"""Sharding and rematerialisation solved together against one after the other: python scripts/bench_joint.py [--only NAME]

Two stages, as Colossal-Auto does (arXiv 2302.02599): first the sharding, blind to rematerialisation; then, with that sharding fixed, the
level that is fastest of those that fit, refined block by block by the chain's dynamic programme. "two-stage": the first stage has no memory
pressure. "swept": the first stage is solved under 1, 1.5, 2, 3 and 5 times the budget and without; the best of all second stages counts.
"joint" is ``planner.solve``. All three have the same cost model, mesh and budget; nothing is compiled: seconds and bytes are the planner's
estimates. Budgets lie between the least of the joint search and what the fastest sharding takes without rematerialisation.
Writes results/joint.json as it goes, keeps what is there, and writes results/joint.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench_budget import gib  # noqa: E402
from remat_cases import CASES, RESULTS, step_of  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto import planner  # noqa: E402
from jaxauto.constraints import allowed_states  # noqa: E402
from jaxauto.core import MeshAxes  # noqa: E402
from jaxauto.options import mesh_axes  # noqa: E402
from jaxauto.solve.fold import fold  # noqa: E402
from jaxauto.solve.model import Program  # noqa: E402
from jaxauto.solve.remat import Level, Remat  # noqa: E402
from jaxauto.solve.search import Candidate, Search  # noqa: E402
from jaxauto.targets.target import resolve  # noqa: E402

MESHES = (("v5p:2x2x2", {"data": 4, "model": 2}), ("h100:8", {"data": 2, "model": 4}), ("v5p:2x2x2", {"data": 8}))
SHARES = (0.02, 0.1, 0.25, 0.5)  # of the way from the least memory to that of no pressure
PRESSURES = (math.inf, 5.0, 3.0, 2.0, 1.5, 1.0)  # times the budget, of the first stage
SOLVER_SECONDS = 30.0
_SAME = 1e-6  # relative: a rounding error is no win


def search_of(step: planner.Step, remat: Remat, mesh: MeshAxes, options: planner.Options, target: Any) -> Search:
    allowed = allowed_states(options.constraints, step.traced, step.groups, mesh)
    alike = fold(step.groups, {g: mask.tobytes() for g, mask in allowed.items()})
    program = Program(step.groups, alike, step.known_early, step.late_only)
    return Search(program, remat, mesh, target.chip, allowed, time.monotonic() + SOLVER_SECONDS)


def first_stage(search: Search, levels: list[Level], budget: float) -> Candidate:
    """The best sharding of the step as written within ``budget`` bytes, or the leanest."""
    search.deadline = time.monotonic() + SOLVER_SECONDS
    found = search.run(budget, levels[:1])
    return found.best or found.leanest


def second_stage(search: Search, levels: list[Level], sharding: Candidate, budget: float) -> Candidate | None:
    """Rematerialisation under a fixed sharding: the fastest level that fits, each block then keeping what there is room for."""
    found: list[Candidate] = []
    for number, level in enumerate(levels):
        model = search.model(search.remat.variant(level))
        found.append(search.candidate(model, sharding.x, number))
    fitting = [c for c in found if c.peak_bytes <= budget]
    if not fitting:
        return None
    mixed = (m for c in fitting for m in search.mixer.mixtures(c, levels, budget))
    return min([*fitting, *mixed], key=lambda c: c.seconds)


def run(name: str, target_name: str, shape: Mapping[str, int], rows: dict[str, Any]) -> None:
    """One step on one mesh: budgets, and three answers to each."""
    step_fun, args = step_of(name, target_name)
    target = resolve(target_name)
    options = planner.Options(mesh=shape, target=target_name, time_limit=SOLVER_SECONDS, certify=False)
    step = planner.read(step_fun, args, {})
    remat = Remat(step.graph, step.groups, step.aliased, target.chip, devices=math.prod(shape.values()))
    levels = remat.levels()
    search = search_of(step, remat, mesh_axes(shape, target), options, target)
    free = first_stage(search, levels, math.inf)
    least = least_of(step, target, options)
    rows |= {"case": name, "target": target_name, "mesh": dict(shape), "free bytes": free.peak_bytes, "free seconds": free.seconds}
    rows |= {"least bytes": least, "budgets": {}}
    shardings: dict[float, Candidate] = {math.inf: free}
    for share in SHARES:
        budget = least + share * max(free.peak_bytes - least, 0.0)
        row: dict[str, Any] = {"budget": budget, "joint": joint(step, target, options, budget)}
        plain = second_stage(search, levels, free, budget)
        row["two-stage"] = facts(plain)
        swept = [plain]
        for pressure in PRESSURES[1:]:
            sharding = shardings[pressure] = first_stage(search, levels, pressure * budget)
            swept.append(second_stage(search, levels, sharding, budget))
        row["swept"] = facts(min((c for c in swept if c is not None), key=lambda c: c.seconds, default=None))
        rows["budgets"][f"{share:g}"] = row
        print(f"{name} @ {target_name} {tuple(shape.values())} | {gib(budget)} | {told(row)}", flush=True)


def least_of(step: planner.Step, target: Any, options: planner.Options) -> float:
    try:
        planner.solve(step, target, 1e6, options, lambda _: None)
    except jaxauto.InfeasibleError as error:
        assert error.least_bytes is not None
        return error.least_bytes * (1 + _SAME)
    raise AssertionError("fits into nothing")


def joint(step: planner.Step, target: Any, options: planner.Options, budget: float) -> dict[str, Any] | None:
    try:
        plan = planner.solve(step, target, budget, options, lambda _: None)
    except jaxauto.InfeasibleError:
        return None
    return facts(plan.program.solved.found.best) if plan.program is not None else None


def facts(candidate: Candidate | None) -> dict[str, Any] | None:
    if candidate is None:
        return None
    dropped = sum(kept is not None for kept in candidate.variant.kept)
    return {"seconds": candidate.seconds, "bytes": candidate.peak_bytes, "level": candidate.level, "blocks recomputing": dropped}


def told(row: dict[str, Any]) -> str:
    return ", ".join(f"{kind} {ms(row[kind])}" for kind in ("joint", "two-stage", "swept"))


def ms(answer: dict[str, Any] | None) -> str:
    return "no plan" if answer is None else f"{1e3 * answer['seconds']:.2f}"


def compared(row: dict[str, Any], other: str) -> str | float:
    """Seconds of the other / seconds of joint, or who has no plan."""
    mine, theirs = row["joint"], row[other]
    if mine is None or theirs is None:
        return "neither fits" if mine is theirs else "only joint fits" if theirs is None else f"only {other} fits"
    return theirs["seconds"] / mine["seconds"]


def head(found: dict[str, Any]) -> list[str]:
    """Where joint wins, by how much, and where not."""
    lines = ["# Sharding and rematerialisation: jointly against in two stages", "", "Made by scripts/bench_joint.py: see there.", ""]
    for other in ("two-stage", "swept"):
        every = [(rows, share, compared(row, other)) for rows in found.values() for share, row in rows["budgets"].items()]
        ratios = [r for *_, r in every if isinstance(r, float)]
        only = sum(r == "only joint fits" for *_, r in every)
        better = [r for r in ratios if r > 1 + _SAME]
        worse = [f"{rows['case']} {label_of(rows)} at {s}: {loss(r)}" for rows, s, r in every if is_worse(r)]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
        text = f"- Against {other}: {len(every)} budgets; only joint fits in {only}; of {len(ratios)} where both fit joint is better in"
        text += f" {len(better)}, geometric mean of {other} / joint {mean:.3f}, largest {max(ratios, default=1.0):.3f}."
        lines.append(f"{text} Joint worse: {'; '.join(worse) or 'nowhere'}.")
    leaner = [f"{rows['case']} {label_of(rows)}" for rows in found.values() if is_leaner(rows)]
    lines.append(
        f"- Plans with less memory than the least the planner told of ({len(leaner)} of {len(found)}): {'; '.join(leaner) or 'none'}."
    )
    keys = [f"{name} @ {target} {'x'.join(map(str, shape.values()))}" for target, shape in MESHES for name in CASES]
    lines.append(f"- Not run: {'; '.join(k for k in keys if k not in found) or 'nothing'}.")
    return [*lines, ""]


def is_leaner(rows: dict[str, Any]) -> bool:
    """Whether some answer needs less than what was told to be the least."""
    answers = [row[kind] for row in rows["budgets"].values() for kind in ("joint", "two-stage", "swept")]
    return any(a["bytes"] < rows["least bytes"] * (1 - 1e-3) for a in answers if a is not None)


def is_worse(ratio: str | float) -> bool:
    return ratio < 1 - _SAME if isinstance(ratio, float) else ratio not in ("neither fits", "only joint fits")


def loss(ratio: str | float) -> str:
    return ratio if isinstance(ratio, str) else f"{1 / ratio - 1:+.2%}"


def label_of(rows: dict[str, Any]) -> str:
    return f"{rows['target'].split(':')[0]} {'x'.join(map(str, rows['mesh'].values()))}"


def table(found: dict[str, Any]) -> str:
    """results/joint.md."""
    lines = head(found)
    lines += ["| step | mesh | no pressure GiB | ms | budget GiB (share) | joint ms | two-stage ms | / joint | swept ms | / joint |"]
    lines += ["|---|" + "---|" * 9]
    for rows in found.values():
        for share, row in rows["budgets"].items():
            cells = [rows["case"], label_of(rows), f"{rows['free bytes'] / 2**30:.2f}", f"{1e3 * rows['free seconds']:.2f}"]
            cells += [f"{row['budget'] / 2**30:.2f} ({share})", ms(row["joint"])]
            for other in ("two-stage", "swept"):
                ratio = compared(row, other)
                cells += [ms(row[other]), ratio if isinstance(ratio, str) else f"{ratio:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this; several parted by commas")
    parser.add_argument("--renew", action="store_true", help="solve anew what is there already")
    parser.add_argument("--out", type=Path, default=RESULTS / "joint.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    save: Callable[[], Any] = lambda: (  # noqa: E731
        options.out.write_text(json.dumps(found, indent=1) + "\n"),
        options.out.with_suffix(".md").write_text(table(found)),
    )
    for target, shape in MESHES:
        for name in CASES:
            key = f"{name} @ {target} {'x'.join(map(str, shape.values()))}"
            if any(part in name for part in options.only.split(",")) and (options.renew or key not in found):
                rows: dict[str, Any] = {}
                run(name, target, shape, rows)
                found[key] = rows
                save()
    save()


if __name__ == "__main__":
    main()
