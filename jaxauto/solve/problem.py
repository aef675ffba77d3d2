"""The decisions as named arrays: no jax, no graph. Built by ``model.py``, solved by ``eliminate.py`` and ``milp.py``.

Variables x_i ∈ {0 … sizes[i] − 1}: the state of a group, or the strategy of an operation.

    minimise   T = max(C(x), P(x)) + ε min(C(x), P(x)) + K(x)                                         ``Problem.seconds``
    where      R(x) = Σ_i unary_i[x_i] + Σ_ij pairs_ij[x_i, x_j]      for each resource R = C, P, K   ``Problem.resource``
    subject to Σ_i rows_r,i[x_i] + Σ_ij rows_r,ij[x_i, x_j] ≤ budget − base_r     for each memory row r     ``MemoryRow``

C: seconds of computation. P: seconds of communication that can be prefetched or deferred behind it (weight all-gathers, gradient
reduce-scatters). K: seconds of communication that computation waits for. ε: hidden communication is never hidden whole: it begins late, or
much of it comes at once. T is the larger of C + εP + K and P + εC + K, in the dual μ of the first and 1 − μ of the second at the best
μ ∈ [0, 1].
A row is a position of the program that can be the memory peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

RESOURCES = ("compute", "prefetch", "blocking")


@dataclass(eq=False)
class MemoryRow:
    """Bytes alive at one position: ``base + Σ_i vectors[i][x_i] + Σ_ij pairs[i, j][x_i, x_j]``.

    ``vectors``: buffers. ``pairs``, i < j: arrays resharded for the operation at the position, which depend on both ends.
    ``crowded``: if on-chip memory is full there and the rest of what would stay in it is in HBM; not less than that in any case.
    """

    position: int
    base: float
    vectors: dict[int, np.ndarray]
    pairs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    crowded: bool = False

    def bytes_at(self, x: np.ndarray) -> float:
        alive = self.base + sum(float(v[x[i]]) for i, v in self.vectors.items())
        return alive + sum(float(t[x[i], x[j]]) for (i, j), t in self.pairs.items())

    def restricted(self, states: Sequence[np.ndarray]) -> MemoryRow:
        """See ``Problem.restricted``."""
        vectors = {i: v[states[i]] for i, v in self.vectors.items()}
        return replace(self, vectors=vectors, pairs={k: _cut(t, states, *k) for k, t in self.pairs.items()})

    def least_bytes(self) -> float:
        """No answer has less at this position."""
        return self.base + sum(float(v.min()) for v in self.vectors.values()) + sum(float(t.min()) for t in self.pairs.values())


@dataclass(eq=False)
class Problem:
    """See the head of the file. ``unary[resource][i]`` is ``[sizes[i]]``; ``pairs[resource][i, j]``, i < j, is ``[sizes[i], sizes[j]]``."""

    sizes: list[int]
    unary: dict[str, dict[int, np.ndarray]]
    pairs: dict[str, dict[tuple[int, int], np.ndarray]]
    exposed_share: float  # ε
    rows: list[MemoryRow] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @classmethod
    def empty(cls, exposed_share: float) -> Problem:
        return cls([], {r: {} for r in RESOURCES}, {r: {} for r in RESOURCES}, exposed_share)

    def add_variable(self, size: int, name: str) -> int:
        self.sizes.append(size)
        self.names.append(name)
        return len(self.sizes) - 1

    def add_unary(self, resource: str, i: int, table: np.ndarray) -> None:
        old = self.unary[resource].get(i)
        self.unary[resource][i] = table.copy() if old is None else old + table

    def add_pair(self, resource: str, i: int, j: int, table: np.ndarray) -> None:
        """``table[x_i, x_j]``; i == j adds its diagonal."""
        if i == j:
            self.add_unary(resource, i, np.diagonal(table))
            return
        key, table = ((i, j), table) if i < j else ((j, i), table.T)
        old = self.pairs[resource].get(key)
        self.pairs[resource][key] = table.copy() if old is None else old + table

    def resource(self, name: str, x: np.ndarray) -> float:
        total = sum(float(t[x[i]]) for i, t in self.unary[name].items())
        return total + sum(float(t[x[i], x[j]]) for (i, j), t in self.pairs[name].items())

    def seconds(self, x: np.ndarray) -> float:
        """T(x)."""
        return float(self.total_seconds({r: self.resource(r, x) for r in RESOURCES}))

    def total_seconds(self, resources: Mapping[str, Any]) -> Any:
        """T, given C, P and K: numbers, or arrays of one shape with those of several answers."""
        compute, prefetch = resources["compute"], resources["prefetch"]
        return np.maximum(compute, prefetch) + self.exposed_share * np.minimum(compute, prefetch) + resources["blocking"]

    def weights(self, mu: float) -> dict[str, float]:
        """What C, P and K count in the dual at ``mu``: μ(C + εP) + (1 − μ)(P + εC) + K."""
        share = self.exposed_share
        return {"compute": mu + (1.0 - mu) * share, "prefetch": 1.0 - mu + mu * share, "blocking": 1.0}

    def bytes_peak(self, x: np.ndarray) -> float:
        """The largest memory row."""
        return max((row.bytes_at(x) for row in self.rows), default=0.0)

    def restricted(self, states: Sequence[np.ndarray]) -> Problem:
        """The problem of choosing among ``states`` of each variable only."""
        return Problem(
            [len(s) for s in states],
            {r: {i: t[states[i]] for i, t in tables.items()} for r, tables in self.unary.items()},
            {r: {k: _cut(t, states, *k) for k, t in tables.items()} for r, tables in self.pairs.items()},
            self.exposed_share,
            [row.restricted(states) for row in self.rows],
            list(self.names),
        )

    def priced(self, mu: float, prices: dict[int, float]) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
        """Unary and pair tables of the Lagrangian ``weights(mu)`` · (C, P, K) + Σ_r prices[r] · bytes_r (its constant is left out)."""
        weights = self.weights(mu)
        unary = [np.zeros(n) for n in self.sizes]
        for resource, weight in weights.items():
            for i, table in self.unary[resource].items():
                unary[i] = unary[i] + weight * table
        for r, price in prices.items():
            for i, vector in self.rows[r].vectors.items():
                unary[i] = unary[i] + price * vector
        pairs: dict[tuple[int, int], np.ndarray] = {}
        weighted = [(weight, self.pairs[resource]) for resource, weight in weights.items()]
        for weight, tables in weighted + [(price, self.rows[r].pairs) for r, price in prices.items() if price]:
            for key, table in tables.items():
                pairs[key] = pairs[key] + weight * table if key in pairs else weight * table
        return unary, pairs


def _cut(table: np.ndarray, states: Sequence[np.ndarray], i: int, j: int) -> np.ndarray:
    return table[np.ix_(states[i], states[j])]
