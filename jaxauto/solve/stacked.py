"""Which stacks of the caller loops read, and what reads their slices: one is copied whole where its loops want another layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxauto.core import Graph, LinkKind, Node
from jaxauto.groups import Groups, Operand, Operation
from jaxauto.solve.remat import Variant

_KEEPS_LAYOUT = frozenset({"convert_element_type", "copy", "optimization_barrier"})  # and the dimensions


class Reading(NamedTuple):
    """From ``begin`` to ``end`` a loop reads ``stack``, an input of the step; the first operation that reads slices reads ``operand``."""

    begin: int
    end: int
    stack: int
    operation: Operation
    operand: Operand


def readings(variant: Variant, groups: Groups) -> tuple[Reading, ...]:
    """One for each stack and outermost loop, in the order that they run."""
    operations = {op.node.id: op for op in groups.operations}
    graph, written = variant.rewritten.graph, groups.graph.values
    first: dict[tuple[int, int], Reading] = {}
    for loop in (n for n in graph.nodes if n.bodies and n.id in variant.buffers.loop_start):
        begin, end = variant.buffers.loop_start[loop.id], variant.buffers.position[loop.id]
        for stack, node, k in _slices_read(loop, {x: (x, False) for x in graph.inputs}):
            made = written.get(variant.rewritten.origin.get(node.outputs[0], node.outputs[0]))
            original = made.producer if made is not None else None
            op = operations.get(original.id) if original is not None else None
            if original is None or op is None or original.prim != node.prim:
                continue
            operand = next((o for o in op.operands if o.value == original.inputs[k]), None)
            if operand is not None and len(operand.dims) == len(written[stack].shape) - 1:
                first.setdefault((loop.id, stack), Reading(begin, end, stack, op, operand))
    return tuple(sorted(first.values(), key=lambda r: r.begin))


def _slices_read(loop: Node, outside: Mapping[int, tuple[int, bool]]) -> Iterator[tuple[int, Node, int]]:
    """(stack, node, number of its input) of what reads slices of a stack; ``outside``: value → (stack, whether it is a slice)."""
    inside = {
        link.target: (outside[link.source][0], link.kind is LinkKind.XS or outside[link.source][1])
        for link in loop.links
        if link.kind in (LinkKind.XS, LinkKind.CONST) and link.source in outside
    }
    for body in loop.bodies:
        yield from _in_body(body, dict(inside))


def _in_body(body: Graph, known: dict[int, tuple[int, bool]]) -> Iterator[tuple[int, Node, int]]:
    for node in body.nodes:
        if node.bodies:
            yield from _slices_read(node, known)
            continue
        found = [(k, x) for k, x in enumerate(node.inputs) if isinstance(x, int) and x in known]
        for k, x in found:
            if node.prim in _KEEPS_LAYOUT:
                known[node.outputs[k]] = known[x]
            elif known[x][1]:
                yield known[x][0], node, k
