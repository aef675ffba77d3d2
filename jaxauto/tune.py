"""Judging several plans by the compiler: the planner's best, different candidates are compiled, and its favourite is kept.

The judge is the roofline of the compiled schedule plus collectives (``cost/schedule.py``): it sees what was fused, what the partitioner
added, and what the compiler recomputes near the memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from jaxauto import aot, hlo
from jaxauto.errors import TargetError
from jaxauto.plan import Plan
from jaxauto.solve.search import Candidate
from jaxauto.verify import compile_plan, schedule_of


def tuned(plan: Plan, budget: float, options: Any, progress: Callable[[str], None]) -> Plan:
    """``plan``, or the one among the ``options.tune`` best candidates whose compiled schedule is fastest within ``budget`` bytes.

    Raises:
      TargetError: no compiler for the target, if ``options.certify`` is True; else the plan says so in its notes.
    """
    judged: list[tuple[float, int, Plan]] = []
    told: list[str] = []
    for number, candidate in enumerate(different(plan._bound().solved.fitting, options.tune)):
        progress(f"tuning: compiling plan {number + 1} of {options.tune}")
        rival = _plan_of(plan, candidate, budget, options)
        try:
            compilation = compile_plan(rival)
        except TargetError as error:
            if options.certify is True:
                raise
            return replace(plan, notes=(*plan.notes, f"not tuned: {error}"))
        except aot.CompilerFailure as error:
            told.append(f"{_name(rival)} failed ({str(error).splitlines()[0][:80]})")
            continue
        if compilation.device_bytes > budget:
            told.append(f"{_name(rival)} needs {compilation.device_bytes / 2**20:,.0f} MiB")
            continue
        seconds = schedule_of(rival, hlo.parse(compilation.text)).total_seconds
        told.append(f"{_name(rival)} {seconds * 1e3:.3f} ms (estimated {rival.estimate.step_time * 1e3:.3f})")
        judged.append((seconds, number, rival))
    if not judged:
        return replace(
            plan, notes=(*plan.notes, f"not tuned: none of the candidates could be compiled within the budget: {'; '.join(told)}")
        )
    chosen = min(judged, key=lambda row: row[:2])[2]
    chosen.notes = (*chosen.notes, f"tuned by the compiler's schedule: {'; '.join(told)}")
    return chosen


def different(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """The ``count`` fastest that are not alike: one of each mesh and rematerialisation first, then others of another time and memory."""
    ordered = sorted(candidates, key=lambda c: (c.seconds, c.peak_bytes))
    kinds: dict[tuple, Candidate] = {}
    points: dict[tuple, Candidate] = {}
    for c in ordered:
        kinds.setdefault((c.model.mesh.sizes, c.variant.kept, c.variant.offloaded), c)
        points.setdefault((c.model.mesh.sizes, f"{c.seconds:.6e}", f"{c.peak_bytes:.6e}"), c)
    chosen = list(kinds.values())[:count]
    chosen += [c for c in points.values() if c not in chosen][: count - len(chosen)]
    return sorted(chosen, key=lambda c: (c.seconds, c.peak_bytes))


def _plan_of(plan: Plan, candidate: Candidate, budget: float, options: Any) -> Plan:
    from jaxauto.planner import build_plan  # the planner tunes, and tuning makes plans

    solved = plan._bound().solved
    if candidate is solved.found.best:
        return plan
    return build_plan(replace(solved, found=replace(solved.found, best=candidate)), candidate, budget, options)


def _name(plan: Plan) -> str:
    recomputed = sum(d.action == "recomputed" for d in plan.remat)
    return f"{'x'.join(map(str, plan.mesh.shape.values()))}{f', {recomputed} recomputed' if recomputed else ''}:"
