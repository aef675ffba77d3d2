"""In which order a compiler runs a program, and what of it lies in donated memory."""

from __future__ import annotations

from collections.abc import Callable

from jaxauto.core import Graph, LinkKind, Node


def schedule(graph: Graph, reads: Callable[[Node], bool] | None = None) -> list[Node]:
    """Nodes in the order of the program, but what comes after a backward pass (the optimizer) as soon as its operands are there.

    Args:
      reads: whether a node wants its operands in memory. What no backward pass needs (the rest of a loss, metrics) comes at the end
        where it makes arrays for such nodes, as XLA:TPU puts off what takes memory. Seen in programs without loops; with loops it was
        at the end in one and at once in three, so there it is taken to come at once, which needs more. None: nothing is put off.
    """
    if not any(node.backward for node in graph.nodes):
        return graph.nodes
    index: dict[int, int] = {}
    after: set[int] = set()  # nodes with a backward pass in their history
    free: list[Node] = []  # what an optimizer makes of its state alone: it holds nothing up
    begun = False
    for k, node in enumerate(graph.nodes):
        producers = [p for x in node.inputs if isinstance(x, int) and (p := graph.values[x].producer) is not None and p.id in index]
        late = any(p.backward or p.id in after for p in producers)
        if late and not node.backward:
            after.add(node.id)
        elif begun and not node.backward and not node.bodies:
            free.append(node)
        moves = begun and not node.backward and not node.bodies
        index[node.id] = max((index[p.id] for p in producers), default=0) if moves else k
        begun = begun or node.backward
    for node in reversed(free):
        users = [index[user.id] for out in node.outputs for user in graph.values[out].users if user.id in index]
        index[node.id] = min(users, default=index[node.id])
    if reads is not None and not any(node.bodies for node in graph.nodes):
        aside = _aside(graph, after)
        made = {out for node in aside for out in node.outputs}
        if any(reads(node) and not made.isdisjoint(x for x in node.inputs if isinstance(x, int)) for node in aside):
            index.update(dict.fromkeys((node.id for node in aside), len(graph.nodes)))
    return sorted(graph.nodes, key=lambda node: index[node.id])


def _aside(graph: Graph, after: set[int]) -> list[Node]:
    """Nodes that no backward pass has anything to do with, before it or after it."""
    feeding = {node.id for node in graph.nodes if node.backward}
    for node in reversed(graph.nodes):
        if any(user.id in feeding for out in node.outputs for user in graph.values[out].users):
            feeding.add(node.id)
    return [node for node in graph.nodes if node.id not in feeding and node.id not in after]


def in_donated(graph: Graph, aliased: frozenset[int]) -> set[int]:
    """``aliased`` and, through loops and branches, the carries and results that become them."""
    found = set(aliased)
    for node in reversed(graph.nodes):
        for body in node.bodies:
            finals = {link.source: link.target for link in node.links if link.kind is LinkKind.FINAL}
            inner = {x for x in body.outputs if isinstance(x, int) and finals.get(x) in found and x not in body.inputs}
            inits = {link.target for link in node.links if link.kind is LinkKind.INIT and link.source in graph.inputs}
            carries = {link.target for link in node.links if link.kind is LinkKind.CARRY and link.source in inner}
            found |= in_donated(body, frozenset(inner)) | (carries & inits)
    return found
