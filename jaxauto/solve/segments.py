"""What a scan costs when its trips differ (``rewrite/split.py``): options of the chain's dynamic programme (``chain.py``).

A scan is cut into parts, in the order of the forward pass: part i has n_i trips, in segments of m_i1, these in segments of m_i2, and so on
d_i deep. A trip of it keeps R_i bytes and makes T_i again in a_i seconds (with what stacking R_i takes); carries are c bytes (none where
a first part of one segment begins with arguments), a trip's forward pass takes f seconds:

    between the passes        K = Σ n_i·R_i,  or Σ n_i/m_i1 · c where d_i > 0
    while part i runs back    K_i + (m_i1/m_i2 + m_i2/m_i3 + ...)·c + m_id·R_i + T_i        K_i: of the parts up to i; R_i where d_i > 0
    seconds                   Σ n_i·(a_i + d_i·f)

Cuts that are worked out, for all pairs of what the levels keep, all at once; of these what nothing beats in bytes and seconds is offered:
- two parts, without segments: each trip is run again by itself, or some are not at all
- equal segments, one or two deep, and a part that is not run again at the end
- up to ``_PARTS`` parts of one segment each, shorter each time by what the carries between them take, and such a part at the end
- up to ``_MOST_PARTS`` of these where fewer do not fit, of which the first may be cut into segments once more
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxauto.blocks import Block, closure
from jaxauto.core import Split, Trips
from jaxauto.cost.compute import traffic_seconds
from jaxauto.cost.stacks import PASSES
from jaxauto.rewrite.split import own_stacks
from jaxauto.solve.chain import Option
from jaxauto.solve.remat import Remat

_STEP = 0.02  # of the bytes: options nearer than that are one
_LONG = 256  # trips: of longer scans parts are multiples of an even share of them
_PARTS, _MOST_PARTS = 3, 8  # each is two or three loops more to compile
_NOTABLY = 0.9  # of the bytes of fewer parts: what more of them are for
_DEEP, _MOST = 16, 4_000  # of cuts two deep: the longest inner segment, and the most segments in one; how many are worked out


@dataclass(frozen=True)
class Keep:
    """What an option of a block stands for."""

    kept: frozenset[int] | None
    offloaded: frozenset[int] = frozenset()
    split: Split | None = None


@dataclass(frozen=True)
class Trip:
    """One trip of a scan that keeps ``kept``: R, T and a of the head of the file."""

    kept: frozenset[int] | None
    held: float
    again: float
    seconds: float


@dataclass(frozen=True)
class Costs:
    """For each of some cuts: bytes between the passes, bytes on top of those at the most, seconds."""

    kept: np.ndarray
    peak: np.ndarray
    seconds: np.ndarray


class ScanOptions:
    """The scan of a block, for one sharding; ``pieces``: value → in how many pieces it lies on the mesh."""

    def __init__(self, remat: Remat, block: Block, pieces: Callable[[int], float]):
        assert block.scan is not None
        self.remat, self.block, self.pieces = remat, block, pieces
        forward = block.scan[0]
        stacked = dict(zip(forward.outputs, forward.bodies[0].outputs, strict=True))
        self.always = {stacked[y] for y in own_stacks(*block.scan, block.graph)} - {*block.residuals}  # carries mostly
        self.carry_bytes = sum(map(self.bytes_of, block.carries))
        first, last = forward.num_consts, forward.num_consts + forward.num_carry
        begin = dict(zip(forward.bodies[0].inputs[first:last], forward.inputs[first:last], strict=True))
        made = (x for v in block.carries if isinstance(x := begin.get(v, v), int) and block.graph.values[x].producer is not None)
        self.begin_bytes = sum(map(self.bytes_of, made))  # arguments are there anyway
        self.forward_seconds = sum(map(self.seconds_of, block.forward))

    def bytes_of(self, number: int) -> float:
        """On one device."""
        return self.remat.graph.values[number].nbytes / self.pieces(number)

    def seconds_of(self, node) -> float:
        """Of one run on one device."""
        return self.remat.again_seconds(node) / max(self.pieces(node.outputs[0]), 1.0) if node.outputs else 0.0

    def moved(self, bytes_: float) -> float:
        """Seconds that stacking takes: written, and read by the backward pass."""
        return float(traffic_seconds(PASSES[self.remat.chip.platform] * bytes_, self.remat.chip))

    def trip(self, kept: frozenset[int] | None, away: frozenset[int] = frozenset()) -> Trip:
        """``away``: values in the host's memory."""
        nodes, reads = closure(self.block, kept) if kept is not None else ((), ())
        held = {*(self.block.residuals if kept is None else kept), *self.always, *(v for v in reads if v in self.block.carries)} - away
        made = sum(self.bytes_of(v) for v in self.block.residuals if v not in held)
        there = sum(map(self.bytes_of, held))
        return Trip(kept, there, made, sum(map(self.seconds_of, nodes)) + self.moved(there))

    def option(self, kept: frozenset[int] | None, split: Split | None = None, away: frozenset[int] = frozenset()) -> Option:
        """What the scan costs with one split, or none; ``kept``: of its head."""
        parts = (split or Split()).parts(self.block.count, kept)
        count, deep = np.array([[part.count] for part in parts]), max(len(part.segments) for part in parts)
        segments = np.array([[[*part.segments, *[0] * (deep - len(part.segments))]] for part in parts]).reshape(len(parts), 1, deep)
        costs = self.costs(count, segments.transpose(2, 0, 1), [self.trip(part.kept, away) for part in parts])
        return Option(float(costs.kept[0]), float(costs.peak[0]), float(costs.seconds[0]), Keep(kept, split=split))

    def costs(self, count: np.ndarray, segments: np.ndarray, trips: Sequence[Trip]) -> Costs:
        """Of cuts into parts.

        Args:
          count: ``[parts, cuts]``; parts of no trips are none. segments: ``[depth, parts, cuts]``; 0 where it is not as deep.
          trips: one of each part.
        """
        held, again, seconds = (np.array([[getattr(trip, name)] for trip in trips]) for name in ("held", "again", "seconds"))
        kept, during, whole = count * held, again * (count > 0), count.astype(float)
        for depth, length in enumerate(segments):
            cut = length > 0
            starts = np.where(cut, whole / np.maximum(length, 1), 0.0) * self.carry_bytes
            if depth == 0:
                starts[0] = np.where(length[0] == count[0], self.begin_bytes, starts[0])
                kept = np.where(cut, starts, kept)
                during = during + cut * length * held
            else:
                during = during + np.where(cut, starts - (whole - length) * held, 0.0)
            whole = np.where(cut, length, whole)
        before = np.cumsum(kept, axis=0)
        need = np.where(count > 0, before + during, 0.0).max(axis=0)
        runs = seconds + (segments > 0).sum(axis=0) * self.forward_seconds
        return Costs(before[-1], np.maximum(need - before[-1], 0.0), (count * runs).sum(axis=0))

    def splits(self, ways: Sequence[frozenset[int] | None], beyond: Mapping[frozenset[int] | None, float] | None = None) -> list[Option]:
        """Options that split the scan.

        Args:
          ways: what its parts may keep.
          beyond: seconds that a trip takes beyond what is told here, of each way.
        """
        trips = [self.trip(kept) for kept in dict.fromkeys(ways)]
        trips = [replace(trip, seconds=trip.seconds + (beyond or {}).get(trip.kept, 0.0)) for trip in trips]
        pairs = [(head, tail) for head in trips for tail in trips]
        tables = [t for head, tail in pairs for t in self._tables(head, tail, self._few(head, tail), alone=tail is trips[0])]
        least, lean = min((t.least for t in tables if len(t.segments) == 1), default=0.0), min(trips, key=lambda trip: trip.held)
        many = [t for tail in trips for t in self._tables(lean, tail, self._many(lean), alone=tail is trips[0])]
        tables += [t.below(least * _NOTABLY) for t in many if t.least < least * _NOTABLY]
        if not tables:
            return []
        kept, peak, seconds = (np.concatenate([getattr(t.costs, name) for t in tables]) for name in ("kept", "peak", "seconds"))
        ends = np.cumsum([table.count.shape[1] for table in tables])
        found: list[Option] = []
        for k in np.union1d(_front(kept + peak, seconds), _front(kept, seconds)).tolist():
            table = tables[number := int(np.searchsorted(ends, k, side="right"))]
            at = k - int(ends[number]) + table.count.shape[1]
            found.append(Option(float(kept[k]), float(peak[k]), float(seconds[k]), table.keep(at)))
        return found

    def _few(self, head: Trip, tail: Trip) -> list[Cuts]:
        n = self.block.count
        shorter = (_shorter(n, parts, self._less(head)) for parts in range(1, _PARTS + 1))
        return [*([_pairs(n)] if head is not tail else []), _equal(n), _deeper(n), *shorter]

    def _many(self, head: Trip) -> Iterator[Cuts]:
        n, less = self.block.count, self._less(head)
        yield from (_shorter(n, parts, less) for parts in range(_PARTS + 1, _MOST_PARTS + 1))
        if less:
            yield from (_mixed(n, parts, deep, less) for parts in range(2, _MOST_PARTS + 1) for deep in range(1, parts))

    def _less(self, head: Trip) -> float:
        return self.carry_bytes / head.held if head.held else 0.0

    def _tables(self, head: Trip, tail: Trip, cuts: Iterable[Cuts], *, alone: bool) -> Iterator[_Table]:
        """What cuts cost whose last part keeps what ``tail`` does; ``alone``: and those that have no such part."""
        for count, segments in cuts:
            which = np.nonzero((count[0] > 0) & ((count[-1] > 0) | alone))[0]
            count, segments = count[:, which], segments[:, :, which]
            if len(which):
                yield _Table(head, tail, count, segments, self.costs(count, segments, [head] * (len(count) - 1) + [tail]))


