"""What lies in memory while operands are brought into the shardings that their operations want: where they come from, and what they become.

A collective reads an array from memory. What is made as its operation reads it, or stays on chip (``cost/onchip.py``), is written for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxauto.core import Graph, LinkKind
from jaxauto.cost.compute import factor_dims
from jaxauto.cost.layout import Laid, minor_dims, padding
from jaxauto.cost.onchip import capacity
from jaxauto.graph import walk
from jaxauto.solve.facts import viewed
from jaxauto.strategies import WHOLE, project, shards

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


class Way(NamedTuple):
    """From a group to an operation, or to what several operations read: their variables, and the operand's dimensions in each.

    ``laid``: as tiles pad it; None where there are none.
    """

    group: int
    dims: tuple[int, ...]
    operation: int
    factors: tuple[int, ...]
    laid: Laid | None


class Reads(NamedTuple):
    """An operand of an operation: its place among what the node reads, the bytes of the whole array, and the way it comes."""

    place: int
    whole: float
    way: Way


class Arrivals:
    """The operands of all operations, as often as a program has them.

    Attributes:
      ways, way, position: of each operand its way (an index of ``ways``) and where its operation runs.
      whole: bytes of the array. written: the most bytes of a device's piece of it that are written for a collective alone; 0 where memory
        has it anyway.
    """

    def __init__(self, model: Model):
        self.model = model
        reads, where, written = reads_of(model), model.buffers.position, _Written(model)
        index: dict[Way, int] = {}
        rows = [
            (index.setdefault(read.way, len(index)), where[node.id], read.whole, written.at_most(node.inputs[read.place]))
            for op, node in model.variant.operations
            for read in (reads[op.node.id] if node.id in where else ())
        ]
        self.ways = list(index)
        self.way, self.position = (np.array([row[k] for row in rows], int) for k in (0, 1))
        self.whole, self.written = (np.array([row[k] for row in rows], float) for k in (2, 3))

    def tables(self, position: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """(variables of group and operation, bytes of one device by their states) of what arrives at a position."""
        for k in np.nonzero(self.position == position)[0]:
            way = self.ways[self.way[k]]
            yield way.group, way.operation, _bytes(self.whole[k], self.written[k], *shares_on_the_way(self.model, way))

    def bytes_(self, x: np.ndarray) -> np.ndarray:
        """Of each operand, under solution ``x``."""
        shares = [[table[x[way.group], x[way.operation]] for table in shares_on_the_way(self.model, way)] for way in self.ways]
        source, result = np.array(shares).reshape(-1, 2)[self.way].T
        return _bytes(self.whole, self.written, source, result)

    def timeline(self, x: np.ndarray, length: int) -> np.ndarray:
        """Bytes at each position under solution ``x``: ``[length]``."""
        return np.bincount(self.position, self.bytes_(x), minlength=length)


def _bytes(whole, written, source: np.ndarray, result: np.ndarray) -> np.ndarray:
    piece = whole * source
    return whole * result + np.where(piece <= written, piece, 0.0)


def shares_on_the_way(model: Model, way: Way) -> tuple[np.ndarray, np.ndarray]:
    """A device's share of an array before and after, tiles filled, by the states of both ends; 0 where it does not move."""
    return model.cached(("brought", way), lambda: _shares(model, way))


def laid(model: Model, number: int, group: int, dims: tuple[int, ...]) -> Laid | None:
    """``Way.laid`` of a value that lies as ``dims`` of a group."""
    value = model.values[number]
    return Laid(value.shape, minor_dims(model.major, group, dims), tile) if (tile := model.chip.tile_of(value.dtype)) else None


def _shares(model: Model, way: Way) -> tuple[np.ndarray, np.ndarray]:
    sizes = model.mesh.sizes

    def share(positions: np.ndarray) -> np.ndarray:
        padded = padding(positions, way.laid, sizes) if way.laid else 1.0
        return padded / shards(positions, sizes)

    here, there = project(model.states[way.group], way.dims), project(model.states[way.operation], way.factors)
    moves = ((here[:, None] != there[None]) & (here[:, None] != WHOLE)).any(-1)
    return moves * share(here)[:, None], moves * share(there)[None]


def reads_of(model: Model) -> dict[int, list[Reads]]:
    """Of each operation, by its node as written."""
    return model.cached(("reads",), lambda: _reads(model))


def _reads(model: Model) -> dict[int, list[Reads]]:
    found = {}
    for op in model.groups.operations:
        found[op.node.id] = reads = []
        for o in op.operands:
            dims = tuple(d for d, _ in o.dims)
            ends = model.var("group", o.group), dims, model.var("operation", op.node.id), factor_dims(op, o)
            way = Way(*ends, laid(model, o.value, o.group, dims))
            reads.append(Reads(op.node.inputs.index(o.value), min(model.values[o.value].nbytes, model.operand_bytes(op, o)), way))
    return found


class _Written:
    """``Arrivals.written`` of values of the rewritten program."""

    def __init__(self, model: Model):
        self.groups, self.rewritten, self.placed = model.groups, model.variant.rewritten, model.placed
        self.capacity = capacity(model.chip)
        self.index: Mapping[int, int] = {int(n): k for k, n in enumerate(model.buffers.ids)}
        self.sliced = _sliced(self.rewritten.graph)

    def at_most(self, number: Any) -> float:
        values, number = self.rewritten.graph.values, viewed(self.groups, self.rewritten, number, self.index)
        if number not in values:  # a literal
            return 0.0
        if number in self.index:
            return self.capacity if self.placed.written[self.index[number]] else 0.0
        return math.inf if values[number].producer is not None or number in self.sliced else 0.0


def _sliced(graph: Graph) -> set[int]:
    """What trips of loops take from stacks."""
    return {link.target for node in walk(graph) for link in node.links if link.kind is LinkKind.XS}
