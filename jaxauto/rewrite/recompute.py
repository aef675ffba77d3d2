"""Drop residuals and recompute them in the backward pass: Graph → Graph, after differentiation.

For each block (see ``blocks``) some values stay saved; the other residuals are made again from these and from what enters the block. In a
straight program they are made at their first use in the backward pass. In a pair of scans the forward scan stops stacking them, the
backward scan gets what the recomputation reads, and its body begins with it.

In a straight program what is read goes through one ``optimization_barrier`` together with a cotangent: the recomputation then depends on
the backward pass, so no compiler merges it with the original or moves it up. What is kept, and what is read of other blocks, is read
there by the rest of the backward pass too: else a compiler could make it again from what is not kept. Masks and other spread constants
stay out of the barrier: what passes through it is written to memory, and these need not be. Loops need none: two bodies are never merged,
and a slice that passed a barrier would be copied out of its stack first (``jax.checkpoint(prevent_cse=False)`` is for the same case). But
loops of one trip are unrolled by compilers, and are straight programs then.

Of what lies between blocks some can be made again too (see ``reruns``), in the same way, before the first recomputation, or deeper rerun,
that reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import jax.numpy as jnp

from jaxauto.blocks import Block, closure, find_blocks, phases
from jaxauto.core import Graph, Literal, Node, Trips
from jaxauto.flow import is_spread, is_widening
from jaxauto.reruns import Rerun, find_reruns
from jaxauto.rewrite.program import Program, Rewritten, cotangent_at, read_as, readers_of, renamed, ripeness
from jaxauto.rewrite.split import Part, check_split, split_pair


def recompute(
    graph: Graph,
    kept: Mapping[int, frozenset[int]],
    remade: Collection[tuple[int, int]] = (),
    blocks: tuple[Block, ...] | None = None,
    splits: Mapping[int, Sequence[Trips]] | None = None,
) -> Rewritten:
    """A graph with the same results that keeps only ``kept`` of each block for the backward pass.

    Args:
      graph: the differentiated step; it is not changed.
      kept: index into ``find_blocks(graph)`` → ids of the values of that block (residuals or any others) that stay saved. Blocks that are
        not named stay as written.
      remade: values between blocks that are made again as well, and how deep, see ``reruns.find_reruns``.
      blocks: ``find_blocks(graph)``, if it is known.
      splits: blocks whose scans are split, and into what, see ``rewrite/split.py``; these say what they keep.

    Raises:
      ValueError: no such block, a value that its block does not make, or a split that there cannot be.
    """
    blocks = find_blocks(graph) if blocks is None else blocks
    program = Program(graph)
    straight: dict[int, _Straight] = {}
    splits = splits or {}
    for number in sorted({*kept, *splits}):
        block = _checked(blocks, number, kept.get(number, ()))
        if number in splits:
            check_split(blocks, number, splits[number])
            for part in split_pair(program, block, splits[number]):
                _rewrite_pair(program, block, part)
        elif block.scan:
            _rewrite_pair(program, block, Part(*(program.nodes[n.id] for n in block.scan), kept[number]))
        else:
            straight.setdefault(id(block.graph), _Straight(block.graph, [], [])).blocks.append((block, kept[number]))
    for rerun in find_reruns(blocks, kept, remade):
        straight.setdefault(id(rerun.graph), _Straight(rerun.graph, [], [])).reruns.append(rerun)
    for chosen in straight.values():
        _rewrite_straight(program, chosen)
    return program.rewritten()


def _checked(blocks: tuple[Block, ...], number: int, kept: Iterable[int]) -> Block:
    if not 0 <= number < len(blocks):
        raise ValueError(f"there is no block {number}: find_blocks found {len(blocks)} of them, counted from 0")
    block = blocks[number]
    strange = sorted(set(kept) - {*block.made})
    if strange:
        raise ValueError(f"block {number} ({block.name}) does not make value {strange[0]}: keep values that its forward nodes return")
    return block


# ------------------------------------------------------------------------------------------------------- straight programs


_Names = dict[int, tuple[int, int]]  # value → (its new name, for nodes later than this phase)


@dataclass(frozen=True)
class _Straight:
    """What is decided of one graph."""

    graph: Graph
    blocks: list[tuple[Block, frozenset[int]]]
    reruns: list[Rerun]


@dataclass(frozen=True)
class _Recomputation:
    """One block of a straight program, or one rerun: what is made again, where; ``saved``: what it reads that the block made and keeps."""

    phase: int
    nodes: tuple[Node, ...]
    reads: tuple[int, ...]
    dropped: frozenset[int]
    saved: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Wiring:
    """Of the nodes of a graph: phases (``blocks.phases``) and positions, by id; of its values: readers and ``ripeness``."""

    phase: Mapping[int, int]
    position: Mapping[int, int]
    readers: Mapping[int, list[int]]
    ripe: Mapping[int, int]


_wirings: WeakKeyDictionary[Graph, _Wiring] = WeakKeyDictionary()  # of programs as written, which are rewritten again and again


def _wiring_of(program: Program, graph: Graph, original: Graph) -> _Wiring:
    """Of ``graph``, a copy of ``original`` in which scans may have been rewritten."""
    same = len(graph.nodes) == len(original.nodes) and all(a.inputs is b.inputs for a, b in zip(graph.nodes, original.nodes, strict=True))
    if same and original in _wirings:
        return _wirings[original]
    phase = phases(original)
    phase.update((new, phase[old]) for new, old in program.stands_for.items() if old in phase)
    wiring = _Wiring(phase, {node.id: k for k, node in enumerate(graph.nodes)}, readers_of(graph), ripeness(graph, phase))
    if same:
        _wirings[original] = wiring
    return wiring


def _rewrite_straight(program: Program, chosen: _Straight) -> None:
    original = chosen.graph
    graph = program.graphs[id(original)]
    wiring = _wiring_of(program, graph, original)
    phase, readers = wiring.phase, wiring.readers
    starts: dict[int, list[_Recomputation]] = {}
    made_in_blocks = frozenset().union(*(block.made for block, _ in chosen.blocks))
    for block, kept in chosen.blocks:
        nodes, reads = closure(block, kept)
        made = {out for node in nodes for out in node.outputs}
        dropped = frozenset(v for v in block.residuals if v not in kept and v in made)
        uses = [k for v in dropped for k in readers.get(v, ()) if phase[graph.nodes[k].id] > block.phase]
        reads = tuple(v for v in reads if not is_spread(original.values, v))
        if uses:
            starts.setdefault(min(uses), []).append(_Recomputation(block.phase, nodes, reads, dropped, made_in_blocks & {*reads}))
    for rerun in chosen.reruns:
        work = _rerun(program, rerun, readers, phase)
        uses = [k for v in work.dropped for k in readers.get(v, ()) if phase[graph.nodes[k].id] > rerun.phase]
        uses += [k for k, works in starts.items() if any(work.dropped & {*other.reads} for other in works)]
        if uses:
            starts.setdefault(min(uses), []).insert(0, work)
    result: list[Node] = []
    names: _Names = {}
    for k, node in enumerate(graph.nodes):
        for work in starts.get(k, ()):
            over = max((wiring.position.get(n.id, -1) for n in work.nodes), default=-1) + 1
            cotangent = cotangent_at(program, graph, k, phase, readers, wiring.position, wiring.ripe, enough=over)
            before = (graph.nodes[at] for at in readers.get(cotangent, ()) if at < k)
            widened = [n for n in before if is_widening(n, original.values) and readers.get(n.outputs[0], (-1,))[-1] >= k]
            result += _made_again(program, work, cotangent, widened, node, names)
        late = {x: names[x][0] for x in node.inputs if isinstance(x, int) and x in names and phase[node.id] > names[x][1]}
        read_as(node, late)
        result.append(node)
    graph.nodes = result
    _drop_unread(graph, {n.id for rerun in chosen.reruns for n in rerun.nodes if n.prim == "scan"})


def _made_again(
    program: Program, work: _Recomputation, cotangent: int | None, widened: Iterable[Node], near: Node, names: _Names
) -> list[Node]:
    """The barrier and the copies of one block; ``names`` learns what later nodes read instead.

    Args:
      widened: conversions of the cotangent that are read after the barrier: they come after it too.
    """
    tie = names[cotangent][0] if cotangent in names else cotangent
    reads = {v: names[v][0] if v in names else v for v in work.reads}
    barrier, through = program.barrier([*reads.values(), *([] if tie is None else [tie])], near)
    wider: list[Node] = []
    if cotangent is not None and tie is not None:
        late = {cotangent: through[tie]}
        wider = program.again(widened, late)
        names.update({v: (now, work.phase) for v, now in late.items()})
    passed = {v: through[now] for v, now in reads.items()}
    copies = program.again(work.nodes, passed)
    names.update({v: (passed[v], work.phase) for v in (*work.dropped, *work.saved)})
    return [barrier, *wider, *copies]


def _rerun(program: Program, rerun: Rerun, readers: Mapping[int, list[int]], phase: Mapping[int, int]) -> _Recomputation:
    """Of a scan its copy stacks only what the backward pass alone reads, and what is asked for."""
    graph = program.graphs[id(rerun.graph)]
    nodes, dropped = [], set(rerun.made)
    for node in rerun.nodes:
        now = program.nodes[node.id]
        if node.prim != "scan" or not rerun.made & {*node.outputs}:
            nodes.append(node)
            continue
        stacks = now.outputs[now.num_carry :]
        late = {y for y in stacks if y not in graph.outputs and all(phase[graph.nodes[k].id] > rerun.phase for k in readers.get(y, ()))}
        dropped |= late
        nodes.append(_stacking(replace(now, inputs=node.inputs), late | rerun.made))
    made = {out for node in nodes for out in node.outputs}
    reads = tuple(v for v in rerun.reads if not is_spread(rerun.graph.values, v))
    return _Recomputation(rerun.phase, tuple(nodes), reads, frozenset(dropped & made))


def _drop_unread(graph: Graph, scans: set[int]) -> None:
    """Let the scans with these ids stack only what something reads."""
    read = {x for node in graph.nodes for x in node.inputs} | {*graph.outputs}
    for node in graph.nodes:
        if node.id in scans:
            left = _stacking(node, read)
            node.outputs, node.bodies[0].outputs = left.outputs, left.bodies[0].outputs


def _stacking(scan: Node, stacks: Collection) -> Node:
    """A scan that returns only these of its stacks."""
    (body,), carry = scan.bodies, scan.num_carry
    pairs = [(y, x) for y, x in zip(scan.outputs[carry:], body.outputs[carry:], strict=True) if y in stacks]
    outputs = (*body.outputs[:carry], *(x for _, x in pairs))
    less = Graph(body.inputs, outputs, body.nodes, body.values, body.consts)
    return replace(scan, outputs=(*scan.outputs[:carry], *(y for y, _ in pairs)), bodies=(less,))


# ------------------------------------------------------------------------------------------------------------ scan pairs


def _rewrite_pair(program: Program, block: Block, part: Part) -> None:
    if part.kept is None:
        return
    nodes, reads = closure(block, part.kept)
    made = {out for node in nodes for out in node.outputs}
    dropped = {v for v in block.residuals if v not in part.kept and v in made}
    if not dropped:
        return
    pair = _Pair(program, part)
    passed = {value: pair.inside(value) for value in reads}
    replaced = pair.drop(dropped)
    head = [] if part.forward.trips > 1 else [pair.barrier(passed)]
    pair.finish(head, nodes, passed, replaced)


class _Pair:
    """A forward scan and its backward scan, taken apart into consts, carries, xs, ys, and of a part of a scan what it writes over."""

    def __init__(self, program: Program, part: Part):
        self.program, self.forward, self.backward, self.part = program, part.forward, part.backward, part
        (self.fbody,), (self.bbody,) = self.forward.bodies, self.backward.bodies
        ys = list(zip(self.forward.outputs, self.fbody.outputs, strict=True))
        over = len(ys) - (self.forward.window.over if self.forward.window else 0)
        self.made_ys, self.written = dict(ys[self.forward.num_carry : over]), ys[over:]
        first, last = self.backward.num_consts, self.backward.num_consts + self.backward.num_carry
        operands = list(zip(self.backward.inputs, self.bbody.inputs, strict=False))
        self.consts, self.carries, self.xs = operands[:first], operands[first:last], operands[last:]
        self.over = self.backward.inputs[len(operands) :]

    def inside(self, value: int) -> int:
        """Bring a value of the forward body as written into the backward body; its id there."""
        body, forward, value = self.fbody, self.forward, self.part.names.get(value, value)
        if value in body.consts:
            inner = self.program.fresh(value)
            self.bbody.consts[inner] = body.consts[value]
            return inner
        place = body.inputs.index(value) if value in body.inputs else None
        if place is not None and place < forward.num_consts:
            return self._operand(self.consts, forward.inputs[place], value)
        if place is not None and place >= forward.num_consts + forward.num_carry:
            return self._operand(self.xs, forward.inputs[place], value)
        stacked = [self.part.stacks[value]] if value in self.part.stacks else [y for y, inner in self.made_ys.items() if inner == value]
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
        """Stop stacking ``dropped``; the inputs of the backward body that are no more → the forward value as written that each was."""
        written = {self.part.names.get(v, v): v for v in dropped}
        gone = {y: written[v] for y, v in self.made_ys.items() if isinstance(v, int) and v in written}
        self.made_ys = {y: v for y, v in self.made_ys.items() if y not in gone}
        replaced = {inner: gone[outer] for outer, inner in self.xs if isinstance(outer, int) and outer in gone}
        self.xs = [(outer, inner) for outer, inner in self.xs if inner not in replaced]
        return replaced

    def barrier(self, passed: dict[int, int]) -> Node:
        """For one trip. ``passed``: value as written → what recomputation reads; learns what that is called behind the barrier, from where
        all of the backward body reads it, and the cotangents."""
        values, body = self.program.values, self.bbody
        reads = [inner for value, inner in passed.items() if not is_spread(self.program.written, value)]
        cotangents = [x for _, x in self.carries if jnp.issubdtype(values[x].dtype, jnp.floating) and not self._is_sum(x)]
        barrier, names = self.program.barrier([*dict.fromkeys([*reads, *cotangents])], body.nodes[0])
        for node in body.nodes:
            read_as(node, names)
        body.outputs = renamed(body.outputs, names)
        passed.update({value: names.get(inner, inner) for value, inner in passed.items()})
        return barrier

    def _is_sum(self, carry: int) -> bool:
        """Whether a carry is nothing but added to: the gradient of what every trip reads."""
        return not any(carry in node.inputs and node.prim not in ("add", "add_any") for node in self.bbody.nodes)

    def finish(self, head: list[Node], nodes: tuple[Node, ...], names: dict[int, int], replaced: dict[int, int]) -> None:
        """Put the two scans together again; ``nodes`` are recomputed in the backward body, after ``head``, and read ``names``."""
        copies = self.program.again(nodes, names)
        names = {inner: names[value] for inner, value in replaced.items()}
        for node in self.bbody.nodes:
            read_as(node, names)
        self.bbody.nodes = [*head, *copies, *self.bbody.nodes]
        self.bbody.outputs = renamed(self.bbody.outputs, names)
        operands = [*self.consts, *self.carries, *self.xs]
        self.bbody.inputs = tuple(inner for _, inner in operands)
        self.backward.inputs = (*(outer for outer, _ in operands), *self.over)
        self.backward.num_consts = len(self.consts)
        carry, ys = self.forward.num_carry, [*self.made_ys.items(), *self.written]
        self.forward.outputs = (*self.forward.outputs[:carry], *(y for y, _ in ys))
        self.fbody.outputs = (*self.fbody.outputs[:carry], *(inner for _, inner in ys))
