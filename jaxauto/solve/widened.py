"""What XLA:CPU's dots and convolutions have in float32 beside buffers (``cost/widened.py``): copies of operands, and results not yet rounded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxauto.core import Node
from jaxauto.cost.compute import factor_dims
from jaxauto.cost.widened import MULTIPLIED, is_narrow, order
from jaxauto.groups import Operand, Operation
from jaxauto.solve.facts import operation_runs, viewed
from jaxauto.solve.turns import Row, in_order
from jaxauto.strategies import project, shards

if TYPE_CHECKING:
    from jaxauto.solve.model import Model

WIDE = 4  # bytes


class Copy(NamedTuple):
    """An operand's copy: there from ``begin`` to ``end``, which dots that want it alike share."""

    operation: Operation
    operand: Operand
    begin: int
    end: int


class Result(NamedTuple):
    """A result that is rounded after the dot at ``at``; ``ended``: places of the copies in ``copies`` that are gone by then."""

    operation: Operation
    operand: Operand
    at: int
    ended: tuple[int, ...]


def widened(model: Model) -> tuple[list[Copy], list[Result]]:
    """All of them."""
    if model.chip.platform != "cpu":
        return [], []
    return model.cached(("widened", model.variant), lambda: _found(model))


def held_widened(model: Model) -> Iterator[Row]:
    """(first position, last, two variables in their order, bytes by their states)."""
    copies, results = widened(model)
    for op, o, begin, end in copies:
        yield from _row(model, op, o, begin, end, _bytes(model, op, o))
    for op, o, at, ended in results:
        made, gone = _bytes(model, op, o), sum(_bytes(model, copies[k].operation, copies[k].operand) for k in ended)
        yield from _row(model, op, o, at, at, made - np.minimum(made / 2, gone))


def _row(model: Model, op: Operation, o: Operand, begin: int, end: int, bytes_: np.ndarray) -> Iterator[Row]:
    v, g = model.var("operation", op.node.id), model.var("group", o.group)
    yield from in_order(begin, end, v, g, np.broadcast_to(bytes_[:, None], (len(bytes_), len(model.states[g]))))


def _bytes(model: Model, op: Operation, o: Operand) -> np.ndarray:
    """Of one device, by the states of the operation."""
    v = model.var("operation", op.node.id)
    dims = factor_dims(op, o)
    return model.cached(
        ("widened", v, dims, o.value), lambda: WIDE * model.values[o.value].elements / shards(project(model.states[v], dims), model.mesh.sizes)
    )


def _found(model: Model) -> tuple[list[Copy], list[Result]]:
    b, rewritten = model.buffers, model.variant.rewritten
    values = rewritten.graph.values
    index = {int(number): k for k, number in enumerate(b.ids)}
    found: dict[tuple, Copy] = {}
    runs: list[tuple[Operation, Node, int]] = []
    of: dict[int, list[tuple]] = defaultdict(list)
    for op, node in operation_runs(model.variant, model.groups):
        if op.rule.kind not in MULTIPLIED or (at := b.position.get(node.id)) is None:
            continue
        runs.append((op, node, at))
        for k, x in enumerate(node.inputs):
            o = next((o for o in op.operands if o.value == op.node.inputs[k]), None)
            number = viewed(model.groups, rewritten, x, index) if isinstance(x, int) else x
            if o is None or number not in index:
                continue
            wanted = order(op.node, k)
            as_it_is = not is_narrow(values[x]) or b.bytes_[index[number]] >= WIDE * values[number].elements
            if wanted or not as_it_is:
                key = number, wanted
                begin, end = (found[key].begin, found[key].end) if key in found else (at, at)
                found[key] = Copy(op, o, min(begin, at), max(end, at))
                of[node.id].append(key)
    copies, place = list(found.values()), {key: k for k, key in enumerate(found)}
    results = [
        Result(op, o, at, tuple(place[key] for key in of[node.id] if found[key].end == at))
        for op, node, at in runs
        for o in op.results
        if is_narrow(model.values[o.value]) and (made := index.get(node.outputs[0])) is not None
        and b.bytes_[made] < WIDE * model.values[o.value].elements
    ]
    return copies, results
