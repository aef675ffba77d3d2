"""Operands that XLA:GPU pads for a dot (``cost/padded.py``), by states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from jaxauto.core import Kind
from jaxauto.cost.compute import factor_dims, operand_bytes
from jaxauto.cost.kernels import TILE, pads
from jaxauto.cost.padded import is_read_elsewhere
from jaxauto.groups import Operand, Operation
from jaxauto.solve.positions import reduced_factors
from jaxauto.solve.turns import Row, in_order
from jaxauto.strategies import project, shards

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


def may_be_padded(model: Model) -> list[tuple[Operation, Operand, int]]:
    """(dot, operand, position) of arrays in memory that something else reads too."""
    return model.cached(("may be padded", model.variant), lambda: list(_found(model))) if model.chip.platform == "gpu" else []


def held_padded(model: Model) -> Iterator[Row]:
    """(first position, last, two variables in their order, bytes by their states)."""
    for op, o, at in may_be_padded(model):
        v, g = model.var("operation", op.node.id), model.var("group", o.group)
        bytes_ = model.cached(("padded", v, o.value, op.node.id), lambda op=op, o=o, v=v: _bytes(model, op, o, v))
        yield from in_order(at, at, v, g, np.broadcast_to(bytes_[:, None], (len(bytes_), len(model.states[g]))))


def _found(model: Model) -> Iterator[tuple[Operation, Operand, int]]:
    b, values = model.buffers, model.variant.rewritten.graph.values
    own = {*b.ids.tolist()}
    for op, node in model.variant.operations:
        at = b.position.get(node.id)
        for o in op.operands if at is not None and op.rule.kind is Kind.DOT else ():
            if at is not None and is_read_elsewhere(node.inputs[op.node.inputs.index(o.value)], values, b, own):
                yield op, o, at


def _bytes(model: Model, op: Operation, o: Operand, v: int) -> np.ndarray:
    """Of one device, by the states of the operation."""
    state, sizes = model.states[v], np.asarray(model.mesh.sizes)
    (result,) = op.results
    long = np.ones(len(state))
    for k in reduced_factors(op, result):
        long *= op.factors[k][1] / np.where(state == k, sizes, 1).prod(-1)
    tiles = model.values[result.value].elements / shards(project(state, factor_dims(op, result)), model.mesh.sizes) / TILE**2
    return pads(tiles, long) * operand_bytes(o, op, model.values, state, model.mesh.sizes, model.chip)
