"""Windowed einsums: XLA:TPU scatters the sum of a dot's partial results over ``n`` devices beside the dot, as a loop.

Two pieces of the result a trip, one each way round the ring. Of the operand that has the scattered dimension a trip reads the pieces' part,
the other whole; the pieces pass through HBM as they are added up::

    bytes = operand with the dimension + n/2 · operand without it + 3 · result

What is read whole and small stays in on-chip memory; what would fill most of it is streamed there for every second dot, which waits
(``_read_again``). One operand is transposed before the loop, outside of the dot (``_transposed``). Of a batch the pieces of the
operand with the dimension are copied out of it instead.

Seen in schedules of single dots for v5e, v5p and v6e, on meshes of one and two axes: n is 4 to 32; the sum goes to one dimension, of one
operand alone (no batch), that is not split already; and the flops of the n devices take at least about as long as sending one's
result over one link. All other sums are waited for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxauto.core import Kind, MeshAxes
from jaxauto.cost.compute import factor_dims, matrix_seconds, operand_bytes, traffic_seconds
from jaxauto.cost.onchip import SHARE
from jaxauto.groups import Operand, Operation
from jaxauto.strategies import project

FEWEST = 4  # devices
PIECES = 2  # of the result in a trip
ADDED_UP = 2  # times that the result passes through HBM, beside what the dot writes
COPIED = 2  # times that an operand (its pieces, of a batch) does as it is copied, beside what the dot reads
STREAMED = 0.5  # of the flops are done on what is there already, and read nothing meanwhile
LANES = 128  # what XLA wants the last dimension of a piece to be a multiple of


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
        whole = sum(sizes[k] for k in lacking)
        longer = _read_again(flops, once, whole, count / PIECES, batch > 1, chip)
        pieces = sum(sizes[k] for k in range(len(op.operands)) if k not in lacking)
        turned = _transposed(op, result, values, d, here, count, mesh, sizes, chip)
        longer = longer + traffic_seconds(ADDED_UP * added + np.where(batch > 1, COPIED * pieces, turned), chip)
        hidden[rows] |= pairs
        extra[rows] += pairs * longer[rows][:, None]
    return hidden, extra


def _read_again(flops, once, whole, trips, batch, chip: Any) -> np.ndarray:
    """Seconds that a dot takes longer as each trip reads ``whole`` bytes of an operand.

    Streamed: of two dots one reads HBM; the other's operand is brought on chip before, while the first leaves time for it.
    """
    apart = np.maximum(flops, traffic_seconds(once, chip))
    through = np.maximum(flops, traffic_seconds(once + (trips - 1) * whole, chip))
    streamed = np.maximum(through, STREAMED * flops + traffic_seconds(trips * whole, chip))
    near = np.where(whole <= SHARE * chip.vmem_bytes, apart, np.where(whole < chip.vmem_bytes, streamed, through))
    return np.where(batch, through, near) - apart


def _transposed(op: Operation, result: Operand, values: dict, d: int, here, count, mesh: MeshAxes, sizes, chip: Any) -> np.ndarray:
    """Bytes of the copy that transposes an operand before the loop, for each state.

    The result's last dimension, as it goes on, is the last in memory where its piece fills whole lanes, else the other one; copied is the
    operand that lacks it. Of a result with several dimensions of one operand that one is copied.
    """
    named = [{f for _, f in o.dims if f} for o in (*op.operands, result)]
    own = [(found & named[-1]) - set.intersection(*named) for found in named[:-1]]
    if len(own) != 2 or not all(own):
        return np.zeros(len(here))
    if len(own[0]) != len(own[1]):
        copied = sizes[int(len(own[1]) > len(own[0]))]
    else:
        last = stored_order(result, values)[-1]
        split = np.where(here == last, np.asarray(mesh.sizes, float), 1.0).prod(-1) * np.where(last == d, count, 1.0)
        whole_lanes = values[result.value].shape[last] / split % LANES == 0
        has = int(result.dims[last][1] in own[1])
        copied = np.where(whole_lanes, sizes[1 - has], sizes[has])
    return np.where(copied <= SHARE * chip.vmem_bytes, 1, COPIED) * copied


def stored_order(result: Operand, values: dict) -> tuple[int, ...]:
    """The dimensions of a result, but for those of one element, in the order in which it goes on: past transpositions of it alone."""
    order, value = tuple(range(len(result.dims))), values[result.value]
    while len(value.users) == 1 and value.users[0].prim in ("transpose", "convert_element_type"):
        (node,) = value.users
        order = tuple(order[k] for k in node.params.get("permutation", range(len(order))))
        value = values[node.outputs[0]]
    return tuple(k for k in order if result.dims[k][1])


def _batch(op: Operation, state: np.ndarray, mesh: MeshAxes) -> np.ndarray:
    """How many dots of a batch one device does, for each state."""
    count = np.ones(len(state))
    for k, (factor, size) in enumerate(op.factors):
        if all(any(f == factor for _, f in o.dims) for o in (*op.operands, *op.results)):
            count *= size / np.where(state == k, np.asarray(mesh.sizes, float), 1.0).prod(-1)
    return count
