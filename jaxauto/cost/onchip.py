"""What stays in a TPU's on-chip memory: arrays that are read soon after they are written, if they fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxauto.core import Graph, OpRule
from jaxauto.cost.liveness import Buffers
from jaxauto.graph import value_bytes, walk

SHARE = 0.8  # of on-chip memory that one array may take: seen with 100 of 128 MiB, not with all of it
_FLEETING = 60  # equations that an array in on-chip memory may outlive
_INTENSE = 8.0  # times as much work as HBM has time for: a dot that stays bound by flops, however it is cut


class Near(NamedTuple):
    """Operands and results of dots → whole bytes of the largest buffer that holds them, infinite if that is in HBM whatever its size.

    A slice that a loop writes into its stack, or a result that takes a donated input's place, is written to HBM; who reads it soon reads a
    copy on chip.
    """

    read: Mapping[int, float] = MappingProxyType({})
    written: Mapping[int, float] = MappingProxyType({})


def fleeting(buffers: Buffers) -> np.ndarray:
    """Which buffers are read for the last time soon after they are written, and are gone then: ``bool [buffers]``."""
    apart = (buffers.end >= buffers.start) & ~buffers.is_input & ~buffers.is_output
    return apart & (buffers.end - buffers.start <= _FLEETING)


def copied_out(buffers: Buffers) -> np.ndarray:
    """Which buffers are part of others (stacks, donated inputs): written there, and read on chip: ``bool [buffers]``."""
    return (buffers.end < buffers.start) & ~buffers.is_input


def near_bytes(graph: Graph, dots: Mapping[int, OpRule], buffers: Buffers, short: np.ndarray, bytes_per_flop: float) -> Near:
    """Where what dots that HBM bounds read and make may stay on chip.

    Args:
      dots: node id → rule of the dots to look at. short: ``bool [buffers]``. bytes_per_flop: what HBM moves while a flop is done.
    """
    read, written = (
        {int(n): float(size) if s else math.inf for n, size, s in zip(buffers.ids, buffers.bytes_, stays, strict=True)}
        for stays in (short | copied_out(buffers), short)
    )
    found = Near({}, {})
    for node in walk(graph):
        passed = [x for x in (*node.inputs, *node.outputs) if isinstance(x, int)] if node.id in dots else ()
        moved = sum(value_bytes(graph.values[x]) for x in passed)
        if not passed or (dots[node.id].flops or 0.0) * bytes_per_flop > _INTENSE * moved:
            continue
        for x in passed:
            wide = [h for h in buffers.held.get(x, (x,)) if 2 * graph.values[h].elements >= graph.values[x].elements]
            known, held = (found.written, written) if x in node.outputs else (found.read, read)
            known[x] = max([known.get(x, 0.0), *(held.get(h, math.inf) for h in wide)]) or math.inf
    return found
