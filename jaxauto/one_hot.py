"""One element of each row, found by comparison: what ``jax.nn.one_hot`` does, for a loss that picks one logit of each row.

A gather needs the array that it reads in memory: the logits in float32, though all else that reads them makes them itself. Its gradient, a
scatter, needs as much again: XLA:GPU and XLA:CPU write zeros as large as the logits, add to them where they lie, and read them again. A
comparison with an iota is fused with what is beside it (scripts/results/one_hot.md). Both are exact: one element plus zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxauto import compat
from jaxauto.core import Literal, Node, Value

Counts = Callable[[int], int | None]  # component of the indices → the dimension of them that it counts along

# What no compiler writes to memory for its own sake: a gather from the result is what would have it written.
_FUSED = frozenset(
    {"add", "sub", "mul", "div", "neg", "max", "min", "pow", "integer_pow", "sqrt", "rsqrt", "exp", "log", "log1p", "tanh", "logistic"}
    | {"sin", "cos", "erf", "select_n", "convert_element_type", "slice"}
)
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims"})  # of what was made before
_MOST = 2**20  # elements of a constant that is looked at
_CLAMPED = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)  # what a gather does with indices of no element


def as_comparison(eqn: Any, operands: Sequence[int | Literal], values: Mapping[int, Value], constants: Mapping[int, Any]) -> Any | None:
    """The closed jaxpr of the operands of a gather or scatter that makes the same by comparison; None where that is not what it is.

    Args:
      operands: of ``eqn``: keys of ``values``, or literals.
      constants: what some of ``values`` are, that no node makes.
    """
    written = _WRITTEN.get(eqn.primitive.name)
    made = _maker(operands[0], values) if written is not None else None
    fun = None if written is None or made is None else written(eqn, made, partial(_counts, operands[1], values, constants))
    if fun is None:
        return None
    with compat.source_of(eqn):
        return jax.make_jaxpr(fun)(*(v.aval for v in eqn.invars))


def _maker(x: int | Literal, values: Mapping[int, Value]) -> Node | None:
    """What makes a value, or what it is a view of; None: nothing does."""
    made = values[x].producer if isinstance(x, int) else None
    return _maker(made.inputs[0], values) or made if made is not None and made.prim in _VIEWS else made


def _gathered(eqn: Any, made: Node, counts: Counts) -> Callable | None:
    numbers, mode, (operand, indices) = eqn.params["dimension_numbers"], eqn.params["mode"], (v.aval for v in eqn.invars)
    if made.prim not in _FUSED or not jnp.issubdtype(operand.dtype, jnp.floating):
        return None
    batches = zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    if (one := _one_of_each_row(operand, indices, dict(batches), numbers.start_index_map, numbers.collapsed_slice_dims, counts)) is None:
        return None
    rows, picked = one

    def compared(array: Any, indices: Any) -> Any:
        here, inside = _here(array.shape, rows, picked, indices, clamped=mode in _CLAMPED)
        found = lax.reshape(lax.reduce_sum(lax.select(here, array, lax.full_like(array, 0)), tuple(picked)), inside.shape)
        if mode == lax.GatherScatterMode.FILL_OR_DROP:
            fill = eqn.params["fill_value"]
            found = lax.select(inside, found, lax.full_like(found, jnp.nan if fill is None else fill))
        return lax.reshape(found, eqn.outvars[0].aval.shape)

    return compared


def _scattered(eqn: Any, made: Node, counts: Counts) -> Callable | None:
    numbers, out, indices = eqn.params["dimension_numbers"], eqn.outvars[0].aval, eqn.invars[1].aval
    fill = made.inputs[0] if made.prim == "broadcast_in_dim" else None
    if not isinstance(fill, Literal) or fill.aval.shape:
        return None
    batches = zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    indexed, inserted = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
    if (one := _one_of_each_row(out, indices, dict(batches), indexed, inserted, counts)) is None:
        return None
    rows, picked = one

    def compared(_: Any, indices: Any, updates: Any) -> Any:
        here, _ = _here(out.shape, rows, picked, indices, clamped=eqn.params["mode"] == lax.GatherScatterMode.CLIP)
        length = [out.shape[d] for d in rows]
        updated = lax.add(lax.full(length, fill.value, out.dtype), lax.reshape(updates, length))
        return lax.select(here, lax.broadcast_in_dim(updated, out.shape, rows), lax.full(out.shape, fill.value, out.dtype))

    return compared


_WRITTEN: dict[str, Callable[[Any, Node, Counts], Callable | None]] = {"gather": _gathered, "scatter-add": _scattered}


def _one_of_each_row(
    array: Any, indices: Any, batches: Mapping[int, int], indexed: Sequence[int], collapsed: Sequence[int], counts: Counts
) -> tuple[list[int], dict[int, int]] | None:
    """Dimensions of the array that the indices have too, in their order, and dimension that is looked up → component of the indices.

    A component that counts along a dimension of the indices (``logits[jnp.arange(n), labels]``) says the same as a batching dimension.
    None where a row has more or less than one element, or a window is meant; what is not a row's nor indexed has one element (a batch of
    one).
    """
    batches, picked = dict(batches), {}
    for component, dim in enumerate(indexed):
        along = counts(component) if len(indexed) > 1 else None
        if along is None or along in batches or indices.shape[along] != array.shape[dim]:
            picked[dim] = component
        else:
            batches[along] = dim
    rows = [row for _, row in sorted(batches.items())]
    others = math.prod(n for k, n in enumerate(indices.shape[:-1]) if k not in batches)
    single = all(n == 1 for d, n in enumerate(array.shape) if d not in rows and d not in picked)
    right = rows and picked and rows == sorted(rows) and others == 1 and single and set(picked) <= set(collapsed)
    return (rows, picked) if right else None


def _here(shape: Sequence[int], rows: Sequence[int], picked: Mapping[int, int], indices: Any, *, clamped: bool) -> tuple[Any, Any]:
    """Which elements of ``shape`` the indices say; which indices are of an element."""
    here, inside, length = [], [], [shape[d] for d in rows]
    for dim, component in picked.items():
        index = lax.reshape(indices if indices.shape[-1] == 1 else lax.index_in_dim(indices, component, indices.ndim - 1), length)
        index = lax.convert_element_type(index, _wide(index.dtype))
        zero, last = jnp.zeros((), index.dtype), jnp.asarray(shape[dim] - 1, index.dtype)
        index = lax.clamp(zero, index, last) if clamped else index
        here.append(lax.eq(lax.broadcasted_iota(index.dtype, shape, dim), lax.broadcast_in_dim(index, shape, rows)))
        inside.append((index >= zero) & (index <= last))
    return reduce(lax.bitwise_and, here), reduce(lax.bitwise_and, inside)


def _counts(indices: int | Literal, values: Mapping[int, Value], constants: Mapping[int, Any], component: int) -> int | None:
    """The dimension of the indices that one of their components counts along, as ``jnp.arange`` does; None: it does not."""
    node = values[indices].producer if isinstance(indices, int) else None
    if node is None or node.prim != "concatenate" or len(node.inputs) != values[indices].shape[-1]:
        return None
    return _counted(node.inputs[component], values, constants)


def _counted(x: int | Literal, values: Mapping[int, Value], constants: Mapping[int, Any]) -> int | None:
    """The dimension along which each element is its own position."""
    if not isinstance(x, int) or not jnp.issubdtype(values[x].dtype, jnp.integer) or jnp.iinfo(values[x].dtype).max < values[x].elements:
        return None
    if (array := _known(x, constants)) is not None:
        dims = [d for d in range(array.ndim) if array.shape[d] > 1]
        return dims[0] if len(dims) == 1 and np.array_equal(array.reshape(-1), np.arange(array.size)) else None
    node = values[x].producer
    if node is None:
        return None
    if node.prim == "iota":
        return node.params["dimension"]
    if node.prim == "select_n":  # a negative index counts from the end: none is
        return _counted(node.inputs[1], values, constants) if _is_negative(node.inputs[0], node.inputs[1], values, constants) else None
    if node.prim not in ("broadcast_in_dim", "reshape", "convert_element_type"):
        return None
    dim, before, after = _counted(node.inputs[0], values, constants), values[node.inputs[0]].shape, values[x].shape
    if dim is None or node.prim == "convert_element_type":
        return dim
    if node.prim == "broadcast_in_dim":
        to = node.params["broadcast_dimensions"][dim]
    elif math.prod(before) == before[dim]:  # no other dimension has more than one element, before and after
        to = next(d for d, n in enumerate(after) if n == before[dim])
    else:
        return None
    return to if after[to] == before[dim] else None


def _is_negative(x: int | Literal, index: int | Literal, values: Mapping[int, Value], constants: Mapping[int, Any]) -> bool:
    """Whether ``x`` says which elements of ``index`` are negative; if it is known, that none is."""
    if not isinstance(x, int):
        return False
    if (array := _known(x, constants)) is not None:
        return not array.any()
    test = values[x].producer
    zero = test.inputs[1] if test is not None and test.prim == "lt" and test.inputs[0] == index else None
    return isinstance(zero, Literal) and not np.any(zero.value)


def _known(x: int, constants: Mapping[int, Any]) -> np.ndarray | None:
    array = constants.get(x)
    there = isinstance(array, np.ndarray) or (isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer))
    return np.asarray(array) if there and array.size <= _MOST else None


def _wide(dtype: Any) -> Any:
    """An index type that can count every element: an iota of int8 would begin again."""
    return dtype if jnp.iinfo(dtype).bits >= 32 else jnp.int32
