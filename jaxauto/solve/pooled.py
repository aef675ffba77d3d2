"""What the gradient of max pooling takes beside its arrays (``cost/pooling.py``), by states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from jaxauto.cost.pooling import POOLS, pooling_bytes
from jaxauto.groups import Operand, Operation
from jaxauto.solve.turns import Row, in_order
from jaxauto.strategies import shards

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


def pooled(model: Model) -> list[tuple[Operation, Operand, int, float]]:
    """(operation, its result, position, bytes of the whole)."""
    if model.chip.platform == "tpu":
        return []
    runs = [(op, node, model.buffers.position.get(node.id)) for op, node in model.variant.operations if node.prim in POOLS]
    return [(op, op.results[0], at, pooling_bytes(op.node, model.values, model.chip.platform)) for op, node, at in runs if at is not None]


def held_pooled(model: Model) -> Iterator[Row]:
    """(first position, last, two variables in their order, bytes by their states)."""
    for op, o, at, bytes_ in pooled(model):
        v, g = model.var("operation", op.node.id), model.var("group", o.group)
        local = model.cached(("pooled", v, bytes_), lambda v=v, n=bytes_: n / shards(model.states[v], model.mesh.sizes))
        yield from in_order(at, at, v, g, np.broadcast_to(local[:, None], (len(local), len(model.states[g]))))
