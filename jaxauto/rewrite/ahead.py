"""Operations of the backward pass that a scheduler could start long before their place, and what to hold them to: for ``order.py``.

The cotangent of a sum of skips is there before the backward pass of all that is summed. XLA:TPU multiplies it by several layers' matrices
at once, as soon as it can: each product is as large as a layer's activations, and none is read until its layer's turn has come. Such an
operation waits for what the one before it has read, which is written anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from jaxauto.core import Graph, Node
from jaxauto.rewrite.program import Program

_FAR = 2  # operations in a row between where one could start and its place: q, k and v of an attention may start one early
_SMALL = 1 << 20  # bytes: where no more is made early no harm is done


class Ahead:
    """Of a graph whose nodes are gone through in order."""

    def __init__(self, program: Program, graph: Graph, operations: Sequence[str]):
        """``operations``: primitives that are never fused into what reads them."""
        self.program, self.operations = program, frozenset(operations)
        self.steps = self._steps(graph)
        self.depth: dict[int, int] = {}  # value → operations in a row that it waits for
        self.latest: tuple[int, int] | None = None  # what a step has read that waits for the most: how much, the value

    def held_to(self, node: Node, names: Mapping[int, int]) -> list[int]:
        """What a step reads that could be read long before, and what an earlier step has read; nothing where it could not.

        Args:
          names: values that have passed barriers → what they are called now.
        """
        if node.id not in self.steps or self.program.values[node.outputs[0]].nbytes <= _SMALL:
            return []
        depth = {x: self.depth.get(names.get(x, x), 0) for x in node.inputs if isinstance(x, int) and self._is_array(x)}
        deepest = max(depth.values(), default=0)
        if self.latest is not None and 0 < deepest <= self.latest[0] - _FAR:
            return [max((x for x in depth if depth[x] == deepest), key=self._bytes), self.latest[1]]
        if depth and (self.latest is None or deepest >= self.latest[0]):
            self.latest = deepest, max((x for x in depth if depth[x] == deepest), key=self._bytes)
        return []

    def passed(self, node: Node) -> None:
        """A node is there, with the names that it reads by."""
        depth = max((self.depth.get(x, 0) for x in node.inputs if isinstance(x, int)), default=0)
        self.depth.update(dict.fromkeys(node.outputs, depth + self._is_operation(node)))

    def _is_operation(self, node: Node) -> bool:
        return bool(node.bodies) or node.prim in self.operations

    def _steps(self, graph: Graph) -> set[int]:
        """Operations of the backward pass that others of it wait for: no weight's gradient is."""
        steps: set[int] = set()
        read: set[int] = set()  # by an operation to come, or by what it reads
        for node in reversed(graph.nodes):
            awaited = node.backward and not read.isdisjoint(node.outputs)
            if awaited and self._is_operation(node):
                steps.add(node.id)
            if node.backward and node.prim == "optimization_barrier":
                read.update(x for x, out in zip(node.inputs, node.outputs, strict=True) if out in read and isinstance(x, int))
            elif awaited or (node.backward and self._is_operation(node)):
                read.update(x for x in node.inputs if isinstance(x, int))
        return steps

    def _is_array(self, number: int) -> bool:
        value = self.program.values[number]
        return bool(value.shape) and jnp.issubdtype(value.dtype, jnp.floating)

    def _bytes(self, number: int) -> float:
        return self.program.values[number].nbytes
