"""What stays in a TPU's on-chip memory, in outline XLA's memory-space assignment (memory_space_assignment/algorithm.cc).

An array stays on chip from where it is made, or from one use of it, to the next use, if that comes soon enough and there is room. The
compiler goes through the arrays by what HBM traffic each would save for the root of its size; so do we. What it does not do is keep an
array for longer than it takes to copy on-chip memory full a few times (``xla_msa_max_overlap_to_mem_size_async_copy_ratio``).
What all trips of a loop read is an array of each trip too, unless it stays throughout. What a trip takes from a stack comes from HBM for
each use, unless the stack stays throughout: its slice is made in the fusion that reads it. Where two cores share a device, fusions without
a dot alone leave results there, and no stack stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxauto.core import OPERATIONS, Graph, Kind, Link, LinkKind, Node, OpRule
from jaxauto.cost.lanes import Copied, copied_between
from jaxauto.cost.liveness import Buffers
from jaxauto.cost.patterns import is_strided
from jaxauto.cost.stacks import is_cut_inside
from jaxauto.graph import walk

_PATIENCE = 10.0  # times that it takes to copy on-chip memory full: no longer between two uses
_FILLED = 6 / 7  # of what arrays may take: a heap has gaps (fitted: SSM, the fullest of scripts/results/accuracy.md)
_SMALL = 1 / 1024  # of on-chip memory: there is always room
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "optimization_barrier"})  # of memory, as they are
_TRIPS = 5  # that the compiler takes any loop to make (kWhileExecutionCount)


class Side(NamedTuple):
    """What the fusion of a dot moves through HBM beside its own: see ``liveness.Beside``.

    ``bytes_``: (which of the operands and results it lies along, whole bytes).
    """

    bytes_: tuple[tuple[int, float], ...]
    exposed: float
    lanes: float


class Near(NamedTuple):
    """(node, value) of operations' operands and results → whole bytes of the largest buffer that holds it, if that is on chip where it
    fits. ``beside``: node → what else its fusion moves. ``narrow``: (node, value) → the share of its bytes that is moved for it: what it is
    widened from, in the fusion that reads it, or the half that products read. ``copied``: into another order of dimensions."""

    read: Mapping[tuple[int, int], float] = MappingProxyType({})
    written: Mapping[tuple[int, int], float] = MappingProxyType({})
    beside: Mapping[int, Side] = MappingProxyType({})
    narrow: Mapping[tuple[int, int], float] = MappingProxyType({})
    copied: Mapping[tuple[int, int], Copied] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Placed:
    """What of each buffer's traffic stays on chip, if the buffer fits there.

    Attributes:
      reads: share of what fused equations read of it; written: whether it is never in HBM. Both ``[buffers]``.
      near: what operations read and make there.
    """

    reads: np.ndarray
    written: np.ndarray
    near: Near = field(default_factory=Near)


def capacity(chip: Any) -> float:
    """Bytes of on-chip memory that arrays may take; 0 where a chip has none."""
    return max(0.0, chip.vmem_bytes - chip.scoped_bytes)


def of_sums(chip: Any) -> float:
    """Bytes that a sum of partial results may have to be on chip until it is scattered. Where devices have two cores none is (v5p: 16 of
    16 that dots write in 40 programs are in HBM; others come on chip from there)."""
    return capacity(chip) if chip.cores == 1 else 0.0


def room(chip: Any) -> float:
    """Bytes of arrays that are on chip at once, at the most: a heap has gaps."""
    return _FILLED * capacity(chip)


def in_hbm(sizes: Any, stays: Any, chip: Any) -> Any:
    """Bytes of HBM of arrays of ``sizes`` bytes on one device, of which those that ``stays`` tells of are on chip alone if they fit."""
    return np.where(stays & (sizes <= capacity(chip)), 0.0, sizes)


def place(graph: Graph, rules: Mapping[int, OpRule], buffers: Buffers, sizes: np.ndarray, chip: Any, devices: int) -> Placed:
    """Where the buffers of a program are, if each of ``devices`` has an equal part of every array and of all work.

    Args:
      rules: node id → rule; of operations at least.
      sizes: ``[buffers]``, whole bytes of each buffer as it fills tiles: on chip too.
    """
    return _Placement(graph, rules, buffers, sizes, chip, devices).run()


@dataclass
class _Use:
    """A read. ``weight``: of the array's bytes, those that cost time. ``by``: (operation, the value that it reads); None: fused."""

    position: int
    weight: float
    by: tuple[int, int] | None = None
    near: bool = False
    inside: _Array | None = None  # what a loop's trips know it as; None: it does not stay as it is
    until: int = 0  # where that loop ends