@dataclass(frozen=True)
class _Table:
    """Cuts and what they cost, see ``ScanOptions.costs``."""

    head: Trip
    tail: Trip
    count: np.ndarray
    segments: np.ndarray
    costs: Costs

    @property
    def least(self) -> float:
        """Bytes."""
        return float((self.costs.kept + self.costs.peak).min())

    def below(self, bytes_: float) -> _Table:
        """Those of fewer bytes."""
        which = np.nonzero(self.costs.kept + self.costs.peak < bytes_)[0]
        costs = Costs(self.costs.kept[which], self.costs.peak[which], self.costs.seconds[which])
        return replace(self, count=self.count[:, which], segments=self.segments[:, :, which], costs=costs)

    def keep(self, at: int) -> Keep:
        """What one of them stands for."""
        lengths = [tuple(m for m in part if m) for part in self.segments[:, :, at].T.tolist()]
        (_, first), *rest = zip(self.count[:, at].tolist(), lengths, strict=True)
        keeps = [self.head.kept] * (len(rest) - 1) + [self.tail.kept]
        parts = tuple(Trips(count, segments, kept) for (count, segments), kept in zip(rest, keeps, strict=True) if count)
        return Keep(self.head.kept, split=Split(first, parts))


Cuts = tuple[np.ndarray, np.ndarray]  # as ``ScanOptions.costs`` has them; the last part does not run again, and may have no trips


