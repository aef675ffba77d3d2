"""Tables of which rows are gathered, as XLA:TPU lays them out.

An argument ``[V, D]`` whose rows fill no whole tiles comes with V along the lanes, which pads less. What gathers its rows reads a copy that
has them along the lanes, each filled up to 128: it is there until the table is updated. What gradients of rows are scattered into is laid
out so too, and with it the update: of the table and of the optimizer's state for it, all of which are copied into that layout and back
(``scripts/bench_tables.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxauto.core import Graph, Node, Value
from jaxauto.cost.layout import Laid, padding, row_padding
from jaxauto.cost.liveness import Buffers
from jaxauto.graph import walk
from jaxauto.strategies import shards

SLIGHT = 1e-3  # what one layout pads more than another without being told apart from it
_HALF = 2 - 1e-6
_MINDED = 128 * 2**20  # bytes of filling; the same on v5e, v5p and v6e
_SCATTERS = frozenset({"scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"})


class Table(NamedTuple):
    """A table of a program, the node that gathers from it or scatters into it, and where it is in memory with its rows along the lanes.

    ``held``, ``moved``: bytes there, and through HBM, beside what the array itself is told to take: so many times the table with its rows
    along the lanes and so many times as it is.
    """

    number: int
    node: int
    begin: int
    end: int
    held: tuple[int, int]
    moved: tuple[int, int]


_IN_PLACE = (1, -1)  # what fills the rows alone


def tables(graph: Graph, buffers: Buffers) -> list[Table]:
    """All tables; one that is gathered from several times is copied once."""
    position, inputs, found = buffers.position, {*graph.inputs}, {}
    index = {number: k for k, number in enumerate(buffers.ids.tolist())}
    for node in walk(graph):
        at = position.get(node.id)
        if at is None or not _has_whole_rows(graph, node):
            continue
        (read, *_), (made, *_) = node.inputs, node.outputs
        if node.prim == "gather" and read in inputs and read not in found:
            last = max(position.get(user.id, at) for user in graph.values[read].users)
            copies = (4 * _arrays(graph, read), 0) if last > at else (1, 1)
            found[read] = Table(int(read), node.id, at, max(at, last), (1, 0), copies)
        elif node.prim in _SCATTERS and (k := index.get(made)) is not None and buffers.start[k] <= buffers.end[k]:
            found[made] = Table(made, node.id, int(buffers.start[k]), int(buffers.end[k]), _IN_PLACE, (2, -2))
    return list(found.values())


def _arrays(graph: Graph, table: int) -> int:
    """A table and what an optimizer keeps of its shape: of as many arguments, this one's share."""
    alike = [x for x in graph.inputs if graph.values[x].shape == graph.values[table].shape]
    gathered = {x for x in alike if any(user.prim == "gather" for user in graph.values[x].users)}
    return max(1, len(alike) // max(1, len(gathered)))


def _has_whole_rows(graph: Graph, node: Node) -> bool:
    """Whether a gather or scatter goes by whole rows of an array of two dimensions."""
    if node.prim != "gather" and node.prim not in _SCATTERS:
        return False
    shape, numbers = graph.values[node.inputs[0]].shape if isinstance(node.inputs[0], int) else (), node.params["dimension_numbers"]
    if len(shape) != 2:
        return False
    if node.prim == "gather":
        return tuple(node.params["slice_sizes"]) == (1, shape[1])
    return tuple(numbers.inserted_window_dims) == (0,)


def beyond(value: Value, tile: Any, positions: np.ndarray, axis_sizes: tuple[int, ...], times: tuple[int, int]) -> np.ndarray:
    """Bytes of ``Table.held`` or ``Table.moved`` of one device's part of a table.

    Returns:
      ``float [states]``; 0 where no other layout pads noticeably less, and where the compiler minds what rows are filled with.
    """
    laid, local = Laid(value.shape, (0, 1), tile), value.nbytes / shards(positions, axis_sizes)
    rows, least = (local * of(positions, laid, axis_sizes) for of in (row_padding, padding))
    return np.where(lies_in_rows(rows, least), times[0] * rows + times[1] * least, 0.0)


def lies_in_rows(rows: Any, least: Any) -> Any:
    """Whether tables have their rows along the lanes: from bytes so and as they pad least. Rows of which half or more is filling make
    none of large tables: gathers then go through them as they come."""
    return (rows > (1 + SLIGHT) * least) & ((rows < _HALF * least) | (rows - least < _MINDED))


def live_beside_tables(graph: Graph, buffers: Buffers, chip: Any) -> np.ndarray:
    """Bytes at each position of a program on one device: ``[length]``."""
    live = np.zeros(buffers.length)
    for table in tables(graph, buffers):
        live[table.begin : table.end + 1] += _unsplit(graph, table.number, table.held, chip)
    return live


def moved_for_tables(graph: Graph, buffers: Buffers, chip: Any, pieces: Callable[[int], float]) -> dict[int, float]:
    """Node → bytes of HBM that it moves for its table on one device, that has one of so many ``pieces`` of an array."""
    return {t.node: _unsplit(graph, t.number, t.moved, chip) / pieces(t.number) for t in tables(graph, buffers)}


def _unsplit(graph: Graph, number: int, times: tuple[int, int], chip: Any) -> float:
    value = graph.values[number]
    return float(beyond(value, chip.tile_of(value.dtype), np.zeros((1, 0), int), (), times)[0])
