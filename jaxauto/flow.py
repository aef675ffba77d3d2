"""What a value still feeds, and what it depends on: dataflow through loops, to a fixed point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from jaxauto.core import OPERATIONS, Graph, LinkKind, Node, OpRule, Value
from jaxauto.graph import walk

# Compilers make what comes of these again inside whatever reads it.
# fmt: off
_SPREADING = frozenset([
    "add", "and", "broadcast_in_dim", "convert_element_type", "copy", "eq", "expand_dims", "ge", "gt", "iota", "le", "lt", "max", "min",
    "mul", "ne", "neg", "not", "or", "reshape", "select_n", "squeeze", "stop_gradient", "sub", "transpose",
])
# fmt: on


_LIGHT = 1 / 64  # of the flops of what made its operand


def feeding_operations(graph: Graph, rules: Mapping[int, OpRule], light: Set[int] = frozenset()) -> set[int]:
    """Values that some dot, convolution, gather or scatter still reads, directly or not. The others are results: updates, metrics.

    ``light``: nodes that do not count as such.
    """
    order = list(walk(graph))
    feeding: set[int] = set()
    before = -1
    while len(feeding) != before:  # a carry feeds the trip before it: repeat until nothing changes
        before = len(feeding)
        for node in reversed(order):
            if node.bodies:
                feeding |= {link.source for link in node.links if link.target in feeding}
                continue
            if (rules[node.id].kind in OPERATIONS and node.id not in light) or any(out in feeding for out in node.outputs):
                feeding |= {x for x in node.inputs if isinstance(x, int)}
    return feeding


def light_operations(graph: Graph, rules: Mapping[int, OpRule], dependent: Set[int]) -> set[int]:
    """Operations of the backward pass that make gradients of what weights are made of, out of theirs: of low-rank factors, say.

    They read one array that depends on the batch (``dependent``), and do a small part of the work that made it; what makes cotangents of
    layers does about as much as what made those that it reads.
    """
    work: dict[int, float] = {}  # value → flops of the operations that made it
    found: set[int] = set()
    for node in walk(graph):
        read = [x for x in node.inputs if isinstance(x, int) and x in dependent]
        before = max((work.get(x, 0.0) for x in read), default=0.0)
        if not node.bodies and rules[node.id].kind in OPERATIONS:
            flops = rules[node.id].flops or 0.0
            if node.backward and len(read) == 1 and 0 < flops <= _LIGHT * before:
                found.add(node.id)
            before = flops
        work.update(dict.fromkeys(node.outputs, before))
    return found


def data_dependent(graph: Graph, inputs: Sequence[int]) -> set[int]:
    """Values that depend on ``inputs`` (the batch): what does not is known before the step starts, and can be prefetched."""
    dependent = set(inputs)
    before = -1
    while len(dependent) != before:
        before = len(dependent)
        for node in walk(graph):
            if node.bodies:
                dependent |= {link.target for link in node.links if link.source in dependent}
                if node.prim != "scan" and any(x in dependent for x in node.inputs):  # how often a while runs, which branch of a cond
                    dependent |= {link.target for link in node.links if link.kind is LinkKind.FINAL}
            elif any(x in dependent for x in node.inputs):
                dependent |= set(node.outputs)
    return dependent


def is_spread(values: Mapping[int, Value], number: int) -> bool:
    """Whether a value is made of no more than half its bytes, by cheap elementwise equations and broadcasts alone: a mask, zeros."""
    budget, wanted, seen = values[number].nbytes / 2, [number], {number}
    while wanted:
        value = values[wanted.pop()]
        node = value.producer
        if node is not None and node.prim in _SPREADING:
            fresh = {x for x in node.inputs if isinstance(x, int)} - seen
            wanted += fresh
            seen |= fresh
            continue
        budget -= value.nbytes
        if budget < 0:
            return False
    return True


def is_widening(node: Node, values: Mapping[int, Value]) -> bool:
    """A conversion to a type of more bytes."""
    if node.prim != "convert_element_type":
        return False
    (x,), (out,) = node.inputs, node.outputs
    return isinstance(x, int) and values[x].nbytes < values[out].nbytes


def read_late(graph: Graph, rules: Mapping[int, OpRule], dependent: Set[int]) -> frozenset[int]:
    """Values that nothing heavy reads any more: gradients, updates, metrics. ``dependent``: what depends on the batch."""
    feeding = feeding_operations(graph, rules, light_operations(graph, rules, dependent))
    return frozenset(n for n in graph.values if n not in feeding)
