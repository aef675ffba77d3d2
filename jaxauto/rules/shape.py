"""Primitives that rename, merge, split, make or permute dimensions without cutting any."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jaxauto.core import Kind, OpRule
from jaxauto.rules.build import Dim, build, names
from jaxauto.rules.registry import Eqn, builtin_rule, shape_of


@builtin_rule("transpose")
def transpose(eqn: Eqn) -> OpRule:
    """Result dimension i is operand dimension ``permutation[i]``."""
    factors = names(len(shape_of(eqn.invars[0])))
    return build(eqn, [factors], [[factors[i] for i in eqn.params["permutation"]]], kind=Kind.MOVE, flops=0.0)


@builtin_rule("broadcast_in_dim")
def broadcast_in_dim(eqn: Eqn) -> OpRule:
    """Dimensions that the operand lacks, or has with size 1, are created."""
    shape = shape_of(eqn.outvars[0])
    factors = names(len(shape))
    operand = shape_of(eqn.invars[0])
    dims = [factors[d] if operand[i] == shape[d] else None for i, d in enumerate(eqn.params["broadcast_dimensions"])]
    extra = [[None] * len(shape_of(v)) for v in eqn.invars[1:]]
    return build(eqn, [dims, *extra], [factors], kind=Kind.VIEW, flops=0.0)


@builtin_rule("iota", "empty", "iota_2x32_shape")
def iota(eqn: Eqn) -> OpRule:
    """Every dimension is created."""
    factors = names(len(shape_of(eqn.outvars[0])))
    return build(eqn, [[None] * len(shape_of(v)) for v in eqn.invars], [factors] * len(eqn.outvars), kind=Kind.VIEW, flops=0.0)


@builtin_rule("squeeze")
def squeeze(eqn: Eqn) -> OpRule:
    """Drops dimensions of size 1."""
    factors = names(len(shape_of(eqn.invars[0])))
    dropped = {d % len(factors) for d in eqn.params["dimensions"]}
    return build(eqn, [factors], [[f for i, f in enumerate(factors) if i not in dropped]], kind=Kind.VIEW, flops=0.0)


@builtin_rule("reshape")
def reshape(eqn: Eqn) -> OpRule:
    """Factors common to both shapes; see ``reshape_factors``."""
    operand, result, sizes, whole = reshape_factors(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]))
    extra = [[None] * len(shape_of(v)) for v in eqn.invars[1:]]
    return build(eqn, [operand, *extra], [result], kind=Kind.VIEW, flops=0.0, sizes=sizes, whole=whole)


def reshape_factors(
    source: Sequence[int], target: Sequence[int]
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]], dict[str, int], list[str]]:
    """Decomposes the dimensions of two shapes of the same number of elements into shared factors, major first.

    Both shapes are read from the major end. While what remains of the two current dimensions has a common divisor, that divisor is a shared
    factor. Where the rest is coprime (6 -> 4 leaves 3 and 2), nothing smaller lines up: up to the next place where the products of both
    sides agree, the rest is whole.

    Args:
      source: shape of the operand.
      target: shape of the result.

    Returns:
      Factors of each source dimension, factors of each target dimension, factor sizes, and the factors that must be whole.
    """
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    whole: list[str] = []
    if 0 in source or 0 in target:
        return [()] * len(source), [()] * len(target), {}, []

    def add(size: int, *places: list[str]) -> None:
        name = names(len(sizes) + 1)[-1]
        sizes[name] = size
        for place in places:
            place.append(name)
        if len(places) == 1:
            whole.append(name)

    i = j = 0
    a, b = (source[0] if source else 1), (target[0] if target else 1)
    while i < len(source) and j < len(target):
        if a == 1:
            i += 1
            a = source[i] if i < len(source) else 1
        elif b == 1:
            j += 1
            b = target[j] if j < len(target) else 1
        elif math.gcd(a, b) > 1:
            common = math.gcd(a, b)
            add(common, left[i], right[j])
            a, b = a // common, b // common
        else:
            i, j = _leftover(source, target, left, right, (i, j, a, b), add)
            a, b = (source[i] if i < len(source) else 1), (target[j] if j < len(target) else 1)
    return list(map(tuple, left)), list(map(tuple, right)), sizes, whole


def _leftover(
    source: Sequence[int],
    target: Sequence[int],
    left: list[list[str]],
    right: list[list[str]],
    start: tuple[int, int, int, int],
    add: Callable[..., None],
) -> tuple[int, int]:
    """Marks both sides whole from ``start`` to the next place where they line up; returns the first dimensions after it."""
    i, j, a, b = start
    add(a, left[i])
    add(b, right[j])
    while a != b:
        if a < b:
            i += 1
            a *= source[i]
            if source[i] > 1:
                add(source[i], left[i])
        else:
            j += 1
            b *= target[j]
            if target[j] > 1:
                add(target[j], right[j])
    return i + 1, j + 1


@builtin_rule("tile")
def tile(eqn: Eqn) -> OpRule:
    """A repeated dimension is (repeat, whole copy): the repeats are created, the copy must be whole."""
    shape = shape_of(eqn.invars[0])
    factors, copies = names(len(shape)), names(len(shape), prefix="r")
    reps = eqn.params["reps"]
    result: list[Dim] = [f if r == 1 else (c, f) for f, c, r in zip(factors, copies, reps, strict=True)]
    sizes = {name: n for f, c, r, s in zip(factors, copies, reps, shape, strict=True) if r != 1 for name, n in ((f, s), (c, int(r)))}
    whole = [f for f, r in zip(factors, reps, strict=True) if r != 1]
    return build(eqn, [factors], [result], kind=Kind.MOVE, flops=0.0, sizes=sizes, whole=whole)
