"""What each block can keep: levels from everything to nothing, and what a level does to buffers and to the work of a step.

A level is a threshold on seconds per byte: values of a block that take longer than that to make again are kept, cheaper ones are
recomputed. Level 0 is the step as written. Thresholds are taken where the step's own values lie far apart, so levels are few and each
means something: drop what fusion makes again for free, drop attention scores, drop activations, drop all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxauto.blocks import Block, closure, find_blocks
from jaxauto.core import OPERATIONS, Graph, Kind
from jaxauto.cost.compute import bytes_per_flop, operation_flops, traffic_seconds
from jaxauto.cost.fusion import Buffers, find_buffers
from jaxauto.graph import value_bytes, walk
from jaxauto.groups import Groups
from jaxauto.rewrite.recompute import Rewritten, recompute
from jaxauto.rules import rule_for

MAX_LEVELS = 6
_GAP = 1.5  # thresholds nearer than this factor are one


@dataclass(frozen=True)
class Level:
    """``kept[b]``: what block b keeps, None for as written."""

    threshold: float
    kept: tuple[frozenset[int] | None, ...]


@dataclass(frozen=True, eq=False)
class Variant:
    """A program after rematerialisation, in terms of the values of the program as written.

    Attributes:
      rewritten: the new graph.
      buffers: its buffers; ``origin[k]`` is the value as written that buffer k is a copy of, ``stacked[k]`` whether it has one
        leading dimension more.
      extra: node id (as written) → how often it runs again in a step.
    """

    kept: tuple[frozenset[int] | None, ...]
    rewritten: Rewritten
    buffers: Buffers
    origin: np.ndarray
    stacked: np.ndarray
    extra: Mapping[int, int]


class Remat:
    """The blocks of a step and what can be decided of them."""

    def __init__(self, graph: Graph, groups: Groups, aliased: frozenset[int], chip: Any):
        self.graph, self.groups, self.aliased, self.chip = graph, groups, aliased, chip
        self.blocks = find_blocks(graph)
        self.operations = {op.node.id: op for op in groups.operations}
        self.density = [self._densities(block) for block in self.blocks]
        self._variants: dict[tuple, Variant] = {}

    def levels(self) -> list[Level]:
        """Level 0 keeps all; the last keeps nothing but what enters the blocks."""
        found = [Level(-1.0, (None,) * len(self.blocks))]
        if not self.blocks:
            return found
        densities = sorted({d for table in self.density for d in table.values() if d > 0})
        for threshold in [*_separated(densities, MAX_LEVELS - 2), math.inf]:
            kept = tuple(self._kept(block, table, threshold) for block, table in zip(self.blocks, self.density, strict=True))
            if kept != found[-1].kept:
                found.append(Level(threshold, kept))
        return found

    def _densities(self, block: Block) -> dict[int, float]:
        """Seconds per byte to make each value again: what its own node takes, from its inputs."""
        values = self.graph.values
        table: dict[int, float] = {}
        for node in block.forward:
            if node.bodies:
                continue
            kind = rule_for(node.eqn).kind
            if kind not in OPERATIONS and not any(out in block.residuals for out in node.outputs):
                continue
            for out in node.outputs:
                table[out] = self.node_seconds(node) / max(value_bytes(values[out]), 1.0)
        return table

    def node_seconds(self, node) -> float:
        """Seconds of one unsharded run: a roofline."""
        values = self.graph.values
        bytes_ = sum(value_bytes(values[x]) for x in {*node.inputs, *node.outputs} if isinstance(x, int))
        seconds = traffic_seconds(bytes_, self.chip)
        op = self.operations.get(node.id)
        if op is not None and op.rule.kind in (Kind.DOT, Kind.CONV):
            dtype = values[op.operands[0].value].dtype
            seconds = max(seconds, operation_flops(op) / (self.chip.flops_efficiency * self.chip.peak_flops(dtype)))
        return seconds

    def _kept(self, block: Block, table: Mapping[int, float], threshold: float) -> frozenset[int]:
        wanted = {v for v, d in table.items() if d > threshold}
        wanted |= {v for v in block.residuals if v not in table and threshold < math.inf}
        _, reads = closure(block, wanted)
        return frozenset(wanted & ({*block.residuals} | {*reads}))

    def variant(self, kept: Sequence[frozenset[int] | None]) -> Variant:
        """The program that keeps ``kept``, with its buffers; cached."""
        key = tuple(kept)
        if key not in self._variants:
            self._variants[key] = self._variant(key)
        return self._variants[key]

    def _variant(self, kept: tuple) -> Variant:
        chosen = {b: k for b, k in enumerate(kept) if k is not None}
        rewritten = recompute(self.graph, chosen) if chosen else Rewritten(self.graph, {}, frozenset())
        graph = rewritten.graph
        rules = self.groups.rules if not chosen else _rules(graph)
        buffers = find_buffers(graph, rules, self.aliased, self.chip.platform, bytes_per_flop(self.chip))
        origin = np.array([rewritten.origin.get(int(n), int(n)) for n in buffers.ids], int)
        stacked = np.array([int(n) in rewritten.stacked for n in buffers.ids], bool)
        extra: dict[int, int] = {}
        for b, keep in chosen.items():
            nodes, _ = closure(self.blocks[b], keep)
            for node in nodes:
                extra[node.id] = self.groups.times[node.id]
        return Variant(kept, rewritten, buffers, origin, stacked, extra)


def _rules(graph: Graph) -> dict:
    return {node.id: rule_for(node.eqn) for node in walk(graph) if not node.bodies}


def _separated(densities: list[float], most: int) -> list[float]:
    """At most ``most`` thresholds between values that lie far apart, the widest gaps first, in rising order."""
    gaps = [(b / a, math.sqrt(a * b)) for a, b in itertools.pairwise(densities) if b / a > _GAP]
    widest = sorted(gaps, reverse=True)[:most]
    return sorted(t for _, t in widest)
