"""Live bytes of one device over a program, for a solution: what memory rows are drawn from."""

from __future__ import annotations

import numpy as np

from jaxauto.cost.liveness import live_bytes
from jaxauto.solve.beside import held_beside
from jaxauto.solve.model import Model


def timeline(model: Model, x: np.ndarray) -> np.ndarray:
    """Live bytes of one device at each position: buffers, arrays resharded for one operation, and what lies beside."""
    live = live_bytes(model.buffers, model.buffer_sizes(x)) + model.crowded_out(x)
    return live + model.arrivals.timeline(x, len(live)) + held_beside(model).timeline(x, len(live))
