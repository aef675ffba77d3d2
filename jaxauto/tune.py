"""Judging several plans by the compiler: the planner's best, different candidates are compiled, and its favourite is kept.

Candidates are the answers of the search and, around the best of them, those that keep a little more or less for the backward pass.

The judge is the roofline of the compiled schedule plus collectives (``cost/schedule.py``): it sees what was fused, what the partitioner
added, and what the compiler recomputes near the memory limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from jaxauto import aot, hlo
from jaxauto.errors import TargetError
from jaxauto.plan import Plan
from jaxauto.reserve import between, has_room
from jaxauto.solve.search import Candidate
from jaxauto.strategies import WHOLE
from jaxauto.verify import compile_plan, schedule_of


def tuned(plan: Plan, budget: float, options: Any, progress: Callable[[str], None]) -> Plan:
    """``plan``, or the one among the ``options.tune`` best candidates whose compiled schedule is fastest within ``budget`` bytes.

    Raises:
      TargetError: no compiler for the target, if ``options.certify`` is True; else the plan says so in its notes.
    """
    from jaxauto.planner import plan_of  # the planner tunes, and tuning makes plans

    judged: list[tuple[float, int, Plan]] = []
    told: list[str] = []
    chosen = candidates(plan, budget, options)
    for number, candidate in enumerate(chosen):
        progress(f"tuning: compiling plan {number + 1} of {len(chosen)}")
        rival = plan_of(plan, candidate, budget, options)
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
    best = min(judged, key=lambda row: row[:2])[2]
    best.notes = (*best.notes, f"tuned by the compiler's schedule: {'; '.join(told)}")
    return best


def candidates(plan: Plan, budget: float, options: Any) -> list[Candidate]:
    """What to compile, the fastest first: the plan's own answer, the search's, those around the best; those that should fit come first."""
    solved = plan._bound().solved
    found = different((solved.found.best, *solved.fitting, *between(solved, options, options.tune)), math.inf)
    fitting = [c for c in found if c is solved.found.best or has_room(c, budget)]
    return (fitting + [c for c in found if all(c is not other for other in fitting) and c.peak_bytes <= budget])[: options.tune]


def different(found: Iterable[Candidate], count: float) -> list[Candidate]:
    """The ``count`` fastest that are not alike: that cut or keep something else. Axes that always split together are one axis."""
    chosen: dict[tuple, Candidate] = {}
    for c in sorted(found, key=lambda c: (c.seconds, c.peak_bytes)):
        key = _cut(c), c.variant.level
        if len(chosen) < count:
            chosen.setdefault(key, c)
    return list(chosen.values())


def _cut(candidate: Candidate) -> tuple:
    """Into how many pieces each decision cuts each dimension."""
    sizes, found = candidate.model.mesh.sizes, []
    for table, chosen in zip(candidate.model.states, candidate.x, strict=True):
        pieces: dict[int, int] = {}
        for axis, d in enumerate(table[chosen]):
            if d != WHOLE:
                pieces[int(d)] = pieces.get(int(d), 1) * sizes[axis]
        found.append(tuple(sorted(pieces.items())))
    return tuple(found)


def _name(plan: Plan) -> str:
    recomputed = sum(d.action == "recomputed" for d in plan.remat)
    return f"{'x'.join(map(str, plan.mesh.shape.values()))}{f', {recomputed} recomputed' if recomputed else ''}:"
