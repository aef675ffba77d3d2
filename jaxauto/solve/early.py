"""What is in memory for a windowed einsum (``cost/windowed.py``) alone, long before it runs.

What other dots make as they read it is written for the einsum where it is made. Of what is in memory anyway a transposed copy is made, as
the backward pass begins, or what is made again of it; a copy takes the place of what nothing else reads from there on (compiled for v5e:
layers of one dot, with and without what else reads their inputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from jaxauto.core import Kind
from jaxauto.graph import walk
from jaxauto.groups import Operation
from jaxauto.solve.facts import viewed
from jaxauto.solve.turns import Row, in_order

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


def held_early(model: Model) -> Iterator[Row]:
    """(first position, last, two variables in their order, bytes by their states)."""
    for op, k, begin, end in made_early(model):
        for o in op.results:
            v, g = model.var("operation", op.node.id), model.var("group", o.group)
            yield from in_order(begin, end, v, g, model.result_tables(op, o)[3][k])


def made_early(model: Model) -> list[tuple[Operation, int, int, int]]:
    """(dot, which of its operands, positions from where that or a transposed copy of it is made up to the dot): of a value its last dot.

    Of the backward pass, what the forward pass makes, and what is made again: that is ahead of the gradients that the einsum waits for.
    What else is made in the same pass is there briefly, and mostly on chip.
    """
    return model.cached(("made early", model.variant), lambda: _made_for_dots(model)) if model.mesh.windows else []


def _made_for_dots(model: Model) -> list[tuple[Operation, int, int, int]]:
    rewritten, position = model.variant.rewritten, model.buffers.position
    graph = rewritten.graph
    nodes = {node.id: node for node in walk(graph)}
    operations = {node.id for _, node in model.variant.operations}
    turns = min((position[n.id] for n in graph.nodes if n.backward and n.id in position), default=0)
    last: dict[int, tuple[Operation, int, int, int]] = {}
    for op in model.groups.operations:
        if op.node.id not in position or not op.node.backward:
            continue
        inside, end = {found.operand for found in model.inside(op)}, position[op.node.id] - 1
        for k, x in enumerate(nodes[op.node.id].inputs):
            if k not in inside and op.rule.kind is not Kind.DOT:
                continue
            number = viewed(model.groups, rewritten, x)
            begin = _made_at(model, number, turns, copied=k not in inside) if isinstance(number, int) else None
            if begin is None or begin >= end or (number in last and last[number][3] >= end):
                continue
            if k in inside or number in graph.inputs or _is_read_from(model, number, begin, op.node.id, operations):
                last[number] = op, k, begin, end
    return list(last.values())


def _made_at(model: Model, number: int, turns: int, *, copied: bool) -> int | None:
    """Where a value is made, or copied from ``turns`` on if it is of the forward pass; None: the backward pass makes it first."""
    rewritten, position = model.variant.rewritten, model.buffers.position
    node, written = rewritten.graph.values[number].producer, model.values[rewritten.origin.get(number, number)].producer
    if node is None:
        return turns if copied and number in rewritten.graph.inputs else None
    if written is None or written.backward or node.id not in position:
        return None
    return max(position[node.id], turns) if copied and node.id == written.id else position[node.id]


def _is_read_from(model: Model, number: int, begin: int, besides: int, operations: Set[int]) -> bool:
    """Whether another node reads a value at ``begin`` or later, or makes of it what has no buffer, which may be made anywhere."""
    stored, position = model.buffers.stored, model.buffers.position
    others = (node for node in model.variant.rewritten.graph.values[number].users if node.id != besides)
    return any(position.get(n.id, 0) >= begin or (n.id not in operations and not stored.issuperset(n.outputs)) for n in others)
