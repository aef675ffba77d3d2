"""Non-serial dynamic programming: exact minimisation of unary and pairwise tables by eliminating one variable after another.

    h_i(x_N) = min_{x_i} Σ_{tables t with i} t(x_i, x_N)       N: the neighbours of i when it is eliminated     ``_eliminate``
    x_i*     = argmin at the neighbours' best states, last eliminated first                                     ``_decode``

(Bertelè and Brioschi, 1972; bucket elimination, Dechter 1999.) Cost: Π of the sizes of the largest neighbourhood. Where that would exceed
``MAX_ENTRIES`` the bucket is split, each part minimised on its own (mini-buckets): the value is then a lower bound, and the decoded answer
is improved by coordinate descent and by elimination over the few best states of each variable (a large neighbourhood).   ``improve``
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

MAX_ENTRIES = 400_000
_NEAR = 7  # states of each variable in a large neighbourhood

Table = tuple[tuple[int, ...], np.ndarray]


@dataclass(frozen=True)
class Elimination:
    """``x``: a state for each variable; ``bound`` ≤ the minimum; ``value``: the cost of x, equal to the bound when ``exact``."""

    x: np.ndarray
    value: float
    bound: float
    exact: bool


def eliminate(unary: list[np.ndarray], pairs: dict[tuple[int, int], np.ndarray]) -> Elimination:
    """Minimise Σ_i unary[i][x_i] + Σ_ij pairs[i, j][x_i, x_j]."""
    sizes, buckets, neighbours = _tables(unary, pairs)
    order, choices, bound, exact = _eliminate(sizes, buckets, neighbours)
    x = _decode(sizes, order, choices)
    if not exact:
        x = improve(unary, pairs, descend(unary, pairs, x), bound)
    return Elimination(x, value_of(unary, pairs, x), bound, exact)


def improve(unary, pairs, x: np.ndarray, bound: float) -> np.ndarray:
    """Eliminate over the states that cost least next to the other variables' states in ``x``, as long as that helps."""
    value = value_of(unary, pairs, x)
    for _ in range(4):
        if value <= bound + 1e-3 * abs(bound):
            break
        near = nearest(unary, pairs, x, _NEAR)
        small = {(i, j): table[np.ix_(near[i], near[j])] for (i, j), table in pairs.items()}
        sizes = [len(n) for n in near]
        order, choices, _, _ = _eliminate(*_tables([u[n] for u, n in zip(unary, near, strict=True)], small))
        picked = descend(unary, pairs, np.array([n[s] for n, s in zip(near, _decode(sizes, order, choices), strict=True)]))
        better = value_of(unary, pairs, picked)
        if better >= value - 1e-9 * abs(value):
            break
        x, value = picked, better
    return x


def nearest(unary, pairs, x: np.ndarray, count: int) -> list[np.ndarray]:
    """For each variable its state in ``x``, the unsharded one, and the ``count`` states that cost least next to the others' states."""
    cost = [u.copy() for u in unary]
    for (i, j), table in pairs.items():
        cost[i] += table[:, x[j]]
        cost[j] += table[x[i], :]
    return [np.unique([x[i], 0, *np.argsort(c, kind="stable")[:count]]) for i, c in enumerate(cost)]


def _tables(unary, pairs) -> tuple[list[int], dict[int, list[Table]], dict[int, set[int]]]:
    """Sizes, each variable's tables, each variable's neighbours."""
    buckets: dict[int, list[Table]] = {i: [((i,), u)] for i, u in enumerate(unary)}
    neighbours: dict[int, set[int]] = {i: set() for i in range(len(unary))}
    for (i, j), table in pairs.items():
        for k in (i, j):
            buckets[k].append(((i, j), table))
        neighbours[i].add(j)
        neighbours[j].add(i)
    return [len(u) for u in unary], buckets, neighbours


def value_of(unary, pairs, x: np.ndarray) -> float:
    """The sum of all tables at ``x``."""
    return sum(float(u[x[i]]) for i, u in enumerate(unary)) + sum(float(t[x[i], x[j]]) for (i, j), t in pairs.items())


