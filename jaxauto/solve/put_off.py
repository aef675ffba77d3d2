"""Weight gradients that XLA:TPU puts off, on several devices, and what they keep in memory until then.

Nothing waits for a gradient of straight code but its update. Where it is summed over devices the sum is begun early, to run beside what
comes then. Where it is not, its dot is fused with the update, after the loops of the backward pass, and what it reads lies in memory until
they have run: what other dots make as they read it is written for this one (``scripts/bench_put_off.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxauto.cost.layout import minor_dims, padding
from jaxauto.cost.windowed import is_view
from jaxauto.graph import value_bytes
from jaxauto.groups import Operation
from jaxauto.solve.positions import reduced_factors
from jaxauto.solve.turns import Row, in_order
from jaxauto.strategies import project, shards

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


class PutOff(NamedTuple):
    """A value (as written) that is held for an operation alone, where no result of it is summed: from ``begin`` to the last loop's end.

    ``bytes_``: of the whole array.
    """

    operation: Operation
    value: int
    bytes_: float
    begin: int
    end: int


def put_off(model: Model) -> list[PutOff]:
    """All of them."""
    if model.chip.platform != "tpu" or model.mesh.num_devices == 1:
        return []
    return model.cached(("put off", model.variant), lambda: list(_found(model)))


def held_for_gradients(model: Model) -> Iterator[Row]:
    """(first position, last, two variables in their order, bytes by their states)."""
    for op, number, bytes_, begin, end in put_off(model):
        v, (group, dims) = model.var("operation", op.node.id), model.groups.place[number]
        summed = np.isin(model.states[v], [f for o in op.results for f in reduced_factors(op, o)]).any(-1)
        positions = project(model.states[g := model.var("group", group)], dims)
        shape, minor = model.values[number].shape, minor_dims(model.spatial, group, dims)
        local = bytes_ * padding(positions, shape, minor, model.mesh.sizes, model.chip.tile) / shards(positions, model.mesh.sizes)
        yield from in_order(begin, end, v, g, np.outer(~summed, local))


def _found(model: Model) -> Iterator[PutOff]:
    graph, b, origin = model.variant.rewritten.graph, model.buffers, model.variant.rewritten.origin
    index: Mapping[int, int] = {int(number): k for k, number in enumerate(b.ids)}
    end = max((b.position[node.id] for node in graph.nodes if node.bodies and node.backward), default=-1)
    operations = {op.node.id: op for op in model.groups.operations}
    held: set[int] = set()
    for node in graph.nodes:
        op = operations.get(node.id)
        if op is None or not node.backward or not set(node.outputs) <= model.program.late_only or b.position[node.id] > end:
            continue
        for x in (x for x in node.inputs if isinstance(x, int)):
            while x not in index and is_view(model.groups, origin.get(x, x)) and (made := graph.values[x].producer):
                x = made.inputs[0]  # type: ignore[assignment]
            maker = graph.values[x].producer if x in graph.values else None
            if x in held or x not in graph.values or (x in index and b.is_input[index[x]]):
                continue
            held.add(x)
            if x in index:
                begin, bytes_ = max(int(b.end[index[x]]), b.position[node.id]) + 1, float(b.bytes_[index[x]])
            elif maker is not None:
                begin, bytes_ = b.position[maker.id], value_bytes(graph.values[x])
            else:
                continue
            if begin <= end:
                yield PutOff(op, origin.get(x, x), bytes_, begin, end)
