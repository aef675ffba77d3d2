"""Non-serial dynamic programming: exact minimisation of unary and pairwise tables by eliminating one variable after another.

    h_i(x_N) = min_{x_i} Σ_{tables t with i} t(x_i, x_N)       N: the neighbours of i when it is eliminated     ``_eliminate``
    x_i*     = argmin at the neighbours' best states, last eliminated first                                     ``_decode``

(Bertelè and Brioschi, 1972; bucket elimination, Dechter 1999.) Cost: Π of the sizes of the largest neighbourhood. Where that would
exceed ``MAX_ENTRIES`` the bucket is split, each part minimised on its own (mini-buckets), after costs have moved between the parts until
they agree on i (``_shared``; Ihler, Flerova, Dechter and Otten, 2012): the value is then a lower bound, and the decoded answer is improved
by coordinate descent and by elimination over the few best states of each variable (a large neighbourhood).         ``improve``
"""

from __future__ import annotations

import functools
import heapq
import math
from dataclasses import dataclass

import numpy as np

MAX_ENTRIES = 400_000
_NEAR = 7  # states of each variable in a large neighbourhood

Table = tuple[tuple[int, ...], np.ndarray]


@dataclass(frozen=True)
class Elimination:
    """``x``: a state for each variable; ``bound`` ≤ the minimum; ``value``: the cost of x, equal to the bound when ``exact``.

    ``work``: entries of all tables that were made.
    """

    x: np.ndarray
    value: float
    bound: float
    exact: bool
    work: int = 0


def eliminate(unary: list[np.ndarray], pairs: dict[tuple[int, int], np.ndarray], entries: int = MAX_ENTRIES) -> Elimination:
    """Minimise Σ_i unary[i][x_i] + Σ_ij pairs[i, j][x_i, x_j], with tables of at most ``entries``."""
    parts, bound, exact = _eliminate(*_tables(unary, pairs), entries)
    x = _decode(unary, parts)
    if not exact:
        x = improve(unary, pairs, descend(unary, pairs, x), bound)
    return Elimination(x, value_of(unary, pairs, x), bound, exact, sum(part.message.size * len(unary[part.variable]) for part in parts))


def least_with(
    unary: list[np.ndarray], pairs: dict[tuple[int, int], np.ndarray], entries: int = MAX_ENTRIES
) -> tuple[list[np.ndarray], float, int]:
    """For each state of each variable a lower bound on the cost of every answer that has it, a lower bound on all, and ``work``.

    The same elimination, then backwards: each bucket is told the least that all the others cost for each state of its neighbours.
    """
    sizes, buckets, neighbours = _tables(unary, pairs)
    parts, bound, _ = _eliminate(sizes, buckets, neighbours, entries)
    least = [np.full(n, -np.inf) for n in sizes]
    made_by = {id(part.message): k for k, part in enumerate(parts)}
    told: dict[int, np.ndarray] = {}
    for k in range(len(parts) - 1, -1, -1):
        part = parts[k]
        scope = (part.variable, *part.scope)
        joint = _sum(scope, part.tables, sizes) + told.pop(k, 0.0)
        own = joint.min(axis=tuple(range(1, joint.ndim)))
        least[part.variable] = np.maximum(least[part.variable], own - own.min() + bound)
        for of, table in part.tables:
            child = made_by.get(id(table))
            if child is not None:
                others = tuple(d for d, j in enumerate(scope) if j not in of)
                kept = [j for j in scope if j in of]
                told[child] = joint.min(axis=others).transpose([kept.index(j) for j in of]) - table
    return least, bound, sum(part.message.size * sizes[part.variable] for part in parts)


def improve(unary, pairs, x: np.ndarray, bound: float) -> np.ndarray:
    """Eliminate over the states that cost least next to the other variables' states in ``x``, as long as that helps."""
    value = value_of(unary, pairs, x)
    for _ in range(4):
        if value <= bound + 1e-3 * abs(bound):
            break
        near = nearest(unary, pairs, x, _NEAR)
        small = {(i, j): table[np.ix_(near[i], near[j])] for (i, j), table in pairs.items()}
        few = [u[n] for u, n in zip(unary, near, strict=True)]
        parts, _, _ = _eliminate(*_tables(few, small), MAX_ENTRIES)
        picked = descend(unary, pairs, np.array([n[s] for n, s in zip(near, _decode(few, parts), strict=True)]))
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
    """Sizes, each variable's tables, each variable's neighbours; one that has no choice is nobody's: arrays have at most 64 dimensions."""
    buckets: dict[int, list[Table]] = {i: [((i,), u)] for i, u in enumerate(unary)}
    neighbours: dict[int, set[int]] = {i: set() for i in range(len(unary))}
    for (i, j), table in pairs.items():
        if 1 in table.shape:
            chosen, row = (i, table[:, 0]) if table.shape[1] == 1 else (j, table[0])
            buckets[chosen].append(((chosen,), row))
            continue
        for k in (i, j):
            buckets[k].append(((i, j), table))
        neighbours[i].add(j)
        neighbours[j].add(i)
    return [len(u) for u in unary], buckets, neighbours


