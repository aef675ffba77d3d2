"""What a device holds beside the buffers of a program: sums before they are scattered, and copies that layouts cost.

Not what operands are resharded into: see ``brought.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxauto.core import Kind, Node
from jaxauto.cost.compute import factor_dims, operand_bytes
from jaxauto.cost.halo import halos
from jaxauto.cost.turning import turned
from jaxauto.graph import walk
from jaxauto.groups import Edge, Operand, Operation
from jaxauto.rewrite.order import SCATTERS
from jaxauto.solve.brought import Way, laid, shares_on_the_way
from jaxauto.solve.early import held_early
from jaxauto.solve.facts import source_of, take_places, viewed
from jaxauto.solve.padded import held_padded
from jaxauto.solve.pooled import held_pooled
from jaxauto.solve.positions import edge_layout, moved_share, reduced_factors
from jaxauto.solve.put_off import held_for_gradients
from jaxauto.solve.read_twice import held_for_both
from jaxauto.solve.tables import held_tables
from jaxauto.solve.turns import Row, beside_loops, beside_results, cut_results, in_order, update_begins, updating
from jaxauto.solve.widened import held_widened
from jaxauto.strategies import WHOLE, project, shards

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


@dataclass(frozen=True, eq=False)
class Beside:
    """``pairs[which[k]]`` is there from position ``begin[k]`` to ``end[k]``: two variables in their order, bytes by their states.

    ``widened[k]``: it is a dot's, in float32 (``held_widened``).
    """

    begin: np.ndarray
    end: np.ndarray
    which: np.ndarray
    pairs: list[tuple[int, int, np.ndarray]]
    widened: np.ndarray

    def at(self, position: int) -> Iterator[tuple[int, int, np.ndarray]]:
        there = self.which[(self.begin <= position) & (position <= self.end)]
        return (self.pairs[k] for k in there.tolist())

    def bytes_(self, x: np.ndarray) -> np.ndarray:
        """Of each, under solution ``x``."""
        return np.array([table[x[i], x[j]] for i, j, table in self.pairs])[self.which] if self.pairs else np.zeros(0)

    def timeline(self, x: np.ndarray, length: int) -> np.ndarray:
        """Bytes at each position under solution ``x``: ``[length]``."""
        bytes_ = self.bytes_(x)
        steps = np.zeros(length + 1)
        np.add.at(steps, self.begin, bytes_)
        np.add.at(steps, self.end + 1, -bytes_)
        return np.cumsum(steps)[:-1]


def held_beside(model: Model) -> Beside:
    """All of it, for a variant on a mesh."""
    return model.cached(("beside", model.variant), lambda: _collected(model))


def _collected(model: Model) -> Beside:
    of = [(row, rows is held_widened) for rows in _ROWS for row in rows(model)]
    rows = [row for row, _ in of]
    index: dict[tuple[int, int, int], int] = {}
    pairs: list[tuple[int, int, np.ndarray]] = []
    which = []
    for _, _, i, j, table in rows:
        key = i, j, table.__array_interface__["data"], table.shape, table.strides  # one array, however often its view was taken
        if key not in index:
            index[key] = len(pairs)
            pairs.append((i, j, table))
        which.append(index[key])
    begin, end = (np.array([row[k] for row in rows], int) for k in (0, 1))
    return Beside(begin, end, np.array(which, int), pairs, np.array([widened for _, widened in of], bool))


def _of_results(model: Model) -> Iterator[Row]:
    """What lies beside results as operations make them."""
    for op, node in model.variant.operations:
        at = model.buffers.position.get(node.id)
        for o in op.results if at is not None else ():
            v, g = model.var("operation", op.node.id), model.var("group", o.group)
            yield from in_order(at, at, v, g, model.result_tables(op, o)[2])
            begin = filled_at(model, node, at)
            if begin < at:
                yield from in_order(begin, at - 1, v, g, model.cached(("whole", v, g, o.value), lambda op=op, o=o: _as_made(model, op, o)))


def _cut_as_read(model: Model) -> Iterator[Row]:
    """What a device makes of a result beyond the part that it keeps."""
    for op, o, begin, end in cut_as_read(model):
        v, g = model.var("operation", op.node.id), model.var("group", o.group)
        yield from in_order(begin, end, v, g, model.cached(("cut as read", v, g, o.value), lambda op=op, o=o: _beyond(model, op, o)))


def cut_as_read(model: Model) -> list[tuple[Operation, Operand, int, int]]:
    """(operation, its result, from where to where all of that is in memory that a device makes), where it may keep a part of it.

    No collective is needed for a part. XLA:TPU cuts it in every kernel that reads it, so all lies there until the last has run; XLA:GPU and
    XLA:CPU write the part, and what leaves the step is one (compiled for eight devices: one dot made whole, its result split by rows).
    """
    return model.cached(("cut as read", model.variant), lambda: list(_cuts(model)))


def _cuts(model: Model) -> Iterator[tuple[Operation, Operand, int, int]]:
    b, outputs = model.buffers, {*model.variant.rewritten.graph.outputs}
    index = {int(n): k for k, n in enumerate(b.ids)} if model.chip.platform == "tpu" else {}
    for op, node in model.variant.operations:
        at = b.position.get(node.id)
        for o in op.results if at is not None else ():
            number = node.outputs[op.node.outputs.index(o.value)]
            k = index.get(number) if number not in outputs else None
            yield op, o, at, at if k is None else max(at, int(b.end[k]))


def _beyond(model: Model, op: Operation, o: Operand) -> np.ndarray:
    """Bytes of a result as made without those of the part that is kept, by the states of operation and group."""
    state, sizes = model.states[model.var("operation", op.node.id)], model.mesh.sizes
    here, there = project(state, factor_dims(op, o)), project(model.states[model.var("group", o.group)], tuple(d for d, _ in o.dims))
    partial = np.isin(state, reduced_factors(op, o)).any(-1)
    cut = ((here[:, None] == there[None]) | (here[:, None] == WHOLE)).all(-1) & ~partial[:, None]
    return model.values[o.value].nbytes * cut * (1 / shards(here, sizes)[:, None] - 1 / shards(there, sizes)[None])


def _bordered(model: Model) -> Iterator[Row]:
    """What convolutions make as they read it, whose borders neighbours are sent: it is in memory for that, up to the last that reads it."""
    for op, o, begin, end in bordered(model):
        v, g = model.var("operation", op.node.id), model.var("group", o.group)
        table = model.cached(("bordered", v, g, o.value), lambda op=op, o=o, g=g: _split_bytes(model, op, o, len(model.states[g])))
        yield from in_order(begin, end, v, g, table)


def bordered(model: Model) -> list[tuple[Operation, Operand, int, int]]:
    """(first operation that may exchange borders, its operand, where that is made, where it is read last), of what has no buffer."""
    return model.cached(("bordered", model.variant), lambda: _made_for_borders(model))


def borders_held(model: Model, x: np.ndarray) -> Iterator[tuple[int, int, float]]:
    """(where it is made, where it is read last, bytes of one device) of what is in memory for its borders under ``x``."""
    for begin, end, first, second, table in _bordered(model):
        yield begin, end, float(table[x[first], x[second]])


def _made_for_borders(model: Model) -> list[tuple[Operation, Operand, int, int]]:
    rewritten, b = model.variant.rewritten, model.buffers
    held = {int(number) for number in b.ids}
    first: dict[int, tuple[Operation, Operand]] = {}
    last: dict[int, int] = {}
    for op, node in sorted(model.variant.operations, key=lambda pair: b.position.get(pair[1].id, -1)):
        sent = {o.value: o for _, o, _ in halos(op)}
        for x in op.node.inputs if node.id in b.position and op.rule.kind is Kind.CONV else ():
            number = viewed(model.groups, rewritten, node.inputs[op.node.inputs.index(x)], held)
            if isinstance(number, int) and number not in held:
                last[number] = b.position[node.id]
                if x in sent:
                    first.setdefault(number, (op, sent[x]))
    made = {number: node for number in first if (node := rewritten.graph.values[number].producer) is not None and node.id in b.position}
    placed = take_places(made, rewritten.graph, b)
    return [(*first[n], b.position[node.id], last[n]) for n, node in made.items() if n not in placed]


def _split_bytes(model: Model, op: Operation, o: Operand, states: int) -> np.ndarray:
    """A device's part of an operand where a dimension is split whose borders are sent, by the states of operation and group."""
    state, sent = model.states[model.var("operation", op.node.id)], [k for k, of, _ in halos(op) if of.value == o.value]
    split = np.isin(state, sent).any(-1)
    rounded = model.operand_bytes(op, o) / model.passage_bytes(o.value)
    return np.repeat((split * rounded * operand_bytes(o, op, model.values, state, model.mesh.sizes, model.chip))[:, None], states, axis=1)


