"""Tile padding: arrays in a TPU's memory fill whole tiles of their two minor dimensions."""

from __future__ import annotations

import numpy as np

from jaxauto.groups import WHOLE


def padding(
    positions: np.ndarray, shape: tuple[int, ...], minor: tuple[int, ...], axis_sizes: tuple[int, ...], tile: tuple[int, int]
) -> np.ndarray:
    """By how much padding enlarges one device's part of an array.

    The compiler lays arrays out as it likes: the pair of minor dimensions that pads least is assumed. But for convolutions batch and
    features are minor, whatever they pad.

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
    rows = np.minimum(tile[0], 2.0 ** np.ceil(np.log2(local)))  # tiles of fewer rows for short dimensions
    sublanes, lanes = (np.ceil(local / edge) * edge / local for edge in (rows, tile[1]))
    both = sublanes[:, :, None] * lanes[:, None, :]
    both[:, np.arange(len(shape)), np.arange(len(shape))] = np.inf
    chosen = list(minor) if len(minor) > 1 else list(range(len(shape)))
    return both[:, chosen][:, :, chosen].min(axis=(1, 2))
