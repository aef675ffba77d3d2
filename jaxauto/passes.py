"""Which pass of a step each equation belongs to: forward, backward or optimizer."""

from __future__ import annotations

from jaxauto.core import Graph, Node
from jaxauto.graph import walk

PASSES = ("forward", "backward", "optimizer")


def label_passes(graph: Graph) -> dict[int, str]:
    """Labels every node: node id (loop bodies included) → ``"forward" | "backward" | "optimizer"``.

    A transposed equation is backward; one that depends on it and is not transposed is optimizer, unless another backward pass
    follows it. What only the optimizer reads (weight decay, the step count) belongs to it. A loop that holds both passes
    (accumulated gradients) is looked into.
    """
    level: dict[int, int] = {}  # value → number of changes of side in its history; odd: backward
    own: dict[int, int] = {}
    both: set[int] = set()  # loops that hold a backward pass
    for node in graph.nodes:
        latest = max((level.get(x, 0) for x in node.inputs if isinstance(x, int)), default=0)
        if not node.backward and _holds_backward(node):
            both.add(node.id)
        own[node.id] = latest + ((latest % 2 == 1) != node.backward)
        for out in node.outputs:
            level[out] = own[node.id] + (node.id in both)
    last = max((n for n in level.values() if n % 2), default=-1)
    labels: dict[int, str] = {}
    for node in reversed(graph.nodes):
        users = {labels.get(u.id) for out in node.outputs for u in graph.values[out].users}
        if own[node.id] % 2:
            labels[node.id] = "backward"
        elif last >= 0 and (own[node.id] > last or (own[node.id] == 0 and users == {"optimizer"} and node.id not in both)):
            labels[node.id] = "optimizer"
        else:
            labels[node.id] = "forward"
        for body in node.bodies:
            if labels[node.id] == "forward":
                labels |= label_passes(body)
            else:
                labels |= {inside.id: labels[node.id] for inside in walk(body)}
    return labels


def _holds_backward(node: Node) -> bool:
    return any(inside.backward for body in node.bodies for inside in walk(body))
