"""Operands that XLA:GPU pads for a dot which it splits along what it contracts (``cost/kernels.pads``), beside the array as others read it.

What that dot alone reads is written padded at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxauto.core import Graph, Kind, OpRule, Value
from jaxauto.cost.compute import factor_dims, operand_bytes
from jaxauto.cost.kernels import TILE, pads
from jaxauto.cost.liveness import Buffers
from jaxauto.graph import walk
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
            if at is not None and _is_read_elsewhere(node.inputs[op.node.inputs.index(o.value)], values, b, own):
                yield op, o, at


def live_beside_padded(graph: Graph, rules: Mapping[int, OpRule], buffers: Buffers) -> np.ndarray:
    """Bytes at each position of a program on one device: ``[length]``."""
    live, own, values = np.zeros(buffers.length), {*buffers.ids.tolist()}, graph.values
    dots = [
        n for n in walk(graph) if n.id in buffers.position and not n.bodies and rules[n.id].kind is Kind.DOT and n.prim == "dot_general"
    ]
    for node in dots:
        (left, right), _ = node.params["dimension_numbers"]
        for x, dims in zip(node.inputs, (left, right), strict=True):
            if isinstance(x, int) and _is_read_elsewhere(x, values, buffers, own):
                long, tiles = math.prod(values[x].shape[d] for d in dims), values[node.outputs[0]].elements / TILE**2
                live[buffers.position[node.id]] += pads(tiles, long) * values[x].nbytes
    return live


def _is_read_elsewhere(x: Any, values: Mapping[int, Value], buffers: Buffers, own: Set[int]) -> bool:
    """Whether something else reads the array in memory that a dot reads as ``x``."""
    x = _passed(values, x) if isinstance(x, int) else x
    return any(len(values[number].users) > 1 for number in ((x,) if x in own else buffers.held.get(x, ())))


def _passed(values: Mapping[int, Value], number: int) -> int:
    """What barriers let pass as ``number``."""
    while (node := values[number].producer) is not None and node.prim == "optimization_barrier":
        passed = node.inputs[node.outputs.index(number)]
        assert isinstance(passed, int)
        number = passed
    return number


def _bytes(model: Model, op: Operation, o: Operand, v: int) -> np.ndarray:
    """Of one device, by the states of the operation."""
    state, sizes = model.states[v], np.asarray(model.mesh.sizes)
    (result,) = op.results
    long = np.ones(len(state))
    for k in reduced_factors(op, result):
        long *= op.factors[k][1] / np.where(state == k, sizes, 1).prod(-1)
    tiles = model.values[result.value].elements / shards(project(state, factor_dims(op, result)), model.mesh.sizes) / TILE**2
    return pads(tiles, long) * operand_bytes(o, op, model.values, state, model.mesh.sizes, model.chip)
