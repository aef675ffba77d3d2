"""Tile padding: arrays in a TPU's memory fill whole tiles of their two minor dimensions."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from jaxauto.groups import WHOLE


def padding(
    positions: np.ndarray, shape: tuple[int, ...], minor: tuple[int, ...], axis_sizes: tuple[int, ...], tile: tuple[int, int]
) -> np.ndarray:
    """By how much padding enlarges one device's part of an array.

    The compiler lays arrays out as it likes: the pair of minor dimensions that pads least is assumed. But for convolutions batch and
    features are minor, whatever they pad; features that a reshape parted into groups still lie together.

    Args:
      positions: ``[states, axes]``, the dimension that each mesh axis splits, or WHOLE.
      shape: of the whole array. minor: dimensions that may be minor; fewer than two: any. axis_sizes: of the mesh.
      tile: (second minor, minor).

    Returns:
      ``float [states]``, 1 or more.
    """
    if len(shape) < 2 or not all(shape):
        return np.ones(len(positions))
    local = np.tile(np.asarray(shape, float), (len(positions), 1))
    for axis, size in enumerate(axis_sizes):
        rows = np.nonzero(positions[:, axis] != WHOLE)[0]
        local[rows, positions[rows, axis]] /= size
    local, minor = _joined(local, minor)
    rows = np.minimum(tile[0], 2.0 ** np.ceil(np.log2(local)))  # tiles of fewer rows for short dimensions
    sublanes, lanes = (np.ceil(local / edge) * edge / local for edge in (rows, tile[1]))
    both = sublanes[:, :, None] * lanes[:, None, :]
    both[:, np.arange(local.shape[1]), np.arange(local.shape[1])] = np.inf
    chosen = list(minor) if len(minor) > 1 else list(range(local.shape[1]))
    return both[:, chosen][:, :, chosen].min(axis=(1, 2))


def minor_dims(spatial: Set[tuple[int, int]], group: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of an array that may be minor. ``dims``: what they are in its group; ``spatial``: what convolutions slide over."""
    return tuple(i for i, d in enumerate(dims) if (group, d) not in spatial)


def _joined(local: np.ndarray, minor: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
    """The trailing minor dimensions of a convolution's array as one: ``[states, fewer dimensions]``, and what is minor then."""
    rank = local.shape[1]
    first = next((d for d in range(rank) if all(k in minor for k in range(d, rank))), rank)
    if len(minor) == rank or first >= rank - 1 or len(minor) < rank - first + 1:
        return local, minor
    return np.column_stack([local[:, :first], local[:, first:].prod(1)]), (*(d for d in minor if d < first), first)
