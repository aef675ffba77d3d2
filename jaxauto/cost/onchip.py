"""What stays in a TPU's on-chip memory: arrays that are read soon after they are written, if they fit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from jaxauto.core import Graph, OpRule
from jaxauto.cost.fusion import Buffers
from jaxauto.graph import value_bytes, walk

SHARE = 0.25  # of on-chip memory that one array may take: others want to be there too
_FLEETING = 60  # equations that an array in on-chip memory may outlive
_INTENSE = 8.0  # times as much work as HBM has time for: a dot that stays bound by flops, however it is cut


def fleeting(buffers: Buffers) -> np.ndarray:
    """Which buffers are read for the last time soon after they are written: ``bool [buffers]``."""
    return (buffers.end - buffers.start <= _FLEETING) & ~buffers.is_input


def near_bytes(graph: Graph, dots: Mapping[int, OpRule], buffers: Buffers, short: np.ndarray, bytes_per_flop: float) -> dict[int, float]:
    """What dots that HBM bounds read and make → whole bytes of the largest buffer that holds it, infinite if that is not ``short``.

    Args:
      dots: node id → rule of the dots to look at. short: ``bool [buffers]``. bytes_per_flop: what HBM moves while a flop is done.
    """
    held = {int(n): float(size) if s else math.inf for n, size, s in zip(buffers.ids, buffers.bytes_, short, strict=True)}
    found: dict[int, float] = {}
    for node in walk(graph):
        passed = [x for x in (*node.inputs, *node.outputs) if isinstance(x, int)] if node.id in dots else ()
        moved = sum(value_bytes(graph.values[x]) for x in passed)
        if not passed or (dots[node.id].flops or 0.0) * bytes_per_flop > _INTENSE * moved:
            continue
        for x in passed:
            wide = [h for h in buffers.held.get(x, (x,)) if 2 * graph.values[h].elements >= graph.values[x].elements]
            found[x] = max([found.get(x, 0.0), *(held.get(h, math.inf) for h in wide)]) or math.inf
    return found
