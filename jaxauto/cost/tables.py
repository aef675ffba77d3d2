"""Tables of which rows are gathered, as XLA:TPU lays them out.

An argument ``[V, D]`` whose rows fill no whole tiles comes with V along the lanes, which pads less. What gathers its rows reads a copy that
has them along the lanes, each filled up to 128: it is there until the table is updated. What gradients of rows are scattered into is laid
out so too, and with it the update: of the table and of the optimizer's state for it, all of which are copied into that layout and back.
Unless that fills too much: then the gradient is copied instead (``scripts/bench_tables.py``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
_MINDED = 128 * 2**20  # bytes of filling: of one array on v5e, v5p and v6e, of several read off v5e (v5p was seen to mind 146 MiB not)
_SCATTERS = frozenset({"scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"})


class Table(NamedTuple):
    """A table of a program, the node that gathers from it or scatters into it, and where it is in memory with its rows along the lanes.

    ``held``, ``moved``: bytes there, and through HBM, beside what the array itself is told to take: so many times the table with its rows
    along the lanes and so many times as it is. ``arrays``: it, and what an optimizer keeps of its shape. ``updated``: this is so where
    those are updated with their rows along the lanes (True), as they come (False), either way (None).
    """

    number: int
    node: int
    begin: int
    end: int
    held: tuple[int, int]
    moved: tuple[int, int]
    arrays: int
    updated: bool | None


def tables(graph: Graph, buffers: Buffers) -> list[Table]:
    """All tables; one that is gathered from several times is copied once."""
    position, inputs = buffers.position, {*graph.inputs}
    found: dict[int, list[Table]] = {}
    alike = Counter((graph.values[x].shape, any(user.prim == "gather" for user in graph.values[x].users)) for x in graph.inputs)
    index = {number: k for k, number in enumerate(buffers.ids.tolist())}
    for node in walk(graph):
        at = position.get(node.id)
        if at is None or not _has_whole_rows(graph, node):
            continue
        (read, *_), (made, *_) = node.inputs, node.outputs
        shape = graph.values[made if node.prim != "gather" else read].shape
        arrays = max(1, (alike[shape, False] + alike[shape, True]) // max(1, alike[shape, True]))  # this table's share of such arguments
        if node.prim == "gather" and read in inputs and read not in found:
            last = max(position.get(user.id, at) for user in graph.values[read].users)
            found[read] = [Table(int(read), node.id, at, at, (1, 0), (1, 1), arrays, None)]
            if last > at:
                found[read].append(Table(int(read), node.id, at + 1, last, (1, 0), (4 * arrays - 1, -1), arrays, True))
        elif node.prim in _SCATTERS and (k := index.get(made)) is not None and buffers.start[k] <= buffers.end[k]:
            begin, end = int(buffers.start[k]), int(buffers.end[k])
            found[made] = [Table(made, node.id, begin, end, (1, -1), (2, -2), arrays, True)]
            found[made].append(Table(made, node.id, begin, begin, (1, 0), (2, 0), arrays, False))
            if arrays > 1:  # what is updated beside the table
                found[made].append(Table(made, node.id, begin, end, (arrays - 1, 0), (0, 0), arrays, True))
    return [table for parts in found.values() for table in parts]


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


def beyond(value: Value, tile: Any, positions: np.ndarray, axis_sizes: tuple[int, ...], table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of ``held`` and ``moved`` of one device's part of a table.

    Returns:
      ``float [states]`` each; 0 where it is not so.
    """
    laid, local = Laid(value.shape, (0, 1), tile), value.nbytes / shards(positions, axis_sizes)
    rows, least = (local * of(positions, laid, axis_sizes) for of in (row_padding, padding))
    so = lies_in_rows(rows, least, table)
    held, moved = (np.where(so, a * rows + b * least, 0.0) for a, b in (table.held, table.moved))
    return held, moved


def lies_in_rows(rows: Any, least: Any, table: Table) -> Any:
    """Whether a table is as ``table`` says: from its bytes with its rows along the lanes, and as it pads least.

    Rows of which half or more is filling make none of large tables: gathers then go through them as they come. Nor are several arrays
    updated in rows that fill much together.
    """
    read = (rows > (1 + SLIGHT) * least) & ((rows < _HALF * least) | (rows - least < _MINDED))
    updated = (table.arrays == 1) | (table.arrays * (rows - least) < _MINDED)
    return read & (updated if table.updated else ~np.asarray(updated) if table.updated is False else True)


def live_beside_tables(graph: Graph, buffers: Buffers, chip: Any) -> np.ndarray:
    """Bytes at each position of a program on one device: ``[length]``."""
    live = np.zeros(buffers.length)
    for table in tables(graph, buffers):
        live[table.begin : table.end + 1] += _unsplit(graph, table, chip)[0]
    return live


def moved_for_tables(graph: Graph, buffers: Buffers, chip: Any, pieces: Callable[[int], float]) -> dict[int, float]:
    """Node → bytes of HBM that it moves for its table on one device, that has one of so many ``pieces`` of an array."""
    found: dict[int, float] = defaultdict(float)
    for table in tables(graph, buffers):
        found[table.node] += _unsplit(graph, table, chip)[1] / pieces(table.number)
    return found


def _unsplit(graph: Graph, table: Table, chip: Any) -> tuple[float, float]:
    value = graph.values[table.number]
    held, moved = beyond(value, chip.tile_of(value.dtype), np.zeros((1, 0), int), (), table)
    return float(held[0]), float(moved[0])
