"""How many kernels a step starts on a GPU: each takes ``Chip.launch_seconds`` beside its roofline, in small steps most of the time.

A kernel is started for each operation, for each array that fused equations write, and for each slice of a stack that a loop copies out
because an operation reads it: as it is, converted, or in another shape. So counted, steps have about as many as a profiler sees
(scripts/results/device.md); on a TPU a step is one program.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from jaxauto.core import Graph, LinkKind, Node, Value
from jaxauto.cost.liveness import Buffers
from jaxauto.graph import walk

# What reads an array only to give it another type, shape or name.
PASSED = frozenset({"convert_element_type", "reshape", "squeeze", "transpose", "broadcast_in_dim", "optimization_barrier"})


def kernels(graph: Graph, buffers: Buffers, operations: Iterable[int]) -> dict[int, int]:
    """Node id → kernels that one run of it starts.

    Args:
      graph: the program; its loops' bodies are walked too.
      buffers: of the program.
      operations: ids of the nodes that are operations (``jaxauto.core.OPERATIONS``).
    """
    operations = frozenset(operations)
    written = {n for n, w in zip(buffers.ids.tolist(), buffers.written.tolist(), strict=True) if w}
    found: dict[int, int] = {}
    for node in walk(graph):
        if node.id in operations:
            found[node.id] = 1
        elif node.bodies:
            found[node.id] = node.trips * len(list(_copied(node, graph.values, operations)))
        else:
            found[node.id] = len(written.intersection(node.outputs))
    return found


def _copied(loop: Node, values: Mapping[int, Value], operations: Container[int]) -> Iterator[int]:
    """The slices of a loop's stacks that an operation reads."""
    for link in loop.links:
        if link.kind is not LinkKind.XS:
            continue
        reached = [link.target]
        for number in reached:  # grows
            users = values[number].users
            if any(user.id in operations for user in users):
                yield link.target
                break
            passed = [pair for user in users if user.prim in PASSED for pair in zip(user.inputs, user.outputs, strict=False)]
            reached += [out for x, out in passed if x == number and out not in reached]
