"""What of a variant stays in on-chip memory, in terms of the program as written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxauto.core import Node
from jaxauto.cost.onchip import Near, capacity, place
from jaxauto.graph import walk
from jaxauto.groups import Groups
from jaxauto.solve.remat import Variant


@dataclass(frozen=True, eq=False)
class OnChip:
    """``cost.onchip.Placed`` by nodes and values as written. ``near``: of operations' first run; ``again``: where they run again."""

    reads: np.ndarray
    written: np.ndarray
    near: Near = field(default_factory=Near)
    again: Near = field(default_factory=Near)


def place_on_chip(variant: Variant, groups: Groups, chip: Any, devices: int) -> OnChip:
    """What of a variant stays on chip, on ``devices`` that share all evenly."""
    if not capacity(chip):
        none = np.zeros(len(variant.buffers.ids))
        return OnChip(none, none > 0)
    graph, origin, values = variant.rewritten.graph, variant.rewritten.origin, groups.graph.values
    known = {op.node.id: op.rule for op in groups.operations}
    made: dict[int, Node] = {}  # node of an operation → the node as written
    copies: set[int] = set()
    for node in (n for n in walk(graph) if n.outputs):
        first = values[origin.get(node.outputs[0], node.outputs[0])].producer
        if first is not None and first.id in known and first.prim == node.prim:
            made[node.id] = first
            if node.outputs[0] in origin:
                copies.add(node.id)
    placed = place(graph, {n: known[first.id] for n, first in made.items()}, variant.buffers, chip, devices)
    tables = Near({}, {}), Near({}, {})
    for k, table in enumerate(placed.near):
        for (node, x), size in table.items():
            if node in made:
                tables[node in copies][k][made[node].id, origin.get(x, x)] = size
    return OnChip(placed.reads, placed.written, *tables)
