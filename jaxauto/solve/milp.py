r"""The Problem as a mixed-integer linear programme, solved by HiGHS (scipy.optimize.milp).

    minimise    T                                                                                     ``_objective``
    T ≥ C + εP + K,  T ≥ P + εC + K              C, P, K: compute, prefetch, blocking seconds         ``_time_rows``
    Σ_s x[i,s] = 1                               one state for each variable                          ``_choice_rows``
    Σ_t y[i,j,s,t] = x[i,s]                      a pair of states only where both are chosen          ``_pair_rows``
    Σ_s y[i,j,s,t] = x[j,t]                                                                           ``_pair_rows``
    Σ_i Σ_s rows_r,i[s] x[i,s] + Σ_ij Σ_st rows_r,ij[s,t] y[i,j,s,t] ≤ budget − base_r                ``_memory_rows``
    x ∈ {0, 1},  y ≥ 0

Only the states in ``candidates`` take part: with all of them the answer is optimal, with some it is the best in a neighbourhood.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from jaxauto.solve.problem import RESOURCES, Problem

_NODES = 200
_PRESOLVE = False  # of HiGHS: without it these programmes take half the time


class Status(enum.Enum):
    OPTIMAL = "optimal"
    TIME_LIMIT = "time limit"
    INFEASIBLE = "infeasible"
    FAILED = "failed"


_STATUS = {0: Status.OPTIMAL, 1: Status.TIME_LIMIT, 2: Status.INFEASIBLE}


@dataclass(frozen=True)
class MilpSolution:
    """``x``: a state for each variable, None where none was found. ``bound``: on T, over the candidates. Counts are of the programme."""

    status: Status
    x: np.ndarray | None
    seconds: float
    bound: float
    variables: int
    constraints: int


def solve_milp(
    problem: Problem,
    budget_bytes: float,
    candidates: Sequence[np.ndarray] | None = None,
    time_limit: float = 10.0,
    relative_gap: float = 1e-4,
    node_limit: int = _NODES,
) -> MilpSolution:
    """Solve ``problem`` under ``budget_bytes`` for every memory row.

    Args:
      candidates: for each variable the states that take part; None: all.
      time_limit: seconds; the best answer found is returned with status TIME_LIMIT.
      node_limit: of the tree, alike. In nodes, not seconds, it gives the same answer on a busy machine.
    """
    program = _Program(problem, candidates or [np.arange(n) for n in problem.sizes])
    return program.solve(budget_bytes, time_limit, relative_gap, node_limit)


class _Program:
    def __init__(self, problem: Problem, candidates: Sequence[np.ndarray]):
        self.problem, self.candidates = problem, candidates
        self.offset = np.cumsum([0, *(len(c) for c in candidates)])
        self.tables = {r: self._restricted(problem.pairs[r]) for r in RESOURCES}
        self.moved = [self._restricted(row.pairs) for row in problem.rows]
        self.pairs = sorted({k for tables in (*self.tables.values(), *self.moved) for k, t in tables.items() if not _constant(t)})
        widths = [len(candidates[i]) * len(candidates[j]) for i, j in self.pairs]
        self.pair_offset = self.offset[-1] + np.cumsum([0, *widths])
        self.time = int(self.pair_offset[-1])
        self.size = self.time + 1
        self.rows: list[sparse.csr_array] = []
        self.lower: list[np.ndarray] = []
        self.upper: list[np.ndarray] = []

    def _restricted(self, pairs: Mapping[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
        return {(i, j): table[np.ix_(self.candidates[i], self.candidates[j])] for (i, j), table in pairs.items()}

    def solve(self, budget_bytes: float, time_limit: float, relative_gap: float, node_limit: int) -> MilpSolution:
        scale = self._scale()
        self._choice_rows()
        self._pair_rows()
        self._time_rows(scale)
        self._memory_rows(budget_bytes)
        matrix = sparse.vstack(self.rows).tocsr()
        integrality = np.zeros(self.size)
        integrality[: self.offset[-1]] = 1
        upper = np.ones(self.size)
        upper[self.time] = np.inf
        result = milp(
            self._objective(),
            constraints=LinearConstraint(matrix, np.concatenate(self.lower), np.concatenate(self.upper)),
            integrality=integrality,
            bounds=Bounds(0, upper),
            options={"time_limit": time_limit, "mip_rel_gap": relative_gap, "node_limit": node_limit, "presolve": _PRESOLVE},
        )
        status = _STATUS.get(result.status, Status.FAILED)
        bound = float(result.mip_dual_bound) * scale if result.mip_dual_bound is not None else -np.inf
        if result.x is None:
            return MilpSolution(status, None, np.inf, bound, self.size, matrix.shape[0])
        x = np.array([c[result.x[o : o + len(c)].argmax()] for c, o in zip(self.candidates, self.offset, strict=False)])
        return MilpSolution(status, x, self.problem.seconds(x), bound, self.size, matrix.shape[0])

    def _scale(self) -> float:
        """Seconds are of order 1e-6 … 1e2: HiGHS wants them of order 1."""
        first = np.array([c[0] for c in self.candidates])
        return max(self.problem.seconds(first), 1e-12)

    def _objective(self) -> np.ndarray:
        cost = np.zeros(self.size)
        cost[self.time] = 1.0
        return cost

    def _add(self, row: sparse.sparray, lower, upper) -> None:
        self.rows.append(row.tocsr())
        self.lower.append(np.broadcast_to(lower, row.shape[0]).astype(float))
        self.upper.append(np.broadcast_to(upper, row.shape[0]).astype(float))

    def _choice_rows(self) -> None:
        widths = np.diff(self.offset)
        row = np.repeat(np.arange(len(widths)), widths)
        col = np.arange(self.offset[-1])
        self._add(sparse.coo_array((np.ones(len(col)), (row, col)), shape=(len(widths), self.size)), 1.0, 1.0)

    def _pair_rows(self) -> None:
        for (i, j), start in zip(self.pairs, self.pair_offset, strict=False):
            n, m = len(self.candidates[i]), len(self.candidates[j])
            y = start + np.arange(n * m).reshape(n, m)
            for own, of, count in ((y, self.offset[i], n), (y.T, self.offset[j], m)):
                row = np.concatenate([np.repeat(np.arange(count), own.shape[1]), np.arange(count)])
                col = np.concatenate([own.ravel(), of + np.arange(count)])
                data = np.concatenate([np.ones(own.size), -np.ones(count)])
                self._add(sparse.coo_array((data, (row, col)), shape=(count, self.size)), 0.0, 0.0)

    def _linear(self, resource: str) -> tuple[np.ndarray, float]:
        """A resource as coefficients and a constant."""
        return self._coefficients(self.problem.unary[resource], self.tables[resource])

    def _coefficients(self, unary: Mapping[int, np.ndarray], pairs: Mapping[tuple[int, int], np.ndarray]) -> tuple[np.ndarray, float]:
        row = np.zeros(self.size)
        constant = 0.0
        for i, table in unary.items():
            row[self.offset[i] : self.offset[i + 1]] += table[self.candidates[i]]
        place = dict(zip(self.pairs, self.pair_offset, strict=False))
        for key, table in pairs.items():
            if key in place:
                row[place[key] : place[key] + table.size] += table.ravel()
            else:
                constant += float(table.flat[0])
        return row, constant

    def _time_rows(self, scale: float) -> None:
        linear = {r: self._linear(r) for r in RESOURCES}
        for mu in (1.0, 0.0):
            weights = self.problem.weights(mu)
            row = -sum(weight * linear[r][0] for r, weight in weights.items()) / scale
            row[self.time] = 1.0
            self._add(sparse.coo_array(row[None]), sum(weight * linear[r][1] for r, weight in weights.items()) / scale, np.inf)

    def _memory_rows(self, budget_bytes: float) -> None:
        for memory, moved in zip(self.problem.rows, self.moved, strict=True):
            row, constant = self._coefficients(memory.vectors, moved)
            self._add(sparse.coo_array(row[None] / budget_bytes), -np.inf, 1.0 - (memory.base + constant) / budget_bytes)


def _constant(table: np.ndarray) -> bool:
    return bool((table == table.flat[0]).all())
