"""Copies between dots over a batch of matrices and dots by weights, which XLA:TPU lays out otherwise.

What a dot goes over as a batch (attention: examples and heads) is major, so one of the two dimensions of its matrices fills the lanes, or
short ones pad them. A dot by a weight may go over the examples in the lanes, which a multiple of 128 of them fills whole. Where neither
dimension of the matrices does, what the one makes and the other reads is copied between: once for all dots over a batch that read it, and
once for each of the others, as no two want it alike (``scripts/results/short_rows.md``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np

from jaxauto.core import Graph, Node
from jaxauto.graph import walk


def copied_between(graph: Graph, operations: Set[int]) -> dict[tuple[int, int], int]:
    """(dot over a batch, its operand or result) → how often one run of it has that copied, where the layouts differ.

    Args:
      operations: ids of the nodes that have layouts of their own; what is elementwise or a view between them follows.
    """
    found: dict[tuple[int, int], int] = defaultdict(int)
    copied: set[int] = set()
    for node in walk(graph):
        if not _is_batched(node):
            continue
        for x in dict.fromkeys(x for x in node.inputs if isinstance(x, int)):
            sources = {made.outputs[0] for made in _makers(graph, operations, x) if _is_by_weight(made)}
            found[node.id, x] += bool(sources - copied)
            copied |= sources
        for x in node.outputs:
            found[node.id, x] += sum(map(_is_by_weight, _readers(graph, operations, x)))
    return {key: times for key, times in found.items() if times}


def fills_lanes(shape: np.ndarray, batch: np.ndarray, lanes: int) -> np.ndarray:
    """Whether examples fill whole lanes and the dimensions of matrices do not: ``bool [states]``.

    Args:
      shape: ``[states, dimensions]``, of what one device holds. batch: ``bool [dimensions]``.
    """
    whole = shape % lanes == 0
    return (whole & batch).any(-1) & ~(whole & ~batch).any(-1)


def batch_dims(node: Node, number: int) -> np.ndarray:
    """Which dimensions of an operand or result a dot goes over as a batch: ``bool [dimensions]``."""
    *_, batches = node.params["dimension_numbers"]
    dims = batches[node.inputs.index(number)] if number in node.inputs else range(len(batches[0]))
    aval = (node.eqn.invars[node.inputs.index(number)] if number in node.inputs else node.eqn.outvars[0]).aval
    return np.isin(np.arange(len(aval.shape)), list(dims))


def _is_batched(node: Node) -> bool:
    return node.prim == "dot_general" and bool(node.params["dimension_numbers"][1][0])


def _is_by_weight(node: Node) -> bool:
    return node.prim == "dot_general" and not node.params["dimension_numbers"][1][0]


def _makers(graph: Graph, operations: Set[int], number: int) -> Iterator[Node]:
    """The operations that make a value, through what keeps its size."""
    behind, met = [number], {number}
    for x in behind:
        made = graph.values[x].producer
        if made is None or made.bodies:
            continue
        if made.id in operations:
            yield made
            continue
        for y in _passed(made, made.outputs.index(x), made.inputs):
            if y not in met and graph.values[y].elements == graph.values[x].elements:
                behind.append(y)
                met.add(y)


def _readers(graph: Graph, operations: Set[int], number: int) -> Iterator[Node]:
    """The operations that read a value, likewise."""
    ahead, met = [number], set()
    for x in ahead:
        for user in graph.values[x].users:
            if user.bodies or user.id in met:
                continue
            met.add(user.id)
            if user.id in operations:
                yield user
                continue
            ahead += [y for y in _passed(user, user.inputs.index(x), user.outputs) if graph.values[y].elements == graph.values[x].elements]


def _passed(node: Node, index: int, others: Sequence[Any]) -> list[int]:
    """Of the other side's values those that depend on the one at ``index``: a barrier passes each alone."""
    side = [others[index]] if node.prim == "optimization_barrier" else others
    return [y for y in side if isinstance(y, int)]
