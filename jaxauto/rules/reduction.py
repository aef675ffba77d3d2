"""Reductions: a reduced dimension can be sharded where a collective knows how to combine the parts."""

from __future__ import annotations

from jaxauto.core import Kind, OpRule
from jaxauto.rules.build import Dim, build, elements, names
from jaxauto.rules.registry import Eqn, builtin_rule, shape_of

COMBINED = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
}


@builtin_rule(*COMBINED)
def reduce_by(eqn: Eqn) -> OpRule:
    """``a b c -> a c`` with b reduced."""
    factors = names(len(shape_of(eqn.invars[0])))
    axes = set(eqn.params["axes"])
    kept = [f for i, f in enumerate(factors) if i not in axes]
    how = {factors[i]: COMBINED[eqn.primitive.name] for i in axes}
    return build(eqn, [factors], [kept], kind=Kind.REDUCE, reduce=how, flops=float(elements(eqn.invars[0])))


@builtin_rule("reduce_xor", "argmax", "argmin")
def reduce_whole(eqn: Eqn) -> OpRule:
    """No collective combines partial results: the axes are whole."""
    factors = names(len(shape_of(eqn.invars[0])))
    axes = set(eqn.params["axes"])
    kept = [f for i, f in enumerate(factors) if i not in axes]
    operand: list[Dim] = [None if i in axes else f for i, f in enumerate(factors)]
    return build(eqn, [operand], [kept] * len(eqn.outvars), kind=Kind.REDUCE, flops=float(elements(eqn.invars[0])))


@builtin_rule("reduce")
def reduce_general(eqn: Eqn) -> OpRule:
    """Several operands and a computation of the user's: operands, then as many scalar initial values; the axes are whole."""
    count = len(eqn.outvars)
    factors = names(len(shape_of(eqn.invars[0])))
    axes = set(eqn.params["dimensions"])
    operand: list[Dim] = [None if i in axes else f for i, f in enumerate(factors)]
    kept = [f for i, f in enumerate(factors) if i not in axes]
    flops = float(count * elements(eqn.invars[0]))
    return build(eqn, [*[operand] * count, *[()] * count], [kept] * count, kind=Kind.REDUCE, flops=flops)
