"""Candidate → Estimate: seconds, bytes and collectives of one step on one device, by kind."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from jaxauto.core import Collective, Estimate, Kind
from jaxauto.cost.compute import done_flops, operation_flops
from jaxauto.graph import walk
from jaxauto.solve.heap import PLACED, heap_gaps
from jaxauto.solve.live import timeline
from jaxauto.solve.model import Model
from jaxauto.solve.search import Candidate
from jaxauto.solve.work import feeding_seconds

MEMORY_KINDS = ("parameters", "optimizer state", "batch and other inputs", "activations kept", "gradients and updates", "transients")


def estimate(candidate: Candidate) -> Estimate:
    """What the planner believes of a candidate."""
    model, x = candidate.model, candidate.x
    compute = model.problem.resource("compute", x)
    prefetch, blocking = model.problem.resource("prefetch", x), model.problem.resource("blocking", x)
    fed = feeding_seconds(model, x)
    unfed = float(model.problem.total_seconds({"compute": compute, "prefetch": prefetch - fed, "blocking": blocking}))
    flops = local_flops(model, x)
    peak = model.chip.peak_flops(_widest_dtype(model))
    return Estimate(
        step_time=candidate.seconds,
        compute_time=compute,
        comm_time=prefetch + blocking,
        exposed_comm_time=candidate.seconds - compute,
        peak_memory=candidate.peak_bytes,
        memory=memory_by_kind(model, x),
        flops=flops,
        mfu=written_flops(model) / model.mesh.num_devices / candidate.seconds / peak if candidate.seconds else 0.0,
        collectives=collectives(model, x),
        feed_time=fed,
        exposed_feed_time=candidate.seconds - unfed if fed else 0.0,
        allocated=candidate.peak_bytes + heap_gaps(model, x) if model.chip.platform in PLACED else None,
    )


def local_flops(model: Model, x: np.ndarray) -> float:
    """Matrix flops of one device, recomputation included."""
    return sum(
        model.again(op.node.id) * float(done_flops(op, model.state(x, "operation", op.node.id)[None], model.mesh.sizes, model.chip)[0])
        for op in model.groups.operations
    )


def written_flops(model: Model) -> float:
    """Matrix flops of the step, all devices together, without recomputation, the user's own included.

    What model flops utilisation counts (arXiv 2204.02311, appendix B).
    """
    return sum(operation_flops(op) * op.times for op in model.groups.operations if not op.node.again)


def _widest_dtype(model: Model) -> Any:
    """The dtype that most matrix flops are done in."""
    by_dtype: dict[Any, float] = defaultdict(float)
    for op in model.groups.operations:
        if op.rule.kind in (Kind.DOT, Kind.CONV):
            by_dtype[model.values[op.operands[0].value].dtype] += operation_flops(op) * op.times
    return max(by_dtype, key=lambda d: by_dtype[d]) if by_dtype else np.dtype(np.float32)


def memory_by_kind(model: Model, x: np.ndarray) -> dict[str, float]:
    """Bytes of one device at the peak, by what they are; sums to the peak."""
    live = timeline(model, x)
    at = int(live.argmax())
    b, sizes = model.buffers, model.buffer_sizes(x)
    alive = (b.start <= at) & (b.end >= at)
    turn = _turn(model)
    kinds = dict.fromkeys(MEMORY_KINDS, 0.0)
    for k in np.nonzero(alive)[0]:
        number, early, late = int(model.variant.origin[k]), bool(b.start[k] < turn), bool(turn <= b.end[k])
        kinds[_kind(model, number, is_input=bool(b.is_input[k]), early=early, late=late)] += sizes[k]
    kinds["transients"] += float(live[at]) - float(sizes[alive].sum())
    return kinds


def _kind(model: Model, number: int, *, is_input: bool, early: bool, late: bool) -> str:
    """``early``: made before the backward pass; ``late``: read in it or after."""
    program = model.program
    if is_input:
        if number not in program.known_early:
            return "batch and other inputs"
        return "optimizer state" if number in program.late_only else "parameters"
    if early:
        return "activations kept" if late else "transients"
    return "gradients and updates" if number in program.late_only else "transients"


def _turn(model: Model) -> int:
    """The position where the backward pass begins."""
    return min(
        (model.buffers.position[n.id] for n in walk(model.variant.rewritten.graph) if n.backward and n.id in model.buffers.position),
        default=0,
    )


def collectives(model: Model, x: np.ndarray) -> tuple[Collective, ...]:
    """Collectives of the step, alike ones of one place counted together, the costliest first."""
    nodes = {node.id: node for node in walk(model.groups.graph)}
    count: dict[tuple, float] = defaultdict(float)
    for kind, bytes_, axes, times, seconds, _, node in model.collectives(x):
        where = nodes[node].scope or nodes[node].source if node in nodes else ""
        count[kind, bytes_, tuple(model.mesh.names[a] for a in axes), seconds, where] += times
    found = [Collective(kind, bytes_, axes, times, seconds, where) for (kind, bytes_, axes, seconds, where), times in count.items()]
    return tuple(sorted(found, key=lambda c: (-c.seconds * c.count, c.kind, c.axes, c.where)))
