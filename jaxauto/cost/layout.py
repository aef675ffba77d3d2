"""Tile padding: arrays in a TPU's memory fill whole tiles of their two minor dimensions."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy as np

from jaxauto.groups import WHOLE
from jaxauto.targets.chip import Tile


def padding(positions: np.ndarray, laid: Laid, axis_sizes: tuple[int, ...]) -> np.ndarray:
    """By how much padding enlarges one device's part of an array.

    The compiler lays arrays out as it likes: the pair of minor dimensions that pads least is assumed. But for convolutions batch and
    features are minor, whatever they pad; features that a reshape parted into groups still lie together. And what a dot goes over as a
    batch is major, of its operands and its result: small matrices are padded each.

    Args:
      positions: ``[states, axes]``, the dimension that each mesh axis splits, or WHOLE.
      laid: shape of the whole array; dimensions that may be minor, fewer than two: any; its tiles. axis_sizes: of the mesh.

    Returns:
      ``float [states]``, 1 or more.
    """
    shape, minor, tile = laid
    if len(shape) < 2 or not all(shape):
        return np.ones(len(positions))
    local, minor = _joined(local_shape(positions, shape, axis_sizes), minor)
    rows = np.clip(2.0 ** np.ceil(np.log2(local)), tile.packed, tile.sublanes)  # tiles of fewer rows for short dimensions
    sublanes, lanes = (np.ceil(local / edge) * edge / local for edge in (rows, tile.lanes))
    both = sublanes[:, :, None] * lanes[:, None, :]
    both[:, np.arange(local.shape[1]), np.arange(local.shape[1])] = np.inf
    chosen = list(minor) if len(minor) > 1 else list(range(local.shape[1]))
    return both[:, chosen][:, :, chosen].min(axis=(1, 2))


def row_padding(positions: np.ndarray, laid: Laid, axis_sizes: tuple[int, ...]) -> np.ndarray:
    """By how much an array of two dimensions is enlarged whose last one is along the lanes: as ``padding``."""
    local, tile = local_shape(positions, laid.shape, axis_sizes), laid.tile
    edges = np.clip(2.0 ** np.ceil(np.log2(local[:, 0])), tile.packed, tile.sublanes), tile.lanes
    sublanes, lanes = (np.ceil(n / edge) * edge / n for n, edge in zip(local.T, edges, strict=True))
    return sublanes * lanes


@functools.lru_cache(maxsize=65536)
def unsplit_padding(laid: Laid) -> float:
    """By how much padding enlarges a whole array: ``padding`` of one that no device shares."""
    return float(padding(np.zeros((1, 0), int), laid, ())[0])


def local_shape(positions: np.ndarray, shape: tuple[int, ...], axis_sizes: tuple[int, ...]) -> np.ndarray:
    """The shape of one device's part of an array, for each of ``[states, axes]`` positions: ``float [states, dimensions]``."""
    local = np.tile(np.asarray(shape, float), (len(positions), 1))
    for axis, size in enumerate(axis_sizes):
        rows = np.nonzero(positions[:, axis] != WHOLE)[0]
        local[rows, positions[rows, axis]] /= size
    return local


class Laid(NamedTuple):
    """What ``padding`` asks of an array beside where it lies."""

    shape: tuple[int, ...]
    minor: tuple[int, ...]
    tile: Tile


class Major(NamedTuple):
    """What is never minor.

    Attributes:
      spatial: (group, dimension) of what convolutions slide over.
      batches: (group, group dimensions of an array) → of an operand or result of a dot laid out so, which dimensions are the dot's batch.
    """

    spatial: Set[tuple[int, int]] = frozenset()
    batches: Mapping[tuple[int, tuple[int, ...]], Set[int]] = {}


def minor_dims(major: Major, group: int, dims: tuple[int, ...], *, stacked: bool = False) -> tuple[int, ...]:
    """The dimensions of an array, or of a stack of such arrays, that may be minor. ``dims``: what those of the array are in its group."""
    batch = major.batches.get((group, dims), ())
    minor = tuple(i + stacked for i, d in enumerate(dims) if (group, d) not in major.spatial and i not in batch)
    return (0, *minor) if stacked and not batch else minor


def _joined(local: np.ndarray, minor: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
    """The trailing minor dimensions of a convolution's array as one: ``[states, fewer dimensions]``, and what is minor then."""
    rank = local.shape[1]
    first = next((d for d in range(rank) if all(k in minor for k in range(d, rank))), rank)
    if len(minor) == rank or first >= rank - 1 or len(minor) < rank - first + 1:
        return local, minor
    return np.column_stack([local[:, :first], local[:, first:].prod(1)]), (*(d for d in minor if d < first), first)
