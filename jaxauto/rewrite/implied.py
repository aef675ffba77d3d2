"""Results that are sharded as planned without being told so.

A pin is an equation of its own until programs are partitioned: compilers simplify nothing across it before. XLA:TPU then moves no
transposition past the gradient of an attention's probabilities, takes the exps of both passes for one, and writes them in float32
(scripts/results/pins.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxauto.core import Node, Sharding


def of_dot(node: Node, lhs: Sharding, rhs: Sharding) -> Sharding | None:
    """How ``dot_general`` shards its result by its operands alone; None where that leaves terms of a sum, or they disagree."""
    (summed, batch) = node.params["dimension_numbers"]
    operands = tuple(zip((lhs, rhs), summed, batch, strict=True))
    shared = [[sharding[d] for d in dims] for sharding, _, dims in operands]
    if shared[0] != shared[1] or any(sharding[d] for sharding, dims, _ in operands for d in dims):
        return None
    free = (sharding[d] for sharding, *taken in operands for d in range(len(sharding)) if not any(d in dims for dims in taken))
    return (*shared[0], *free)


def is_over_all(sharding: Sharding, mesh: Mapping[str, int]) -> bool:
    """Whether an array is split over all devices of a mesh: propagation can add nothing to that."""
    return math.prod(mesh[axis] for axes in sharding for axis in axes) == math.prod(mesh.values())


def passed(node: Node, sharding: Sharding) -> Sharding:
    """How what a node makes of an array is sharded, if it is as the array: its dimensions in the new order where they are but turned."""
    order = node.params["permutation"] if node.prim == "transpose" else ()
    return tuple(sharding[d] for d in order) if len(order) == len(sharding) else sharding


def may_be_same(sharding: Sharding, other: Sharding) -> bool:
    """Whether arrays so sharded can be one: of as many dimensions, each split alike; else some have come or gone, and all may be turned."""
    if len(sharding) == len(other):
        return sharding == other
    return sorted(axes for axes in sharding if axes) == sorted(axes for axes in other if axes)
