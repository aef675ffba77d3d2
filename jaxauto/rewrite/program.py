"""A program that can be rewritten: a copy of a Graph, fresh values and nodes, and the barrier that ties one to the backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxauto.core import Graph, Literal, Node, Value
from jaxauto.flow import is_spread, is_widening
from jaxauto.graph import BarrierEqn, FillEqn, scan_links


@dataclass(frozen=True)
class Rewritten:
    """A rewritten program.

    Attributes:
      graph: a new Graph; values that were there before have their old ids.
      origin: id of each new value → id of the value that it is a copy of (the same array, or its stack over the trips of a scan).
      stacked: ids in ``origin`` that are such stacks: one leading dimension more than their origin.
      host: ids of the values that lie in the host's memory.
    """

    graph: Graph
    origin: dict[int, int]
    stacked: frozenset[int] = frozenset()
    host: frozenset[int] = frozenset()


class Program:
    """A copy of a program that can be changed, with what has been added to it."""

    def __init__(self, graph: Graph):
        self.values = {number: value.copied() for number, value in graph.values.items()}
        self.written = graph.values  # of the program as it was
        self.origin: dict[int, int] = {}
        self.stacked: set[int] = set()
        self.nodes: dict[int, Node] = {}
        self.graphs: dict[int, Graph] = {}
        self.stands_for: dict[int, int] = {}  # new node → the node as written in whose place it is
        self.next_value = max(self.values, default=-1) + 1
        self.top = self._copied(graph)
        self.next_node = max(self.nodes, default=-1) + 1

    @staticmethod
    def after(rewritten: Rewritten) -> Program:
        """A program to be rewritten further."""
        program = Program(rewritten.graph)
        program.origin.update(rewritten.origin)
        program.stacked |= rewritten.stacked
        return program

    def rewritten(self, host: Iterable[int] = ()) -> Rewritten:
        """What it has become; ``host``: values that lie in the host's memory."""
        self.relink(self.top)
        return Rewritten(self.top, self.origin, frozenset(self.stacked), frozenset(host))

    def _copied(self, graph: Graph) -> Graph:
        nodes = []
        for node in graph.nodes:
            copied = self.nodes[node.id] = object.__new__(Node)  # dataclasses.replace or copy would be a large part of a rewriting
            copied.__dict__.update(node.__dict__)
            if node.bodies:
                copied.bodies = tuple(self._copied(b) for b in node.bodies)
            nodes.append(copied)
        self.graphs[id(graph)] = Graph(graph.inputs, graph.outputs, nodes, self.values, dict(graph.consts))
        return self.graphs[id(graph)]

    def fresh(self, like: int, stacked: int | None = None) -> int:
        """A new value like an old one, or a stack of ``stacked`` of them."""
        aval = self.values[like].aval
        number = self.next_value
        self.next_value += 1
        if stacked is not None:
            aval = aval.update(shape=(stacked, *aval.shape))
        if stacked is not None or like in self.stacked:
            self.stacked.add(number)
        self.values[number] = Value(number, aval)
        self.origin[number] = self.origin.get(like, like)
        return number

    def barrier(self, numbers: Sequence[int], near: Node, *, backward: bool = True) -> tuple[Node, dict[int, int]]:
        """A node that lets ``numbers`` pass together, and their new names. ``backward``: it is of the backward pass."""
        names = {n: self.fresh(n) for n in numbers}
        eqn = BarrierEqn(near.eqn, [self.values[n].aval for n in numbers])
        node = Node(
            self.new_id(), eqn, "optimization_barrier", tuple(numbers), tuple(names.values()), near.scope, near.source, backward=backward
        )
        return node, names

    def join(self, barrier: Node, numbers: Mapping[int, int]) -> dict[int, int]:
        """Lets more values pass a barrier. ``numbers``: name → what it is called now. Their new names."""
        names = {n: self.fresh(now) for n, now in numbers.items()}
        barrier.inputs, barrier.outputs = (*barrier.inputs, *numbers.values()), (*barrier.outputs, *names.values())
        barrier.eqn = BarrierEqn(barrier.eqn, [self.values[n].aval for n in barrier.outputs])
        return names

    def again(self, nodes: Iterable[Node], names: dict[int, int], *, backward: bool = True) -> list[Node]:
        """Copies of ``nodes`` that read ``names``; what they make is added to it. ``backward``: all are of the backward pass."""
        return [self._again(node, names, backward=backward) for node in nodes]

    def _again(self, node: Node, names: dict[int, int], *, backward: bool) -> Node:
        inputs = renamed(node.inputs, names)
        bodies = tuple(self.body_again(b, backward=backward)[0] for b in node.bodies)
        for out in node.outputs:
            names[out] = self.fresh(out)
        outputs = tuple(names[out] for out in node.outputs)
        links = node.links
        if bodies and node.prim != "scan":  # those of a scan are made anew by relink
            inner = dict(names)
            for old, new in zip(node.bodies, bodies, strict=True):
                inner.update(zip(_all_ids(old), _all_ids(new), strict=True))
            links = tuple(replace(k, source=inner.get(k.source, k.source), target=inner.get(k.target, k.target)) for k in links)
        backward = backward or node.backward
        return replace(node, id=self.new_id(), inputs=inputs, outputs=outputs, bodies=bodies, links=links, backward=backward)

    def body_again(self, graph: Graph, *, backward: bool = True) -> tuple[Graph, dict[int, int]]:
        """A copy of a body, and its names of the values in it."""
        names = {n: self.fresh(n) for n in (*graph.inputs, *graph.consts)}
        nodes = self.again(graph.nodes, names, backward=backward)
        consts = {names[n]: array for n, array in graph.consts.items()}
        return Graph(tuple(names[n] for n in graph.inputs), renamed(graph.outputs, names), nodes, self.values, consts), names

    def zeros(self, like: int, near: Node, *, backward: bool) -> Node:
        """A node that makes an array of zeros like an old one."""
        eqn = FillEqn(near.eqn, self.values[like].aval)
        outputs = (self.fresh(like),)
        return Node(self.new_id(), eqn, "broadcast_in_dim", (eqn.zero,), outputs, near.scope, near.source, backward=backward)

    def new_id(self) -> int:
        self.next_node += 1
        return self.next_node - 1

    def relink(self, graph: Graph) -> None:
        """Fill in producers, users and the links of scans."""
        for node in graph.nodes:
            for x in node.inputs:
                if isinstance(x, int):
                    self.values[x].users.append(node)
            for out in node.outputs:
                self.values[out].producer = node
            if node.prim == "scan":
                node.links = scan_links(node)
            for body in node.bodies:
                self.relink(body)


