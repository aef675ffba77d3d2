"""Live bytes of one device over a program, for a solution: what memory rows are drawn from."""

from __future__ import annotations

import numpy as np

from jaxauto.cost.compute import factor_dims
from jaxauto.cost.liveness import live_bytes
from jaxauto.graph import value_bytes
from jaxauto.solve.beside import held_beside
from jaxauto.solve.model import Model
from jaxauto.strategies import WHOLE, project, shards

_Way = tuple[int, tuple[int, ...], int, tuple[int, ...]]  # variable of the group, its dimensions, of the operation, its factors


def timeline(model: Model, x: np.ndarray) -> np.ndarray:
    """Live bytes of one device at each position: buffers, arrays resharded for one operation, and what lies beside."""
    live = live_bytes(model.buffers, model.buffer_sizes(x))
    ways, way, at, bytes_ = model.cached(("brought", model.variant), lambda: _brought(model))
    share = np.array([_share(model, x, way) for way in ways])
    np.add.at(live, at, bytes_ * share[way])
    return live + held_beside(model).timeline(x, len(live))


def _brought(model: Model) -> tuple[list[_Way], np.ndarray, np.ndarray, np.ndarray]:
    """The ways on which operands come to their operations; of each operand its way, its position in the program and its bytes."""
    ways: dict[_Way, int] = {}
    rows: list[tuple[int, int, float]] = []
    for op in model.groups.operations:
        at = model.buffers.position.get(op.node.id)
        if at is None:
            continue
        for o in op.operands:
            way = model.var("group", o.group), tuple(d for d, _ in o.dims), model.var("operation", op.node.id), factor_dims(op, o)
            rows.append((ways.setdefault(way, len(ways)), at, value_bytes(model.values[o.value])))
    way, at, bytes_ = (np.array(column) for column in zip(*rows, strict=True)) if rows else (np.zeros(0, int),) * 3
    return list(ways), way, at, bytes_


def _share(model: Model, x: np.ndarray, way: _Way) -> float:
    """Of an operand's bytes, what a device gets anew: none where it has its part already."""
    group, dims, operation, factors = way
    here = project(model.states[group][x[group]][None], dims)[0]
    there = project(model.states[operation][x[operation]][None], factors)[0]
    gathered = ((here != there) & (here != WHOLE)).any()
    return 1.0 / float(shards(there[None], model.mesh.sizes)[0]) if gathered else 0.0
