"""Tables with their rows along the lanes (``cost/tables.py``), by states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from jaxauto.cost.compute import traffic_seconds
from jaxauto.cost.tables import Table, beyond, tables
from jaxauto.graph import multiplicity
from jaxauto.groups import Operation
from jaxauto.solve.turns import Row, in_order
from jaxauto.strategies import project

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


def tables_of(model: Model) -> list[tuple[Operation, Table]]:
    """What gathers from a table or scatters into it, and the table; none where arrays are not padded."""
    return model.cached(("tables", model.variant), lambda: list(_found(model))) if model.chip.tile else []


def _found(model: Model) -> Iterator[tuple[Operation, Table]]:
    rewritten = model.variant.rewritten
    operations = {node.id: op for op, node in model.variant.operations}
    for table in tables(rewritten.graph, model.buffers):
        if table.node in operations:
            yield operations[table.node], table._replace(number=rewritten.origin.get(table.number, table.number))


def held_tables(model: Model) -> Iterator[Row]:
    """(first position, last, two variables in their order, bytes by their states)."""
    for op, table in tables_of(model):
        group, dims = model.groups.place[table.number]
        v, g = model.var("operation", op.node.id), model.var("group", group)
        key = model.values[table.number].nbytes, dims, table.held, table.arrays, table.updated
        bytes_ = model.cached(("table", g, *key), lambda table=table: _bytes(model, table)[0])
        yield from in_order(table.begin, table.end, v, g, np.broadcast_to(bytes_, (len(model.states[v]), len(bytes_))))


def add_tables(model: Model) -> None:
    """What copies of tables take."""
    found = tables_of(model)
    runs = multiplicity(model.variant.rewritten.graph) if found else {}
    for _, table in found:
        v = model.var("group", model.groups.place[table.number][0])
        model.problem.add_unary("compute", v, runs[table.node] * traffic_seconds(_bytes(model, table)[1], model.chip))


def _bytes(model: Model, table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Held and moved by one device, by the states of the group."""
    value, (group, dims) = model.values[table.number], model.groups.place[table.number]
    positions = project(model.states[model.var("group", group)], dims)
    return beyond(value, model.chip.tile_of(value.dtype), positions, model.mesh.sizes, table)
