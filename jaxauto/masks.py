"""Random bits that a program makes with Threefry, and the masks of dropout that are made of them.

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011). Other generators (``rbg``) are made by the hardware.
"""

from __future__ import annotations

from jaxauto.core import Graph, Node

_DOTS = frozenset({"dot_general", "conv_general_dilated"})
_FUSED = frozenset({"add", "convert_element_type", "div", "mul", "neg", "reshape", "select_n", "squeeze", "sub", "transpose"})


def hashes(node: Node) -> float:
    """Hashes of one run of a node: one for each element, whatever its width (``jax_threefry_partitionable``)."""
    if node.prim != "random_bits" or "fry" not in str(node.eqn.invars[0].aval.dtype):
        return 0.0
    return float(node.eqn.outvars[0].aval.size)


def kept_masks(graph: Graph) -> set[int]:
    """What is made of random bits alone and several kernels read: masks of dropout, noise.

    XLA:TPU fuses hashes as it does any elementwise equations, and makes such a mask anew in each dot that reads it or what it is selected
    for, three times in all (scripts/results/hashing.md), and in a loop for its stack too: a barrier has it written.
    """
    found = set()
    for node in graph.nodes:
        found |= {mask for body in node.bodies for mask in kept_masks(body)}
        if hashes(node):
            (number,) = node.outputs
            while number not in graph.outputs and (alone := _made_of_it_alone(graph, number)) is not None:
                number = alone
            users = graph.values[number].users
            stacked = number in graph.outputs and {user.backward for user in users} == {False}
            if len(users) > 1 or stacked or _goes_into_dots(graph, number):
                found.add(number)
    return found


def _goes_into_dots(graph: Graph, number: int) -> bool:
    """Whether several dots read what elementwise equations make of a value."""
    users = graph.values[number].users
    while len(users) == 1 and users[0].prim in _FUSED and users[0].outputs[0] not in graph.outputs:
        users = graph.values[users[0].outputs[0]].users
    return sum(user.prim in _DOTS for user in users) > 1


def _made_of_it_alone(graph: Graph, number: int) -> int | None:
    """The result of the one equation that reads a value, if nothing else goes into it but numbers."""
    users = graph.values[number].users
    if len(users) != 1 or users[0].bodies or len(users[0].outputs) != 1:
        return None
    others = (graph.values[x] for x in users[0].inputs if isinstance(x, int) and x != number)
    spread = (x.elements == 1 or (x.producer is not None and x.producer.prim == "broadcast_in_dim") for x in others)
    return users[0].outputs[0] if all(spread) else None
