"""What the states of groups and operations take of the compute resource: traffic of fused equations, random bits, transforms, products."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxauto.cost.compute import factor_dims, operation_seconds, traffic_seconds
from jaxauto.cost.halo import SIDES
from jaxauto.cost.launches import kernels
from jaxauto.cost.onchip import Near, capacity
from jaxauto.cost.transforms import beyond_traffic
from jaxauto.graph import multiplicity, walk
from jaxauto.groups import Operand, Operation
from jaxauto.solve.facts import buffer_runs, host_traffic
from jaxauto.strategies import project, shards

if TYPE_CHECKING:
    from jaxauto.solve.model import Model
    from jaxauto.solve.remat import Variant


def add_traffic(model: Model) -> None:
    """Of buffers, by class; of the host's link too."""
    b, chip, variant, count = model.buffers, model.chip, model.variant, len(model.classes)
    runs = model.cached(("runs", variant), lambda: buffer_runs(variant, model.groups))
    by_class = np.bincount(model.buffer_class, b.bytes_ * (b.reads + b.written) * runs, minlength=count)
    spared = _spared(model, runs)
    crossing = host_traffic(variant, model.groups)
    crossing["prefetch"] += b.bytes_ * _fed(model)
    from_host = {resource: np.bincount(model.buffer_class, bytes_, minlength=count) for resource, bytes_ in crossing.items()}
    for c, (v, _) in enumerate(model.classes):
        if by_class[c]:
            model.problem.add_unary("compute", v, traffic_seconds((by_class[c] - spared.get(c, 0.0)) * model.fraction[c], chip))
        for resource, bytes_ in from_host.items():
            if bytes_[c]:  # the batch comes anew each step, what is offloaded goes and comes: each device gets its piece
                model.problem.add_unary(resource, v, bytes_[c] / model.pieces[c] / chip.host_bandwidth)


def _fed(model: Model) -> np.ndarray:
    """Which buffers come from the host in every step: ``bool [buffers]``."""
    return model.buffers.is_input & ~np.isin(model.variant.origin, list(model.program.known_early))


def feeding_seconds(model: Model, x: np.ndarray) -> float:
    """What sending the batch from the host takes in solution ``x``, of the seconds of the resource "prefetch"."""
    bytes_ = np.bincount(model.buffer_class, model.buffers.bytes_ * _fed(model), minlength=len(model.classes))
    each = (bytes_[c] / model.pieces[c][x[v]] for c, (v, _) in enumerate(model.classes) if bytes_[c])
    return float(sum(each)) / model.chip.host_bandwidth


def add_launches(model: Model) -> None:
    """Starting kernels takes as long in any state: a constant, told with the first class of buffers."""
    if model.chip.launch_seconds and model.classes:
        v, _ = model.classes[0]
        seconds = model.chip.launch_seconds * launches(model.variant)
        model.problem.add_unary("compute", v, np.full(len(model.states[v]), seconds))


def add_unhidden(model: Model) -> None:
    """What random bits and transforms take beyond the bytes of their kernels, each device of its part of them."""
    for number, seconds in unhidden_seconds(model).items():
        group, dims = model.groups.place[number]
        v = model.var("group", group)
        model.problem.add_unary("compute", v, seconds / shards(project(model.states[v], dims), model.mesh.sizes))


def unhidden_seconds(model: Model) -> dict[int, float]:
    """Value as written → seconds of a step that it takes beyond the bytes of its kernels, on one device."""
    return model.cached(("unhidden", model.variant), lambda: _unhidden(model.variant, model.chip))


def _unhidden(variant: Variant, chip: Any) -> dict[int, float]:
    graph, total = variant.rewritten.graph, defaultdict(float)
    found = beyond_traffic(graph, variant.buffers, chip)
    runs = multiplicity(graph) if found else {}
    for node in walk(graph) if found else ():
        if node.id in found:
            (number,) = node.outputs
            total[variant.rewritten.origin.get(number, number)] += found[node.id] * runs[node.id]
    return dict(total)


def launches(variant: Variant) -> int:
    """Kernels that a step starts."""
    graph, runs = variant.rewritten.graph, multiplicity(variant.rewritten.graph)
    return sum(n * runs[i] for i, n in kernels(graph, variant.buffers, (node.id for _, node in variant.operations)).items())


def _spared(model: Model, runs: np.ndarray) -> dict[int, np.ndarray]:
    """Class → of the bytes that it moves, those of its buffers that fit on-chip memory, by state."""
    b, placed, found = model.buffers, model.placed, {}
    spared = b.bytes_ * (b.reads * placed.reads + b.written * placed.written) * runs
    short = np.nonzero(spared)[0]
    short = short[np.lexsort((b.bytes_[short], model.buffer_class[short]))]
    classes, first = np.unique(model.buffer_class[short], return_index=True)
    for c, mine in zip(classes.tolist(), np.split(short, first[1:]), strict=False):
        fitting = np.searchsorted(b.bytes_[mine], capacity(model.chip) / model.fraction[c], side="right")
        found[c] = np.concatenate([[0.0], np.cumsum(spared[mine])])[fitting]
    return found


def add_operations(model: Model) -> None:
    """Of operations, in each of their runs, and what they wait for at the edges of windows."""
    count: dict[tuple, float] = defaultdict(float)
    first: dict[tuple, tuple[Operation, Near]] = {}
    for op in model.groups.operations:
        for times, near in model.runs(op):
            sides = (op.operands, near.read), (op.results, near.written)
            held = (table.get((op.node.id, o.value)) for side, known in sides for o in side for table in (known, near.narrow, near.copied))
            key = model.var("operation", op.node.id), near.beside.get(op.node.id), *held
            count[key] += times
            first.setdefault(key, (op, near))
        if op.rule.halo:
            _add_borders(model, op)
    for key, (op, near) in first.items():
        seconds = model.cached(("seconds", key), lambda op=op, near=near: _seconds(model, op, near))
        model.problem.add_unary("compute", key[0], count[key] * seconds)


def _seconds(model: Model, op: Operation, near: Near) -> np.ndarray:
    state = model.states[model.var("operation", op.node.id)]
    return operation_seconds(op, model.values, state, model.mesh.sizes, model.chip, near)


def _add_borders(model: Model, op: Operation) -> None:
    """What an operation waits for at the edges of windows."""
    v, (always, more) = model.var("operation", op.node.id), model.exchanges(op)
    waited: dict[Operand, np.ndarray] = {}
    for k, state in enumerate(model.states[v]):
        for o, _, _, seconds in model.halo_collectives(op, state):
            waited.setdefault(o, np.zeros(len(model.states[v])))[k] += SIDES * seconds
    for o, seconds in waited.items():
        model.problem.add_unary("blocking", v, always * seconds)
        if more:
            other, same = model.borders[op.node.id]
            u = model.var("operation", other.node.id)
            here, there = project(model.states[u], factor_dims(other, same)), project(model.states[v], factor_dims(op, o))
            apart = more * seconds * (here[:, None] != there).any(-1)
            if u == v:
                model.problem.add_unary("blocking", v, apart.diagonal())
            else:
                model.problem.add_pair("blocking", u, v, apart)
