"""Windowed einsums: XLA:TPU scatters the sum of a dot's partial results over ``n`` devices beside the dot, as a loop.

Two pieces of the result a trip, one each way round the ring. Of the operand that has the scattered dimension a trip reads the pieces' part,
the other it reads whole; the pieces pass through HBM as they are added up, and where there is a batch the pieces of the operand are copied
out of it first::

    bytes = (1, with a batch 3) · operand with the dimension + n/2 · operand without it + 3 · result

Seen in schedules of single dots for v5e, v5p and v6e, on meshes of one and two axes: n is 4 to 32; the sum goes to one dimension, of one
operand alone (no batch), that is not split already; and the flops of the n devices take at least about as long as sending one's
result over one link. All other sums are waited for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxauto.core import Kind, MeshAxes
from jaxauto.cost.compute import factor_dims, matrix_seconds, operand_bytes, traffic_seconds
from jaxauto.groups import Operand, Operation
from jaxauto.strategies import project

FEWEST = 4  # devices
PIECES = 2  # of the result in a trip
ADDED_UP = 2  # times that the result passes through HBM, beside what the dot writes
COPIED = 2  # times that an operand's pieces do, beside what the dot reads


def windowed(
    op: Operation, result: Operand, values: dict, state: np.ndarray, target: np.ndarray, partial: np.ndarray, mesh: MeshAxes, chip: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Which sums are scattered beside their dot, and what the dot takes longer for that.

    Args:
      state: ``[a, axes]`` positions in ``op.factors``. target: ``[b, axes]`` in the result's dimensions.
      partial: ``bool [a, axes]``, axes along which the result is a term of a sum.

    Returns:
      ``bool [a, b]`` and the seconds of one run, ``float [a, b]``.
    """
    hidden, extra = np.zeros((len(state), len(target)), bool), np.zeros((len(state), len(target)))
    if op.rule.kind is not Kind.DOT or mesh.windows is None:
        return hidden, extra
    count = np.where(partial, np.asarray(mesh.sizes, float), 1.0).prod(-1)
    flops = matrix_seconds(op, values, state, mesh.sizes, chip)
    sizes = {k: operand_bytes(o, op, values, state, mesh.sizes) for k, o in enumerate((*op.operands, *op.results))}
    added = operand_bytes(result, op, values, state, mesh.sizes)
    fits = (count >= FEWEST) & (count <= mesh.windows) & (count * flops >= added / chip.link_bandwidth)
    here = project(state, factor_dims(op, result))
    once = sum(sizes.values())
    batch = _batch(op, state, mesh)
    for d, (_, factor) in enumerate(result.dims):
        lacking = [k for k, o in enumerate(op.operands) if all(f != factor for _, f in o.dims)]
        if len(op.operands) - len(lacking) != 1:
            continue
        rows = np.nonzero(fits & ~(here == d).any(-1))[0]
        pairs = (~partial[rows][:, None] | (target == d)[None]).all(-1)
        again = (count / PIECES - 1) * sum(sizes[k] for k in lacking)
        longer = np.maximum(flops, traffic_seconds(once + again, chip)) - np.maximum(flops, traffic_seconds(once, chip))
        copied = np.where(batch > 1, sum(sizes[k] for k in range(len(op.operands)) if k not in lacking), 0.0)
        longer = longer + traffic_seconds(ADDED_UP * added + COPIED * copied, chip)
        hidden[rows] |= pairs
        extra[rows] += pairs * longer[rows][:, None]
    return hidden, extra


def _batch(op: Operation, state: np.ndarray, mesh: MeshAxes) -> np.ndarray:
    """How many dots of a batch one device does, for each state."""
    count = np.ones(len(state))
    for k, (factor, size) in enumerate(op.factors):
        if all(any(f == factor for _, f in o.dims) for o in (*op.operands, *op.results)):
            count *= size / np.where(state == k, np.asarray(mesh.sizes, float), 1.0).prod(-1)
    return count
