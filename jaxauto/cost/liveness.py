"""Buffers: what a compiler materialises, and what is alive at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxauto import compat
from jaxauto.core import Graph, LinkKind, Node
from jaxauto.graph import FillEqn
from jaxauto.rewrite.for_gpu import fills_late


class Beside(NamedTuple):
    """What the fusion of a dot moves beside the dot's own operands and results, for one run.

    Attributes:
      reads, writes: (buffer, place of the operand or, after those, the result of the dot that it lies along, how often), those as wide as
        that alone.
      exposed: the share of these bytes that takes time where the dot is whole: what ``Buffers.reads`` and ``written`` have of them.
      lanes: by how much longer the dot takes than its flops.
    """

    reads: tuple[tuple[int, int, float], ...]
    writes: tuple[tuple[int, int, float], ...]
    exposed: float
    lanes: float


@dataclass(eq=False)
class Buffers:
    """Materialised values of a program and the positions (program order, loops nested) between which each is alive.

    Attributes:
      ids: value ids. bytes_: whole, unsharded. start, end: first and last position, inclusive. All ``[n]``.
        What shares another buffer's memory is there with ``end < start``: it is read and written but takes nothing.
      reads: how often fused equations read each buffer from HBM, for one run of its graph; written: 1 where they write it; less where a
        dot's flops hide it. What operations (dots, convolutions, gathers) read and write is theirs to charge.
      is_input: an input of the whole program: alive throughout. is_output: what it returns is in it, or made of it.
      length: number of positions; position: node id → position of the node (of a loop: after its body).
      beside: node id of a dot → what its fusion moves: where the dot is split, less of it is hidden.
      held: value without a buffer that a dot reads or makes → the buffers it is read from or written to instead.
      read_at: node id → the values that fused equations read from HBM where the node writes its result. Slices and constants of a loop
        go by their ids in the body. stored: all values that get a buffer written, those that reuse a donated input too.
      in_tuple: values that are one of several results of a fusion, as far as is known.
      copies: values written in the form in which dots read them, on CPU.
    """

    ids: np.ndarray
    bytes_: np.ndarray
    start: np.ndarray
    end: np.ndarray
    reads: np.ndarray
    written: np.ndarray
    is_input: np.ndarray
    is_output: np.ndarray
    length: int
    position: dict[int, int] = field(default_factory=dict)
    loop_start: dict[int, int] = field(default_factory=dict)
    read_at: dict[int, list[int]] = field(default_factory=dict)
    stored: frozenset[int] = frozenset()
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)
    beside: dict[int, Beside] = field(default_factory=dict)
    in_tuple: frozenset[int] = frozenset()
    copies: frozenset[int] = frozenset()


def take_over(
    writers: Iterable[tuple[int, int, frozenset[int]]],
    bytes_of: Callable[[int], float],
    start: Mapping[int, int],
    last: dict[int, int],
    kept: set[int],
) -> None:
    """A result takes the memory of an operand of its size that dies as it is written: ``last`` of the operand becomes the position before.

    Args:
      writers: position, value, and the operands that it may write over. bytes_of: a buffer's size. start, last: positions of buffers.
      kept: what nothing writes over.
    """
    taken = set(kept)
    for at, number, roots in writers:
        size = bytes_of(number)
        for root in sorted(roots - taken):
            if last.get(root) == at and start.get(root, at) < at and bytes_of(root) == size:
                last[root] = at - 1
                taken.add(root)
                break


def fill_early(graph: Graph, start: dict[int, int], position: Mapping[int, int], in_place: Set[int], *, backward: bool) -> None:
    """Stacks of a loop are there from the end of the loop before it: schedulers that hide collectives fill early what waits for nothing.

    XLA:TPU had those of a loop that runs a segment again from the begin of the step: it is in a loop of its own (``rewrite/split.py``).

    Args:
      backward: those of a loop that runs backward too; XLA:TPU fills these, and with zeros, as the loop begins.
    """
    free = 1
    for loop in sorted((n for n in graph.nodes if n.bodies or is_filling(n)), key=lambda n: position[n.id]):
        if backward or not (loop.backward if is_filling(loop) else loop.params.get("reverse")):
            start.update({x: min(start[x], free) for x in _filled(loop) if x in start and x not in in_place})
        free = free if is_filling(loop) else position[loop.id] + 1


def _filled(node: Node) -> Iterable[int]:
    """What a node fills, or is filled for it."""
    if is_filling(node):
        return node.outputs
    over = {link.target for link in node.links if link.kind is LinkKind.OVER}
    return [link.target for link in node.links if link.kind is LinkKind.YS and link.target not in over]


def is_filling(node: Node) -> bool:
    """Whether a node fills a stack that several loops write (``rewrite/split.py``)."""
    return isinstance(node.eqn, FillEqn)


def fill_together(graph: Graph, start: dict[int, int], in_place: Set[int]) -> None:
    """Stacks of one shape that loops of one graph fill are there from the first of these loops on: XLA:GPU fuses what fills them.

    Those whose zeros wait for something (``rewrite/for_gpu.py``) are not.
    """
    alike: dict[tuple, list[int]] = {}
    for loop in (n for n in graph.nodes if n.bodies):
        for stack in _filled(loop) if not fills_late(loop, graph.values) else ():
            if stack in start and stack not in in_place:
                value = graph.values[stack]
                alike.setdefault((value.shape, compat.dtype_name(value.dtype)), []).append(stack)
        for body in loop.bodies:
            fill_together(body, start, in_place)
    for stacks in alike.values():
        start.update(dict.fromkeys(stacks, min(start[x] for x in stacks)))


def live_bytes(buffers: Buffers, sizes: np.ndarray) -> np.ndarray:
    """Live bytes at each position, for buffers of ``sizes`` bytes."""
    steps = np.zeros(buffers.length + 1)
    np.add.at(steps, buffers.start, sizes)
    np.add.at(steps, buffers.end + 1, -sizes)
    return np.cumsum(steps)[:-1]
