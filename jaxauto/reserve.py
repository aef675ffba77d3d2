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
from jaxauto.plan import Plan
from jaxauto.solve.finer import finer
from jaxauto.solve.model import Model
from jaxauto.solve.remat import QUICK
from jaxauto.solve.search import Candidate
from jaxauto.tables import size

GAPS = {"tpu": 1.9}  # largest arrays
_FINER = 24  # answers between the levels that are looked at
# Of a step's time that room may take: what is over the budget by its gaps mostly runs, in the share of memory left out of it.
_DEAREST = 0.03
_AGAIN = 0.005  # that it has to take on the only mesh before that is searched once more, for the budget without the gaps
_NEAR = 1e-3  # of a step's time: an answer with room that is nearer than this to the best one is taken as it is


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


def with_room(solved: Any, budget: float, options: Any, progress: Callable[[str], None]) -> Plan:
    """A plan of the best answer, or of the fastest found that leaves room within ``budget`` bytes for gaps in the heap.

    Where none does, or only one that is much slower, the best one with a note.

    Args:
      solved: what the search knows (``planner.Solved``).
    """
    from jaxauto.planner import plan_for, searched  # the planner makes room, and making room plans again

    best = solved.best
    if has_room(best, budget):
        return plan_for(solved, best, budget, options)
    gaps = heap_gaps(best)
    told = "certify=True has the compiler say what it needs"
    source, found = solved, _with_room(solved, budget, options)
    slower = found.seconds / best.seconds - 1 if found else math.inf
    if slower > (_AGAIN if len(solved.meshes) == 1 else _DEAREST) and solved.remat.quick:
        progress("planning again, with room for gaps in the compiler's heap")
        with contextlib.suppress(InfeasibleError):
            again = searched(solved.step, solved.target, budget - gaps, options, progress, before=solved)
            other = _with_room(again, budget, options)
            if other is not None and (found is None or other.seconds < found.seconds):
                source, found, slower = again, other, other.seconds / best.seconds - 1
    if found is None or slower > _DEAREST:
        plan = plan_for(solved, best, budget, options)
        note = f"the compiler's heap may take {size(gaps)} more than is alive at once, and may not fit: {told}"
    else:
        plan = plan_for(source, found, budget, options)
        left = size(budget - plan.estimate.peak_memory)
        note = f"{left} of the budget are left for gaps in the compiler's heap, which takes {slower:.1%} of time by the estimate: {told}"
    return replace(plan, notes=(*plan.notes, note))


def _with_room(solved: Any, budget: float, options: Any) -> Candidate | None:
    """The fastest answer with room that is known of when the best one is."""
    order = lambda c: (c.seconds, c.peak_bytes)  # noqa: E731
    known = min((c for c in solved.fitting if has_room(c, budget)), key=order, default=None)
    if known is not None and known.seconds <= solved.best.seconds * (1 + _NEAR):
        return known
    pool = [c for c in (*solved.fitting, *between(solved, options, _FINER)) if has_room(c, budget)]
    return min(pool, key=order, default=None)


def between(solved: Any, options: Any, count: int) -> list[Candidate]:
    """Answers near the best one that keep a little more or less (``solve/finer.py``); of a large program a sixth of ``count`` or fewer."""
    best = solved.best
    if len(solved.levels) < 2:  # nothing may be made again, or there is nothing to choose
        return []
    old, variant, values = best.model, best.variant, len(solved.remat.graph.values)
    allowed = allowed_states(options.constraints, solved.step.traced, solved.step.groups, old.mesh)
    known = {c.variant.level for c in solved.fitting if c.model.mesh == old.mesh} | {variant.level}
    if not solved.remat.quick:
        count = min(math.ceil(count / 6), math.ceil(count * QUICK / values))
    return finer(solved.remat, best, lambda v: Model(old.program, v, old.mesh, old.chip, allowed, old.cache), known, count)
