"""The estimate beside what the compiler made of it: memory, flops, collectives, seconds."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxauto import aot, compat, hlo
from jaxauto.core import Estimate, MeshAxes
from jaxauto.cost.collectives import collective_seconds
from jaxauto.cost.schedule import ScheduleTime, schedule_seconds
from jaxauto.errors import ArgumentError
from jaxauto.graph import HOST
from jaxauto.options import mesh_axes
from jaxauto.targets.target import Target

# Beyond these the estimate is called wrong: relative error of memory, of flops, and of the bytes of all collectives together.
TOLERANCE = {"peak memory": 0.25, "matrix flops": 0.05, "collective bytes": 0.35}


@dataclass(frozen=True)
class Compilation:
    """What a compiler says of a step: bytes on one device by kind, and its scheduled HLO."""

    compiler: str
    text: str
    memory: Mapping[str, float]
    seconds: float

    @property
    def device_bytes(self) -> float:
        """What the step needs on one device: arguments + outputs − aliases + temporaries."""
        m = self.memory
        return m["argument"] + m["output"] - m["alias"] + m["temp"]

    @property
    def host_bytes(self) -> float:
        """What it needs of the host's memory: the same sum there."""
        m = self.memory
        return m["host argument"] + m["host output"] - m["host alias"] + m["host temp"]

    @property
    def peak_bytes(self) -> float:
        """The most that is alive at once, arguments included, where the compiler tells: ``device_bytes`` less the gaps in its heap.

        XLA:TPU counts arrays in on-chip memory with it, so that it can tell more than there is in HBM.
        """
        return min(self.memory["peak"] or self.device_bytes, self.device_bytes)


@dataclass(frozen=True)
class Row:
    """One quantity: estimated and compiled, in ``unit``; None where one of them has it not."""

    name: str
    estimated: float | None
    compiled: float | None
    unit: str

    @property
    def error(self) -> float | None:
        """(estimated − compiled) / compiled."""
        if self.estimated is None or not self.compiled:
            return None
        return self.estimated / self.compiled - 1


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind and its mesh axes: bytes and calls in one step, estimated and compiled."""

    name: str
    estimated: float
    estimated_count: float
    compiled: float
    compiled_count: float

    @property
    def error(self) -> float | None:
        """(estimated - compiled) / compiled, of the bytes."""
        return self.estimated / self.compiled - 1 if self.compiled else None


@dataclass(frozen=True)
class Verification:
    """Estimate beside compiler. ``rows``: totals; ``collectives``: by kind and mesh axes. ``print`` it, or use ``as_dict``."""

    target: str
    compiler: str
    rows: tuple[Row, ...]
    collectives: tuple[Traffic, ...]
    budget_bytes: float
    compile_seconds: float
    notes: tuple[str, ...] = field(default=())

    def row(self, name: str) -> Row:
        return next(r for r in self.rows if r.name == name)

    @property
    def fits(self) -> bool:
        """Whether what the compiler needs is within the plan's budget."""
        allocated = self.row("allocated").compiled
        return allocated is not None and allocated <= self.budget_bytes

    @property
    def ok(self) -> bool:
        """Whether it fits and no total is outside ``TOLERANCE``."""
        wrong = [r for r in self.rows if r.name in TOLERANCE and r.error is not None and abs(r.error) > TOLERANCE[r.name]]
        return self.fits and not wrong

    def as_dict(self) -> dict:
        return {**dataclasses.asdict(self), "fits": self.fits, "ok": self.ok}

    def __str__(self) -> str:
        from jaxauto.report import verification_table

        return verification_table(self)


def compile_plan(plan: Any, timeout: float = 600.0) -> Compilation:
    """Compile a plan for its target, once: here if its devices are here, ahead of time in a child process otherwise.

    Raises:
      TargetError: no compiler for the target. aot.CompilerFailure: it failed, timed out, or the step does not fit.
    """
    if "compilation" not in plan.__dict__:
        plan.__dict__["compilation"] = _compile_here(plan) if plan.is_here else compile_ahead(plan, timeout)
    return plan.__dict__["compilation"]


def _compile_here(plan: Any) -> Compilation:
    started = time.monotonic()
    compiled = plan.compile()
    platform = plan.mesh.devices.flat[0].platform
    return Compilation(
        f"{platform}, jax {jax.__version__}", compiled.as_text(), _told(memory_of(compiled), platform), time.monotonic() - started
    )


def memory_of(compiled: Any) -> dict[str, float]:
    """Bytes on one device by kind, as in ``Compilation.memory``, of a ``jax.stages.Compiled``."""
    stats = compiled.memory_analysis()
    kinds = ("argument", "output", "alias", "temp")
    return {
        **{kind: getattr(stats, f"{kind}_size_in_bytes") for kind in kinds},
        **{f"host {kind}": getattr(stats, f"host_{kind}_size_in_bytes") for kind in kinds},
        "peak": getattr(stats, "peak_memory_in_bytes", 0),
    }


