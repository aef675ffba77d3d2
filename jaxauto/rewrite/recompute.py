"""Drop residuals and recompute them in the backward pass: Graph → Graph, after differentiation.

For each block (see ``blocks``) some values stay saved; the other residuals are made again from these and from what enters the block. In a
straight program they are made at their first use in the backward pass. In a pair of scans the forward scan stops stacking them, the
backward scan gets what the recomputation reads, and its body begins with it.

In a straight program what is read goes through one ``optimization_barrier`` together with a cotangent: the recomputation then depends on
the backward pass, so no compiler merges it with the original or moves it up. Masks and other spread constants stay out of the barrier:
what passes through it is written to memory, and these need not be. Loops need none: two bodies are never merged, and a slice that passed
a barrier would be copied out of its stack first (``jax.checkpoint(prevent_cse=False)`` is for the same case).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxauto.blocks import Block, closure, find_blocks, phases
from jaxauto.core import Graph, Literal, Node, Value
from jaxauto.flow import is_spread
from jaxauto.graph import BarrierEqn, scan_links


@dataclass(frozen=True)
class Rewritten:
    """A rewritten program.

    Attributes:
      graph: a new Graph; values that were there before have their old ids.
      origin: id of each new value → id of the value that it is a copy of (the same array, or its stack over the trips of a scan).
      stacked: ids in ``origin`` that are such stacks: one leading dimension more than their origin.
    """

    graph: Graph
    origin: dict[int, int]
    stacked: frozenset[int] = frozenset()


def recompute(graph: Graph, kept: Mapping[int, frozenset[int]]) -> Rewritten:
    """A graph with the same results that keeps only ``kept`` of each block for the backward pass.

    Args:
      graph: the differentiated step; it is not changed.
      kept: index into ``find_blocks(graph)`` → ids of the values of that block (residuals or any others) that stay saved. Blocks that are
        not named stay as written.

    Raises:
      ValueError: no such block, or a value that its block does not make.
    """
    blocks = find_blocks(graph)
    program = _Program(graph)
    straight: dict[int, list[tuple[Block, frozenset[int]]]] = {}
    for number in sorted(kept):
        block = _checked(blocks, number, kept[number])
        if block.scan:
            _rewrite_pair(program, block, kept[number])
        else:
            straight.setdefault(id(block.graph), []).append((block, kept[number]))
    for chosen in straight.values():
        _rewrite_straight(program, chosen)
    program.relink(program.top)
    return Rewritten(program.top, program.origin, frozenset(program.stacked))


def _checked(blocks: tuple[Block, ...], number: int, kept: Iterable[int]) -> Block:
    if not 0 <= number < len(blocks):
        raise ValueError(f"there is no block {number}: find_blocks found {len(blocks)} of them, counted from 0")
    block = blocks[number]
    strange = sorted(set(kept) - {out for node in block.forward for out in node.outputs})
    if strange:
        raise ValueError(f"block {number} ({block.name}) does not make value {strange[0]}: keep values that its forward nodes return")
    return block


class _Program:
    """A copy of a program that can be changed, with what has been added to it."""

    def __init__(self, graph: Graph):
        self.values = {number: Value(number, value.aval) for number, value in graph.values.items()}
        self.origin: dict[int, int] = {}
        self.stacked: set[int] = set()
        self.nodes: dict[int, Node] = {}
        self.graphs: dict[int, Graph] = {}
        self.next_value = max(self.values, default=-1) + 1
        self.top = self._copied(graph)
        self.next_node = max(self.nodes, default=-1) + 1

    def _copied(self, graph: Graph) -> Graph:
        nodes = []
        for node in graph.nodes:
            self.nodes[node.id] = replace(node, bodies=tuple(self._copied(b) for b in node.bodies))
            nodes.append(self.nodes[node.id])
        self.graphs[id(graph)] = Graph(graph.inputs, graph.outputs, nodes, self.values, dict(graph.consts))
        return self.graphs[id(graph)]

    def fresh(self, like: int, stacked: int | None = None) -> int:
        """A new value like an old one, or a stack of ``stacked`` of them."""
        aval = self.values[like].aval
        number = self.next_value
        self.next_value += 1
        if stacked is not None:
            aval = aval.update(shape=(stacked, *aval.shape))
            self.stacked.add(number)
        self.values[number] = Value(number, aval)
        self.origin[number] = self.origin.get(like, like)
        return number

    def barrier(self, numbers: list[int], near: Node) -> tuple[Node, dict[int, int]]:
        """A node that lets ``numbers`` pass together, and their new names."""
        names = {n: self.fresh(n) for n in numbers}
        eqn = BarrierEqn(near.eqn, [self.values[n].aval for n in numbers])
        node = Node(self._id(), eqn, "optimization_barrier", tuple(numbers), tuple(names.values()), near.scope, near.source, backward=True)
        return node, names

    def again(self, nodes: Iterable[Node], names: dict[int, int]) -> list[Node]:
        """Copies of ``nodes`` that read ``names``; what they make is added to it."""
        return [self._again(node, names) for node in nodes]

    def _again(self, node: Node, names: dict[int, int]) -> Node:
        inputs = renamed(node.inputs, names)
        bodies = tuple(self._body_again(b) for b in node.bodies)
        for out in node.outputs:
            names[out] = self.fresh(out)
        outputs = tuple(names[out] for out in node.outputs)
        links = node.links
        if bodies and node.prim != "scan":  # those of a scan are made anew by relink
            inner = dict(names)
            for old, new in zip(node.bodies, bodies, strict=True):
                inner.update(zip(_all_ids(old), _all_ids(new), strict=True))
            links = tuple(replace(k, source=inner.get(k.source, k.source), target=inner.get(k.target, k.target)) for k in links)
        return replace(node, id=self._id(), inputs=inputs, outputs=outputs, bodies=bodies, links=links, backward=True)

    def _body_again(self, graph: Graph) -> Graph:
        names = {n: self.fresh(n) for n in (*graph.inputs, *graph.consts)}
        nodes = self.again(graph.nodes, names)
        consts = {names[n]: array for n, array in graph.consts.items()}
        return Graph(tuple(names[n] for n in graph.inputs), renamed(graph.outputs, names), nodes, self.values, consts)

    def _id(self) -> int:
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


def _read_as(node: Node, names: Mapping[int, int]) -> None:
    """Let ``node`` read new names; links of scans are made anew by relink."""
    if names:
        node.inputs = renamed(node.inputs, names)
        if node.prim != "scan":
            node.links = tuple(replace(k, source=names.get(k.source, k.source)) for k in node.links)


def _all_ids(graph: Graph) -> list[int]:
    """Ids of the inputs, constants and results of a graph, in a fixed order."""
    return [*graph.inputs, *graph.consts, *(out for node in graph.nodes for out in node.outputs)]


# ------------------------------------------------------------------------------------------------------- straight programs


_Names = dict[int, tuple[int, int]]  # value → (its new name, for nodes later than this phase)


@dataclass(frozen=True)
class _Recomputation:
    """One block of a straight program: what is made again, where."""

    phase: int
    nodes: tuple[Node, ...]
    reads: tuple[int, ...]
    dropped: frozenset[int]


def _rewrite_straight(program: _Program, chosen: list[tuple[Block, frozenset[int]]]) -> None:
    original = chosen[0][0].graph
    graph = program.graphs[id(original)]
    phase = phases(original)
    position = {node.id: k for k, node in enumerate(graph.nodes)}
    readers: dict[int, list[int]] = {}
    for k, node in enumerate(graph.nodes):
        for x in node.inputs:
            if isinstance(x, int):
                readers.setdefault(x, []).append(k)
    starts: dict[int, list[_Recomputation]] = {}
    for block, kept in chosen:
        nodes, reads = closure(block, kept)
        made = {out for node in nodes for out in node.outputs}
        dropped = frozenset(v for v in block.residuals if v not in kept and v in made)
        uses = [k for v in dropped for k in readers.get(v, ()) if phase[graph.nodes[k].id] > block.phase]
        reads = tuple(v for v in reads if not is_spread(original.values, v))
        if uses:
            starts.setdefault(min(uses), []).append(_Recomputation(block.phase, nodes, reads, dropped))
    result: list[Node] = []
    names: _Names = {}
    ripe = _ripeness(graph, phase)
    for k, node in enumerate(graph.nodes):
        for work in starts.get(k, ()):
            cotangent = _cotangent(program, graph, k, phase, readers, position, ripe)
            result += _made_again(program, work, cotangent, node, names)
        late = {x: names[x][0] for x in node.inputs if isinstance(x, int) and x in names and phase[node.id] > names[x][1]}
        _read_as(node, late)
        result.append(node)
    graph.nodes = result


def _made_again(program: _Program, work: _Recomputation, cotangent: int | None, near: Node, names: _Names) -> list[Node]:
    """The barrier and the copies of one block; ``names`` learns what later nodes read instead."""
    tie = names[cotangent][0] if cotangent in names else cotangent
    barrier, passed = program.barrier([*work.reads, *([] if tie is None else [tie])], near)
    if cotangent is not None and tie is not None:
        names[cotangent] = (passed.pop(tie), work.phase)
    copies = program.again(work.nodes, passed)
    names.update({v: (passed[v], work.phase) for v in work.dropped})
    return [barrier, *copies]


def _ripeness(graph: Graph, phase) -> dict[int, int]:
    """Value → the last forward position that it depends on: a true cotangent depends on the loss, a broadcast zero on nothing."""
    ripe: dict[int, int] = {}
    for k, node in enumerate(graph.nodes):
        latest = max((ripe.get(x, -1) for x in node.inputs if isinstance(x, int)), default=-1)
        ripe.update(dict.fromkeys(node.outputs, latest if phase[node.id] % 2 else k))
    return ripe


def _cotangent(program: _Program, graph: Graph, place: int, phase, readers, position, ripe) -> int | None:
    """A value of the backward pass that is alive before the node at ``place`` and waits for most of the forward pass.

    Of those what the node itself reads comes first, then arrays before scalars, then the youngest. Where the backward pass has made nothing
    yet that depends on the forward one (that of a mean is a constant), what the forward pass made last, the loss, stands in.
    """
    read = {x for x in graph.nodes[place].inputs if isinstance(x, int)}
    made = {out: n for n in graph.nodes[max(0, place - 400) : place] for out in n.outputs if phase[n.id] % 2}
    live = [x for x in made if (x in read or max(readers.get(x, (-1,))) >= place) and ripe[x] >= 0]
    if live:
        return max(live, key=lambda x: (ripe[x], x in read, bool(program.values[x].shape), position[made[x].id]))
    before = (out for n in reversed(graph.nodes[:place]) if phase[n.id] % 2 == 0 for out in n.outputs)
    return next((x for x in before if not program.values[x].shape and jnp.issubdtype(program.values[x].dtype, jnp.floating)), None)


# ------------------------------------------------------------------------------------------------------------ scan pairs


def _rewrite_pair(program: _Program, block: Block, kept: frozenset[int]) -> None:
    nodes, reads = closure(block, kept)
    made = {out for node in nodes for out in node.outputs}
    dropped = {v for v in block.residuals if v not in kept and v in made}
    if not dropped or block.scan is None:
        return
    forward, backward = (program.nodes[n.id] for n in block.scan)
    pair = _Pair(program, forward, backward)
    passed = {value: pair.inside(value) for value in reads}
    replaced = pair.drop(dropped)
    pair.finish(nodes, passed, replaced)


class _Pair:
    """A forward scan and its backward scan, taken apart into consts, carries, xs and ys."""

    def __init__(self, program: _Program, forward: Node, backward: Node):
        self.program, self.forward, self.backward = program, forward, backward
        (self.fbody,), (self.bbody,) = forward.bodies, backward.bodies
        self.made_ys = dict(zip(forward.outputs[forward.num_carry :], self.fbody.outputs[forward.num_carry :], strict=True))
        first, last = backward.num_consts, backward.num_consts + backward.num_carry
        self.consts = list(zip(backward.inputs[:first], self.bbody.inputs[:first], strict=True))
        self.carries = list(zip(backward.inputs[first:last], self.bbody.inputs[first:last], strict=True))
        self.xs = list(zip(backward.inputs[last:], self.bbody.inputs[last:], strict=True))

    def inside(self, value: int) -> int:
        """Bring a value of the forward body into the backward body; its id there."""
        body, forward = self.fbody, self.forward
        if value in body.consts:
            inner = self.program.fresh(value)
            self.bbody.consts[inner] = body.consts[value]
            return inner
        place = body.inputs.index(value) if value in body.inputs else None
        if place is not None and place < forward.num_consts:
            return self._operand(self.consts, forward.inputs[place], value)
        if place is not None and place >= forward.num_consts + forward.num_carry:
            return self._operand(self.xs, forward.inputs[place], value)
        stacked = [y for y, inner in self.made_ys.items() if inner == value]
        eaten = [y for y in stacked if any(y == outer for outer, _ in self.xs)]
        if not stacked:
            stacked = [self.program.fresh(value, stacked=forward.trips)]
            self.made_ys[stacked[0]] = value
        return self._operand(self.xs, (eaten or stacked)[0], value)

    def _operand(self, operands: list, outer: int | Literal, like: int) -> int:
        for known, inner in operands:
            if isinstance(known, int) and known == outer:
                return inner
        inner = self.program.fresh(like)
        operands.append((outer, inner))
        return inner

    def drop(self, dropped: set[int]) -> dict[int, int]:
        """Stop stacking ``dropped``; the inputs of the backward body that are no more → the forward value that each was."""
        gone = {y: v for y, v in self.made_ys.items() if isinstance(v, int) and v in dropped}
        self.made_ys = {y: v for y, v in self.made_ys.items() if y not in gone}
        replaced = {inner: gone[outer] for outer, inner in self.xs if isinstance(outer, int) and outer in gone}
        self.xs = [(outer, inner) for outer, inner in self.xs if inner not in replaced]
        return replaced

    def finish(self, nodes: tuple[Node, ...], names: dict[int, int], replaced: dict[int, int]) -> None:
        """Put the two scans together again; ``nodes`` are recomputed at the head of the backward body and read ``names``."""
        copies = self.program.again(nodes, names)
        names = {inner: names[value] for inner, value in replaced.items()}
        for node in self.bbody.nodes:
            _read_as(node, names)
        self.bbody.nodes = [*copies, *self.bbody.nodes]
        self.bbody.outputs = renamed(self.bbody.outputs, names)
        operands = [*self.consts, *self.carries, *self.xs]
        self.bbody.inputs = tuple(inner for _, inner in operands)
        self.backward.inputs = tuple(outer for outer, _ in operands)
        self.backward.num_consts = len(self.consts)
        carry = self.forward.num_carry
        self.forward.outputs = (*self.forward.outputs[:carry], *self.made_ys)
        self.fbody.outputs = (*self.fbody.outputs[:carry], *self.made_ys.values())
