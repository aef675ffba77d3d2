"""Groups × mesh × target → Problem, and back: what a solution means for values, operands and collectives.

Tables (each line names the function that builds it)
- compute of operations: roofline of each strategy                                             ``_operation_compute``
- compute of groups: HBM traffic of their materialised members                                 ``_traffic``
- passages: resharding an array from a group's state to another's or to an operand's layout    ``_edges``, ``_operands``
- results: partial sums and resharding from a strategy to the group of its result              ``_results``
- memory rows: bytes of the buffers alive at a position                                        ``memory_row``
Alike groups and operations share one variable (``fold.py``); their tables are summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxauto.core import Kind, MeshAxes, Value
from jaxauto.cost.compute import factor_dims, operation_seconds, traffic_seconds
from jaxauto.cost.layout import padding
from jaxauto.cost.reshard import passage_collectives, passage_tables
from jaxauto.graph import HOST, value_bytes, walk
from jaxauto.groups import WHOLE, Edge, Groups, Operand, Operation
from jaxauto.solve.fold import Key
from jaxauto.solve.problem import MemoryRow, Problem
from jaxauto.solve.remat import Variant
from jaxauto.strategies import project, shards, states

FLEETING = 60  # equations that an array in on-chip memory may outlive
VMEM_SHARE = 0.25  # of on-chip memory that one array may take: others want to be there too


@dataclass(frozen=True)
class Program:
    """What is known of a step before a mesh is: groups, buffers, alike decisions, and what can be prefetched."""

    groups: Groups
    alike: Mapping[Key, Key]
    known_early: frozenset[int]  # values that do not depend on the batch: weights and what is made of them alone
    late_only: frozenset[int]  # values that nothing heavy reads any more: gradients, updates, metrics


class Model:
    """A Program on a mesh: the Problem and the way back from its solutions."""

    def __init__(
        self,
        program: Program,
        variant: Variant,
        mesh: MeshAxes,
        chip: Any,
        allowed: Mapping[int, np.ndarray] | None = None,
        cache: Any = None,
    ):
        """``allowed``: group id → bool mask over its states (users' constraints). ``cache``: tables shared by models of one mesh."""
        self.program, self.variant, self.mesh, self.chip = program, variant, mesh, chip
        self.buffers = variant.buffers
        self.cache = {} if cache is None else cache
        self.groups = program.groups
        self.values = program.groups.graph.values
        self.overlaps = getattr(chip, "platform", "cpu") != "cpu"
        self.problem = Problem.empty()
        self.variable: dict[Key, int] = {}
        self.states: list[np.ndarray] = []
        self.narrowing = self.cached(("narrowing",), lambda: _narrowing(program.groups))
        self.operation_of: dict[int, Operation] = {}
        allowed = allowed or {}
        merged: dict[Key, np.ndarray] = {}
        for g, mask in allowed.items():
            key = program.alike["group", g]
            merged[key] = merged[key] & mask if key in merged else mask
        for g in self.groups.groups.values():
            self._add(("group", g.id), tuple(g.sizes), merged)
        for op in self.groups.operations:
            self.operation_of[op.node.id] = op
            self._add(("operation", op.node.id), tuple(n for _, n in op.factors), {})
        self._classes()
        self._traffic()
        self._operation_compute()
        self._edges()
        self._operands()
        self._results()

    def _add(self, key: Key, sizes: tuple[int, ...], allowed: Mapping[Key, np.ndarray]) -> None:
        first = self.program.alike[key]
        if first in self.variable:
            self.variable[key] = self.variable[first]
            return
        table = states(sizes, self.mesh.sizes)
        if first in allowed:
            table = table[allowed[first]]
        self.variable[first] = self.variable[key] = self.problem.add_variable(len(table), f"{key[0]} {key[1]}")
        self.states.append(table)

    def var(self, kind: str, number: int) -> int:
        return self.variable[kind, number]

    # --------------------------------------------------------------------------------------------------------------- memory

    def _classes(self) -> None:
        """Buffers by (variable, dimensions) and, where arrays are padded, shape: all of one class are cut alike."""
        index: dict[tuple, int] = {}
        self.buffer_class = np.empty(len(self.buffers.ids), int)
        tile, values, b = self.chip.tile, self.variant.rewritten.graph.values, self.buffers
        spatial = self.cached(("spatial",), lambda: _spatial(self.groups)) if tile else frozenset()
        for k, (number, stacked) in enumerate(zip(self.variant.origin, self.variant.stacked, strict=True)):
            group, dims = self.groups.place[int(number)]
            dims = (WHOLE, *dims) if stacked else dims
            shape = values[int(b.ids[k])].shape if tile else ()
            minor = tuple(i for i, d in enumerate(dims) if (group, d) not in spatial) if tile else ()
            self.buffer_class[k] = index.setdefault((self.var("group", group), dims, shape, minor), len(index))
        self.classes = [(v, dims) for v, dims, _, _ in index]
        self.pieces = [
            self.cached(("pieces", v, d), lambda v=v, d=d: shards(project(self.states[v], d), self.mesh.sizes)) for v, d in self.classes
        ]
        padded = [self.cached(("padding", *key), lambda key=key: self._padding(*key)) for key in index]
        self.fraction = [more / pieces for more, pieces in zip(padded, self.pieces, strict=True)]

    def _padding(self, variable: int, dims: tuple[int, ...], shape: tuple[int, ...], minor: tuple[int, ...]) -> np.ndarray:
        """By how much padding enlarges what one device holds of a buffer, for each state."""
        if not shape:
            return np.ones(1)
        return padding(project(self.states[variable], dims), shape, minor, self.mesh.sizes, self.chip.tile)

    def memory_row(self, position: int) -> MemoryRow:
        """The row of a position: bytes of every buffer alive there, by variable and state."""
        b = self.buffers
        alive = (b.start <= position) & (b.end >= position)
        by_class = np.bincount(self.buffer_class[alive], b.bytes_[alive], minlength=len(self.classes))
        vectors: dict[int, np.ndarray] = {}
        base = 0.0
        for c in np.nonzero(by_class)[0]:
            v, _ = self.classes[c]
            vector = by_class[c] * self.fraction[c]
            if len(vector) == 1:
                base += float(vector[0])
            else:
                vectors[v] = vectors[v] + vector if v in vectors else vector
        return MemoryRow(position, base, vectors)

    def buffer_sizes(self, x: np.ndarray) -> np.ndarray:
        """Bytes of each buffer on one device under solution ``x``."""
        cut = np.array([self.fraction[c][x[v]] for c, (v, _) in enumerate(self.classes)])
        return self.buffers.bytes_ * cut[self.buffer_class]

    # -------------------------------------------------------------------------------------------------------------- compute

    def _times_of(self, number: int) -> int:
        node = self.values[number].producer
        return self.groups.times[node.id] if node else 1

    def again(self, node: int) -> int:
        """How often a node runs in a step, recomputation included."""
        return self.groups.times[node] + self.variant.extra.get(node, 0)

    def _traffic(self) -> None:
        b = self.buffers
        times = np.array([self._times_of(int(n)) for n in self.variant.origin], float)
        moved = b.bytes_ * (b.reads + b.written) * times
        by_class = np.bincount(self.buffer_class, moved, minlength=len(self.classes))
        fleeting = np.nonzero((b.end - b.start <= FLEETING) & ~b.is_input & ~self.variant.stacked & (moved > 0))[0]
        fleeting = fleeting[np.lexsort((b.bytes_[fleeting], self.buffer_class[fleeting]))]
        found, first = np.unique(self.buffer_class[fleeting], return_index=True)
        fleeting_of = dict(zip(found.tolist(), np.split(fleeting, first[1:]), strict=False))
        fed = b.is_input & ~np.isin(self.variant.origin, list(self.program.known_early))
        from_host = np.bincount(self.buffer_class, b.bytes_ * fed + self._offloaded_bytes(), minlength=len(self.classes))
        for c, (v, _) in enumerate(self.classes):
            if by_class[c]:
                near = self._kept_near(c, fleeting_of.get(c), moved) if self.chip.vmem_bytes else 0.0
                self.problem.add_unary("compute", v, traffic_seconds((by_class[c] - near) / self.pieces[c], self.chip))
            if from_host[
                c
            ]:  # the batch comes anew each step: what a device does not get need not be sent; what is offloaded goes and comes
                self.problem.add_unary("prefetch", v, from_host[c] / self.pieces[c] / self.chip.host_bandwidth)

    def _offloaded_bytes(self) -> np.ndarray:
        """Bytes that go to host memory and come back in a step, counted at the buffer (of no size) that goes."""
        moved = np.zeros(len(self.buffers.ids))
        if self.variant.offloaded:
            sent = {out for node in walk(self.variant.rewritten.graph) if node.params.get("space") == HOST for out in node.outputs}
            for k in np.nonzero(np.isin(self.buffers.ids, list(sent)))[0]:
                number = int(self.variant.origin[k])
                moved[k] = 2.0 * value_bytes(self.values[number]) * self._times_of(number)
        return moved

    def _kept_near(self, c: int, mine: np.ndarray | None, moved: np.ndarray) -> np.ndarray | float:
        """Of the bytes that class ``c`` moves, those of its short-lived buffers (``mine``, by size) that fit on-chip memory, by state."""
        if mine is None:
            return 0.0
        fitting = np.searchsorted(self.buffers.bytes_[mine], VMEM_SHARE * self.chip.vmem_bytes * self.pieces[c], side="right")
        return np.concatenate([[0.0], np.cumsum(moved[mine])])[fitting]

    def _operation_compute(self) -> None:
        count: dict[int, float] = defaultdict(float)
        first: dict[int, Operation] = {}
        for op in self.groups.operations:
            v = self.var("operation", op.node.id)
            count[v] += self.again(op.node.id)
            first.setdefault(v, op)
        for v, op in first.items():
            seconds = operation_seconds(op, self.values, self.states[v], self.mesh.sizes, self.chip)
            self.problem.add_unary("compute", v, count[v] * seconds)

    # ------------------------------------------------------------------------------------------------------------- passages

    def passage_bytes(self, number: int) -> float:
        """Bytes of a value as collectives see it: XLA:CPU, which has no 16-bit arithmetic, sends them as float32."""
        value = self.values[number]
        widened = not self.mesh.scatters and str(value.dtype) in ("bfloat16", "float16")
        return value_bytes(value) * (2.0 if widened else 1.0)

    def edge_bytes(self, e: Edge) -> float:
        """Bytes of the array that an edge reshards: what a conversion that narrows makes, not what it reads."""
        return self.passage_bytes(e.result if e.node in self.narrowing else e.value)

    def cached(self, key: tuple, make: Callable[[], Any]) -> Any:
        """A table that does not depend on rematerialisation: variables are numbered alike in all models of a program and mesh."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def resource_of(self, source: int, target: int) -> str:
        """Prefetchable: a value known before the step (weights), or one that goes only to the update (gradients)."""
        if self.overlaps and (source in self.program.known_early or target in self.program.late_only):
            return "prefetch"
        return "blocking"

    def _edges(self) -> None:
        count: dict[tuple, float] = defaultdict(float)
        for e in self.groups.edges:
            a, b = self.var("group", e.source), self.var("group", e.target)
            resource = self.resource_of(e.value, e.result)
            key = (a, b, e.dims, e.reduced, self.edge_bytes(e), self.passage_bytes(e.result), resource)
            count[key] += e.times + self.variant.extra.get(e.node, 0)
        for (a, b, dims, reduced, bytes_, result_bytes, resource), times in count.items():
            table = self.cached(
                ("edge", a, b, dims, reduced, bytes_, result_bytes),
                lambda a=a, b=b, dims=dims, reduced=reduced, n=bytes_, m=result_bytes: self.edge_table(
                    self.states[a], self.states[b], dims, reduced, n, m
                ),
            )
            self._add_passage(resource, a, b, times, table)

    def _add_passage(self, resource: str, a: int, b: int, times: float, tables: np.ndarray) -> None:
        """``tables``: of ``passage_tables``; what is waited for is never prefetched."""
        for kind, table in zip((resource, "blocking"), tables, strict=True):
            if table.any():
                self.problem.add_pair(kind, a, b, times * table)

    def edge_table(self, source, target, dims, reduced, bytes_: float, result_bytes: float) -> np.ndarray:
        here, there, partial, sizes = edge_layout(source, target, dims, reduced, self.mesh.sizes)
        table = passage_tables(here, there, bytes_, self.mesh)
        if partial.any():
            local = result_bytes / sizes
            unsplit = np.full_like(here, WHOLE)
            for n in np.unique(local):
                rows = local == n
                table[:, rows] += passage_tables(unsplit[rows], unsplit[:1], n, self.mesh, partial[rows])
        return table

    def _operands(self) -> None:
        count: dict[tuple, float] = defaultdict(float)
        for op in self.groups.operations:
            v = self.var("operation", op.node.id)
            for o in op.operands:
                g = self.var("group", o.group)
                resource = self.resource_of(o.value, -1)
                count[g, v, tuple(d for d, _ in o.dims), factor_dims(op, o), self.passage_bytes(o.value), resource] += self.again(
                    op.node.id
                )
        for (g, v, dims, factors, bytes_, resource), times in count.items():
            table = self.cached(
                ("operand", g, v, dims, factors, bytes_),
                lambda g=g, v=v, dims=dims, factors=factors, n=bytes_: passage_tables(
                    project(self.states[g], dims), project(self.states[v], factors), n, self.mesh
                ),
            )
            self._add_passage(resource, g, v, times, table)

    def _results(self) -> None:
        count: dict[tuple, float] = defaultdict(float)
        for op in self.groups.operations:
            v = self.var("operation", op.node.id)
            for o in op.results:
                g = self.var("group", o.group)
                resource = self.resource_of(-1, o.value)
                reduced = reduced_factors(op, o)
                bytes_ = self.passage_bytes(o.value)
                count[v, g, factor_dims(op, o), tuple(d for d, _ in o.dims), reduced, bytes_, resource] += self.again(op.node.id)
        for (v, g, factors, dims, reduced, bytes_, resource), times in count.items():
            table = self.cached(
                ("result", v, g, factors, dims, reduced, bytes_),
                lambda v=v, g=g, factors=factors, dims=dims, reduced=reduced, n=bytes_: passage_tables(
                    project(self.states[v], factors),
                    project(self.states[g], dims),
                    n,
                    self.mesh,
                    np.isin(self.states[v], reduced) if reduced else None,
                ),
            )
            self._add_passage(resource, v, g, times, table)

    # ------------------------------------------------------------------------------------------------------------- the way back

    def state(self, x: np.ndarray, kind: str, number: int) -> np.ndarray:
        v = self.var(kind, number)
        return self.states[v][x[v]]

    def position(self, x: np.ndarray, number: int) -> np.ndarray:
        """Where a value's mesh axes lie: ``int8 [axes]`` over its dimensions."""
        group, dims = self.groups.place[number]
        return project(self.state(x, "group", group)[None], dims)[0]

    def operand_position(self, x: np.ndarray, op: Operation, operand: Operand) -> np.ndarray:
        return project(self.state(x, "operation", op.node.id)[None], factor_dims(op, operand))[0]

    def collectives(self, x: np.ndarray) -> list[tuple[str, float, tuple[int, ...], float, float, str, int]]:
        """(kind, bytes, axis indices, times, seconds of one, resource, node id) of every passage under ``x``."""
        found = []
        for e in self.groups.edges:
            source, target = self.state(x, "group", e.source)[None], self.state(x, "group", e.target)[None]
            found += self._edge_collectives(e, source, target)
        for op in self.groups.operations:
            for o in op.operands:
                group = self.state(x, "group", o.group)[None]
                here = project(group, tuple(d for d, _ in o.dims))[0]
                steps = passage_collectives(here, self.operand_position(x, op, o), self.passage_bytes(o.value), self.mesh)
                resource = self.resource_of(o.value, -1)
                found += [(k, n, axes, self.again(op.node.id), s, resource, op.node.id) for k, n, axes, s in steps]
            for o in op.results:
                strategy = self.state(x, "operation", op.node.id)
                partial = np.isin(strategy, reduced_factors(op, o))
                there = project(self.state(x, "group", o.group)[None], tuple(d for d, _ in o.dims))[0]
                bytes_ = self.passage_bytes(o.value)
                steps = passage_collectives(self.operand_position(x, op, o), there, bytes_, self.mesh, partial)
                resource = self.resource_of(-1, o.value)
                found += [(k, n, axes, self.again(op.node.id), s, resource, op.node.id) for k, n, axes, s in steps]
        return found

    def _edge_collectives(self, e: Edge, source: np.ndarray, target: np.ndarray) -> list:
        here, there, partial, sizes = edge_layout(source, target, e.dims, e.reduced, self.mesh.sizes)
        resource = self.resource_of(e.value, e.result)
        steps = passage_collectives(here[0], there[0], self.edge_bytes(e), self.mesh)
        if partial.any():
            unsplit = np.full_like(here[0], WHOLE)
            local = self.passage_bytes(e.result) / float(sizes[0])
            steps += passage_collectives(unsplit, unsplit, local, self.mesh, partial[0])
        times = e.times + self.variant.extra.get(e.node, 0)
        return [(k, n, axes, times, s, resource, e.node) for k, n, axes, s in steps]


def _narrowing(groups: Groups) -> frozenset[int]:
    """Nodes that convert to a narrower type."""
    values, converts = groups.graph.values, (n for n in walk(groups.graph) if n.prim == "convert_element_type")
    return frozenset(n.id for n in converts if isinstance(n.inputs[0], int) and _narrower(values, n.outputs[0], n.inputs[0]))


def _spatial(groups: Groups) -> frozenset[tuple[int, int]]:
    """(group, dimension) of what convolutions slide over."""
    convolutions = (op for op in groups.operations if op.rule.kind is Kind.CONV)
    places = ((o, d) for op in convolutions for o in (*op.operands, *op.results) for d in enumerate(o.dims))
    named = ((groups.place[o.value], i, f) for o, (i, (_, f)) in places)
    return frozenset((group, dims[i]) for (group, dims), i, f in named if f.startswith("s") and dims[i] != WHOLE)


def _narrower(values: Mapping[int, Value], result: int, operand: int) -> bool:
    return value_bytes(values[result]) < value_bytes(values[operand])


def reduced_factors(op: Operation, result: Operand) -> list[int] | tuple[int, ...]:
    """Indices of the factors that operands have and ``result`` has not."""
    own = {f for _, f in result.dims}
    return tuple(i for i, (f, _) in enumerate(op.factors) if f not in own and any(f == g for o in op.operands for _, g in o.dims))


def edge_layout(source, target, dims, reduced, axis_sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """An edge's array before and after: (positions [a, axes], positions [b, axes], partial axes [a, axes], pieces of the result [a]).

    A dimension that is summed away keeps its axes on both sides: they turn into partial sums, not into a gather.
    """
    here = project(source, tuple(a for a, _ in dims))
    there = project(target, tuple(b for _, b in dims))
    partial = np.isin(source, reduced) if reduced else np.zeros(source.shape, bool)
    summed = [i for i, (a, _) in enumerate(dims) if a in reduced and a != WHOLE]
    split = shards(np.where(partial, WHOLE, source), axis_sizes)
    if not summed:
        return here, there, partial, split
    return np.where(np.isin(here, summed), WHOLE, here), np.where(np.isin(there, summed), WHOLE, there), partial, split
