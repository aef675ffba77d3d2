"""State in the host's memory: arguments of a program come from there for the update alone, and what becomes of them goes back.

What only the optimizer reads (moments) is fetched leaf by leaf: a barrier holds it back until its gradient is there and the parameter
before it is done, so that the device holds the moments of one leaf at a time. Fetched at the start of a step, as training recipes do it,
they take as much of the device's memory as ever (scripts/results/state.md).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from jaxauto import compat
from jaxauto.core import Graph, Literal, Node
from jaxauto.graph import DEVICE, HOST, BarrierEqn, TransferEqn
from jaxauto.rewrite.program import Program, read_as, readers_of, renamed


def transfer(program: Program, number: int, near: Node, space: str, *, backward: bool = False) -> tuple[Node, int]:
    """A node that copies a value to ``space``, and the copy."""
    copy = program.fresh(number)
    eqn = TransferEqn(near.eqn, program.values[number].aval, space)
    return Node(program.new_id(), eqn, "device_put", (number,), (copy,), near.scope, near.source, backward=backward), copy


def movable(graph: Graph, state: Mapping[int, int | Literal], late_only: Set[int]) -> dict[int, int]:
    """Arguments → the results that they become, of those that can wait in the host's memory.

    Args:
      state: donated arguments → the results that they become. late_only: values that the optimizer alone reads.
    """
    returned = Counter(x for x in graph.outputs if isinstance(x, int))
    read = {x for node in graph.nodes if not node.backward and not node.bodies for x in node.inputs}
    elsewhere = {x for node in graph.nodes if node.backward or node.bodies for x in node.inputs}
    alone = (read & late_only) - elsewhere - {*graph.outputs}
    arrays = {x for x in alone & state.keys() if graph.values[x].shape and not compat.is_key_dtype(graph.values[x].dtype)}
    return {x: o for x, o in state.items() if x in arrays and isinstance(o, int) and returned[o] == 1 and o not in graph.inputs}


def away(program: Program, chosen: Set[int]) -> set[int]:
    """Let arguments of the program in ``chosen`` come from the host's memory, its results in ``chosen`` go there; all that lies there.

    Args:
      chosen: of arguments those that the optimizer alone reads, of results those that it makes.
    """
    graph = program.top
    members = [x for x in graph.inputs if x in chosen]
    sent = _sent(program, graph, chosen)
    if members:
        _leaf_by_leaf(program, graph, members, sent.keys())
    graph.outputs = renamed(graph.outputs, sent)
    return {*members, *sent.values()}


def _sent(program: Program, graph: Graph, chosen: Set[int]) -> dict[int, int]:
    """Result → its copy in the host's memory, made as soon as it is."""
    results = {x for x in graph.outputs if isinstance(x, int)} & chosen
    nodes: list[Node] = []
    sent: dict[int, int] = {}
    for node in graph.nodes:
        nodes.append(node)
        for out in results.intersection(node.outputs):
            copier, sent[out] = transfer(program, out, node, HOST)
            nodes.append(copier)
    graph.nodes = nodes
    return sent


@dataclass(frozen=True)
class Fetched:
    """What a program fetches from the host's memory at once: nodes that copy it to the device; ``following``: the node that makes the
    gradient which the next fetch waits for, None: there is none."""

    copies: tuple[Node, ...]
    following: Node | None


def fetched(graph: Graph) -> list[Fetched]:
    """What ``away`` lets a program fetch, in turn."""
    values = graph.values
    barriers = [node for node in graph.nodes if isinstance(node.eqn, BarrierEqn) and not node.backward]
    makers = [[values[x].producer for x in barrier.inputs if isinstance(x, int)] for barrier in barriers]
    gradients = [next((node for node in made if node is not None and node.backward), None) for made in makers]
    users = [[user for out in barrier.outputs for user in values[out].users] for barrier in barriers]
    copies = [tuple(node for node in found if node.params.get("space") == DEVICE) for found in users]
    return [Fetched(*pair) for pair in zip(copies, [*gradients[1:], None], strict=True)] if barriers else []


# ------------------------------------------------------------------------------------------------------------ leaf by leaf


@dataclass(frozen=True)
class _Leaf:
    """A gradient (None: none was found) and the arguments that it updates; ``readers``: nodes that read the gradient for that alone;
    ``done``: a result that depends on no other leaf's, None: all do."""

    gradient: int | None
    members: tuple[int, ...]
    readers: tuple[Node, ...]
    done: int | None


def _leaf_by_leaf(program: Program, graph: Graph, members: Sequence[int], sent: Set[int]) -> None:
    """Put a barrier and copies before what reads ``members``, one leaf after the other. ``sent``: results that go to the host."""
    place = {node.id: k for k, node in enumerate(graph.nodes)}
    readers = readers_of(graph)
    nodes = list(graph.nodes)
    before: int | None = None
    for leaf in _leaves(graph, members, readers, sent):
        near = graph.nodes[min(k for x in leaf.members for k in readers[x])]
        ties = [x for x in (leaf.gradient if leaf.readers else None, before) if x is not None]
        barrier, names = program.barrier([*leaf.members, *ties], near, backward=False)
        nodes.append(barrier)
        place[barrier.id] = place[near.id]
        for x in leaf.members:
            copier, copy = transfer(program, names[x], near, DEVICE)
            nodes.append(copier)
            place[copier.id] = place[near.id]
            for k in readers[x]:
                read_as(graph.nodes[k], {x: copy})
        for node in leaf.readers:
            read_as(node, names)
        if before is not None:
            graph.outputs = renamed(graph.outputs, {before: names[before]})
        before = leaf.done
    graph.nodes = _in_turn(nodes, place)


