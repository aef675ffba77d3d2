"""Copies between dots over a batch of matrices and dots by weights, which XLA:TPU lays out otherwise.

What a dot goes over as a batch (attention: examples and heads) is major, so one of the two dimensions of its matrices fills the lanes, or
short ones pad them. A dot by a weight may go over the examples in the lanes, which a multiple of 128 of them fills whole. Where neither
dimension of the matrices does, what dots by weights make is copied once for all dots over a batch that read it. What these make is copied
once for each dot by a weight that reads it, as no two want it alike; but not if the weight's own dimension is last (head dimensions as long
as the rows or longer): that is how the others want it too. (``scripts/results/short_rows.md``)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from jaxauto.core import Graph, Node
from jaxauto.graph import walk

_AT_ONCE = 1 / 8  # of on-chip memory: what is copied as soon as it is made is there (fitted: short_rows.md)


class Copied(NamedTuple):
    """How often an array is copied where the layouts differ; ``last``: the dimension that has to be laid out last for it, None: any."""

    times: int
    last: int | None = None


def copied_between(graph: Graph, operations: Set[int]) -> dict[tuple[int, int], Copied]:
    """(dot over a batch, its operand or result) → what one run of it has copied.

    Args:
      operations: ids of the nodes that have layouts of their own; what is elementwise or a view between them follows.
    """
    found: dict[tuple[int, int], Copied] = {}
    copied: set[int] = set()
    for node in filter(_is_batched, walk(graph)):
        sources = [{made.outputs[0] for made in _makers(graph, operations, x) if _is_by_weight(made)} for x in node.inputs]
        for x, made in zip(node.inputs, sources, strict=True):
            if made - copied:
                found[node.id, x] = Copied(1)
            copied |= made
        (result,) = node.outputs
        if times := sum(map(_is_by_weight, _readers(graph, operations, result))):
            found[node.id, result] = Copied(times, _rows(node, [bool(made) for made in sources]))
    return found


def differs(shape: np.ndarray, batch: np.ndarray, last: int | None, lanes: int) -> np.ndarray:
    """Whether an array is laid out by examples on the one side and by matrices on the other: ``bool [states]``.

    Args:
      shape: ``[states, dimensions]``, of what one device holds. batch: ``bool [dimensions]``. last: of ``Copied``.
    """
    whole = shape % lanes == 0
    by_examples = (whole & batch).any(-1) & ~(whole & ~batch).any(-1)
    if last is None:
        return by_examples
    filled = np.where(batch, np.inf, np.ceil(shape / lanes) * lanes / shape)[:, ::-1]  # of two that pad alike the last is
    return by_examples & (filled.shape[1] - 1 - filled.argmin(-1) == last)


def through_hbm(bytes_: Any, room: float) -> Any:
    """Of an array laid out by examples, where it fills whole tiles, what its copy reads or writes in HBM; ``room``: on chip."""
    return np.where(bytes_ > _AT_ONCE * room, bytes_, 0.0)


def batch_dims(node: Node, number: int) -> np.ndarray:
    """Which dimensions of an operand or result a dot goes over as a batch: ``bool [dimensions]``."""
    *_, batches = node.params["dimension_numbers"]
    dims = batches[node.inputs.index(number)] if number in node.inputs else range(len(batches[0]))
    aval = (node.eqn.invars[node.inputs.index(number)] if number in node.inputs else node.eqn.outvars[0]).aval
    return np.isin(np.arange(len(aval.shape)), list(dims))


def _rows(node: Node, by_weight: Sequence[bool]) -> int | None:
    """The last dimension of the result of a dot over a batch that comes of the operand that no weight makes; None: of both or neither."""
    contracted, _ = node.params["dimension_numbers"]
    ends = len(node.eqn.invars[0].aval.shape) - len(contracted[0]), len(node.eqn.outvars[0].aval.shape)  # batch, left, right
    return None if by_weight[0] == by_weight[1] else ends[by_weight[0]] - 1


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
