"""Which values between blocks to make again (``reruns.py``), and how deep, so that a program takes less memory.

What there is to decide is read off the program as it is with everything recomputed                              ``_Survey``
It is decided by Rotor's dynamic programme (``depths.py``) for the memory there is, where the least leaves some, and for limits below it.
Bytes are those of one device without a mesh: activations shrink about alike under one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxauto.blocks import Block
from jaxauto.core import Graph, Node
from jaxauto.cost.liveness import Buffers, live_bytes
from jaxauto.graph import walk
from jaxauto.reruns import Remade, behind, inside
from jaxauto.solve.depths import Depth, Depths, Value

_MOST = 128  # values that are thought of, the largest
_SMALL = 0.002  # of the peak: not worth it
_SHARES = (0.5, 0.2)  # of what could be saved: limits to offer answers for, beside the least
_NEAR = 0.99  # of the room there is: bytes are those without a mesh
_GAIN = 0.01  # of the peak: less is no gain
_BISECTIONS = 6
_FREE, _GROWTH = 5_000, 2  # nodes that may run again in any case; those of the program, how often


def nestings(
    blocks: Sequence[Block],
    kept: Mapping[int, frozenset[int]],
    graph: Graph,
    buffers: Buffers,
    seconds: Callable[[Node], float],
    room: float = 1.0,
) -> Iterator[Remade]:
    """Values to make again, from the least change to the least memory.

    Args:
      blocks: of the step as written, and what each keeps.
      graph: the step rewritten so. buffers: its buffers.
      seconds: what running a node once more takes.
      room: the share of its memory that there is: the first of the answers is for that much.
    """
    live = live_bytes(buffers, buffers.bytes_)
    values = _Survey(blocks, graph, buffers, live).values(kept, seconds)
    if not values:
        return
    depths, peak = Depths(values, live), float(live.max())
    most = max(_FREE, _GROWTH * sum(1 for _ in walk(graph)))
    found: set[Remade] = set()
    for depth in _answers(depths, peak, room * _NEAR * peak, most):
        answer = frozenset((depth or {}).items())
        if answer and answer not in found and depths.nodes(dict(answer)) <= most:
            found.add(answer)
            yield answer


def _answers(depths: Depths, peak: float, room: float, most: int) -> Iterator[Depth | None]:
    least = depths.least
    for limit in (room, *(least + share * (peak - least) for share in _SHARES)):
        if least <= limit <= room and limit < peak * (1 - _GAIN):
            yield depths.within(limit)
    yield _leanest(depths, peak, most)


def _leanest(depths: Depths, peak: float, most: int) -> Depth | None:
    """The least memory for which no more than ``most`` nodes run again, by bisection."""
    best = depths.leanest()
    if best is None or depths.nodes(best) <= most:
        return best
    low, high, best = depths.least, peak, None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        depth = depths.at_most(middle)
        if depth is None or depths.nodes(depth) > most:
            low = middle
        else:
            high, best = middle, depth
    return best


# --------------------------------------------------------------------------------------------------------------- the values


class _Survey:
    """The values between the blocks of a program, read off it as it is rewritten."""

    def __init__(self, blocks: Sequence[Block], graph: Graph, buffers: Buffers, live: np.ndarray):
        self.blocks, self.graph, self.buffers, self.live = blocks, graph, buffers, live
        self.nodes = {node.id: node for node in walk(graph)}
        self.ends = dict(zip(buffers.ids.tolist(), buffers.end.tolist(), strict=True))
        sizes = self.sizes()
        smallest = _SMALL * float(live.max())
        large = sorted((v for v in sizes if sizes[v] >= smallest), key=lambda v: -sizes[v])[:_MOST]
        self.large = {v: sizes[v] for v in large}

    def values(self, kept: Mapping[int, frozenset[int]], seconds: Callable[[Node], float]) -> list[Value]:
        """In the order of the forward pass."""
        gone = inside(self.blocks, kept)
        found: list[Value] = []
        for block in self.blocks:
            for node in block.forward if block.scan is None else block.scan[:1]:
                for number in node.outputs:
                    value = self.value(block, node, number, gone, seconds) if number in self.large else None
                    found += [] if value is None else [value]
        return sorted(found, key=lambda v: v.number)

    def sizes(self) -> dict[int, float]:
        """What could be made again → bytes. Of a scan its first residual stands for all stacks that only the backward pass reads."""
        values, sizes = self.graph.values, {}
        for block in self.blocks:
            if block.scan is None:
                left = {x for x in block.graph.outputs if isinstance(x, int)}
                sizes |= {v: values[v].nbytes for v in block.outputs if v not in left}
                continue
            forward = block.scan[0]
            place = forward.bodies[0].outputs.index(block.residuals[0], forward.num_carry)
            sizes[forward.outputs[place]] = sum(values[y].nbytes for y in self.late_stacks(self.nodes[forward.id]))
        return sizes

    def late_stacks(self, scan: Node) -> list[int]:
        stacks = scan.outputs[scan.num_carry :]
        return [y for y in stacks if y not in self.graph.outputs and all(u.backward for u in self.graph.values[y].users)]

    def value(self, block: Block, node: Node, number: int, gone: set[int], seconds: Callable[[Node], float]) -> Value | None:
        values, position, begin = self.graph.values, self.buffers.position, self.buffers.loop_start
        made = [number] if block.scan is None else self.late_stacks(self.nodes[node.id])
        users = [u for y in made for u in values[y].users if u.id in position]
        late = [u for u in users if u.backward]
        if not late:
            return None
        again, reads = behind(block.graph, number, gone | {number})
        at = position[node.id]
        ready = [position[p.id] for x in reads if (p := block.graph.values[x].producer) is not None and p.id in position]
        start = min(max(ready, default=0), at - 1)
        return Value(
            number=number,
            bytes_=self.large[number],
            left=max([at, *(position[u.id] for u in users if not u.backward)]),
            back=min(begin.get(u.id, position[u.id]) for u in late),
            done=max(position[u.id] for u in late),
            rise=max(float(self.live[start : at + 1].max() - self.live[start]), self.large[number]),
            seconds=sum(seconds(n) for n in again),
            nodes=len(again),
            above=tuple(x for x in reads if x in self.large),
            reads=tuple((x, values[x].nbytes, self.ends[x]) for x in reads if x not in self.large and self.ends.get(x, 0) > 0),
        )
