"""Weights that a recomputed operation and the backward pass read: they are gathered once for both, and lie in memory from one to the other.

In straight code a barrier parts a recomputation from the forward pass, see ``rewrite/recompute.py``; in loops nothing has to. Only of what
depends on no batch: of activations the two mostly want different parts. Both are taken to want a weight in the same sharding.

XLA:CPU, which puts no bound to what its schedule holds, keeps such weights of many blocks at once (812 for 611 MiB of a generated program):
there what runs once waits for the backward pass, and is gathered for it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxauto.core import Node
from jaxauto.cost.windowed import SMALL
from jaxauto.graph import multiplicity
from jaxauto.groups import Operation
from jaxauto.solve.brought import Reads, reads_of, shares_on_the_way
from jaxauto.solve.remat import Variant
from jaxauto.solve.turns import Row, in_order

if TYPE_CHECKING:
    from jaxauto.solve.model import Model


class ReadTwice(NamedTuple):
    """``operation`` runs again as ``node``, ``times`` a step, and reads ``value`` (as written) as ``users`` do: (id as written, there)."""

    operation: Operation
    node: Node
    times: int
    value: int
    users: tuple[tuple[int, int], ...]


def read_twice(variant: Variant, weights: Set[int], platform: str) -> list[ReadTwice]:
    """All of a program; ``weights``: values as written."""
    values, times = variant.rewritten.graph.values, multiplicity(variant.rewritten.graph)
    late = {node.id: op.node.id for op, node in variant.operations if op.node.backward and (times[node.id] > 1 or platform != "cpu")}
    found = []
    for op, node in variant.operations:
        if op.node.id == node.id or op.node.backward:
            continue
        for x, read in zip(node.inputs, op.node.inputs, strict=False):
            if isinstance(x, int) and isinstance(read, int) and read in weights:
                users = tuple((late[user.id], user.id) for user in values[x].users if user.id in late)
                found += [ReadTwice(op, node, times[node.id], read, users)] if users else []
    return found


def read_together(found: Iterable[ReadTwice]) -> dict[tuple[int, int], int]:
    """(recomputed node, value), as written → how often in a step the backward pass reads that with it."""
    together: dict[tuple[int, int], int] = {}
    for read in found:
        key = read.operation.node.id, read.value
        together[key] = together.get(key, 0) + read.times
    return together


def gathered_before(found: Iterable[ReadTwice]) -> set[tuple[int, int]]:
    """(node of the backward pass, value), as written, of what a recomputed operation has gathered: it need not be for that node."""
    return {(written, read.value) for read in found for written, _ in read.users}


def held_between(model: Model) -> Iterator[tuple[Operation, int, int, int]]:
    """(recomputed operation, which of its operands, positions between it and the last that reads the same)."""
    position = model.buffers.position
    for op, node, _, value, users in model.read_twice:
        begin, end = position.get(node.id, -1) + 1, max(position.get(user, 0) for _, user in users) - 1
        if 0 < begin <= end:
            yield op, op.node.inputs.index(value), begin, end


def held_for_both(model: Model) -> Iterator[Row]:
    """(first position, last, two variables in their order, bytes by their states): what arrives at either end is told there.

    What is small stays on chip meanwhile (as compiled for v5e: weights of 8 MiB of GPT-2, not 32 MiB).
    """
    reads, least = reads_of(model), SMALL * model.chip.vmem_bytes
    for op, place, begin, end in held_between(model):
        for read in (r for r in reads[op.node.id] if r.place == place):
            key = "held for both", read.way, read.whole
            table = model.cached(key, lambda read=read: _held(model, read, least))
            yield from in_order(begin, end, read.way.group, read.way.operation, table)


def _held(model: Model, read: Reads, least: float) -> np.ndarray:
    bytes_ = read.whole * shares_on_the_way(model, read.way)[1]
    return bytes_ * (bytes_ >= least)
