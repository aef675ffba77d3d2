"""Gradients of weights, as compilers that put them off are held to them."""

from __future__ import annotations

from collections.abc import Iterator, Set

from jaxauto.core import Graph
from jaxauto.graph import walk
from jaxauto.groups import Groups, Operand, Operation
from jaxauto.rewrite.order import habits_of, in_order
from jaxauto.rewrite.program import Rewritten

_ORDERS = frozenset(["transpose", "reshape", "squeeze", "expand_dims"])


def straight_gradients(groups: Groups, late_only: Set[int], *, bodies: bool = False) -> Iterator[tuple[Operation, Operand]]:
    """Weight gradients of the straight program, by what makes them.

    Args:
      late_only: values that nothing but the update reads. bodies: those of loops too.
    """
    straight = {node.id for node in (walk(groups.graph) if bodies else groups.graph.nodes)}
    for op in groups.operations:
        for o in op.results:
            if op.node.backward and o.value in late_only and op.node.id in straight:
                yield op, o


def as_read(groups: Groups, result: Operand) -> int:
    """A gradient as the optimizer reads it: an operation writes whatever order of dimensions is asked of it."""
    values = groups.graph.values
    value = values[result.value]
    while len(value.users) == 1 and value.users[0].prim in _ORDERS and value.users[0].backward:
        value = values[value.users[0].outputs[0]]
    return value.id


def summed_gradients(groups: Groups, late_only: Set[int]) -> list[int]:
    """Gradients that are sums: of what is added to rows, or multiplies them."""
    reduced = (node for node in walk(groups.graph) if node.backward and node.prim == "reduce_sum")
    return [node.outputs[0] for node in reduced if node.outputs[0] in late_only]


def waited_for(groups: Groups, late_only: Set[int]) -> frozenset[int]:
    """Both, in loops too: what XLA:CPU, and XLA:GPU on several devices, are held to where they are (``awaited.py``)."""
    made = straight_gradients(groups, late_only, bodies=True)
    return frozenset(as_read(groups, o) for _, o in made).union(summed_gradients(groups, late_only))


def is_held_on_cpu(graph: Graph, devices: int, *, pressed: bool) -> bool:
    """Whether XLA:CPU is held to an order: on several devices where something is made again, also by the user's ``jax.checkpoint``."""
    return devices == 1 or pressed or any(node.again for node in walk(graph))


def held_on_cpu(rewritten: Rewritten, groups: Groups, late_only: Set[int], devices: int, *, pressed: bool = False) -> Graph:
    """A program with the barriers that hold XLA:CPU to its order; ``pressed``: something is made again for the sake of memory."""
    return in_order(rewritten, waited_for(groups, late_only), habits_of("cpu", devices, pressed=pressed)).graph
