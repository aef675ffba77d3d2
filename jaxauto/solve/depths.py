"""How deep the values between blocks are made again (``reruns.py``) under a limit of memory: Rotor's dynamic programme, with bytes.

Of the program with everything recomputed the live bytes B(t) at each position are known, those of values 1 … n between their making and
their first reader of the backward pass left out: the least there can be. u is what is stored on top of it. The values are taken for a
chain: each is made from the one before it, and they go backward from the last to the first, value k while B is at most ``need[k]`` and
what of it is in B anyway. Under a limit M (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, Inria RR-9302, theorem 1, whose slots are
bytes here) the seconds of what runs again

    C(i, i, u) = 0                                                          where u + need[i] ≤ M, else ∞
    C(i, j, u) = min over i < k ≤ j of  F(i, k) + C(k, j, u + b[k]) + C(i, k - 1, u)

for values i + 1 … j of which none is there: one run comes from i to j, which it leaves, and may leave some k on the way; what it does not
leave is made again later, one deeper. The forward pass is such a run that costs nothing and need not leave the last value.
A program that is no chain takes other bytes than that: ``profile`` tells them, and the programme is asked again for so much less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_UNITS = 256  # that what can be stored is counted in
_ASKED = 5  # times, each for what the answer before was over
_MORE = (1.0, 1.02, 1.05, 1.1, 1.2)  # times the least: bytes are rounded up to units

Depth = dict[int, int]  # number of a value → depth; 0 is left out


@dataclass(frozen=True)
class Value:
    """A value that could be made again. Positions are those of ``Buffers``.

    Attributes:
      bytes_: of it, of a scan all stacks that only the backward pass reads.
      left: its last reader in the forward pass; back: the first in the backward pass; done: the last.
      rise: bytes that making it takes on top of what it is made from, itself included.
      seconds: that it takes. nodes: that run for it.
      above: those of the others that it is made from.
      reads: (number, bytes, last position) of values that must live on for it.
    """

    number: int
    bytes_: float
    left: int
    back: int
    done: int
    rise: float
    seconds: float
    nodes: int
    above: tuple[int, ...]
    reads: tuple[tuple[int, float, int], ...]


class Depths:
    """What can be decided of ``values``, in the order of the forward pass, of a program with ``live`` bytes where none is made again."""

    def __init__(self, values: Sequence[Value], live: np.ndarray):
        self.values, self.live = values, live
        count = len(values)
        self.bytes_ = np.array([0.0, *(v.bytes_ for v in values)])
        self.seconds = np.cumsum([0.0, *(v.seconds for v in values)])
        left = np.array([-1, *(v.left for v in values)])
        turn = np.append(len(live), np.maximum.accumulate([v.back for v in values][::-1])[::-1])  # from when on each goes backward
        steps = np.zeros(len(live) + 1)
        for v in values:
            if v.back > v.left + 1:
                steps[v.left + 1] -= v.bytes_
                steps[v.back] += v.bytes_
        least = self.floor = live + np.cumsum(steps)[:-1]
        most = lambda first, end: least[first:end].max() if end > first else -math.inf  # noqa: E731
        self.need = np.array([-math.inf, *(most(turn[k], turn[k - 1]) - self.bytes_[k] for k in range(1, count + 1))])
        self.begin = np.array([-math.inf, *(least[turn[k]] - self.bytes_[k] for k in range(1, count + 1))])
        self.end = np.array([most(left[i] + 1, turn[count]) for i in range(count + 1)])  # of the forward pass, nothing left after i
        self.passing = np.full((count + 1, count + 1), -math.inf)  # [i, k]: of the forward pass from i to k
        self.rise = np.zeros((count + 1, count + 1))  # [i, k]: the most that making i + 1 ... k takes at once
        rises = np.array([0.0, *(v.rise for v in values)])
        for i in range(count):
            self.rise[i, i + 1 :] = np.maximum.accumulate(rises[i + 1 :])
            self.passing[i, i + 1 :] = [most(left[i] + 1, left[k] + 1) for k in range(i + 1, count + 1)]

    @cached_property
    def least(self) -> float:
        """The least M for which there is an answer, however long it takes: the programme above with bytes for seconds."""
        count = len(self.values)
        need = np.full((count + 1, count + 1), math.inf)
        need[np.diag_indices(count + 1)] = self.need
        for size in range(1, count + 1):
            for i in range(count + 1 - size):
                j, ks = i + size, slice(i + 1, i + size + 1)
                runs = self.begin[j] + self.rise[i, ks]
                need[i, j] = np.maximum(np.maximum(self.bytes_[ks] + need[ks, j], need[i, i:j]), runs).min()
        whole = np.maximum(self.end, need[:, count])
        for i in range(count - 1, -1, -1):
            ks = slice(i + 1, count + 1)
            left = np.maximum(np.maximum(self.passing[i, ks], self.bytes_[ks] + whole[ks]), need[i, i:count])
            whole[i] = min(whole[i], left.min())
        return max(float(whole[0]), float(self.floor.max()))

    def within(self, limit: float) -> Depth | None:
        """The least seconds under a limit; None where none is found."""
        asked = limit
        for _ in range(_ASKED):
            depth = self.at_most(asked)
            if depth is None:
                return None
            over = float(self.profile(depth).max()) - limit
            if over <= 0:
                return self._spared(depth, limit)
            asked -= over
        return None

    def leanest(self) -> Depth | None:
        """About the least memory that there is an answer for."""
        return next((d for d in (self.at_most(self.least * more) for more in _MORE) if d is not None), None)

    def at_most(self, limit: float) -> Depth | None:
        """The least seconds under a limit, the values taken for a chain."""
        return _Programme(self, limit).answer()

    def _spared(self, depth: Depth, limit: float) -> Depth:
        """Less is made again, or less deep, the dearest per byte first, as far as the limit allows."""
        for v in sorted(self.values, key=lambda v: -v.seconds / v.bytes_):
            for less in range(depth.get(v.number, 0)):
                other = {**depth, v.number: less} if less else {n: d for n, d in depth.items() if n != v.number}
                if self.profile(other).max() <= limit:
                    depth = other
                    break
        return depth

    def nodes(self, depth: Depth) -> int:
        """How many nodes run again, each time that they do."""
        runs = self._runs(depth)
        return sum(v.nodes * sum(v.number in run.members for run in runs) for v in self.values)

    def profile(self, depth: Depth) -> np.ndarray:
        """Live bytes at each position."""
        steps = np.zeros(len(self.live) + 1)
        spikes: list[tuple[int, float]] = []
        awaited: dict[int, tuple[float, int, int]] = {}
        for run in self._runs(depth):
            before = highest = 0.0
            for v in run.members.values():
                highest = max(highest, before + v.rise)
                if depth[v.number] == run.depth:
                    before += v.bytes_
                    if v.done > v.left:
                        steps[v.left + 1] -= v.bytes_
                        steps[v.done + 1] += v.bytes_
                    steps[run.start] += v.bytes_
                    steps[max(v.done, run.start) + 1] -= v.bytes_
                for number, bytes_, last in v.reads:
                    until = max(run.start, awaited.get(number, (0.0, 0, 0))[2])
                    awaited[number] = bytes_, last, until
            spikes.append((run.start, highest - before))
        for bytes_, last, until in awaited.values():
            if last < until:
                steps[last + 1] += bytes_
                steps[until + 1] -= bytes_
        found = self.live + np.cumsum(steps)[:-1]
        for at, more in spikes:
            found[at] += max(more, 0.0)
        return found

    def _runs(self, depth: Depth) -> list[_Run]:
        """What runs again together, the deepest first; as ``reruns.find_reruns`` has it."""
        found: list[_Run] = []
        for level in sorted(set(depth.values()), reverse=True):
            behind: dict[int, frozenset[int]] = {}
            groups: list[set[int]] = []
            for v in self.values:
                if depth.get(v.number, 0) < level:
                    continue
                behind[v.number] = frozenset((v.number,)).union(*(behind[x] for x in v.above if x in behind))
                if depth[v.number] == level:
                    alike = [g for g in groups if not g.isdisjoint(behind[v.number])]
                    groups = [g for g in groups if g not in alike] + [set(behind[v.number]).union(*alike)]
            found += [self._run(depth, level, group, found) for group in groups]
        return found

    def _run(self, depth: Depth, level: int, group: set[int], deeper: Sequence[_Run]) -> _Run:
        members = {v.number: v for v in self.values if v.number in group}
        made = {n for n in members if depth[n] == level}
        start = min(v.back for v in members.values() if v.number in made)
        start = min([start, *(run.start for run in deeper if not made.isdisjoint(run.above))])
        return _Run(level, start, members, frozenset(x for v in members.values() for x in v.above) - members.keys())


@dataclass(frozen=True)
class _Run:
    """Values made in one rerun, or passed through by it. start: its position. above: what it starts from."""

    depth: int
    start: int
    members: Mapping[int, Value]
    above: frozenset[int]


class _Programme:
    """The recurrence at the head of the file, for one limit."""

    def __init__(self, depths: Depths, limit: float):
        self.depths, self.limit = depths, limit
        known = [*depths.need[1:], *depths.end]
        span = max(limit - min(x for x in known if x > -math.inf), 1.0)
        largest = float(depths.bytes_.max())
        self.unit = largest / max(round(largest * _UNITS / span), 1)
        self.stored = np.minimum(np.ceil(depths.bytes_ / self.unit - 1e-6), _UNITS + 1).astype(int)
        self.used = np.arange(_UNITS + 1)

    def answer(self) -> Depth | None:
        if self.limit < self.depths.floor.max():
            return None
        count = len(self.depths.values)
        self.cost = np.full((count + 1, count + 1, _UNITS + 1), math.inf, np.float32)
        self.after = np.empty_like(self.cost)  # [k, j, u]: with k stored on top of u
        self.choice = np.zeros(self.cost.shape, np.int16)
        for size in range(count + 1):
            for i in range(count + 1 - size):
                self._between(i, i + size)
        return self._read_off(*self._forward())

    def _fits(self, need: np.ndarray) -> np.ndarray:
        """[..., u]: whether u on top of ``need`` keeps to the limit."""
        return self.used <= (self.limit - np.asarray(need)[..., None]) / self.unit + 1e-6

    def _between(self, i: int, j: int) -> None:
        depths, ks = self.depths, slice(i + 1, j + 1)
        if i == j:
            self.cost[i, i] = np.where(self._fits(depths.need[i]), 0.0, math.inf)
        else:
            found = self.after[ks, j] + self.cost[i, i:j] + (depths.seconds[ks] - depths.seconds[i])[:, None]
            found = np.where(self._fits(depths.begin[j] + depths.rise[i, ks]), found, math.inf)
            self.choice[i, j] = found.argmin(0) + i + 1
            self.cost[i, j] = found.min(0)
        self.after[i, j] = self._on_top(self.cost[i, j], i)

    def _on_top(self, cost: np.ndarray, k: int) -> np.ndarray:
        """[u]: a cost by what is stored, where value k is stored on top of u."""
        found, here = np.full_like(cost, math.inf), self.stored[k]
        found[: max(_UNITS + 1 - here, 0)] = cost[here:]
        return found

    def _forward(self) -> tuple[np.ndarray, np.ndarray]:
        """[i, u]: the cost where i is the last that the forward pass has left so far, and what it leaves next; 0: nothing."""
        depths, count = self.depths, len(self.depths.values)
        whole = np.where(self._fits(depths.end), self.cost[:, count], math.inf)
        following = np.zeros(whole.shape, int)
        for i in range(count - 1, -1, -1):
            for k in range(i + 1, count + 1):
                found = self._on_top(whole[k], k) + self.cost[i, k - 1]
                found = np.where(self._fits(depths.passing[i, k]), found, math.inf)
                following[i] = np.where(found < whole[i], k, following[i])
                whole[i] = np.minimum(found, whole[i])
        return whole, following

    def _read_off(self, whole: np.ndarray, following: np.ndarray) -> Depth | None:
        count, numbers = len(self.depths.values), [0, *(v.number for v in self.depths.values)]
        if not math.isfinite(whole[0, 0]):
            return None
        found: Depth = {}
        i = used = 0
        left: list[tuple[int, int, int, int]] = []
        while k := int(following[i, used]):
            left.append((i, k - 1, used, 1))
            i, used = k, used + int(self.stored[k])
        left.append((i, count, used, 1))
        while left:
            i, j, used, depth = left.pop()
            while i < j:
                k = int(self.choice[i, j, used])
                found[numbers[k]] = depth
                left.append((i, k - 1, used, depth + 1))
                i, used = k, used + int(self.stored[k])
        return found
