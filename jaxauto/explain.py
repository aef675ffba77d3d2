"""Why a plan is what it is: what binds memory, what costs time, and what another sharding of an argument would cost."""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxauto import alternatives, compat
from jaxauto.core import Trips
from jaxauto.cost.compute import operation_seconds, traffic_seconds
from jaxauto.errors import ArgumentError
from jaxauto.naming import fold_paths, local_shape, mask, mask_all, mask_place, short_source, spec_text
from jaxauto.options import mesh_axes
from jaxauto.solve.facts import buffer_runs
from jaxauto.solve.live import timeline
from jaxauto.solve.search import Candidate
from jaxauto.solve.work import launches, unhidden_seconds
from jaxauto.strategies import shards
from jaxauto.tables import Section, as_text, duration, share, size
from jaxauto.targets.target import Target
from jaxauto.undivided import undivided

if TYPE_CHECKING:
    from jaxauto.plan import Plan

_ROWS = 8  # of the largest or costliest
_HASHED = "random bits: hashes beyond the memory traffic"
_UNHIDDEN = {"fft": "Fourier transforms: products beside the memory traffic"}
_ARGUMENTS = 4  # different arguments of one glob that are explained


def explain(plan: Plan, path: str | None = None) -> str:
    """Plain text: the whole plan, or with ``path`` (an argument path or a glob) the sharding of those arguments.

    With a path the step is solved again for each of a handful of other shardings, under a short time limit.

    Raises:
      ArgumentError: ``path`` matches no argument.
    """
    return as_text(_whole(plan) if path is None else _arguments(plan, path))


# ------------------------------------------------------------------------------------------------------------------- whole


def _whole(plan: Plan) -> list[Section]:
    solved = alternatives.solved_of(plan)
    sections = [_memory(plan)]
    if solved is not None:
        sections.append(_largest(plan, solved.found.best))
        sections.append(_operations(plan, solved.found.best))
    sections += [_collectives(plan), _meshes(plan), _undivided(plan), _alternatives(plan)]
    return [s for s in sections if s.rows or s.lines]


def _memory(plan: Plan) -> Section:
    e = plan.estimate
    room = plan.budget_bytes - e.peak_memory
    rows = [(name, size(b), share(b, e.peak_memory)) for name, b in sorted(e.memory.items(), key=lambda kv: -kv[1]) if b > 0]
    again = [d for d in plan.remat if d.action == "recomputed"]
    lines = [f"Peak {size(e.peak_memory)} of a budget of {size(plan.budget_bytes)} on each device: {size(room)} to spare."]
    if again:
        lines.append(
            f"{size(sum(d.bytes_ for d in again))} of activations are recomputed, in {duration(sum(d.seconds for d in again))} of a step."
        )
    elif plan.remat:
        lines.append("No activation is recomputed.")
    lines += [_in_parts(parts) for parts in plan.decisions.splits.values()]
    return Section("What binds memory", ("at the peak", ">bytes", ">share"), rows, lines)


def _in_parts(parts: Sequence[Trips]) -> str:
    """How the trips of a loop differ."""

    def how(part: Trips) -> str:
        if not part.inside:
            return f"{part.count} each by itself"
        within = part.inside[0] if len(part.inside) == 1 else None
        deeper = f" ({', then '.join(map(how, part.inside))})" if within is None or within.inside else ""
        return f"{part.count} again in segments of {part.length}{deeper}"

    return f"The trips of a loop differ: {', then '.join(map(how, parts))}."


