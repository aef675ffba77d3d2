"""XLA:CPU's order of a program, compiled as plans are: depth first (hlo_memory_scheduler.cc, ``DFSMemoryScheduler``).

What an instruction reads is made right before it. Of its operands those come first that have more readers behind them: the readers but one
of all that an operand is made of, counted once for each path and at most as many as there are instructions; then those of more bytes,
counted alike and at most as many as there are up to it when operands are visited in their own order. In a program of some size both are at
their most, and the operand comes first that is last in that order. Instructions are what is written: values that each reader makes for
itself are in all of them. Compiled schedules follow it to the last instruction, told from their own text.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import jax.numpy as jnp

from jaxauto.core import Graph, Node
from jaxauto.graph import BarrierEqn, walk


@dataclass(frozen=True)
class Written:
    """What of a program is written.

    Attributes:
      values: that are. virtual: those among them that fused readers make for themselves.
      reads: whether an operation reads the array that is written of a virtual value.
      also: value → what it is made of beside the operands of its equation.
    """

    values: Set[int]
    virtual: Set[int]
    reads: Callable[[Node, int], bool]
    also: Mapping[int, Sequence[int]]


def depth_first(graph: Graph, written: Written) -> dict[int, int]:
    """Node → its place in that order among those of its graph; what is not written stands before the first that needs it."""
    late = {x for node in walk(graph) if node.backward for x in node.outputs}
    found: dict[int, int] = {}
    for part in (graph, *(body for node in walk(graph) for body in node.bodies)):
        found.update({node.id: k for k, node in enumerate(_Order(part, written, late).run())})
    return found


class _Order:
    def __init__(self, graph: Graph, written: Written, late: Set[int]):
        self.graph, self.written, self.late = graph, written, late
        self.nodes = {node.id: node for node in graph.nodes}
        self.place = {node.id: k for k, node in enumerate(graph.nodes)}

    def run(self) -> list[Node]:
        made = [n for n in self.graph.nodes if self.is_instruction(n)]
        needs = {n.id: self.operands(n) for n in made}
        roots = [*dict.fromkeys(p for x in self.graph.outputs for p in self.fused([x]))]
        readers = Counter(p for operands in (*needs.values(), roots) for p in operands)
        extra: dict[int, int] = {}
        total: dict[int, float] = {}
        so_far = 0.0
        natural = _post_order(roots, needs)
        for n in natural:
            size = float(sum(self.graph.values[x].nbytes for x in self.nodes[n].outputs))
            so_far += size
            extra[n] = min(max(readers[n] - 1, 0) + sum(extra[p] for p in needs[n]), len(needs))
            total[n] = min(size + sum(total[p] for p in needs[n]), so_far)
        place = {n: k for k, n in enumerate(natural)}
        rank = lambda n: (-extra[n], -total[n], place[n])  # noqa: E731
        order = _post_order(sorted(roots, key=rank), {n: sorted(operands, key=rank) for n, operands in needs.items() if n in place})
        return self.with_virtual([self.nodes[n] for n in order])

    def is_instruction(self, node: Node) -> bool:
        return bool(node.bodies) or _is_barrier(node) or not self.written.values.isdisjoint(node.outputs)

    def operands(self, node: Node) -> tuple[int, ...]:
        """The instructions that one reads, in the order of its operands."""
        if _is_barrier(node):
            return tuple(dict.fromkeys(p for x in self.waits(node) for p in self.fused([x])))
        inputs = [x for x in node.inputs if isinstance(x, int)]
        return self.fused(inputs, {x for x in inputs if x in self.written.virtual and self.written.reads(node, x)})

    def fused(self, inputs: Iterable[object], whole: Set[int] = frozenset()) -> tuple[int, ...]:
        """What a fusion of ``inputs`` reads; ``whole``: which of them are read as they are written.

        It grows by that operand which was made last, and has what that is made of as its last operands (instruction_fusion.cc).
        """
        found: dict[int, None] = {}  # instructions and, as -1 - value, what is fused yet
        predicates: dict[int, None] = {}
        inside: list[tuple[int, int]] = []
        met: set[int] = set()

        def read(x: object) -> None:
            producer = self.graph.values[x].producer if isinstance(x, int) else None
            if producer is None or producer.id not in self.nodes or not isinstance(x, int):
                return
            if x in whole or producer.bodies or (x in self.written.values and x not in self.written.virtual):
                found.setdefault(producer.id)
            elif x not in met:
                met.add(x)
                found[-1 - x] = None
                heapq.heappush(inside, (-self.place[producer.id], x))

        for x in inputs:
            read(x)
        while inside:
            _, x = heapq.heappop(inside)
            del found[-1 - x]
            producer = self.graph.values[x].producer
            assert producer is not None
            if producer.prim == "optimization_barrier":
                read(producer.inputs[producer.outputs.index(x)])
                predicates.update({producer.id: None} if _is_barrier(producer) else {})
            else:
                for y in (*producer.inputs, *self.written.also.get(x, ())):
                    read(y)
        return (*found, *reversed(predicates))  # an earlier barrier's first: the later one selects what that has selected

    def waits(self, barrier: Node) -> list[int]:
        """What a barrier waits for: its last floating-point array, and those of the backward pass (``rewrite/apply.after_last``)."""
        floating = [x for x in barrier.inputs if isinstance(x, int) and jnp.issubdtype(self.graph.values[x].dtype, jnp.floating)]
        return [x for x in reversed(floating) if x in self.late or x == floating[-1]]  # all fused: see ``operands``

    def with_virtual(self, order: list[Node]) -> list[Node]:
        """``order`` with all other nodes, each where it is needed first; what nothing needs is last."""
        found: dict[int, Node] = {}
        for node in (*order, *self.graph.nodes):
            waiting = [node]
            while waiting:
                at = waiting[-1]
                if at.id in found:
                    waiting.pop()
                    continue
                producers = (self.graph.values[x].producer for x in at.inputs if isinstance(x, int))
                missing = [p for p in producers if p is not None and p.id in self.nodes and p.id not in found]
                if missing:
                    waiting += missing
                else:
                    found[at.id] = at
                    waiting.pop()
        return list(found.values())


def _is_barrier(node: Node) -> bool:
    """Whether XLA:CPU respects a barrier: it drops what the program has of them."""
    return isinstance(node.eqn, BarrierEqn)


def _post_order(roots: Iterable[int], needs: Mapping[int, Iterable[int]]) -> list[int]:
    """What ``roots`` need, each after what it needs itself, which is visited in its order."""
    found: dict[int, None] = {}
    opened: set[int] = set()
    stack = list(roots)[::-1]
    while stack:
        n = stack[-1]
        if n in found or n in opened:
            stack.pop()
            found.setdefault(n)
            continue
        opened.add(n)
        stack += [p for p in reversed(tuple(needs[n])) if p not in opened]
    return list(found)
