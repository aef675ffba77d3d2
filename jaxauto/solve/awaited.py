"""Which gradients the backward pass waits for, so that a compiler that would put them off keeps to the planned order.

What waits is in ``rewrite/order.py``: loops and recomputations for all that is told here as ``in_order``, the next operations for what is
told as ``short``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxauto.core import Node
from jaxauto.cost.liveness import Buffers
from jaxauto.cost.order import short_sums
from jaxauto.graph import BarrierEqn
from jaxauto.groups import Operand, Operation
from jaxauto.solve.beside import borders_held
from jaxauto.solve.candidate import Candidate
from jaxauto.solve.gradients import as_read, is_held_on_cpu, straight_gradients, summed_gradients, waited_for
from jaxauto.solve.live import timeline
from jaxauto.solve.model import Model
from jaxauto.solve.positions import reduced_factors
from jaxauto.strategies import shards

_MUCH = 0.05  # of all memory at its peak
_LESS = 0.5  # a gradient that takes no more than this share of what is read for it is written, so that that can go


def awaited(candidate: Candidate) -> frozenset[int] | None:
    """What loops and recomputations of the backward pass wait for (``rewrite/order.py``); None: the compiler is held to no order.

    On TPU, gradients that are summed over devices and take at most half of what is read for them, each of one device's; others are made
    with their update, and to wait for one takes time (2.7 % of a step, GPT-2 medium, unrolled, on v5e): on one device, where something is
    made again for the sake of memory, those are waited for that let much of it go (13 % there). On several CPU devices all are where
    something is made again, and none elsewhere: a word of what is waited for goes from one device to the others. XLA:CPU puts off what
    sums a norm's gradients too, and what it sums lies there: for those others wait as well; so does XLA:GPU on several devices. XLA:TPU
    sums such in one collective at the end of a step: those are waited for that would raise the peak until then (layer scales of a
    ConvNeXt of flax on eight v5e, near its least memory: 909 MiB instead of 477, in the same time).
    """
    model = candidate.model
    platform = model.chip.platform
    alone, pressed = model.mesh.num_devices == 1, _is_pressed(model)
    if platform != "tpu":
        sums_too = platform == "cpu" or not alone
        made = waited_for(model.groups, model.program.late_only) if sums_too else frozenset(g.value for g in _finished(model))
        held = platform == "gpu" or is_held_on_cpu(model.groups.graph, model.mesh.num_devices, pressed=pressed)
        return made if held else None
    much = _MUCH * candidate.peak_bytes if pressed and alone else math.inf
    small = frozenset(g.value for g, spared, summed in _small(candidate) if summed or spared > much)
    return small | (frozenset() if alone else frozenset(_sums_too_late(candidate)))


def short(candidate: Candidate) -> frozenset[int]:
    """What the next operations wait for, of several devices.

    Of GPUs, short sums of much (``cost/order.short_sums``). Of TPUs, gradients that would raise the peak if they came as late as what
    waits for them all: XLA:TPU puts off what it can, and where no recomputation comes for many blocks, as of the last ones, what they read
    lies there until then (a mixer of flax on eight v5e, half of its memory: 1,031 MiB instead of 671, in the same time; an autoencoder
    split by rows of images, what lies there for its borders too: 754 MiB instead of 622, 1.6 % longer).
    """
    model = candidate.model
    if model.mesh.num_devices == 1:
        return frozenset()
    if model.chip.platform == "gpu":
        sums = short_sums(model.groups.graph, model.mesh.num_devices)
        return frozenset(g.value for g in _finished(model) if g.operation.node.id in sums)
    return frozenset(_gradients_too_late(candidate)) if model.chip.platform == "tpu" else frozenset()


class _Gradient(NamedTuple):
    """``value``: as the optimizer reads it."""

    operation: Operation
    result: Operand
    value: int


def _finished(model: Model) -> Iterator[_Gradient]:
    """Gradients of the straight program, and on all but TPUs of loops too.

    Who waits for one that is summed over devices waits for the sum. As the optimizer reads them: an operation is held to what it waits for.
    """
    for op, o in straight_gradients(model.groups, model.program.late_only, bodies=model.chip.platform != "tpu"):
        yield _Gradient(op, o, as_read(model.groups, o))


def _small(candidate: Candidate) -> Iterator[tuple[_Gradient, float, bool]]:
    """Gradients much smaller than the largest array that is read for them, by how much, in bytes of one device; whether they are summed."""
    model, x = candidate.model, candidate.x
    for g in _finished(model):
        op = g.operation
        read = max((_local(model, i.value, model.operand_position(x, op, i)) for i in op.operands), default=0.0)
        own = _local(model, g.result.value, model.position(x, g.result.value))
        if own <= _LESS * read:
            yield g, read - own, bool(np.isin(model.state(x, "operation", op.node.id), reduced_factors(op, g.result)).any())


def _local(model: Model, number: int, position: np.ndarray) -> float:
    """Bytes that one device holds of a value."""
    return model.values[number].nbytes / float(shards(position[None], model.mesh.sizes)[0])


def _gradients_too_late(candidate: Candidate) -> Iterator[int]:
    """Of the gradients that are waited for, those that cannot be put off as far as the next loop or recomputation."""
    model, b = candidate.model, candidate.model.buffers
    nodes = {node.id: node for node in model.variant.rewritten.graph.nodes}
    arrays, borders = _Arrays(b, model.buffer_sizes(candidate.x)), defaultdict(list)
    for _, end, bytes_ in borders_held(model, candidate.x):
        borders[end].append((end, bytes_))
    found = []
    for g in (g for g, _, summed in _small(candidate) if summed):
        node = nodes[g.operation.node.id]
        found.append((node, g.value, [*arrays.of(_operands(b, node)), *borders[b.position[node.id]]]))
    walls = [node for node in nodes.values() if node.backward and _is_wall(node)]
    return _too_late(candidate, found, walls)


def _sums_too_late(candidate: Candidate) -> Iterator[int]:
    """Of the gradients that are sums, those that cannot be put off to the end of the backward pass."""
    model = candidate.model
    maker = {out: node for node in model.variant.rewritten.graph.nodes for out in node.outputs}
    sums = ((maker[number], number) for number in summed_gradients(model.groups, model.program.late_only) if number in maker)
    # What was on chip is moved to HBM until then. Where nothing is made again, memory is not short, and they can wait.
    arrays = _Arrays(model.buffers, (model.local_sizes if _is_pressed(model) else model.buffer_sizes)(candidate.x))
    return _too_late(candidate, [(node, number, arrays.of(_summed(model.buffers, node, maker, arrays.known))) for node, number in sums], ())


class _Arrays:
    """Buffers with their bytes of one device."""

    def __init__(self, b: Buffers, sizes: np.ndarray):
        taken = np.nonzero(b.end >= b.start)[0]
        self.known = {int(b.ids[k]): (int(b.end[k]), float(sizes[k])) for k in taken}

    def of(self, numbers: Iterable[int]) -> list[tuple[int, float]]:
        """(last position, bytes) of those of ``numbers`` that take memory."""
        return [self.known[x] for x in {*numbers} & self.known.keys()]


def _summed(b: Buffers, node: Node, maker: Mapping[int, Node], known: Container[int]) -> Iterator[int]:
    """Buffers that are read for a sum: of an operation that is fused with it (its result is not ``known``) what that reads."""
    for x in b.read_at.get(node.id, ()):
        yield from (x,) if x in known or x not in maker else _operands(b, maker[x])


def _operands(b: Buffers, node: Node) -> set[int]:
    return {root for x in node.inputs if isinstance(x, int) for root in b.held.get(x, (x,))}


def _too_late(candidate: Candidate, gradients: Iterable[tuple[Node, int, list[tuple[int, float]]]], walls: Iterable[Node]) -> Iterator[int]:
    """Gradients that would raise the peak: with what they read, until the next wall or the end of the backward pass, and with what others
    read that are put off.

    Args:
      gradients: (what makes it, the gradient, the last position and the bytes of one device of each array that is read for it).
    """
    model, b = candidate.model, candidate.model.buffers
    live = timeline(model, candidate.x)
    ends = sorted(b.loop_start.get(node.id, b.position[node.id]) for node in walls)
    backward = (node for node in model.variant.rewritten.graph.nodes if node.backward)
    ends.append(max((b.position[node.id] for node in backward), default=0))
    peak = live.max()
    for node, number, read in sorted(gradients, key=lambda g: b.position[g[0].id]):
        here = b.position[node.id]
        end = next((p for p in ends if p > here), here)
        more = np.zeros(len(live))
        for last, bytes_ in read:
            more[max(last, here) + 1 : end] += bytes_
        if (live + more)[more > 0].max(initial=0.0) > peak:
            yield number
        else:
            live += more


def _is_pressed(model: Model) -> bool:
    """Whether something is made again for the sake of memory."""
    return any(kept is not None for kept in model.variant.kept)


def _is_wall(node: Node) -> bool:
    return bool(node.bodies) or isinstance(node.eqn, BarrierEqn)
