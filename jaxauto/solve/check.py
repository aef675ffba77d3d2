"""Every answer recomputed from the graph, the plain way: one operation, edge and buffer at a time; no tables, no folding.

What ``model.py``, ``fold.py`` and ``reshard.py`` do to whole tables of states is done here for the one state that was chosen, in scalars.
A slip there (a transposed table, one variable for what is not alike, a lost multiplicity) shows as a difference. Shared with them is what
is a fact of the program or of the machine: groups, buffers, bytes of a value, seconds of one collective. A change of the cost model is a
change of both; the tests of this file hold them together.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxauto.cost.collectives import collective_seconds
from jaxauto.cost.compute import traffic_seconds
from jaxauto.cost.layout import Major
from jaxauto.cost.onchip import capacity, room
from jaxauto.graph import multiplicity, walk
from jaxauto.groups import Edge, Operand, Operation
from jaxauto.rewrite.narrow import multiplies_rounded
from jaxauto.solve.check_beside import brought, held_beside, with_rows
from jaxauto.solve.check_passages import Passages, Where
from jaxauto.solve.check_ring import padding, ring
from jaxauto.solve.check_turns import copies
from jaxauto.solve.check_work import hashed, is_piece, launched, roofline, transformed
from jaxauto.solve.facts import crossings, major_dims
from jaxauto.solve.loops import accumulated, combined, shadows
from jaxauto.solve.model import Model
from jaxauto.solve.onchip import place_on_chip
from jaxauto.solve.problem import RESOURCES
from jaxauto.solve.read_twice import read_together
from jaxauto.solve.search import Candidate
from jaxauto.solve.turns import updating
from jaxauto.strategies import WHOLE, states

_TOLERANCE = 1e-9  # relative
_SHOWN = 5  # complaints of one kind


def check(candidate: Candidate, budget_bytes: float = math.inf, allowed: Mapping[int, np.ndarray] | None = None) -> list[str]:
    """What is wrong with an answer; empty where nothing is.

    Args:
      candidate: as the search returns it.
      budget_bytes: that it has to keep to.
      allowed: group id → bool mask over its states: what users' constraints leave.
    """
    answer = Answer(candidate.model, candidate.x)
    found = [*_illegal(answer), *_forbidden(answer, allowed or {})]
    if found:
        return found
    seconds = answer.seconds()
    shorter, longer = sorted((seconds["compute"], seconds["prefetch"]))
    total = longer + candidate.model.chip.exposed_share * shorter + seconds["blocking"]
    for name in RESOURCES:
        found += _differs(f"{name} seconds", candidate.model.problem.resource(name, candidate.x), seconds[name], total)
    found += _differs("seconds", candidate.seconds, total, total)
    live = answer.live_bytes()
    found += _differs("peak bytes", candidate.peak_bytes, float(live.max()), float(live.max()))
    for row in candidate.model.problem.rows:
        told, found_there = row.bytes_at(candidate.x), answer.bytes_at(row.position, crowded=row.crowded)
        found += _differs(f"bytes at position {row.position}", told, found_there, float(live.max()))
    if live.max() > budget_bytes * (1 + _TOLERANCE):
        found.append(f"needs {live.max():.6g} bytes at position {int(live.argmax())}, the budget is {budget_bytes:.6g}")
    return found


def _differs(what: str, told: float, found: float, scale: float) -> list[str]:
    if abs(told - found) <= _TOLERANCE * max(scale, 1e-30):
        return []
    return [f"{what}: the tables say {told:.9g}, the graph says {found:.9g}"]


# ---------------------------------------------------------------------------------------------------------- what is allowed


def _illegal(answer: Answer) -> list[str]:
    """Mesh axes on dimensions that they do not divide, of values, groups and operations."""
    found: list[str] = []
    values = answer.model.values
    for number, (group, dims) in answer.model.groups.place.items():
        where = answer.where(answer.group[group], dims)
        found += _undivided(f"value {number}", values[number].shape, where, answer.sizes)
    for g in answer.model.groups.groups.values():
        found += _undivided(f"group {g.id}", tuple(g.sizes), answer.group[g.id], answer.sizes)
    for op in answer.model.groups.operations:
        factors = tuple(n for _, n in op.factors)
        found += _undivided(f"{op.node.prim} at {op.node.source or op.node.id}", factors, answer.operation[op.node.id], answer.sizes)
    return found[:_SHOWN]


def _undivided(what: str, shape: Sequence[int], where: Where, sizes: Sequence[int]) -> Iterator[str]:
    split: dict[int, int] = defaultdict(lambda: 1)
    for axis, d in enumerate(where):
        if d != WHOLE:
            split[d] *= sizes[axis]
    for d, pieces in split.items():
        if not 0 <= d < len(shape):
            yield f"{what} has {len(shape)} dimensions, dimension {d} is split {pieces} ways"
        elif shape[d] % pieces:
            yield f"{what}: dimension {d} of size {shape[d]} is split {pieces} ways"


def _forbidden(answer: Answer, allowed: Mapping[int, np.ndarray]) -> list[str]:
    """Groups in a state that constraints shut out."""
    found = []
    for g, mask in allowed.items():
        table = states(tuple(answer.model.groups.groups[g].sizes), tuple(answer.sizes))[mask]
        if answer.group[g] not in {tuple(map(int, row)) for row in table}:
            found.append(f"group {g} is in state {answer.group[g]}, which a constraint forbids")
    return found[:_SHOWN]


# ------------------------------------------------------------------------------------------------------------- what it costs


class Answer:
    """The chosen state of every group and operation, unfolded, as plain numbers."""

    def __init__(self, model: Model, x: np.ndarray):
        self.model, self.sizes = model, model.mesh.sizes
        chosen = {v: tuple(map(int, model.states[v][s])) for v, s in enumerate(x)}
        self.group: dict[int, Where] = {g: chosen[model.variable["group", g]] for g in model.groups.groups}
        self.operation: dict[int, Where] = {op.node.id: chosen[model.variable["operation", op.node.id]] for op in model.groups.operations}
        self.together = read_together(model.read_twice)
        self.placed = place_on_chip(model.variant, model.groups, self.major, model.chip, math.prod(self.sizes))
        self.shadows = shadows(model.groups, model.chip, math.prod(self.sizes))
        self.once = accumulated(model.groups)
        self.as_one = combined(model.groups, model.program.late_only) if model.mesh.windows else {}
        self.passages = Passages(model.mesh)

    def where(self, state: Where, dims: Sequence[int]) -> Where:
        """A group's (or an operation's) state as seen by a value: ``dims[i]`` is what its dimension i is there."""
        return tuple(dims.index(d) if d != WHOLE and d in dims else WHOLE for d in state)

    def operand(self, op: Operation, o: Operand) -> Where:
        """Where the operation wants (or leaves) an operand."""
        names = [f for _, f in o.dims]
        factors = [f for f, _ in op.factors]
        state = self.operation[op.node.id]
        return tuple(names.index(factors[d]) if d != WHOLE and factors[d] in names else WHOLE for d in state)

    def holder(self, o: Operand) -> Where:
        """Where the operand's group has it."""
        return self.where(self.group[o.group], [d for d, _ in o.dims])

    def pieces(self, where: Where) -> int:
        """Into how many parts an array is cut."""
        return self.passages.pieces(where)

    def count(self, axes: Iterable[int]) -> int:
        """Devices along mesh axes."""
        return self.passages.count(axes)

    def seconds(self) -> dict[str, float]:
        """Of each resource, in a step."""
        total: dict[str, float] = defaultdict(float)
        for op in self.model.groups.operations:
            times = self.model.groups.times[op.node.id] + self.model.variant.extra.get(op.node.id, 0)
            total["compute"] += self.model.groups.times[op.node.id] * roofline(self, op, self.placed.near)
            if op.node.id in self.model.variant.extra:
                total["compute"] += self.model.variant.extra[op.node.id] * roofline(self, op, self.placed.again)
            for o in op.operands:
                part = self.passages.seconds(self.holder(o), self.operand(op, o), self.read_bytes(op, o))
                again = self.together.get((op.node.id, o.value), 0)
                self.charge(total, self.resource(o.value, -1), times - again, part, op.node.id)
            for o in op.results:
                longer = self.windowed(op, o)
                part = self.passages.seconds(
                    self.operand(op, o),
                    self.holder(o),
                    self.bytes_of(o.value),
                    self.partial(op, o),
                    beside=longer is not None,
                    together=self.as_one.get(o.value, 1),
                )
                whole = self.operand(op, o) == self.holder(o) and self.model.chip.platform != "cpu"
                once = self.once.get(o.value, 1) if whole else 1
                self.charge(total, self.resource(-1, o.value), times, (part[0] / once, part[1] / once), op.node.id)
                total["compute"] += times * (longer[0] if longer else 0.0)
        outputs = {x for x in self.model.groups.graph.outputs if isinstance(x, int)}
        waited = {key for key, (_, ahead) in updating(self.model).items() if not ahead}
        for e, times, pieces in self.brought_once():
            for part in self.edge(e, pieces):
                ends = (e.node == -1 and e.value in outputs) or (e.node, e.operand) in waited
                self.charge(total, "blocking" if ends else self.resource(e.value, e.result), times, part, e.node)
        for exchanged in self.halos():
            total["blocking"] += exchanged
        total["compute"] += sum(times * traffic_seconds(2 * n, self.model.chip) for n, times in copies(self))
        if launch := self.model.chip.launch_seconds:
            total["compute"] += launched(self) * launch
        total["compute"] += hashed(self) + transformed(self)
        total["compute"] += sum(traffic_seconds(moved, self.model.chip) for *_, moved in with_rows(self))
        for resource, crossing, pieces in self.crossing():
            total[resource] += crossing / pieces / self.model.chip.host_bandwidth
        for k, moved, pieces in self.traffic():
            total["compute"] += traffic_seconds(moved, self.model.chip)
            buffers = self.model.buffers
            if buffers.is_input[k] and int(self.model.variant.origin[k]) not in self.model.program.known_early:
                total["prefetch"] += float(buffers.bytes_[k]) / pieces / self.model.chip.host_bandwidth
        return total

    def brought_once(self) -> Iterator[tuple[Edge, float, float | None]]:
        """Edges, how often in a step, and bytes where pieces of the array alone are brought; those that bring one array to one place in one
        pass, not narrowed nor summed, are one."""
        alike: dict[tuple, list[Edge]] = {}
        for k, e in enumerate(self.model.groups.edges):
            merges = e.node >= 0 and not e.reduced and e.node not in self.model.narrowing
            alike.setdefault((e.value, e.source, e.target, e.dims, e.times, e.backward) if merges else (k,), []).append(e)
        for edges in alike.values():
            results = {e.result: e for e in edges}
            pieces = sum(map(self.bytes_of, results)) if all(is_piece(self, e) for e in results.values()) else None
            yield edges[0], max(e.times + self.model.variant.extra.get(e.node, 0) for e in edges), pieces

    def halos(self) -> Iterator[float]:
        """Seconds that convolutions wait for their neighbours' borders: from each side half of what windows overlap; on TPU
        once for what several read as it is."""
        mesh, values, known = self.model.mesh, self.model.values, self.borders_known()
        for op in self.model.groups.operations:
            for k, (factor, _) in enumerate(op.factors):
                axes = [a for a, d in enumerate(self.operation[op.node.id]) if d == k and self.sizes[a] > 1]
                o = next((o for o in op.operands if factor in [f for _, f in o.dims]), None)
                if not (op.rule.halo.get(factor) and axes and o):
                    continue
                found = op.node.id in known and self.operand(op, o) == self.operand(*known[op.node.id])
                times = self.model.groups.times[op.node.id] * (not found) + self.model.variant.extra.get(op.node.id, 0)
                extent = values[o.value].shape[[f for _, f in o.dims].index(factor)] / self.count(axes)
                one_side = self.read_bytes(op, o) / self.pieces(self.operand(op, o)) / extent * op.rule.halo[factor] / 2
                sizes, links = [self.sizes[a] for a in axes], [mesh.links[a] for a in axes]
                yield 2 * times * float(collective_seconds("collective-permute", one_side * self.count(axes), sizes, links))

    def borders_known(self) -> dict[int, tuple[Operation, Operand]]:
        """Operations, as written, whose borders have been sent before one of their runs if another reads the array alike; on TPU."""
        if self.model.chip.platform != "tpu":
            return {}
        sent: dict[tuple, tuple[Operation, Operand]] = {}
        known: dict[int, tuple[Operation, Operand]] = {}
        where = self.model.buffers.position
        runs = [(where.get(node.id, -1), k) for k, (_, node) in enumerate(self.model.variant.operations)]
        for _, k in sorted(runs):
            op, node = self.model.variant.operations[k]
            for o in op.operands:
                factors = {f: d for d, (_, f) in enumerate(o.dims) if f in dict(op.factors) and op.rule.halo.get(f)}
                if not factors:
                    continue
                array = node.inputs[op.node.inputs.index(o.value)], *sorted((d, op.rule.halo[f]) for f, d in factors.items())
                if array in sent:
                    known[op.node.id] = sent[array]
                sent.setdefault(array, (op, o))
                break
        return known

    def crossing(self) -> Iterator[tuple[str, float, int]]:
        """(resource, bytes over the host's link in a step, pieces) of each array that goes there and comes back."""
        rewritten, groups = self.model.variant.rewritten, self.model.groups
        times = {out: groups.times[node.id] for node in walk(groups.graph) for out in node.outputs}
        loops = [node for node in walk(groups.graph) if node.bodies]
        times.update({x: node.trips * groups.times[node.id] for node in loops for body in node.bodies for x in body.inputs})
        for resource, copy in crossings(rewritten.graph):
            number = rewritten.origin[copy]
            group, dims = groups.place[number]
            bytes_ = 2 * self.model.values[number].nbytes * times.get(number, 1)
            yield resource, bytes_, self.pieces(self.where(self.group[group], dims))

    def charge(self, total: dict[str, float], resource: str, times: int, part: tuple[float, float], node: int) -> None:
        """In a loop nothing hides for longer than a trip works."""
        hidden = min(part[0], self.shadows.get(node, math.inf))
        total[resource] += times * hidden
        total["blocking"] += times * (part[1] + part[0] - hidden)

    def resource(self, source: int, target: int) -> str:
        """What a passage takes: it can be prefetched or put off where its value is known early, or only the update reads its result."""
        program = self.model.program
        hides = self.model.chip.platform != "cpu" and (source in program.known_early or target in program.late_only)
        return "prefetch" if hides else "blocking"

    def bytes_of(self, number: int) -> float:
        return self.model.passage_bytes(number)

    def read_bytes(self, op: Operation, o: Operand) -> float:
        """Of an operand that a collective brings: on TPU in two bytes what is multiplied so."""
        return self.bytes_of(o.value) / (2 if self.rounds(op, o.value) else 1)

    def rounds(self, op: Operation, number: int) -> bool:
        return self.model.chip.platform == "tpu" and self.model.values[number].dtype == np.float32 and multiplies_rounded(op.node)

    def is_rounded(self, number: int, view: int) -> bool:
        """Whether a value is read rounded by all operations that read it in a group between it and them."""
        return view != self.model.groups.place[number][0] and self.read_rounded.get((number, view), False)

    @functools.cached_property
    def read_rounded(self) -> dict[tuple[int, int], bool]:
        """(value, group that operations read it in) → whether all of them read it rounded."""
        found: dict[tuple[int, int], bool] = {}
        for op in self.model.groups.operations:
            found.update({(o.value, o.group): found.get((o.value, o.group), True) and self.rounds(op, o.value) for o in op.operands})
        return found

    def partial(self, op: Operation, result: Operand) -> frozenset[int]:
        """Mesh axes on factors that operands have and the result has not."""
        own, read = {f for _, f in result.dims}, {f for o in op.operands for _, f in o.dims}
        state = self.operation[op.node.id]
        return frozenset(a for a, d in enumerate(state) if d != WHOLE and op.factors[d][0] in read - own)

    def edge(self, e: Edge, pieces: float | None = None) -> Iterator[tuple[float, float]]:
        """The passages of an edge: of the array, or ``pieces`` bytes of it, and of the sum along dimensions that are summed away."""
        source = self.group[e.source]
        here, there = self.sides(e)
        number = e.result if e.node in self.model.narrowing else e.value
        whole = self.bytes_of(number) / (2 if self.is_rounded(e.value, e.target) else 1)
        yield self.passages.seconds(here, there, whole if pieces is None else min(whole, pieces))
        partial = frozenset(a for a, d in enumerate(source) if d != WHOLE and d in e.reduced)
        if partial:
            kept = math.prod(n for a, n in enumerate(self.sizes) if source[a] != WHOLE and a not in partial)
            nowhere = (WHOLE,) * len(self.sizes)
            yield self.passages.seconds(nowhere, nowhere, self.bytes_of(e.result) / kept, partial, together=self.as_one.get(e.result, 1))

    def sides(self, e: Edge) -> tuple[Where, Where]:
        """Where an edge's array is, and where it goes; what is summed away stays."""
        here, there = self.where(self.group[e.source], [a for a, _ in e.dims]), self.where(self.group[e.target], [b for _, b in e.dims])
        summed = {i for i, (a, _) in enumerate(e.dims) if a != WHOLE and a in e.reduced}
        return tuple(WHOLE if d in summed else d for d in here), tuple(WHOLE if d in summed else d for d in there)

    def windowed(self, op: Operation, o: Operand) -> tuple[float, float, dict[int, float]] | None:
        """See ``ring``."""
        return ring(self.model, op, o, self.operation[op.node.id], self.partial(op, o), self.holder(o))

    # ------------------------------------------------------------------------------------------------------------- buffers

    @functools.cached_property
    def major(self) -> Major:
        return major_dims(self.model.groups) if self.model.chip.tile else Major()

    def minor(self, group: int, dims: tuple[int, ...]) -> list[int]:
        """The dimensions of an array that may be minor."""
        batch = self.major.batches.get((group, dims), ())
        return [i for i, d in enumerate(dims) if (group, d) not in self.major.spatial and i not in batch]

    def cut(self) -> Iterator[tuple[int, int, float]]:
        """(buffer, pieces, bytes of one device with padding)."""
        variant, model = self.model.variant, self.model
        for k, (number, stacked) in enumerate(zip(variant.origin, variant.stacked, strict=True)):
            group, own = model.groups.place[int(number)]
            dims = (WHOLE, *own) if stacked else own
            where = self.where(self.group[group], dims)
            value = variant.rewritten.graph.values[int(model.buffers.ids[k])]
            minor = [i + stacked for i in self.minor(group, own)]
            minor = [0, *minor] if stacked and not self.major.batches.get((group, own)) else minor
            padded = padding(value.shape, where, minor, self.sizes, model.chip.tile_of(value.dtype))
            yield k, self.pieces(where), float(model.buffers.bytes_[k]) / self.pieces(where) * padded

    def traffic(self) -> Iterator[tuple[int, float, int]]:
        """(buffer, bytes that one device moves of it in a step, pieces): short-lived ones that fit stay in on-chip memory."""
        b, variant, most = self.model.buffers, self.model.variant, capacity(self.model.chip)
        values, runs = variant.rewritten.graph.values, multiplicity(variant.rewritten.graph)
        inside = [(loop, x) for loop in walk(variant.rewritten.graph) for body in loop.bodies for x in body.inputs]
        entered = {x: loop.trips * runs[loop.id] for loop, x in inside}
        for k, pieces, local in self.cut():
            made, written = values[int(b.ids[k])].producer, self.model.values[int(variant.origin[k])].producer
            times = runs[made.id] if made else self.model.groups.times[written.id] if written else entered.get(int(b.ids[k]), 1)
            spared = b.reads[k] * self.placed.reads[k] + b.written[k] * self.placed.written[k] if local <= most else 0.0
            yield k, local * float(b.reads[k] + b.written[k] - spared) * times, pieces

    def on_chip(self) -> Iterator[tuple[int, float, bool]]:
        """(buffer, bytes of one device, whether on-chip memory has it where there is room)."""
        for k, _, local in self.cut():
            yield k, local, bool(self.placed.written[k]) and local <= capacity(self.model.chip)

    def live_bytes(self) -> np.ndarray:
        """Of one device at each position: buffers with their padding, and what is resharded there for one operation."""
        return np.maximum(*self.live)

    @functools.cached_property
    def live(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes at each position where all that may stay on chip does, and where what fills it does and the rest is in HBM."""
        b = self.model.buffers
        change = np.zeros((2, b.length + 1))
        for k, size, near in self.on_chip():
            for kind in (1,) if near else (0, 1):
                change[kind, b.start[k]] += size
                change[kind, b.end[k] + 1] -= size
        live = np.cumsum(change, axis=1)[:, :-1]
        live[1] -= room(self.model.chip)
        for at, size in brought(self):
            live[:, at] += size
        for begin, end, size in held_beside(self):
            live[:, begin : end + 1] += size
        return live[0], live[1]

    def bytes_at(self, position: int, *, crowded: bool) -> float:
        """What ``MemoryRow`` tells of."""
        return float(self.live[crowded][position])
