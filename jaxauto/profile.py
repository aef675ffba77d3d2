"""The symbolic profiler: flops, bytes and memory of a function, read off its jaxpr. Runs nothing, allocates nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxauto import frontend
from jaxauto.core import OPERATIONS, Graph, Kind, Literal, Node, OpRule
from jaxauto.cost.compute import bytes_per_flop, traffic_seconds
from jaxauto.cost.fusion import Buffers, find_buffers, live_bytes
from jaxauto.errors import ArgumentError
from jaxauto.flow import feeding_operations
from jaxauto.graph import build, multiplicity, value_bytes, walk
from jaxauto.passes import PASSES, label_passes
from jaxauto.rules import rule_for
from jaxauto.targets.target import Target, resolve
from jaxauto.timeline import Live, Row, Table, Timeline, html_table, short, text_table
from jaxauto.trace import Traced, trace

_MATRIX = frozenset({Kind.DOT, Kind.CONV})
_PLATFORM = "tpu"  # whose compiler decides what is fused when no target is named


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
      peak_memory: the most bytes alive at once, arguments included, donated state reused.
      argument_bytes, output_bytes: of all arguments and results; an output that reuses a donated argument is in both.
      params_bytes: floating-point arguments that the model computes with: state that comes back and feeds dots, convolutions or gathers;
        without state, the arrays of the first argument that is a container.
      activation_bytes: what the forward pass made and the backward pass still needs, where the backward pass begins; 0 without one.
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

    def _facts(self) -> list[tuple[str, str]]:
        facts = [
            ("flops", f"{short(self.flops)} ({short(self.matmul_flops)} in matrix products)"),
            ("HBM traffic", f"{short(self.bytes_accessed, 'B')} ({self.flops / max(self.bytes_accessed, 1):.0f} flops for each byte)"),
            ("peak memory", f"{short(self.peak_memory, 'B')} at {self.timeline.names[self.timeline.peak_position] or 'the start'}"),
            ("arguments", f"{short(self.argument_bytes, 'B')}, of which parameters {short(self.params_bytes, 'B')}"),
            ("outputs", short(self.output_bytes, "B")),
        ]
        if "backward" in self.phases:
            facts.append(("activations kept", short(self.activation_bytes, "B")))
        if self.seconds is not None:
            facts.append(("compute time", f"{short(self.seconds, 's') if self.seconds >= 1 else short(self.seconds * 1e6, 'µs')}"))
        return facts

    def _title(self) -> str:
        mesh = f" on each device of {'x'.join(map(str, self.mesh.values()))} {tuple(self.mesh)}" if self.mesh else ""
        return f"profile of {self.name}{mesh}" + (f" ({self.target})" if self.target else "")

    def _phase_cells(self) -> list[tuple[str, ...]]:
        return [
            (name, short(p.flops), short(p.matmul_flops), short(p.bytes_, "B"), "" if p.seconds is None else f"{p.seconds * 1e3:.3g} ms")
            for name, p in self.phases.items()
        ]

    _PHASE_HEAD = ("phase", "flops", "matrix flops", "HBM traffic", "time")

    def __str__(self) -> str:
        width = max(len(k) for k, _ in self._facts())
        facts = "\n".join(f"  {k:<{width}}  {v}" for k, v in self._facts())
        phases = text_table(self._PHASE_HEAD, self._phase_cells(), right=(1, 2, 3, 4))
        return f"{self._title()}\n{facts}\n{phases}\n{self.timeline}"

    def _repr_html_(self) -> str:
        facts = html_table(("what", "how much"), self._facts())
        return f"<b>{self._title()}</b>{facts}{html_table(self._PHASE_HEAD, self._phase_cells())}{self.timeline._repr_html_()}"


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


@dataclass(frozen=True)
class Profiled:
    """A traced program and how much of each array and equation one device holds.

    Attributes:
      pieces: value id → number of pieces the value is cut into. shares: node id → number of devices that share a node's work.
      live: live bytes at each position on one device; sizes: bytes of each buffer there.
    """

    traced: Traced
    graph: Graph
    rules: Mapping[int, OpRule]
    buffers: Buffers
    sizes: np.ndarray
    live: np.ndarray
    pieces: Callable[[int], float]
    shares: Callable[[Node], float]
    mesh: Mapping[str, int] = field(default_factory=dict)
    specs: Mapping[str, Any] = field(default_factory=dict)


def aliased_outputs(traced: Traced, graph: Graph) -> frozenset[int]:
    """Output values that reuse the memory of a donated argument."""
    outputs = (graph.outputs[o] for i, o in traced.state if traced.donated[i])
    return frozenset(x for x in outputs if isinstance(x, int) and x not in graph.inputs)


def _program(traced: Traced, chip: Any) -> Profiled:
    graph = build(traced.jaxpr)
    rules = {node.id: rule_for(node.eqn) for node in walk(graph) if not node.bodies}
    platform, rate = (_PLATFORM, 0.0) if chip is None else (chip.platform, bytes_per_flop(chip))
    buffers = find_buffers(graph, rules, aliased_outputs(traced, graph), platform, rate)
    live = live_bytes(buffers, buffers.bytes_)
    return Profiled(traced, graph, rules, buffers, buffers.bytes_, live, lambda _: 1.0, lambda _: 1.0)


class _Profiler:
    """Profiled → Profile."""

    def __init__(self, program: Profiled, chip: Any):
        self.program, self.chip = program, chip
        self.graph, self.rules, self.buffers = program.graph, program.rules, program.buffers
        self.values = self.graph.values
        self.times = multiplicity(self.graph)
        self.phase = label_passes(self.graph)

    def run(self, name: str, target: str | None) -> Profile:
        nodes = list(walk(self.graph))
        costs = {node.id: self.cost(node) for node in nodes}
        rows = tuple(self.row(node, costs[node.id]) for node in nodes)
        timeline = self.timeline(nodes)
        phases = self.phases(nodes, costs)
        program = self.program
        in_bytes = [value_bytes(self.values[n]) / program.pieces(n) for n in self.graph.inputs]
        return Profile(
            name=name,
            flops=sum(p.flops for p in phases.values()),
            matmul_flops=sum(p.matmul_flops for p in phases.values()),
            bytes_accessed=sum(p.bytes_ for p in phases.values()),
            peak_memory=timeline.peak_bytes,
            argument_bytes=sum(in_bytes),
            output_bytes=sum(self.output_bytes(x) for x in self.graph.outputs),
            params_bytes=sum(in_bytes[k] for k in self.parameters()),
            activation_bytes=self.activation_bytes(timeline.turn),
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
            return Phase(0.0, 0.0, 0.0, None if self.chip is None else 0.0)
        rule, times, share = self.rules[node.id], self.times[node.id], self.program.shares(node)
        flops = rule.flops if rule.flops is not None else float(max((self.values[o].aval.size for o in node.outputs), default=0))
        flops /= share
        matmul = flops if rule.kind in _MATRIX else 0.0
        bytes_ = self.traffic(node, rule, share)
        seconds = None
        if self.chip is not None:
            seconds = float(traffic_seconds(bytes_, self.chip))
            if matmul:
                seconds = max(seconds, matmul / (self.chip.flops_efficiency * self.chip.peak_flops(_operand_dtype(node, self.values))))
            seconds *= times
        return Phase(flops * times, matmul * times, bytes_ * times, seconds)

    def traffic(self, node: Node, rule: OpRule, share: float) -> float:
        """HBM bytes of one run: an operation's operands and results; of a fused equation what it reads and the buffer it writes."""
        if rule.kind in OPERATIONS:
            arrays = [x for x in (*node.inputs, *node.outputs) if isinstance(x, int)]
            whole = sum(value_bytes(self.values[x]) / self.program.pieces(x) for x in arrays)
            return whole if rule.bytes_ is None else min(whole, rule.bytes_ / share)
        read = sum(value_bytes(self.values[x]) / self.program.pieces(x) for x in self.buffers.read_at.get(node.id, ()))
        written = sum(value_bytes(self.values[x]) / self.program.pieces(x) for x in node.outputs if x in self.buffers.stored)
        return read + written

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
            name=_node_name(node),
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

    # --------------------------------------------------------------------------------------------------------------- memory

    def output_bytes(self, x: int | Literal) -> float:
        if isinstance(x, Literal):
            return float(np.asarray(x.value).nbytes)
        return value_bytes(self.values[x]) / self.program.pieces(x)

    def parameters(self) -> list[int]:
        """Positions of the inputs that are parameters; see ``Profile``."""
        traced = self.program.traced
        state = [i for i, _ in traced.state]
        floating = {k for k, a in enumerate(traced.in_avals) if jax.numpy.issubdtype(a.dtype, jax.numpy.floating)}
        if state:
            feeding = feeding_operations(self.graph, dict(self.rules))
            return [k for k in state if k in floating and self.graph.inputs[k] in feeding]
        (positional, named) = jax.tree_util.tree_unflatten(traced.in_tree, list(range(len(traced.in_avals))))
        containers = (a for a in (*positional, *named.values()) if not isinstance(a, int) and jax.tree_util.tree_leaves(a))
        return [k for k in jax.tree_util.tree_leaves(next(containers, ())) if k in floating]

    def activation_bytes(self, turn: int | None) -> float:
        """Bytes of the forward pass's own buffers that are alive where the backward pass begins and are read there or later."""
        if turn is None:
            return 0.0
        b = self.buffers
        crossing = (b.start < turn) & (b.end >= turn) & ~b.is_input
        outputs = set(self.graph.outputs)
        read_later = {x for node in walk(self.graph) if self.phase[node.id] != "forward" for x in self.roots_read(node)}
        kept = (k for k in np.nonzero(crossing)[0] if int(b.ids[k]) in read_later or int(b.ids[k]) not in outputs)
        return float(sum(self.program.sizes[k] for k in kept))

    def roots_read(self, node: Node) -> set[int]:
        return {x for x in node.inputs if isinstance(x, int)} | set(self.buffers.read_at.get(node.id, ()))

    def timeline(self, nodes: Sequence[Node]) -> Timeline:
        length = self.buffers.length
        names, sources, phases = [""] * length, [""] * length, [""] * length
        for node in nodes:
            for at in (self.buffers.position[node.id], self.buffers.loop_start.get(node.id)):
                if at is not None:
                    names[at], sources[at], phases[at] = _node_name(node), node.source, self.phase[node.id]
        if length > 1:
            names[0], names[-1] = names[0] or "start", names[-1] or "end"
        backward = (node.id for node in nodes if self.phase[node.id] == "backward")
        turn = min((self.buffers.loop_start.get(n, self.buffers.position[n]) for n in backward), default=None)
        live = self.program.live
        return Timeline(live, tuple(names), tuple(sources), tuple(phases), self.alive_at(int(live.argmax()), nodes), turn)

    def alive_at(self, position: int, nodes: Sequence[Node]) -> tuple[Live, ...]:
        b = self.buffers
        names = self.value_names(nodes)
        found = []
        for k in np.nonzero((b.start <= position) & (b.end >= position))[0]:
            value = self.values[int(b.ids[k])]
            source = value.producer.source if value.producer else ""
            found.append(Live(names.get(value.id, "constant"), value.shape, str(value.dtype), float(self.program.sizes[k]), source))
        return tuple(sorted(found, key=lambda x: (-x.bytes_, x.name)))

    def value_names(self, nodes: Sequence[Node]) -> dict[int, str]:
        names = {n: f"argument {path}" for n, path in zip(self.graph.inputs, self.program.traced.in_paths, strict=True)}
        for node in nodes:
            name = _node_name(node)
            for k, out in enumerate(node.outputs):
                names[out] = name if len(node.outputs) == 1 else f"{name}[{k}]"
            for body in node.bodies:
                for k, number in enumerate(body.inputs):
                    names[number] = f"{name} carry[{k}]"
        return names


def _node_name(node: Node) -> str:
    loop = f" ×{node.trips}" if node.prim == "scan" else ""
    return f"{node.scope}/{node.prim}{loop}" if node.scope else f"{node.prim}{loop}"


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
