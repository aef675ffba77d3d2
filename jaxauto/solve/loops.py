"""What loops change for collectives: how much work a trip has to hide them, which sums are made after the loop, and which as one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Set
from typing import Any

from jaxauto.core import Graph, LinkKind, Node
from jaxauto.cost.compute import unsplit_seconds
from jaxauto.graph import walk
from jaxauto.groups import Groups
from jaxauto.solve.positions import reduced_factors

_ADDS = frozenset({"add", "add_any"})
_MOVES = frozenset({"transpose", "reshape", "convert_element_type", "copy"})


def shadows(groups: Groups, chip: Any, devices: int) -> Mapping[int, float]:
    """Node id → seconds that one trip of the innermost loop around it takes one of ``devices`` that share its operations evenly.

    A collective of a trip hides behind the trip's own work: its result is there before the next one. Nodes outside of loops are not in it.
    """
    operations = {op.node.id: op for op in groups.operations}
    found: dict[int, float] = {}
    for loop in walk(groups.graph):
        for body in loop.bodies:
            runs = max(1, groups.times[loop.id] * loop.trips)  # a loop may be of no trips
            inner = [n for n in walk(body) if n.id in operations]
            values, times = groups.graph.values, groups.times
            seconds = sum(unsplit_seconds(n, operations[n.id], values, chip) * times[n.id] / runs for n in inner) / devices
            found.update(dict.fromkeys((n.id for n in body.nodes), seconds))
    return found


def accumulated(groups: Groups) -> Mapping[int, int]:
    """Value that a loop only adds to a carry, which nothing else in the loop reads → trips of the loop.

    XLA:GPU and XLA:TPU sum it over devices after the loop, once (WhileLoopAllReduceCodeMotion), if the sum is whole on each device.
    """
    found: dict[int, int] = {}
    values = groups.graph.values
    for loop in walk(groups.graph):
        for link in (e for e in loop.links if e.kind is LinkKind.CARRY):
            node, carry = values[link.source].producer, values[link.target]
            if node is None or node.prim not in _ADDS or carry.users != [node] or values[link.source].users:
                continue
            user: Node | None = node
            x = next((x for x in node.inputs if isinstance(x, int) and x != link.target), None)
            while x is not None and user is not None and values[x].users == [user]:
                found[x] = loop.trips
                user = values[x].producer
                moves = user is not None and user.prim in _MOVES
                x = user.inputs[0] if moves and user is not None and isinstance(user.inputs[0], int) else None
    return found


def combined(groups: Groups, late_only: Set[int]) -> Mapping[int, int]:
    """Gradient that may be a sum over devices → how many such sums of its dtype are made in the same body: XLA:TPU makes one all-reduce of
    all that depend on nothing of each other (AllReduceCombiner).

    Args:
      late_only: values that only the update reads.
    """
    sums = {o.value for op in groups.operations for o in op.results if reduced_factors(op, o)}
    sums |= {e.result for e in groups.edges if e.reduced}
    values = groups.graph.values
    found: dict[int, int] = {}

    def visit(graph: Graph) -> None:
        mine = sums.intersection(late_only, (out for node in graph.nodes for out in node.outputs))
        alike = Counter(str(values[x].dtype) for x in mine)
        found.update({x: alike[str(values[x].dtype)] for x in mine})
        for body in (body for node in graph.nodes for body in node.bodies):
            visit(body)

    visit(groups.graph)
    return found


def hidden_seconds(seconds: Any, shadow: float) -> Any:
    """Of the seconds of a collective that can run beside other work, those for which there is work."""
    return seconds if shadow == math.inf else seconds.clip(max=shadow)
