"""A pair of scans whose trips keep unalike: Graph → Graph, before what each part keeps is rewritten (``recompute.py``).

Of n trips the last t of the forward pass, the tail, become scans of their own; the others, the head, are cut into k segments of m trips and
become scans of scans:

    forward    head: k × ( keep the carries; m × layer )         tail: t × ( layer, keep residuals )
    backward   tail: t × backward layer         head: k × ( m × ( layer, keep residuals ), m × backward layer )

so k carries and the residuals of t trips lie between the passes, those of m trips while a segment goes backward, and the head runs forward
once more: the square-root schedule (Chen et al., arXiv 1604.06174) and, with a tail, what Rotor's optimum is for one more forward pass
(Beaumont et al., Inria RR-9302). With m = 1 the head is an ordinary pair.

No stack is cut: weights are read, and their gradients written, where they are (``core.Window``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxauto import compat
from jaxauto.blocks import Block
from jaxauto.core import Graph, Literal, Node, Split, Window
from jaxauto.rewrite.program import Program, renamed

Operand = int | Literal
Names = Mapping[int, int]


@dataclass(frozen=True)
class Part:
    """Two scans, trip for trip, that are left to be rewritten.

    Attributes:
      names: of the forward body's values as written, where it is a copy.
      stacks: values of the forward body that the forward pass stacks whatever is kept → what the stacks are called in the end.
    """

    forward: Node
    backward: Node
    kept: frozenset[int] | None
    names: Names = field(default_factory=dict)
    stacks: Names = field(default_factory=dict)


def can_split(blocks: Sequence[Block], number: int) -> bool:
    """Whether the trips of a block can differ: it is a pair of scans, in opposite directions, of which no other block has one."""
    scans = blocks[number].scan
    if scans is None or any({*scans} & {*(other.scan or ())} for b, other in enumerate(blocks) if b != number):
        return False
    forward, backward = scans
    values = blocks[number].graph.values
    filled = (*(y for y in forward.outputs if y not in own_stacks(forward, backward, blocks[number].graph)), *backward.outputs)
    return forward.reverse != backward.reverse and not any(compat.is_key_dtype(values[x].dtype) for x in filled)


def check_split(blocks: Sequence[Block], number: int, split: Split) -> None:
    """Raises ValueError where a block cannot be split so."""
    if not can_split(blocks, number):
        raise ValueError(f"block {number} cannot be split: it is no scan with a backward scan of its own")
    head = blocks[number].count - split.tail
    if not 0 <= split.tail < blocks[number].count or head % split.segment or (split.segment > 1 and head == split.segment):
        raise ValueError(
            f"block {number} of {blocks[number].count} trips cannot be split into {split.tail} of their own and segments of "
            f"{split.segment}: segments must divide the others, and there must be two of them"
        )


def split_pair(program: Program, block: Block, split: Split, kept: frozenset[int] | None) -> list[Part]:
    """Split the scans of ``block``, whose head keeps ``kept``; the pairs that came of them."""
    return _Splitting(program, block, split, kept).run()


def own_stacks(forward: Node, backward: Node, graph: Graph) -> tuple[int, ...]:
    """What the forward scan stacks for the backward scan's trips alone."""
    elsewhere = {*graph.outputs, *backward.inputs[: backward.num_consts + backward.num_carry]}
    stacks = zip(forward.outputs[forward.num_carry :], forward.bodies[0].outputs[forward.num_carry :], strict=True)
    mine = (y for y, inner in stacks if isinstance(inner, int) and y not in elsewhere and graph.values[y].users)
    return tuple(y for y in mine if all(user is backward for user in graph.values[y].users))


class _Scan:
    """A scan taken apart."""

    def __init__(self, node: Node, own: Iterable[int] = ()):
        self.node = node
        (self.body,) = node.bodies
        first, last = node.num_consts, node.num_consts + node.num_carry
        self.consts, self.init, self.xs = node.inputs[:first], node.inputs[first:last], node.inputs[last:]
        self.carries = self.body.inputs[first:last]
        self.finals = node.outputs[: node.num_carry]
        inner = dict(zip(node.outputs[node.num_carry :], self.body.outputs[node.num_carry :], strict=True))
        self.own = {y: inner[y] for y in own}
        self.whole = {y: x for y, x in inner.items() if y not in self.own}


