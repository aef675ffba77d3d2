"""From one sharding to another in steps that the partitioner takes as the cost model counts them (``cost/reshard.py``).

In one step it gathers an array whole and cuts it anew, where some axes change dimensions and others go. With a stop between, each device
exchanges its share first. Where an axis leaves a dimension on the major side of one that goes, the pieces that stay are in another order
than the mesh's, and all of them would change places only to be gathered: such a dimension is taken apart, one for each axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxauto.core import Sharding


def bring(array: Any, here: Sharding, there: Sharding, sizes: Mapping[str, int], pinned: Callable[[Any, Sharding], Any]) -> Any:
    """``array``, sharded as ``here`` says, on its way to ``there``, where it is to be pinned next.

    Args:
      sizes: mesh axis → devices. pinned: (array, sharding) → the array constrained to it.
    """
    between = halfway(here, there)
    moved, _ = _changes(here, there)
    crossed = [_is_crossed(axes, left, moved) for axes, left in zip(here, between, strict=True)]
    wholes = [n % math.prod(sizes[a] for a in axes) == 0 for n, axes in zip(array.shape, here, strict=True)]
    if between == there or not any(crossed) or not all(whole for whole, cross in zip(wholes, crossed, strict=True) if cross):
        return pinned(array, between)
    shape = [part for n, axes, cross in zip(array.shape, here, crossed, strict=True) for part in _parts(n, axes, cross, sizes)]
    apart = array.reshape(shape)
    for step in (_spread(here, crossed, here, moved=frozenset()), _spread(here, crossed, between, moved), _spread(here, crossed, there, None)):
        apart = pinned(apart, step)
    return apart.reshape(array.shape)


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


def _parts(n: int, axes: tuple[str, ...], cross: bool, sizes: Mapping[str, int]) -> list[int]:
    """A dimension taken apart: one for each axis, and what one device has of it."""
    return [*(sizes[a] for a in axes), n // math.prod(sizes[a] for a in axes)] if cross else [n]


def _spread(here: Sharding, crossed: list[bool], then: Sharding, moved: frozenset[str] | None) -> Sharding:
    """``then`` for the dimensions taken apart, each axis on its own; those of ``moved`` (None: all) are there no more."""
    found: list[tuple[str, ...]] = []
    for axes, cross, after in zip(here, crossed, then, strict=True):
        if not cross:
            found.append(after)
            continue
        found += [() if moved is None or a in moved else (a,) for a in axes]
        found.append(())
    return tuple(found)
