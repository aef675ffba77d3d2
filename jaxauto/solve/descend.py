"""Local search on a Problem: one variable at a time takes the state that is best with the others as they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from jaxauto.solve.problem import RESOURCES, Problem

_ROUNDS = 20
_GAIN = 1e-9  # relative

_Tables = list[tuple[int | None, np.ndarray]]


def descend(problem: Problem, x: np.ndarray, budget_bytes: float = np.inf) -> np.ndarray:
    """An answer that no change of one variable makes faster within ``budget_bytes`` of every row; no slower than ``x``.

    The dual's answers are the best for some fixed share of hidden communication; between two shares lies what this finds.
    """
    x = x.copy()
    tables = {r: _index(problem.unary[r], problem.pairs[r]) for r in RESOURCES}
    rows = problem.rows if np.isfinite(budget_bytes) else []
    weights = [_index(row.vectors, row.pairs) for row in rows]
    total = {r: problem.resource(r, x) for r in RESOURCES}
    used = np.array([row.bytes_at(x) for row in rows])
    for _ in range(_ROUNDS):
        changed = False
        for i, n in enumerate(problem.sizes):
            if n == 1:
                continue
            delta = {r: _each(tables[r].get(i, []), x, n) for r in RESOURCES}
            delta = {r: d - d[x[i]] + total[r] for r, d in delta.items()}
            seconds = problem.total_seconds(delta)
            taken = np.array([_each(weight.get(i, []), x, n) for weight in weights]).reshape(len(rows), n)
            after = used[:, None] + taken - taken[:, x[i]][:, None]
            fits = (after <= np.maximum(budget_bytes, used)[:, None]).all(axis=0)
            best = int(np.argmin(np.where(fits, seconds, np.inf)))
            if seconds[best] < seconds[x[i]] * (1 - _GAIN):
                x[i], changed = best, True
                total = {r: float(d[best]) for r, d in delta.items()}
                used = after[:, best]
        if not changed:
            break
    return x


def _index(unary: Mapping[int, np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]) -> dict[int, _Tables]:
    """Variable → its tables: (None, of itself), or (the other variable, of both, itself first)."""
    found: dict[int, _Tables] = defaultdict(list)
    for i, table in unary.items():
        found[i].append((None, table))
    for (i, j), table in pairs.items():
        found[i].append((j, table))
        found[j].append((i, table.T))
    return found


def _each(tables: _Tables, x: np.ndarray, n: int) -> np.ndarray:
    """What each state of a variable adds, with the others as they are."""
    cost = np.zeros(n)
    for other, table in tables:
        cost += table if other is None else table[:, x[other]]
    return cost
