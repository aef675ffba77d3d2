"""Dots and convolutions with what the TPU compiler fuses into them: elementwise producers, consumers, reductions of their result.

A cluster is one dot and the fused values that are made of its result before another dot has a say. Then
- the result itself is not written, nor what only the cluster reads (scores and their maxima before a softmax)     ``Found.absorbed``
- an elementwise operand is not written either: a dot reads what that is made of (a convolution would make it     ``Clusters.feed``
  once for each tap)
- HBM traffic runs beside the flops: of B bytes only what exceeds ``flops * bytes_per_flop`` costs time            ``Clusters._charge``
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from jaxauto.core import Kind, Node, OpRule, Value
from jaxauto.graph import value_bytes

FUSING = frozenset({Kind.DOT, Kind.CONV})
ROW = 4096  # elements: a softmax over more does not fit a fusion, its operand is written
_WALLS = frozenset({"optimization_barrier", "scan", "while", "cond"})


@dataclass
class Found:
    """What clusters change.

    Attributes:
      absorbed: values without a buffer → until when what they are made of is needed. reads, written: as in Buffers.
    """

    absorbed: dict[int, int] = field(default_factory=dict)
    reads: dict[int, float] = field(default_factory=dict)
    written: dict[int, float] = field(default_factory=dict)


@dataclass
class _Cluster:
    node: Node
    stored: list[int] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    fed: dict[int, frozenset[int]] = field(default_factory=dict)  # elementwise operand → what it is made of


def is_select(node: Node) -> bool:
    """A scatter of one element into each row (the gradient of a loss that picks labels), which the compiler writes as a comparison."""
    numbers = node.params.get("dimension_numbers")
    return bool(getattr(numbers, "operand_batching_dims", ())) and not numbers.update_window_dims


class Clusters:
    """Collects fused values of a program as they are met, then tells what they cost."""

    def __init__(self, values: Mapping[int, Value], rules: Mapping[int, OpRule], bytes_per_flop: float):
        self.values, self.rules, self.bytes_per_flop = values, rules, bytes_per_flop
        self.stored: dict[int, tuple[frozenset[int], int]] = {}
        self.clusters: dict[int, _Cluster] = {}
        self.used: set[int] = set()

    def use(self, roots: frozenset[int]) -> None:
        """Buffers that an operation or a loop reads."""
        self.used |= roots

    def feed(self, node: Node, operand: int, roots: frozenset[int]) -> None:
        """An elementwise operand of an operation."""
        if self.rules[node.id].kind is Kind.DOT:
            self.clusters.setdefault(node.id, _Cluster(node)).fed[operand] = roots

    def store(self, number: int, roots: frozenset[int], at: int) -> None:
        """A fused value that gets a buffer, what it is made of, and when."""
        self.stored[number] = (roots, at)

    def found(self, start: Mapping[int, int], kept: Set[int]) -> Found:
        """Args: start: position of each value that has a buffer. kept: dot results that must keep theirs (of the program, of loops)."""
        result = Found()
        owner = self._owners(start, kept)
        wanted = self.used | kept  # outside of the fusion that makes them
        for number, (roots, at) in self.stored.items():
            dot = owner.get(number)
            mine = {r for r in roots if r == dot or (dot is not None and owner.get(r) == dot)}
            wanted |= roots - mine
            if dot is None:
                for root in roots:
                    result.reads[root] = result.reads.get(root, 0.0) + 1.0
                continue
            node = self.values[dot].producer
            assert node is not None
            cluster = self.clusters.setdefault(node.id, _Cluster(node))
            cluster.stored.append(number)
            cluster.read |= roots - mine
            result.absorbed[dot] = max(result.absorbed.get(dot, 0), at)
        for number in owner:
            if number not in wanted:
                result.absorbed[number] = self.stored[number][1]
        for cluster in self.clusters.values():
            self._charge(cluster, result)
        return result

    def together(self, start: Mapping[int, int]) -> dict[int, int]:
        """New starts: of values made in one fusion with an earlier one that reads the same wide array, if all they need is there."""
        readers: dict[int, list[int]] = {}
        moved: dict[int, int] = {}
        earliest: dict[int, int] = {}  # position of the last operation that a fused value depends on
        for number, (roots, at) in sorted(self.stored.items(), key=lambda item: item[1][1]):
            value = self.values[number]
            ready = earliest[number] = max((earliest.get(r, start.get(r, 0)) for r in roots), default=0)
            if number not in start or value.producer is None or self.rules[value.producer.id].kind is Kind.REDUCE:
                continue
            for root in (r for r in roots if 2 * self.values[r].aval.size >= value.aval.size):
                begun = [p for p in readers.get(root, ()) if ready <= p < at]
                moved[number] = min([*begun, moved.get(number, at)])
                readers.setdefault(root, []).append(at)
        return {number: p for number, p in moved.items() if p < self.stored[number][1]}

    def _owners(self, start: Mapping[int, int], kept: Set[int]) -> dict[int, int]:
        """Stored value → the dot result it is fused with: the last that it is made of, alone or by way of others that are."""
        owner: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        for number, (roots, _) in sorted(self.stored.items(), key=lambda item: item[1][1]):
            direct = [r for r in roots if r in start and self._fuses(r, kept)]
            for dot in direct:
                readers.setdefault(dot, []).append(number)
            dots = {*direct, *(owner[r] for r in roots if r in owner)}
            node = self.values[number].producer
            if dots and node is not None:
                last = max(dots, key=start.__getitem__)
                made = self.values[last].producer
                if made is not None and self._goes_along(made, node):
                    owner[number] = last
        members: dict[int, list[int]] = {}
        for number, dot in owner.items():
            members.setdefault(dot, []).append(number)
        sole = {d for d, numbers in readers.items() if all(owner.get(n) == d for n in numbers) and self._one_pass(members[d])}
        return {number: dot for number, dot in owner.items() if dot in sole}

    def _fuses(self, number: int, kept: Set[int]) -> bool:
        value = self.values[number]
        node = value.producer
        if number in kept or node is None or node.id not in self.rules or self.rules[node.id].kind not in FUSING:
            return False
        return all(self._goes_along(node, user) for user in value.users)

    def _goes_along(self, node: Node, user: Node) -> bool:
        """Whether ``user`` can be in one fusion with the dot ``node``: not of another pass, no operation, no barrier."""
        if user.prim in _WALLS or user.id not in self.rules or user.backward != node.backward:
            return False
        return self.rules[user.id].kind not in FUSING | {Kind.GATHER, Kind.SCATTER, Kind.OPAQUE}

    def _one_pass(self, numbers: list[int]) -> bool:
        """Whether a fusion can make all of them from a dot: not if one sums long rows (a loss over a vocabulary) that another needs."""
        needed = (n for n in numbers if any(n in self.stored[other][0] for other in numbers))
        return all(self._row(n) <= ROW for n in needed)

    def _row(self, number: int) -> float:
        """How many elements one element is the sum of."""
        value = self.values[number]
        summed = value.producer.inputs[0] if value.producer is not None else None
        return self.values[summed].aval.size / max(1, value.aval.size) if isinstance(summed, int) else 1.0

    def _charge(self, cluster: _Cluster, result: Found) -> None:
        rule, bytes_ = self.rules[cluster.node.id], lambda n: value_bytes(self.values[n])
        own = sum(bytes_(x) for x in (*cluster.node.inputs, *cluster.node.outputs) if isinstance(x, int))
        reads: dict[int, float] = {}
        written: dict[int, float] = {}
        for operand, roots in cluster.fed.items():  # the operation is charged for the operand's own bytes already
            whole = sum(map(bytes_, roots))
            for root in roots:
                reads[root] = reads.get(root, 0.0) + max(0.0, 1 - bytes_(operand) / whole)
        spare = sum(map(bytes_, cluster.node.outputs)) if cluster.stored else 0.0  # charged, but not written
        for number in cluster.stored:
            if number not in result.absorbed:
                share = min(spare, bytes_(number))
                spare -= share
                written[number] = 1 - share / bytes_(number) if bytes_(number) else 0.0
        for root in cluster.read:
            reads[root] = reads.get(root, 0.0) + 1.0
        total = sum(n * bytes_(r) for r, n in reads.items()) + sum(n * bytes_(w) for w, n in written.items())
        hidden = max(0.0, (rule.flops or 0.0) * self.bytes_per_flop - own)
        exposed = max(0.0, total - hidden) / total if total else 0.0
        for root, amount in reads.items():
            result.reads[root] = result.reads.get(root, 0.0) + amount * exposed
        result.written.update({number: amount * exposed for number, amount in written.items()})