@dataclass(frozen=True)
class _Made:
    """A scan, and what its results are of what the scan as written returns."""

    node: Node
    finals: tuple[int, ...]
    own: Names
    whole: Names


@dataclass(frozen=True)
class _Range:
    """Trips of a scan: the first slice that they read, how many there are, and the body if it is a copy."""

    first: int
    trips: int
    body: Graph | None = None


class _Splitting:
    def __init__(self, program: Program, block: Block, split: Split, kept: frozenset[int] | None):
        assert block.scan is not None
        self.program, self.split, self.kept, self.trips = program, split, kept, block.count
        self.graph = program.graphs[id(block.graph)]
        forward, backward = (program.nodes[node.id] for node in block.scan)
        self.forward, self.backward = _Scan(forward, own_stacks(*block.scan, block.graph)), _Scan(backward)
        self.segments = (block.count - split.tail) // split.segment
        self.of_head, self.of_tail = (split.tail, 0) if forward.reverse else (0, block.count - split.tail)  # their first slices

    def run(self) -> list[Part]:
        forward, backward, tail = self.forward, self.backward, self.split.tail
        nested = self.split.segment > 1
        going, coming = self._zeros(forward, backward=False), self._zeros(backward, backward=True)
        head = (self._segments_forward if nested else self._head_forward)({y: node.outputs[0] for y, node in going.items()})
        ahead, behind, parts = [*going.values(), head.node], [*coming.values()], []
        init, over = backward.init, {y: node.outputs[0] for y, node in coming.items()}
        if tail:
            copy, names = self.program.body_again(forward.body, backward=False)
            end = self._leaf(forward, _Range(self.of_tail, tail, copy), head.finals, head.whole, last=True)
            copy, _ = self.program.body_again(backward.body)
            begin = self._leaf(backward, _Range(self.of_tail, tail, copy), init, over, reads=end.own)
            ahead, behind = [*ahead, end.node], [*behind, begin.node]
            init, over = begin.finals, begin.whole
            stacks = {names.get(x, x): y for y, x in forward.whole.items() if isinstance(x, int)}
            parts.append(Part(end.node, begin.node, self.split.kept, names, stacks))
        made, part = (self._segments_backward if nested else self._head_backward)(head, init, over)
        self._put(forward.node, ahead)
        self._put(backward.node, [*behind, made.node])
        return [*parts, part]

    def _zeros(self, scan: _Scan, *, backward: bool) -> dict[int, Node]:
        """What stacks are written over first."""
        return {y: self.program.zeros(y, scan.node, backward=backward) for y in scan.whole}

    def _put(self, old: Node, new: Sequence[Node]) -> None:
        place = next(k for k, node in enumerate(self.graph.nodes) if node is old)
        self.graph.nodes[place : place + 1] = new
        self.program.stands_for.update((node.id, old.id) for node in new)

    # ------------------------------------------------------------------------------------------------------- parts of a scan

    def _leaf(
        self, scan: _Scan, part: _Range, init: Sequence[Operand], over: Names, *, reads: Names | None = None, own: bool = True, last=False
    ) -> _Made:
        """Some trips of a scan.

        Args:
          init: its first carries. over: what its stacks of all trips are written over; only those are written.
          reads: what operands are called here. own: whether what the backward scan alone reads is stacked.
          last: its results are those of the whole scan.
        """
        body, program = part.body or scan.body, self.program
        inner = dict(zip(scan.body.outputs, body.outputs, strict=True))
        mine = {y: program.fresh(x, stacked=part.trips) for y, x in scan.own.items()} if own else {}
        finals, whole = self._results(scan, over, last=last)
        outputs = (*body.outputs[: len(finals)], *(inner[scan.own[y]] for y in mine), *(inner[scan.whole[y]] for y in over))
        node = replace(
            scan.node,
            id=scan.node.id if part.body is None else program.new_id(),
            inputs=(*renamed(scan.consts, reads or {}), *init, *renamed(scan.xs, reads or {}), *over.values()),
            outputs=(*finals, *mine.values(), *whole.values()),
            bodies=(Graph(body.inputs, outputs, body.nodes, body.values, body.consts),),
            trips=part.trips,
            window=Window(self.trips, part.first, over=len(over)),
        )
        return _Made(node, finals, mine, whole)

    def _results(self, scan: _Scan, over: Iterable[int], *, last: bool) -> tuple[tuple[int, ...], dict[int, int]]:
        """The last carries, and the stacks of all trips."""
        called = (lambda x: x) if last else self.program.fresh
        return tuple(called(x) for x in scan.finals), {y: called(y) for y in over}

    def _head_forward(self, over: Names) -> _Made:
        return self._leaf(self.forward, _Range(self.of_head, self.segments), self.forward.init, over, last=not self.split.tail)

    def _head_backward(self, head: _Made, init: Sequence[Operand], over: Names) -> tuple[_Made, Part]:
        made = self._leaf(self.backward, _Range(self.of_head, self.segments), init, over, reads=head.own, last=True)
        stacks = {x: y for y, x in self.forward.whole.items() if isinstance(x, int)}
        return made, Part(head.node, made.node, self.kept, {}, stacks)

    # -------------------------------------------------------------------------------------------------------------- segments

    def _segments_forward(self, over: Names) -> _Made:
        """The head's forward pass; its ``own`` are the carries that segments begin with."""
        scan, fresh = self.forward, self.program.fresh
        reads = self._inside((*scan.consts, *scan.xs))
        carries, stacks = [fresh(x) for x in scan.carries], {y: fresh(y) for y in over}
        leaf = self._leaf(scan, _Range(0, self.split.segment), carries, stacks, reads=reads, own=False)
        starts = {x: fresh(x, stacked=self.segments) for x in scan.carries}
        finals, whole = self._results(scan, over, last=not self.split.tail)
        inputs = (*reads.values(), *carries, *stacks.values())
        body = Graph(inputs, (*leaf.finals, *leaf.whole.values(), *carries), [leaf.node], self.program.values)
        outputs = (*finals, *whole.values(), *starts.values())
        return _Made(self._outer(scan, reads, (*scan.init, *over.values()), (), outputs, body), finals, starts, whole)

    def _segments_backward(self, head: _Made, init: Sequence[Operand], over: Names) -> tuple[_Made, Part]:
        """Each segment forward once more, and then backward."""
        forward, scan, fresh = self.forward, self.backward, self.program.fresh
        reads = self._inside(x for x in (*forward.consts, *forward.xs, *scan.consts, *scan.xs) if x not in forward.own)
        carries, stacks = [fresh(x) for x in scan.carries], {y: fresh(y) for y in over}
        starts = [fresh(x) for x in forward.carries]
        copy, names = self.program.body_again(forward.body)
        again = self._leaf(forward, _Range(0, self.split.segment, copy), starts, {}, reads=reads)
        again.node.backward = True
        leaf = self._leaf(scan, _Range(0, self.split.segment), carries, stacks, reads={**reads, **again.own})
        finals, whole = self._results(scan, over, last=True)
        inputs = (*reads.values(), *carries, *stacks.values(), *starts)
        body = Graph(inputs, (*leaf.finals, *leaf.whole.values()), [again.node, leaf.node], self.program.values)
        node = self._outer(scan, reads, (*init, *over.values()), head.own.values(), (*finals, *whole.values()), body)
        return _Made(node, finals, {}, whole), Part(again.node, leaf.node, self.kept, names)

    def _inside(self, operands: Iterable[Operand]) -> dict[int, int]:
        """Names in the body of a scan over segments for what its scans read."""
        return {x: self.program.fresh(x) for x in dict.fromkeys(operands) if isinstance(x, int)}

    def _outer(
        self, scan: _Scan, reads: Names, carries: Sequence[Operand], xs: Iterable[int], outputs: tuple[int, ...], body: Graph
    ) -> Node:
        """A scan over segments; ``scan``: what it is made of."""
        return replace(
            scan.node,
            id=self.program.new_id(),
            inputs=(*reads, *carries, *xs),
            outputs=outputs,
            bodies=(body,),
            trips=self.segments,
            num_consts=len(reads),
            num_carry=len(carries),
            window=Window(self.trips, self.of_head, each=self.split.segment),
        )