def _steps(n: int) -> np.ndarray:
    step = -(-n // _LONG)
    return np.arange(step, n, step)


def _pairs(n: int) -> Cuts:
    tail = _steps(n)
    return np.stack([n - tail, tail]), np.zeros((1, 2, len(tail)), int)


@functools.cache
def _equal(n: int) -> Cuts:
    """All of two segments or more."""
    sizes = range(2, n // 2 + 1)
    length = np.concatenate([np.full(n // m - 1, m) for m in sizes] or [np.zeros(0, int)])
    count = np.concatenate([m * np.arange(2, n // m + 1) for m in sizes] or [np.zeros(0, int)])
    return np.stack([count, n - count]), np.stack([length, np.zeros_like(length)])[None]


@functools.cache
def _deeper(n: int) -> Cuts:
    """Two deep: segments of about one length, cut evenly."""
    cuts = {(k * a * b, a * b, b) for b in range(2, _DEEP + 1) for a in range(2, _DEEP + 1) for k in range(1, n // (a * b) + 1)}
    count, outer, inner = np.array(sorted(c for c in cuts if c[1] < c[0] or c[0] < n) or [(0, 0, 0)])[:: max(1, len(cuts) // _MOST)].T
    none = np.zeros_like(count)
    return np.stack([count, n - count]), np.stack([np.stack([outer, none]), np.stack([inner, none])])


def _shorter(n: int, parts: int, less: float) -> Cuts:
    """So many parts of one segment each, every one shorter by ``less`` trips than the one before, as even as that allows."""
    tail = _steps(n)
    longest = np.ceil((n - tail + less * parts * (parts - 1) / 2) / parts).astype(int)
    lengths: list[np.ndarray] = []
    for k in range(parts):
        left = n - tail - sum(lengths, np.zeros_like(tail))
        lengths.append(left if k == parts - 1 else np.minimum(longest - round(k * less), left - 2 * (parts - 1 - k)))
    count = np.stack([*lengths, tail])
    count = count[:, (count[:-1] > 1).all(axis=0)]
    return count, np.stack([*count[:-1], np.zeros_like(count[-1])])[None]


def _mixed(n: int, parts: int, deep: int, less: float) -> Cuts:
    """So many parts of one segment, by how many trips the longest may keep; the first ``deep`` are cut into about equal segments."""
    room = _steps(n)[1:] - less * np.arange(parts + 1)[:, None]
    count = np.maximum(np.floor(room), 0).astype(int)
    inner, left = np.maximum(count[:deep] // 2, 2), n - count[deep:].sum(axis=0)
    for k in range(deep):
        pieces = np.minimum(np.floor((room[k] - inner[k]) / less), -(-left // inner[k])).astype(int)
        count[k], left = inner[k] * pieces, left - inner[k] * pieces
    count[-1] += left  # what the last segments have too many
    whole = (left <= 0) & (count[-1] >= 0) & (count[:deep] > inner).all(axis=0) & (count[deep:-1] > 1).all(axis=0)
    once = np.concatenate([count[:-1], np.zeros_like(count[-1:])])
    twice = np.concatenate([inner, np.zeros_like(count[deep:])])
    return count[:, whole], np.stack([once, twice])[:, :, whole]


def _front(bytes_: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Indices of what nothing beats in both, from the fastest on, each with notably fewer bytes than the one before; and the least."""
    order = np.lexsort((bytes_, seconds))
    least = np.minimum.accumulate(bytes_[order])
    found: list[int] = []
    for k in order[np.concatenate([[True], bytes_[order][1:] < least[:-1]])].tolist():
        if not found or bytes_[k] < bytes_[found[-1]] * (1 - _STEP):
            found.append(k)
    found.append(int(np.lexsort((seconds, bytes_))[0]))
    return np.array(sorted({*found}), int)
