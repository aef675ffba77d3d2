"""What of a variant stays in on-chip memory, in terms of the program as written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxauto.cost.layout import Laid, Major, minor_dims, unsplit_padding
from jaxauto.cost.liveness import Beside
from jaxauto.cost.onchip import Near, Placed, Side, capacity, place
from jaxauto.groups import Groups, Operation
from jaxauto.solve.remat import Variant


@dataclass(frozen=True, eq=False)
class OnChip:
    """``cost.onchip.Placed`` by nodes and values as written. ``near``: of operations' first run; ``again``: where they run again."""

    reads: np.ndarray
    written: np.ndarray
    near: Near = field(default_factory=Near)
    again: Near = field(default_factory=Near)


def place_on_chip(variant: Variant, groups: Groups, major: Major, chip: Any, devices: int) -> OnChip:
    """What of a variant stays on chip, on ``devices`` that share all evenly. ``major``: of ``groups``."""
    if not capacity(chip):
        none = np.zeros(len(variant.buffers.ids))
        return OnChip(none, none > 0)
    graph, origin = variant.rewritten.graph, variant.rewritten.origin
    made = {node.id: op for op, node in variant.operations}
    copies = {node for node, op in made.items() if node != op.node.id}
    placed = place(graph, {n: op.rule for n, op in made.items()}, variant.buffers, _filled(variant, groups, major, chip), chip, devices)
    tables = Near({}, {}, {}, {}, {}), Near({}, {}, {}, {}, {})
    for name in ("read", "written", "narrow", "copied"):
        for (node, x), size in getattr(placed.near, name).items():
            if node in made:
                getattr(tables[node in copies], name)[made[node].node.id, origin.get(x, x)] = size
    index = {int(n): k for k, n in enumerate(variant.buffers.ids)}
    for node, beside in variant.buffers.beside.items():
        if node in made:
            tables[node in copies].beside[made[node].node.id] = _side(beside, made[node], variant, placed, index)
    return OnChip(placed.reads, placed.written, *tables)


def _side(beside: Beside, op: Operation, variant: Variant, placed: Placed, index: Mapping[int, int]) -> Side:
    """What of ``beside`` goes through HBM."""
    values, arrays = variant.rewritten.graph.values, (*op.node.inputs, *op.node.outputs)
    numbers = [o.value for o in (*op.operands, *op.results)]
    bytes_: dict[int, float] = {}
    for moved, near in (beside.reads, placed.reads), (beside.writes, placed.written):
        for number, along, times in moved:
            far = 1.0 - float(near[index[number]]) if number in index else 1.0
            at = numbers.index(arrays[along])
            bytes_[at] = bytes_.get(at, 0.0) + times * values[number].nbytes * far
    return Side(tuple(sorted(bytes_.items())), beside.exposed, beside.lanes)


def _filled(variant: Variant, groups: Groups, major: Major, chip: Any) -> np.ndarray:
    """Whole bytes of each buffer as it fills tiles, ``[buffers]``: which of its dimensions devices share is not known yet."""
    b, values = variant.buffers, variant.rewritten.graph.values
    dims = (minor_dims(major, *groups.place[n], stacked=s) for n, s in zip(variant.origin.tolist(), variant.stacked.tolist(), strict=True))
    arrays = (values[n] for n in b.ids.tolist())
    return b.bytes_ * [unsplit_padding(Laid(v.shape, minor, chip.tile_of(v.dtype))) for v, minor in zip(arrays, dims, strict=True)]
