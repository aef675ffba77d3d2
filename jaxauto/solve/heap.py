"""The heap of one device, for a solution: all arrays that are no argument of the step, as XLA:CPU places them."""

from __future__ import annotations

import numpy as np

from jaxauto.cost.heap import large, live, packed, within
from jaxauto.solve.beside import held_beside
from jaxauto.solve.model import Model
from jaxauto.solve.widened import in_halves

PLACED = frozenset({"cpu"})  # whose heaps are known


def heap_gaps(model: Model, x: np.ndarray) -> float:
    """Bytes that are allocated beyond those alive at once: gaps in the heap (``cost/heap.py``), and in results before they are made."""
    begin, end, bytes_, returned = arrays(model, x)
    counts = large(begin, end, bytes_) | returned
    begin, end, bytes_, returned = begin[counts], end[counts], bytes_[counts], returned[counts]
    heap = ~(returned | within(begin, end, bytes_, returned))
    return packed(begin[heap], end[heap], bytes_[heap]) + float(bytes_[returned].sum()) - live(begin, end, bytes_)


def arrays(model: Model, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """First and last half of a position, bytes of one device, and whether the step returns it, in a place of its own: ``[n]`` each."""
    b, beside = model.buffers, held_beside(model)
    others = ~beside.widened
    apart, second = in_halves(model, x)
    own = np.nonzero(~b.is_input & (b.end >= b.start))[0]
    late = np.array([int(b.ids[k]) in second for k in own], int)
    begin = np.concatenate(
        [2 * b.start[own] + late, 2 * beside.begin[others], 2 * model.arrivals.position, [a for a, _, _ in apart]]
    ).astype(int)
    end = np.concatenate([2 * b.end[own] + late, 2 * beside.end[others], 2 * model.arrivals.position, [e for _, e, _ in apart]]).astype(int)
    bytes_ = np.concatenate([model.buffer_sizes(x)[own], beside.bytes_(x)[others], model.arrivals.bytes_(x), [s for _, _, s in apart]])
    returned = np.concatenate([b.is_output[own], np.zeros(len(bytes_) - len(own), bool)])
    there = bytes_ > 0
    return begin[there], end[there], bytes_[there], returned[there]