def _shared(model: Model) -> Iterator[Row]:
    """Arrays resharded once for several operations (``Groups.share_operands``): from the first that reads them to the last."""
    for number, view, dims, begin, end in shared_operands(model):
        group, own = model.groups.place[number]
        way = Way(model.var("group", group), own, model.var("group", view), dims, laid(model, number, view, dims))
        bytes_ = (0.5 if model.is_rounded(number, view) else 1.0) * model.values[number].nbytes
        table = model.cached(("shared", way, bytes_), lambda way=way, n=bytes_: n * shares_on_the_way(model, way)[1])
        yield from in_order(begin, end, way.group, way.operation, table)


def _passed(model: Model) -> Iterator[Row]:
    """Arrays resharded for equations that are fused: momentum that is gathered for the update of a whole weight.

    What an update writes from an array gathered at odds with its layout is copied into the layout of the caller.
    """
    for e, begin, end in passed_edges(model):
        a, b = model.var("group", e.source), model.var("group", e.target)
        copies = "gpu" if model.chip.platform == "gpu" and begin < end else None
        bytes_ = model.values[e.result if e.node in model.narrowing else e.value].nbytes
        key = a, b, e.dims, e.reduced, bytes_, copies
        yield from in_order(begin, end, a, b, model.cached(("passed", *key), lambda key=key: _passed_bytes(model, *key)))


