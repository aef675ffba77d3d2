"""Graph → groups, operations and edges: the decisions that are left when followers have followed. Knows rules, no mesh.

A *group* is a set of values that are sharded alike: its own dimensions, and for each member the group dimension of each of its
dimensions. Elementwise chains, broadcasts, reductions, transposes and reshapes join the group of what they work on. An *operation*
(dot, convolution, gather, scatter) is a node with a choice of its own. An *edge* is a place where an array passes from a group to
a group or operation, and may have to be resharded on the way.

Named-dimension unification as in TOAST (arXiv 2508.15010); where it would make two dimensions of a value the same, an edge is left.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxauto.core import OPERATIONS, Graph, Kind, LinkKind, Literal, Node, OpRule, Value
from jaxauto.flow import feeding_operations
from jaxauto.graph import multiplicity, walk
from jaxauto.rules import rule_for
from jaxauto.rules.matching import aligned, majors, positions, shardable_factors

MAX_GROUP_DIMS = 5  # of its states, the ways to lay mesh axes on them, there are (dims + 1) ** axes

WHOLE = -1  # a dimension that no mesh axis can be laid on


@dataclass(eq=False)
class Group:
    """Values that are sharded alike.

    Attributes:
      sizes: for each dimension of the group, the greatest common divisor of its members' sizes: what mesh axes must divide.
      leaf: an input of the step (it joins nothing but its own slices in loops).
    """

    id: int
    sizes: list[int]
    leaf: bool = False
    members: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Edge:
    """One array that passes from group ``source`` to group ``target``.

    Attributes:
      dims: for each dimension of the array (source group dimension, target group dimension), WHOLE where there is none.
      reduced: source group dimensions that are summed away on the passage: their axes leave partial results.
      value: the array's value id; ``result``: the value after a reduction, whose bytes a partial sum has to move.
      times: how often in a step.
    """

    source: int
    target: int
    dims: tuple[tuple[int, int], ...]
    reduced: tuple[int, ...]
    value: int
    result: int
    times: int
    node: int  # node id, -1 for links and outputs
    operand: int = -1
    backward: bool = False


@dataclass(frozen=True)
class Operand:
    """An operand or result of an operation: ``dims[i] = (group dimension or WHOLE, factor or "")``."""

    value: int
    group: int
    dims: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Operation:
    """A node with a choice of its own: which mesh axis splits which factor."""

    node: Node
    rule: OpRule
    factors: tuple[tuple[str, int], ...]  # shardable factors with the size that axes must divide
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    times: int


@dataclass(eq=False)
class Groups:
    """The decisions of a program; see the module's head."""

    graph: Graph
    groups: dict[int, Group]
    place: dict[int, tuple[int, tuple[int, ...]]]  # value id → (group id, group dimension of each dimension)
    edges: list[Edge]
    operations: list[Operation]
    rules: dict[int, OpRule]  # node id → rule, control flow excepted
    times: dict[int, int]  # node id → how often in a step
    pinned: dict[int, list[tuple[int, Node]]] = field(default_factory=dict)  # group → user's sharding_constraint nodes


def find_groups(graph: Graph, state: Sequence[tuple[int, int]] = ()) -> Groups:
    """Group the values of ``graph``.

    Args:
      state: (input leaf, output leaf) pairs that share one sharding.
    """
    return _Grouping(graph).run(state)


