"""``beside.py`` for one answer, in scalars (see ``check.py``)."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from jaxauto.core import LinkKind, Node
from jaxauto.cost.kernels import TILE, pads
from jaxauto.cost.onchip import capacity, of_sums
from jaxauto.cost.tables import lies_in_rows
from jaxauto.cost.widened import WIDE
from jaxauto.cost.windowed import SMALL, is_view
from jaxauto.graph import multiplicity, walk
from jaxauto.groups import Operand, Operation
from jaxauto.rewrite.order import SCATTERS
from jaxauto.solve.beside import bordered, cut_as_read, passed_edges, shared_operands
from jaxauto.solve.check_ring import padding
from jaxauto.solve.check_turns import copies_of_results, is_turned, made_whole
from jaxauto.solve.early import made_early
from jaxauto.solve.padded import may_be_padded
from jaxauto.solve.pooled import pooled
from jaxauto.solve.put_off import put_off
from jaxauto.solve.read_twice import held_between
from jaxauto.solve.stacked import readings
from jaxauto.solve.tables import tables_of
from jaxauto.solve.turns import update_begins
from jaxauto.solve.widened import widened
from jaxauto.strategies import WHOLE

if TYPE_CHECKING:
    from jaxauto.solve.check import Answer


def held_beside(answer: Answer) -> Iterator[tuple[int, int, float]]:
    """(first position, last, bytes of one device) of what is there beside buffers."""
    last = answer.model.buffers.length - 1
    yield from _of_results(answer)
    yield from _cut_as_read(answer)
    yield from _made_early(answer)
    yield from _bordered(answer)
    yield from _shared(answer)
    yield from _passed(answer)
    yield from _stacks(answer)
    yield from _put_off(answer)
    yield from _between(answer)
    yield from _widened(answer)
    yield from _padded(answer)
    yield from ((at, at, bytes_ / answer.pieces(answer.operation[op.node.id])) for op, _, at, bytes_ in pooled(answer.model))
    yield from ((begin, end, held) for begin, end, held, _ in with_rows(answer))
    begin = update_begins(answer.model)
    yield from ((begin, last, size) for size, _ in copies_of_results(answer))
    yield from ((begin, last, size) for size in made_whole(answer))


def with_rows(answer: Answer) -> Iterator[tuple[int, int, float, float]]:
    """(first position, last, bytes of one device, bytes that it moves) of tables with their rows along the lanes, short of tiles."""
    model = answer.model
    found = tables_of(model)
    runs = multiplicity(model.variant.rewritten.graph) if found else {}
    for _, table in found:
        value, (group, dims) = model.values[table.number], model.groups.place[table.number]
        where, tile = answer.where(answer.group[group], dims), model.chip.tile_of(value.dtype)
        least = padding(value.shape, where, (0, 1), answer.sizes, tile)
        long, wide = (n / math.prod(answer.sizes[a] for a, d in enumerate(where) if d == i) for i, n in enumerate(value.shape))
        edge = min(tile.sublanes, max(tile.packed, 2 ** math.ceil(math.log2(long))))
        rows = math.ceil(long / edge) * edge / long * math.ceil(wide / tile.lanes) * tile.lanes / wide
        rows, least = (value.nbytes / answer.pieces(where) * n for n in (rows, least))
        if lies_in_rows(rows, least, table):
            held, moved = (a * rows + b * least for a, b in (table.held, table.moved))
            yield table.begin, table.end, held, runs[table.node] * moved


def brought(answer: Answer) -> Iterator[tuple[int, float]]:
    """(position, bytes of one device) of what operands become in another sharding, and of what is written for that."""
    model, most, slices = answer.model, capacity(answer.model.chip), _slices(answer)
    index = {int(n): k for k, n in enumerate(model.buffers.ids)}
    for op, node in model.variant.operations:
        at = model.buffers.position.get(node.id)
        for o in op.operands if at is not None else ():
            here, there = answer.holder(o), answer.operand(op, o)
            if all(h in (t, WHOLE) for h, t in zip(here, there, strict=True)):
                continue
            k = index.get(number := _viewed(answer, node.inputs[op.node.inputs.index(o.value)], index))
            piece, result = (_padded_bytes(answer, op, o, where) for where in (here, there))
            if k is None:
                value = model.variant.rewritten.graph.values.get(number)  # None: a literal
                made = value is not None and (value.producer is not None or number in slices)
            else:
                made = answer.placed.written[k] and piece <= most
            yield at, result + made * piece


def _padded_bytes(answer: Answer, op: Operation, o: Operand, where: tuple[int, ...]) -> float:
    """Of one device's part of an operand, with what tiles pad it by."""
    model, value = answer.model, answer.model.values[o.value]
    minor = answer.minor(o.group, tuple(d for d, _ in o.dims))
    padded = padding(value.shape, where, minor, answer.sizes, model.chip.tile_of(value.dtype))
    return min(value.nbytes, answer.read_bytes(op, o)) / answer.pieces(where) * padded


