"""What to drop first: the residuals of one block in the order of what it costs to make them again, for each byte they free.

Greedy: of the values still kept, the one goes next whose recomputation, given what is kept beside it, takes the fewest seconds per byte.
That price is kept monotone along the way (the lower hull), so a threshold on it names one set for each block. Blocks of equal structure
(layers written one after another) share one answer. For exchanges between blocks see ``chain.py``.

What differentiation saves need not be what is best saved: of a norm it is the centred rows in float32, made elementwise of half as many
bytes. Such a residual has a *stand-in*: it can be dropped for that narrower value, which is then kept, and dropped in its turn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jaxauto.blocks import Block, runs_once
from jaxauto.core import ELEMENTWISE, Kind, Node, Value

_SMALL = 0.005  # of a block's residual bytes: less is not worth a decision, and goes last
_LAZY = 400  # residuals up to which prices are brought up to date; beyond, the first price counts


@dataclass(frozen=True)
class Drop:
    """One step: ``kept`` after ``value`` is dropped, at ``price`` seconds per byte, never below that of the step before.

    ``instead``: what is kept from now on in its place; ``bytes_``: what the step frees.
    """

    price: float
    value: int
    bytes_: float
    kept: frozenset[int]
    instead: int | None = None

    def of(self, alike: Mapping[int, int]) -> Drop:
        """The same step of a block of equal structure; ``alike``: value → its counterpart there."""
        kept = frozenset(alike[v] for v in self.kept)
        return Drop(self.price, alike[self.value], self.bytes_, kept, None if self.instead is None else alike[self.instead])


def frontier(block: Block, node_seconds: Callable[[Node], float], kind: Callable[[Node], Kind]) -> list[Drop]:
    """The steps from all residuals to none.

    Args:
      node_seconds: what running a node once more takes, unsharded.
      kind: of its equation.
    """
    return _Greedy(block, node_seconds, kind).run()


class _Greedy:
    def __init__(self, block: Block, node_seconds: Callable[[Node], float], kind: Callable[[Node], Kind]):
        values = block.graph.values
        self.made: Mapping[int, Node] = {out: node for node in block.forward for out in node.outputs if not runs_once(node, block.graph)}
        self.fixed = set(block.outputs)
        self.seconds = {node.id: node_seconds(node) for node in block.forward}
        self.inputs = {node.id: [x for x in node.inputs if isinstance(x, int)] for node in block.forward}
        self.kept = {v for v in block.residuals if v in self.made and v not in self.fixed}
        self.bytes_ = {v: values[v].nbytes * block.count for v in self.made}
        self.small = max(1.0, _SMALL * sum(self.bytes_[v] for v in self.kept))
        self.stand_in = {v: w for v in self.kept if (w := self._narrowest(v, values, kind)) is not None}
        self.lazy = len(self.kept) > _LAZY
        self.count = block.count
        self.again: set[int] = set()  # nodes that are recomputed so far

    def run(self) -> list[Drop]:
        heap = [(self.way(v)[0], v) for v in sorted(self.kept)]
        heapq.heapify(heap)
        steps: list[Drop] = []
        highest = 0.0
        while heap:
            price, value = heapq.heappop(heap)
            now, instead = self.way(value)
            if not self.lazy:
                price = now
                if heap and price > heap[0][0]:  # dearer than it was when others were kept
                    heapq.heappush(heap, (price, value))
                    continue
            highest = max(highest, price)
            self.kept.discard(value)
            freed = self.bytes_[value]
            if instead is not None:
                self.kept.add(instead)
                freed -= self.bytes_[instead]
                heapq.heappush(heap, (self.way(instead)[0], instead))
            self.again |= self.needed(value)
            steps.append(Drop(highest, value, freed, frozenset(self.kept), instead))
        return steps

    def way(self, value: int) -> tuple[float, int | None]:
        """(seconds per byte to make ``value`` again, with the nodes that run again anyway for nothing; what is kept instead)."""
        if self.bytes_[value] < self.small:
            return math.inf, None
        whole = self._seconds(self.needed(value)) / self.bytes_[value]
        instead = self.stand_in.get(value)
        if instead is None or instead in self.kept or self.made[instead].id in self.again:
            return whole, None
        partly = self._seconds(self.needed(value, instead)) / (self.bytes_[value] - self.bytes_[instead])
        return (partly, instead) if partly < whole else (whole, None)

    def _seconds(self, nodes: Iterable[int]) -> float:
        return self.count * sum(self.seconds[n] for n in nodes)

    def needed(self, value: int, instead: int | None = None) -> set[int]:
        """Nodes that have to run again for ``value`` and do not yet, if ``instead`` is kept as well."""
        found: set[int] = set()
        wanted = [value]
        while wanted:
            node = self.made.get(wanted.pop())
            if node is None or node.id in self.again or node.id in found:
                continue
            found.add(node.id)
            wanted += [x for x in self.inputs[node.id] if x not in self.kept and x not in self.fixed and x != instead]
        return found

    def _narrowest(self, value: int, values: Mapping[int, Value], kind: Callable[[Node], Kind]) -> int | None:
        """The stand-in of a residual: of what it is made of elementwise, the last of the fewest bytes. None: nothing is narrower."""
        found, at = value, value
        while (node := self.made.get(at)) is not None and kind(node) in ELEMENTWISE:
            wide = {x for x in self.inputs[node.id] if values[x].elements == values[value].elements and not _is_broadcast(values[x])}
            if len(wide) != 1:
                break
            (at,) = wide
            if at not in self.made or at in self.fixed:
                return None  # it is there in any case
            if self.bytes_[at] <= self.bytes_[found]:
                found = at
        return found if self.bytes_[found] < self.bytes_[value] and found not in self.kept else None


def _is_broadcast(value: Value) -> bool:
    return value.producer is not None and value.producer.prim == "broadcast_in_dim"


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
