"""rule × mesh → candidate shardings, as integer arrays. Knows no primitive by name.

A *state* says where each mesh axis lies: an array ``[states, axes]`` of dimension indices, WHOLE where the axis splits nothing.
Within one dimension axes are always in mesh order, major to minor. Groups and operations are enumerated alike: the dimensions of a
group, the factors of an operation.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from jaxauto.core import MeshAxes, Sharding
from jaxauto.groups import WHOLE


@functools.lru_cache(maxsize=4096)
def states(sizes: tuple[int, ...], axis_sizes: tuple[int, ...]) -> np.ndarray:
    """All ways to lay mesh axes on dimensions of ``sizes`` that divide them: ``int8 [states, axes]``, the unsharded one first."""
    choices = [[WHOLE] + [d for d, n in enumerate(sizes) if n % k == 0 and n >= k] for k in axis_sizes]
    kept = []
    for state in itertools.product(*choices):
        split: dict[int, int] = {}
        for d, k in zip(state, axis_sizes, strict=True):
            if d != WHOLE:
                split[d] = split.get(d, 1) * k
        if all(sizes[d] % k == 0 for d, k in split.items()):
            kept.append(state)
    return np.array(kept, np.int8).reshape(len(kept), len(axis_sizes))


def project(state: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    """States of a group (or factors) as positions in one of its values.

    Args:
      state: ``[states, axes]`` over group dimensions.
      dims: for each dimension of the value, the group dimension it is, or WHOLE.

    Returns:
      ``[states, axes]`` over the value's dimensions.
    """
    width = int(state.max(initial=WHOLE)) + 1
    lookup = np.full(max(width, max(dims, default=-1) + 1) + 1, WHOLE, np.int8)
    for position, d in reversed(list(enumerate(dims))):
        if d != WHOLE:
            lookup[d] = position
    lookup[-1] = WHOLE  # index WHOLE == -1
    return lookup[state]


def shards(positions: np.ndarray, axis_sizes: tuple[int, ...]) -> np.ndarray:
    """Into how many pieces each state cuts a value: ``float [states]``."""
    factors = np.where(positions == WHOLE, 1.0, np.asarray(axis_sizes, float))
    return factors.prod(axis=-1)


def sharding_of(position: np.ndarray, rank: int, mesh: MeshAxes) -> Sharding:
    """One state as axis names for each dimension."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis, d in enumerate(position):
        if d != WHOLE:
            dims[int(d)].append(mesh.names[axis])
    return tuple(tuple(names) for names in dims)


def state_of(sharding: Sharding, mesh: MeshAxes) -> np.ndarray:
    """The inverse of ``sharding_of``: ``int8 [axes]``."""
    position = np.full(len(mesh.names), WHOLE, np.int8)
    for d, names in enumerate(sharding):
        for name in names:
            position[mesh.names.index(name)] = d
    return position