def _largest(plan: Plan, best: Candidate) -> Section:
    """The largest values alive at the peak; alike ones are counted together."""
    model, live = best.model, timeline(best.model, best.x)
    b, sizes, at = model.buffers, model.buffer_sizes(best.x), int(live.argmax())
    inputs = {number: plan.in_paths[k] for k, number in enumerate(model.groups.graph.inputs)}
    total: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0])
    paths: dict[tuple, list[str]] = defaultdict(list)
    for k in np.nonzero((b.start <= at) & (b.end >= at))[0]:
        number = int(model.variant.origin[k])
        value = model.values[number]
        what = mask(inputs[number]) if number in inputs else _place(value.producer)
        key = (what, str(value.dtype), str(list(value.shape)))
        paths[key] += [inputs[number]] if number in inputs else []
        total[key][0] += 1
        total[key][1] += float(sizes[k])
    ordered = sorted(total.items(), key=lambda kv: -kv[1][1])[:_ROWS]
    rows = [
        (
            ", ".join(n for n, _, _ in fold_paths(paths[key])[:2]) or key[0],
            f"{key[1]}{key[2]}",
            f"{count:.0f}",
            size(bytes_),
            share(bytes_, best.peak_bytes),
        )
        for key, (count, bytes_) in ordered
    ]
    return Section("Largest values alive at the peak", ("value", "whole array", ">count", ">bytes on a device", ">share"), rows)


def _place(node: Any) -> str:
    """Scope, primitive and source of a node; numbers of layers hidden."""
    if node is None:
        return "input of a loop"
    name = f"{node.scope}/{node.prim}" if node.scope else node.prim
    return mask_all(name) + (f"  {short_source(node.source)}" if node.source else "")


def _operations(plan: Plan, best: Candidate) -> Section:
    """The costliest operations, and what fused elementwise equations move."""
    model, total = best.model, defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for op in model.groups.operations:
        state = model.state(best.x, "operation", op.node.id)[None]
        name = _place(op.node) + ("  (backward)" if op.node.backward else "")
        for times, near in model.runs(op):
            total[name] += times * float(operation_seconds(op, model.values, state, model.mesh.sizes, model.chip, near)[0])
            count[name] += times
    b = model.buffers
    moved = float((model.buffer_sizes(best.x) * (b.reads + b.written) * buffer_runs(model.variant, model.groups)).sum())
    total["fused elementwise equations: memory traffic"] = float(traffic_seconds(moved, model.chip))
    if model.chip.launch_seconds:
        count["starting kernels"] = launches(model.variant)
        total["starting kernels"] = count["starting kernels"] * model.chip.launch_seconds
    for number, seconds in unhidden_seconds(model).items():
        pieces = shards(model.position(best.x, number)[None], model.mesh.sizes)
        made = model.groups.graph.values[number].producer
        total[_HASHED if made is None else _UNHIDDEN.get(made.prim, _HASHED)] += seconds / float(pieces[0])
    compute = plan.estimate.compute_time
    ordered = sorted(total.items(), key=lambda kv: -kv[1])[:_ROWS]
    rows = [(name, str(count[name] or ""), duration(s), share(s, compute)) for name, s in ordered]
    return Section("What costs time: computation", ("operation", ">times", ">seconds", ">of compute"), rows)