def value_of(unary, pairs, x: np.ndarray) -> float:
    """The sum of all tables at ``x``."""
    return sum(float(u[x[i]]) for i, u in enumerate(unary)) + sum(float(t[x[i], x[j]]) for (i, j), t in pairs.items())


@dataclass(frozen=True, eq=False)
class _Part:
    """A (mini-)bucket: ``tables`` over (variable, *scope), and ``message``, the least cost for each state of ``scope``."""

    variable: int
    scope: tuple[int, ...]
    tables: list[Table]
    message: np.ndarray


def _eliminate(sizes, buckets: dict[int, list[Table]], neighbours: dict[int, set[int]], entries: int) -> tuple[list[_Part], float, bool]:
    """The parts in the order of elimination, a lower bound on the minimum, and whether it is the minimum."""
    bound, exact = 0.0, True
    order: list[_Part] = []
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
        parts = _split(i, buckets.pop(i), sizes, entries)
        exact &= len(parts) == 1
        for (scope, tables), shift in zip(parts, _shared(i, parts, sizes), strict=True):
            tables = [*tables, ((i,), shift)] if len(parts) > 1 else tables
            message = _sum((i, *scope), tables, sizes).min(0)
            order.append(_Part(i, scope, tables, message))
            for j in scope:
                buckets[j] = [t for t in buckets[j] if not any(t[1] is u[1] for u in tables)]
                buckets[j].append((scope, message))
            if not scope:
                bound += float(message)
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
    return order, bound, exact


def _shared(i: int, parts, sizes) -> list[np.ndarray]:
    """What moves between the parts of a bucket so that each state of ``i`` costs at least the same in all: the bound gains."""
    if len(parts) == 1:
        return [np.zeros(0)]
    own = [_sum((i, *scope), tables, sizes).reshape(sizes[i], -1).min(1) for scope, tables in parts]
    return [sum(own) / len(own) - o for o in own]


def _weight(i: int, sizes, neighbours) -> float:
    return math.log(sizes[i]) + sum(math.log(sizes[j]) for j in neighbours[i])


def _split(i: int, tables: list[Table], sizes, entries: int) -> list[tuple[tuple[int, ...], list[Table]]]:
    """Mini-buckets: tables first-fit into parts whose joint scope stays under ``entries``."""
    parts: list[tuple[set[int], list[Table]]] = []
    for scope, table in sorted(tables, key=lambda t: -t[1].size):
        others = set(scope) - {i}
        for joint, members in parts:
            if math.prod(sizes[j] for j in joint | others) * sizes[i] <= entries:
                joint |= others
                members.append((scope, table))
                break
        else:
            parts.append((others, [(scope, table)]))
    return [(tuple(sorted(joint)), members) for joint, members in parts]


def _sum(scope: tuple[int, ...], tables: list[Table], sizes) -> np.ndarray:
    """The tables over ``scope``; what is small is added to what is small, so that few sums are as large as the result."""
    place = {j: k for k, j in enumerate(scope)}
    summed: dict[frozenset[int], np.ndarray] = {}
    for own, table in tables:
        shape = [1] * len(scope)
        for j in own:
            shape[place[j]] = sizes[j]
        arranged = table.transpose(sorted(range(len(own)), key=lambda d: place[own[d]])).reshape(shape)
        known = summed.get(key := frozenset(own))
        summed[key] = arranged if known is None else known + arranged
    for key in sorted(summed, key=lambda k: summed[k].size):
        around = min((k for k in summed if key < k), key=lambda k: summed[k].size, default=None)
        if around is not None:
            summed[around] = summed[around] + summed.pop(key)
    return functools.reduce(np.add, sorted(summed.values(), key=lambda t: t.size))


def _decode(unary: list[np.ndarray], parts: list[_Part]) -> np.ndarray:
    """States of the least cost, last eliminated first; of the parts of one bucket the widest decides."""
    widest: dict[int, _Part] = {}
    for part in parts:
        kept = widest.get(part.variable)
        if kept is None or len(part.scope) > len(kept.scope):
            widest[part.variable] = part
    x = np.zeros(len(unary), int)
    for i, part in reversed(widest.items()):  # the state is looked for here alone: an argmin of whole tables takes longer than their sum
        x[i] = sum(table[tuple(slice(None) if j == i else x[j] for j in of)] for of, table in part.tables).argmin()
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
