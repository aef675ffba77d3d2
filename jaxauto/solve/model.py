"""Groups × mesh × target → Problem, and back: what a solution means for values, operands and collectives.

Tables (each line names the function that builds it)
- compute of operations: roofline of each strategy, with what fuses into it                    ``work.py``
- compute of groups: HBM traffic of their materialised members                                 ``work.py``
- passages: resharding an array from a group's state to another's or to an operand's layout    ``_edges``, ``_operands``
- halos: what neighbours send for a window on a split dimension                                ``work.py``
- results: partial sums and resharding from a strategy to the group of its result, and what     ``_results``
  a dot takes longer that is cut into pieces to hide the sum
- copies: of arrays whose layout is at odds with a collective                                   ``turns.py``
- memory rows: bytes alive at a position, of buffers and of arrays resharded there             ``memory_row``
Alike groups and operations share one variable (``fold.py``); their tables are summed.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from jaxauto import compat
from jaxauto.core import MeshAxes
from jaxauto.cost.compute import factor_dims
from jaxauto.cost.halo import SIDES, halo_collectives
from jaxauto.cost.layout import Laid, Major, minor_dims, padding
from jaxauto.cost.liveness import live_bytes
from jaxauto.cost.onchip import Near, in_hbm, of_sums, room
from jaxauto.cost.reshard import passage_collectives, passage_tables
from jaxauto.cost.windowed import Inside, made_inside, windowed
from jaxauto.groups import WHOLE, Edge, Groups, Operand, Operation
from jaxauto.solve.beside import held_beside
from jaxauto.solve.brought import Arrivals
from jaxauto.solve.facts import cut_along, major_dims, narrowing, read_rounded, take_places, with_borders
from jaxauto.solve.fold import Key
from jaxauto.solve.loops import accumulated, combined, hidden_seconds, shadows
from jaxauto.solve.onchip import place_on_chip
from jaxauto.solve.positions import edge_layout, reduced_factors, unsummed
from jaxauto.solve.problem import MemoryRow, Problem
from jaxauto.solve.read_twice import read_together, read_twice
from jaxauto.solve.remat import Variant
from jaxauto.solve.tables import add_tables
from jaxauto.solve.turns import add_turns, updating
from jaxauto.solve.work import add_launches, add_operations, add_traffic, add_unhidden
from jaxauto.strategies import project, shards, states


@dataclass(frozen=True)
class Program:
    """What is known of a step before a mesh is: groups, buffers, alike decisions, and what can be prefetched."""

    groups: Groups
    alike: Mapping[Key, Key]
    known_early: frozenset[int]  # values that do not depend on the batch: weights and what is made of them alone
    late_only: frozenset[int]  # values that nothing heavy reads any more: gradients, updates, metrics


class Passage(NamedTuple):
    """What is brought from one group to another in one pass.

    Attributes:
      edge: the first of those that it is for. often: in a step.
      pieces: bytes where pieces of the array are brought, as it is not split along ``cut``, dimensions of the source; none: the array is.
    """

    edge: Edge
    often: float
    pieces: float = 0.0
    cut: tuple[int, ...] = ()


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
        self.overlaps = chip.platform != "cpu"
        self.problem = Problem.empty(chip.exposed_share)
        self.variable: dict[Key, int] = {}
        self.states: list[np.ndarray] = []
        self.narrowing = self.cached(("narrowing",), lambda: narrowing(program.groups))
        self.rounded = self.cached(("rounded",), lambda: read_rounded(program.groups, chip.platform))
        self.read_twice = self.cached(("read twice", variant), lambda: read_twice(variant, program.known_early, chip.platform))
        self.together = read_together(self.read_twice)
        self.placed = self.cached(("placed", variant), lambda: place_on_chip(variant, self.groups, self.major, chip, math.prod(mesh.sizes)))
        self.shadows = self.cached(("shadows",), lambda: shadows(program.groups, chip, math.prod(mesh.sizes)))
        self.summed_once = self.cached(("summed once",), lambda: accumulated(program.groups) if chip.platform != "cpu" else {})
        self.combined = self.cached(("combined",), lambda: combined(program.groups, program.late_only) if mesh.windows else {})
        self.final = frozenset(x for x in self.groups.graph.outputs if isinstance(x, int))
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
        add_traffic(self)
        add_launches(self)
        add_unhidden(self)
        add_tables(self)
        add_operations(self)
        self._edges()
        self._operands()
        self._results()
        add_turns(self)

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
        values, b = self.variant.rewritten.graph.values, self.buffers
        for k, (number, stacked) in enumerate(zip(self.variant.origin, self.variant.stacked, strict=True)):
            group, dims = self.groups.place[int(number)]
            minor = minor_dims(self.major, group, dims, stacked=bool(stacked)) if self.chip.tile else ()
            dims, value = (WHOLE, *dims) if stacked else dims, values[int(b.ids[k])]
            laid = Laid(value.shape, minor, tile) if (tile := self.chip.tile_of(value.dtype)) else None
            self.buffer_class[k] = index.setdefault((self.var("group", group), dims, laid), len(index))
        self.classes = [(v, dims) for v, dims, _ in index]
        self.pieces = [
            self.cached(("pieces", v, d), lambda v=v, d=d: shards(project(self.states[v], d), self.mesh.sizes)) for v, d in self.classes
        ]
        enlarged = [self.cached(("padding", *key), lambda key=key: self._padding(*key)) for key in index]
        self.fraction = [more / pieces for more, pieces in zip(enlarged, self.pieces, strict=True)]

    def _padding(self, variable: int, dims: tuple[int, ...], laid: Laid | None) -> np.ndarray:
        """By how much padding enlarges what one device holds of a buffer, for each state."""
        return np.ones(1) if laid is None else padding(project(self.states[variable], dims), laid, self.mesh.sizes)

    def memory_row(self, position: int, *, crowded: bool = False) -> MemoryRow:
        """The row of a position: bytes of every buffer alive there, by variable and state. ``crowded``: see ``MemoryRow``."""
        b = self.buffers
        alive = (b.start <= position) & (b.end >= position)
        near = alive & self.placed.written
        by_class = np.bincount(self.buffer_class[alive & ~near], b.bytes_[alive & ~near], minlength=len(self.classes))
        held = {c: float(by_class[c]) * self.fraction[c] for c in np.nonzero(by_class)[0].tolist()}
        for c, bytes_ in zip(self.buffer_class[near].tolist(), b.bytes_[near].tolist(), strict=True):
            held[c] = held.get(c, 0.0) + in_hbm(bytes_ * self.fraction[c], not crowded, self.chip)
        vectors: dict[int, np.ndarray] = {}
        base = -room(self.chip) if crowded else 0.0
        for c, vector in held.items():
            v, _ = self.classes[c]
            if len(vector) == 1:
                base += float(vector[0])
            else:
                vectors[v] = vectors[v] + vector if v in vectors else vector
        return MemoryRow(position, base, vectors, self._resharded(position), crowded)

    def _resharded(self, position: int) -> dict[tuple[int, int], np.ndarray]:
        """Bytes of the arrays resharded or turned for the operations at a position, by the states of group and operation."""
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for a, b, table in (*self.arrivals.tables(position), *held_beside(self).at(position)):
            if a != b and table.any():
                key = (min(a, b), max(a, b))
                pairs[key] = pairs.get(key, 0.0) + (table if a < b else table.T)
        return pairs

    def buffer_sizes(self, x: np.ndarray) -> np.ndarray:
        """Bytes of HBM that each buffer takes on one device under solution ``x``, where on-chip memory is not crowded."""
        return in_hbm(self.local_sizes(x), self.placed.written, self.chip)

    def crowded_out(self, x: np.ndarray) -> np.ndarray:
        """Bytes at each position of what would stay on chip but finds no room: ``place_on_chip`` takes all arrays to be cut evenly."""
        sizes = self.local_sizes(x)
        near = sizes - in_hbm(sizes, self.placed.written, self.chip)
        return np.maximum(live_bytes(self.buffers, near) - room(self.chip), 0.0) if near.any() else np.zeros(self.buffers.length)

    def local_sizes(self, x: np.ndarray) -> np.ndarray:
        """Bytes of each buffer on one device, in HBM or on chip."""
        cut = np.array([self.fraction[c][x[v]] for c, (v, _) in enumerate(self.classes)])
        return self.buffers.bytes_ * cut[self.buffer_class]

    # -------------------------------------------------------------------------------------------------------------- compute

    def again(self, node: int) -> int:
        """How often a node runs in a step, recomputation included."""
        return self.groups.times[node] + self.variant.extra.get(node, 0)

    def fetches(self, op: Operation, operand: Operand) -> int:
        """How often an operand is brought into the sharding that its operation wants."""
        return self.again(op.node.id) - self.together.get((op.node.id, operand.value), 0)

    def runs(self, op: Operation) -> list[tuple[float, Near]]:
        """How often a node runs in a step, and what of it is on chip then: as written, and made again."""
        both = (self.groups.times[op.node.id], self.placed.near), (self.variant.extra.get(op.node.id, 0), self.placed.again)
        return [(times, near) for times, near in both if times]

    def exchanges(self, op: Operation) -> tuple[int, int]:
        """How often an operation's borders are exchanged in a step, and how often more where it does not read what has them as the one
        in ``borders`` does: XLA:TPU exchanges them once for all that read an array alike."""
        known = self.groups.times[op.node.id] if op.node.id in self.borders else 0
        return self.again(op.node.id) - known, known

    @functools.cached_property
    def borders(self) -> dict[int, tuple[Operation, Operand]]:
        """``facts.with_borders``, on TPU."""
        if self.chip.platform != "tpu":
            return {}
        return self.cached(("with borders", self.variant), lambda: with_borders(self.variant))

    def halo_collectives(self, op: Operation, state: np.ndarray) -> list[tuple[Operand, float, tuple[int, ...], float]]:
        """What neighbours send each other for one run in one state, each ``SIDES`` times."""
        shapes = {o.value: self.values[o.value].shape for o in op.operands}
        return list(halo_collectives(op, state, shapes, {o.value: self.operand_bytes(op, o) for o in op.operands}, self.mesh))

    # ------------------------------------------------------------------------------------------------------------- passages

    def passage_bytes(self, number: int) -> float:
        """Bytes of a value as collectives see it: XLA:CPU, which has no 16-bit arithmetic, sends them as float32."""
        value = self.values[number]
        widened = not self.mesh.scatters and compat.dtype_name(value.dtype) in ("bfloat16", "float16")
        return value.nbytes * (2.0 if widened else 1.0)

    def operand_bytes(self, op: Operation, o: Operand) -> float:
        """Bytes of an operand as collectives see it that bring it: XLA:TPU rounds what is multiplied in bfloat16 before."""
        wide = op.node.id in self.rounded[0] and self.values[o.value].dtype == np.float32
        return self.passage_bytes(o.value) / (2.0 if wide else 1.0)

    def edge_bytes(self, e: Edge) -> float:
        """Bytes of the array that an edge reshards: what a conversion that narrows makes, or what is rounded for all that read it there."""
        bytes_ = self.passage_bytes(e.result if e.node in self.narrowing else e.value)
        return bytes_ / (2.0 if self.is_rounded(e.value, e.target) else 1.0)

    def is_rounded(self, number: int, group: int) -> bool:
        """Whether all that read a value in a group multiply it in bfloat16 (``Groups.share_operands``)."""
        return group in self.rounded[1] and self.values[number].dtype == np.float32

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

    def edge_resource(self, e: Edge) -> str:
        """What leaves the step at its end has nothing left to hide behind, nor has most of what the update gathers."""
        ends = e.node < 0 and e.value in self.final
        return "blocking" if ends or not updating(self).get((e.node, e.operand), (-1, True))[1] else self.resource_of(e.value, e.result)

    def _edges(self) -> None:
        count: dict[tuple, float] = defaultdict(float)
        for passage in self.passages():
            e, a, b = passage.edge, self.var("group", passage.edge.source), self.var("group", passage.edge.target)
            resource, together = self.edge_resource(e), self.combined.get(e.result, 1)
            key = (a, b, e.dims, e.reduced, self.edge_bytes(e), self.passage_bytes(e.result), together, *passage[2:])
            count[*key, resource, self.shadow(e.node)] += passage.often
        for (a, b, *of, resource, shadow), times in count.items():
            table = self.cached(("edge", a, b, *of), lambda a=a, b=b, of=of: self.edge_table(self.states[a], self.states[b], *of))
            self._add_passage(resource, a, b, times, table, shadow)

    def passages(self) -> list[Passage]:
        """Edges, and how often what they bring is brought in a step: for all that read it there in one pass at once."""
        again = self.variant.extra
        together = self.cached(("together",), self._together)
        return [Passage(edges[0], max(e.times + again.get(e.node, 0) for e in edges), *pieces) for edges, *pieces in together]

    def _together(self) -> list[tuple[list[Edge], float, tuple[int, ...]]]:
        """Edges of one passage, and of pieces the bytes and along what they are cut (``Passage``)."""
        found: dict[Any, list[Edge]] = defaultdict(list)
        for k, e in enumerate(self.groups.edges):
            alone = e.reduced or e.node < 0 or e.node in self.narrowing
            found[k if alone else (e.value, e.source, e.target, e.dims, e.times, e.backward)].append(e)
        return [(edges, *self._pieces(edges)) for edges in found.values()]

    def _pieces(self, edges: list[Edge]) -> tuple[float, tuple[int, ...]]:
        cuts = [cut_along(self.groups, e) for e in edges]
        if not all(cuts):
            return 0.0, ()
        bytes_ = sum(map(self.passage_bytes, {e.result for e in edges}))
        return min(bytes_, self.edge_bytes(edges[0])), tuple(sorted({*chain.from_iterable(cuts)}))

    def shadow(self, node: int) -> float:
        """Seconds of work that a collective of a node can hide behind, if it can hide at all."""
        return self.shadows.get(node, math.inf)

    def _add_passage(self, resource: str, a: int, b: int, times: float, tables: np.ndarray, shadow: float) -> None:
        """``tables``: of ``passage_tables``; what is waited for is never prefetched, nor what takes longer than there is work beside it."""
        hidden = hidden_seconds(tables[0], shadow)
        for kind, table in (resource, hidden), ("blocking", tables[1] + (tables[0] - hidden)):
            if table.any():
                self.problem.add_pair(kind, a, b, times * table)

    def edge_table(
        self, source, target, dims, reduced, bytes_: float, result_bytes: float, together: int, pieces: float, cut: tuple[int, ...]
    ) -> np.ndarray:
        here, there, partial, sizes = edge_layout(source, target, dims, reduced, self.mesh.sizes)
        table = passage_tables(here, there, bytes_, self.mesh)
        if cut:
            alone = ~np.isin(source, cut).any(-1)
            table[:, alone] = passage_tables(here[alone], there, pieces, self.mesh)
        if partial.any():
            local = result_bytes / sizes
            unsplit = np.full_like(here, WHOLE)
            for n in np.unique(local):
                rows = local == n
                table[:, rows] += passage_tables(unsplit[rows], unsplit[:1], n, self.mesh, partial[rows], together=together)
        return table

    def _operands(self) -> None:
        count: dict[tuple, float] = defaultdict(float)
        for op in self.groups.operations:
            v = self.var("operation", op.node.id)
            for o in op.operands:
                g = self.var("group", o.group)
                resource = self.resource_of(o.value, -1)
                dims, factors = tuple(d for d, _ in o.dims), factor_dims(op, o)
                key = (g, v, dims, factors, self.operand_bytes(op, o), resource, self.shadow(op.node.id))
                count[key] += self.fetches(op, o)
        for (g, v, dims, factors, bytes_, resource, shadow), times in count.items():
            table = self.cached(
                ("operand", g, v, dims, factors, bytes_),
                lambda g=g, v=v, dims=dims, factors=factors, n=bytes_: passage_tables(
                    project(self.states[g], dims), project(self.states[v], factors), n, self.mesh
                ),
            )
            self._add_passage(resource, g, v, times, table, shadow)

    def _results(self) -> None:
        count: dict[tuple, float] = defaultdict(float)
        first: dict[tuple, tuple[Operation, Operand]] = {}
        for op in self.groups.operations:
            for o in op.results:
                key = (*self._result_key(op, o), self.resource_of(-1, o.value), self.shadow(op.node.id))
                count[key] += self.again(op.node.id)
                first.setdefault(key, (op, o))
        for key, times in count.items():
            v, g, *_, resource, shadow = key
            passage, longer, *_ = self.result_tables(*first[key])
            self._add_passage(resource, v, g, times, passage, shadow)
            if longer.any():
                self.problem.add_pair("compute", v, g, times * longer)

    def _result_key(self, op: Operation, o: Operand) -> tuple:
        layouts = self.var("operation", op.node.id), self.var("group", o.group), factor_dims(op, o), tuple(d for d, _ in o.dims)
        sums = self.summed_once.get(o.value, 1), self.combined.get(o.value, 1)
        return *layouts, reduced_factors(op, o), self.passage_bytes(o.value), self.inside(op), *sums

    def result_tables(self, op: Operation, o: Operand) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
        """Of the passage from a strategy to the group of a result; of ``windowed``, whose bytes elsewhere are those beside the result."""
        key = self._result_key(op, o)
        return self.cached(("result", *key), lambda: self._result_tables(op, o, *key))

    def _result_tables(
        self, op: Operation, o: Operand, v: int, g: int, factors, dims, reduced, bytes_: float, inside, trips: int, together: int
    ) -> tuple:
        partial = np.isin(self.states[v], reduced) if reduced else np.zeros(self.states[v].shape, bool)
        target = project(self.states[g], dims)
        scattered, longer, copied, made = windowed(op, o, self.values, self.states[v], target, partial, self.mesh, self.chip, inside)
        source = project(self.states[v], factors)
        tables = passage_tables(source, target, bytes_, self.mesh, partial, scattered, together)
        alone = unsummed(source, target, partial, bytes_, self.mesh)
        copied = copied + np.where(scattered | (bool(self.mesh.windows) & (alone <= of_sums(self.chip))), 0.0, alone)
        if trips > 1:  # what is summed whole and stays where it is, is summed after the loop
            tables[:, (source[:, None] == target).all(-1)] /= trips
        return tables, longer, copied, made

    def inside(self, op: Operation) -> tuple[Inside, ...]:
        """Operands of a dot that are made as they are read."""
        if not self.mesh.windows:
            return ()
        found, placed = self.cached(("inside", self.variant), self._made_inside)
        return tuple(
            Inside(k, found[o.value], o.value in placed, placed.get(o.value, False)) for k, o in enumerate(op.operands) if o.value in found
        )

    def _made_inside(self) -> tuple[dict[int, bool], dict[int, bool]]:
        found = made_inside(self.groups, self.variant.held - self.variant.partly)
        on_chip = {int(self.buffers.ids[k]) for k in np.nonzero(self.placed.written)[0]}
        # what is padded is transposed before, so that a third one lies there
        places = take_places(found, self.variant.rewritten.graph, self.buffers, apart=("pad",))
        return found, {number: on_chip.issuperset(sources) for number, sources in places.items()}

    @property
    def major(self) -> Major:
        """What is never minor, where arrays are padded."""
        return self.cached(("major",), lambda: major_dims(self.groups)) if self.chip.tile else Major()

    @functools.cached_property
    def arrivals(self) -> Arrivals:
        """What is brought into other shardings for operations."""
        return Arrivals(self)

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
        for passage in self.passages():
            ends = (self.state(x, "group", group)[None] for group in (passage.edge.source, passage.edge.target))
            found += self._edge_collectives(passage, *ends)
        for op in self.groups.operations:
            strategy, again = self.state(x, "operation", op.node.id), self.again(op.node.id)
            for o in op.operands:
                here = project(self.state(x, "group", o.group)[None], tuple(d for d, _ in o.dims))[0]
                steps = self._passage(here, self.operand_position(x, op, o), self.operand_bytes(op, o))
                resource = self.resource_of(o.value, -1)
                found += [(k, n, axes, self.fetches(op, o), s, resource, op.node.id) for k, n, axes, s in steps]
            always, more = self.exchanges(op)
            for o, n, axes, s in self.halo_collectives(op, strategy):
                alike = not more or (self.operand_position(x, *self.borders[op.node.id]) == self.operand_position(x, op, o)).all()
                found.append(("collective-permute", n, axes, SIDES * (always + more * (not alike)), s, "blocking", op.node.id))
            for o in op.results:
                here, partial = self.operand_position(x, op, o), np.isin(strategy, reduced_factors(op, o))
                there = project(self.state(x, "group", o.group)[None], tuple(d for d, _ in o.dims))[0]
                beside = partial.any() and windowed(op, o, self.values, strategy[None], there[None], partial[None], self.mesh, self.chip)[0]
                together = self.combined.get(o.value, 1)
                steps = self._passage(here, there, self.passage_bytes(o.value), partial, beside=bool(np.any(beside)), together=together)
                once = self.summed_once.get(o.value, 1) if (here == there).all() else 1
                found += [(k, n, axes, again / once, s, self.resource_of(-1, o.value), op.node.id) for k, n, axes, s in steps]
        return found

    def _passage(self, here: np.ndarray, there: np.ndarray, bytes_: float, partial: np.ndarray | None = None, **how: Any):
        """The collectives of one passage; the same one is met in every layer. ``how``: of ``passage_collectives``."""
        key = ("passage", here.tobytes(), there.tobytes(), bytes_, b"" if partial is None else partial.tobytes(), *how.items())
        return self.cached(key, lambda: passage_collectives(here, there, bytes_, self.mesh, partial, **how))

    def _edge_collectives(self, passage: Passage, source: np.ndarray, target: np.ndarray) -> list:
        e, alone = passage.edge, passage.cut and not np.isin(source, passage.cut).any()
        here, there, partial, sizes = edge_layout(source, target, e.dims, e.reduced, self.mesh.sizes)
        resource = self.edge_resource(e)
        steps = self._passage(here[0], there[0], passage.pieces if alone else self.edge_bytes(e))
        if partial.any():
            unsplit = np.full_like(here[0], WHOLE)
            local = self.passage_bytes(e.result) / float(sizes[0])
            steps = steps + self._passage(unsplit, unsplit, local, partial[0], together=self.combined.get(e.result, 1))
        return [(k, n, axes, passage.often, s, resource, e.node) for k, n, axes, s in steps]