@dataclass
class _Array:
    """A buffer, or what a loop's trips know it as.

    ``bytes_``: whole, as it fills tiles. ``owner``: index of the buffer. ``begin``: where it is made; None if it is in HBM from the start.
    ``written``: of its bytes, those that take time to write. ``stays``: it may be written on chip alone. ``share``: of its bytes, those
    that one use reads: a trip its slice of a stack.
    """

    bytes_: float
    owner: int
    begin: int | None
    written: float = 0.0
    stays: bool = False
    share: float = 1.0
    uses: list[_Use] = field(default_factory=list)


class _Placement:
    def __init__(self, graph: Graph, rules: Mapping[int, OpRule], buffers: Buffers, sizes: np.ndarray, chip: Any, devices: int):
        self.graph, self.buffers, self.sizes, self.devices = graph, buffers, sizes, devices
        self.operations = {n: rule for n, rule in rules.items() if rule.kind in OPERATIONS}
        self.byte_seconds = 1 / (devices * chip.bandwidth_efficiency * chip.hbm_bandwidth)
        self.flop_seconds = 1 / (devices * chip.flops_efficiency * chip.peak_flops("bfloat16"))
        self.shared = chip.cores > 1
        self.capacity, self.fullest, self.patience = capacity(chip), room(chip), _PATIENCE * chip.vmem_bytes / chip.hbm_bandwidth
        self.seconds = np.zeros(buffers.length + 1)  # of each position
        self.arrays: dict[int, _Array] = {}
        self.carried: set[int] = set()  # by loops, as their trips know it
        self.made: dict[tuple[int, int], tuple[int, ...]] = {}  # by an operation → what holds it
        self.read: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self) -> Placed:
        self._meet()
        trips = self._loops()
        self.now, self.taken = np.cumsum(self.seconds), np.zeros(self.buffers.length + 1)
        inner = {id(use.inside) for array in self.arrays.values() for use in array.uses}
        for array in sorted(self.arrays.values(), key=lambda a: -self._worth(a, trips)):
            if id(array) not in inner:
                self._keep(array)
        return self._placed()

    # ---------------------------------------------------------------------------------------------------------------- arrays

    def _meet(self) -> None:
        b = self.buffers
        for k, n in enumerate(b.ids.tolist()):
            begin = None if b.is_input[k] or self._is_stack(n) else int(b.start[k])
            stays = begin is not None and not (b.is_output[k] or self._is_of_loop(n)) and bool(b.end[k] >= b.start[k])
            self.arrays[n] = _Array(float(self.sizes[k]), k, begin, float(b.written[k]), stays)
            piece = max(1, self.graph.values[n].shape[0]) if self._is_stack(n) else 1  # a trip writes its slice
            self.seconds[b.start[k]] += b.written[k] * self.sizes[k] / piece * self.byte_seconds
        nodes = list(walk(self.graph))
        self.carried = {link.target for node in nodes for link in node.links if link.kind is LinkKind.INIT}
        for node in (n for n in nodes if n.bodies):
            self._enter(node)
        for node in nodes:
            at = b.position.get(node.id)
            if at is None:
                continue
            for root in b.read_at.get(node.id, ()):
                if root in self.arrays:
                    self.arrays[root].uses.append(_Use(at, 1.0))
                    self.seconds[at] += self.arrays[root].share * self.arrays[root].bytes_ * self.byte_seconds
            if node.id in self.operations:
                self._operation(node, self.operations[node.id], at)
        if self.shared:
            for n in [n for n in self.arrays if self._is_instruction(n)]:
                self.arrays[n].begin, self.arrays[n].stays = None, False
        handed_on = (LinkKind.CARRY, LinkKind.FINAL)
        for link in (e for n in nodes for e in n.links if e.kind in handed_on and e.target in self.arrays):
            if any(self.arrays[r].begin is None for r in self._holders(link.source)):  # the trip before has left it in HBM
                self.arrays[link.target].begin, self.arrays[link.target].stays = None, False
            elif any(map(self._is_of_loop, self._holders(link.source))):
                self.arrays[link.target].stays = False
        for array in self.arrays.values():
            array.uses.sort(key=lambda u: u.position)

    def _is_of_loop(self, number: int) -> bool:
        """Whether a value is a result of a loop: it may be read on chip, but has its place in HBM too."""
        node = self.graph.values[number].producer
        return node is not None and bool(node.bodies)

    def _is_stack(self, number: int) -> bool:
        """Whether a value is a result of a loop that its trips, or those of loops in it, write slice by slice."""
        node = self.graph.values[number].producer
        if node is None or not self._is_of_loop(number):
            return False
        last = [link.source for link in node.links if link.kind is LinkKind.FINAL and link.target == number]
        return not last or any(map(self._is_stack, last))

    def _enter(self, node: Node) -> None:
        """What a loop is given and its trips read; a carry has a buffer of its own, which the next trip reads."""
        begin, end = self.buffers.loop_start.get(node.id), self.buffers.position.get(node.id)
        if begin is None or end is None:
            return
        for link in node.links:
            roots = self._holders(link.source)
            if link.kind is LinkKind.CARRY:
                for root in roots:
                    self.arrays[root].uses.append(_Use(end, 0.0, by=(node.id, -1)))
            known = link.source in self.arrays and link.target not in self.arrays
            if known and (link.kind is LinkKind.CONST or (link.kind is LinkKind.XS and not self.shared)):
                outer = self.arrays[link.source]
                share = outer.share / (max(1, self.graph.values[link.source].shape[0]) if link.kind is LinkKind.XS else 1)
                inside = self.arrays[link.target] = _Array(outer.bytes_, outer.owner, None, share=share)
                outer.uses.append(_Use(begin, 0.0, by=self._charged(node, link), inside=inside, until=end))
            elif link.kind in (LinkKind.INIT, LinkKind.CONST, LinkKind.XS):
                for root in roots:
                    self.arrays[root].uses.append(_Use(begin, 0.0, by=self._charged(node, link)))

    def _charged(self, node: Node, link: Link) -> tuple[int, int] | None:
        """None, as of fused reads, where a loop is charged with reading what it is given (``fusion.enter``)."""
        over = link.source in self.carried or is_cut_inside(self.graph.values, link.target)
        return None if link.kind in (LinkKind.INIT, LinkKind.CONST) and not over else (node.id, -1)

    def _is_instruction(self, number: int) -> bool:
        """Whether a value is made by an instruction that is no fusion: of what is in memory already, without constants, and nothing else
        beside it. Where two cores share a device such are in HBM, whatever their size (seen in all of v5p's programs of accuracy.md)."""
        node = self.graph.values[number].producer
        if node is None or node.bodies or node.id in self.operations or number in self.buffers.in_tuple:
            return False
        scalar = (not isinstance(x, int) or self.graph.values[x].elements == 1 for x in node.inputs)
        return is_strided(node) or all(not s and self._in_memory(x) for x, s in zip(node.inputs, scalar, strict=True))

    def _in_memory(self, x: int) -> bool:
        """Whether a value is a buffer, or a view of one."""
        while x not in self.arrays:
            node = self.graph.values[x].producer
            if node is None or node.prim not in _VIEWS:
                return False
            x = node.inputs[node.outputs.index(x)]
        return True

    def _holders(self, x: int) -> list[int]:
        """The buffers that hold a value."""
        return [h for h in self.buffers.held.get(x, (x,)) if h in self.arrays]

    def _operation(self, node: Node, rule: OpRule, at: int) -> None:
        work, moved = (rule.flops or 0.0) * self.flop_seconds, self._moved(node, rule) * self.byte_seconds
        exposed = max(0.0, 1 - work / moved) if moved else 0.0
        self.seconds[at] += max(work, moved)
        for x in {x for x in node.inputs if isinstance(x, int)}:
            self.read[node.id, x] = wide = self._wide(x)
            for h in self._holders(x):
                self.arrays[h].uses.append(_Use(at, exposed, by=(node.id, x if h in wide else -1)))
        for x in node.outputs:
            self.made[node.id, x] = wide = self._wide(x)
            for h in (h for h in wide if h in self.arrays):
                self.arrays[h].written = max(self.arrays[h].written, exposed)
                if self.shared and rule.kind in (Kind.DOT, Kind.CONV):  # each core makes a part of it, and reads all
                    self.arrays[h].begin, self.arrays[h].stays = None, False

    def _wide(self, x: int) -> tuple[int, ...]:
        """What holds an operation's operand or result, without what is broadcast to its size."""
        values = self.graph.values
        return tuple(h for h in self.buffers.held.get(x, (x,)) if 2 * values[h].elements >= values[x].elements)

    def _moved(self, node: Node, rule: OpRule) -> float:
        passed = (x for x in (*node.inputs, *node.outputs) if isinstance(x, int))
        return rule.bytes_ if rule.bytes_ is not None else sum(self.graph.values[x].nbytes * self._filled(x) for x in passed)

    def _filled(self, x: int) -> float:
        """By how much tiles enlarge what holds an operand or result."""
        owners = [self.arrays[h].owner for h in self._wide(x) if h in self.arrays]
        return max((float(self.sizes[k] / self.buffers.bytes_[k]) for k in owners if self.buffers.bytes_[k]), default=1.0)

    # ----------------------------------------------------------------------------------------------------------------- times

    def _loops(self) -> np.ndarray:
        """How often each position is taken to run; a loop's other trips take their time where it ends."""
        b, trips = self.buffers, np.ones(self.buffers.length + 1)
        loops = [n for n in walk(self.graph) if n.bodies and n.id in b.loop_start]
        for node in sorted(loops, key=lambda n: b.position[n.id] - b.loop_start[n.id]):  # inner ones first
            first, last = b.loop_start[node.id], b.position[node.id]
            self.seconds[last] += (_TRIPS - 1) * self.seconds[first:last].sum()
            trips[first:last] *= _TRIPS
        return trips

    def _worth(self, array: _Array, trips: np.ndarray) -> float:
        """HBM traffic that an array on chip would save, for the root of its size (GetMemoryBoundedness)."""
        made = array.written * trips[array.begin] if array.begin is not None else 0.0
        within = (self._worth(u.inside, trips) for u in array.uses if u.inside is not None)
        return math.sqrt(array.bytes_) * (made + array.share * sum(u.weight * trips[u.position] for u in array.uses)) + sum(within)

    def _keep(self, array: _Array) -> None:
        """Tells of each use whether it finds the array on chip."""
        size, at, held = array.bytes_ / self.devices, array.begin, -1
        fits = 0 < size <= self.capacity
        array.stays = array.stays and fits
        for use in array.uses:
            until = use.until if use.inside is not None else use.position
            use.near = here = fits and at is not None and self._room(size, at, use.position, until, held)
            if use.inside is not None:
                here = use.near or (fits and self._room(size, use.position, use.position, until, held))
                self._all_near(use.inside) if here else self._keep(use.inside)
            at = until if here else use.position
            held = at if here else -1
            array.stays = array.stays and use.near

    def _room(self, size: float, at: int, use: int, until: int, held: int) -> bool:
        """Whether an array can stay until it is used, or until the loop ends that uses it; takes the room, which it has at ``held``."""
        if self.now[max(use - 1, 0)] - self.now[at] > self.patience or self.now[until] - self.now[use] > self.patience:
            return False
        span = self.taken[max(at, held + 1) : until + 1]
        if size > _SMALL * self.capacity:
            others = float(span.max()) if span.size else 0.0
            if others and others + size > self.fullest:
                return False
            span += size
        return True

    def _all_near(self, array: _Array) -> None:
        for use in array.uses:
            use.near = True
            if use.inside is not None:
                self._all_near(use.inside)

    # ---------------------------------------------------------------------------------------------------------------- result

    def _narrow(self) -> dict[tuple[int, int], float]:
        """Of operands and results."""
        found: dict[tuple[int, int], float] = {}
        for by, holders in (*self.read.items(), *self.made.items()):
            arrays = [self.arrays[h] for h in holders] if self._known(holders) else []
            held = sum(float(self.buffers.bytes_[a.owner]) * a.share for a in arrays)
            if 0 < held < (own := self.graph.values[by[1]].nbytes):
                found[by] = held / own
        return found

    def _placed(self) -> Placed:
        n = len(self.buffers.ids)
        fused, near = np.zeros(n), np.zeros(n)
        written = np.zeros(n, bool)
        for array in self.arrays.values():
            uses = [u for u in array.uses if u.by is None]
            fused[array.owner] += len(uses)
            near[array.owner] += sum(u.near for u in uses)
            written[array.owner] |= array.stays and bool(array.uses)
        near_by: dict[tuple[int, int], bool] = {}
        for by, found in ((u.by, u.near) for array in self.arrays.values() for u in array.uses if u.by is not None):
            near_by[by] = near_by.get(by, True) and found
        return Placed(
            near / np.maximum(fused, 1),
            written,
            Near(
                {by: self._bytes(h) for by, h in self.read.items() if self._known(h) and near_by[by]},
                {by: self._bytes(h) for by, h in self.made.items() if self._known(h) and all(self._stays(x) for x in h)},
                narrow=self._narrow(),
                copied=copied_between(self.graph, self.operations.keys()),
            ),
        )

    def _known(self, holders: tuple[int, ...]) -> bool:
        return bool(holders) and all(h in self.arrays for h in holders)

    def _stays(self, number: int) -> bool:
        return self.arrays[number].stays and bool(self.arrays[number].uses)

    def _bytes(self, holders: tuple[int, ...]) -> float:
        return max(self.arrays[h].bytes_ for h in holders)
