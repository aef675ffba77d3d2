"""Random bits: Threefry hashes each element's number, a hundred integer operations that take longer than the element's bytes.

A kernel that makes them takes the longer of its bytes and its hashes (``Chip.hash_seconds``; how long a hash takes:
scripts/results/hashing.md).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from jaxauto.core import Graph, Node
from jaxauto.cost.compute import traffic_seconds
from jaxauto.cost.liveness import Buffers
from jaxauto.graph import walk
from jaxauto.masks import hashes

XORS = 21  # of one hash: one in each of 20 rounds, and one of the two words that it comes to


def seconds_of_hashes(node: Node, chip: Any) -> float:
    """Of one run of a whole node, if nothing hid them."""
    return drawn * chip.hash_seconds if (drawn := hashes(node)) else 0.0


def unhidden(graph: Graph, buffers: Buffers, chip: Any) -> dict[int, float]:
    """Node id → seconds that one run of it, whole, takes beyond the bytes of the kernel that makes its hashes; of those that do."""
    found, held = {}, frozenset(buffers.ids.tolist())
    for node in walk(graph) if chip.hash_seconds else ():
        seconds = seconds_of_hashes(node, chip)
        if seconds and (more := seconds - traffic_seconds(_moved(graph, held, node), chip)) > 0:
            found[node.id] = more
    return found


def _moved(graph: Graph, held: Set[int], node: Node) -> float:
    """Bytes of the kernel that a node is part of: what it writes, and what that is made of. 0 where the node is part of several.

    ``held``: values that have buffers.
    """
    values = graph.values
    (drawn,) = node.outputs
    ahead = [drawn]
    for x in ahead:  # grows
        users = values[x].users if x not in held else ()
        ahead += [y for user in users if not user.bodies for y, z in passed(user) if z == x and y not in ahead]
    if len(written := held.intersection(ahead)) != 1:
        return 0.0
    behind = list(written)
    for x in behind:  # grows
        made = values[x].producer if x in written or x not in held else None
        behind += [z for y, z in (passed(made) if made is not None and not made.bodies else ()) if y == x and z not in behind]
    return float(sum(values[x].nbytes for x in held.intersection(behind)))


def passed(node: Node) -> list[tuple[int, int]]:
    """(result, operand that it depends on) of a node without bodies: what passes a barrier stays apart."""
    if node.prim == "optimization_barrier":
        pairs = list(zip(node.outputs, node.inputs, strict=True))
    else:
        pairs = [(y, x) for y in node.outputs for x in node.inputs]
    return [(y, x) for y, x in pairs if isinstance(x, int)]