def _passed_bytes(
    model: Model, a: int, b: int, dims: tuple[int, ...], reduced: tuple[int, ...], bytes_: float, copies: str | None
) -> np.ndarray:
    """``copies``: the platform whose copies of what is at odds with its layout count too."""
    here, there, _, _ = edge_layout(model.states[a], model.states[b], dims, reduced, model.mesh.sizes)
    share = moved_share(here, there, model.mesh.sizes)
    return bytes_ * (share * (1 + turned(here, there, len(dims), copies)) if copies else share)


def passed_edges(model: Model) -> list[tuple[Edge, int, int]]:
    """(edge into an equation, first and last position of what it reshards), each array once for a group and position.

    What such an equation writes itself takes the place of what it reads. A narrowed array that is fused is there up to the last operation
    of its pass that reads it. What the update gathers is there as it begins, until the step ends: an update writes all that it makes of
    an array at once. One of a weight's arrays is on its way before (``updating``).
    """
    b, begins, found, ahead = model.buffers, update_begins(model), {}, updating(model)
    late, early, readers = model.program.late_only, model.program.known_early, _readers(model)
    copies = _copies(model, readers)
    for e in model.groups.edges:
        if e.node < 0 or model.var("group", e.source) == model.var("group", e.target):
            continue
        stays = e.result in b.stored and model.values[e.result].nbytes >= model.values[e.value].nbytes
        updates = e.result in late and not e.backward
        for node_id, at, made in copies.get(e.node, ()):
            if at is None or (stays and node_id == e.node):
                continue
            if updates and (e.value in early or at >= begins):
                gradient, early_on = ahead.get((e.node, e.operand), (-1, False))
                first, last = min(begins, b.position.get(gradient, begins)) if early_on else begins, b.length - 1
            else:
                first, last = at, max([at, *(readers.get(x, (at, at))[1] for x in made if e.node in model.narrowing)])
            found.setdefault((e.value, e.target, e.dims, last), (e, first, last))
    return list(found.values())


