"""A plan as tables for people: on a terminal, in a notebook, on a page. Reads only."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxauto import compat
from jaxauto.core import Collective
from jaxauto.explain import explain
from jaxauto.naming import fold_paths, fold_words, local_shape, mask, mask_all, spec_text
from jaxauto.tables import Section, as_html, as_text, duration, flops, page, share, size
from jaxauto.writing import write_text

if TYPE_CHECKING:
    from jaxauto.plan import Plan, SolverReport
    from jaxauto.verify import Row, Traffic, Verification

__all__ = ["explain", "html", "sections", "summary", "verification_html", "verification_table", "write_html"]


def summary(plan: Plan) -> str:
    """The plan as plain text tables."""
    return as_text(sections(plan))


def html(plan: Plan) -> str:
    """The plan as an HTML fragment for notebooks."""
    return as_html(sections(plan))


def write_html(plan: Plan, path: str) -> str:
    """Write the plan as a page of its own; returns ``path``."""
    write_text(path, page(html(plan), f"jaxauto plan for {plan.target}"))
    return path


def sections(plan: Plan) -> list[Section]:
    """What ``summary`` and ``html`` show."""
    found = [
        Section("Plan", ("", ""), _header(plan)),
        Section("Arguments", ("argument", "shape", "dtype", "sharding", ">on each device"), _arguments(plan)),
        Section("Rematerialisation", ("block", "action", ">arrays", ">bytes", ">seconds to make again"), _remat(plan)),
        Section("Predicted time of a step", ("", ">seconds", ">share"), _time(plan)),
        Section("Memory of one device at the peak", ("what", ">bytes", ">of the budget"), _memory(plan)),
        Section("Collectives of a step", ("kind", "mesh axes", ">count", ">bytes", ">seconds"), _collectives(plan.estimate.collectives)),
        Section("Notes", lines=[f"- {note}" for note in plan.notes]),
    ]
    return [s for s in found if s.rows or s.lines]


def _header(plan: Plan) -> list[tuple[str, str]]:
    solver, certificate = plan.solver, plan.certificate
    rows = [
        ("mesh", " x ".join(f"{name}={n}" for name, n in dict(plan.mesh.shape).items())),
        ("target", plan.target),
        ("memory budget", f"{size(plan.budget_bytes)} on each device"),
        ("solver", f"{solver.status}, gap {100 * solver.gap:.1f} %, {_searching(solver.seconds):.1f} s, {_tried(solver)}"),
    ]
    if certificate is not None:
        verdict = "fits" if certificate.fits else "DOES NOT FIT"
        needs = f"{certificate.compiler} needs {size(certificate.bytes_)} of {size(certificate.budget_bytes)}"
        rows.append(("certificate", f"{verdict}: {needs}, round {certificate.rounds}"))
    return rows


def _tried(solver: SolverReport) -> str:
    meshes = f"{len(solver.meshes)} mesh shape{'s' * (len(solver.meshes) != 1)}"
    return f"{solver.variables} variables, {solver.constraints} constraints, {meshes}"


def _searching(seconds: Mapping[str, float]) -> float:
    return seconds.get("all meshes", sum(seconds.values()))


# --------------------------------------------------------------------------------------------------------------- arguments


def _arguments(plan: Plan) -> list[tuple[str, ...]]:
    sizes = dict(plan.mesh.shape)
    alike: dict[tuple, list[str]] = defaultdict(list)
    for path, aval, spec in zip(plan.in_paths, plan.in_avals, plan.in_specs, strict=True):
        bytes_ = math.prod(local_shape(aval.shape, spec, sizes)) * compat.itemsize(aval.dtype)
        alike[mask(path), str(list(aval.shape)), str(aval.dtype), spec_text(spec), bytes_].append(path)
    order = {path: k for k, path in enumerate(plan.in_paths)}
    rows: dict[tuple, list[tuple[str, int]]] = defaultdict(list)
    for (_, shape, dtype, spec, bytes_), paths in alike.items():
        for name, count, first in fold_paths(paths):
            rows[shape, dtype, spec, bytes_, count].append((name, order[first]))
    found = []
    for (shape, dtype, spec, bytes_, count), named in rows.items():
        for name, total, k in fold_words([name for name, _ in named]):
            found.append((named[k][1], (name, shape, dtype, spec, _times(count * total, bytes_))))
    return [row for _, row in sorted(found, key=lambda r: r[0])]


def _times(count: int, bytes_: float) -> str:
    return size(bytes_) if count == 1 else f"{count} x {size(bytes_)}"


# --------------------------------------------------------------------------------------------------- what the plan predicts


def _remat(plan: Plan) -> list[tuple[str, ...]]:
    total: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    blocks: dict[str, set[str]] = defaultdict(set)
    for decision in plan.remat:
        block = decision.name.partition(":")[0]
        pattern = mask_all(block)
        blocks[pattern].add(block)
        entry = total[pattern, decision.action]
        entry[0] += 1
        entry[1] += decision.bytes_
        entry[2] += decision.seconds
    names = {pattern: members.copy().pop() if len(members) == 1 else f"{pattern} ({len(members)})" for pattern, members in blocks.items()}
    return [
        (names[pattern], action, str(int(count)), size(bytes_), duration(seconds) if action == "recomputed" else "-")
        for (pattern, action), (count, bytes_, seconds) in total.items()
    ]


def _time(plan: Plan) -> list[tuple[str, str, str]]:
    e = plan.estimate
    rows = [
        ("step", duration(e.step_time), share(e.step_time, e.step_time)),
        ("compute", duration(e.compute_time), share(e.compute_time, e.step_time)),
        ("communication", duration(e.comm_time), share(e.comm_time, e.step_time)),
        ("  of it the batch's way from the host", duration(e.feed_time), share(e.feed_time, e.step_time)),
        ("  of it exposed", duration(e.exposed_comm_time), share(e.exposed_comm_time, e.step_time)),
        ("model flops utilisation", "", f"{100 * e.mfu:.1f} %"),
    ]
    others = sorted((seconds, name) for name, seconds in plan.solver.meshes.items())
    if len(others) > 1:
        rows += [(f"mesh {name}", duration(seconds) if seconds < math.inf else "does not fit", "") for seconds, name in others[:6]]
    return rows


def _memory(plan: Plan) -> list[tuple[str, str, str]]:
    e = plan.estimate
    parts = sorted(e.memory.items(), key=lambda kv: -kv[1])
    rows = [(name, size(bytes_), share(bytes_, plan.budget_bytes)) for name, bytes_ in parts if bytes_ > 0]
    told = [("peak", e.peak_memory), *([] if e.allocated is None else [("allocated, with the gaps in its heap", e.allocated)])]
    return [*((name, size(bytes_), share(bytes_, plan.budget_bytes)) for name, bytes_ in told), *rows]


def _collectives(collectives: Sequence[Collective]) -> list[tuple[str, ...]]:
    total: dict[tuple, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for c in collectives:
        entry = total[c.kind, c.axes]
        entry[0] += c.count
        entry[1] += c.count * c.bytes_
        entry[2] += c.count * c.seconds
    ordered = sorted(total.items(), key=lambda kv: (-kv[1][2], kv[0]))
    return [(kind, ", ".join(axes), f"{count:.0f}", size(bytes_), duration(seconds)) for (kind, axes), (count, bytes_, seconds) in ordered]


# ------------------------------------------------------------------------------------------------------------ verification

_WRITTEN = {"bytes": size, "seconds": duration, "flops": flops}


def verification_table(verification: Verification) -> str:
    """Estimate beside compiler, as plain text."""
    return as_text(verification_sections(verification))


def verification_html(verification: Verification) -> str:
    """Estimate beside compiler, as an HTML fragment."""
    return as_html(verification_sections(verification))


def verification_sections(verification: Verification) -> list[Section]:
    """What ``verification_table`` shows: totals, collectives by kind and mesh axes, and the verdict."""
    v = verification
    needed = v.row("allocated").compiled or 0.0
    verdict = "within" if v.ok else "OUTSIDE"
    lines = [
        f"{v.compiler} for {v.target}, compiled in {v.compile_seconds:.1f} s.",
        f"{'Fits' if v.fits else 'DOES NOT FIT'}: {size(needed)} of a budget of {size(v.budget_bytes)} on each device.",
        f"The estimate is {verdict} the tolerance.",
        *(f"- {note}" for note in v.notes),
    ]
    columns = (">estimated", ">compiled", ">error")
    found = [
        Section("Verification", ("", *columns), [_compared(row) for row in v.rows], lines),
        Section("Collectives of a step", ("kind and mesh axes", *columns, ">calls", ">compiled"), [_traffic(row) for row in v.collectives]),
    ]
    return [s for s in found if s.rows or s.lines]


def _traffic(row: Traffic) -> tuple[str, ...]:
    error = "" if row.error is None else f"{100 * row.error:+.1f} %"
    return row.name, size(row.estimated), size(row.compiled), error, f"{row.estimated_count:g}", f"{row.compiled_count:g}"


def _compared(row: Row) -> tuple[str, str, str, str]:
    write = _WRITTEN[row.unit]
    estimated, compiled = ("" if x is None else write(x) for x in (row.estimated, row.compiled))
    return row.name, estimated, compiled, "" if row.error is None else f"{100 * row.error:+.1f} %"
