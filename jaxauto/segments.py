"""Where to cut a straight program: at narrow waists, in step with its repetitions.

``cut`` first looks for repetition: the same sequence of operations and shapes, over and over, as the layers of a Python loop leave it. Each
repetition becomes a segment, at the offset where least crosses. What does not repeat is cut, narrowest waist first, wherever both
sides do real work and save at least ``_WORTH`` times the bytes that cross the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_WORTH = 4.0  # a cut keeps what crosses it; with less than a few times that on both sides nothing would be gained
_TIE = 1.01  # waists that differ by less are the same waist: scalars and row statistics beside the residual stream
_PERIODS = 64  # how many distances between equal operations are tried as periods


@dataclass(frozen=True)
class Stretch:
    """A program as arrays. Gap g is the place before node g.

    Attributes:
      tokens: (n,) equal for nodes with the same operation and shapes.
      first, last: (v,) the node that makes each value, and the last one that reads it in the same pass.
      weights: (v,) bytes of these values.
      saved: (n + 1,) bytes of residuals made before each gap.
      heavy: (n + 1,) number of nodes before each gap that are worth not running twice.
    """

    tokens: np.ndarray
    first: np.ndarray
    last: np.ndarray
    weights: np.ndarray
    saved: np.ndarray
    heavy: np.ndarray

    @classmethod
    def of(
        cls, tokens: Sequence[int], spans: Sequence[tuple[int, int]], weights: Sequence[float], costs: Sequence[Sequence[float]]
    ) -> Stretch:
        """From lists: ``spans`` are (first, last) of each value, ``costs`` the bytes saved by and the weight of each node."""
        ends = np.array(spans, dtype=np.int64).reshape(-1, 2)
        saved, heavy = costs
        totals = [np.concatenate([[0.0], np.cumsum(np.asarray(x, dtype=float))]) for x in (saved, heavy)]
        return cls(np.asarray(tokens, dtype=np.int64), ends[:, 0], ends[:, 1], np.asarray(weights, dtype=float), *totals)

    def crossing(self, free: np.ndarray) -> np.ndarray:
        """(n + 1,) bytes that cross each gap, without the values that ``free`` marks."""
        weights = np.where(free, 0.0, self.weights)
        size = len(self.tokens) + 1
        opened = np.bincount(self.first + 1, weights, size)
        closed = np.bincount(self.last + 1, weights, size + 1)[:size]
        return np.cumsum(opened - closed)

    def crosses(self, gap: int) -> np.ndarray:
        """(v,) which values cross a gap."""
        return (self.first < gap) & (self.last >= gap)


def cut(stretch: Stretch, lo: int, hi: int) -> list[int]:
    """The gaps at which nodes ``lo`` … ``hi`` - 1 are cut, in order, without the two ends."""
    repeated = _repetitions(stretch, lo, hi)
    free = np.zeros(len(stretch.weights), bool)
    for gap in (lo, hi, *(g for run in repeated for g in run)):
        free |= stretch.crosses(gap)
    cuts = {g for run in repeated for g in run}
    bounds = [lo, *(g for run in repeated for g in (run[0], run[-1])), hi]
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        cuts |= _waists(stretch, start, stop, free)
    return sorted(cuts - {lo, hi})


def _repetitions(stretch: Stretch, lo: int, hi: int) -> list[list[int]]:
    """For each part that repeats, in order, its gaps: those between its repetitions and its two ends."""
    best = _longest_run(stretch.tokens[lo:hi])
    if best is None:
        return []
    start, stop, period = best[0] + lo, best[1] + lo, best[2]
    gaps = _aligned(stretch, start, stop, period)
    runs = [gaps] if _worth_cutting(stretch, gaps) else []
    return [*_repetitions(stretch, lo, start), *runs, *_repetitions(stretch, stop, hi)]


def _worth_cutting(stretch: Stretch, gaps: list[int]) -> bool:
    if len(gaps) < 3:
        return False
    inner = gaps[1]
    crossing = stretch.weights[stretch.crosses(inner)].sum()
    per_part = stretch.saved[gaps[-1]] - stretch.saved[gaps[0]]
    heavy = stretch.heavy[gaps[-1]] - stretch.heavy[gaps[0]]
    parts = len(gaps) - 1
    return heavy >= parts and per_part / parts >= crossing


def _longest_run(tokens: np.ndarray) -> tuple[int, int, int] | None:
    """(start, stop, period) of the longest part that repeats at least twice; the shortest period among equals."""
    best: tuple[int, int, int] | None = None
    for period in _periods(tokens):
        same = np.concatenate([[False], tokens[period:] == tokens[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        begins, ends = edges[::2], edges[1::2]
        if not len(begins):
            continue
        k = int(np.argmax(ends - begins))
        length = int(ends[k] - begins[k])
        if length >= period and (best is None or length + period > best[1] - best[0]):
            best = (int(begins[k]), int(ends[k]) + period, period)
    return best


def _periods(tokens: np.ndarray) -> list[int]:
    """Distances between neighbouring equal tokens, the most frequent ones, by increasing distance."""
    order = np.argsort(tokens, kind="stable")
    distance = np.diff(order)[tokens[order][1:] == tokens[order][:-1]]
    values, counts = np.unique(distance, return_counts=True)
    chosen = values[np.argsort(-counts * values, kind="stable")[:_PERIODS]]
    return sorted(int(v) for v in chosen)


def _aligned(stretch: Stretch, start: int, stop: int, period: int) -> list[int]:
    """The gaps ``period`` apart where least crosses; of equal ones those that begin first."""
    crossing = stretch.crossing(np.zeros(len(stretch.weights), bool))
    offsets = range(min(period, stop - start - 2 * period + 1))
    mean = np.array([crossing[start + o : stop + 1 : period].mean() for o in offsets])
    offset = int(np.argmax(mean <= _TIE * mean.min()))
    return list(range(start + offset, stop + 1, period))


def _waists(stretch: Stretch, lo: int, hi: int, free: np.ndarray) -> set[int]:
    """Cuts of a part without repetition; ``free`` marks values that are alive anyway and is extended."""
    found: set[int] = set()
    parts = [(lo, hi)]
    while parts:
        start, stop = parts.pop()
        if stop - start < 2:
            continue
        crossing = stretch.crossing(free)[start + 1 : stop]
        before = stretch.saved[start + 1 : stop] - stretch.saved[start]
        after = stretch.saved[stop] - stretch.saved[start + 1 : stop]
        heavy = np.minimum(stretch.heavy[start + 1 : stop] - stretch.heavy[start], stretch.heavy[stop] - stretch.heavy[start + 1 : stop])
        able = (np.minimum(before, after) >= np.maximum(_WORTH * crossing, 1.0)) & (heavy > 0)
        if not able.any():
            continue
        gap = start + 1 + int(np.argmin(np.where(able, crossing, np.inf)))
        free |= stretch.crosses(gap)
        found.add(gap)
        parts += [(start, gap), (gap, stop)]
    return found
