"""What each block can keep: levels from everything to nothing, and what a level does to buffers and to the work of a step.

A level is a threshold on seconds per byte: in each block the residuals that cost less than that to make again are dropped, in the order of
``frontier.py``. Level 0 is the step as written. Thresholds are taken where together they drop even shares of all residual bytes.
What elementwise equations cost again depends on what reads them: there is a ladder of levels for each share (``_ELEMENTWISE``).
With offloading there are more levels: of what a level still keeps, the dearest to make again go to the host's memory, half or all of them;
and where the search asks for it, so does what only the optimizer reads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxauto.blocks import Block, closure, find_blocks
from jaxauto.core import Graph, Kind, Node, OpRule, Trips
from jaxauto.cost.compute import bytes_per_flop, ops_per_byte, unsplit_seconds
from jaxauto.cost.fusion import find_buffers
from jaxauto.cost.liveness import Buffers
from jaxauto.cost.transforms import more_seconds
from jaxauto.cost.widened import is_narrow
from jaxauto.graph import walk
from jaxauto.groups import Groups, Operation
from jaxauto.reruns import Remade, everything_in, find_reruns, with_bodies
from jaxauto.rewrite.hoist import hoist
from jaxauto.rewrite.narrow import narrow
from jaxauto.rewrite.offload import offload
from jaxauto.rewrite.program import Rewritten
from jaxauto.rewrite.recompute import recompute
from jaxauto.rewrite.split import can_split
from jaxauto.rules import rule_for
from jaxauto.solve.frontier import Drop, form, frontier
from jaxauto.solve.gradients import held_on_cpu, is_held_on_cpu
from jaxauto.solve.nested import nestings

MAX_LEVELS = 8
_OFFLOADED = (0.5, 1.0)  # shares of what is kept
_LARGE = 0.05  # of the largest residual: less is not worth a transfer
_SENT = 1e-3  # of all state: an array that takes less stays on the device
_APART = 1.2  # prices nearer than this factor are one: alike layers shall not differ by rounding
QUICK = 10_000  # values of a program that is rewritten in a fraction of a second
# Of its traffic, what an elementwise equation costs again: most of it is fused away, on TPU into matrix products that hide it. Where there
# are none near (a scan over a state), it costs more there too: levels of a quick program are tried for each share.
_ELEMENTWISE = {"tpu": (0.03, 0.25), "gpu": (0.25,), "cpu": (0.25,)}

Kept = tuple[frozenset[int] | None, ...]  # what each block keeps; None: as written

Splits = tuple[tuple[int, tuple[Trips, ...]], ...]  # (block, the trips of its scan, where they differ)


@dataclass(frozen=True)
class Level:
    """What a program keeps between its passes, and where.

    Attributes:
      kept: ``kept[b]``: what block b keeps, None for as written.
      offloaded: what of it is kept in the host's memory, and state, both as an argument and as the result that it becomes.
      remade: what of that between blocks is made again too, and how deep (``reruns.py``).
      splits: (block, the trips of its scan, where they differ) (``rewrite/split.py``); ``kept`` is what the first of them keep.
      threshold: seconds per byte that it stands for, see the head of the file.
    """

    kept: Kept
    offloaded: frozenset[int] = frozenset()
    remade: Remade = frozenset()
    splits: Splits = ()
    threshold: float = field(default=-1.0, compare=False)


@dataclass(frozen=True, eq=False)
class Variant:
    """A program after rematerialisation, in terms of the values of the program as written.

    Attributes:
      level: what it keeps.
      rewritten: the new graph.
      buffers: its buffers; ``origin[k]`` is the value as written that buffer k is a copy of, ``stacked[k]`` whether it has one
        leading dimension more.
      extra: node id (as written) → how often it runs again in a step.
      operations: each operation as often as the rewritten program has it: (as written, the node there, which may be a copy).
      partly: what some trips of a scan keep and others do not.
    """

    level: Level
    rewritten: Rewritten
    buffers: Buffers
    origin: np.ndarray
    stacked: np.ndarray
    extra: Mapping[int, int]
    operations: tuple[tuple[Operation, Node], ...]
    partly: frozenset[int] = frozenset()

    @functools.cached_property
    def held(self) -> frozenset[int]:
        """Values as written that are in memory, loops' slices of stacks included."""
        given = (x for node in walk(self.rewritten.graph) for body in node.bodies for x in body.inputs)
        return frozenset(self.origin.tolist()).union(self.rewritten.origin.get(x, x) for x in given)

    @property
    def kept(self) -> Kept:
        """What each block keeps."""
        return self.level.kept

    @property
    def offloaded(self) -> frozenset[int]:
        """What is in the host's memory."""
        return self.level.offloaded