def _collectives(plan: Plan) -> Section:
    e = plan.estimate
    total: dict[tuple, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for c in e.collectives:
        entry = total[c.kind, c.axes, mask_place(c.where)]
        entry[0] += c.count
        entry[1] += c.count * c.seconds
    ordered = sorted(total.items(), key=lambda kv: (-kv[1][1], kv[0]))[:_ROWS]
    rows = [(k, ", ".join(a), where, f"{n:.0f}", duration(s), share(s, e.step_time)) for (k, a, where), (n, s) in ordered]
    lines = [f"Communication {duration(e.comm_time)}, of which {duration(e.exposed_comm_time)} are not hidden behind computation."]
    return Section("What costs time: communication", ("kind", "mesh axes", "where", ">count", ">seconds", ">of the step"), rows, lines)


def _meshes(plan: Plan) -> Section:
    ordered = sorted((s, name) for name, s in plan.solver.meshes.items())
    rows = [(name, duration(s) if s < math.inf else "does not fit") for s, name in ordered]
    return Section("Mesh shapes", ("mesh", ">seconds of a step"), rows)


def _undivided(plan: Plan) -> Section:
    """What could not be split, and what padding it would gain: the step is solved once more."""
    e = plan.estimate
    found = undivided(plan.in_paths, plan.in_avals, mesh_axes(dict(plan.mesh.shape), Target(plan.target)))
    paths: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    for u in found:
        paths[u.dim, u.size, u.padded].append(u.path)
    rows = [(", ".join(n for n, _, _ in fold_paths(ps)[:3]), str(d), str(n), str(more)) for (d, n, more), ps in paths.items()]
    better = alternatives.if_padded(plan) if rows else None
    lines = []
    if better is not None:
        step, peak = better.step_time - e.step_time, better.peak_memory - e.peak_memory
        time_ = f"{duration(better.step_time)} ({alternatives.signed(step, duration)})"
        room = f"{size(better.peak_memory)} ({alternatives.signed(peak, size)})"
        lines = [f"Padded, the best plan found takes {time_} and {room}: {alternatives.difference(e, better)}."]
    return Section("What no mesh axis divides", ("argument", ">dimension", ">of size", ">padded to"), rows, lines)


def _alternatives(plan: Plan) -> Section:
    s = plan.solver
    bound = (
        f"No sharding on this mesh, with any of the levels of rematerialisation that were searched, takes less than {duration(s.bound)} by "
        f"the same estimate: this plan is within {100 * s.gap:.1f} % of that."
    )
    beyond = "Not covered: levels between those, mixtures of them that were not kept, meshes that are not listed, what the estimate misses."
    return Section(
        "Alternatives",
        lines=[bound, beyond, "plan.explain(path) solves again with other shardings of one argument, and says what each would cost."],
    )


# --------------------------------------------------------------------------------------------------------------- arguments


def _arguments(plan: Plan, pattern: str) -> list[Section]:
    alike: dict[tuple, list[int]] = defaultdict(list)
    for k, (path, aval, spec) in enumerate(zip(plan.in_paths, plan.in_avals, plan.in_specs, strict=True)):
        if path == pattern or fnmatch.fnmatchcase(path, pattern):
            alike[mask(path), aval.shape, str(aval.dtype), spec].append(k)
    if not alike:
        close = ", ".join(alternatives.close_to(pattern, plan.in_paths))
        raise ArgumentError(f"no argument matches {pattern!r}; paths look like {close}.")
    sections: list[Section] = []
    for members in list(alike.values())[:_ARGUMENTS]:
        sections += _argument(plan, members)
    if len(alike) > _ARGUMENTS:
        sections.append(Section(f"{len(alike) - _ARGUMENTS} more arguments match {pattern!r}: name them to have them explained."))
    return sections


def _argument(plan: Plan, members: Sequence[int]) -> list[Section]:
    """One argument, or alike arguments of repeated layers, which are constrained together."""
    aval, spec = plan.in_avals[members[0]], plan.in_specs[members[0]]
    name = ", ".join(n for n, _, _ in fold_paths(plan.in_paths[k] for k in members))
    local = local_shape(aval.shape, spec, dict(plan.mesh.shape))
    bytes_ = math.prod(local) * compat.itemsize(aval.dtype)
    what = f"{aval.dtype}{list(aval.shape)}, {spec_text(spec)}: {list(local)} on each device, {size(bytes_)}"
    if not aval.shape:
        return [Section(name, lines=[what, "A scalar is on every device."])]
    if alternatives.solved_of(plan) is None:
        return [
            Section(name, lines=[what, "The plan was loaded from a file: call jaxauto.plan again to ask what another sharding would cost."])
        ]
    e = plan.estimate
    chosen = (f"{spec_text(spec)}  (chosen)", duration(e.step_time), "", size(e.peak_memory), "")
    trials = alternatives.try_all(plan, [plan.in_paths[k] for k in members], aval.shape, spec)
    rows = [chosen, *(_trial_row(trial, plan) for trial in trials)]
    columns = ("sharding", ">step", ">against it", ">peak", "why")
    lines = ["Each is the best plan found that has it, on the same mesh and budget; everything else is free to change."]
    return [Section(name, lines=[what]), Section("Why not another", columns, rows, lines)]


def _trial_row(trial: alternatives.Trial, plan: Plan) -> tuple[str, ...]:
    if trial.estimate is None:
        return (spec_text(trial.spec), "-", "", "-", trial.reason)
    seconds = trial.estimate.step_time - plan.estimate.step_time
    return (
        spec_text(trial.spec),
        duration(trial.estimate.step_time),
        alternatives.signed(seconds, duration),
        size(trial.estimate.peak_memory),
        trial.reason,
    )
