"""What to drop first: the residuals of one block in the order of what it costs to make them again, for each byte they free.

Greedy: of the values still kept, the one goes next whose recomputation, given what is kept beside it, takes the fewest seconds per byte.
That price is kept monotone along the way (the lower hull), so a threshold on it names one set for each block. Blocks of equal structure
(layers written one after another) share one answer. For exchanges between blocks see ``chain.py``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxauto.blocks import Block, runs_once
from jaxauto.core import Node
from jaxauto.graph import value_bytes

_SMALL = 0.005  # of a block's residual bytes: less is not worth a decision, and goes last
_LAZY = 400  # residuals up to which prices are brought up to date; beyond, the first price counts


@dataclass(frozen=True)
class Drop:
    """One step: ``kept`` after ``value`` is dropped, at ``price`` seconds per byte, never below that of the step before."""

    price: float
    value: int
    bytes_: float
    kept: frozenset[int]


def frontier(block: Block, node_seconds: Callable[[Node], float]) -> list[Drop]:
    """The steps from all residuals to none.

    Args:
      node_seconds: what running a node once more takes, unsharded.
    """
    return _Greedy(block, node_seconds).run()


class _Greedy:
    def __init__(self, block: Block, node_seconds: Callable[[Node], float]):
        values = block.graph.values
        self.made: Mapping[int, Node] = {out: node for node in block.forward for out in node.outputs if not runs_once(node, block.graph)}
        self.fixed = set(block.outputs)
        self.seconds = {node.id: node_seconds(node) for node in block.forward}
        self.inputs = {node.id: [x for x in node.inputs if isinstance(x, int)] for node in block.forward}
        self.kept = {v for v in block.residuals if v in self.made and v not in self.fixed}
        self.bytes_ = {v: value_bytes(values[v]) * block.count for v in self.kept}
        self.small = max(1.0, _SMALL * sum(self.bytes_.values()))
        self.count = block.count
        self.again: set[int] = set()  # nodes that are recomputed so far

    def run(self) -> list[Drop]:
        heap = [(self.price(v), v) for v in sorted(self.kept)]
        heapq.heapify(heap)
        steps: list[Drop] = []
        highest = 0.0
        while heap:
            price, value = heapq.heappop(heap)
            if len(self.bytes_) <= _LAZY:
                price = self.price(value)
                if heap and price > heap[0][0]:  # dearer than it was when others were kept
                    heapq.heappush(heap, (price, value))
                    continue
            highest = max(highest, price)
            self.kept.discard(value)
            self.again |= self.needed(value)
            steps.append(Drop(highest, value, self.bytes_[value], frozenset(self.kept)))
        return steps

    def price(self, value: int) -> float:
        """Seconds per byte to make ``value`` again, with the nodes that run again anyway for nothing."""
        if self.bytes_[value] < self.small:
            return math.inf
        return self.count * sum(self.seconds[n] for n in self.needed(value)) / self.bytes_[value]

    def needed(self, value: int) -> set[int]:
        """Nodes that have to run again for ``value`` and do not yet."""
        found: set[int] = set()
        wanted = [value]
        while wanted:
            node = self.made.get(wanted.pop())
            if node is None or node.id in self.again or node.id in found:
                continue
            found.add(node.id)
            wanted += [x for x in self.inputs[node.id] if x not in self.kept and x not in self.fixed]
        return found


def form(block: Block) -> tuple:
    """What blocks of equal structure share: primitives, shapes and wiring, values by their place in the block."""
    values = block.graph.values
    place = {v: -k - 1 for k, v in enumerate(block.inputs)}
    rows = []
    for node in block.forward:
        wiring = tuple(place.get(x, 0) if isinstance(x, int) else None for x in node.inputs)
        for out in node.outputs:
            place[out] = len(place)
        rows.append((node.prim, wiring, tuple((values[o].shape, str(values[o].dtype)) for o in node.outputs)))
    ends = (tuple(place[v] for v in block.residuals), tuple(place.get(v, 0) for v in block.outputs))
    return (block.count, tuple(rows), ends)