def _viewed(answer: Answer, number: int, index: Container[int]) -> int:
    """The value with a buffer, or made by something else than a view, that a value is a view of."""
    rewritten = answer.model.variant.rewritten
    while number not in index and is_view(answer.model.groups, rewritten.origin.get(number, number)):
        if (node := rewritten.graph.values[number].producer) is None or node.prim == "optimization_barrier":
            break
        number = node.inputs[0]
    return number


def _slices(answer: Answer) -> set[int]:
    """What loops' trips get of stacks."""
    nodes = walk(answer.model.variant.rewritten.graph)
    return {link.target for node in nodes for link in node.links if link.kind is LinkKind.XS}


def _of_results(answer: Answer) -> Iterator[tuple[int, int, float]]:
    """Sums before they are scattered, what windowed einsums copy, and what is filled with zeros long before it is scattered into."""
    model = answer.model
    least = of_sums(model.chip) if model.mesh.windows else 0.0
    for op, node in model.variant.operations:
        at = model.buffers.position.get(node.id)
        for o in op.results if at is not None else ():
            here, there = answer.operand(op, o), answer.holder(o)
            whole = answer.bytes_of(o.value) / answer.pieces(here)
            if ring := answer.windowed(op, o) if model.mesh.windows else None:
                yield at, at, ring[1]
            elif (partial := answer.partial(op, o)) and not model.mesh.scatters:
                cut = tuple(there[a] if a in partial else d for a, d in enumerate(here))
                yield at, at, whole + (any(there[a] != WHOLE for a in partial) and whole - answer.bytes_of(o.value) / answer.pieces(cut))
            elif any(there[a] != WHOLE for a in partial) and whole > least:
                yield at, at, whole
            begin = _filled(answer, node, at)
            if begin < at:
                yield begin, at - 1, model.values[o.value].nbytes / answer.pieces(here)


def _cut_as_read(answer: Answer) -> Iterator[tuple[int, int, float]]:
    """What is made beyond the part that is kept."""
    for op, o, begin, end in cut_as_read(answer.model):
        here, there = answer.operand(op, o), answer.holder(o)
        if not answer.partial(op, o) and all(h in (t, WHOLE) for h, t in zip(here, there, strict=True)):
            whole, part = (answer.model.values[o.value].nbytes / answer.pieces(where) for where in (here, there))
            yield begin, end, whole - part


def _made_early(answer: Answer) -> Iterator[tuple[int, int, float]]:
    """What is in memory for a windowed einsum alone, up to the einsum."""
    for op, k, begin, end in made_early(answer.model):
        for o in op.results:
            yield begin, end, (answer.windowed(op, o) or (0.0, 0.0, {}))[2].get(k, 0.0)


def _bordered(answer: Answer) -> Iterator[tuple[int, int, float]]:
    """What convolutions make as they read it, whose borders neighbours are sent."""
    for op, o, begin, end in bordered(answer.model):
        there = answer.operand(op, o)
        split = {d for a, d in enumerate(there) if answer.sizes[a] > 1}
        if any(op.rule.halo.get(factor) and i in split for i, (_, factor) in enumerate(o.dims)):
            minor = [i for i, (_, factor) in enumerate(o.dims) if not factor.startswith("s")]
            value = answer.model.values[o.value]
            padded = padding(value.shape, there, minor, answer.sizes, answer.model.chip.tile_of(value.dtype))
            yield begin, end, answer.read_bytes(op, o) / answer.pieces(there) * padded


def _shared(answer: Answer) -> Iterator[tuple[int, int, float]]:
    """Arrays resharded once for several operations."""
    model = answer.model
    for number, view, dims, begin, end in shared_operands(model):
        group, own = model.groups.place[number]
        here, there = answer.where(answer.group[group], own), answer.where(answer.group[view], dims)
        if any(h not in (t, WHOLE) for h, t in zip(here, there, strict=True)):
            minor, value = answer.minor(view, dims), model.values[number]
            padded = padding(value.shape, there, minor, answer.sizes, model.chip.tile_of(value.dtype))
            rounded = answer.is_rounded(number, view)
            yield begin, end, model.values[number].nbytes / (2 if rounded else 1) / answer.pieces(there) * padded


