"""A plan's decisions on a graph: what is recomputed, and where arrays are pinned to shardings. The only user of with_sharding_constraint.

GSPMD and Shardy propagate what they are told and guess the rest; parameters' shardings alone make them guess wrong. So every result of
an operation, every operand of one, every loop input and both ends of every resharding are pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxauto.core import Decisions, Graph, Node, Sharding
from jaxauto.rewrite.evaluate import Pins, evaluator
from jaxauto.rewrite.recompute import recompute


def partition_spec(sharding: Sharding) -> PartitionSpec:
    """``(("data",), (), ("model",))`` → ``P("data", None, "model")``, without trailing Nones."""
    parts = [None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in sharding]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def apply(graph: Graph, decisions: Decisions, mesh: Any) -> Callable:
    """The function of flat arrays that runs ``graph`` as decided; to be jitted with the plan's shardings."""
    chosen = {b: kept for b, kept in enumerate(decisions.kept) if kept is not None}
    if not chosen:
        return evaluator(graph, _Constraints(decisions, mesh, {}, frozenset()))
    rewritten = recompute(graph, chosen)
    return evaluator(rewritten.graph, _Constraints(decisions, mesh, rewritten.origin, rewritten.stacked))


class _Constraints(Pins):
    def __init__(self, decisions: Decisions, mesh: Any, origin: Mapping[int, int], stacked: frozenset[int]):
        self.decisions, self.mesh, self.origin, self.stacked = decisions, mesh, origin, stacked

    def pinned(self, array: Any, sharding: Sharding, stacked: bool = False) -> Any:
        if array.ndim != len(sharding) + stacked or jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            return array
        spec = partition_spec(((),) * stacked + sharding)
        return lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

    def value(self, number: int, array: Any) -> Any:
        sharding = self.decisions.values.get(self.origin.get(number, number))
        return array if sharding is None else self.pinned(array, sharding, number in self.stacked)

    def operand(self, node: Node, index: int, array: Any, operands: list) -> Any:
        if not node.outputs:
            return array
        key = (self.origin.get(node.outputs[0], node.outputs[0]), index)
        sharding = self.decisions.operands.get(key)
        if sharding is None:
            return array
        if key in self.decisions.gathered_late:
            array = _after(array, [x for k, x in enumerate(operands) if k != index])
        return self.pinned(array, sharding)


def _after(array: Any, others: list) -> Any:
    """``array``, not before the other operands are there."""
    arrays = [x for x in others if isinstance(x, jax.Array)]
    return lax.optimization_barrier((array, *arrays[:1]))[0] if arrays else array
