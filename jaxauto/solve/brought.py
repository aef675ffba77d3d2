"""What lies in memory while operands are brought into the shardings that their operations want: where they come from, and what they become.

A collective reads an array from memory. What is made as its operation reads it, or stays on chip (``cost/onchip.py``), is written for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxauto.core import Graph, LinkKind
from jaxauto.cost.compute import factor_dims
from jaxauto.cost.layout import minor_dims, padding
from jaxauto.cost.onchip import capacity
from jaxauto.cost.windowed import is_view
from jaxauto.graph import value_bytes, walk
from jaxauto.solve.facts import operation_runs
from jaxauto.strategies import WHOLE, project, shards

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


class Way(NamedTuple):
    """From a group to an operation: their variables, and the operand's dimensions in each.

    ``shape``, ``minor``: as tiles pad it (``cost/layout.py``); empty where there are none.
    """

    group: int
    dims: tuple[int, ...]
    operation: int
    factors: tuple[int, ...]
    shape: tuple[int, ...]
    minor: tuple[int, ...]


class Arrival(NamedTuple):
    """An operand of one run of an operation. ``whole``: bytes of the array.

    ``written``: the most bytes of a device's piece of it that are written for a collective alone: 0 where memory has it anyway.
    """

    way: int
    position: int
    whole: float
    written: float


class Arrivals:
    """The operands of all operations, as often as the program has them."""

    def __init__(self, model: Model):
        self.model = model
        index: dict[Way, int] = {}
        self.rows = list(_arrivals(model, index))
        self.ways = list(index)
        self.way = np.array([row.way for row in self.rows], int)
        self.position, self.whole, self.written = (np.array([row[k] for row in self.rows]) for k in (1, 2, 3))
        self.at: dict[int, list[Arrival]] = defaultdict(list)
        for row in self.rows:
            self.at[row.position].append(row)

    def tables(self, position: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """(variables of group and operation, bytes of one device by their states) of what arrives at a position."""
        for row in self.at.get(position, ()):
            way = self.ways[row.way]
            source, result = self.model.cached(("brought", *way), lambda way=way: self._shares(way))
            yield way.group, way.operation, _bytes(row.whole, row.written, source, result)

    def timeline(self, x: np.ndarray, length: int) -> np.ndarray:
        """Bytes at each position under solution ``x``: ``[length]``."""
        shares = [self._shares(way, x) for way in self.ways]
        source, result = (np.array([float(s[k].item()) for s in shares]) for k in (0, 1))
        bytes_ = np.zeros(length)
        if self.rows:
            np.add.at(bytes_, self.position, _bytes(self.whole, self.written, source[self.way], result[self.way]))
        return bytes_

    def _shares(self, way: Way, x: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """A device's share of the array before and after, by the states of group and operation; 0 where it does not move."""
        states = self.model.states
        chosen = [slice(None) if x is None else slice(x[v], x[v] + 1) for v in (way.group, way.operation)]
        here = project(states[way.group][chosen[0]], way.dims)[:, None]
        there = project(states[way.operation][chosen[1]], way.factors)[None]
        moves = ((here != there) & (here != WHOLE)).any(-1)
        return moves * self._share(way, here[:, 0])[:, None], moves * self._share(way, there[0])[None]

    def _share(self, way: Way, positions: np.ndarray) -> np.ndarray:
        sizes, tile = self.model.mesh.sizes, self.model.chip.tile
        padded = padding(positions, way.shape, way.minor, sizes, tile) if way.shape else 1.0
        return padded / shards(positions, sizes)


def _bytes(whole, written, source: np.ndarray, result: np.ndarray) -> np.ndarray:
    piece = whole * source
    return whole * result + np.where(piece <= written, piece, 0.0)


def _arrivals(model: Model, index: dict[Way, int]) -> Iterator[Arrival]:
    position, written = model.buffers.position, _Written(model)
    for op, node in operation_runs(model.variant, model.groups):
        for o in op.operands if node.id in position else ():
            dims = tuple(d for d, _ in o.dims)
            padded = (model.values[o.value].shape, minor_dims(model.spatial, o.group, dims)) if model.chip.tile else ((), ())
            way = Way(model.var("group", o.group), dims, model.var("operation", op.node.id), factor_dims(op, o), *padded)
            number = node.inputs[op.node.inputs.index(o.value)]
            assert isinstance(number, int)
            yield Arrival(index.setdefault(way, len(index)), position[node.id], value_bytes(model.values[o.value]), written.at_most(number))


class _Written:
    """``Arrival.written`` of values of the rewritten program."""

    def __init__(self, model: Model):
        self.groups, self.rewritten, self.placed = model.groups, model.variant.rewritten, model.placed
        self.capacity = capacity(model.chip)
        self.index: Mapping[int, int] = {int(n): k for k, n in enumerate(model.buffers.ids)}
        self.sliced = _sliced(self.rewritten.graph)

    def at_most(self, number: int) -> float:
        origin, values = self.rewritten.origin, self.rewritten.graph.values
        while number not in self.index and is_view(self.groups, origin.get(number, number)) and (node := values[number].producer):
            number = node.inputs[0]  # type: ignore[assignment]
        if number not in values:  # a literal
            return 0.0
        if number in self.index:
            return self.capacity if self.placed.written[self.index[number]] else 0.0
        return math.inf if values[number].producer is not None or number in self.sliced else 0.0


def _sliced(graph: Graph) -> set[int]:
    """What trips of loops take from stacks."""
    return {link.target for node in walk(graph) for link in node.links if link.kind is LinkKind.XS}
