"""What the gradient of max pooling takes beside its arrays: which element each window took is found by a reduction over its coordinates.

So XLA has it (select_and_scatter_expander.cc), but for TPU. A window's sum has a float32 value and an int32 coordinate for each dimension;
on GPU what it reads is made as it is read, on CPU the coordinates of all elements are written, and the elements too where they are padded
or narrower than float32 (``scripts/bench_pooling.py``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxauto.core import Graph, Node
from jaxauto.cost.liveness import Buffers
from jaxauto.graph import walk

POOLS = frozenset({"select_and_scatter_add", "select_and_scatter"})
WORD = 4  # bytes of a value or coordinate


def pooling_bytes(node: Node, values: Any, platform: str) -> float:
    """Bytes beside the operands and the result of one run on one device."""
    arrays = [values[x] for x in node.inputs if isinstance(x, int) and values[x].shape]
    source, operand = sorted(arrays[:2], key=lambda value: value.elements)
    found = WORD * (1 + len(operand.shape)) * source.elements
    if platform == "cpu":
        padding = node.params["padding"]
        padded = math.prod(n + low + high for n, (low, high) in zip(operand.shape, padding, strict=True))
        written = padded > operand.elements or operand.dtype.itemsize < WORD
        found += WORD * (len(operand.shape) + written) * padded
    return float(found)


def live_beside_pools(graph: Graph, buffers: Buffers, platform: str) -> np.ndarray:
    """Bytes at each position of a program on one device: ``[length]``."""
    live = np.zeros(buffers.length)
    for node in walk(graph) if platform != "tpu" else ():
        if node.prim in POOLS and node.id in buffers.position:
            live[buffers.position[node.id]] += pooling_bytes(node, graph.values, platform)
    return live
