"""Which values between blocks to make again (``reruns.py``) so that a program takes less memory: two-deep recomputation.

Of the program with everything recomputed the live bytes at each position are known; making a value again takes it off between the passes
and puts it back from its rerun to its last reader, with what the rerun itself needs on top. Under a limit M, in the order of the forward
pass, a value is left to be made again if the live bytes stay ≤ M while the stretch it belongs to goes backward   ``_within``
The earlier a stretch, the later and the emptier the memory that it goes backward in, the longer it may be. M is the least for which all of
the program then keeps to M, by bisection                                                                       ``_least``
What M allows to keep is kept, the dearest per byte first                                                       ``_spared``
Answers are offered for the memory there is, where the least leaves some, and for limits below it               ``nestings``
Bytes are those of one device without a mesh: activations shrink about alike under one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxauto.blocks import Block
from jaxauto.core import Graph, Node
from jaxauto.cost.liveness import Buffers, live_bytes
from jaxauto.graph import value_bytes, walk
from jaxauto.reruns import behind, inside

_MOST = 128  # values that are thought of, the largest
_SMALL = 0.01  # of the largest: not worth it
_BISECTIONS = 10
_SHARES = (0.5, 0.0)  # of what could be saved: limits to offer answers for
_NEAR = 0.99  # of the room there is: bytes are those without a mesh
_GAIN = 0.01  # of the peak: less is no gain


@dataclass(frozen=True)
class _Value:
    """A value that could be made again. Positions are those of ``Buffers``.

    Attributes:
      bytes_: of it, of a scan all stacks that only the backward pass reads.
      left: its last reader in the forward pass; back: the first in the backward pass; done: the last.
      rise: bytes that making it takes on top of what it is made from, itself included. seconds: that it takes.
      above: those of the others that it is made from. reads: (bytes, last position, those of values that must live on for it).
    """

    number: int
    bytes_: float
    left: int
    back: int
    done: int
    rise: float
    seconds: float
    above: tuple[int, ...]
    reads: tuple[tuple[float, int], ...]


def nestings(
    blocks: Sequence[Block],
    kept: Mapping[int, frozenset[int]],
    graph: Graph,
    buffers: Buffers,
    seconds: Callable[[Node], float],
    room: float = 1.0,
) -> list[frozenset[int]]:
    """Sets of values to make again, from the least change to the least memory.

    Args:
      blocks: of the step as written, and what each keeps.
      graph: the step rewritten so. buffers: its buffers.
      seconds: what running a node once more takes.
      room: the share of its memory that there is: the first of the sets is for that much.
    """
    live = live_bytes(buffers, buffers.bytes_)
    values = _Survey(blocks, graph, buffers, live).values(kept, seconds)
    if not values:
        return []
    peak = float(live.max())
    least, _ = _least(values, live)
    found: list[frozenset[int]] = []
    limits = [room * _NEAR * peak, *(least + share * (peak - least) for share in _SHARES)]
    for limit in (limit for limit in limits if least <= limit <= limits[0] or limit == limits[-1]):
        chosen = _spared(values, live, limit)
        if chosen is not None and limit < peak * (1 - _GAIN) and (answer := frozenset(v.number for v in chosen)) not in found:
            found.append(answer)
    return found


# --------------------------------------------------------------------------------------------------------------- the values


class _Survey:
    """The values between the blocks of a program, read off it as it is rewritten."""

    def __init__(self, blocks: Sequence[Block], graph: Graph, buffers: Buffers, live: np.ndarray):
        self.blocks, self.graph, self.buffers, self.live = blocks, graph, buffers, live
        self.nodes = {node.id: node for node in walk(graph)}
        self.ends = dict(zip(buffers.ids.tolist(), buffers.end.tolist(), strict=True))
        sizes = self.sizes()
        smallest = _SMALL * max(sizes.values(), default=0.0)
        large = sorted((v for v in sizes if sizes[v] >= smallest), key=lambda v: -sizes[v])[:_MOST]
        self.large = {v: sizes[v] for v in large}

    def values(self, kept: Mapping[int, frozenset[int]], seconds: Callable[[Node], float]) -> list[_Value]:
        """In the order of the forward pass."""
        gone = inside(self.blocks, kept)
        found: list[_Value] = []
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
                sizes |= {v: value_bytes(values[v]) for v in block.outputs if v not in left}
                continue
            forward = block.scan[0]
            place = forward.bodies[0].outputs.index(block.residuals[0], forward.num_carry)
            sizes[forward.outputs[place]] = sum(value_bytes(values[y]) for y in self.late_stacks(self.nodes[forward.id]))
        return sizes

    def late_stacks(self, scan: Node) -> list[int]:
        stacks = scan.outputs[scan.num_carry :]
        return [y for y in stacks if y not in self.graph.outputs and all(u.backward for u in self.graph.values[y].users)]

    def value(self, block: Block, node: Node, number: int, gone: set[int], seconds: Callable[[Node], float]) -> _Value | None:
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
        return _Value(
            number=number,
            bytes_=self.large[number],
            left=max([at, *(position[u.id] for u in users if not u.backward)]),
            back=min(begin.get(u.id, position[u.id]) for u in late),
            done=max(position[u.id] for u in late),
            rise=max(float(self.live[start : at + 1].max() - self.live[start]), self.large[number]),
            seconds=sum(seconds(n) for n in again),
            above=tuple(x for x in reads if x in self.large),
            reads=tuple((value_bytes(values[x]), self.ends[x]) for x in reads if x not in self.large and self.ends.get(x, 0) > 0),
        )


# --------------------------------------------------------------------------------------------------------------- the choice


def _profile(chosen: Sequence[_Value], live: np.ndarray) -> tuple[np.ndarray, dict[int, tuple[int, int]]]:
    """Live bytes with ``chosen`` made again, and when the stretch of each goes backward: (rerun, last reader)."""
    stretch: dict[int, list[_Value]] = {}
    for value in chosen:
        together = [value]
        for x in value.above:
            if x in stretch and stretch[x] is not together:
                together = stretch[x] + [v for v in together if v not in stretch[x]]
        for v in together:
            stretch[v.number] = together
    steps = np.zeros(len(live) + 1)
    spikes: list[tuple[int, float]] = []
    when: dict[int, tuple[int, int]] = {}
    for together in {id(t): t for t in stretch.values()}.values():
        back = min(v.back for v in together)
        span = back, max(v.done for v in together)
        before = highest = 0.0
        for v in together:
            when[v.number] = span
            if v.done > v.left:
                steps[v.left + 1] -= v.bytes_
                steps[v.done + 1] += v.bytes_
            steps[back] += v.bytes_
            steps[max(v.done, back) + 1] -= v.bytes_
            highest = max(highest, before + v.rise)
            before += v.bytes_
            for bytes_, last in v.reads:
                if last < back:
                    steps[last + 1] += bytes_
                    steps[back + 1] -= bytes_
        spikes.append((back, highest - before))
    found = live + np.cumsum(steps)[:-1]
    for at, more in spikes:
        found[at] += max(more, 0.0)
    return found, when


def _within(values: Sequence[_Value], live: np.ndarray, limit: float) -> list[_Value] | None:
    """What to make again under a limit; None if that does not do."""
    chosen: list[_Value] = []
    for value in values:
        after, when = _profile([*chosen, value], live)
        back, done = when[value.number]
        if after[back : done + 1].max() <= limit:
            chosen.append(value)
    return chosen if _profile(chosen, live)[0].max() <= limit else None


def _least(values: Sequence[_Value], live: np.ndarray) -> tuple[float, list[_Value]]:
    low, high = 0.0, float(live.max())
    best: list[_Value] = []
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        chosen = _within(values, live, middle)
        if chosen is None:
            low = middle
        else:
            high, best = middle, chosen
    return high, best


def _spared(values: Sequence[_Value], live: np.ndarray, limit: float) -> list[_Value] | None:
    chosen = _within(values, live, limit)
    if chosen is None:
        return None
    for value in sorted(chosen, key=lambda v: -v.seconds / v.bytes_):
        less = [v for v in chosen if v is not value]
        if _profile(less, live)[0].max() <= limit:
            chosen = less
    return chosen
