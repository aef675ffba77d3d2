"""Operands that XLA:GPU pads for a dot which it splits along what it contracts (``kernels.pads``), beside the array as others read it.

What that dot alone reads is written padded at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from jaxauto.core import Graph, Kind, OpRule, Value
from jaxauto.cost.kernels import TILE, pads
from jaxauto.cost.liveness import Buffers
from jaxauto.graph import walk


def live_beside_padded(graph: Graph, rules: Mapping[int, OpRule], buffers: Buffers) -> np.ndarray:
    """Bytes at each position of a program on one device: ``[length]``."""
    live, own, values = np.zeros(buffers.length), {*buffers.ids.tolist()}, graph.values
    dots = [
        n for n in walk(graph) if n.id in buffers.position and not n.bodies and rules[n.id].kind is Kind.DOT and n.prim == "dot_general"
    ]
    for node in dots:
        (left, right), _ = node.params["dimension_numbers"]
        for x, dims in zip(node.inputs, (left, right), strict=True):
            if isinstance(x, int) and is_read_elsewhere(x, values, buffers, own):
                long, tiles = math.prod(values[x].shape[d] for d in dims), values[node.outputs[0]].elements / TILE**2
                live[buffers.position[node.id]] += pads(tiles, long) * values[x].nbytes
    return live


def is_read_elsewhere(x: Any, values: Mapping[int, Value], buffers: Buffers, own: Set[int]) -> bool:
    """Whether something else reads the array in memory that a dot reads as ``x``."""
    x = _passed(values, x) if isinstance(x, int) else x
    return any(len(values[number].users) > 1 for number in ((x,) if x in own else buffers.held.get(x, ())))


def _passed(values: Mapping[int, Value], number: int) -> int:
    """What barriers let pass as ``number``."""
    while (node := values[number].producer) is not None and node.prim == "optimization_barrier":
        passed = node.inputs[node.outputs.index(number)]
        assert isinstance(passed, int)
        number = passed
    return number
