"""Weight gradients that XLA:TPU puts off, on several devices, and what they keep in memory until then.

Nothing waits for a gradient of straight code but its update. Where it is summed over devices the sum is begun early, to run beside what
comes then; where it is not, its dot is made with the update, after the loops of the backward pass, and what it reads lies in memory until
they have run. Seen in scanned decoders for v5e whose last projection is split by its vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxauto.groups import Operation
from jaxauto.solve.positions import reduced_factors
from jaxauto.solve.turns import Row, in_order

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


class PutOff(NamedTuple):
    """A buffer (an index) that is held for an operation: from the position after which nothing else reads it to that of the last loop."""

    operation: Operation
    buffer: int
    begin: int
    end: int


def put_off(model: Model) -> list[PutOff]:
    """What is held, where no sum of the operation's results is."""
    if model.chip.platform != "tpu" or model.mesh.num_devices == 1:
        return []
    return model.cached(("put off", model.variant), lambda: list(_found(model)))


def held_for_gradients(model: Model) -> Iterator[Row]:
    """(first position, last, two variables in their order, bytes by their states)."""
    for op, buffer, begin, end in put_off(model):
        v, number = model.var("operation", op.node.id), model.buffer_class[buffer]
        summed = np.isin(model.states[v], [f for o in op.results for f in reduced_factors(op, o)]).any(-1)
        group, _ = model.classes[number]
        bytes_ = np.broadcast_to(model.buffers.bytes_[buffer] * model.fraction[number], len(model.states[group]))
        yield from in_order(begin, end, v, group, np.outer(~summed, bytes_))


def _found(model: Model) -> Iterator[PutOff]:
    graph, b = model.variant.rewritten.graph, model.buffers
    index = {int(number): k for k, number in enumerate(b.ids)}
    end = max((b.position[node.id] for node in graph.nodes if node.bodies and node.backward), default=-1)
    operations = {op.node.id: op for op in model.groups.operations}
    held: set[int] = set()
    for node in graph.nodes:
        op = operations.get(node.id)
        if op is None or not node.backward or not set(node.outputs) <= model.program.late_only:
            continue
        read = {root for x in node.inputs if isinstance(x, int) for root in ([x] if x in index else b.held.get(x, ()))}
        for k in sorted({index[root] for root in read if root in index} - held):
            begin = max(int(b.end[k]), b.position[node.id]) + 1
            if begin <= end and not b.is_input[k]:
                held.add(k)
                yield PutOff(op, k, begin, end)
