"""In which order a compiler runs a program, and what of it lies in donated memory."""

from __future__ import annotations

from collections.abc import Callable, Set

from jaxauto.core import Graph, LinkKind, Node
from jaxauto.graph import BarrierEqn, walk
from jaxauto.rewrite.away import fetched
from jaxauto.rewrite.order import SMALL

_MUCH = 1 / 8  # of the widest array
_SHORT = 64  # times its own bytes on a device are read for a gradient whose sum is waited for


def schedule(
    graph: Graph,
    reads: Callable[[Node], bool] | None = None,
    delayed: Callable[[Node], bool] | None = None,
    loose: Set[int] = frozenset(),
    *,
    alone: bool = False,
) -> list[Node]:
    """Nodes in the order of the program, but what comes after a backward pass (the optimizer) as soon as its operands are there.

    Args:
      reads: whether a node wants its operands in memory. What no backward pass needs (the rest of a loss, metrics) comes at the end
        where it makes its widest arrays for such nodes, as XLA:TPU puts off what takes memory. Seen in programs without loops; with
        loops it was at the end in one and at once in three, so there it is taken to come at once, which needs more. None: nothing is.
      delayed: whether a node is put off where no backward pass reads what it makes, as XLA:GPU puts off weight gradients on several
        devices: to the end of a loop's body, else to where ``rewrite.order`` lets something wait for it. None: nothing is.
      loose: the results that no other trip reads of a loop's body, all of a whole program.
      alone: on one device, where every recomputation waits for what was put off before it; on several, for what is small, and for that
        of the block before.
    """
    if not any(node.backward for node in graph.nodes):
        return graph.nodes
    index: dict[int, float] = {}
    after: set[int] = set()  # nodes with a backward pass in their history
    free: list[Node] = []  # what an optimizer makes of its state alone: it holds nothing up
    begun = False
    put_off = _put_off(graph, delayed, loose, alone=alone) if delayed is not None else {}
    # What is fetched for an update comes beside all that is before the next gradient; the update is made then.
    turn = {copy.id: leaf.following.id for leaf in fetched(graph) if leaf.following is not None for copy in leaf.copies}
    for k, node in enumerate(graph.nodes):
        producers = [p for x in node.inputs if isinstance(x, int) and (p := graph.values[x].producer) is not None and p.id in index]
        late = any(p.backward or p.id in after for p in producers)
        if late and not node.backward:
            after.add(node.id)
        elif begun and not node.backward and not node.bodies:
            free.append(node)
        moves = begun and not node.backward and not node.bodies
        waits = (*(p.id for p in producers), *(turn[p.id] for p in producers if p.id in turn))
        index[node.id] = max((index[n] for n in waits), default=0) if moves else put_off.get(node.id, k)
        begun = begun or node.backward
    for node in reversed(free):
        users = [index[user.id] for out in node.outputs for user in graph.values[out].users if user.id in index]
        index[node.id] = min(users, default=index[node.id])
    if reads is not None and not any(node.bodies for node in graph.nodes):
        aside = _aside(graph, after)
        made = {out: graph.values[out].nbytes for node in aside for out in node.outputs}
        widest = max(made.values(), default=0)
        if any(reads(node) and any(2 * made.get(x, 0) >= widest for x in node.inputs if isinstance(x, int)) for node in aside):
            index.update(dict.fromkeys((node.id for node in aside), len(graph.nodes)))
    return sorted(graph.nodes, key=lambda node: index[node.id])


def short_sums(graph: Graph, devices: int) -> set[int]:
    """Of several GPUs, the nodes of a backward pass whose results are summed in little time beside what they are made of.

    XLA:GPU puts off weight gradients, and what they read lies in memory until then. Who waits for one waits for its sum over devices: for
    those that are small, of arrays among the widest (of a convolution over large images), the next operation does (``rewrite/order.py``).
    """
    nodes = [node for node in walk(graph) if not node.bodies]
    values = {x: graph.values[x].nbytes for node in nodes for x in (*node.inputs, *node.outputs) if isinstance(x, int)}
    widest = max((values[x] for node in nodes for x in node.outputs), default=0)
    backward = ((node, [values[x] for x in node.inputs if isinstance(x, int)]) for node in nodes if node.backward)
    return {
        node.id
        for node, read in backward
        if max(read, default=0) >= max(_MUCH * widest, _SHORT * devices * sum(values[x] for x in node.outputs))
    }


def _put_off(graph: Graph, delayed: Callable[[Node], bool], loose: Set[int], *, alone: bool) -> dict[int, float]:
    """Node → place in the order, of weight gradients and what is made of them within the backward pass."""
    results = {x for x in graph.outputs if isinstance(x, int)}
    ends: set[int] = set()
    for node in reversed(graph.nodes):
        if node.backward and not node.bodies and not isinstance(node.eqn, BarrierEqn):
            users = [u for out in node.outputs for u in graph.values[out].users]
            kept = results.intersection(node.outputs)
            if all(not u.backward or u.id in ends for u in users) and kept <= loose and (users or kept):
                ends.add(node.id)
    walls = [k for k, node in enumerate(graph.nodes) if node.backward and (node.bodies or isinstance(node.eqn, BarrierEqn))]
    last = max((k for k, node in enumerate(graph.nodes) if node.backward), default=0)
    found: dict[int, float] = {}
    for k, node in enumerate(graph.nodes):
        if node.id not in ends:
            continue
        if delayed(node):
            coming = [w for w in walls if w > k][:2]
            small = all(graph.values[x].nbytes <= SMALL for x in node.outputs)
            first = bool(coming) and (alone or small or bool(graph.nodes[coming[0]].bodies))
            waits = coming[0] if first else coming[1] if len(coming) > 1 else last + 1
            found[node.id] = waits - 0.5 + 0.4 * k / len(graph.nodes)  # one after the other, each with what is made of it
        else:
            producers = (graph.values[x].producer for x in node.inputs if isinstance(x, int))
            if places := [found[p.id] for p in producers if p is not None and p.id in found]:
                found[node.id] = max(places)
    return found


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
