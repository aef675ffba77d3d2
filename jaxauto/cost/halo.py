"""Halos: what neighbours send each other when a dimension under a sliding window is split.

A shard needs ``halo`` elements of the operand beyond its borders, half from each side (``OpRule.halo``): two collective-permutes of
``halo / 2`` slices of what one device holds, and the convolution waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxauto.core import MeshAxes
from jaxauto.cost.collectives import collective_seconds
from jaxauto.cost.compute import factor_dims
from jaxauto.groups import Operand, Operation
from jaxauto.strategies import project, shards

SIDES = 2


def halos(op: Operation) -> Iterator[tuple[int, Operand, float]]:
    """(index of the factor, the operand that is sent, elements of it that cross each border)."""
    for k, (factor, _) in enumerate(op.factors):
        width = op.rule.halo.get(factor, 0)
        sent = next((o for o in op.operands if any(f == factor for _, f in o.dims)), None)
        if width and sent is not None:
            yield k, sent, float(width)


def halo_collectives(
    op: Operation, state: np.ndarray, shapes: dict[int, tuple[int, ...]], bytes_: dict[int, float], mesh: MeshAxes
) -> Iterator[tuple[Operand, float, tuple[int, ...], float]]:
    """The permutes of one operation in one state, ``SIDES`` times each: (whose borders, bytes of all devices of the group, axis indices,
    seconds of one).

    Args:
      state: ``[axes]`` positions in ``op.factors``.
      shapes, bytes_: of the operands' values, whole.
    """
    for k, o, width in halos(op):
        axes = tuple(int(a) for a in np.nonzero(state == k)[0] if mesh.sizes[a] > 1)
        if not axes:
            continue
        (dim,) = (i for i, (_, f) in enumerate(o.dims) if f == op.factors[k][0])
        position = project(state[None], factor_dims(op, o))[0]
        pieces = float(shards(position[None], mesh.sizes)[0])
        count = float(np.prod([mesh.sizes[a] for a in axes]))
        slice_bytes = bytes_[o.value] / pieces / (shapes[o.value][dim] / count)
        amount = slice_bytes * width / SIDES * count
        seconds = collective_seconds("collective-permute", amount, [mesh.sizes[a] for a in axes], [mesh.links[a] for a in axes])
        yield o, amount, axes, float(seconds)
