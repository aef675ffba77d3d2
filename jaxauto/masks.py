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
    """What is made of random bits alone and both passes read: masks of dropout, noise.

    XLA:TPU fuses hashes as it does any elementwise equations, and makes such a mask anew in each dot that reads it, three times in all
    (scripts/results/hashing.md), and in a loop for its stack too: a barrier has it written.
    """
    found = set()
    for node in graph.nodes:
        found |= {mask for body in node.bodies for mask in kept_masks(body)}
        if hashes(node):
            (number,) = node.outputs
            while number not in graph.outputs and (alone := _made_of_it_alone(graph, number)) is not None:
                number = alone
            passes = {user.backward for user in graph.values[number].users}
            if passes == {False, True} or (passes == {False} and number in graph.outputs):
                found.add(number)
    return found


def _made_of_it_alone(graph: Graph, number: int) -> int | None:
    """The result of the one equation that reads a value, if nothing else goes into it but numbers."""
    users = graph.values[number].users
    if len(users) != 1 or users[0].bodies or len(users[0].outputs) != 1:
        return None
    others = (graph.values[x] for x in users[0].inputs if isinstance(x, int) and x != number)
    spread = (x.elements == 1 or (x.producer is not None and x.producer.prim == "broadcast_in_dim") for x in others)
    return users[0].outputs[0] if all(spread) else None
