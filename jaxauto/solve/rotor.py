"""Rotor's recurrence, for a chain of trips that are all alike: how they are cut, and what runs again, for any memory at once.

n trips in memory of M bytes go forward and backward as one pair of loops, in L(n, M) seconds, infinite where what they keep does not fit;
or p of them run forward and keep nothing, the others follow, and then the p run again, in all of that memory:

    C(n, M) = min_p  p·f + e + F(p, M) + G(n - p, M)
    F(n, M) = min( L(n, M), C(n, M) )         where the first carry is there anyway
    G(n, M) = min( L(n, M), C(n, M - c) )     where it is kept for what runs again; what a pair of loops keeps has it in

f: seconds of a trip's forward pass, c: bytes of a carry. e: what is charged for a part, so that of cuts that take as long the one with the
fewest loops is chosen. The whole chain is cut alike; but its last part has not run before, and may need less memory: another L.
Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, Inria RR-9302, theorem 1, where L takes one trip alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Part:
    """So many trips, in so many units of memory; ``inside``: how they are cut as they run again, (): they are one pair of loops."""

    trips: int
    memory: int
    inside: tuple[Part, ...] = ()


@dataclass(frozen=True)
class _Table:
    """F and G of the head of this file for one L: ``[trips + 1, memory]`` each, and trips of the first part, 0 where there are no parts."""

    begun: np.ndarray
    follow: np.ndarray
    begun_first: np.ndarray
    follow_first: np.ndarray

    @staticmethod
    def of(once: np.ndarray) -> _Table:
        return _Table(once.copy(), once.copy(), np.zeros(once.shape, int), np.zeros(once.shape, int))


@dataclass(frozen=True)
class Cuts:
    """Of up to n trips.

    Attributes:
      whole, again: of all trips, and of some that run again. carry: units of memory that a carry takes.
    """

    whole: _Table
    again: _Table
    carry: int

    @property
    def seconds(self) -> np.ndarray:
        """Of all trips, for each unit of memory; infinite where nothing fits."""
        return self.whole.begun[-1]

    def parts(self, memory: int) -> tuple[Part, ...]:
        """The fastest cut of all trips in so many units of memory, in the order of the forward pass."""
        return self._parts(self.whole, len(self.whole.begun) - 1, memory)

    def _parts(self, table: _Table, trips: int, memory: int) -> tuple[Part, ...]:
        parts: list[Part] = []
        firsts = table.begun_first
        while first := int(firsts[trips, memory]):
            memory -= self.carry if parts else 0
            parts.append(Part(first, memory, self._parts(self.again, first, memory)))
            trips, firsts = trips - first, table.follow_first
        return (*parts, Part(trips, memory))


def cut(whole: np.ndarray, again: np.ndarray, forward: float, each: float, carry: int, least: int = 1) -> Cuts:
    """The fastest cuts.

    Args:
      whole, again: ``[trips + 1, memory]``, L of the head of this file, of the last part and of those that run again.
      forward, each: f and e. carry: c, in units of memory. least: trips of a part.
    """
    cuts = Cuts(_Table.of(whole), _Table.of(again), carry)
    for n in range(2 * least, len(whole)):
        p = np.arange(least, n - least + 1)
        first = (p * forward + each)[:, None] + cuts.again.begun[p]
        for table in (cuts.whole, cuts.again):
            ways = first + table.follow[n - p]
            best = ways.argmin(axis=0)
            cost, part = np.take_along_axis(ways, best[None], axis=0)[0], p[best]
            later = np.concatenate([np.full(carry, np.inf), cost])[: len(cost)], np.concatenate([np.zeros(carry, int), part])[: len(part)]
            for seconds, firsts, (fastest, at) in (
                (table.begun, table.begun_first, (cost, part)),
                (table.follow, table.follow_first, later),
            ):
                shorter = fastest < seconds[n]
                seconds[n], firsts[n] = np.where(shorter, fastest, seconds[n]), np.where(shorter, at, 0)
    return cuts
