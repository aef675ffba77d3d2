"""The gap between an answer and the bound of its search closed, as far as there is work and time for it.

First level by level (``tighten.py``), those around the best answer too (``around.py``), then by a MILP over the states near it.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from jaxauto.solve.around import Tries, look_around
from jaxauto.solve.candidate import Found
from jaxauto.solve.milp import solve_milp
from jaxauto.solve.model import Model
from jaxauto.solve.tighten import TOLERANCE, Effort, near, tighten

if TYPE_CHECKING:
    from jaxauto.solve.search import Search

_NEAR = 6  # states of each variable that the MILP may choose from
_GAP = 0.005  # relative gap under which no MILP is asked
_SMALL = 300  # states in all: up to that the optimum is sought even where the gap is less


def finish(search: Search, found: Found, budget_bytes: float) -> None:
    """Both, for ``found.best``: levels first; the MILP where there is a gap and time left."""
    assert found.best is not None
    started = time.monotonic()
    close(search, found, budget_bytes)
    tries = Tries(search.remat)
    while look_around(search, found, budget_bytes, tries):
        close(search, found, budget_bytes)
    found.seconds_spent["close"] = time.monotonic() - started
    started = time.monotonic()
    left = search.deadline - started
    if found.bound >= found.best.seconds * (1 - _GAP) or left < 1:
        return
    behind = found.best.seconds >= search.rival
    _milp(search, found, budget_bytes, left)
    if behind:
        close(search, found, budget_bytes)  # it may be ahead now
    found.seconds_spent["milp"] = time.monotonic() - started


def close(search: Search, found: Found, budget_bytes: float) -> None:
    """Every level that could hold something better: its bound raised, its best answer found (``tighten.py``).

    Not behind a rival, and not where the best answer is near its bound.
    """
    if found.best is not None:
        gap, states = 1 - found.bound / found.best.seconds, sum(found.best.model.problem.sizes)
        if found.best.seconds >= search.rival or (gap <= _GAP and states > _SMALL):
            return
    effort = Effort(search.work, search.out_of_time)
    for number in sorted(search.bounds, key=lambda n: search.bounds[n]):
        model, upper = search.models[number], found.best.seconds if found.best else search.rival
        if search.bounds[number] >= upper * (1 - TOLERANCE) or effort.over:
            continue

        def judge(x: np.ndarray, model: Model = model, number: int = number) -> float:
            candidate = search.candidate(model, x, number)
            if candidate.peak_bytes < found.leanest.peak_bytes:
                found.leanest = candidate
            if candidate.peak_bytes > budget_bytes:
                return math.inf
            found.fitting.append(candidate)
            if found.best is None or candidate.seconds < found.best.seconds:
                found.best = candidate
            return candidate.seconds

        start = [x for x in search.answers[number] if len(x) == len(model.problem.sizes)]
        tightened = tighten(model.problem, budget_bytes, start, judge, upper, effort)
        search.bounds[number] = max(search.bounds[number], tightened.bound)
        search.price = tightened.price or search.price
        if tightened.milp is not None:
            found.constraints, found.status = tightened.milp.constraints, tightened.milp.status.value
    found.bound = min(search.bounds.values())


def _milp(search: Search, found: Found, budget_bytes: float, seconds: float) -> None:
    assert found.best is not None
    best, problem = found.best, found.best.model.problem
    for _ in range(2):
        answer = solve_milp(problem, budget_bytes, near(problem, best.x, _NEAR), seconds / 2)
        found.variables = max(found.variables, answer.variables)
        found.constraints, found.status = answer.constraints, answer.status.value
        if answer.x is None:
            return
        better = search.candidate(best.model, answer.x, best.level)
        if better.peak_bytes <= budget_bytes:
            found.best = min(best, better, key=lambda c: c.seconds)
            return