def renamed(values: Iterable[int | Literal], names: Mapping[int, int]) -> tuple[int | Literal, ...]:
    """``values`` with those that have a new name called by it."""
    return tuple(names.get(x, x) if isinstance(x, int) else x for x in values)


def read_as(node: Node, names: Mapping[int, int]) -> None:
    """Let ``node`` read new names; links of scans are made anew by relink."""
    if names:
        node.inputs = renamed(node.inputs, names)
        if node.prim != "scan":
            node.links = tuple(replace(k, source=names.get(k.source, k.source)) for k in node.links)


def _all_ids(graph: Graph) -> list[int]:
    """Ids of the inputs, constants and results of a graph, in a fixed order."""
    return [*graph.inputs, *graph.consts, *(out for node in graph.nodes for out in node.outputs)]


# ------------------------------------------------------------------------------------------------------- the backward pass


def readers_of(graph: Graph) -> dict[int, list[int]]:
    """Value → positions of the nodes of this graph that read it."""
    readers: dict[int, list[int]] = {}
    for k, node in enumerate(graph.nodes):
        for x in node.inputs:
            if isinstance(x, int):
                readers.setdefault(x, []).append(k)
    return readers


def ripeness(graph: Graph, phase) -> dict[int, int]:
    """Value → the last forward position that it depends on: a true cotangent depends on the loss, a broadcast zero on nothing."""
    ripe: dict[int, int] = {}
    for k, node in enumerate(graph.nodes):
        latest = max((ripe.get(x, -1) for x in node.inputs if isinstance(x, int)), default=-1)
        ripe.update(dict.fromkeys(node.outputs, latest if phase[node.id] % 2 else k))
    return ripe


def cotangent_at(program: Program, graph: Graph, place: int, phase, readers, position, ripe, *, enough: float = math.inf) -> int | None:
    """A value of the backward pass that is alive before the node at ``place`` and waits for most of the forward pass.

    ``enough``: a forward position; what waits for a later one waits for enough of it. Of those that wait for as much what the node itself
    reads comes first, then arrays before scalars, then the youngest. Not what is spread over an array, by a broadcast or a mask: nothing
    but the barrier would have it written. Of what is widened, for the same reason, what it is made of. Where the backward pass has made
    nothing yet that depends on the forward one (that of a mean is a constant), what the forward pass made last, the loss, stands in.
    """
    read = {x for x in graph.nodes[place].inputs if isinstance(x, int)}
    made = {out: n for n in graph.nodes[max(0, place - 400) : place] for out in n.outputs if phase[n.id] % 2}
    live = [x for x in made if (x in read or readers.get(x, (-1,))[-1] >= place) and ripe[x] >= 0]
    best_first = sorted(
        live, key=lambda x: (min(ripe[x], enough), x in read, bool(program.values[x].shape), ripe[x], position[made[x].id]), reverse=True
    )
    narrow = (made[x].inputs[0] if is_widening(made[x], program.values) else x for x in best_first)
    spread = lambda x: x in program.written and is_spread(program.written, x)  # noqa: E731
    if (best := next((x for x in narrow if not spread(x)), None)) is not None:
        return best
    forward = (out for n in reversed(graph.nodes[:place]) if phase[n.id] % 2 == 0 for out in n.outputs)
    return next((x for x in forward if not program.values[x].shape and jnp.issubdtype(program.values[x].dtype, jnp.floating)), None)
