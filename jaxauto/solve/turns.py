"""What layouts at odds with collectives cost (``cost/turning.py``): seconds of weights and gradients in their passages, what results
that are gathered at the end of a step take beside the memory that they end up in, and what the copies of stacks take that loops read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxauto.cost.compute import factor_dims, traffic_seconds
from jaxauto.cost.turning import AT_ODDS, COPIES_PIECES, turned
from jaxauto.groups import Edge
from jaxauto.solve.positions import reduced_factors
from jaxauto.solve.stacked import Reading, readings
from jaxauto.strategies import WHOLE, project, shards

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


Row = tuple[int, int, int, int, np.ndarray]  # first position, last, two variables in their order, bytes by their states


class _Passage(NamedTuple):
    """An array's way between two variables; ``dims`` of each are its dimensions there, ``late``: the copy comes after the collective."""

    source: int
    source_dims: tuple[int, ...]
    target: int
    target_dims: tuple[int, ...]
    reduced: tuple[int, ...]
    bytes_: float
    late: bool


def add_turns(model: Model) -> None:
    """Seconds of the copies, read and written."""
    if model.chip.platform not in AT_ODDS:
        return
    count: dict[_Passage, float] = defaultdict(float)
    for op in model.groups.operations if model.chip.platform in COPIES_PIECES else ():
        v = model.var("operation", op.node.id)
        for o in op.operands:
            if model.resource_of(o.value, -1) == "prefetch":
                here = model.var("group", o.group), tuple(d for d, _ in o.dims)
                count[_Passage(*here, v, factor_dims(op, o), (), model.passage_bytes(o.value), late=False)] += model.fetches(op, o)
        for o in op.results:
            if model.resource_of(-1, o.value) == "prefetch":
                there = model.var("group", o.group), tuple(d for d, _ in o.dims)
                key = _Passage(v, factor_dims(op, o), *there, tuple(reduced_factors(op, o)), model.passage_bytes(o.value), late=True)
                count[key] += model.again(op.node.id)
    for e in fetching(model) if model.chip.platform in COPIES_PIECES else ():
        key = _of_edge(model, e)._replace(bytes_=model.passage_bytes(e.value), late=False)
        count[key] += e.times + model.variant.extra.get(e.node, 0)
    for e in ending(model):
        count[_of_edge(model, e)] += e.times
    for key, times in count.items():
        table = model.cached(("turned", *key), lambda key=key: traffic_seconds(2.0 * copied(model, key), model.chip))
        if table.any():
            model.problem.add_pair("compute", key.source, key.target, times * table)


def fetching(model: Model) -> Iterator[Edge]:
    """Passages of weights to what several operations read, or to a narrower type; the backward pass finds the copy made."""
    known, left = model.program.known_early, model.final
    return (e for e in model.groups.edges if e.value in known and e.value not in left and not (e.reduced or e.backward))


def ending(model: Model) -> Iterator[Edge]:
    """Passages that results leave a step by."""
    return (e for e in model.groups.edges if e.node < 0 and e.value in model.final)


def in_order(begin: int, end: int, a: int, b: int, table: np.ndarray) -> Iterator[Row]:
    """The row of two variables in their order; none where nothing is held, or both are one."""
    if a != b and table.any():
        yield (begin, end, a, b, table) if a < b else (begin, end, b, a, table.T)


def beside_results(model: Model) -> Iterator[Row]:
    """(first position, last, two variables in their order, bytes by their states) of copies of results at the end of a step."""
    begin, end = update_begins(model), model.buffers.length - 1
    for e in ending(model) if model.chip.platform in AT_ODDS else ():
        key = _of_edge(model, e)
        table = model.cached(("beside", *key), lambda key=key: copied(model, key))
        yield from in_order(begin, end, key.source, key.target, table)


def cut_results(model: Model) -> Iterator[Row]:
    """The same of momentum that an update makes whole, though a device returns a part of it: it is written for what else reads it."""
    begin, end = update_begins(model), model.buffers.length - 1
    for e in made_beside(model):
        key = _of_edge(model, e)
        table = model.cached(("cut", *key), lambda key=key: _cut(model, key))
        yield from in_order(begin, end, key.source, key.target, table)


def made_beside(model: Model) -> list[Edge]:
    """Passages of results that take the memory of a donated argument and are read in the step: XLA:GPU cuts them as it makes them."""
    b = model.buffers
    in_place = frozenset(b.ids[b.end < b.start].tolist()) if model.chip.platform == "tpu" else frozenset()
    return [e for e in ending(model) if e.value in in_place and model.values[e.value].users]


def _cut(model: Model, passage: _Passage) -> np.ndarray:
    """Bytes of the result as one device makes it, where it keeps a part of that."""
    source = project(model.states[passage.source], passage.source_dims)
    target = project(model.states[passage.target], passage.target_dims)
    parts = ((source[:, None] == WHOLE) & (target[None] != WHOLE)).any(-1)
    return passage.bytes_ / shards(source, model.mesh.sizes)[:, None] * parts


