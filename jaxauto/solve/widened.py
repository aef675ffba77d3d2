"""What dots and convolutions have in float32 beside buffers on CPU (``cost/widened.py``), by the strategies of these."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from jaxauto.core import MATRIX, Node
from jaxauto.cost.compute import factor_dims
from jaxauto.cost.widened import WIDE, Copy, Result, beside_dots, beside_result
from jaxauto.groups import Operand, Operation
from jaxauto.solve.facts import viewed
from jaxauto.solve.turns import Row, in_order
from jaxauto.strategies import project, shards

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


class Widened:
    """All of it, for a variant: ``copies`` and ``results`` by node of the rewritten program; ``operations``: node id → operation."""

    def __init__(self, model: Model):
        rewritten = model.variant.rewritten
        runs = [(op, node) for op, node in model.variant.operations if op.rule.kind in MATRIX]
        self.operations = {node.id: op for op, node in runs}
        view = partial(viewed, model.groups, rewritten, held=frozenset(model.buffers.ids.tolist()))
        found = beside_dots((node for _, node in runs), rewritten.graph.values, model.buffers, view)
        self.copies: list[Copy] = found[0]
        self.results: list[Result] = found[1]

    def operand(self, node: Node, place: int) -> tuple[Operation, Operand]:
        op = self.operations[node.id]
        return op, next(o for o in op.operands if o.value == op.node.inputs[place])

    def result(self, node: Node, place: int) -> tuple[Operation, Operand]:
        op = self.operations[node.id]
        return op, next(o for o in op.results if o.value == op.node.outputs[place])


def widened(model: Model) -> Widened | None:
    """None where the compiler computes in the types that it is given."""
    return model.cached(("widened", model.variant), lambda: Widened(model)) if model.chip.platform == "cpu" else None


def held_widened(model: Model) -> Iterator[Row]:
    """(first position, last, two variables in their order, bytes by their states)."""
    if (found := widened(model)) is None:
        return
    sizes = [_bytes(model, *found.operand(c.node, c.place)) for c in found.copies]
    for c, size in zip(found.copies, sizes, strict=True):
        yield from _row(model, *found.operand(c.node, c.place), c.begin, c.end, size)
    for node, place, at, gone in found.results:
        op, o = found.result(node, place)
        yield from _row(model, op, o, at, at, beside_result(_bytes(model, op, o), sum(sizes[k] for k in gone)))


def in_halves(model: Model, x: np.ndarray) -> tuple[list[tuple[int, int, float]], frozenset[int]]:
    """The same under solution ``x``, each position in two: in the first a dot reads its copies and writes its result, in the second that
    is rounded.

    Returns: (first half, last, bytes of one device) of the copies and of results in float32, and the values that begin in the second.
    """
    if (found := widened(model)) is None:
        return [], frozenset()

    def bytes_(op: Operation, o: Operand) -> float:
        return float(_bytes(model, op, o)[x[model.var("operation", op.node.id)]])

    copies = [(2 * c.begin, 2 * c.end, bytes_(*found.operand(c.node, c.place))) for c in found.copies]
    results = [(2 * r.at, 2 * r.at + 1, bytes_(*found.result(r.node, r.place))) for r in found.results]
    return copies + results, frozenset(r.node.outputs[r.place] for r in found.results)


def _row(model: Model, op: Operation, o: Operand, begin: int, end: int, bytes_: np.ndarray) -> Iterator[Row]:
    v, g = model.var("operation", op.node.id), model.var("group", o.group)
    yield from in_order(begin, end, v, g, np.broadcast_to(bytes_[:, None], (len(bytes_), len(model.states[g]))))


def _bytes(model: Model, op: Operation, o: Operand) -> np.ndarray:
    """Of one device, by the states of the operation."""
    v, dims = model.var("operation", op.node.id), factor_dims(op, o)
    whole = WIDE * model.values[o.value].elements
    return model.cached(("widened", v, dims, o.value), lambda: whole / shards(project(model.states[v], dims), model.mesh.sizes))