def _in_turn(nodes: Sequence[Node], place: Mapping[int, int]) -> list[Node]:
    """``nodes`` in the order of their places, but each after what it reads."""
    maker = {out: node for node in nodes for out in node.outputs}
    missing = {node.id: {maker[x].id for x in node.inputs if isinstance(x, int) and x in maker} for node in nodes}
    waiting: dict[int, list[Node]] = {}
    for node in nodes:
        for needed in missing[node.id]:
            waiting.setdefault(needed, []).append(node)
    ready = [(place[node.id], node.id, node) for node in nodes if not missing[node.id]]
    heapq.heapify(ready)
    found: list[Node] = []
    while ready:
        *_, node = heapq.heappop(ready)
        found.append(node)
        for other in waiting.get(node.id, ()):
            missing[other.id].discard(node.id)
            if not missing[other.id]:
                heapq.heappush(ready, (place[other.id], other.id, other))
    assert len(found) == len(nodes), "a leaf waits for itself"
    return found


def _leaves(graph: Graph, members: Sequence[int], readers: Mapping[int, list[int]], sent: Set[int]) -> list[_Leaf]:
    """In the order that gradients are made in."""
    made = {out: (k, node) for k, node in enumerate(graph.nodes) for out in node.outputs}
    groups: dict[int | None, list[int]] = {}
    for x, gradient in _gradients(graph, members, made).items():
        groups.setdefault(gradient, []).append(x)
    ordered = sorted(groups.items(), key=lambda group: len(graph.nodes) if group[0] is None else made[group[0]][0])
    depends = _depends(graph, {x: 1 << turn for turn, (_, group) in enumerate(ordered) for x in group})
    reaches = _reaches(graph, depends, 1 << len(ordered))
    found = []
    for turn, (gradient, group) in enumerate(ordered):
        own = 1 << turn
        free = gradient is not None and not depends.get(gradient, 0)
        tied = [graph.nodes[k] for k in readers.get(gradient, ()) if not graph.nodes[k].backward] if gradient is not None and free else []
        results = [x for x in graph.outputs if isinstance(x, int) and x not in sent and depends.get(x) == own and reaches[x] == own]
        found.append(
            _Leaf(
                gradient=gradient if free else None,
                members=tuple(group),
                readers=tuple(node for node in tied if all(reaches.get(out, own) == own for out in node.outputs)),
                done=max(results, key=lambda x: made[x][0], default=None),
            )
        )
    return found


def _depends(graph: Graph, leaves: Mapping[int, int]) -> dict[int, int]:
    """Value → the leaves, one bit each, that it is made of. ``leaves``: argument → its leaf."""
    found = dict(leaves)
    for node in graph.nodes:
        bits = 0
        for x in node.inputs:
            bits |= found.get(x, 0) if isinstance(x, int) else 0
        found.update(dict.fromkeys(node.outputs, bits))
    return found


def _reaches(graph: Graph, depends: Mapping[int, int], other: int) -> dict[int, int]:
    """Value → the leaves that results are made of, each of one alone, which it is read for; the bit ``other``: for other results too."""
    found: dict[int, int] = {}
    for x in graph.outputs:
        if isinstance(x, int):
            bits = depends.get(x, 0)
            found[x] = found.get(x, 0) | (bits if bits and not bits & (bits - 1) else other)
    for node in reversed(graph.nodes):
        bits = 0
        for out in node.outputs:
            bits |= found.get(out, 0)
        for x in node.inputs:
            if isinstance(x, int):
                found[x] = found.get(x, 0) | bits
    return found


def _gradients(graph: Graph, members: Sequence[int], made: Mapping[int, tuple[int, Node]]) -> dict[int, int | None]:
    """Argument → what the backward pass makes of its size that what reads it is made of too; None: nothing."""
    size = lambda x: math.prod(graph.values[x].shape)  # noqa: E731
    found: dict[int, int | None] = dict.fromkeys(members)
    beside = {x: x for x in members}  # value → the member that it depends on, and no other
    for node in graph.nodes:
        own = {beside[x] for x in node.inputs if isinstance(x, int) and x in beside}
        if len(own) != 1:
            continue
        (member,) = own
        beside.update(dict.fromkeys(node.outputs, member))
        wanted = [x for x in node.inputs if isinstance(x, int) and x not in beside]
        while found[member] is None and wanted:
            x = wanted.pop(0)
            if size(x) != size(member) or x not in made:
                continue
            maker = made[x][1]
            if maker.backward:
                found[member] = x
            elif not maker.bodies:
                wanted += [y for y in maker.inputs if isinstance(y, int) and y not in beside]
    return found
