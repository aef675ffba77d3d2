"""A solution → what a plan says: shardings of arguments and results, arrays to pin, what is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from jaxauto.core import Decisions, LinkKind, Node, Sharding
from jaxauto.cost.order import short_sums
from jaxauto.graph import walk
from jaxauto.groups import Edge, Operand, Operation
from jaxauto.solve.facts import straight_gradients
from jaxauto.solve.model import Model
from jaxauto.solve.positions import edge_layout, made_in, reduced_factors
from jaxauto.solve.search import Candidate
from jaxauto.strategies import WHOLE, project, sharding_of, shards

_ORDERS = frozenset(["transpose", "reshape", "squeeze", "expand_dims"])
_MUCH = 0.05  # of all memory at its peak
_LESS = 0.5  # a gradient that takes no more than this share of what is read for it is written, so that that can go


def decisions_of(candidate: Candidate) -> Decisions:
    """Everything that the compiler has to be told, see ``rewrite/apply.py``."""
    model, x = candidate.model, candidate.x
    values: dict[int, Sharding] = {}
    operands: dict[tuple[int, int], Sharding] = {}
    late: list[tuple[Node, int]] = []
    made = dict(_made_elsewhere(model, x))
    for number in (*_anchors(model, x), *_passing(model)):
        values[number] = sharding_of_value(model, x, number)
    nodes = {node.id: node for node in walk(model.groups.graph)}
    for op in model.groups.operations:
        index = iter(op.operands)
        for k, number in enumerate(op.node.inputs):
            if not isinstance(number, int):
                continue
            operand = next(index)
            if not model.values[number].shape:
                continue
            position = model.operand_position(x, op, operand)
            operands[op.node.outputs[0], k] = sharding_of(position, len(operand.dims), model.mesh)
            if op.node.backward and model.groups.times[op.node.id] == 1 and _gathers(model.position(x, number), position):
                late.append((op.node, k))
    for e in model.groups.edges:
        node = nodes.get(e.node)
        if node is None or node.bodies or e.operand < 0:
            continue
        here, there, _, _ = edge_layout(
            model.state(x, "group", e.source)[None], model.state(x, "group", e.target)[None], e.dims, e.reduced, model.mesh.sizes
        )
        if not (here != there).any():
            continue
        if e.node in model.narrowing:
            made[e.result] = sharding_of_value(model, x, e.value)
        else:
            position = np.where(np.isin(model.position(x, e.value), _summed(e)), model.position(x, e.value), there[0])
            operands[node.outputs[0], e.operand] = sharding_of(position, len(e.dims), model.mesh)
    level = candidate.variant.level
    return Decisions(
        values,
        operands,
        level.kept,
        gathered_late=dict(_precede(model, late)),
        made=made,
        offloaded=level.offloaded,
        remade=level.remade,
        splits=dict(level.splits),
        in_order=_awaited(candidate),
        short=_short(model),
    )


def _precede(model: Model, late: Iterable[tuple[Node, int]]) -> Iterator[tuple[tuple[int, int], int | None]]:
    """What gathers of operands wait for, by its name as written: that of which dots make the other operand, what is in memory last.

    None where the other operand is in memory itself. What waits for an array has it written, also one that nothing else needs there.
    """
    rewritten, b = model.variant.rewritten, model.buffers
    start = dict(zip(b.ids.tolist(), b.start.tolist(), strict=True))
    inputs = {node.id: node.inputs for node in walk(rewritten.graph)}
    for node, index in late:
        others = [x for k, x in enumerate(inputs[node.id]) if k != index and isinstance(x, int)]
        held = [x for x in b.held.get(others[0], ()) if x in start] if others else []
        last = max(held, key=lambda x: (start[x], -rewritten.graph.values[x].nbytes), default=None)
        yield (node.outputs[0], index), None if last is None else rewritten.origin.get(last, last)


def _awaited(candidate: Candidate) -> frozenset[int] | None:
    """What loops and recomputations of the backward pass wait for (``rewrite/order.py``).

    On TPU, gradients that are summed over devices and take at most half of what is read for them, each of one device's; others are made
    with their update, and to wait for one takes time (2.7 % of a step, GPT-2 medium, unrolled, on v5e): on one device, where something is
    made again for the sake of memory, those are waited for that let much of it go (13 % there). On several CPU devices all are where
    something is made again, and none elsewhere: a word of what is waited for goes from one device to the others. XLA:CPU puts off what
    sums a norm's gradients too, and what it sums lies there: for those others wait as well; so does XLA:GPU on several devices.
    """
    model, x = candidate.model, candidate.x
    platform = model.chip.platform
    alone, pressed = model.mesh.num_devices == 1, any(kept is not None for kept in model.variant.kept)
    if platform != "tpu":
        finished = [value for _, _, value in _finished(model)] + (_sums(model) if platform == "cpu" or not alone else [])
        return frozenset(finished) if platform == "gpu" or alone or pressed else None
    found = set()
    much = _MUCH * candidate.peak_bytes if pressed and alone else math.inf
    for op, o, value in _finished(model):
        read = max((_local(model, i.value, model.operand_position(x, op, i)) for i in op.operands), default=0.0)
        own = _local(model, o.value, model.position(x, o.value))
        summed = np.isin(model.state(x, "operation", op.node.id), reduced_factors(op, o)).any()
        if own <= _LESS * read and (summed or read - own > much):
            found.add(value)
    return frozenset(found) or None


def _short(model: Model) -> frozenset[int]:
    """Of several GPUs, gradients that the next operation waits for; ``_awaited`` has all there."""
    if model.chip.platform != "gpu" or model.mesh.num_devices == 1:
        return frozenset()
    short = short_sums(model.groups.graph, model.mesh.num_devices)
    return frozenset(value for op, _, value in _finished(model) if op.node.id in short)


def _local(model: Model, number: int, position: np.ndarray) -> float:
    """Bytes that one device holds of a value."""
    return model.values[number].nbytes / float(shards(position[None], model.mesh.sizes)[0])


def _finished(model: Model) -> Iterator[tuple[Operation, Operand, int]]:
    """Gradients of the straight program, but on TPU of loops too, by what makes them.

    Who waits for one that is summed over devices waits for the sum. As the optimizer reads them: an operation writes whatever order of
    dimensions is asked of it, and is held to what is waited for.
    """
    for op, o in straight_gradients(model.groups, model.program.late_only, bodies=model.chip.platform != "tpu"):
        value = model.values[o.value]
        while len(value.users) == 1 and value.users[0].prim in _ORDERS and value.users[0].backward:
            value = model.values[value.users[0].outputs[0]]
        yield op, o, value.id


def _sums(model: Model) -> list[int]:
    """Gradients that are sums: of what is added to rows, or multiplies them."""
    reduced = (node for node in walk(model.groups.graph) if node.backward and node.prim == "reduce_sum")
    return [node.outputs[0] for node in reduced if node.outputs[0] in model.program.late_only]


def _made_elsewhere(model: Model, x: np.ndarray) -> Iterator[tuple[int, Sharding]]:
    """Results that go on in another sharding than the operation makes them in; unsaid, the partitioner may move the operands instead."""
    for op in model.groups.operations:
        for o in op.results:
            summed = np.isin(model.state(x, "operation", op.node.id), reduced_factors(op, o))
            final = model.position(x, o.value)
            position = made_in(model.operand_position(x, op, o), final, summed)
            if o.dims and (position != final).any():
                yield o.value, sharding_of(position, len(o.dims), model.mesh)


def sharding_of_value(model: Model, x: np.ndarray, number: int) -> Sharding:
    """The sharding of a value under solution ``x``."""
    return sharding_of(model.position(x, number), len(model.values[number].shape), model.mesh)


def _summed(e: Edge) -> list[int]:
    return [i for i, (a, _) in enumerate(e.dims) if a in e.reduced and a != WHOLE]


def _gathers(here: np.ndarray, there: np.ndarray) -> bool:
    return bool(((here != WHOLE) & (there == WHOLE)).any())


def _passing(model: Model) -> Iterator[int]:
    """What is kept to make the rest again: on CPU it goes through a select, and would be whole on every device where its readers differ."""
    rewritten = model.variant.rewritten
    for node in rewritten.graph.nodes if model.chip.platform == "cpu" else ():
        for number in node.inputs if node.prim == "optimization_barrier" else ():
            origin = rewritten.origin.get(number, number)
            if origin in model.groups.place and model.values[origin].shape:
                yield origin


def _anchors(model: Model, x: np.ndarray) -> Iterator[int]:
    """Values to pin: results of operations, inputs and outputs of loop bodies, and the ends of passages that reshard.

    Both ends: an operation that wants a part of an array would else have the partitioner cut all that leads to it, and gather it again for
    the others. But not what is only summed: pinned, XLA:TPU writes it, in another layout, where it would add it up as it is made.
    """
    for op in model.groups.operations:
        for o in op.operands:
            if o.dims and (model.operand_position(x, op, o) != model.position(x, o.value)).any():
                yield o.value
        for o in op.results:
            if o.dims:
                yield o.value
    for node in walk(model.groups.graph):
        for link in node.links:
            inner = link.source if link.kind in (LinkKind.CARRY, LinkKind.FINAL, LinkKind.YS) else link.target
            if model.values[inner].shape:
                yield inner
    for e in model.groups.edges:
        here = project(model.state(x, "group", e.source)[None], tuple(a for a, _ in e.dims))
        there = project(model.state(x, "group", e.target)[None], tuple(b for _, b in e.dims))
        moved = (here != there) & ~np.isin(here, _summed(e))
        ends = (e.value, e.result) if moved.any() else (e.result,) if (here != there).any() else ()
        yield from (number for number in ends if model.values[number].shape)
