"""Where XLA:CPU places arrays in memory, and the gaps that are left between them.

The largest array, or the one that is there the longest, is placed first, each in the smallest gap that is free for all its time; of both
orders the one is taken that needs less (heap_simulator.cc, GlobalDecreasingSizeBestFitHeap; buffer_assignment.cc). An array that overlaps
one of half its size lies beside it, and memory that was free before and after is not used: of a language model's logits, narrow and wide,
a fifth of all. XLA:TPU places them otherwise: of what its schedules have alive, these orders give other gaps than it has.
"""

from __future__ import annotations

import numpy as np

LEAST = 1 / 1024  # of all that is there at once: what is smaller finds room in the gaps


def live(begin: np.ndarray, end: np.ndarray, bytes_: np.ndarray) -> float:
    """The most bytes that are there at once, of arrays that are there from ``begin`` to ``end``, inclusive: ``[n]`` each."""
    if not len(begin):
        return 0.0
    change = np.bincount(begin, bytes_, minlength=int(end.max()) + 2) - np.bincount(end + 1, bytes_, minlength=int(end.max()) + 2)
    return float(np.cumsum(change).max())


def packed(begin: np.ndarray, end: np.ndarray, bytes_: np.ndarray) -> float:
    """Bytes of the heap that such arrays are placed in, gaps included."""
    spatial, temporal = np.argsort(-bytes_, kind="stable"), np.lexsort((-bytes_, begin - end))
    return min(float((offsets(begin[o], end[o], bytes_[o]) + bytes_[o]).max(initial=0.0)) for o in (spatial, temporal))


def within(begin: np.ndarray, end: np.ndarray, bytes_: np.ndarray, returned: np.ndarray) -> np.ndarray:
    """Which arrays lie in the memory of a result before it is made: ``bool[n]``. Such memory is no part of the heap.

    The largest comes first, and finds any result that is no smaller while nothing else is in it (BufferAssigner::AssignSingleHloBuffer).
    """
    found, taken = np.zeros(len(begin), bool), {int(k): [int(k)] for k in np.nonzero(returned)[0]}
    for k in np.argsort(-bytes_, kind="stable") if taken else ():
        roomy = (there for result, there in taken.items() if not returned[k] and bytes_[k] <= bytes_[result])
        free = next((there for there in roomy if all(end[k] < begin[x] or end[x] < begin[k] for x in there)), None)
        if free is not None:
            free.append(int(k))
            found[k] = True
    return found


def large(begin: np.ndarray, end: np.ndarray, bytes_: np.ndarray) -> np.ndarray:
    """Those that are not small beside all that is there at once: ``bool[n]``."""
    return bytes_ > LEAST * live(begin, end, bytes_)


def offsets(begin: np.ndarray, end: np.ndarray, bytes_: np.ndarray) -> np.ndarray:
    """Where each array is placed, one after the other: ``[n]``, bytes."""
    offset = np.zeros(len(begin))
    for n in range(len(begin)):
        beside = np.nonzero((begin[:n] <= end[n]) & (end[:n] >= begin[n]))[0]
        beside = beside[np.argsort(offset[beside], kind="stable")]
        reached = np.maximum.accumulate(np.concatenate(([0.0], offset[beside] + bytes_[beside])))
        free = offset[beside] - reached[:-1]
        fits = np.nonzero(free >= bytes_[n])[0]
        offset[n] = reached[fits[free[fits].argmin()]] if len(fits) else reached[-1]
    return offset
