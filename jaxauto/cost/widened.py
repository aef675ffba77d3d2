"""What XLA:CPU writes to memory of its own (read off its schedules, without its library's fusions). Its kernels compute in float32 alone.

What is narrow is widened as it is read and rounded as it is made. Where several read a result it is kept rounded; where the program itself
widens it, what is made in float32 is kept, and rounded by each of the others that reads it. Dots and convolutions read arrays: a
float32 copy of each narrow operand, in the order that the dot wants it in; of what dots alone read, and all in one order, nothing but
that copy is made. Their results are rounded after them, by what reads them if there is but one that does.
"""

from __future__ import annotations

from itertools import pairwise

import jax.numpy as jnp

from jaxauto.core import Kind, Node, Value

NARROW = frozenset({"bfloat16", "float16"})
TREE = 32
MULTIPLIED = frozenset({Kind.DOT, Kind.CONV})  # what is made by kernels that read and write arrays in float32


def is_narrow(value: Value) -> bool:
    return str(value.dtype) in NARROW


def is_widened(value: Value) -> bool:
    """Whether the program itself makes a narrow value wide."""
    return any(u.prim == "convert_element_type" and str(u.eqn.outvars[0].aval.dtype) not in NARROW for u in value.users)


def order(node: Node, place: int) -> tuple[int, ...]:
    """The order of dimensions that a dot has its operand copied into; () for that which it has: batch, and rows and columns in any order.

    Dimensions of one element have no place.
    """
    if node.prim != "dot_general":
        return ()
    contracted, batch = (sides[place] for sides in node.params["dimension_numbers"])
    shape = node.eqn.invars[place].aval.shape
    free = [d for d in range(len(shape)) if d not in contracted and d not in batch]
    parts = [*batch, *free, *contracted] if place == 0 else [*batch, *contracted, *free]
    wanted = tuple(d for d in parts if shape[d] > 1)
    if len(shape) == 2 or all(a < b for a, b in pairwise(wanted)):
        return ()
    return wanted


def only_copied(value: Value, kind_of: object) -> bool:
    """Whether dots alone read a value, all in one order."""
    users = value.users
    if not users or any(kind_of(u) not in MULTIPLIED for u in users):
        return False
    return len({order(u, k) for u in users for k, x in enumerate(u.inputs) if x == value.id}) == 1


def is_kept_wide(value: Value, kind_of: object, readers: int, *, passed: bool) -> bool:
    """Whether a narrow value's buffer is in float32.

    Args:
      readers: fused equations that read it. passed: whether others do, which want it as it is.
    """
    if value.producer is not None and kind_of(value.producer) in MULTIPLIED:
        return readers <= 1 and not passed
    return is_widened(value) or only_copied(value, kind_of)


def is_tree(node: Node) -> bool:
    """Whether a reduction is made in steps of 32 elements, by kernels that read an array."""
    axes = node.params.get("axes", ())
    return node.prim.startswith("reduce_") and any(node.eqn.invars[0].aval.shape[d] > TREE for d in axes)


def is_dear(node: Node, value: Value, kind: Kind) -> bool:
    """Whether a result is made once for all that read it, as transcendentals are: a quotient, or what has to be rounded."""
    if node.prim == "div":
        return jnp.issubdtype(value.dtype, jnp.floating) and isinstance(node.inputs[1], int)
    return is_narrow(value) and (kind is Kind.CHEAP or node.prim == "convert_element_type")


def is_looped(node: Node) -> bool:
    """Whether random bits are made by a loop, that leaves two words for each."""
    return node.prim == "random_bits" and "fry" in str(node.eqn.invars[0].aval.dtype)
