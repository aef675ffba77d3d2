"""Live bytes of one device over a program, for a solution: what memory rows are drawn from."""

from __future__ import annotations

import numpy as np

from jaxauto.cost.liveness import live_bytes
from jaxauto.graph import value_bytes
from jaxauto.solve.model import Model
from jaxauto.strategies import WHOLE, project, shards


def timeline(model: Model, x: np.ndarray) -> np.ndarray:
    """Live bytes of one device at each position of the program: buffers, and arrays resharded for one operation."""
    live = live_bytes(model.buffers, model.buffer_sizes(x))
    for op in model.groups.operations:
        at = model.buffers.position.get(op.node.id)
        if at is None:
            continue
        for o in op.operands:
            here = project(model.state(x, "group", o.group)[None], tuple(d for d, _ in o.dims))[0]
            there = model.operand_position(x, op, o)
            if ((here != there) & (here != WHOLE)).any():
                live[at] += value_bytes(model.values[o.value]) / float(shards(there[None], model.mesh.sizes)[0])
    return live