def update_begins(model: Model) -> int:
    """The position from which the collectives of the update are on their way.

    Compilers start them together: XLA:GPU as soon as nothing is left of the backward pass, XLA:TPU, which minds the memory, at the end.
    But for what is on its way before (``updating``).
    """
    return model.cached(("update begins", model.variant), lambda: _update_begins(model))


def _update_begins(model: Model) -> int:
    last = model.buffers.length - 1
    if model.chip.platform != "gpu":
        return last
    late, position = model.program.late_only, model.buffers.position
    done = max((position.get(n.id, 0) for n in model.variant.rewritten.graph.nodes if n.backward), default=last)
    return min((position[n.id] for n in model.groups.graph.nodes if done < position.get(n.id, 0) and set(n.outputs) & late), default=last)


def updating(model: Model) -> dict[tuple[int, int], tuple[int, bool]]:
    """What an update reads beside a gradient, where that is resharded: (node, operand) → node that makes the last gradient it waits for,
    and whether it is on its way from there on.

    XLA:TPU hides about one such gather of a weight behind what is left of the backward pass; the update waits for the others.
    """
    return model.cached(("updating",), lambda: _updating(model)) if model.chip.platform == "tpu" else {}


def _updating(model: Model) -> dict[tuple[int, int], tuple[int, bool]]:
    values, made, found = model.groups.graph.values, _last_gradients(model), {}
    ahead: dict[int, tuple[int, int]] = {}
    for e in model.groups.edges:
        if e.node < 0 or e.backward or e.value not in model.program.known_early or e.result not in model.program.late_only:
            continue
        met, seen = [e.result], {e.result}
        for number in met:  # momentum decays before the gradient is added
            more = {out for node in values[number].users for out in node.outputs} - seen
            seen |= more
            met += sorted(more)
        gradient = next((made[number] for number in met if number in made), None)
        if gradient is not None:
            key = e.node, e.operand
            found[key] = gradient, ahead.setdefault(gradient, key) == key
    return found


def _last_gradients(model: Model) -> dict[int, int]:
    """Gradients and what the optimizer makes of them → the node that makes the last gradient that each is made of."""
    late, found, order = model.program.late_only, {}, {}
    for k, node in enumerate(model.groups.graph.nodes):
        order[node.id] = k
        if late.issuperset(node.outputs):
            waits = [found[x] for x in node.inputs if isinstance(x, int) and x in found] or [node.id] * node.backward
            found.update(dict.fromkeys(node.outputs if waits else (), max(waits, key=order.__getitem__, default=-1)))
    return found


def beside_loops(model: Model) -> list[Row]:
    """(first position, last, two variables in their order, bytes by their states) of copies of stacks of weights that loops read.

    A stack is copied once, before the first loop that wants it so, and lives until the last of them has run.
    """
    return model.cached(("beside loops", model.variant), lambda: list(_beside_loops(model)) if model.chip.platform in COPIES_PIECES else [])


def _beside_loops(model: Model) -> Iterator[Row]:
    done: dict[int, int] = {}
    for read in readings(model.variant, model.groups):
        begin, end, stack = read[:3]
        if model.resource_of(read.operand.value, -1) != "prefetch":
            continue
        key = _fetch(model, read, model.values[stack].nbytes)
        table = model.cached(("beside", *key), lambda key=key: copied(model, key))
        begin, done[stack] = done.get(stack, begin - 1) + 1, end
        yield from in_order(begin, end, key.source, key.target, table)


def _fetch(model: Model, read: Reading, bytes_: float) -> _Passage:
    """From where a stack lies, slice by slice, to what reads the slices."""
    group, (_, *dims) = model.groups.place[read.stack]
    reader = model.var("operation", read.operation.node.id)
    return _Passage(model.var("group", group), tuple(dims), reader, factor_dims(read.operation, read.operand), (), bytes_, late=False)


def copied(model: Model, passage: _Passage) -> np.ndarray:
    """Bytes of the array that one device copies, for each pair of states."""
    sizes = model.mesh.sizes
    source = project(model.states[passage.source], passage.source_dims)
    target = project(model.states[passage.target], passage.target_dims)
    partial = np.isin(model.states[passage.source], passage.reduced) if passage.reduced else None
    pieces = shards(target, sizes)[None] if passage.late else shards(source, sizes)[:, None]
    return passage.bytes_ / pieces * turned(source, target, len(passage.target_dims), model.chip.platform, partial)


def _of_edge(model: Model, e: Edge) -> _Passage:
    here, there = zip(*e.dims, strict=True) if e.dims else ((), ())
    return _Passage(model.var("group", e.source), here, model.var("group", e.target), there, (), model.edge_bytes(e), late=True)