class _Grouping:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.values: dict[int, Value] = graph.values
        self.ids = itertools.count()
        self.groups: dict[int, Group] = {}
        self.place: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.edges: list[Edge] = []
        self.raw_operations: list[tuple[Node, OpRule]] = []
        self.rules = {node.id: rule_for(node.eqn) for node in walk(graph) if not node.bodies}
        self.pinned: list[tuple[int, Node]] = []
        self.times = multiplicity(graph)
        self.feeding = feeding_operations(graph, self.rules)
        self.remap: dict[int, tuple[int, dict[int, int]]] = {}  # united group → where it went, its dimensions there

    def run(self, state) -> Groups:
        for number in [*self.graph.inputs, *self.graph.consts]:
            self.fresh(number, leaf=True)
        self.visit(self.graph)
        for i, o in state:
            out = self.graph.outputs[o]
            if isinstance(out, int) and out != self.graph.inputs[i]:
                self.pass_on(out, self.graph.inputs[i], node=None, operand=-1)
        return self.finish()

    # ------------------------------------------------------------------------------------------------------ placing values

    def fresh(self, number: int, *, leaf: bool = False) -> None:
        """A group of its own for a value; dimensions of size 1 are whole."""
        shape = self.values[number].shape
        dims, sizes = [], []
        for n in shape:
            dims.append(len(sizes) if n > 1 and len(sizes) < MAX_GROUP_DIMS else WHOLE)
            if dims[-1] != WHOLE:
                sizes.append(n)
        group = Group(next(self.ids), sizes, leaf, [number])
        self.groups[group.id] = group
        self.place[number] = (group.id, tuple(dims))

    def unite(self, a: int, b: int, pairs: Sequence[tuple[int, int]]) -> bool:
        """Make values ``a`` and ``b`` share a group, their dimensions ``pairs`` being alike; False where that contradicts."""
        group_a, dims_a = self.place[a]
        group_b, dims_b = self.place[b]
        mapping: dict[int, int] = {}  # dimension of b's group → dimension of a's group
        for i, j in pairs:
            x, y = dims_a[i], dims_b[j]
            if (x == WHOLE) != (y == WHOLE):
                return False
            if x != WHOLE and mapping.setdefault(y, x) != x:
                return False
        if len(set(mapping.values())) != len(mapping):
            return False
        if group_a == group_b:
            return all(x == y for y, x in mapping.items()) or self.merge(group_a, mapping)
        ga, gb = self.groups[group_a], self.groups[group_b]
        if len(ga.members) < len(gb.members) and not ga.leaf:
            return self.unite(b, a, [(j, i) for i, j in pairs])
        if len(ga.sizes) + len(gb.sizes) - len(mapping) > MAX_GROUP_DIMS:
            return False
        for y, n in enumerate(gb.sizes):
            if y in mapping:
                ga.sizes[mapping[y]] = math.gcd(ga.sizes[mapping[y]], n)
            else:
                mapping[y] = len(ga.sizes)
                ga.sizes.append(n)
        for number in gb.members:
            self.place[number] = (group_a, tuple(WHOLE if d == WHOLE else mapping[d] for d in self.place[number][1]))
        ga.members += gb.members
        ga.leaf |= gb.leaf
        self.remap[group_b] = (group_a, mapping)
        del self.groups[group_b]
        return True

    def merge(self, number: int, pairs: Mapping[int, int]) -> bool:
        """Make dimensions of one group one (logits and their gradient, tied by their row sums first); False where a member has both."""
        group = self.groups[number]
        name = list(range(len(group.sizes)))
        for a, b in pairs.items():
            name = [name[a] if n == name[b] else n for n in name]
        kept = list(dict.fromkeys(name))
        mapping = {d: kept.index(n) for d, n in enumerate(name)}
        places = {m: tuple(WHOLE if d == WHOLE else mapping[d] for d in self.place[m][1]) for m in group.members}
        if any(len(set(dims) - {WHOLE}) < sum(d != WHOLE for d in dims) for dims in places.values()):
            return False
        sizes = [math.gcd(*(n for d, n in enumerate(group.sizes) if mapping[d] == k)) for k in range(len(kept))]
        merged = Group(next(self.ids), sizes, group.leaf, group.members)
        self.groups[merged.id] = merged
        self.place |= {m: (merged.id, dims) for m, dims in places.items()}
        self.remap[number] = (merged.id, mapping)
        del self.groups[number]
        return True

    # ------------------------------------------------------------------------------------------------------------- visiting

    def visit(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.bodies:
                self.control(node)
                continue
            rule = self.rules[node.id]
            if node.prim == "sharding_constraint":
                self.pinned.append((node.outputs[0], node))
            if rule.kind in OPERATIONS:
                for out in node.outputs:
                    self.fresh(out)
                self.raw_operations.append((node, rule))
            else:
                self.follow(node, rule)

    def follow(self, node: Node, rule: OpRule) -> None:
        """Results join the group of the widest operand they share factors with; other operands unite or pass on an edge."""
        if not node.outputs:
            return
        operands = [(k, x) for k, x in enumerate(node.inputs) if not isinstance(x, Literal) and self.values[x].shape]
        for number, spec in zip(node.outputs, rule.results, strict=True):
            self.fresh(number)
            for k, x in sorted(operands, key=lambda kx: -len(majors(rule.operands[kx[0]]) & majors(spec))):
                pairs = aligned(rule, rule.operands[k], spec)
                if pairs and not self.groups[self.place[x][0]].leaf and self.follows(rule, x, number, pairs):
                    self.unite(x, number, pairs)
        for k, x in operands:
            for out in _partners(node, rule, k, len(operands)):
                self.pass_through(node, rule, k, x, out)

    def follows(self, rule: OpRule, x: int, number: int, pairs) -> bool:
        """Whether a result should be sharded as operand ``x``.

        A broadcast operand keeps its own group (resharding it is cheap, and what it is broadcast to differs from use to use), and so
        does what is cut or glued: only dimensions that pass whole are alike.
        """
        if self.place[x][0] == self.place[number][0]:
            return True
        if rule.kind is Kind.REDUCE:  # a gradient summed over the batch starts a group of its own: the parameter's
            return number in self.feeding or x not in self.feeding
        if rule.kind is Kind.MOVE:
            return len(pairs) == sum(n > 1 for n in self.values[number].shape)
        return self.values[x].elements * 2 > self.values[number].elements

    def pass_through(self, node: Node, rule: OpRule, k: int, x: int, out: int) -> None:
        """The edge from operand ``k`` to a result's group, unless it costs nothing."""
        spec = rule.results[node.outputs.index(out)]
        target_of = {f: d for d, f in positions(spec)}
        group, dims = self.place[x]
        target, target_dims = self.place[out]
        pairs, reduced = [], []
        for d, factors in enumerate(rule.operands[k]):
            major = factors[0] if factors else ""
            if major and major not in target_of and major not in rule.whole and rule.kind is Kind.REDUCE:
                reduced.append(dims[d])
                pairs.append((dims[d], dims[d] if group == target else WHOLE))
            else:
                to = target_dims[target_of[major]] if major in target_of and major not in rule.whole else WHOLE
                pairs.append((dims[d], to))
        reduced = [d for d in reduced if d != WHOLE]
        if group == target and not reduced and all(a == b for a, b in pairs):
            return
        self.edges.append(Edge(group, target, tuple(pairs), tuple(reduced), x, out, self.times[node.id], node.id, k, node.backward))

    def pass_on(self, source: int, target: int, node: Node | None, operand: int) -> None:
        """An edge between two values of the same shape that need not be sharded alike (state out → state in, initial carry)."""
        group, dims = self.place[source]
        other, other_dims = self.place[target]
        pairs = tuple(zip(dims, other_dims, strict=True))
        if group == other and all(a == b for a, b in pairs):
            return
        times = self.times[node.id] if node else 1
        self.edges.append(Edge(group, other, pairs, (), source, source, times, node.id if node else -1, operand))

    def control(self, node: Node) -> None:
        for body in node.bodies:
            for number in [*body.inputs, *body.consts]:
                self.fresh(number)
        for link in node.links:
            if link.kind in (LinkKind.XS, LinkKind.CONST):
                self.bind(link.source, link.target, 1 if link.kind is LinkKind.XS else 0, node)
        for body in node.bodies:
            self.visit(body)
        for number in node.outputs:
            self.fresh(number)
        for link in node.links:
            if link.kind in (LinkKind.CARRY, LinkKind.FINAL):
                self.bind(link.source, link.target, 0, node)
            elif link.kind is LinkKind.YS:
                self.bind(link.target, link.source, 1, node, outward=True)
        for link in node.links:
            if link.kind is LinkKind.INIT:
                self.pass_on(link.source, link.target, node, -1)

    def bind(self, outer: int, inner: int, stacked: int, node: Node, *, outward: bool = False) -> None:
        """One array seen from outside and inside a loop: united, or an edge where that contradicts, in the direction that it passes."""
        if stacked:  # nothing is gained by splitting the loop dimension: each trip needs one slice, whole
            self.forbid(outer, 0)
        rank = len(self.values[inner].shape)
        if not self.unite(outer, inner, [(i + stacked, i) for i in range(rank)]):
            group, dims = self.place[outer]
            other, other_dims = self.place[inner]
            pairs = list(zip(dims, (WHOLE,) * stacked + other_dims, strict=True))
            if outward:
                group, other, pairs = other, group, [(b, a) for a, b in pairs]
            self.edges.append(Edge(group, other, tuple(pairs), (), outer, outer, self.times[node.id], node.id))

    def forbid(self, number: int, dim: int) -> None:
        """No mesh axis on this dimension of a value: its group dimension is closed if nothing else uses it."""
        group, dims = self.place[number]
        if dims[dim] != WHOLE:
            self.groups[group].sizes[dims[dim]] = 1

    # ------------------------------------------------------------------------------------------------------------ finishing

    def finish(self) -> Groups:
        edges = [e for e in map(self.renamed, self.edges) if not _is_free(e)]
        operations = [self.operation(node, rule) for node, rule in self.raw_operations]
        operations = self.share_operands(operations, edges)
        pinned: dict[int, list] = {}
        for number, node in self.pinned:
            pinned.setdefault(self.place[number][0], []).append((number, node))
        return Groups(self.graph, self.groups, self.place, edges, operations, self.rules, self.times, pinned)

    def share_operands(self, operations: list[Operation], edges: list[Edge]) -> list[Operation]:
        """A value that several operations read in one pass is resharded once for all of them: a group between it and them."""
        readers: dict[tuple[int, bool], list[Operation]] = {}
        for op in operations:
            for operand in op.operands:
                readers.setdefault((operand.value, op.node.backward), []).append(op)
        views: dict[tuple[int, bool], int] = {}
        for key in (k for k, reading in readers.items() if len(reading) > 1 and self.values[k[0]].shape):
            number, backward = key
            group, dims = self.place[number]
            if not self.groups[group].sizes:
                continue
            open_dims = [d for d in dims if d != WHOLE]
            view = Group(next(self.ids), [self.groups[group].sizes[d] for d in open_dims])
            self.groups[view.id] = view
            views[key] = view.id
            pairs = tuple((d, open_dims.index(d) if d != WHOLE else WHOLE) for d in dims)
            first = readers[key][0]
            edges.append(Edge(group, view.id, pairs, (), number, number, first.times, -1, -1, backward))

        def viewed(op: Operation, operand: Operand) -> Operand:
            view = views.get((operand.value, op.node.backward))
            if view is None:
                return operand
            open_dims = [d for d, _ in operand.dims if d != WHOLE]
            dims = tuple((open_dims.index(d) if d != WHOLE else WHOLE, f) for d, f in operand.dims)
            return Operand(operand.value, view, dims)

        return [dataclasses.replace(op, operands=tuple(viewed(op, o) for o in op.operands)) for op in operations]

    def renamed(self, edge: Edge) -> Edge:
        source, source_map = self.resolve(edge.source)
        target, target_map = self.resolve(edge.target)
        pairs = tuple((_renamed(source_map, a), _renamed(target_map, b)) for a, b in edge.dims)
        reduced = tuple(_renamed(source_map, d) for d in edge.reduced)
        return dataclasses.replace(edge, source=source, target=target, dims=pairs, reduced=reduced)

    def resolve(self, group: int) -> tuple[int, dict[int, int] | None]:
        """Where a united group has gone, and how its dimensions are called there."""
        mapping: dict[int, int] | None = None
        while group in self.remap:
            group, step = self.remap[group]
            mapping = dict(step) if mapping is None else {d: step[m] for d, m in mapping.items()}
        return group, mapping

    def operation(self, node: Node, rule: OpRule) -> Operation:
        sizes = shardable_factors(rule, node.eqn)
        operands = [self.operand(x, rule.operands[k]) for k, x in enumerate(node.inputs) if not isinstance(x, Literal)]
        results = [self.operand(x, spec) for x, spec in zip(node.outputs, rule.results, strict=True)]
        return Operation(node, rule, tuple(sizes.items()), tuple(operands), tuple(results), self.times[node.id])

    def operand(self, number: int, spec) -> Operand:
        group, dims = self.place[number]
        return Operand(number, group, tuple((d, f[0] if f else "") for d, f in zip(dims, spec, strict=True)))


def _renamed(mapping: dict[int, int] | None, dim: int) -> int:
    return dim if mapping is None or dim == WHOLE else mapping[dim]


def _partners(node: Node, rule: OpRule, k: int, operands: int) -> list[int]:
    """The results that operand ``k`` passes into: all (split), or its own (sort, barrier)."""
    if operands == 1:
        return list(node.outputs)
    same = [o for o, s in zip(node.outputs, rule.results, strict=True) if s == rule.operands[k]] or [node.outputs[0]]
    return [same[min(k, len(same) - 1)]]


def _is_free(edge: Edge) -> bool:
    return edge.source == edge.target and not edge.reduced and all(a == b for a, b in edge.dims)
