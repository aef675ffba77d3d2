r"""The gap closed: the best multipliers, the states that can still be part of a better answer, and a MILP over those.

With multipliers λ ≥ 0 on memory rows and μ ∈ [0, 1] on overlap, D(λ, μ) of ``search.py`` is a lower bound, concave in both. The best one is
found by column generation (Dantzig and Wolfe, 1960). The master mixes the answers seen so far,                     ``_master``

    min t   t ≥ Σ_k w_k (C_k + εP_k + K_k),  t ≥ Σ_k w_k (P_k + εC_k + K_k),  Σ_k w_k bytes_r,k ≤ M,  Σ_k w_k = 1

its dual values are the next (λ, μ), smoothed towards the best so far (Wentges, 1997), and elimination the next answer.   ``raise_bound``
A state whose least cost under (λ, μ) is above the T of an answer is part of no better one, and goes.              ``survivors``
What is left is smaller: both steps again, then the MILP.                                                          ``tighten``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog

from jaxauto.solve.dominance import undominated
from jaxauto.solve.eliminate import eliminate, least_with, nearest
from jaxauto.solve.milp import MilpSolution, Status, solve_milp
from jaxauto.solve.problem import RESOURCES, Problem

TOLERANCE = 1e-6  # relative: nearer than this is equal
WORK_PER_SECOND = 12_000_000  # of the time limit, entries of tables made: a limit in work gives the same plan on a busy machine
_MILP_WORK = 10_000  # entries of tables that a MILP takes as long as, for each pair of states
_ROUNDS = 12  # of column generation
_GAIN = 1e-3  # relative: a round that raises the bound by less is stuck
_STUCK = 2
_PASSES = 3  # of multipliers, then survivors
_SMOOTH = 0.6  # of the best multipliers in the next ones
_WIDE = 4_000_000  # entries of a table where bounds matter most
_NODES = 2000  # of its tree
_SECONDS = 10.0  # for one MILP
_HAIR = 2e-6  # HiGHS keeps to a row within 1e-6
_CUTS = 8  # MILPs, each with the peaks of the answers before as further rows
_PATIENCE = 1e4  # seconds of a step that all of its memory is worth where the least memory is sought
_OVERDRAFT = 100.0  # what the master pays for memory beyond the budget: times T for the whole budget once more

Judge = Callable[[np.ndarray], float]  # an answer → its T if it fits, else inf; adds its peak to the rows of the problem


@dataclass
class Multipliers:
    """``mu`` and ``prices`` (memory row → seconds per byte), and the lower bound on T that they give."""

    mu: float = 1.0
    prices: dict[int, float] = field(default_factory=dict)
    bound: float = -np.inf


@dataclass
class Tightened:
    """``bound``: on T for all answers of the problem; ``price``: seconds per byte of memory, where the bound by multipliers is highest;
    ``milp``: the last one asked, if any; ``left``: states that could still be better."""

    bound: float
    price: float = 0.0
    milp: MilpSolution | None = None
    left: int = 0


@dataclass
class Effort:
    """What may still be done: entries of tables that are left; over as well when it is ``late``."""

    left: float
    late: Callable[[], bool]

    def spent(self, work: float) -> None:
        self.left -= work

    @property
    def over(self) -> bool:
        return self.left <= 0 or self.late()


def tighten(problem: Problem, budget_bytes: float, start: list[np.ndarray], judge: Judge, upper: float, effort: Effort) -> Tightened:
    """Raise the lower bound of ``problem`` until it meets the best answer, and find that.

    Args:
      start: answers to begin with.
      judge: see ``Judge``; what it accepts lowers ``upper``.
      upper: T of the best answer known, to this problem or to another that competes with it.
    """
    return _Tightening(problem, budget_bytes, judge, upper, effort).run(start)


class _Tightening:
    """``states``: what is left of each variable of ``problem``; ``small``: the problem of choosing among those."""

    def __init__(self, problem: Problem, budget_bytes: float, judge: Judge, upper: float, effort: Effort):
        self.problem, self.budget_bytes, self.judge, self.upper, self.effort = problem, budget_bytes, judge, upper, effort
        self.states = [np.arange(n) for n in problem.sizes]
        self.small = problem.restricted(self.states)
        self.found = Tightened(-np.inf)

    def judged(self, x: np.ndarray) -> float:
        """T of an answer of the small problem, inf where it does not fit; its peak joins the rows."""
        seconds = self.judge(np.array([s[k] for s, k in zip(self.states, x, strict=True)]))
        self.small.rows += [row.restricted(self.states) for row in self.problem.rows[len(self.small.rows) :]]
        self.upper = min(self.upper, seconds)
        return seconds

    def run(self, start: list[np.ndarray]) -> Tightened:
        """See ``tighten``."""
        seeds = start
        for _ in range(_PASSES):
            best = raise_bound(self.small, self.budget_bytes, seeds, self.judged, self.upper, self.effort)
            kept = survivors(self.small, self.budget_bytes, best, self.upper, self.effort)
            self.found.bound, self.found.price = max(self.found.bound, min(best.bound, self.upper)), sum(best.prices.values())
            if self.found.bound >= self.upper * (1 - TOLERANCE) or self.effort.over:
                return self.found
            if any(not len(k) for k in kept):
                self.found.bound = self.upper
                return self.found
            before = sum(self.small.sizes)
            self.states = [s[k] for s, k in zip(self.states, kept, strict=True)]
            self.small, seeds = self.problem.restricted(self.states), []
            if sum(self.small.sizes) > 0.9 * before:
                break
        self.found.left = sum(self.small.sizes)
        self.finish()
        return self.found

    def finish(self) -> None:
        """The MILP over what is left, asked again with a further row, or a hair less room, as long as its answer does not fit."""
        work = _MILP_WORK * _pair_entries(self.small)
        room = self.budget_bytes
        for _ in range(_CUTS):
            if self.effort.late() or work > self.effort.left:
                return
            self.effort.spent(work)
            needed = undominated(self.small)
            answer = solve_milp(self.small, room, needed, time_limit=_SECONDS, relative_gap=TOLERANCE / 10, node_limit=_NODES)
            self.found.milp = answer
            if answer.status is Status.INFEASIBLE:
                self.found.bound = self.upper
                return
            rows = len(self.small.rows)
            fits = answer.x is not None and self.judged(answer.x) < np.inf
            self.found.bound = max(self.found.bound, min(answer.bound, self.upper))
            if answer.x is None or fits:
                return
            if len(self.small.rows) == rows:
                room *= 1 - _HAIR


def _pair_entries(problem: Problem) -> int:
    keys = {k for tables in problem.pairs.values() for k in tables}
    return sum(problem.sizes[i] * problem.sizes[j] for i, j in keys)


def survivors(problem: Problem, budget_bytes: float, at: Multipliers, upper: float, effort: Effort) -> list[np.ndarray]:
    """For each variable the states that an answer with T < ``upper`` can have; ``at`` learns of a better bound."""
    least, bound, work = least_with(*problem.priced(at.mu, at.prices), _WIDE)
    effort.spent(2 * work)
    constant = priced_room(problem, budget_bytes, at.prices)
    at.bound = max(at.bound, bound + constant)
    return [np.nonzero(cost + constant <= upper * (1 - TOLERANCE / 2))[0] for cost in least]


def raise_bound(problem: Problem, budget_bytes: float, start: list[np.ndarray], judge: Judge, upper: float, effort: Effort) -> Multipliers:
    """The multipliers with the best bound, by column generation; every answer on the way is judged."""
    answers = list(start)
    best = Multipliers()
    stuck = 0
    for number in range(_ROUNDS):
        if not answers:
            at, ceiling = Multipliers(), np.inf
        else:
            at, ceiling = _master(problem, budget_bytes, answers)
        if ceiling <= best.bound * (1 + TOLERANCE) or best.bound >= upper * (1 - TOLERANCE) or (number and effort.over):
            break
        if best.bound > -np.inf:
            at = _between(best, at, _SMOOTH if number % 4 else 0.0)
        answer = eliminate(*problem.priced(at.mu, at.prices))
        effort.spent(answer.work)
        at.bound = answer.bound + priced_room(problem, budget_bytes, at.prices)
        upper = min(upper, judge(answer.x))
        answers.append(answer.x)
        stuck = 0 if at.bound > best.bound * (1 + _GAIN) else stuck + 1
        if at.bound > best.bound:
            best = at
        if stuck > _STUCK:
            break
    return best


def priced_room(problem: Problem, budget_bytes: float, prices: dict[int, float]) -> float:
    """Σ_r λ_r (base_r − M): the part of D(λ, μ) that no decision changes."""
    return sum(price * (problem.rows[r].base - budget_bytes) for r, price in prices.items())


def _between(a: Multipliers, b: Multipliers, share: float) -> Multipliers:
    rows = {*a.prices, *b.prices}
    prices = {r: share * a.prices.get(r, 0.0) + (1 - share) * b.prices.get(r, 0.0) for r in rows}
    return Multipliers(share * a.mu + (1 - share) * b.mu, {r: p for r, p in prices.items() if p > 0})


def _master(problem: Problem, budget_bytes: float, answers: list[np.ndarray]) -> tuple[Multipliers, float]:
    """The multipliers of the best mixture of ``answers``, and its T: no multipliers give a better bound than the best mixture of all."""
    resources = {r: np.array([problem.resource(r, x) for x in answers]) for r in RESOURCES}
    scale = max(float(problem.total_seconds(resources).min()), 1e-30)
    rows = [r for r in range(len(problem.rows)) if np.isfinite(budget_bytes)]
    used = np.array([[problem.rows[r].bytes_at(x) / budget_bytes for x in answers] for r in rows]).reshape(len(rows), len(answers))
    n, m = len(answers), len(rows)
    upper = np.zeros((2 + m, n + 2))  # weights, t, overdraft
    upper[:2, n] = -1.0
    for k, mu in enumerate((1.0, 0.0)):
        upper[k, :n] = sum(weight * resources[r] for r, weight in problem.weights(mu).items()) / scale
    upper[2:, :n], upper[2:, n + 1] = used, -1.0
    cost = np.zeros(n + 2)
    cost[n], cost[n + 1] = 1.0, _OVERDRAFT
    one = np.concatenate([np.ones(n), [0.0, 0.0]])[None]
    result = linprog(cost, upper, np.concatenate([[0.0, 0.0], np.ones(m)]), one, [1.0], method="highs")
    dual = np.maximum(-result.ineqlin.marginals, 0.0)
    prices = {r: dual[2 + k] * scale / budget_bytes for k, r in enumerate(rows) if dual[2 + k] > 0}
    return Multipliers(float(np.clip(dual[0], 0.0, 1.0)), prices), float(result.fun) * scale


def near(problem: Problem, x: np.ndarray, count: int) -> list[np.ndarray]:
    """States for a MILP: those that cost least in time and memory next to ``x``, and the leanest."""
    prices = {r: problem.seconds(x) / max(row.bytes_at(x), 1.0) for r, row in enumerate(problem.rows)}
    chosen = nearest(*problem.priced(1.0, prices), x, count)
    for row in problem.rows:
        for i, vector in row.vectors.items():
            chosen[i] = np.union1d(chosen[i], np.argsort(vector, kind="stable")[:2])
    return chosen


def least_bytes(problem: Problem, answers: list[np.ndarray]) -> np.ndarray:
    """The answer with the least bytes, rows weighted as they bind the best mixture of ``answers``; of alike ones a fast one."""
    rows = problem.rows
    weights = np.full(len(rows), 1.0 / max(len(rows), 1))
    if answers:
        used = np.array([[row.bytes_at(x) for x in answers] for row in rows])
        scale = used.max()
        n = len(answers)
        upper = np.concatenate([used / scale, -np.ones((len(rows), 1))], 1)
        one = np.concatenate([np.ones(n), [0.0]])[None]
        result = linprog(np.concatenate([np.zeros(n), [1.0]]), upper, np.zeros(len(rows)), one, [1.0], method="highs")
        weights = 0.9 * np.maximum(-result.ineqlin.marginals, 0.0) + 0.1 * weights
    seconds = max(problem.seconds(x) for x in answers) if answers else problem.seconds(np.zeros(len(problem.sizes), int))
    price = _PATIENCE * seconds / max(sum(w * row.bytes_at(np.zeros(len(problem.sizes), int)) for w, row in zip(weights, rows)), 1.0)
    return eliminate(*problem.priced(1.0, {r: price * w for r, w in enumerate(weights)})).x
