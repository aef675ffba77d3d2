"""The symbolic profiler: flops, bytes and memory of a function, read off its jaxpr. Runs nothing, allocates nothing."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxauto import compat, frontend
from jaxauto.core import MATRIX, Graph, Literal, Node
from jaxauto.cost.compute import bytes_per_flop, flops_per_second, ops_per_byte
from jaxauto.cost.fusion import find_buffers
from jaxauto.cost.layout import Laid, minor_dims, unsplit_padding
from jaxauto.cost.liveness import live_bytes
from jaxauto.cost.onchip import in_hbm, place
from jaxauto.cost.padded import live_beside_padded
from jaxauto.cost.pooling import live_beside_pools
from jaxauto.cost.tables import live_beside_tables
from jaxauto.cost.widened import live_beside_dots
from jaxauto.errors import ArgumentError
from jaxauto.flow import data_dependent, read_late
from jaxauto.graph import build, multiplicity, walk
from jaxauto.groups import find_groups
from jaxauto.passes import PASSES, label_passes
from jaxauto.profile_memory import Memory, Profiled, node_name
from jaxauto.profile_traffic import Traffic
from jaxauto.rewrite.program import Rewritten
from jaxauto.rules import rule_for
from jaxauto.solve.facts import major_dims
from jaxauto.solve.gradients import held_on_cpu
from jaxauto.tables import Section, as_html, duration, page
from jaxauto.targets.target import Target, resolve
from jaxauto.timeline import Row, Table, Timeline, short, source_text, text_table
from jaxauto.trace import Traced, trace
from jaxauto.writing import write_text

_PLATFORM = "tpu"  # whose compiler decides what is fused when no target is named
_PAGE_ROWS = 400


@dataclass(frozen=True)
class Phase:
    """Work of one phase of a step on one device. ``bytes_``: HBM traffic; ``seconds``: rooflines on the target, None without one."""

    flops: float
    matmul_flops: float
    bytes_: float
    seconds: float | None


@dataclass(frozen=True)
class Profile:
    """Statistics of a function for one run on one device. Bytes, flops, seconds; loop bodies count for each trip.

    Attributes:
      name: of the function.
      flops: matrix flops and one for each element that an elementwise equation makes or a reduction reads.
      matmul_flops: those of dots and convolutions alone: 2 for each multiply-add.
      bytes_accessed: HBM traffic, with elementwise chains fused.
      peak_memory: the most bytes alive at once, arguments included, donated state reused; on a TPU target as arrays fill tiles there.
      argument_bytes, output_bytes: of all arguments and results; an output that reuses a donated argument is in both.
      params_bytes: floating-point arguments that the model computes with: state that comes back and feeds dots, convolutions or gathers;
        without state, the arrays of the first argument that is a container.
      activation_bytes: what the forward pass made and the backward pass still needs, where the backward pass begins; 0 without one.
      memory: kind → bytes at the peak, in the order of ``KINDS``; they sum to ``peak_memory``. Optimizer state is all state that is no
        parameter (running statistics, the step count); results are of what has no backward pass, and metrics.
      phases: ``"forward" | "backward" | "optimizer"`` → Phase; only those that the function has.
      timeline: live bytes along the program, and what lives at the peak.
      equations: a row for each equation. seconds: sum of rooflines on the target, or None.
      mesh: axis → size, {} for one device; specs: argument path → PartitionSpec under that mesh. target: its name or None.
    """

    name: str
    flops: float
    matmul_flops: float
    bytes_accessed: float
    peak_memory: float
    argument_bytes: float
    output_bytes: float
    params_bytes: float
    activation_bytes: float
    memory: Mapping[str, float]
    phases: Mapping[str, Phase]
    timeline: Timeline = field(repr=False)
    equations: tuple[Row, ...] = field(repr=False)
    seconds: float | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    specs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    target: str | None = None

    def table(self, depth: int | None = None) -> Table:
        """Rows in program order.

        Args:
          depth: one row for each named scope and phase, scopes cut after this many components; None: one row for each equation.
        """
        if depth is None:
            return Table(self.equations)
        if depth < 0:
            raise ArgumentError(f"table(depth={depth}): give the number of scope components, 0 or more, or None for every equation.")
        grouped: dict[tuple[str, str], list[Row]] = {}
        for row in self.equations:
            scope = "/".join(row.name.split("/")[:-1][:depth]) or "(top)"
            grouped.setdefault((scope, row.phase), []).append(row)
        return Table(tuple(_sum_rows(scope, rows) for (scope, _), rows in grouped.items()))

    def to_html(self, path: str) -> str:
        """Write a page that needs nothing but itself: totals, picture, what lives at the peak, tables by scope. Returns ``path``."""
        parts = [self._repr_html_(), *(_folded(title, table) for title, table in self._tables())]
        write_text(path, page("".join(parts), self._title()))
        return path

    def _tables(self) -> list[tuple[str, Table]]:
        """The tables of a page, of at most ``_PAGE_ROWS`` rows each."""
        by = "flops" if self.seconds is None else "seconds"
        outer, inner, all_rows = self.table(depth=1), self.table(depth=3), self.table()
        return [
            ("By scope", outer.largest(_PAGE_ROWS, by, ordered=True)),
            ("By scope, three levels", inner.largest(_PAGE_ROWS, by, ordered=True)),
            (f"The equations that cost most, by {'flops' if by == 'flops' else 'time'}", all_rows.largest(50, by)),
            ("The equations that move most bytes", all_rows.largest(50, "bytes_")),
        ]

    def _facts(self) -> list[tuple[str, str]]:
        at, line = self.timeline.peak_position, self.timeline
        where = " · ".join(x for x in (line.names[at] or "the start", line.phases[at], source_text(line.sources[at])) if x)
        facts = [
            ("flops", f"{short(self.flops)} ({short(self.matmul_flops)} in matrix products)"),
            ("HBM traffic", f"{short(self.bytes_accessed, 'B')} ({self.flops / max(self.bytes_accessed, 1):.0f} flops for each byte)"),
            ("peak memory", f"{short(self.peak_memory, 'B')} at {where}"),
            ("arguments", f"{short(self.argument_bytes, 'B')}, of which parameters {short(self.params_bytes, 'B')}"),
            ("outputs", short(self.output_bytes, "B")),
        ]
        if "backward" in self.phases:
            facts.append(("activations kept", f"{short(self.activation_bytes, 'B')} where the backward pass begins"))
        if self.seconds is not None:
            facts.append(("compute time", duration(self.seconds)))
        return facts

    def _title(self) -> str:
        mesh = f" on each device of {'x'.join(map(str, self.mesh.values()))} {tuple(self.mesh)}" if self.mesh else ""
        return f"profile of {self.name}{mesh}" + (f" ({self.target})" if self.target else "")

    def _sections(self) -> tuple[Section, Section, Section]:
        """Totals, memory by kind, phases."""
        phases = [
            (name, short(p.flops), short(p.matmul_flops), short(p.bytes_, "B"), "" if p.seconds is None else duration(p.seconds))
            for name, p in self.phases.items()
        ]
        memory = [(kind, short(b, "B"), f"{100 * b / max(self.peak_memory, 1):.1f} %") for kind, b in self.memory.items()]
        return (
            Section(self._title(), ("", ""), self._facts()),
            Section("Memory at the peak", ("what", ">bytes", ">share"), memory),
            Section("Phases", ("phase", ">flops", ">matrix flops", ">HBM traffic", ">time"), phases),
        )

    def __str__(self) -> str:
        facts, memory, phases = self._sections()
        width = max(len(k) for k, _ in facts.rows)
        lines = "\n".join(f"  {k:<{width}}  {v}" for k, v in facts.rows)
        tables = (text_table([c.lstrip(">") for c in s.columns], s.rows, right=range(1, len(s.columns))) for s in (memory, phases))
        return "\n".join((facts.title, lines, *tables, str(self.timeline)))

    def _repr_html_(self) -> str:
        return as_html(self._sections()) + self.timeline._repr_html_()


def _folded(title: str, table: Table) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{table._repr_html_()}</details>"


@compat.propagated()
def profile(
    fn: Callable,
    *args: Any,
    mesh: Any = None,
    in_specs: Mapping[str, Any] | None = None,
    target: str | Target | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Profile:
    """Statistics of ``fn(*args, **kwargs)`` without running it and without allocating.

    Args:
      fn: any function that JAX can trace: a train step, a forward pass, a kernel.
      *args: arrays or ShapeDtypeStructs in any pytrees; flax nnx objects too.
      **kwargs: likewise, by name.
      mesh: ``jax.sharding.Mesh`` or axis sizes such as ``{"data": 4}``: numbers are then for one device, under the sharding that the
        planner completes from ``in_specs``, as written (nothing recomputed).
      in_specs: globs over argument paths → PartitionSpec, e.g. ``{"1.*": P("data")}``.
      target: a chip to count seconds for, ``"v5p:2x2x1"`` or a ``jaxauto.Target``; its compiler also decides what is fused (None: an
        accelerator's).
      donate_argnums: as ``jax.jit``; None: every argument that comes back as an output.

    Returns:
      A Profile.

    Raises:
      TraceError: ``fn`` cannot be traced. ConstraintError: ``in_specs`` do not fit the arguments. ArgumentError: in_specs without a mesh.
    """
    if in_specs and mesh is None:
        raise ArgumentError("in_specs= says how arguments are laid over a mesh: give mesh= too, for example mesh={'data': 8}.")
    form = frontend.functional(fn, args)
    name = getattr(fn, "__name__", type(fn).__name__)
    chip = resolve(target).chip if target is not None else None
    if mesh is not None:
        from jaxauto.profile_mesh import sharded_program

        program = sharded_program(form.step, form.arguments(args), kwargs, mesh, in_specs or {}, target, donate_argnums)
    else:
        program = _program(trace(form.step, form.arguments(args), kwargs, donate_argnums), chip)
    return _Profiler(program, chip).run(name, str(resolve(target)) if target is not None else None)


def aliased_outputs(traced: Traced, graph: Graph) -> frozenset[int]:
    """Output values that reuse the memory of a donated argument."""
    outputs = (graph.outputs[o] for i, o in traced.state if traced.donated[i])
    return frozenset(x for x in outputs if isinstance(x, int) and x not in graph.inputs)


def _as_planned(traced: Traced, graph: Graph) -> Graph:
    """The program as a plan for one CPU gives it to the compiler, where nothing is made again."""
    groups, state = find_groups(graph, traced.state), {i for i, _ in traced.state}
    dependent = data_dependent(graph, [n for k, n in enumerate(graph.inputs) if k not in state])
    return held_on_cpu(Rewritten(graph, {}), groups, read_late(graph, groups.rules, dependent), 1)


def _program(traced: Traced, chip: Any) -> Profiled:
    graph = build(traced.jaxpr)
    rules = {node.id: rule_for(node.eqn) for node in walk(graph) if not node.bodies}
    platform, *rates = (_PLATFORM,) if chip is None else (chip.platform, bytes_per_flop(chip), ops_per_byte(chip))
    aliased = aliased_outputs(traced, graph)
    held = _as_planned(traced, graph) if platform == "cpu" else None
    buffers = find_buffers(graph, rules, aliased, platform, *rates, held=held)
    padded = (lambda _: 1.0) if chip is None or not chip.tile else _padding(traced, graph, chip)
    sizes = buffers.bytes_ * np.array([padded(int(n)) for n in buffers.ids])
    placed = place(graph, rules, buffers, sizes, chip, 1) if chip is not None and chip.vmem_bytes else None
    if placed is not None:
        sizes = in_hbm(sizes, placed.written, chip)
    live = live_bytes(buffers, sizes)
    if platform == "cpu":
        live = live + live_beside_dots(graph, rules, buffers)
    if platform == "gpu":
        live = live + live_beside_padded(graph, rules, buffers)
    live = live + live_beside_pools(graph, buffers, platform)
    if chip is not None and chip.tile:
        live = live + live_beside_tables(graph, buffers, chip)
    one, local = (lambda _: 1.0), (lambda n: graph.values[n].shape)
    return Profiled(traced, graph, rules, buffers, sizes, live, one, one, aliased, padded, local, placed)


def _padding(traced: Traced, graph: Graph, chip: Any) -> Callable[[int], float]:
    """Value id → by how much tiles enlarge it on one device of ``chip``."""
    groups = find_groups(graph, traced.state)
    major = major_dims(groups)

    def padded(number: int) -> float:
        value = graph.values[number]
        return unsplit_padding(Laid(value.shape, minor_dims(major, *groups.place[number]), chip.tile_of(value.dtype)))

    return padded


class _Profiler:
    """Profiled → Profile."""

    def __init__(self, program: Profiled, chip: Any):
        self.program, self.chip = program, chip
        self.graph, self.rules, self.buffers = program.graph, program.rules, program.buffers
        self.values = self.graph.values
        self.times = multiplicity(self.graph)
        self.phase = label_passes(self.graph)
        self.traffic = Traffic(program, chip)

    def run(self, name: str, target: str | None) -> Profile:
        nodes = list(walk(self.graph))
        costs = {node.id: self.cost(node) for node in nodes}
        rows = tuple(self.row(node, costs[node.id]) for node in nodes)
        program, memory = self.program, Memory(self.program, self.phase)
        timeline = memory.timeline()
        phases = self.phases(nodes, costs)
        in_bytes = [self.values[n].nbytes / program.pieces(n) for n in self.graph.inputs]
        return Profile(
            name=name,
            flops=sum(p.flops for p in phases.values()),
            matmul_flops=sum(p.matmul_flops for p in phases.values()),
            bytes_accessed=sum(p.bytes_ for p in phases.values()),
            peak_memory=timeline.peak_bytes,
            argument_bytes=sum(in_bytes),
            output_bytes=sum(self.output_bytes(x) for x in self.graph.outputs),
            params_bytes=sum(in_bytes[k] for k in memory.parameters),
            activation_bytes=memory.activation_bytes,
            memory={kind: float(bytes_[timeline.peak_position]) for kind, bytes_ in timeline.by_kind.items()},
            phases=phases,
            timeline=timeline,
            equations=rows,
            seconds=None if self.chip is None else sum(p.seconds or 0.0 for p in phases.values()),
            mesh=program.mesh,
            specs=program.specs,
            target=target,
        )

    # ----------------------------------------------------------------------------------------------------------------- work

    def cost(self, node: Node) -> Phase:
        """Work of one node in a step, all its runs together."""
        if node.bodies:
            return Phase(0.0, 0.0, 0.0, None if self.chip is None else self.traffic.launching(node) * self.times[node.id])
        rule, times, share = self.rules[node.id], self.times[node.id], self.program.shares(node)
        flops = rule.flops if rule.flops is not None else float(max((self.values[o].aval.size for o in node.outputs), default=0))
        flops /= share
        matmul = flops if rule.kind in MATRIX else 0.0
        bytes_ = self.traffic.bytes_(node, rule, share)
        seconds = None
        if self.chip is not None:
            rate = flops_per_second(node, rule.kind, _operand_dtype(node, self.values), self.chip) if matmul else math.inf
            seconds = self.traffic.seconds(node, rule, share, matmul / rate) * times
        return Phase(flops * times, matmul * times, bytes_ * times, seconds)

    def phases(self, nodes: Iterable[Node], costs: Mapping[int, Phase]) -> dict[str, Phase]:
        total: dict[str, Phase] = {}
        for node in nodes:
            cost, name = costs[node.id], self.phase[node.id]
            so_far = total.get(name, Phase(0.0, 0.0, 0.0, None if self.chip is None else 0.0))
            total[name] = Phase(
                so_far.flops + cost.flops,
                so_far.matmul_flops + cost.matmul_flops,
                so_far.bytes_ + cost.bytes_,
                None if so_far.seconds is None or cost.seconds is None else so_far.seconds + cost.seconds,
            )
        return {name: total[name] for name in PASSES if name in total}

    def row(self, node: Node, cost: Phase) -> Row:
        last = self.values[node.outputs[-1]] if node.outputs else None
        return Row(
            name=node_name(node),
            phase=self.phase[node.id],
            flops=cost.flops,
            bytes_=cost.bytes_,
            live_bytes=float(self.program.live[self.buffers.position[node.id]]),
            seconds=cost.seconds,
            shape=last.shape if last else (),
            dtype=str(last.dtype) if last else "",
            source=node.source,
            times=self.times[node.id],
        )

    def output_bytes(self, x: int | Literal) -> float:
        if isinstance(x, Literal):
            return float(np.asarray(x.value).nbytes)
        return self.values[x].nbytes / self.program.pieces(x)


def _operand_dtype(node: Node, values: Mapping[int, Any]) -> Any:
    first = node.inputs[0]
    return first.aval.dtype if isinstance(first, Literal) else values[first].dtype


def _sum_rows(scope: str, rows: Sequence[Row]) -> Row:
    last = rows[-1]
    return dataclasses.replace(
        last,
        name=scope,
        flops=math.fsum(r.flops for r in rows),
        bytes_=math.fsum(r.bytes_ for r in rows),
        seconds=None if last.seconds is None else math.fsum(r.seconds or 0.0 for r in rows),
        times=rows[0].times,
        equations=len(rows),
    )
