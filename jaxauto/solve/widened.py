"""What dots and convolutions have in float32 beside buffers on CPU (``cost/widened.py``): copies of operands, results not yet rounded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxauto.core import Node
from jaxauto.cost.compute import factor_dims
from jaxauto.cost.widened import MULTIPLIED, WIDE, is_narrow, order
from jaxauto.groups import Operand, Operation
from jaxauto.solve.facts import operation_runs, viewed
from jaxauto.solve.turns import Row, in_order
from jaxauto.strategies import project, shards

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


class Copy(NamedTuple):
    """A copy of an operand, there from ``begin`` to ``end``: dots that want the same share it."""

    operation: Operation
    operand: Operand
    begin: int
    end: int


class Result(NamedTuple):
    """A result that is rounded after the dot at ``at``; ``gone``: which copies are gone by then."""

    operation: Operation
    operand: Operand
    at: int
    gone: tuple[int, ...]


def widened(model: Model) -> tuple[list[Copy], list[Result]]:
    """All of them."""
    if model.chip.platform != "cpu":
        return [], []
    return model.cached(("widened", model.variant), lambda: _found(model))


def held_widened(model: Model) -> Iterator[Row]:
    """(first position, last, two variables in their order, bytes by their states). A result lies beside its copies, then beside itself
    rounded, which has a buffer."""
    copies, results = widened(model)
    for op, o, begin, end in copies:
        yield from _row(model, op, o, begin, end, _bytes(model, op, o))
    for op, o, at, gone in results:
        made, freed = _bytes(model, op, o), sum(_bytes(model, copies[k].operation, copies[k].operand) for k in gone)
        yield from _row(model, op, o, at, at, made - np.minimum(made / 2, freed))


def _row(model: Model, op: Operation, o: Operand, begin: int, end: int, bytes_: np.ndarray) -> Iterator[Row]:
    v, g = model.var("operation", op.node.id), model.var("group", o.group)
    yield from in_order(begin, end, v, g, np.broadcast_to(bytes_[:, None], (len(bytes_), len(model.states[g]))))


def _bytes(model: Model, op: Operation, o: Operand) -> np.ndarray:
    """Of one device, by the states of the operation."""
    v, dims = model.var("operation", op.node.id), factor_dims(op, o)
    whole = WIDE * model.values[o.value].elements
    return model.cached(("widened", v, dims, o.value), lambda: whole / shards(project(model.states[v], dims), model.mesh.sizes))


def _found(model: Model) -> tuple[list[Copy], list[Result]]:
    b, values = model.buffers, model.variant.rewritten.graph.values
    sizes = {int(number): float(bytes_) for number, bytes_ in zip(b.ids, b.bytes_, strict=True)}
    found: dict[tuple, Copy] = {}
    read: dict[int, list[tuple]] = defaultdict(list)  # position of a dot → the copies that it reads
    runs = [(op, node, b.position[node.id]) for op, node in operation_runs(model.variant, model.groups) if _multiplies(model, op, node)]
    for op, node, at in runs:
        for k, x in enumerate(node.inputs):
            o = next((o for o in op.operands if o.value == op.node.inputs[k]), None)
            number = viewed(model.groups, model.variant.rewritten, x, sizes)
            if o is None or number not in sizes:
                continue
            key = number, (wanted := order(op.node, k))
            if wanted or (is_narrow(values[x]) and sizes[number] < WIDE * values[number].elements):
                begin = found[key].begin if key in found else at
                found[key] = Copy(op, o, min(begin, at), max(found[key].end if key in found else at, at))
                read[at].append(key)
    places = {key: k for k, key in enumerate(found)}
    results = [
        Result(op, o, at, tuple(places[key] for key in read[at] if found[key].end == at))
        for op, node, at in runs
        for o in op.results
        if is_narrow(value := model.values[o.value]) and sizes.get(node.outputs[0], np.inf) < WIDE * value.elements
    ]
    return list(found.values()), results


def _multiplies(model: Model, op: Operation, node: Node) -> bool:
    return op.rule.kind in MULTIPLIED and node.id in model.buffers.position
