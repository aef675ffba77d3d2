"""A solution → what a plan says: shardings of arguments and results, arrays to pin, what is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from jaxauto.core import Decisions, LinkKind, Node, Sharding
from jaxauto.graph import walk
from jaxauto.groups import Edge
from jaxauto.solve.awaited import awaited, short
from jaxauto.solve.facts import cut_along
from jaxauto.solve.model import Model
from jaxauto.solve.positions import edge_layout, made_in, reduced_factors
from jaxauto.solve.read_twice import gathered_before
from jaxauto.solve.search import Candidate
from jaxauto.strategies import WHOLE, project, sharding_of


def decisions_of(candidate: Candidate) -> Decisions:
    """Everything that the compiler has to be told, see ``rewrite/apply.py``."""
    model, x = candidate.model, candidate.x
    values: dict[int, Sharding] = {}
    operands: dict[tuple[int, int], Sharding] = {}
    late: list[tuple[Node, int]] = []
    ahead = gathered_before(model.read_twice)
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
            once = op.node.backward and model.groups.times[op.node.id] == 1 and (op.node.id, number) not in ahead
            if once and _gathers(model.position(x, number), position):
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
        elif _is_alone(model, x, e):
            made[e.result], values[e.result] = (sharding_of_value(model, x, number) for number in (e.value, e.result))
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
        in_order=awaited(candidate),
        short=short(candidate),
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


def _is_alone(model: Model, x: np.ndarray, e: Edge) -> bool:
    """Whether a piece of an array is brought alone: with the array the others would be too, and back (the cotangent of what a U-Net joins).
    Not where the array is split along what is cut."""
    cut = cut_along(model.groups, e)
    return bool(cut) and not np.isin(model.state(x, "group", e.source), cut).any()


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
