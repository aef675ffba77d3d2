"""A scatter of one element into each row of a constant array, as a comparison: what ``jax.nn.one_hot`` does.

It is the gradient of a loss that picks one logit of each row. XLA:TPU makes the comparison by itself. XLA:GPU and XLA:CPU write an array of
zeros as large as the logits, add to it where it lies, and read it again; a comparison is fused with what reads it
(scripts/results/one_hot.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxauto import compat
from jaxauto.core import Literal

SUM = "scatter-add"


def as_comparison(eqn: Any, fill: Literal) -> Any | None:
    """The closed jaxpr of (indices, updates) that makes what a scatter into an array full of ``fill`` makes.

    None where a row has several updates, or an update covers more than an element.
    """
    numbers, (indices, updates) = eqn.params["dimension_numbers"], (v.aval for v in eqn.invars[1:])
    batches = sorted(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    others = [n for k, n in enumerate(indices.shape[:-1]) if k not in numbers.scatter_indices_batching_dims]
    rows = [row for _, row in batches]
    if numbers.update_window_dims or not rows or rows != sorted(rows) or math.prod(others) != 1:
        return None
    with compat.source_of(eqn):
        return jax.make_jaxpr(_comparison(eqn, fill, rows))(indices, updates)


def _comparison(eqn: Any, fill: Literal, rows: list[int]) -> Callable:
    out, numbers = eqn.outvars[0].aval, eqn.params["dimension_numbers"]
    length = [out.shape[d] for d in rows]

    def compared(indices: Any, updates: Any) -> Any:
        updated = lax.add(lax.full(length, fill.value, out.dtype), lax.reshape(updates, length))
        here = None
        for k, dim in enumerate(numbers.scatter_dims_to_operand_dims):
            index = lax.reshape(lax.index_in_dim(indices, k, indices.ndim - 1, keepdims=False), length)
            index = lax.convert_element_type(index, _wide(index.dtype))
            if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
                index = lax.clamp(jnp.zeros((), index.dtype), index, jnp.asarray(out.shape[dim] - 1, index.dtype))
            same = lax.eq(lax.broadcasted_iota(index.dtype, out.shape, dim), lax.broadcast_in_dim(index, out.shape, rows))
            here = same if here is None else lax.bitwise_and(here, same)
        return lax.select(here, lax.broadcast_in_dim(updated, out.shape, rows), lax.full(out.shape, fill.value, out.dtype))

    return compared


def _wide(dtype: Any) -> Any:
    """An index type that can count every element: an iota of int8 would begin again."""
    return dtype if jnp.iinfo(dtype).bits >= 32 else jnp.int32
