"""What a scan costs when its trips differ (``rewrite/split.py``): options of the chain's dynamic programme (``chain.py``).

Of n trips, t are the tail, which keeps A; the others keep B, in k segments of m trips, k·m = n − t. A trip keeps R bytes and makes
T again in a seconds (with what stacking R takes); its carries are c bytes, its forward pass takes f seconds:

    between the passes      t·R_A + k·c                            m > 1
                            t·R_A + (n − t)·R_B                    m = 1
    while the tail runs     that + T_A
    while the head runs     that − t·R_A + m·R_B·[m > 1] + T_B
    seconds                 t·a_A + (n − t)·(a_B + f·[m > 1])

All t and m, and all pairs of what the levels keep, are worked out at once; what another one beats in seconds and bytes is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxauto.blocks import Block, closure
from jaxauto.core import Split
from jaxauto.cost.compute import traffic_seconds
from jaxauto.cost.stacks import PASSES
from jaxauto.graph import value_bytes
from jaxauto.rewrite.split import own_stacks
from jaxauto.solve.chain import Option
from jaxauto.solve.remat import Remat

_STEP = 0.02  # of the bytes: options nearer than that are one
_LONG = 256  # trips: of longer scans the tail is a multiple of an even share of them


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


class Trips:
    """The scan of a block, for one sharding; ``pieces``: value → in how many pieces it lies on the mesh."""

    def __init__(self, remat: Remat, block: Block, pieces: Callable[[int], float]):
        assert block.scan is not None
        self.remat, self.block, self.pieces = remat, block, pieces
        forward = block.scan[0]
        stacked = dict(zip(forward.outputs, forward.bodies[0].outputs, strict=True))
        self.always = {stacked[y] for y in own_stacks(*block.scan, block.graph)} - {*block.residuals}  # carries mostly
        self.carries = forward.bodies[0].inputs[forward.num_consts :][: forward.num_carry]
        self.carry_bytes = sum(map(self.bytes_of, self.carries))
        self.forward_seconds = sum(map(self.seconds_of, block.forward))

    def bytes_of(self, number: int) -> float:
        return value_bytes(self.remat.graph.values[number]) / self.pieces(number)

    def seconds_of(self, node) -> float:
        return self.remat.again_seconds(node) / max(self.pieces(node.outputs[0]), 1.0) if node.outputs else 0.0

    def trip(self, kept: frozenset[int] | None, away: frozenset[int] = frozenset()) -> Trip:
        """``away``: values in the host's memory."""
        if kept is None:
            left = {*self.block.residuals, *self.always} - away
            held = sum(map(self.bytes_of, left))
            return Trip(None, held, sum(self.bytes_of(v) for v in self.block.residuals if v in away), self.moved(held))
        nodes, reads = closure(self.block, kept)
        held = {*kept, *self.always, *(v for v in reads if v in self.carries)} - away
        made = sum(self.bytes_of(v) for v in self.block.residuals if v not in held)
        there = sum(map(self.bytes_of, held))
        return Trip(kept, there, made, sum(map(self.seconds_of, nodes)) + self.moved(there))

    def moved(self, bytes_: float) -> float:
        """Seconds that stacking takes: written, and read by the backward pass."""
        return float(traffic_seconds(PASSES[self.remat.chip.platform] * bytes_, self.remat.chip))

    def option(self, head: Trip, split: Split | None = None, tail: Trip | None = None) -> Option:
        """What the scan costs, its head kept as ``head`` says."""
        m, t = (split.segment, split.tail) if split else (1, 0)
        kept, peak, seconds = self.costs(np.array([m]), np.array([t]), head, tail or head)
        return Option(float(kept[0]), float(peak[0]), float(seconds[0]), Keep(head.kept, split=split))

    def costs(self, m: np.ndarray, t: np.ndarray, head: Trip, tail: Trip) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes kept, bytes on top of those while it runs backward, and seconds; ``[splits]``."""
        n, nested = self.block.count, m > 1
        between = np.where(nested, (n - t) / m * self.carry_bytes, (n - t) * head.held)
        kept = between + t * tail.held
        peak = np.maximum((t > 0) * tail.again, np.where(nested, m * head.held, 0.0) + head.again - t * tail.held)
        return kept, np.maximum(peak, 0.0), t * tail.seconds + (n - t) * (head.seconds + nested * self.forward_seconds)

    def splits(self, ways: Sequence[frozenset[int] | None]) -> list[Option]:
        """Options that split the scan; ``ways``: what its parts may keep."""
        trips = [self.trip(kept) for kept in dict.fromkeys(ways)]
        m, t = _shapes(self.block.count)
        found: list[tuple[np.ndarray, ...]] = []
        for h, head in enumerate(trips):
            for a, tail in enumerate(trips):
                which = np.nonzero(((t > 0) | (a == 0)) & ((m > 1) | (a != h)))[0]
                found.append((*self.costs(m[which], t[which], head, tail), which, np.full(len(which), h), np.full(len(which), a)))
        kept, peak, seconds, which, heads, tails = (np.concatenate(column) for column in zip(*found, strict=True))
        best = np.union1d(_front(kept + peak, seconds), _front(kept, seconds))
        return [
            Option(
                float(kept[k]),
                float(peak[k]),
                float(seconds[k]),
                Keep(trips[heads[k]].kept, split=self._split(m[w], t[w], trips[tails[k]])),
            )
            for k, w in zip(best.tolist(), which[best].tolist(), strict=True)
        ]

    @staticmethod
    def _split(segment: int, tail: int, keeps: Trip) -> Split:
        return Split(int(tail), int(segment), keeps.kept if tail else None)


def _shapes(n: int) -> tuple[np.ndarray, np.ndarray]:
    """All (segment, tail) of a scan of ``n`` trips."""
    step = -(-n // _LONG)
    alone = np.arange(step, n, step)
    m = np.concatenate([np.full(max(0, n // size - 1), size) for size in range(2, n // 2 + 1)] or [np.zeros(0, int)])
    k = np.concatenate([np.arange(2, n // size + 1) for size in range(2, n // 2 + 1)] or [np.zeros(0, int)])
    return np.concatenate([np.ones(len(alone), int), m]), np.concatenate([alone, n - k * m])


def _front(bytes_: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Indices of what nothing beats in both, from the fastest on, each with notably fewer bytes than the one before."""
    order = np.lexsort((bytes_, seconds))
    least = np.minimum.accumulate(bytes_[order])
    first = np.concatenate([[True], bytes_[order][1:] < least[:-1]]) if len(order) else np.zeros(0, bool)
    found: list[int] = []
    for k in order[first].tolist():
        if not found or bytes_[k] < bytes_[found[-1]] * (1 - _STEP):
            found.append(k)
    if len(order):
        found.append(int(np.lexsort((seconds, bytes_))[0]))  # the least of all
    return np.array(sorted(set(found)), int)