def _told(memory: Mapping[str, float], platform: str) -> dict[str, float]:
    """Bytes by kind; XLA:CPU's peak leaves the temporaries out, so there none is told."""
    found = {"peak": 0, **{k.replace("_", " "): v for k, v in memory.items()}}
    return {**found, "peak": 0} if platform == "cpu" else found


def compile_ahead(plan: Any, timeout: float) -> Compilation:
    """Compile with the target's own compiler in a child process."""
    program, target = plan._bound(), Target(plan.target)
    from jaxauto.rewrite.apply import apply

    result = aot.compile_step(
        lambda mesh: apply(program.graph, plan.decisions, mesh, target.chip.platform),
        plan.in_avals,
        plan.flat_in_shardings,
        plan.flat_out_shardings,
        [k for k, d in enumerate(plan.donated) if d],
        target,
        tuple(plan.mesh.shape.values()),
        tuple(plan.mesh.axis_names),
        timeout=timeout,
        options=plan.compiler_options,
    )
    memory = _told(result.memory, target.chip.platform)
    return Compilation(result.compiler, result.text, memory, result.seconds)


@compat.propagated()
def verify(plan: Any, *, run: bool = False, steps: int = 3, timeout: float = 600.0) -> Verification:
    """See ``Plan.verify``.

    Args:
      run: also time the step on zeros, on the plan's own devices. steps: how many steps to time (the median counts).
    """
    compilation = compile_plan(plan, timeout)
    module = hlo.parse(compilation.text)
    target = Target(plan.target)
    mesh = mesh_axes(dict(plan.mesh.shape), target)
    estimate = plan.estimate
    found, unmatched = compiled_collectives(module, mesh)
    planned = planned_collectives(estimate)
    schedule = schedule_of(plan, module)
    told = estimate.step_time - estimate.exposed_feed_time  # a compiled step has the batch; so has one that is run again and again here
    rows = [
        *memory_rows(plan, compilation),
        Row("matrix flops", estimate.flops, module.flops, "flops"),
        Row("collective bytes", sum(b for b, _ in planned.values()), sum(b for b, _ in found.values()), "bytes"),
        Row("step time (roofline of the schedule)", told, schedule.total_seconds, "seconds"),
        Row("compute time", estimate.compute_time, schedule.compute_seconds, "seconds"),
        Row("communication time", estimate.comm_time - estimate.feed_time, schedule.collective_seconds, "seconds"),
    ]
    if module.cycles and target.chip.platform == "tpu":
        rows.append(Row("step time (compiler's cycles)", told, module.cycles / target.chip.clock_hz, "seconds"))
    if run:
        rows.append(Row("step time (measured)", told, measure(plan, steps), "seconds"))
    none = (0.0, 0.0)
    by_kind = [
        Traffic(f"{kind} over {', '.join(axes) or 'other groups'}", *planned.get((kind, axes), none), *found.get((kind, axes), none))
        for kind, axes in sorted({*planned, *found})
    ]
    notes = [f"{unmatched} collectives of the compiler span groups that are no mesh axes"] if unmatched else []
    notes += _written_otherwise(module) if mesh.scatters else []
    notes += _added(by_kind)
    return Verification(
        plan.target, compilation.compiler, tuple(rows), tuple(by_kind), plan.budget_bytes, compilation.seconds, tuple(notes)
    )


def schedule_of(plan: Any, module: hlo.Module) -> ScheduleTime:
    """Seconds of a compiled plan by the roofline of its schedule, collectives included; ``module``: what it was compiled to."""
    return schedule_on(Target(plan.target), plan.mesh.shape, module)


def schedule_on(target: Target, mesh_shape: Mapping[str, int], module: hlo.Module) -> ScheduleTime:
    """The same of any module compiled for a mesh of ``target``."""
    mesh = mesh_axes(dict(mesh_shape), target)
    return schedule_seconds(module, target.chip, lambda c: hlo_collective_seconds(c, mesh))


def memory_rows(plan: Any, compilation: Compilation) -> list[Row]:
    """Bytes of one device: arguments, results that take memory of their own, temporaries, the most alive at once, and host memory.

    Allocated is what a budget is held against: arguments, results and the heap of temporaries with its gaps. A compiler that does not tell
    what is alive (XLA:CPU) is held to what it allocates.
    """
    memory, estimate = compilation.memory, plan.estimate
    taken = list(map(_device_bytes, plan.in_avals, plan.flat_in_shardings))
    arguments, reused = sum(taken), sum(bytes_ for bytes_, donated in zip(taken, plan.donated, strict=True) if donated)
    results = max(0.0, sum(map(_device_bytes, plan.out_avals, plan.flat_out_shardings)) - reused)
    allocated = estimate.peak_memory if estimate.allocated is None else estimate.allocated
    return [
        Row("arguments", arguments, float(memory["argument"]), "bytes"),
        Row("results beside arguments", results, float(memory["output"] - memory["alias"]), "bytes"),
        Row("temporaries", max(0.0, allocated - arguments - results), float(memory["temp"]), "bytes"),
        Row("peak memory", estimate.peak_memory if memory["peak"] else allocated, compilation.peak_bytes, "bytes"),
        Row("allocated", estimate.allocated, compilation.device_bytes, "bytes"),
        Row("host memory", sum(d.bytes_ for d in plan.remat if d.action == "offloaded"), compilation.host_bytes, "bytes"),
    ]