_Made = tuple[int, int | None, tuple[int, ...]]  # node that makes something (-1: a trip brings it in), where, and what


def _copies(model: Model, readers: Mapping[int, tuple[int, int]]) -> dict[int, list[_Made]]:
    """Nodes that convert to a narrower type, as written → as often as the rewritten program has them; all others, themselves.

    What is narrowed before a loop comes into the sharding that its readers want in each trip, for the first of them.
    """
    rewritten, values, position = model.variant.rewritten, model.values, model.buffers.position
    found: dict[int, list[_Made]] = {}

    def narrowed_by(number: int) -> int | None:
        made = values[rewritten.origin.get(number, number)].producer
        return made.id if made is not None and made.id in model.narrowing else None

    for node in walk(rewritten.graph):
        for x in (x for body in node.bodies for x in body.inputs if x in readers):
            if (of := narrowed_by(x)) is not None:
                found.setdefault(of, []).append((-1, readers[x][0], (x,)))
        of = narrowed_by(node.outputs[0]) if node.outputs else None
        if of in (None, node.id) or node.prim == "convert_element_type":
            found.setdefault(node.id if of is None else of, []).append((node.id, position.get(node.id), node.outputs))
    return found


def _readers(model: Model) -> dict[int, tuple[int, int]]:
    """Of what operations read as they run, and what that is a view of: the positions of the first and the last of them."""
    rewritten, b, found = model.variant.rewritten, model.buffers, {}
    for _, node in model.variant.operations:
        todo = [*node.inputs] if node.id in b.position else []
        while todo:
            if isinstance(x := todo.pop(), int) and x not in b.stored:
                at = b.position[node.id]
                first, last = found.get(x, (at, at))
                found[x] = min(first, at), max(last, at)
                todo.append(source_of(model.groups, rewritten, x))
    return found


def shared_operands(model: Model) -> list[tuple[int, int, tuple[int, ...], int, int]]:
    """(value as written, group that it is resharded to, its dimensions there, positions of the first and the last operation that reads it
    there)."""
    found: dict[tuple[int, int], tuple[int, tuple[int, ...], int, int]] = {}
    for op, node in model.variant.operations:
        at = model.buffers.position.get(node.id)
        for o in op.operands if at is not None else ():
            if at is not None and o.group != model.groups.place[o.value][0]:
                key = node.inputs[op.node.inputs.index(o.value)], o.group
                *_, begin, end = found.get(key, (at, at))
                found[key] = o.value, tuple(d for d, _ in o.dims), min(begin, at), max(end, at)
    return [(number, view, *rest) for (_, view), (number, *rest) in found.items()]


def _as_made(model: Model, op: Operation, o: Operand) -> np.ndarray:
    """Bytes of a result as its operation makes it, by the states of operation and group."""
    pieces = shards(project(model.states[model.var("operation", op.node.id)], factor_dims(op, o)), model.mesh.sizes)
    return np.repeat(model.values[o.value].nbytes / pieces[:, None], len(model.states[model.var("group", o.group)]), axis=1)


def filled_at(model: Model, node: Node, at: int) -> int:
    """Where the array is made that an operation at ``at`` writes into.

    On several devices XLA:GPU fills with zeros what the backward pass scatters into as that pass begins: its scheduler hides collectives,
    and starts early what waits for nothing (``liveness.fill_early``).
    """
    if model.chip.platform != "gpu" or node.prim not in SCATTERS or model.mesh.num_devices == 1:
        return at
    straight = [n for n in model.variant.rewritten.graph.nodes if n.backward]
    if node.id not in {n.id for n in straight}:
        return at
    return min(model.buffers.loop_start.get(n.id, model.buffers.position[n.id]) for n in straight)


_ROWS = (
    _of_results,
    _cut_as_read,
    held_early,
    _bordered,
    _shared,
    _passed,
    beside_loops,
    beside_results,
    cut_results,
    held_for_gradients,
    held_for_both,
    held_widened,
    held_padded,
    held_pooled,
    held_tables,
)
