"""Equations of which XLA:GPU makes more than it has to, written so that it does not: the same numbers (scripts/results/for_gpu.md).

- What is scattered into zeros. They wait for nothing, so XLA makes them as the step begins, and keeps them     ``_scatter``, ``_pool``
- Stacks that the backward pass of a recurrence fills: those zeros too                              ``fills_late``, ``begin``
- A transposed convolution. XLA writes its input to memory with zeros between the elements, and slides the kernel over all of them; it
  takes it for the gradient of a strided convolution, which needs no zeros, if the kernel is seen to be reversed       ``_convolution``
- That gradient itself, where the reversed kernel is brought to another sharding before it is read                     ``_convolution``
- A convolution with a dilated kernel, of an input padded on one side. It is the kernel that XLA fills with zeros then  ``_convolution``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxauto import compat
from jaxauto.core import Literal, Node, Value
from jaxauto.graph import FillEqn

Pinned = Callable[[int, Any], Any]


def instead(node: Node, operands: list, values: Mapping[int, Value], pinned: Pinned) -> list | None:
    """The results of an equation, made another way; None where it is as good as it is.

    Args:
      operands: its arrays. values: of the graph. pinned: an array in place of that of a value, where that is pinned.
    """
    way = _WAYS.get(node.prim)
    if way is None:
        return None
    with compat.source_of(node.eqn, node.scope):
        return way(node, operands, [values[x].producer if isinstance(x, int) else None for x in node.inputs], pinned)


def fills_late(node: Node, values: Mapping[int, Value]) -> tuple[int, ...]:
    """A scan of the backward pass whose carries begin with constants waits for nothing but the cotangents that it reads: which of its
    operands those are. The zeros that its stacks are filled with wait for them too. Of any other loop: none.
    """
    if node.prim != "scan" or not node.backward or any(compat.is_key_dtype(values[x].dtype) for x in node.outputs):
        return ()
    first, last = node.num_consts, node.num_consts + node.num_carry
    made_by = [values[x].producer if isinstance(x, int) else None for x in node.inputs[: len(node.bodies[0].inputs)]]
    carries = zip(node.inputs[first:last], made_by[first:last], strict=True)
    if not all(isinstance(x, Literal) or _constant(made) is not None for x, made in carries):
        return ()
    return tuple(k for k, made in enumerate(made_by) if made is not None and made.backward and not first <= k < last)


def begin(node: Node, operands: list, values: Mapping[int, Value]) -> tuple[Any, list]:
    """What ``Pins.begin`` returns, see ``fills_late``."""
    late = fills_late(node, values)
    if not late:
        return None, operands
    zero, tied = lax.optimization_barrier((jnp.float32(0), [operands[k] for k in late]))
    now = dict(zip(late, tied, strict=True))
    pairs = enumerate(zip(node.inputs, operands, strict=True))
    return zero, [now[k] if k in now else _late(x, operand, zero, values) for k, (x, operand) in pairs]


def _late(x: int | Literal, operand: Any, zero: Any, values: Mapping[int, Value]) -> Any:
    """A stack that several loops write, as the first of them gets it."""
    made = values[x].producer if isinstance(x, int) else None
    filled = made is not None and isinstance(made.eqn, FillEqn)
    return jnp.broadcast_to(lax.convert_element_type(zero, operand.dtype), operand.shape) if filled else operand


def _constant(node: Node | None) -> Literal | None:
    """The scalar constant that a node fills an array with."""
    if node is None or node.prim != "broadcast_in_dim" or not isinstance(x := node.inputs[0], Literal):
        return None
    return x if jnp.ndim(x.value) == 0 else None


def _scatter(node: Node, operands: list, made_by: list[Node | None], pinned: Pinned) -> list | None:
    """The zeros, or what else is the same everywhere, are made once what is scattered is there."""
    constant, into = _constant(made_by[0]), node.inputs[0]
    if constant is None or not isinstance(into, int):
        return None
    what = 1 if node.prim == "dynamic_update_slice" else 2
    value, shape = jnp.asarray(constant.value, operands[0].dtype), operands[0].shape
    waiting, value = lax.optimization_barrier((operands[what], value))
    operands = [pinned(into, jnp.full(shape, value)), *operands[1:what], waiting, *operands[what + 1 :]]
    return compat.bind(node.eqn, operands, node.scope)


def _pool(node: Node, operands: list, _: list[Node | None], __: Pinned) -> list | None:
    """The gradient of max pooling, whose zeros are in JAX's lowering."""
    source, operand = operands
    if not jnp.issubdtype(source.dtype, jnp.floating):
        return None
    source, zero = lax.optimization_barrier((source, jnp.zeros((), source.dtype)))
    return [compat.scatter_selected(node.eqn, source, operand, zero)]


def _convolution(node: Node, operands: list, made_by: list[Node | None], pinned: Pinned) -> list | None:
    params, (image, kernel) = dict(node.params), operands
    if params["batch_group_count"] > 1:
        return None
    if max(params["lhs_dilation"], default=1) > 1:
        plain = {*params["window_strides"], *params["rhs_dilation"], params["feature_group_count"]} == {1}
        reversed_ = _is(made_by[1], "rev") and pinned(node.inputs[1], kernel) is kernel  # through a constraint XLA does not see it
        if not plain or reversed_:
            return None
        spatial = params["dimension_numbers"].rhs_spec[2:]
        kernel = lax.rev(lax.optimization_barrier(lax.rev(kernel, spatial)), spatial)
        return compat.bind(node.eqn, [image, kernel], node.scope)
    uneven = any(low != high for low, high in params["padding"]) or _is(made_by[0], "pad")
    if max(params["rhs_dilation"], default=1) == 1 or not uneven:
        return None
    sides = [(0, 0, 0)] * image.ndim
    for dim, (low, high) in zip(params["dimension_numbers"].lhs_spec[2:], params["padding"], strict=True):
        sides[dim] = (low, high, 0)
    image = lax.optimization_barrier(lax.pad(image, jnp.zeros((), image.dtype), sides))
    return [lax.conv_general_dilated_p.bind(image, kernel, **{**params, "padding": tuple((0, 0) for _ in params["padding"])})]


def _is(node: Node | None, prim: str) -> bool:
    return node is not None and node.prim == prim


_WAYS: dict[str, Callable[..., list | None]] = {
    "conv_general_dilated": _convolution,
    "dynamic_update_slice": _scatter,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter_add": _scatter,
    "select_and_scatter_add": _pool,
}