class Remat:
    """The blocks of a step and what can be decided of them."""

    def __init__(
        self,
        graph: Graph,
        groups: Groups,
        aliased: frozenset[int],
        chip: Any,
        *,
        devices: int = 2,
        movable: Mapping[int, int] | None = None,
        late_only: Set[int] = frozenset(),
    ):
        """``devices``: that the program runs on; on one no gradient is summed before it is used.

        ``movable``: arguments that only the optimizer reads → the results that they become. ``late_only``: what only the update reads.
        """
        self.graph, self.groups, self.aliased, self.chip, self.devices = graph, groups, aliased, chip, devices
        self.blocks = find_blocks(graph)
        self.late_only = late_only
        self.movable = movable or {}
        self._state: dict[float, frozenset[int]] = {}
        self.operations = {op.node.id: op for op in groups.operations}
        self._variants: dict[Level, Variant] = {}
        self._rules: dict[int, tuple[Any, OpRule]] = {}
        self.splittable = [b for b in range(len(self.blocks)) if can_split(self.blocks, b) and not self._widens_stacks(self.blocks[b])]
        self.forms = [form(block) for block in self.blocks]
        self.quick = len(graph.values) < QUICK
        self.shares = _ELEMENTWISE[chip.platform][: None if self.quick else 1]  # of a large program one ladder is rewritten
        self.drops, *self.other_drops = map(self._drops, self.shares)

    def _widens_stacks(self, block: Block) -> bool:
        """Whether XLA:CPU has the stacks of all segments of a scan beside each other, in float32: those of narrow values are copied so
        before the first loop that reads one (twelve layers in six segments: 1,380 MiB, told 990)."""
        return self.chip.platform == "cpu" and any(is_narrow(self.graph.values[x]) for x in (*block.residuals, *block.outputs))

    def levels(self) -> list[Level]:
        """Level 0 keeps all; the last keeps nothing but what enters the blocks."""
        found = [Level((None,) * len(self.blocks))]
        if not self.blocks:
            return found
        for drops in (self.drops, *self.other_drops):
            for threshold in self._thresholds(drops):
                kept = kept_at(drops, threshold)
                if all(kept != level.kept for level in found):
                    found.append(Level(kept, threshold=threshold))
        return sorted(found, key=lambda level: level.threshold)

    def levels_with_host(self) -> list[Level]:
        """``levels()``, then those that offload."""
        levels = self.levels()
        found = list(levels)
        for level in levels:
            dearest = self._dearest(level)
            for share in _OFFLOADED:
                offloaded = frozenset(dearest[: math.ceil(share * len(dearest))])
                if offloaded and all(offloaded != other.offloaded or level.kept != other.kept for other in found):
                    found.append(replace(level, offloaded=offloaded))
        return found

    def with_state(self, levels: Sequence[Level]) -> list[Level]:
        """What ``levels`` keep, on the device or in the host's memory, with all state that can move there; none where none can."""
        state = self.state(1.0)
        plain = [level for level in levels if not level.offloaded] if state else []
        found = [replace(level, offloaded=state) for level in plain]
        found += [replace(level, offloaded=state.union(self._dearest(level))) for level in plain]
        return list(dict.fromkeys(found))

    def state(self, share: float) -> frozenset[int]:
        """``share`` of the bytes of what only the optimizer reads, and the results that it becomes.

        Small arrays first: while one is updated, the device has it after all. On TPU none: XLA:TPU drops the barrier, fetches all from the
        start of the step on, and needs more memory than without (scripts/results/state.md).
        """
        if share not in self._state:
            self._state[share] = self._smallest(share) if self.chip.platform != "tpu" else frozenset()
        return self._state[share]

    def _smallest(self, share: float) -> frozenset[int]:
        size = {x: self.graph.values[x].nbytes for x in self.movable}
        least = _SENT * sum(size.values())
        large = sorted((x for x in size if size[x] >= least), key=lambda x: (size[x], x))
        wanted = share * sum(size[x] for x in large)
        before = itertools.accumulate((size[x] for x in large), initial=0.0)
        chosen = [x for x, there in zip(large, before, strict=False) if there < wanted]
        return frozenset((*chosen, *(self.movable[x] for x in chosen)))

    def nested(self, level: Level, room: float = 1.0) -> Iterator[Level]:
        """Levels that keep what ``level`` does, and make some of what lies between blocks again too: ever less memory.

        ``room``: the share of the memory of ``level`` that there is.
        """
        kept = {b: keep for b, keep in enumerate(level.kept) if keep is not None}
        before = self.variant(level)
        for remade in nestings(self.blocks, kept, before.rewritten.graph, before.buffers, self.again_seconds, room):
            yield replace(level, remade=remade)

    def _dearest(self, level: Level) -> list[int]:
        """What a level keeps, large arrays only, what costs most to make again first; of loops what their recomputation starts from too."""
        smallest = _LARGE * max((self.graph.values[v].nbytes * b.count for b in self.blocks for v in b.residuals), default=0)
        priced: list[tuple[float, int]] = []
        for block, drops, kept in zip(self.blocks, self.drops, level.kept, strict=True):
            price = {d.value: d.price for d in drops}
            held = {*(block.residuals if kept is None else kept)}
            if kept is not None and block.scan:
                held |= {*closure(block, kept)[1]} & {*block.carries}
            large = (v for v in held if self.graph.values[v].nbytes * block.count >= smallest)
            priced += [(-price.get(v, math.inf), v) for v in large]
        return [v for _, v in sorted(priced)]

    def values_of(self, b: int) -> frozenset[int]:
        """Ids of the values of block ``b`` that can be saved: those it makes, and what a loop's body is given."""
        return frozenset((*self.blocks[b].inputs, *self.blocks[b].made))

    def _drops(self, share: float) -> list[list[Drop]]:
        """For each block its residuals in the order that they are dropped in; alike blocks are solved once, by places of values.

        ``share``: of its traffic, what an elementwise equation costs again.
        """
        again = functools.partial(self.again_seconds, share=share)
        solved: dict[tuple, tuple[list[Drop], tuple[int, ...]]] = {}
        found: list[list[Drop]] = []
        for block, key in zip(self.blocks, self.forms, strict=True):
            if key not in solved:
                solved[key] = frontier(block, again, self._kind), block.made
            drops, made = solved[key]
            here = dict(zip(made, block.made, strict=True))
            found.append([d.of(here) for d in drops])
        return found

    def _thresholds(self, drops: Sequence[Sequence[Drop]]) -> list[float]:
        """Rising prices, the last infinite, between which about equal shares of bytes are dropped."""
        events = sorted((d.price, d.bytes_) for block in drops for d in block)
        share = sum(b for _, b in events) / (MAX_LEVELS - 1)
        chosen: list[float] = []
        dropped = 0.0
        for (price, bytes_), after in itertools.pairwise([*events, (math.inf, 0.0)]):
            dropped += bytes_
            if dropped >= share and after[0] > _APART * price:
                chosen.append(price)
                dropped = 0.0
        return [*chosen[: MAX_LEVELS - 2], math.inf]

    def again_seconds(self, node: Node, share: float | None = None) -> float:
        """Seconds that running a node once more adds, unsharded: of elementwise equations, a share of their traffic (``_ELEMENTWISE``), and
        all that random bits and transforms take."""
        if node.bodies:
            return sum(self.again_seconds(n, share) * n_times for n, n_times in self._inside(node))
        share = 1.0 if node.id in self.operations else self.shares[0] if share is None else share
        return share * self._roofline(node) + more_seconds(node, self.chip)

    def _inside(self, node: Node) -> list[tuple[Node, float]]:
        times = self.groups.times
        inner = [n for body in node.bodies for n in walk(body) if not n.bodies]
        return [(n, times[n.id] / times[node.id]) for n in inner]

    def node_seconds(self, node: Node) -> float:
        """Seconds of one unsharded run."""
        return self._roofline(node) + more_seconds(node, self.chip)

    def _roofline(self, node: Node) -> float:
        return unsplit_seconds(node, self.operations.get(node.id), self.graph.values, self.chip)

    def variant(self, level: Level) -> Variant:
        """The program that keeps what ``level`` says, with its buffers; cached."""
        if level not in self._variants:
            self._variants[level] = self._variant(level)
        return self._variants[level]

    def _rule(self, node: Node) -> OpRule:
        """The rule of a node's equation, which all variants and copies share."""
        if id(node.eqn) not in self._rules:
            self._rules[id(node.eqn)] = (node.eqn, rule_for(node.eqn))  # with the equation: an id is its own as long as it lives
        return self._rules[id(node.eqn)][1]

    def _kind(self, node: Node) -> Kind:
        return Kind.CONTROL if node.bodies else self._rule(node).kind

    def _variant(self, level: Level) -> Variant:
        chosen, splits = {b: k for b, k in enumerate(level.kept) if k is not None}, dict(level.splits)
        again = recompute(self.graph, chosen, level.remade, self.blocks, splits) if chosen or splits else Rewritten(self.graph, {})
        rewritten = offload(again, level.offloaded)
        if self.chip.platform == "tpu":
            rewritten = hoist(narrow(rewritten))
        graph = rewritten.graph
        rules = self.groups.rules if graph is self.graph else {node.id: self._rule(node) for node in walk(graph) if not node.bodies}
        chip, rates = self.chip, (bytes_per_flop(self.chip), ops_per_byte(self.chip))
        held = self._as_ordered(rewritten, level, pressed=bool(chosen or splits)) if chip.platform == "cpu" else None
        buffers = find_buffers(graph, rules, self.aliased - level.offloaded, chip.platform, *rates, devices=self.devices, held=held)
        ids = buffers.ids.tolist()
        origin = np.array([rewritten.origin.get(n, n) for n in ids], int)
        stacked = np.array([n in rewritten.stacked for n in ids], bool)
        buffers.bytes_[[n in rewritten.host for n in ids]] = 0.0
        operations = tuple(self._operations_in(rewritten))
        return Variant(level, rewritten, buffers, origin, stacked, self._extra(level, chosen), operations, self._partly(level))

    def _as_ordered(self, rewritten: Rewritten, level: Level, *, pressed: bool) -> Graph | None:
        """The program as XLA:CPU is given it, with the barriers that hold it to its order, if any do (``awaited.py``).

        None: it is told in its own order, where something is fetched from the host's memory.
        """
        if level.offloaded:
            return None
        if not is_held_on_cpu(self.graph, self.devices, pressed=pressed):
            return rewritten.graph
        return held_on_cpu(rewritten, self.groups, self.late_only, self.devices, pressed=pressed)

    def _partly(self, level: Level) -> frozenset[int]:
        """What some parts of a scan keep and others do not."""
        found: set[int] = set()
        for b, parts in level.splits:
            whole = self.blocks[b].residuals
            kept = [{*(whole if held is None else held)} for part in parts for *_, held in part.leaves()]
            found |= set.union(*kept) - set.intersection(*kept)
        return frozenset(found)

    def _operations_in(self, rewritten: Rewritten) -> Iterator[tuple[Operation, Node]]:
        written, origin = self.graph.values, rewritten.origin
        operations = {op.node.id: op for op in self.groups.operations}
        for node in walk(rewritten.graph):
            made = written.get(origin.get(node.outputs[0], node.outputs[0])) if node.outputs else None
            op = operations.get(made.producer.id) if made is not None and made.producer is not None else None
            if op is not None and op.node.prim == node.prim:
                yield op, node

    def _extra(self, level: Level, chosen: Mapping[int, frozenset[int]]) -> dict[int, int]:
        """Node → how often it runs again in a step."""
        extra: dict[int, int] = {}
        splits = dict(level.splits)

        def run(nodes: Iterable[Node], trips: int = 1, of: int = 1) -> None:
            for node in nodes:
                extra[node.id] = extra.get(node.id, 0) + self.groups.times[node.id] * trips // of

        for b in {*chosen, *splits}:
            block = self.blocks[b]
            for part in splits.get(b, (Trips(block.count, chosen.get(b)),)):
                for count, depth, kept in part.leaves():
                    run(closure(block, kept)[0] if kept is not None else (), count, block.count)
                    run((n for node in block.forward for n in with_bodies(node)), count * depth, block.count)
        for rerun in find_reruns(self.blocks, chosen, level.remade):
            run(everything_in(rerun))
        return extra


def kept_at(drops: Sequence[Sequence[Drop]], threshold: float) -> Kept:
    """What each block keeps at a threshold; None: as written."""
    return tuple(next((d.kept for d in reversed(block) if d.price <= threshold), None) for block in drops)
