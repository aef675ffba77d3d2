"""A pair of scans whose trips keep unalike: Graph → Graph, before what each part keeps is rewritten (``recompute.py``).

The trips are cut into parts, in the order of the forward pass, each of them scans of its own. A part is a pair of scans as before; or its
trips are run again in the backward pass, k segments of m trips, and become scans of scans:

    forward    k × ( keep the carries; m × layer )
    backward   k × ( m × ( layer, keep residuals ), m × backward layer )

k carries lie between the passes, the residuals of m trips while a segment goes backward, and the part runs forward once more: the
square-root schedule (Chen et al., arXiv 1604.06174). Parts that get shorter, the last of them an ordinary pair, are Rotor's optimum for one
more forward pass (Beaumont et al., Inria RR-9302). One segment alone runs again from the carries that the part began with, in a loop of
one trip: outside of one, compilers for several devices had its stacks from the begin of the step. What is run again can be cut into
parts in its turn, alike or not (``core.Trips``): so is any of Rotor's optima.

No stack is cut: weights are read, and their gradients written, where they are (``core.Window``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxauto import compat
from jaxauto.blocks import Block
from jaxauto.core import Graph, Literal, Node, Trips, Window
from jaxauto.graph import walk
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
    """Whether the trips of a block can differ: it is a pair of scans, in opposite directions, of which no other block has one.

    And nothing that it does forward shows (callbacks, prints): that must not happen again.
    """
    scans = blocks[number].scan
    if scans is None or any(n.eqn.effects for body in scans[0].bodies for n in walk(body)):
        return False
    if any({*scans} & {*(other.scan or ())} for b, other in enumerate(blocks) if b != number):
        return False
    forward, backward = scans
    values = blocks[number].graph.values
    filled = (*(y for y in forward.outputs if y not in own_stacks(forward, backward, blocks[number].graph)), *backward.outputs)
    return forward.reverse != backward.reverse and not any(compat.is_key_dtype(values[x].dtype) for x in filled)


def check_split(blocks: Sequence[Block], number: int, parts: Sequence[Trips]) -> None:
    """Raises ValueError where a block cannot be split so."""
    if not can_split(blocks, number):
        raise ValueError(f"block {number} cannot be split: it is no scan with a backward scan of its own")
    what = f"block {number} of {blocks[number].count} trips cannot be split so"
    if (count := sum(part.count for part in parts)) != blocks[number].count:
        raise ValueError(f"{what}: its parts have {count} trips together")
    todo = [*parts]
    while todo:
        part = todo.pop()
        if part.count < 1 or part.length < 1 or part.count % part.length:
            raise ValueError(f"{what}: a part has {part.count} trips in segments of {part.length}")
        todo += part.inside


def split_pair(program: Program, block: Block, parts: Sequence[Trips]) -> list[Part]:
    """Split the scans of ``block`` into ``parts``; the pairs that came of them."""
    return _Splitting(program, block, parts).run()


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
    """A scan, and what its results are of what the scan as written returns.

    Attributes:
      starts: the carries that it, or its segments, begin with. names: what the values of its body as written are called.
    """

    node: Node
    finals: tuple[int, ...]
    own: Names
    whole: Names
    starts: tuple[Operand, ...] = ()
    names: Names = field(default_factory=dict)


@dataclass(frozen=True)
class _Range:
    """Some trips of a scan and the first slice that they read. ``copied``: the scan's bodies as written are other trips'."""

    trips: Trips
    first: int
    copied: bool

    @property
    def alone(self) -> bool:
        """Whether it is one segment."""
        return bool(self.trips.inside) and self.trips.count == self.trips.length


def _ranges(parts: Sequence[Trips], *, reverse: bool, copied: bool = False) -> list[_Range]:
    """Of parts that follow each other."""
    ends = list(itertools.accumulate(part.count for part in parts))
    first = [ends[-1] - end if reverse else end - part.count for part, end in zip(parts, ends, strict=True)]
    return [_Range(part, at, copied or k > 0) for k, (part, at) in enumerate(zip(parts, first, strict=True))]


class _Splitting:
    def __init__(self, program: Program, block: Block, parts: Sequence[Trips]):
        assert block.scan is not None
        self.program, self.parts, self.trips = program, parts, block.count
        self.graph = program.graphs[id(block.graph)]
        forward, backward = (program.nodes[node.id] for node in block.scan)
        self.forward, self.backward = _Scan(forward, own_stacks(*block.scan, block.graph)), _Scan(backward)
        self.pairs: list[Part] = []

    def run(self) -> list[Part]:
        going, coming = self._zeros(self.forward, backward=False), self._zeros(self.backward, backward=True)
        parts = _ranges(self.parts, reverse=self.forward.node.reverse)
        made = self._forwards(parts, self.forward.init, {y: node.outputs[0] for y, node in going.items()}, last=True)
        back = self._backwards(parts, made, self.backward.init, {y: node.outputs[0] for y, node in coming.items()}, last=True)
        self._put(self.forward.node, [*going.values(), *(m.node for m in made)])
        self._put(self.backward.node, [*coming.values(), *(b.node for b in back)])
        return self.pairs

    def _zeros(self, scan: _Scan, *, backward: bool) -> dict[int, Node]:
        """What stacks are written over first."""
        return {y: self.program.zeros(y, scan.node, backward=backward) for y in scan.whole}

    def _put(self, old: Node, new: Sequence[Node]) -> None:
        place = next(k for k, node in enumerate(self.graph.nodes) if node is old)
        self.graph.nodes[place : place + 1] = new
        self.program.stands_for.update((node.id, old.id) for node in new)

    # ------------------------------------------------------------------------------------------------- one after the other

    def _forwards(
        self,
        parts: Sequence[_Range],
        init: Sequence[Operand],
        over: Names,
        *,
        reads: Names | None = None,
        again: bool = False,
        last: bool = False,
    ) -> list[_Made]:
        """The forward pass of parts that follow each other."""
        made: list[_Made] = []
        for part in parts:
            made.append(self._forward(part, init, over, reads=reads, again=again, last=last and part is parts[-1]))
            init, over = made[-1].finals, made[-1].whole
        return made

    def _backwards(
        self,
        parts: Sequence[_Range],
        made: Sequence[_Made],
        init: Sequence[Operand],
        over: Names,
        *,
        reads: Names | None = None,
        last: bool = False,
    ) -> list[_Made]:
        """Their backward pass, the last one first."""
        back: list[_Made] = []
        for part, ahead in zip(reversed(parts), reversed(made), strict=True):
            back.append(self._backward(part, ahead, init, over, reads=reads, last=last and part is parts[0]))
            init, over = back[-1].finals, back[-1].whole
        return back

    def _forward(
        self, part: _Range, init: Sequence[Operand], over: Names, *, reads: Names | None = None, again: bool = False, last: bool = False
    ) -> _Made:
        """The forward pass of some trips. The first part has the body as written. ``again``: in the backward pass, with a copy."""
        if part.trips.inside and not part.alone:
            return self._segments_forward(part, init, over, reads or {}, again=again, last=last)
        body, names = self._body_again(part, again=again)
        made = self._leaf(self.forward, part, body, init, over, reads=reads, own=not part.trips.inside, last=last)
        made.node.backward = again
        return replace(made, starts=tuple(init), names=names)

    def _body_again(self, part: _Range, *, again: bool) -> tuple[Graph | None, Names]:
        return self.program.body_again(self.forward.body, backward=again) if again or part.copied else (None, {})

    def _backward(
        self, part: _Range, made: _Made, init: Sequence[Operand], over: Names, *, reads: Names | None = None, last: bool = False
    ) -> _Made:
        """The backward pass of some trips; the pairs in it are noted. ``reads``: names in a scan around it."""
        if part.trips.inside:
            return self._segments_backward(part, made.starts, init, over, reads or {}, last=last)
        body = self.program.body_again(self.backward.body)[0] if part.copied else None
        back = self._leaf(self.backward, part, body, init, over, reads={**(reads or {}), **made.own}, last=last)
        whole = {} if made.node.backward else self.forward.whole  # what runs again does not write them again
        stacks = {made.names.get(x, x): y for y, x in whole.items() if isinstance(x, int)}
        self.pairs.append(Part(made.node, back.node, part.trips.kept, made.names, stacks))
        return back

    def _leaf(
        self,
        scan: _Scan,
        part: _Range,
        copy: Graph | None,
        init: Sequence[Operand],
        over: Names,
        *,
        reads: Names | None = None,
        own: bool = True,
        last: bool = False,
    ) -> _Made:
        """Some trips of a scan.

        Args:
          copy: of its body; None: the body as written.
          init: its first carries. over: what its stacks of all trips are written over; only those are written.
          reads: what operands are called here. own: whether what the backward scan alone reads is stacked.
          last: its results are those of the whole scan.
        """
        body, program = copy or scan.body, self.program
        inner = dict(zip(scan.body.outputs, body.outputs, strict=True))
        mine = {y: program.fresh(x, stacked=part.trips.count) for y, x in scan.own.items()} if own else {}
        finals, whole = self._results(scan, over, last=last)
        outputs = (*body.outputs[: len(finals)], *(inner[scan.own[y]] for y in mine), *(inner[scan.whole[y]] for y in over))
        node = replace(
            scan.node,
            id=scan.node.id if copy is None else program.new_id(),
            inputs=(*renamed(scan.consts, reads or {}), *init, *renamed(scan.xs, reads or {}), *over.values()),
            outputs=(*finals, *mine.values(), *whole.values()),
            bodies=(Graph(body.inputs, outputs, body.nodes, body.values, body.consts),),
            trips=part.trips.count,
            window=Window(self.trips, part.first, over=len(over)),
        )
        return _Made(node, finals, mine, whole)

    def _results(self, scan: _Scan, over: Iterable[int], *, last: bool) -> tuple[tuple[int, ...], dict[int, int]]:
        """The last carries, and the stacks of all trips."""
        called = (lambda x: x) if last else self.program.fresh
        return tuple(called(x) for x in scan.finals), {y: called(y) for y in over}

    # -------------------------------------------------------------------------------------------------------------- segments

    def _segments_forward(self, part: _Range, init: Sequence[Operand], over: Names, outside: Names, *, again: bool, last: bool) -> _Made:
        """Segments, of which the carries that they begin with are kept."""
        scan, fresh, length = self.forward, self.program.fresh, part.trips.length
        reads = self._inside((*scan.consts, *scan.xs))
        carries, stacks = [fresh(x) for x in scan.carries], {y: fresh(y) for y in over}
        body, _ = self._body_again(part, again=again)
        leaf = self._leaf(scan, _Range(Trips(length), 0, part.copied), body, carries, stacks, reads=reads, own=False)
        leaf.node.backward = again
        starts = tuple(fresh(x, stacked=part.trips.count // length) for x in scan.carries)
        finals, whole = self._results(scan, over, last=last)
        inputs = (*reads.values(), *carries, *stacks.values())
        around = Graph(inputs, (*leaf.finals, *leaf.whole.values(), *carries), [leaf.node], self.program.values)
        outputs = (*finals, *whole.values(), *starts)
        node = self._outer(scan, part, renamed(reads, outside), (*init, *over.values()), (), outputs, around)
        node.backward = again
        return _Made(node, finals, {}, whole, starts)

    def _segments_backward(
        self, part: _Range, starts: tuple[Operand, ...], init: Sequence[Operand], over: Names, outside: Names, *, last: bool
    ) -> _Made:
        """Each segment forward once more, and then backward."""
        forward, scan, fresh = self.forward, self.backward, self.program.fresh
        whole, stacked = (starts, ()) if part.alone else ((), starts)
        reads = self._inside(x for x in (*forward.consts, *forward.xs, *scan.consts, *scan.xs, *whole) if x not in forward.own)
        carries, stacks = [fresh(x) for x in scan.carries], {y: fresh(y) for y in over}
        slices = [fresh(x) for x in forward.carries] if stacked else []
        parts = _ranges(part.trips.inside, reverse=forward.node.reverse, copied=part.copied)
        again = self._forwards(parts, slices or renamed(whole, reads), {}, reads=reads, again=True)
        back = self._backwards(parts, again, carries, stacks, reads=reads)
        finals, written = self._results(scan, over, last=last)
        inputs, nodes = (*reads.values(), *carries, *stacks.values(), *slices), [made.node for made in (*again, *back)]
        around = Graph(inputs, (*back[-1].finals, *back[-1].whole.values()), nodes, self.program.values)
        node = self._outer(scan, part, renamed(reads, outside), (*init, *over.values()), stacked, (*finals, *written.values()), around)
        return _Made(node, finals, {}, written)

    def _inside(self, operands: Iterable[Operand]) -> dict[int, int]:
        """Names in the body of a scan over segments for what its scans read."""
        return {x: self.program.fresh(x) for x in dict.fromkeys(operands) if isinstance(x, int)}

    def _outer(
        self,
        scan: _Scan,
        part: _Range,
        consts: Sequence[Operand],
        carries: Sequence[Operand],
        xs: Iterable[Operand],
        outputs: tuple[int, ...],
        body: Graph,
    ) -> Node:
        """A scan over segments; ``scan``: what it is made of."""
        return replace(
            scan.node,
            id=self.program.new_id(),
            inputs=(*consts, *carries, *xs),
            outputs=outputs,
            bodies=(body,),
            trips=part.trips.count // part.trips.length,
            num_consts=len(consts),
            num_carry=len(carries),
            window=Window(self.trips, part.first, each=part.trips.length),
        )
