"""What a scan costs when its trips differ (``rewrite/split.py``): options of the chain's dynamic programme (``chain.py``).

A scan is cut into parts, in the order of the forward pass, and what runs again into parts in its turn (``core.Trips``). Trips that do not
run again keep R bytes each, make the rest again in a seconds (with what stacking R takes), and T bytes are alive while one goes backward;
carries are c bytes (none where a first part of one segment begins with arguments), a trip's forward pass takes f seconds. Of parts i with
n_i trips, in k_i segments where they run again:

    kept for the backward pass    K_i = n_i·R,  or k_i·c
    while part i runs back        Σ_{j≤i} K_j + T,  or + what its segment takes, cut as that is; T, forward again: 2·c and the cotangent
    seconds                       Σ n_i·a,  or + n_i·f + k_i · those of its segment

A part of one trip is no loop (``rewrite/recompute.py``): it takes a carry less than is told here.

Cuts that are worked out; of these what nothing beats in bytes and seconds is offered:
- two parts that do not run again, and keep unalike, for all pairs of what the levels keep
- equal segments, one or two deep, and a part that is not run again at the end, for all such pairs: few loops
- by Rotor's recurrence (``rotor.py``) parts of one segment each, that are cut so as they run again: fewest forward passes for any memory
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxauto.blocks import Block, closure
from jaxauto.core import Trips
from jaxauto.cost.compute import traffic_seconds
from jaxauto.cost.stacks import PASSES
from jaxauto.rewrite.split import own_stacks
from jaxauto.solve import rotor
from jaxauto.solve.chain import Option
from jaxauto.solve.remat import Remat

_STEP = 0.02  # of the bytes: options nearer than that are one
_LONG = 256  # trips: of longer scans parts are multiples of an even share of them
_UNITS, _ROOMS = 128, 512  # of trips and of memory that Rotor's recurrence is solved in
_EACH = 0.02  # forward passes of a trip: a part more is worth that
_MOST_PARTS = 32  # each is two or three loops more to compile
_DEEP, _MOST = 16, 4_000  # of cuts two deep: the longest inner segment, and the most segments in one; how many are worked out


@dataclass(frozen=True)
class Keep:
    """What an option of a block stands for. ``parts``: of a scan whose trips differ; ``kept`` is what the first of them keep."""

    kept: frozenset[int] | None
    offloaded: frozenset[int] = frozenset()
    parts: tuple[Trips, ...] = ()


@dataclass(frozen=True)
class Trip:
    """One trip of a scan that keeps ``kept``: R, T and a of the head of the file; ``after``: T of trips that run again."""

    kept: frozenset[int] | None
    held: float
    again: float
    seconds: float
    after: float


@dataclass(frozen=True)
class Costs:
    """For each of some cuts: bytes between the passes, bytes on top of those at the most, seconds."""

    kept: np.ndarray
    peak: np.ndarray
    seconds: np.ndarray


class ScanOptions:
    """The scan of a block, for one sharding.

    ``pieces``: value → in how many pieces it lies on the mesh. ``inside``: what trips keep → what is in memory while one goes backward,
    (value, from, to) in steps of the program; where that is not known it is all that is made again.
    """

    def __init__(
        self,
        remat: Remat,
        block: Block,
        pieces: Callable[[int], float],
        inside: Mapping[frozenset[int] | None, Sequence[tuple[int, int, int]]] | None = None,
    ):
        assert block.scan is not None
        self.remat, self.block, self.pieces, self.inside = remat, block, pieces, inside or {}
        forward, backward = block.scan
        stacked = dict(zip(forward.outputs, forward.bodies[0].outputs, strict=True))
        self.always = {stacked[y] for y in own_stacks(*block.scan, block.graph)} - {*block.residuals}  # carries mostly
        self.carry_bytes = sum(map(self.bytes_of, block.carries))
        first, last = forward.num_consts, forward.num_consts + forward.num_carry
        begin = dict(zip(forward.bodies[0].inputs[first:last], forward.inputs[first:last], strict=True))
        made = (x for v in block.carries if isinstance(x := begin.get(v, v), int) and block.graph.values[x].producer is not None)
        self.begin_bytes = sum(map(self.bytes_of, made))  # arguments are there anyway
        cotangents = backward.bodies[0].inputs[backward.num_consts : backward.num_consts + backward.num_carry]
        self.cotangent_bytes = sum(map(self.bytes_of, cotangents))
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
        inside = self.inside.get(kept) if not away else None  # what comes from the host is there with the rest
        made = self._most_of(inside or [(v, 0, 0) for v in self.block.residuals if v not in held])
        there, forward_again = sum(map(self.bytes_of, held)), 2 * self.carry_bytes + self.cotangent_bytes
        return Trip(kept, there, made, sum(map(self.seconds_of, nodes)) + self.moved(there), max(made, forward_again))

    def _most_of(self, values: Sequence[tuple[int, int, int]]) -> float:
        """Bytes at the most; each value is there from one step to another."""
        begin, end = ({at: 0.0 for _, *both in values for at in (both[0], both[1] + 1)} for _ in range(2))
        for v, start, last in values:
            begin[start] += self.bytes_of(v)
            end[last + 1] += self.bytes_of(v)
        return max(itertools.accumulate(begin[at] - end[at] for at in sorted(begin)), default=0.0)

    def option(self, kept: frozenset[int] | None, parts: tuple[Trips, ...] = (), away: frozenset[int] = frozenset()) -> Option:
        """What the scan costs cut into ``parts``, or whole with ``kept`` kept."""
        held, most, seconds = self._run(parts or (Trips(self.block.count, kept),), functools.cache(lambda kept: self.trip(kept, away)))
        return Option(held, most - held, seconds, Keep(kept, parts=parts))

    def _run(
        self, parts: Sequence[Trips], trip: Callable[[frozenset[int] | None], Trip], begin: float | None = None
    ) -> tuple[float, float, float]:
        """Of parts that follow each other: bytes kept for the backward pass, bytes at the most, seconds; see the head of this file.

        ``begin``: bytes of the carries that a first part of one segment begins with; None: of the scan.
        """
        held = most = seconds = 0.0
        for k, part in enumerate(parts):
            segments = part.count // part.length
            if part.inside:
                starts = (self.begin_bytes if begin is None else begin) if k == 0 and segments == 1 else segments * self.carry_bytes
                _, during, again = self._run(part.inside, trip, 0.0)
                held, seconds = held + starts, seconds + part.count * self.forward_seconds + segments * again
            else:
                alone = trip(part.kept)
                during = alone.again if begin is None else alone.after
                held, seconds = held + part.count * alone.held, seconds + part.count * alone.seconds
            most = max(most, held + during)
        return held, most, seconds

    def costs(self, count: np.ndarray, segments: np.ndarray, trips: Sequence[Trip]) -> Costs:
        """Of cuts into parts.

        Args:
          count: ``[parts, cuts]``; parts of no trips are none. segments: ``[depth, parts, cuts]``; 0 where it is not as deep.
          trips: one of each part.
        """
        held, again, seconds, after = (np.array([[getattr(t, name)] for t in trips]) for name in ("held", "again", "seconds", "after"))
        kept, during, whole = count * held, np.where(segments[0] > 0, after, again) * (count > 0), count.astype(float)
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
        if self.block.count < 2:
            return []
        trips = [self.trip(kept) for kept in dict.fromkeys(ways)]
        trips = [replace(trip, seconds=trip.seconds + (beyond or {}).get(trip.kept, 0.0)) for trip in trips]
        pairs = [(head, tail) for head in trips for tail in trips]
        groups: list[_Table | _Trees] = [t for head, tail in pairs for t in self._tables(head, tail, alone=tail is trips[0])]
        groups.append(self._trees(trips))
        kept, peak, seconds = (np.concatenate([getattr(g.costs, name) for g in groups]) for name in ("kept", "peak", "seconds"))
        ends = np.cumsum([len(g.costs.kept) for g in groups])
        found: list[Option] = []
        for k in np.union1d(_front(kept + peak, seconds), _front(kept, seconds)).tolist():
            group = groups[number := int(np.searchsorted(ends, k, side="right"))]
            what = group.keep(k - int(ends[number]) + len(group.costs.kept))
            found.append(Option(float(kept[k]), float(peak[k]), float(seconds[k]), what))
        return found

    def _tables(self, head: Trip, tail: Trip, *, alone: bool) -> Iterator[_Table]:
        """What cuts cost whose last part keeps what ``tail`` does; ``alone``: and those that have no such part."""
        n = self.block.count
        for count, segments in (*([_pairs(n)] if head is not tail else []), _equal(n), _deeper(n)):
            which = np.nonzero((count[0] > 0) & ((count[-1] > 0) | alone))[0]
            count, segments = count[:, which], segments[:, :, which]
            if len(which):
                yield _Table(head, tail, count, segments, self.costs(count, segments, [head] * (len(count) - 1) + [tail]))

    def _trees(self, trips: Sequence[Trip]) -> _Trees:
        """Rotor's optima, and all of each run again, with nothing kept but what the scan begins with."""
        known, best = {trip.kept: trip for trip in trips}, list(self._optima(trips))
        found = [*(parts for parts in best if len(parts) > 1), *((Trips(self.block.count, inside=parts),) for parts in best)]
        costs = np.array([self._run(parts, known.__getitem__) for parts in found]).reshape(-1, 3).T
        return _Trees(found, Costs(costs[0], costs[1] - costs[0], costs[2]))

    def _optima(self, trips: Sequence[Trip]) -> Iterator[tuple[Trips, ...]]:
        """For less memory each time."""
        unit = -(-self.block.count // _UNITS)
        count = np.arange(-(-self.block.count // unit) + 1) * unit
        lean = min(trips, key=lambda trip: trip.held)
        room = max(self.block.count * lean.held + lean.after, 1.0)  # in more than that nothing need run twice
        step = max(room / _ROOMS, self.carry_bytes / max(self.carry_bytes * _ROOMS // room, 1.0))
        memory, carry = np.arange(1, int(np.ceil(room / step)) + 1) * step, int(np.ceil(self.carry_bytes / step - 1e-9))
        once = np.array([[_fitting(trip, turn, count, memory) for trip in trips] for turn in ("again", "after")])
        forward = self.forward_seconds
        cuts = rotor.cut(*once.min(axis=1), unit * forward, _EACH * forward, carry, least=-(-2 // unit))

        def named(part: rotor.Part, run: int = 0) -> Trips:
            inside = tuple(named(p, 1) for p in part.inside)
            kept = None if inside else trips[once[run, :, part.trips, part.memory].argmin()].kept
            return Trips(part.trips * unit, kept, inside)

        fitting = np.nonzero(np.isfinite(cuts.seconds))[0]
        for at in fitting[_front(memory[fitting], cuts.seconds[fitting])].tolist():
            *before, end = map(named, cuts.parts(at))
            if sum(1 for p in (*before, end) for _ in p.leaves()) <= _MOST_PARTS:
                yield (*before, replace(end, count=end.count + self.block.count - int(count[-1])))


def _fitting(trip: Trip, turn: str, count: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Seconds of so many trips that keep what ``trip`` does, in so many bytes: ``[counts, memory]``; infinite where they do not fit."""
    fits = count[:, None] * trip.held + getattr(trip, turn) <= memory * (1 + 1e-9)
    return np.where(fits, count[:, None] * trip.seconds, np.inf)


@dataclass(frozen=True)
class _Table:
    """Cuts and what they cost, see ``ScanOptions.costs``."""

    head: Trip
    tail: Trip
    count: np.ndarray
    segments: np.ndarray
    costs: Costs

    def keep(self, at: int) -> Keep:
        """What one of them stands for."""
        lengths = [tuple(m for m in part if m) for part in self.segments[:, :, at].T.tolist()]
        keeps = [self.head.kept] * (len(lengths) - 1) + [self.tail.kept]
        cuts = zip(self.count[:, at].tolist(), lengths, keeps, strict=True)
        return Keep(self.head.kept, parts=tuple(_nested(count, segments, kept) for count, segments, kept in cuts if count))


def _nested(count: int, lengths: Sequence[int], kept: frozenset[int] | None) -> Trips:
    """Trips in segments of the first length, these in segments of the second, and so on."""
    return Trips(count, inside=(_nested(lengths[0], lengths[1:], kept),)) if lengths else Trips(count, kept)


@dataclass(frozen=True)
class _Trees:
    """Parts one by one and what they cost."""

    parts: list[tuple[Trips, ...]]
    costs: Costs

    def keep(self, at: int) -> Keep:
        """What one of them stands for."""
        (_, _, first), *_ = self.parts[at][0].leaves()
        return Keep(first, parts=self.parts[at])


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
