"""One element of each row, found by comparison: what ``jax.nn.one_hot`` does, for a loss that picks one logit of each row.

A gather needs the array that it reads in memory: the logits in float32, though all else that reads them makes them itself. Its gradient, a
scatter, needs as much again: XLA:GPU and XLA:CPU write zeros as large as the logits, add to them where they lie, and read them again. A
comparison with an iota is fused with what is beside it (scripts/results/one_hot.md). Both are exact: one element plus zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxauto import compat
from jaxauto.core import Literal, Node

# What no compiler writes to memory for its own sake: a gather from the result is what would have it written.
_ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "div", "neg", "max", "min", "pow", "integer_pow", "sqrt", "rsqrt", "exp", "log", "log1p", "tanh", "logistic"}
    | {"sin", "cos", "erf", "select_n", "convert_element_type"}
)


def as_comparison(eqn: Any, made: Node | None) -> Any | None:
    """The closed jaxpr of the operands of a gather or scatter that makes the same by comparison; None where that is not what it is.

    Args:
      made: the node that makes the array it gathers from or adds to; None for an argument.
    """
    written = _WRITTEN.get(eqn.primitive.name)
    fun = None if written is None or made is None else written(eqn, made)
    if fun is None:
        return None
    with compat.source_of(eqn):
        return jax.make_jaxpr(fun)(*(v.aval for v in eqn.invars))


def _gathered(eqn: Any, made: Node) -> Callable | None:
    numbers, mode, (operand, indices) = eqn.params["dimension_numbers"], eqn.params["mode"], (v.aval for v in eqn.invars)
    rows = _rows(numbers.start_indices_batching_dims, numbers.operand_batching_dims, indices)
    picked = numbers.start_index_map
    if not rows or not _is_single(operand.shape, rows, picked, numbers.collapsed_slice_dims) or made.prim not in _ELEMENTWISE:
        return None
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        return None

    def compared(array: Any, indices: Any) -> Any:
        here, inside = _here(array.shape, rows, picked, indices, mode)
        found = lax.reshape(lax.reduce_sum(lax.select(here, array, lax.full_like(array, 0)), picked), inside.shape)
        if mode == lax.GatherScatterMode.FILL_OR_DROP:
            fill = eqn.params["fill_value"]
            found = lax.select(inside, found, lax.full_like(found, jnp.nan if fill is None else fill))
        return lax.reshape(found, eqn.outvars[0].aval.shape)

    return compared


def _scattered(eqn: Any, made: Node) -> Callable | None:
    numbers, out, indices = eqn.params["dimension_numbers"], eqn.outvars[0].aval, eqn.invars[1].aval
    rows = _rows(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, indices)
    fill = made.inputs[0] if made.prim == "broadcast_in_dim" else None
    if not rows or not _is_single(out.shape, rows, numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims):
        return None
    if not isinstance(fill, Literal) or fill.aval.shape:
        return None

    def compared(_: Any, indices: Any, updates: Any) -> Any:
        here, _ = _here(out.shape, rows, numbers.scatter_dims_to_operand_dims, indices, eqn.params["mode"])
        length = [out.shape[d] for d in rows]
        updated = lax.add(lax.full(length, fill.value, out.dtype), lax.reshape(updates, length))
        return lax.select(here, lax.broadcast_in_dim(updated, out.shape, rows), lax.full(out.shape, fill.value, out.dtype))

    return compared


_WRITTEN: dict[str, Callable[[Any, Node], Callable | None]] = {"gather": _gathered, "scatter-add": _scattered}


def _rows(batches: Sequence[int], dims: Sequence[int], indices: Any) -> list[int]:
    """The dimensions of the operand that the indices have too, in their order; none where a row has more or less than one element."""
    rows = [row for _, row in sorted(zip(batches, dims, strict=True))]
    others = [n for k, n in enumerate(indices.shape[:-1]) if k not in batches]
    return rows if rows == sorted(rows) and math.prod(others) == 1 else []


def _is_single(shape: Sequence[int], rows: Sequence[int], picked: Sequence[int], collapsed: Sequence[int]) -> bool:
    """Whether one element of a row is meant, not a window: what is neither a row's nor indexed has one element (a batch of one)."""
    return set(picked) <= set(collapsed) and all(n == 1 for d, n in enumerate(shape) if d not in rows and d not in picked)


def _here(shape: Sequence[int], rows: Sequence[int], picked: Sequence[int], indices: Any, mode: Any) -> tuple[Any, Any]:
    """Which elements of ``shape`` the indices say; which indices are of an element."""
    here, inside, length = [], [], [shape[d] for d in rows]
    for k, dim in enumerate(picked):
        index = lax.reshape(indices if len(picked) == 1 else lax.index_in_dim(indices, k, indices.ndim - 1), length)
        index = lax.convert_element_type(index, _wide(index.dtype))
        zero, last = jnp.zeros((), index.dtype), jnp.asarray(shape[dim] - 1, index.dtype)
        index = lax.clamp(zero, index, last) if mode == lax.GatherScatterMode.CLIP else index
        here.append(lax.eq(lax.broadcasted_iota(index.dtype, shape, dim), lax.broadcast_in_dim(index, shape, rows)))
        inside.append((index >= zero) & (index <= last))
    return functools.reduce(lax.bitwise_and, here), functools.reduce(lax.bitwise_and, inside)


def _wide(dtype: Any) -> Any:
    """An index type that can count every element: an iota of int8 would begin again."""
    return dtype if jnp.iinfo(dtype).bits >= 32 else jnp.int32
