"""From one sharding to another in steps that the partitioner takes as the cost model counts them (``cost/reshard.py``).

In one step it gathers an array whole and cuts it anew: where some axes change dimensions and others go, and where two axes change from one
dimension to two, or from two to one. With stops between, each device exchanges its share first, and axes that do not go together from one
dimension to another do so one after the other. Where an axis leaves a dimension on the major side of one that goes, the pieces that stay
are in another order than the mesh's, and all of them would change places only to be gathered: such a dimension is taken apart, one for each
axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxauto.core import Sharding


def bring(array: Any, here: Sharding, there: Sharding, sizes: Mapping[str, int], pinned: Callable[[Any, Sharding], Any]) -> Any:
    """``array``, sharded as ``here`` says, on its way to ``there``, where it is to be pinned next.

    Args:
      sizes: mesh axis → devices. pinned: (array, sharding) → the array constrained to it.
    """
    between = halfway(here, there)
    moved, _ = _changes(here, there)
    crossed = {d for d, axes in enumerate(here) if between != there and _is_crossed(axes, between[d], moved)}
    if not crossed or any(array.shape[d] % math.prod(sizes[a] for a in here[d]) for d in crossed):
        for stop in _stops(here, between, tuple(sizes)):
            array = pinned(array, stop)
        return array
    shape: list[int] = []
    for d, (n, axes) in enumerate(zip(array.shape, here, strict=True)):
        shape += [*(sizes[a] for a in axes), n // math.prod(sizes[a] for a in axes)] if d in crossed else [n]
    apart = array.reshape(shape)
    for then, gone in ((here, frozenset()), (between, moved), (there, frozenset(sizes))):
        apart = pinned(apart, _spread(here, crossed, then, gone))
    return apart.reshape(array.shape)


def _stops(here: Sharding, there: Sharding, order: Sequence[str]) -> list[Sharding]:
    """Where an array is pinned on its way, ``there`` last: one exchange after another, if the partitioner would not make them so itself.

    Of one dimension the minor axis leaves first, to one the major axis comes first: axes of a dimension are in the mesh's ``order``.
    """
    exchanges = _exchanges(here, there)
    if not any(a != b and (a[0] == b[0] or a[1] == b[1]) for a, b in itertools.combinations(exchanges, 2)):
        return [there]
    rank = {axis: k for k, axis in enumerate(order)}
    stops, now = [], [list(axes) for axes in here]
    while exchanges:
        source, target = pair = next(p for p in exchanges if not _waits(p, exchanges, rank))
        axes = exchanges.pop(pair)
        now[source] = [a for a in now[source] if a not in axes]
        now[target] = sorted([*now[target], *axes], key=rank.__getitem__)
        stops.append(tuple(map(tuple, now)))
    return stops if stops[-1] == there else [*stops, there]


def _exchanges(here: Sharding, there: Sharding) -> dict[tuple[int, int], list[str]]:
    """(dimension that they leave, that they go to) → axes."""
    found: dict[tuple[int, int], list[str]] = {}
    for source, axes in enumerate(here):
        for axis in axes:
            target = next((d for d, after in enumerate(there) if axis in after), source)
            if target != source:
                found.setdefault((source, target), []).append(axis)
    return found


def _waits(pair: tuple[int, int], exchanges: Mapping[tuple[int, int], Sequence[str]], rank: Mapping[str, int]) -> bool:
    """Whether another exchange comes first."""
    own = [rank[a] for a in exchanges[pair]]
    others = [(p, [rank[a] for a in axes]) for p, axes in exchanges.items() if p != pair]
    return any((p[0] == pair[0] and max(r) > max(own)) or (p[1] == pair[1] and min(r) < min(own)) for p, r in others)


def halfway(here: Sharding, there: Sharding) -> Sharding:
    """Where an array stops between two shardings: axes that change dimensions have done so, axes that go are not gathered yet.

    Without both kinds of axes, or where one dimension would have some of either, there is nothing to stop for: ``there``.
    """
    moved, kept = _changes(here, there)
    left = [tuple(axis for axis in axes if axis not in moved) for axes in here]
    gone = any(axis not in kept for axes in left for axis in axes)
    between = tuple(after if {*after} & moved else before for before, after in zip(left, there, strict=True))
    mixed = any({*after} & moved and not {*before} <= {*after} for before, after in zip(left, there, strict=True))
    return between if moved and gone and not mixed else there


def _changes(here: Sharding, there: Sharding) -> tuple[frozenset[str], frozenset[str]]:
    """Axes that change dimensions; axes that split any dimension afterwards."""
    kept = frozenset(axis for axes in there for axis in axes)
    return frozenset(a for axes, after in zip(here, there, strict=True) for a in axes if a in kept and a not in after), kept


def _is_crossed(axes: tuple[str, ...], left: tuple[str, ...], moved: frozenset[str]) -> bool:
    """Whether an axis leaves on the major side of one that is ``left``."""
    return any(a in moved and {*axes[k:]} & {*left} for k, a in enumerate(axes))


def _spread(here: Sharding, crossed: set[int], then: Sharding, gone: frozenset[str]) -> Sharding:
    """``then``, where each axis of a dimension that is taken apart has one of its own, but for those that are ``gone`` from it."""
    found: list[tuple[str, ...]] = []
    for d, after in enumerate(then):
        found += [*(() if a in gone else (a,) for a in here[d]), ()] if d in crossed else [after]
    return tuple(found)
