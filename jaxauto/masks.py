"""Random bits that a program makes with Threefry, and the masks of dropout that are made of them.

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011). Other generators (``rbg``) are made by the hardware.
"""

from __future__ import annotations

from jaxauto.core import Graph, Node


def hashes(node: Node) -> float:
    """Hashes of one run of a node: one for each element, whatever its width (``jax_threefry_partitionable``)."""
    if node.prim != "random_bits" or "fry" not in str(node.eqn.invars[0].aval.dtype):
        return 0.0
    return float(node.eqn.outvars[0].aval.size)


def kept_masks(graph: Graph) -> set[int]:
    """What is made of random bits alone, in straight code, and that both passes read: masks of dropout.

    XLA:TPU fuses hashes as it does any elementwise equations and makes such a mask anew in each dot that reads it, three times in all, in
    the backward pass once for each tile of the result: a barrier has it written (scripts/results/hashing.md).
    """
    found = set()
    for node in graph.nodes:
        if hashes(node):
            (number,) = node.outputs
            while len(users := graph.values[number].users) == 1 and not users[0].bodies and len(users[0].outputs) == 1:
                (number,) = users[0].outputs
            if {user.backward for user in users} == {False, True}:
                found.add(number)
    return found
