"""Dots and convolutions with what the TPU compiler fuses into them: elementwise producers, consumers, reductions of their result.

A cluster is one dot and the fused values that are made of its result before another dot has a say. Then
- the result itself is not written, nor what only the cluster reads (scores and their maxima before a softmax)     ``Found.absorbed``
- what needs a sum that takes a pass of its own is not made in it                                                 ``Clusters._first_pass``
- nor what puts elements of the result elsewhere                                                                   ``moving.py``
- a result that is written has what is made of it made beside it, without reading it again: sums, maxima, a sum with the residual stream
                                                                                                                  ``Clusters._beside``
- a result that is narrowed before several read it is written narrow                                             ``Clusters.narrows``
- on one device the optimizer is part of it, with the gradient that the dot makes                               ``Clusters._goes_along``
- an elementwise operand is not written either: a dot or convolution reads what that is made of                  ``Clusters.feed``
- what is made of the same arrays, or of each other, is made in one pass that reads each array once              ``Clusters._read_once``
- one of several results of one fusion is not written over by what reads it last                                 ``Clusters.in_tuple``
- what it makes, sums of two aside, is written over nothing that it reads                                          ``Found.shared``
- HBM traffic runs beside the flops: of B bytes only what exceeds ``flops * bytes_per_flop`` costs time            ``Clusters._charge``
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from jaxauto.core import ELEMENTWISE, MATRIX, Kind, Node, OpRule, Value
from jaxauto.cost.liveness import Beside
from jaxauto.cost.moving import CUTS, Moving
from jaxauto.cost.patterns import ROW, is_flat, lanes_filled, sums_later

FUSING = MATRIX
_APART = FUSING | {Kind.GATHER, Kind.SCATTER, Kind.OPAQUE}
_SUMS = frozenset({"add", "add_any"})
_WALLS = frozenset({"optimization_barrier", "scan", "while", "cond"})


@dataclass
class Found:
    """What clusters change.

    Attributes:
      absorbed: values without a buffer → until when what they are made of is needed. reads, written, beside: as in Buffers.
      shared: values → what their kernel reads for others as well, which they are not written over.
    """

    absorbed: dict[int, int] = field(default_factory=dict)
    reads: dict[int, float] = field(default_factory=dict)
    written: dict[int, float] = field(default_factory=dict)
    beside: dict[int, Beside] = field(default_factory=dict)
    shared: dict[int, set[int]] = field(default_factory=dict)


@dataclass
class _Cluster:
    node: Node
    stored: list[int] = field(default_factory=list)
    along: list[int] = field(default_factory=list)  # made as the result is written
    read: set[int] = field(default_factory=set)
    fed: dict[int, frozenset[int]] = field(default_factory=dict)  # elementwise operand → what it is made of


class Clusters:
    """Collects fused values of a program as they are met, then tells what they cost."""

    def __init__(self, values: Mapping[int, Value], rules: Mapping[int, OpRule], narrowed: Set[int], bytes_per_flop: float, *, alone: bool):
        """``narrowed``: values that are written in half their bytes, as far as is known."""
        self.values, self.rules, self.narrowed, self.bytes_per_flop, self.alone = values, rules, narrowed, bytes_per_flop, alone
        self.stored: dict[int, tuple[frozenset[int], int]] = {}
        self.clusters: dict[int, _Cluster] = {}
        self.used: set[int] = set()
        self.dots: list[int] = []  # positions
        self.held: dict[int, tuple[int, ...]] = {}  # operand or result of a dot without a buffer → what holds it
        self.apart: set[int] = set()  # softmax: exps that their sums are not made beside
        self.in_tuple: set[int] = set()  # one of several results of a fusion
        self.moving = Moving(values, rules)
        self.slices: dict[int, tuple[frozenset[int], float, float]] = {}  # what a trip reads of a stack → see ``cut``

    def use(self, roots: frozenset[int]) -> None:
        """Buffers that an operation or a loop reads."""
        self.used |= roots

    def feed(self, node: Node, operand: int, roots: frozenset[int]) -> None:
        """An elementwise operand of an operation."""
        if self.rules[node.id].kind in FUSING:
            self.clusters.setdefault(node.id, _Cluster(node)).fed[operand] = roots
            self.held[operand] = tuple(roots)

    def store(self, number: int, roots: frozenset[int], at: int) -> None:
        """A fused value that gets a buffer, what it is made of, and when."""
        self.stored[number] = (roots, at)

    def cut(self, target: int, stack: frozenset[int], charged: float, share: float) -> None:
        """A trip's slice of a stack, which has no buffer of its own: each pass over it is one over the stack, or a ``share`` of it.
        ``charged``: passes that are charged already."""
        self.slices[target] = stack, charged, share

    def made_with(self, value: Value, roots: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Those of a fused value's roots that are not read for it if it is written: the last dot's result whose fusion can make it (the
        gradient of what an activation is made of) and what else that makes, unless it is a sum. And those that are not written then."""
        node = value.producer
        if self._is_summed_apart(value, roots):
            return roots, frozenset()
        alike = (r for r in self._in_place(value.id, roots) if self._same_size(r, value.id) and self._fuses(r, frozenset()))
        for dot in sorted(alike, reverse=True):
            made = {r for r in roots if r in self.stored and dot in self.stored[r][0]}
            summed = any(self.rules[self._node(r).id].kind is Kind.REDUCE for r in made)
            if node is not None and not summed and self._goes_along(self._node(dot), node):
                unread = frozenset({dot} | made)
                return unread, unread if self._goes_into_alone(dot, value.id) else frozenset()
        return frozenset(), frozenset()

    def _is_summed_apart(self, value: Value, roots: frozenset[int]) -> bool:
        """Whether a pass of its own sums a value, which needs a sum itself: that reads what the value is made of in any case."""
        node, sums = value.producer, (self._node(r) for r in roots if self._made_by(r) is Kind.REDUCE)
        needs = node is not None and any(made.backward == node.backward for made in sums)
        return needs and any(self._kind(user) is Kind.REDUCE for user in value.users)

    def narrows(self, value: Value, roots: frozenset[int]) -> bool:
        """Whether all that is made of a dot's result is made of a value of fewer bytes, which the dot writes instead."""
        if len(value.users) < 2 or len(roots) != 1:
            return False
        (root,) = roots
        if not self._is_dot(root) or not self._same_size(root, value.id) or value.nbytes >= self.values[root].nbytes:
            return False
        x = value.id
        while x != root:
            made = self.values[x].producer
            operands = [y for y in made.inputs if isinstance(y, int)] if made is not None else []
            if len(operands) != 1 or len(self.values[operands[0]].users) != 1:
                return False
            (x,) = operands
        return True

    def _in_place(self, number: int, roots: frozenset[int]) -> frozenset[int]:
        """Those of a value's roots whose elements lie where its own do."""
        return roots - self.moving.moved.get(number, frozenset())

    def _goes_into_alone(self, dot: int, number: int) -> bool:
        """Whether all that is made of a dot's result is made of one value, sums excepted."""
        waiting, seen = [dot], {number}
        while waiting:
            x = waiting.pop()
            if x in seen:
                continue
            seen.add(x)
            users = [u for u in self.values[x].users if u.id not in self.rules or self.rules[u.id].kind is not Kind.REDUCE]
            if any(u.id not in self.rules or self.rules[u.id].kind in _APART for u in users) or not self.values[x].users:
                return False
            waiting += [out for u in users for out in u.outputs]
        return True

    def found(self, start: Mapping[int, int], kept: Set[int]) -> Found:
        """Args: start: position of each value that has a buffer. kept: dot results that must keep theirs (of the program, of loops)."""
        result = Found()
        owner = self._owners(start, kept)
        beside = self._beside(start, owner)
        until: dict[int, int] = {number: self.stored[number][1] for number in owner}
        wanted = self.used | kept  # outside of the fusion that makes them
        loose: list[int] = []
        for number, (roots, at) in self.stored.items():
            dot = owner.get(number)
            mine = {r for r in roots if r == dot or (dot is not None and owner.get(r) == dot)}
            wanted |= roots - mine
            if dot is not None:
                cluster = self._cluster(dot)
                cluster.stored.append(number)
                cluster.read |= roots - mine
                until[dot] = max(until.get(dot, 0), at)
            elif number in beside:
                cluster = self._cluster(beside[number])
                cluster.along.append(number)
                cluster.read |= roots - {beside[number]}
            elif not self._of_the_same_pass(number, roots):
                loose.append(number)
        result.absorbed.update({number: at for number, at in until.items() if number not in wanted})
        for root in self._read_once({n: at for n, at in start.items() if n not in result.absorbed}, loose):
            result.reads[root] = result.reads.get(root, 0.0) + 1.0
        self.in_tuple.update(dot for dot in beside.values() if dot not in result.absorbed)
        for cluster in self.clusters.values():
            self._charge(cluster, result)
            result.shared.update((n, set(self.stored[n][0])) for n in cluster.stored if self._node(n).prim not in _SUMS)
            written = [n for n in (*cluster.node.outputs, *cluster.stored, *cluster.along) if n in start and n not in result.absorbed]
            self.in_tuple.update(written if len(written) > 1 else ())
            self.held.update({x: tuple(n for n in cluster.stored if n in start) for x in cluster.node.outputs if x in result.absorbed})
        for target, (stack, charged, share) in reversed(self.slices.items()):  # inner loops first
            for root in stack:
                result.reads[root] = result.reads.get(root, 0.0) + share * max(0.0, result.reads.get(target, 0.0) - charged)
        return result

    def together(self, start: Mapping[int, int]) -> dict[int, int]:
        """Of values made in one fusion with an earlier one that reads the same wide array, if all they need is there: their new starts.

        Nothing of the backward pass is made beside the forward pass or the other way round, but where no dot lies between them: the
        gradient of a loss, and what else of the loss is made of the same scores.
        """
        readers: dict[int, list[tuple[int, bool]]] = {}
        moved: dict[int, int] = {}
        earliest: dict[int, int] = {}  # position of the last operation that a fused value depends on
        for number, (roots, at) in sorted(self.stored.items(), key=lambda item: item[1][1]):
            value = self.values[number]
            ready = earliest[number] = max((earliest.get(r, start.get(r, 0)) for r in roots), default=0)
            if number not in start or self._is_alone(value):
                continue
            backward, dot = self._node(number).backward, self._dot_before(at)
            for root in (r for r in roots if 2 * self.values[r].elements >= value.elements):
                near = (p for p, b in readers.get(root, ()) if b == backward or (p > dot if backward else self._dot_before(p) <= ready))
                begun = [p for p in near if ready <= p < at]
                moved[number] = min([*begun, moved.get(number, at)])
                readers.setdefault(root, []).append((at, backward))
        return {number: p for number, p in moved.items() if p < self.stored[number][1]}

    def _read_once(self, start: Mapping[int, int], loose: list[int]) -> Iterator[int]:
        """What the passes that make ``loose`` read: values of one size that are made of the same array, or of each other, are made in one
        pass (multi-output fusion) if no operation or sum lies between."""
        readers: dict[int, list[tuple[int, bool]]] = {}  # wide array → passes that read it, or make it
        ready: dict[int, int] = {}  # position of the last operation or sum that a value depends on
        seen: set[tuple[int, int]] = set()
        made: dict[int, list[int]] = {}  # in the pass that begins there
        mine = set(loose)
        for number, (roots, at) in sorted(self.stored.items(), key=lambda item: item[1][1]):
            value = self.values[number]
            ready[number] = max((ready.get(r, start.get(r, 0)) for r in roots), default=0)
            if number not in mine or self._is_alone(value):
                ready[number] = at
                yield from roots if number in mine else ()
                continue
            wide = [r for r in roots if self._same_size(r, number)]
            back = self._node(number).backward
            begun = [p for r in wide for p, b in readers.get(r, ()) if b == back and ready[number] <= p]
            mine_at = min(begun, default=at)
            made.setdefault(mine_at, []).append(number)
            for root in (r for r in roots if (r, mine_at) not in seen):
                seen.add((root, mine_at))
                yield root
            seen.add((number, mine_at))
            for r in (*wide, number):
                readers.setdefault(r, []).append((mine_at, back))
        self.in_tuple.update(n for numbers in made.values() if len(numbers) > 1 for n in numbers)

    def _is_alone(self, value: Value) -> bool:
        """Whether no pass makes a value beside others: a sum, what moves elements."""
        return value.producer is None or value.id in self.moving.passes or self.rules[value.producer.id].kind is Kind.REDUCE

    def _same_size(self, a: int, b: int) -> bool:
        return self.values[a].elements == self.values[b].elements

    def _dot_before(self, at: int) -> int:
        return self.dots[k - 1] if (k := bisect_left(self.dots, at)) else 0

    def _owners(self, start: Mapping[int, int], kept: Set[int]) -> dict[int, int]:
        """Stored value → the dot result it is fused with: the last that it is made of, alone or by way of others that are."""
        owner: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        for number, (roots, _) in sorted(self.stored.items(), key=lambda item: item[1][1]):
            direct = [r for r in roots if r in start and self._fuses(r, kept)]
            for dot in direct:
                readers.setdefault(dot, []).append(number)
            in_place = self._in_place(number, roots)
            dots = {*in_place.intersection(direct), *(owner[r] for r in in_place if r in owner)}
            node = self.values[number].producer
            if dots and node is not None:
                last = max(dots, key=start.__getitem__)
                made = self.values[last].producer
                if made is not None and self._goes_along(made, node) and not self._comes_around(node, last, start):
                    owner[number] = last
        members: dict[int, list[int]] = {}
        for number, dot in owner.items():
            members.setdefault(dot, []).append(number)
        sole = {d for d, numbers in readers.items() if all(owner.get(n) == d for n in numbers)}
        return {number: dot for dot in sole for number in self._first_pass(dot, members[dot])}

    def _comes_around(self, node: Node, dot: int, start: Mapping[int, int]) -> bool:
        """Whether what is made of a dot's result by another operation, or passes a barrier with it, is needed for ``node``."""
        waiting, seen = [(x, False) for x in node.inputs], set()
        while waiting:
            x, outside = waiting.pop()
            if x == dot and outside:
                return True
            made = self.values[x].producer if isinstance(x, int) and start.get(x, math.inf) > start[dot] else None
            if made is None or (x, outside) in seen:
                continue
            seen.add((x, outside))
            outside = outside or made.prim in _WALLS or made.id not in self.rules or self.rules[made.id].kind in _APART
            waiting += [(operand, outside) for operand in made.inputs]
        return False

    def _fuses(self, number: int, kept: Set[int]) -> bool:
        if number in kept or not self._is_dot(number):
            return False
        return all(self._goes_along(self._node(number), user) for user in self.values[number].users)

    def _goes_along(self, node: Node, user: Node) -> bool:
        """Whether ``user`` can be in one fusion with the dot ``node``: not of another pass (but the optimizer with a gradient that no other
        device has a part of), no operation, no barrier, no sum with what a scatter makes of zeros."""
        if user.prim in _WALLS or user.id not in self.rules or (user.backward != node.backward and not (node.backward and self.alone)):
            return False
        if user.prim in _SUMS and any(self._made_by(x) is Kind.SCATTER for x in user.inputs):  # XLA scatters into the other summand
            return False
        return self.rules[user.id].kind not in _APART

    def _first_pass(self, dot: int, numbers: list[int]) -> list[int]:
        """Which of them a fusion can make of a dot: not what needs the sum of long rows (a loss over a vocabulary), or of rows of something
        else that is as wide (a softmax's gradient), or any sum of scores that are alone (``patterns.py``), or a sum that needs another one
        (probabilities: the sum of the exp needs the maximum)."""
        node = self._node(dot)
        limit = 1 + 1e-9 if sums_later(node) or is_flat(self.values[dot]) else ROW
        found: list[int] = []
        waited_for: set[int] = set()
        depth: dict[int, int] = {}  # how many sums and maxima of rows, each needing the one before, go into a value
        for n in sorted(numbers, key=lambda n: self.stored[n][1]):
            roots = self.stored[n][0]
            needed = max((depth.get(r, 0) for r in roots), default=0)
            late = needed > 1 or not roots.isdisjoint(waited_for)
            if not late:
                found.append(n)
            depth[n] = needed + (self._row(n) > 1)
            wide = any(r != dot and r not in numbers and self._is_wide(r, dot) for r in roots)
            if late or self._row(n) >= (1 + 1e-9 if wide else limit):
                waited_for.add(n)
        return found

    def _beside(self, start: Mapping[int, int], owner: Mapping[int, int]) -> dict[int, int]:
        """What is made of a dot's result, with sums and maxima → the dot: made as the result is written, which is not read for it."""
        found: dict[int, int] = {}
        for number, (roots, _) in sorted(self.stored.items(), key=lambda item: item[1][1]):
            in_place = self._in_place(number, roots)
            dots = {r for r in in_place if r in start and r not in self.stored and self._is_dot(r)}
            node = self.values[number].producer
            last = max(dots, key=start.__getitem__, default=None)
            if number in owner or last is None or node is None or not self._is_made_beside(node, number, last, start):
                continue
            if self._goes_along(self._node(last), node) and not self._through_others(roots, last, start[last]):
                found[number] = last
        return found

    def _is_made_beside(self, node: Node, number: int, dot: int, start: Mapping[int, int]) -> bool:
        """Whether a node sums, or makes elements of those of a dot's result alone."""
        if self._kind(node) is Kind.REDUCE:
            return True
        alike = self._kind(node) in ELEMENTWISE and self._same_size(number, dot) and number not in self.moving.passes
        return alike and not self._comes_around(node, dot, start)

    def _through_others(self, roots: frozenset[int], dot: int, made_at: int) -> bool:
        """Whether a stored one of ``roots`` is made of the dot's result."""
        waiting, seen = [r for r in roots if r in self.stored], set()
        while waiting:
            seen.add(r := waiting.pop())
            below, at = self.stored[r]
            if dot in below:
                return True
            if at > made_at:
                waiting += [b for b in below if b in self.stored and b not in seen]
        return False

    def _of_the_same_pass(self, number: int, roots: frozenset[int]) -> bool:
        """The sum of an exp, made in the pass that writes the exp."""
        node = self.values[number].producer
        if node is None or self.rules[node.id].kind is not Kind.REDUCE or len(roots) != 1:
            return False
        (root,) = roots
        return root in self.stored and root not in self.apart and self.rules[self._node(root).id].kind is Kind.EXPENSIVE

    def _is_dot(self, number: int) -> bool:
        return self._made_by(number) in FUSING

    def _made_by(self, x: object) -> Kind | None:
        node = self.values[x].producer if isinstance(x, int) else None
        return self.rules[node.id].kind if node is not None and node.id in self.rules else None

    def _is_wide(self, number: int, dot: int) -> bool:
        return 2 * self.values[number].elements >= self.values[dot].elements

    def _node(self, number: int) -> Node:
        node = self.values[number].producer
        assert node is not None
        return node

    def _kind(self, node: Node) -> Kind | None:
        return self.rules[node.id].kind if node.id in self.rules else None

    def _in_memory(self, number: int) -> float:
        return self.values[number].nbytes / (1 + (number in self.narrowed))

    def _cluster(self, dot: int) -> _Cluster:
        node = self._node(dot)
        return self.clusters.setdefault(node.id, _Cluster(node))

    def _row(self, number: int) -> float:
        """How many elements one element is the sum or maximum of."""
        value, node = self.values[number], self._node(number)
        summed = node.inputs[0] if node.prim not in CUTS else None
        return self.values[summed].elements / max(1, value.elements) if isinstance(summed, int) else 1.0

    def _charge(self, cluster: _Cluster, result: Found) -> None:
        node, bytes_ = cluster.node, lambda n: self.values[n].nbytes
        rule, lanes = self.rules[node.id], lanes_filled(node)
        made = [n for n in cluster.stored if n not in result.absorbed]
        charged = sum(map(bytes_, node.outputs))
        own = sum(self._in_memory(x) for x in node.inputs if isinstance(x, int))
        own += min(charged, sum(map(self._in_memory, made))) if cluster.stored else charged
        written: dict[int, float] = {}
        reads: list[tuple[int, int, float]] = []
        for operand, roots in cluster.fed.items():  # the operation is charged for the operand's own bytes already
            whole = sum(map(bytes_, roots))
            reads += [(root, operand, max(0.0, 1 - bytes_(operand) / whole)) for root in roots]
        spare = charged  # but not written, if something is made of it
        for number in made:
            share = min(spare, bytes_(number))
            spare -= share
            written[number] = 1 - share / bytes_(number) if bytes_(number) else 0.0
        written.update({number: 1.0 for number in cluster.along if self._is_wide(number, node.outputs[0])})
        once = cluster.read.difference(node.inputs, *cluster.fed.values())
        reads += [(root, node.outputs[0], 1.0) for root in once]
        total = sum(n * bytes_(r) for r, _, n in reads) + sum(n * bytes_(w) for w, n in written.items())
        hidden = max(0.0, (rule.flops or 0.0) * self.bytes_per_flop / lanes - own)
        exposed = max(0.0, total - hidden) / total if total else 0.0
        for root, _, amount in reads:
            result.reads[root] = result.reads.get(root, 0.0) + amount * exposed
        result.written.update({number: amount * exposed for number, amount in written.items()})
        in_slices = {target for target, (_, charged, _) in self.slices.items() if charged}  # charged whole to their loops
        place = {x: k for k, x in reversed([*enumerate((*node.inputs, *node.outputs))]) if isinstance(x, int)}
        along = [(root, place[x], n) for root, x, n in reads if n and root not in in_slices and self._is_wide(root, x)]
        made = [(number, place[node.outputs[0]], n) for number, n in written.items() if n and self._is_wide(number, node.outputs[0])]
        if along or made:
            result.beside[node.id] = Beside(tuple(along), tuple(made), exposed, lanes)