def _passed(answer: Answer) -> Iterator[tuple[int, int, float]]:
    """Arrays resharded for equations that are fused."""
    model = answer.model
    for e, begin, end in passed_edges(model):
        here, there = answer.sides(e)
        if any(h not in (t, WHOLE) for h, t in zip(here, there, strict=True)):
            number = e.result if e.node in model.narrowing else e.value
            again = model.chip.platform == "gpu" and begin < end and is_turned(answer, here, there, len(e.dims))
            yield begin, end, (1 + again) * model.values[number].nbytes / answer.pieces(there)


def _filled(answer: Answer, written: Node, at: int) -> int:
    """Of a scatter in the straight backward pass on several GPUs: where that pass begins."""
    b, begin, found = answer.model.buffers, at, False
    if answer.model.chip.platform == "gpu" and written.prim in SCATTERS and answer.count(range(len(answer.sizes))) > 1:
        for node in answer.model.variant.rewritten.graph.nodes:
            if node.backward:
                begin, found = min(begin, b.loop_start.get(node.id, b.position[node.id])), found or node.id == written.id
    return begin if found else at


def _put_off(answer: Answer) -> Iterator[tuple[int, int, float]]:
    """What gradients that are summed over no devices are made of."""
    model = answer.model
    for op, number, bytes_, begin, end in put_off(model):
        if any(answer.partial(op, o) for o in op.results):
            continue
        group, dims = model.groups.place[number]
        where, minor, value = answer.where(answer.group[group], dims), answer.minor(group, dims), model.values[number]
        padded = padding(value.shape, where, minor, answer.sizes, model.chip.tile_of(value.dtype))
        yield begin, end, bytes_ / answer.pieces(where) * padded


def _between(answer: Answer) -> Iterator[tuple[int, int, float]]:
    """Weights gathered for a recomputed operation, until the backward pass has read them too."""
    for op, place, begin, end in held_between(answer.model):
        for o in op.operands:
            here, there = answer.holder(o), answer.operand(op, o)
            if o.value == op.node.inputs[place] and any(h not in (t, WHOLE) for h, t in zip(here, there, strict=True)):
                size = _padded_bytes(answer, op, o, there)
                yield begin, end, size * (size >= SMALL * answer.model.chip.vmem_bytes)


def _widened(answer: Answer) -> Iterator[tuple[int, int, float]]:
    """What dots read and make in float32, on CPU."""
    if (found := widened(answer.model)) is None:
        return
    sizes = [_wide_bytes(answer, *found.operand(c.node, c.place)) for c in found.copies]
    yield from ((c.begin, c.end, size) for c, size in zip(found.copies, sizes, strict=True))
    for node, place, at, gone in found.results:
        made = _wide_bytes(answer, *found.result(node, place))
        yield at, at, max(made / 2, made - sum(sizes[k] for k in gone))


def _wide_bytes(answer: Answer, op: Operation, o: Operand) -> float:
    return WIDE * answer.model.values[o.value].elements / answer.pieces(answer.operand(op, o))


def _padded(answer: Answer) -> Iterator[tuple[int, int, float]]:
    """What a dot on GPU reads padded, and others as it is."""
    for op, o, at in may_be_padded(answer.model):
        (result,) = op.results
        own, state = {f for _, f in result.dims}, answer.operation[op.node.id]
        cut = lambda k, state=state: answer.count(a for a, d in enumerate(state) if d == k)  # noqa: E731
        summed = {f for _, f in o.dims} - own
        long = math.prod(size / cut(k) for k, (factor, size) in enumerate(op.factors) if factor in summed)
        made = answer.model.values[result.value].elements / answer.pieces(answer.operand(op, result))
        if pads(made / TILE**2, long):
            yield at, at, answer.model.values[o.value].nbytes / answer.pieces(answer.operand(op, o))


def _stacks(answer: Answer) -> Iterator[tuple[int, int, float]]:
    """Stacks of weights in the layout that loops want."""
    model, until = answer.model, {}
    for read in readings(model.variant, model.groups) if model.chip.platform == "gpu" else ():
        op, o = read.operation, read.operand
        group, (_, *dims) = model.groups.place[read.stack]
        here, there = answer.where(answer.group[group], dims), answer.operand(op, o)
        if answer.resource(o.value, -1) == "prefetch":
            if is_turned(answer, here, there, len(o.dims)):
                size = model.values[read.stack].nbytes / answer.pieces(here)
                yield until.get(read.stack, read.begin), read.end, size
            until[read.stack] = read.end + 1
