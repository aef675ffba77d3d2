"""What a compiler materialises: buffers, when they live, and the bytes that move between them and HBM.

The rules are those of XLA's instruction fusion, in outline: views and cheap elementwise equations are recomputed inside their consumers;
an expensive one (a transcendental, random bits) is fused forward while it has one user and gets a buffer where it fans out; dots,
convolutions, gathers, loops and reductions write buffers and, reductions excepted, read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxauto import compat
from jaxauto.core import Graph, Kind, LinkKind, Node, OpRule, Value

_WRITES = frozenset({Kind.DOT, Kind.CONV, Kind.GATHER, Kind.SCATTER, Kind.SCAN, Kind.OPAQUE, Kind.CONTROL, Kind.REDUCE})
_READS = _WRITES - {Kind.REDUCE}
_OPERATIONS = frozenset({Kind.DOT, Kind.CONV, Kind.GATHER, Kind.SCATTER})
_COSTLY = frozenset({Kind.EXPENSIVE, Kind.RANDOM})
_MAX_ROOTS = 32


@dataclass(eq=False)
class Buffers:
    """Materialised values of a program and the positions (program order, loops nested) between which each is alive.

    Attributes:
      ids: value ids. bytes_: whole, unsharded. start, end: first and last position, inclusive. All ``[n]``.
      reads: how often fused equations read each buffer from HBM, for one run of its graph; written: 1 where they write it. What operations
        (dots, convolutions, gathers) read and write is theirs to charge.
      is_input: an input of the whole program: alive throughout.
      length: number of positions; position: node id → position of the node (of a loop: after its body).
      read_at: node id → the values that fused equations read from HBM where the node writes its result. Slices and constants of a loop go by
        their ids in the body. stored: all values that get a buffer written, those that reuse a donated input too.
    """

    ids: np.ndarray
    bytes_: np.ndarray
    start: np.ndarray
    end: np.ndarray
    reads: np.ndarray
    written: np.ndarray
    is_input: np.ndarray
    length: int
    position: dict[int, int] = field(default_factory=dict)
    loop_start: dict[int, int] = field(default_factory=dict)
    read_at: dict[int, list[int]] = field(default_factory=dict)
    stored: frozenset[int] = frozenset()


def find_buffers(graph: Graph, rules: dict[int, OpRule], aliased: frozenset[int] = frozenset()) -> Buffers:
    """The buffers of a program.

    Args:
      rules: node id → rule, control flow excepted.
      aliased: output values that reuse the buffer of a donated input.
    """
    return _Fusion(graph, rules, aliased).run()


class _Fusion:
    def __init__(self, graph: Graph, rules: dict[int, OpRule], aliased: frozenset[int]):
        self.graph, self.rules, self.aliased = graph, rules, aliased
        self.values = graph.values
        self.virtual: dict[int, frozenset[int]] = {}  # value → roots it is recomputed from
        self.costly: set[int] = set()
        self.reads: dict[int, int] = {}
        self.start: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.position: dict[int, int] = {}
        self.loop_start: dict[int, int] = {}
        self.read_at: dict[int, list[int]] = {}
        self.clock = 0
        self.unwritten = {*graph.inputs, *graph.consts}

    def kind(self, node: Node) -> Kind:
        return self.rules[node.id].kind if node.id in self.rules else Kind.CONTROL

    def run(self) -> Buffers:
        outputs = {x for x in self.graph.outputs if isinstance(x, int)}
        for number in [*self.graph.inputs, *self.graph.consts]:
            self.start[number] = 0
        self.visit(self.graph, outputs)
        end = self.clock
        for number in outputs:
            for root in self.roots(number):
                self.touch(root, end)
        ids = np.array([n for n in self.start if n not in self.aliased], int)
        inputs = {*self.graph.inputs, *self.graph.consts}
        is_input = np.array([n in inputs for n in ids], bool)
        last = np.array([end if n in inputs else self.last.get(n, self.start[n]) for n in ids], int)
        return Buffers(
            ids=ids,
            bytes_=np.array([value_bytes(self.values[n]) for n in ids], float),
            start=np.array([self.start[n] for n in ids], int),
            end=last,
            reads=np.array([self.reads.get(n, 0) for n in ids], float),
            written=np.array([n not in self.unwritten for n in ids], float),
            is_input=is_input,
            length=end + 1,
            position=self.position,
            loop_start=self.loop_start,
            read_at=self.read_at,
            stored=frozenset(n for n in self.start if n not in self.unwritten),
        )

    def visit(self, graph: Graph, outputs: set[int]) -> None:
        for node in graph.nodes:
            if node.bodies:
                self.loop(node)
                continue
            self.clock += 1
            self.position[node.id] = self.clock
            kind = self.kind(node)
            if kind in _READS:  # operations are charged for their operands where their strategy is known
                for x in node.inputs:
                    if not isinstance(x, int):
                        continue
                    if kind in _OPERATIONS:
                        self.keep_alive(x, self.clock)
                    else:
                        self.read(x, self.clock)
                        self.read_at.setdefault(node.id, []).extend(self.roots(x))
            for number in node.outputs:
                self.define(node, number, kind, number in outputs)

    def define(self, node: Node, number: int, kind: Kind, is_output: bool) -> None:
        value = self.values[number]
        operands = [x for x in node.inputs if isinstance(x, int)]
        roots = frozenset().union(*(self.roots(x) for x in operands)) if operands else frozenset()
        costly = kind in _COSTLY or (kind not in _WRITES and any(x in self.virtual and x in self.costly for x in operands))
        if costly:
            self.costly.add(number)
        if kind in _WRITES or is_output or self.fans_out(value, roots, costly) or any(self.kind(u) in _READS for u in value.users):
            if kind not in _READS:
                for root in roots:
                    self.read_root(root, self.clock)
                self.read_at.setdefault(node.id, []).extend(roots)
            self.start[number] = self.clock
            self.last[number] = self.clock
            if kind in _OPERATIONS:
                self.unwritten.add(number)
        else:
            self.virtual[number] = roots

    def fans_out(self, value: Value, roots: frozenset[int], costly: bool) -> bool:
        if len(value.users) < 2:
            return False
        wide = sum(2 * self.values[r].aval.size >= value.aval.size for r in roots)
        return costly or wide > 1 or len(roots) > _MAX_ROOTS

    def roots(self, number: int) -> frozenset[int]:
        return self.virtual.get(number, frozenset((number,)))

    def touch(self, number: int, at: int) -> None:
        if number in self.start:
            self.last[number] = max(self.last.get(number, 0), at)

    def read_root(self, root: int, at: int) -> None:
        self.reads[root] = self.reads.get(root, 0) + 1
        self.touch(root, at)

    def read(self, number: int, at: int) -> None:
        for root in self.roots(number):
            self.read_root(root, at)

    def keep_alive(self, number: int, at: int) -> None:
        for root in self.roots(number):
            self.touch(root, at)

    def loop(self, node: Node) -> None:
        """A body's positions come before its node's own; what it reads from outside is alive until then."""
        self.clock += 1
        begin = self.loop_start[node.id] = self.clock
        stacked = {link.target for link in node.links if link.kind is LinkKind.YS}
        for x in node.inputs:
            if isinstance(x, int):
                self.read(x, begin)
        for body in node.bodies:
            for number in body.inputs:
                self.start[number] = begin
                self.unwritten.add(number)
            self.visit(body, {x for x in body.outputs if isinstance(x, int)})
            for x in body.outputs:
                if isinstance(x, int):
                    self.read(x, self.clock)
            shared = {link.target for link in node.links if link.kind in (LinkKind.CONST, LinkKind.XS)}
            for number in body.inputs:  # a constant is the outer buffer; a slice of xs is read in place
                if number in shared:
                    self.start.pop(number, None)
                else:
                    self.touch(number, self.clock)
        self.clock += 1
        self.position[node.id] = self.clock
        for x in node.inputs:
            if isinstance(x, int):
                for root in self.roots(x):
                    self.touch(root, self.clock)
        for number in node.outputs:
            self.start[number] = begin if number in stacked else self.clock
            self.last[number] = self.clock


def value_bytes(value: Value) -> float:
    return float(value.aval.size) * compat.itemsize(value.dtype)


def live_bytes(buffers: Buffers, sizes: np.ndarray) -> np.ndarray:
    """Live bytes at each position, for buffers of ``sizes`` bytes."""
    steps = np.zeros(buffers.length + 1)
    np.add.at(steps, buffers.start, sizes)
    np.add.at(steps, buffers.end + 1, -sizes)
    return np.cumsum(steps)[:-1]
