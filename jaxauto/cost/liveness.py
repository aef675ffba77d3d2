"""What is alive at once."""

from __future__ import annotations

import numpy as np

from jaxauto.cost.fusion import Buffers


def live_bytes(buffers: Buffers, sizes: np.ndarray) -> np.ndarray:
    """Live bytes at each position, for buffers of ``sizes`` bytes."""
    steps = np.zeros(buffers.length + 1)
    np.add.at(steps, buffers.start, sizes)
    np.add.at(steps, buffers.end + 1, -sizes)
    return np.cumsum(steps)[:-1]
