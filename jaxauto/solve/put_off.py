"""Weight gradients that XLA:TPU puts off, on several devices, and what they keep in memory until then.

Nothing waits for a gradient of straight code but its update. Where it is summed over devices the sum is begun early, to run beside what
comes then. Where it is not, its dot is fused with the update, after the loops of the backward pass, and what it reads lies in memory until
they have run: what other dots make as they read it is written for this one (``scripts/bench_put_off.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxauto.cost.layout import padding
from jaxauto.groups import Operation
from jaxauto.solve.brought import laid
from jaxauto.solve.facts import viewed
from jaxauto.solve.gradients import straight_gradients
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
        padded = padding(positions, of, model.mesh.sizes) if (of := laid(model, number, group, dims)) else 1.0
        local = bytes_ * padded / shards(positions, model.mesh.sizes)
        yield from in_order(begin, end, v, g, np.outer(~summed, local))


def _found(model: Model) -> Iterator[PutOff]:
    rewritten, b = model.variant.rewritten, model.buffers
    index = {int(number): k for k, number in enumerate(b.ids)}
    made = {node.id: node for node in rewritten.graph.nodes}
    end = max((b.position[node.id] for node in made.values() if node.bodies and node.backward), default=-1)
    held: set[int] = set()
    for op, _ in straight_gradients(model.groups, model.program.late_only):
        for x in made[op.node.id].inputs if b.position[op.node.id] <= end else ():
            number = viewed(model.groups, rewritten, x, index)
            if number in held or number not in rewritten.graph.values:
                continue
            held.add(number)
            value = rewritten.graph.values[number]
            if number in index:  # an input is there until the end
                begin, bytes_ = max(int(b.end[index[number]]), b.position[op.node.id]) + 1, float(b.bytes_[index[number]])
            else:
                begin, bytes_ = b.position[value.producer.id] if value.producer else end + 1, value.nbytes
            if begin <= end:
                yield PutOff(op, rewritten.origin.get(number, number), bytes_, begin, end)
