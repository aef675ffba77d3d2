"""dot_general and its relatives."""

from __future__ import annotations

import math
from typing import Any

from jaxauto.core import Kind, OpRule
from jaxauto.rules.build import Dim, build, elements, names
from jaxauto.rules.registry import Eqn, builtin_rule, shape_of


def _dot_dims(dimension_numbers: Any, lhs_rank: int, rhs_rank: int) -> tuple[list[str], list[str], list[str]]:
    """Factors of both operands and of the result, which is batch, free of lhs, free of rhs. Batch: b, free: m and n, contracted: k."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs, rhs = names(lhs_rank, prefix="m"), names(rhs_rank, prefix="n")
    for letter, pairs in (("b", (lhs_batch, rhs_batch)), ("k", (lhs_contract, rhs_contract))):
        for number, (i, j) in enumerate(zip(*pairs, strict=True)):
            lhs[i] = rhs[j] = f"{letter}{number}"
    batch = [lhs[i] for i in lhs_batch]
    result = batch + [f for f in lhs if f[0] == "m"] + [f for f in rhs if f[0] == "n"]
    return lhs, rhs, result


@builtin_rule("dot_general")
def dot_general(eqn: Eqn) -> OpRule:
    """``b m k, b k n -> b m n``; 2 b m n k flops."""
    dimension_numbers = eqn.params["dimension_numbers"]
    lhs, rhs, result = _dot_dims(dimension_numbers, len(shape_of(eqn.invars[0])), len(shape_of(eqn.invars[1])))
    contracted = math.prod(shape_of(eqn.invars[0])[i] for i in dimension_numbers[0][0])
    flops = 2.0 * elements(eqn.outvars[0]) * contracted
    return build(eqn, [lhs, rhs], [result], kind=Kind.DOT, reduce={f: "sum" for f in lhs if f[0] == "k"}, flops=flops)


@builtin_rule("scaled_dot")
def scaled_dot(eqn: Eqn) -> OpRule:
    """dot_general of two operands with scales (lhs, rhs, their scales), of which one covers a block of the contracted dimension."""
    dimension_numbers = eqn.params["dimension_numbers"]
    shapes = [shape_of(v) for v in eqn.invars]
    lhs, rhs, result = _dot_dims(dimension_numbers, len(shapes[0]), len(shapes[1]))
    whole = {f for f in lhs if f[0] == "k"}
    scales: list[list[Dim]] = [[None if f in whole else f for f in value] for value in (lhs, rhs)]
    flops = 2.0 * elements(eqn.outvars[0]) * math.prod(shapes[0][i] for i in dimension_numbers[0][0])
    return build(eqn, [lhs, rhs, *scales], [result], kind=Kind.DOT, whole=whole, flops=flops)


@builtin_rule("ragged_dot_general")
def ragged_dot_general(eqn: Eqn) -> OpRule:
    """dot_general whose ragged lhs dimension is cut into groups: it and the group dimension are whole, all others as in dot_general.

    Ragged in a free dimension, rhs has a group dimension; ragged in a contracted one, the result has it in front; in a batch one, none has.
    Each row meets one group, so the flops are those of one group.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    groups = list(numbers.rhs_group_dimensions)
    rhs_rank = len(shape_of(eqn.invars[1]))
    kept = [i for i in range(rhs_rank) if i not in groups]
    (contract, rhs_contract), (batch, rhs_batch) = numbers.dot_dimension_numbers
    inner = ((contract, [kept.index(i) for i in rhs_contract]), (batch, [kept.index(i) for i in rhs_batch]))
    lhs, rhs_inner, result_inner = _dot_dims(inner, len(shape_of(eqn.invars[0])), len(kept))
    rhs: list[Dim] = [None] * rhs_rank
    for position, factor in zip(kept, rhs_inner, strict=True):
        rhs[position] = factor
    result: list[Dim] = [*[None] * (len(shape_of(eqn.outvars[0])) - len(result_inner)), *result_inner]
    whole = {lhs[i] for i in numbers.lhs_ragged_dimensions}
    reduced = {f: "sum" for f in lhs if f[0] == "k" and f not in whole}
    sizes = [None] * len(shape_of(eqn.invars[2]))
    extra = [[None] * len(shape_of(v)) for v in eqn.invars[3:]]
    all_factors = dict(zip(lhs, shape_of(eqn.invars[0]), strict=True)) | dict(zip(rhs, shape_of(eqn.invars[1]), strict=True))
    flops = 2.0 * math.prod(n for f, n in all_factors.items() if f is not None)
    return build(eqn, [lhs, rhs, sizes, *extra], [result], kind=Kind.DOT, reduce=reduced, whole=whole, flops=flops)
