"""One residual more or less: what blocks keep, changed step by step while the whole step gets faster.

A threshold on seconds per byte (``remat.py``) names few of all sets that can be kept, and the programme over blocks (``chain.py``) adds up
seconds and bytes of each block by itself: it cannot see that the head of a model runs while nothing else is at the peak. Here the T and
the peak of the whole step decide. Blocks of equal form that keep alike change together. Blocks left as written again are tried first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jaxauto.blocks import Block, closure
from jaxauto.cost.compute import traffic_seconds
from jaxauto.solve.candidate import Candidate
from jaxauto.solve.remat import Kept, Remat
from jaxauto.solve.tighten import TOLERANCE

_LEAST = 2e-4  # of a step's time: what a swap has to promise to be tried
_MOST = 48  # answers that are looked at
_VALUES = 60_000  # that are rewritten for them in all: fewer answers of a large program
_PATIENCE = 16  # answers in a row that are no better, before the rest is left
_PAIRED = 4  # swaps without room, and what each is tried with
_SURE = 0.25  # of the bytes that are kept in addition, seen at the peak: what has no room so is not tried by itself where few can be


@dataclass(frozen=True)
class Swap:
    """``kept`` with ``value`` of a block (and its like in blocks that are alike) kept if it was not, or not any more.

    ``gain``: seconds that it promises, unsharded: of what need not run again, or of traffic to and from memory. ``freed``: bytes that
    are not kept any more, unsharded; less than 0: that are now.
    """

    gain: float
    freed: float
    value: int
    kept: Kept


def swaps(remat: Remat, kept: Kept, offloaded: frozenset[int] = frozenset()) -> list[Swap]:
    """All swaps, what promises most first; ``offloaded`` values are not swapped."""
    found = [swap for members in _alike(remat, kept) for swap in _swaps(remat, kept, members, offloaded)]
    return sorted(found, key=lambda s: (-s.gain, s.value))


def crossings(remat: Remat, kept: Kept, others: Iterable[Kept]) -> list[Kept]:
    """``kept``, but in blocks that are alike what one of ``others`` keeps: each that differs, once."""
    groups = _alike(remat, kept)
    crossed = (tuple(other[b] if b in members else keep for b, keep in enumerate(kept)) for members in groups for other in others)
    return [found for found in dict.fromkeys(crossed) if found != kept]


def swapped(
    remat: Remat,
    best: Candidate,
    make: Callable[[Kept], Candidate],
    budget_bytes: float,
    devices: int,
    over: Callable[[], bool],
    pieces: Callable[[int], float] = lambda _: 1.0,
) -> Candidate:
    """``best``, or what one swap after the other makes of it, each faster than the one before and within the budget.

    Where no swap by itself is, what would be faster but has no room is tried with something else dropped for it.

    Args:
      make: the answer that keeps something else, sharded as ``best`` is.
      over: whether there is no time left.
      pieces: value → in how many pieces it lies on the mesh.
    """
    walk = _Walk(remat, best, make, budget_bytes, devices, over, pieces)
    while walk.as_written() or walk.single() or walk.pair():
        pass
    return walk.best


class _Walk:
    def __init__(
        self,
        remat: Remat,
        best: Candidate,
        make: Callable[[Kept], Candidate],
        budget: float,
        devices: int,
        over: Callable[[], bool],
        pieces: Callable[[int], float],
    ):
        self.remat, self.best, self.make, self.budget, self.over, self.pieces = remat, best, make, budget, over, pieces
        self.tries = min(_MOST, _VALUES // len(remat.graph.values))
        self.few = self.tries < _MOST
        self.waited = 0  # answers that were no better, since one was
        self.least = _LEAST * best.seconds * devices
        self.slower: set[int] = set()  # values whose swap does not pay
        self.written: set[Kept] = set()  # what was looked at with blocks as written
        self.large: dict[int, float] = {}  # values whose swap pays but has no room: bytes over the budget

    def as_written(self) -> bool:
        """Whether nothing run again of some blocks was better."""
        kept = self.best.variant.kept
        for members in _alike(self.remat, kept):
            whole = tuple(None if b in members else keep for b, keep in enumerate(kept))
            if whole == kept or whole in self.written:
                continue
            self.written.add(whole)
            if self.few and self.best.peak_bytes + _SURE * self._dropped(members) > self.budget:
                continue
            candidate = self._look(whole)
            if candidate is None:
                return False
            if candidate.peak_bytes <= self.budget and candidate.seconds < self.best.seconds * (1 - TOLERANCE):
                return self._take(candidate)
        return False

    def _dropped(self, members: list[int]) -> float:
        """Bytes of one device that some blocks would keep as written, and do not."""
        kept, blocks = self.best.variant.kept, self.remat.blocks
        values = ((v, blocks[b].count) for b in members for v in {*blocks[b].residuals} - _held(blocks[b], kept[b]))
        return sum(self.remat.graph.values[v].nbytes * count / self.pieces(v) for v, count in values)

    def single(self) -> bool:
        """Whether one swap was better."""
        for swap in self._offered():
            if swap.value in self.slower or swap.value in self.large:
                continue
            added = max(0.0, -swap.freed) / self.pieces(swap.value)
            if self.few and self.best.peak_bytes + _SURE * added > self.budget:  # not made to see it
                self.large[swap.value] = self.best.peak_bytes + added - self.budget
                continue
            candidate = self._look(swap.kept)
            if candidate is None:
                return False
            if candidate.seconds >= self.best.seconds * (1 - TOLERANCE):
                self.slower.add(swap.value)
            elif candidate.peak_bytes > self.budget:
                self.large[swap.value] = candidate.peak_bytes - self.budget
            else:
                return self._take(candidate)
        return False

    def pair(self) -> bool:
        """Whether one swap was better with another that makes room for it."""
        self.waited = 0
        for swap in [s for s in self._offered() if s.value in self.large][:_PAIRED]:
            most = self.large[swap.value]
            room = [s for s in swaps(self.remat, swap.kept, self.best.variant.offloaded) if s.freed >= most and s.value != swap.value]
            for other in room[:_PAIRED]:
                candidate = self._look(other.kept)
                if candidate is None:
                    return False
                if candidate.peak_bytes <= self.budget and candidate.seconds < self.best.seconds * (1 - TOLERANCE):
                    return self._take(candidate)
        return False

    def _offered(self) -> list[Swap]:
        variant = self.best.variant
        return [s for s in swaps(self.remat, variant.kept, variant.offloaded) if s.gain >= self.least]

    def _look(self, kept: Kept) -> Candidate | None:
        if self.tries == 0 or self.waited == _PATIENCE or self.over():
            return None
        self.tries, self.waited = self.tries - 1, self.waited + 1
        return self.make(kept)

    def _take(self, candidate: Candidate) -> bool:
        if candidate.peak_bytes < self.best.peak_bytes:
            self.large.clear()  # there may be room now
        self.best, self.waited = candidate, 0
        return True


def _alike(remat: Remat, kept: Kept) -> list[list[int]]:
    """Blocks of equal form that keep alike."""
    groups: dict[tuple, list[int]] = defaultdict(list)
    for b, (block, keep) in enumerate(zip(remat.blocks, kept, strict=True)):
        place = {v: k for k, v in enumerate(block.made)}
        groups[remat.forms[b], None if keep is None else frozenset(place[v] for v in keep)].append(b)
    return list(groups.values())


def _swaps(remat: Remat, kept: Kept, members: list[int], offloaded: frozenset[int]) -> Iterator[Swap]:
    """Of blocks that are alike."""
    block, drops = remat.blocks[members[0]], remat.drops[members[0]]
    held = _held(block, kept[members[0]])
    place = {v: k for k, v in enumerate(block.made)}
    before = _again(remat, block, held)
    decided = {d.value for d in drops} | {d.instead for d in drops if d.instead is not None}
    for value in sorted(decided - offloaded):
        freed = remat.graph.values[value].nbytes * (1 if value in held else -1)
        gain = float(traffic_seconds(2 * max(freed, 0.0), remat.chip)) + before - _again(remat, block, held ^ {value})
        changed = list(kept)
        for m in members:
            changed[m] = _held(remat.blocks[m], kept[m]) ^ {remat.blocks[m].made[place[value]]}
        times = block.count * len(members)
        yield Swap(gain * times, freed * times, value, tuple(changed))


def _held(block: Block, keep: frozenset[int] | None) -> frozenset[int]:
    return frozenset(block.residuals) if keep is None else keep


def _again(remat: Remat, block: Block, keep: frozenset[int]) -> float:
    """Seconds of what runs again, in one trip, at the most."""
    return sum(remat.again_seconds(node, max(remat.shares)) for node in closure(block, keep)[0])