def _eliminate(sizes, buckets: dict[int, list[Table]], neighbours: dict[int, set[int]]):
    bound, exact = 0.0, True
    order: list[int] = []
    choices: list[list[tuple[tuple[int, ...], np.ndarray]]] = []
    queue = [(_weight(i, sizes, neighbours), i) for i in neighbours]
    heapq.heapify(queue)
    done: set[int] = set()
    while queue:
        weight, i = heapq.heappop(queue)
        if i in done:
            continue
        now = _weight(i, sizes, neighbours)
        if now > weight:
            heapq.heappush(queue, (now, i))
            continue
        parts = _split(i, buckets.pop(i), sizes)
        exact &= len(parts) == 1
        picks = []
        for scope, tables in parts:
            summed = _sum((i, *scope), tables, sizes)
            best = summed.argmin(0)
            message = np.take_along_axis(summed, best[None], 0)[0]
            picks.append((scope, best.astype(np.int16)))
            for j in scope:
                buckets[j] = [t for t in buckets[j] if not any(t[1] is u[1] for u in tables)]
            if scope:
                for j in scope:
                    buckets[j].append((scope, message))
            else:
                bound += float(message)
        order.append(i)
        choices.append(picks)
        done.add(i)
        around = neighbours.pop(i)
        for j in around:
            neighbours[j].discard(i)
            if len(parts) == 1:
                neighbours[j] |= around - {j}
        for scope, _ in parts if len(parts) > 1 else ():
            for j in scope:
                neighbours[j] |= set(scope) - {j}
        for j in around:
            heapq.heappush(queue, (_weight(j, sizes, neighbours), j))
    return order, choices, bound, exact


def _weight(i: int, sizes, neighbours) -> float:
    return math.log(sizes[i]) + sum(math.log(sizes[j]) for j in neighbours[i])


def _split(i: int, tables: list[Table], sizes) -> list[tuple[tuple[int, ...], list[Table]]]:
    """Mini-buckets: tables first-fit into parts whose joint scope stays under MAX_ENTRIES."""
    parts: list[tuple[set[int], list[Table]]] = []
    for scope, table in sorted(tables, key=lambda t: -t[1].size):
        others = set(scope) - {i}
        for joint, members in parts:
            if math.prod(sizes[j] for j in joint | others) * sizes[i] <= MAX_ENTRIES:
                joint |= others
                members.append((scope, table))
                break
        else:
            parts.append((others, [(scope, table)]))
    return [(tuple(sorted(joint)), members) for joint, members in parts]


def _sum(scope: tuple[int, ...], tables: list[Table], sizes) -> np.ndarray:
    total = np.zeros([sizes[j] for j in scope])
    for own, table in tables:
        at = [scope.index(j) for j in own]
        arranged = np.transpose(table, np.argsort(at))
        shape = [1] * len(scope)
        for j in own:
            shape[scope.index(j)] = sizes[j]
        total += arranged.reshape(shape)
    return total


def _decode(sizes, order, choices) -> np.ndarray:
    x = np.zeros(len(sizes), int)
    for i, picks in zip(reversed(order), reversed(choices), strict=True):
        scope, best = max(picks, key=lambda pick: len(pick[0]))
        x[i] = best[tuple(x[j] for j in scope)]
    return x


def descend(unary, pairs, x: np.ndarray) -> np.ndarray:
    """Coordinate descent: one variable at a time to its best state, until none changes."""
    x = x.copy()
    touching: dict[int, list[tuple[int, np.ndarray]]] = {i: [] for i in range(len(unary))}
    for (i, j), table in pairs.items():
        touching[i].append((j, table))
        touching[j].append((i, table.T))
    changed = True
    while changed:
        changed = False
        for i, u in enumerate(unary):
            cost = u + sum((t[:, x[j]] for j, t in touching[i]), np.zeros(len(u)))
            best = int(cost.argmin())
            if cost[best] < cost[x[i]] - 1e-15 - 1e-9 * abs(cost[x[i]]):
                x[i], changed = best, True
    return x
