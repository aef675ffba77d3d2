"""States that no answer needs: another state of the variable is no worse, whatever the other variables' states are.

T = max(a, b) with a = C + εP + K and b = P + εC + K (``problem.py``). State s of variable i is not needed if there is another, r, with

    u_i[r] − u_i[s] + Σ_j max_t (p_ij[r, t] − p_ij[s, t]) ≤ 0      for a, for b and for each memory row          ``undominated``

u: unary tables, p: pair tables, t: states of j that are left.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from jaxauto.solve.problem import Problem

_ROUNDING = 1e-12  # of the largest entry: no more than this is no gain

Tables = tuple[dict[int, np.ndarray], dict[tuple[int, int], np.ndarray]]


def undominated(problem: Problem) -> list[np.ndarray]:
    """For each variable the states that are left; an optimum of ``problem``, with the rows that it has, is among them."""
    measures = _measures(problem)
    kept = [np.ones(n, bool) for n in problem.sizes]
    around: dict[int, list[tuple[int, int, np.ndarray]]] = defaultdict(list)
    for number, (_, pairs) in enumerate(measures):
        for (i, j), table in pairs.items():
            around[i].append((number, j, table))
            around[j].append((number, i, table.T))
    changed = True
    while changed:
        changed = False
        for i, mine in enumerate(kept):
            if mine.sum() > 1 and _prune(i, mine, measures, around[i], kept):
                changed = True
    return [np.nonzero(k)[0] for k in kept]


def _measures(problem: Problem) -> list[Tables]:
    """What an answer must not be worse in: a, b, and the bytes of each row."""
    found: list[Tables] = []
    for mu in (1.0, 0.0):
        unary: dict[int, np.ndarray] = {}
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for resource, weight in problem.weights(mu).items():
            for i, table in problem.unary[resource].items():
                unary[i] = unary.get(i, 0.0) + weight * table
            for key, table in problem.pairs[resource].items():
                pairs[key] = pairs.get(key, 0.0) + weight * table
        found.append((unary, pairs))
    return [*found, *((row.vectors, row.pairs) for row in problem.rows)]


def _prune(i: int, mine: np.ndarray, measures: list[Tables], around: list[tuple[int, int, np.ndarray]], kept: list[np.ndarray]) -> bool:
    """Take the states from ``mine`` that another one dominates; whether there were any."""
    n = len(mine)
    better = np.ones((n, n), bool)  # [r, s]: r is nowhere worse than s
    for number, (unary, _) in enumerate(measures):
        own = unary.get(i, np.zeros(n))
        more = own[:, None] - own[None]
        largest = np.abs(own).max()
        for of, j, table in around:
            if of == number:
                left = table[:, kept[j]]
                more = more + (left[:, None] - left[None]).max(-1)
                largest = max(largest, np.abs(left).max())
        better &= more <= _ROUNDING * largest
    np.fill_diagonal(better, val=False)
    before = mine.sum()
    for s in np.nonzero(mine)[0]:
        mine[s] = not (better[:, s] & mine).any()
    return bool(mine.sum() < before)
