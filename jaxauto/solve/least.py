"""The least memory that any plan needs, where nothing fits the budget; found the same way whatever that budget was.

For each level the shardings with the least bytes by column generation (``Search.lean``); from the leanest the blocks are mixed, down to the
least that the chain's dynamic programme allows (``chain.least_budget``). Then by bisection between what every answer takes at some position
and the leanest answer: is there one that takes less than the middle (``tighten.py``)?
"""

from __future__ import annotations

import math

import numpy as np

from jaxauto.solve.chain import least_budget, solve_chain
from jaxauto.solve.eliminate import eliminate
from jaxauto.solve.model import Model
from jaxauto.solve.remat import Level
from jaxauto.solve.search import MU, Candidate, Found, Search
from jaxauto.solve.tighten import Effort, tighten

_NEAR = 0.005  # relative: nearer than this to the least is it
_HALVINGS = 8
_MIXTURES = 4  # of blocks that are tried for one sharding
_WORK = 0.2  # of the search's, for all questions together


def least_memory(search: Search, levels: list[Level], found: Found, budget_bytes: float) -> None:
    """Make ``found.leanest`` the leanest candidate of all levels and their mixtures, and the best one if it fits after all."""
    least = _Least(search, [*levels, *search.away(levels), *search.nested(levels)])
    least.lean()
    least.mix()
    least.halve()
    if least.best is not None and least.best.peak_bytes < found.leanest.peak_bytes:
        found.leanest = least.best
    if found.leanest.peak_bytes <= budget_bytes:
        found.best, found.bound = found.leanest, least.bound()
        found.fitting.append(found.leanest)


class _Least:
    def __init__(self, search: Search, levels: list[Level]):
        self.search, self.levels = search, levels
        self.models = [search.model(search.remat.variant(level)) for level in levels]
        self.answers: list[list[np.ndarray]] = [[] for _ in levels]
        self.best: Candidate | None = None
        self.effort = Effort(_WORK * search.work, search.out_of_time)

    def judged(self, candidate: Candidate) -> Candidate:
        if self.best is None or candidate.peak_bytes < self.best.peak_bytes:
            self.best = candidate
        return candidate

    def lean(self) -> None:
        for number, model in enumerate(self.models):
            if number and self.search.out_of_time():
                return
            candidate = self.judged(self.search.lean(model, number, 0.0))
            self.answers[number].append(candidate.x)

    def mix(self) -> None:
        """Blocks that keep unalike, with the leanest sharding: the chain's least memory, and some more, as its peaks are estimates."""
        base = self.best
        if base is None or (len(self.search.remat.blocks) < 2 and not self.search.remat.splittable):
            return
        for splitting in self.search.mixer.splitting(self.levels):
            options = self.search.mixer.options(base, self.levels, splitting=splitting)
            low = least_budget(options)
            high = max(low, sum(o[base.level].kept_bytes for o in options) + max(o[base.level].peak_bytes for o in options))
            for share in np.linspace(0, 1, _MIXTURES if self.search.remat.quick else 1):
                answer = solve_chain(options, (low + share * (high - low)) * (1 + 1e-9))
                if answer is not None and not self.search.out_of_time():
                    self.judged(self.search.mixer.mixture(base, options, answer.choice))

    def halve(self) -> None:
        """Between what all answers take and the leanest one: is there less than the middle?"""
        low = min(max(row.least_bytes() for row in model.problem.rows) for model in self.models if model.problem.rows)
        for _ in range(_HALVINGS):
            assert self.best is not None
            high = self.best.peak_bytes
            if high <= low * (1 + _NEAR) or self.effort.over:
                return
            goal = (low + high) / 2
            if not self._below(goal):
                low = goal

    def _below(self, goal: float) -> bool:
        assert self.best is not None
        for number, model in enumerate(self.models):
            if not self.answers[number] or any(row.least_bytes() > goal for row in model.problem.rows):
                continue

            def judge(x: np.ndarray, model: Model = model, number: int = number) -> float:
                candidate = self.judged(self.search.candidate(model, x, number))
                return candidate.seconds if candidate.peak_bytes <= goal else math.inf

            def done() -> bool:
                assert self.best is not None
                return self.best.peak_bytes <= goal or self.effort.over

            asked = Effort(self.effort.left, done)
            tighten(model.problem, goal, list(self.answers[number]), judge, math.inf, asked)
            self.effort.left = asked.left
            if self.best.peak_bytes <= goal:
                return True
        return False

    def bound(self) -> float:
        """On T, without regard to memory, over all levels and the answer found."""
        models = [*self.models, *([self.best.model] if self.best else [])]
        return min(max(eliminate(*model.problem.priced(mu, {})).bound for mu in MU) for model in models)
