"""Room for the gaps in a compiler's heap, for plans that the compiler does not check.

The planner knows how many bytes are alive at once; a compiler also has to place them. XLA:TPU leaves gaps of about twice the largest array
that is no loop's stack (of a language model: the logits in float32): in 18 schedules of train steps for v5e and v5p 0.4 to 2.9 times, the
median is 1.9. XLA:GPU leaves none (0.5 % of the memory at most in 11 schedules).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxauto.constraints import allowed_states
from jaxauto.errors import InfeasibleError
from jaxauto.finer import finer
from jaxauto.plan import Plan
from jaxauto.solve.search import QUICK, Candidate

GAPS = {"tpu": 1.9}  # largest arrays
_FINER = 24  # answers between the levels that are looked at
# Of a step's time that room may take: what is over the budget by its gaps mostly runs, in the share of memory left out of it.
_DEAREST = 0.03


def heap_gaps(candidate: Candidate) -> float:
    """Bytes that the compiler's heap may take beyond those alive at once."""
    model = candidate.model
    values, b = model.variant.rewritten.graph.values, model.buffers
    sizes = model.buffer_sizes(candidate.x)
    producers = (values[int(number)].producer for number in b.ids)
    passing = (size for size, node in zip(sizes, producers, strict=True) if node is not None and not node.bodies)
    return GAPS.get(model.chip.platform, 0.0) * float(max(passing, default=0.0))


def has_room(candidate: Candidate, budget: float) -> bool:
    """Whether it fits with its gaps."""
    return candidate.peak_bytes + heap_gaps(candidate) <= budget


def with_room(plan: Plan, budget: float, options: Any, progress: Callable[[str], None]) -> Plan:
    """``plan``, or the fastest found that leaves room within ``budget`` bytes for gaps in the heap.

    Where none does, or only one that is much slower, ``plan`` with a note.
    """
    from jaxauto.planner import gib, solve  # the planner makes room, and making room plans again

    solved = plan._bound().solved
    if has_room(solved.found.best, budget):
        return plan
    gaps = heap_gaps(solved.found.best)
    told = "certify=True has the compiler say what it needs"
    found = _with_room(plan, budget, options)
    if found is None and len(solved.remat.graph.values) <= QUICK:
        progress("planning again, with room for gaps in the compiler's heap")
        with contextlib.suppress(InfeasibleError):
            found = _with_room(solve(solved.step, solved.target, budget - gaps, options, progress), budget, options)
    slower = found.estimate.step_time / plan.estimate.step_time - 1 if found else math.inf
    if found is None or slower > _DEAREST:
        note = f"the compiler's heap may take {gib(gaps)} more than is alive at once, and may not fit: {told}"
        return replace(plan, notes=(*plan.notes, note))
    room = budget - found.estimate.peak_memory
    note = f"{gib(room)} of the budget are left for gaps in the compiler's heap, which takes {slower:.1%} of time by the estimate: {told}"
    return replace(found, budget_bytes=budget, notes=(*found.notes, note))


def _with_room(plan: Plan, budget: float, options: Any) -> Plan | None:
    """The fastest answer with room that is known of when ``plan`` is."""
    from jaxauto.planner import plan_of

    pool = [c for c in (*plan._bound().solved.fitting, *between(plan, options, _FINER)) if has_room(c, budget)]
    return plan_of(plan, min(pool, key=lambda c: (c.seconds, c.peak_bytes)), budget, options) if pool else None


def between(plan: Plan, options: Any, count: int) -> list[Candidate]:
    """Answers near the plan's own that keep a little more or less, see ``finer.py``."""
    solved = plan._bound().solved
    best = solved.found.best
    return finer(solved, best, allowed_states(options.constraints, solved.step.traced, solved.step.groups, best.model.mesh), count)
