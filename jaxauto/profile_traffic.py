"""HBM traffic of each equation, and its seconds: as the planner counts them, but told by equation."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxauto.core import OPERATIONS, Kind, Node, OpRule
from jaxauto.cost.compute import ops_per_byte, traffic_seconds
from jaxauto.cost.fusion import find_buffers
from jaxauto.cost.lanes import batch_dims, differs, through_hbm
from jaxauto.cost.launches import kernels
from jaxauto.cost.liveness import Buffers
from jaxauto.cost.onchip import Near, capacity
from jaxauto.cost.tables import moved_for_tables
from jaxauto.cost.transforms import beyond_traffic
from jaxauto.graph import walk
from jaxauto.profile_memory import Profiled


class Traffic:
    """Bytes that equations move, and how long that takes on ``chip`` (None: not told).

    Operations read operands and write results. Fused equations read and write the buffers that ``find_buffers`` says: what those cost
    in all is shared among the equations that read them. On TPU bytes that move beside a dot's flops take no time, nor do short-lived
    arrays that fit on-chip memory; the padding of tiles moves too.
    """

    def __init__(self, program: Profiled, chip: Any):
        self.program, self.chip, self.values = program, chip, program.graph.values
        whole, on_tpu = program.buffers, chip is not None and chip.platform == "tpu"
        if on_tpu:
            rates, devices = (0.0, ops_per_byte(chip)), math.prod(program.mesh.values())
            whole = find_buffers(program.graph, dict(program.rules), program.aliased, "tpu", *rates, devices=devices)
        self.moved = _by_node(program, whole, lambda _: 1.0)
        operations = (node.id for node in walk(program.graph) if not node.bodies and program.rules[node.id].kind in OPERATIONS)
        self.started = kernels(program.graph, whole, operations)
        self.unhidden = beyond_traffic(program.graph, whole, chip) if chip is not None else {}
        self.tables = moved_for_tables(program.graph, program.buffers, chip, program.pieces) if on_tpu else {}
        placed = program.placed if on_tpu else None
        self.waited = _by_node(program, self._off_chip(placed), program.padded) if placed else self.moved
        self.near = placed.near if placed else Near()

    def bytes_(self, node: Node, rule: OpRule, share: float) -> float:
        """Of one run."""
        own = self._operation(node, rule, share, Near(), lambda _: 1.0) if rule.kind in OPERATIONS else 0.0
        return self.moved.get(node.id, 0.0) + own

    def seconds(self, node: Node, rule: OpRule, share: float, work: float) -> float:
        """Of one run; ``work``: seconds of the matrix unit."""
        writes = self.chip.dot_writes if rule.kind is Kind.DOT else 1.0
        own = self._operation(node, rule, share, self.near, self.program.padded, writes) if rule.kind in OPERATIONS else 0.0
        waited = float(traffic_seconds(self.waited.get(node.id, 0.0), self.chip))
        unhidden = self.unhidden.get(node.id, 0.0) / share
        copied = float(traffic_seconds(self._copied(node) + self.tables.get(node.id, 0.0), self.chip))
        return max(work, float(traffic_seconds(own, self.chip))) + copied + waited + unhidden + self.launching(node)

    def launching(self, node: Node) -> float:
        """Seconds that the kernels of one run take beside their rooflines; of a loop those that copy its slices."""
        return self.started.get(node.id, 0) * self.chip.launch_seconds

    def _operation(self, node: Node, rule: OpRule, share: float, near: Near, padded: Callable[[int], float], writes: float = 1.0) -> float:
        """``writes``: what a byte of a result counts as."""
        far = [x for x, known in self._arrays(node, near) if self._is_far(node, x, near, known)]
        moved = lambda x: self.values[x].nbytes * near.narrow.get((node.id, x), 1.0) * (writes if x in node.outputs else 1.0)  # noqa: E731
        whole = sum(moved(x) / self.program.pieces(x) * padded(x) for x in far)
        return whole if rule.bytes_ is None else min(whole, rule.bytes_ / share)

    def _arrays(self, node: Node, near: Near) -> list[tuple[int, Mapping[tuple[int, int], float]]]:
        """What an operation reads and makes, each with what is known to be near of its side."""
        both = (*((x, near.read) for x in node.inputs), *((x, near.written) for x in node.outputs))
        return [(x, known) for x, known in both if isinstance(x, int)]

    def _is_far(self, node: Node, x: int, near: Near, known: Mapping[tuple[int, int], float]) -> bool:
        fits = capacity(self.chip) if near != Near() else 0.0
        return known.get((node.id, x), math.inf) / self.program.pieces(x) > fits

    def _copied(self, node: Node) -> float:
        """Bytes that copies between layouts read and write for one run."""
        total = 0.0
        for x, known in dict(self._arrays(node, self.near)).items():
            twice = self.near.copied.get((node.id, x))
            if twice and differs(np.array([self.program.local(x)]), batch_dims(node, x), twice.last, self.chip.tile[1])[0]:
                local = self.values[x].nbytes / self.program.pieces(x)
                filled = local * self.program.padded(x) if self._is_far(node, x, self.near, known) else 0.0
                total += twice.times * (float(through_hbm(local, capacity(self.chip))) + filled)
        return total

    def _off_chip(self, placed: Any) -> Buffers:
        """The program's, without the passes that do not go through HBM."""
        b = self.program.buffers
        local = b.bytes_ * [self.program.padded(int(n)) / self.program.pieces(int(n)) for n in b.ids]
        fits = local <= capacity(self.chip)
        return replace(b, reads=b.reads * (1 - placed.reads * fits), written=b.written * (1 - placed.written * fits))


def _by_node(program: Profiled, buffers: Buffers, weight: Callable[[int], float]) -> dict[int, float]:
    """Node id → bytes of one run that fused equations move. A buffer's reads are shared by its readers; the rest is its maker's, of what
    the program is given its first user's. ``weight``: value id → what one byte counts."""
    values = program.graph.values
    index = {int(n): k for k, n in enumerate(buffers.ids)}
    size = {n: float(buffers.bytes_[k]) * weight(n) / program.pieces(n) for n, k in index.items()}
    readers = Counter(x for roots in buffers.read_at.values() for x in roots)
    total: dict[int, float] = {}
    unread: dict[int, float] = defaultdict(float)
    for n, k in index.items():
        if values[n].producer is None and n not in readers and values[n].users:
            unread[values[n].users[0].id] += size[n] * float(buffers.reads[k])
    for node in walk(program.graph):
        bytes_ = unread[node.id]
        for x in buffers.read_at.get(node.id, ()):
            if x in index:
                bytes_ += size[x] * float(buffers.reads[index[x]]) / readers[x]
            elif values[x].producer is None:  # a slice or a constant of a loop; any other is fused into a dot
                bytes_ += values[x].nbytes * weight(x) / program.pieces(x)
        made = (x for x in node.outputs if x in index)
        total[node.id] = bytes_ + sum(
            size[x] * (buffers.written[index[x]] + (0.0 if x in readers else buffers.reads[index[x]])) for x in made
        )
    return total