def _device_bytes(aval: jax.ShapeDtypeStruct, sharding: Any) -> float:
    if sharding.memory_kind == HOST:
        return 0.0
    return float(math.prod(sharding.shard_shape(aval.shape))) * compat.itemsize(aval.dtype)


def _added(collectives: list[Traffic]) -> list[str]:
    """Names what the compiler added on its own: collectives that the plan has none of, over a hundredth of the bytes."""
    threshold = 0.01 * sum(c.compiled for c in collectives)
    own = [c for c in collectives if not c.estimated and c.compiled > threshold]
    return [f"the compiler's own addition: {c.name}, {c.compiled / 2**20:,.1f} MiB in {c.compiled_count:g} calls" for c in own]


def _written_otherwise(module: hlo.Module) -> list[str]:
    """Says where collectives have another form than they are planned in: gathers as sums, scatters as rings of permutes."""
    disguised: dict[tuple[str, str], float] = defaultdict(float)
    for c in module.collectives:
        if c.role != c.kind:
            disguised[c.role, c.kind] += c.count
    return [f"the compiler writes {role}s as {n:g} {kind}s; its step time charges them as such" for (role, kind), n in disguised.items()]


def planned_collectives(estimate: Estimate) -> dict[tuple[str, tuple[str, ...]], tuple[float, float]]:
    """(bytes, count) of the collectives of a plan by (kind, mesh axes)."""
    planned: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
    for c in estimate.collectives:
        bytes_, count = planned.get((c.kind, c.axes), (0.0, 0.0))
        planned[c.kind, c.axes] = bytes_ + c.bytes_ * c.count, count + c.count
    return planned


def compiled_collectives(module: hlo.Module, mesh: MeshAxes) -> tuple[dict[tuple[str, tuple[str, ...]], tuple[float, float]], int]:
    """(bytes, count) of a compiled step's collectives by (kind, mesh axes), and how many match no mesh axes; kind: what each is for."""
    found: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
    unmatched = 0
    for c in module.collectives:
        axes = hlo.mesh_axes(c, mesh.shape)
        if axes == ():
            continue
        unmatched += axes is None
        kind = c.kind if c.role == "reduce-scatter" and not mesh.scatters else c.role  # planned as all-reduces where there are no others
        bytes_, count = found.get((kind, axes or ()), (0.0, 0.0))
        moved = c.operand_bytes * math.prod(mesh.shape[a] for a in axes or ()) if kind == "collective-permute" else c.role_bytes
        found[kind, axes or ()] = bytes_ + moved * c.count, count + c.count
    return found, unmatched


def hlo_collective_seconds(collective: Any, mesh: MeshAxes) -> float:
    """Seconds of one collective of a compiled module, by the cost model's own formulas."""
    axes = hlo.mesh_axes(collective, mesh.shape)
    if axes is None:  # a group of no axes: charged as if along the narrowest axis that holds it
        axes = next((n for n, k in mesh.shape.items() if k >= collective.group_size), mesh.names[-1])
        axes = (axes,)
    index = [mesh.names.index(a) for a in axes]
    sizes, links = [mesh.sizes[i] for i in index], [mesh.links[i] for i in index]
    bytes_ = collective.bytes_
    if collective.kind == "collective-permute":  # its rings may be shorter than the axes are
        bytes_ = collective.operand_bytes * math.prod(sizes)
    return float(collective_seconds(collective.kind, bytes_, sizes, links))


def measure(plan: Any, steps: int) -> float:
    """Median seconds of a step on zeros.

    Raises:
      ArgumentError: the plan's devices are not here.
    """
    if not plan.is_here:
        raise ArgumentError(f"verify(run=True) needs the devices of {plan.target}; they are not here. verify() compiles ahead of time.")
    import jax.numpy as jnp

    def zeros():
        return [
            jax.device_put(jax.random.key(0), s)
            if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) and not a.shape
            else jnp.zeros(a.shape, a.dtype, device=s)
            for a, s in zip(plan.in_avals, plan.flat_in_shardings, strict=True)
        ]

    seconds = []
    for _ in range(steps + 1):
        leaves = jax.block_until_ready(zeros())
        started = time.perf_counter()
        jax.block_until_ready(plan._flat_jit(*leaves))
        seconds.append(time.perf_counter() - started)
    return sorted(seconds[1:])[math.floor(steps / 2)]
