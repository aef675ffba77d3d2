"""Elementwise primitives: every operand and result has the same dimensions; scalars go with anything."""

from __future__ import annotations

from functools import partial

from jaxauto.core import Kind, OpRule
from jaxauto.rules.build import Dim, build, names
from jaxauto.rules.registry import Eqn, Var, builtin_rule, shape_of, words

CHEAP = words("""
    abs add add_any and bitcast_convert_type ceil clamp clz complex conj div eq eq_to floor ge gt imag integer_pow is_finite le le_to lt
    lt_to max min mul mulhi ne neg nextafter not one_minus_square or polynomial population_count real rem round select_n shift_left
    shift_right_arithmetic shift_right_logical sign square sub xor zeros_like
""")

# What XLA's fusion counts as expensive (HloInstruction opcodes with a transcendental, or expanded into long polynomials and loops).
EXPENSIVE = words("""
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 igamma igamma_grad_a
    igammac lgamma log log1p log2 logistic polygamma pow regularized_incomplete_beta rsqrt sin sinh sqrt tan tanh zeta
""")

VIEWS = ("convert_element_type", "reduce_precision")


def pointwise(eqn: Eqn, kind: Kind, flops: float | None = None) -> OpRule:
    """Result dimension i is dimension i of every operand of the same size; scalars have none."""
    shape = shape_of(eqn.outvars[0])
    factors = names(len(shape))

    def dims(var: Var) -> list[Dim]:
        own = shape_of(var)
        if not own:
            return []
        # bitcast_convert_type to another width: leading dimensions agree
        shared: list[Dim] = [f if n == m else None for f, n, m in zip(factors, own, shape, strict=False)]
        return shared + [None] * (len(own) - len(shared))

    results = [dims(v) for v in eqn.outvars]
    if eqn.primitive.name == "bitcast_convert_type" and len(shape) > len(shape_of(eqn.invars[0])):
        results[0][-1] = None
    return build(eqn, [dims(v) for v in eqn.invars], results, kind=kind, flops=flops)


for _name in CHEAP:
    builtin_rule(_name)(partial(pointwise, kind=Kind.CHEAP))
for _name in EXPENSIVE:
    builtin_rule(_name)(partial(pointwise, kind=Kind.EXPENSIVE))
for _name in VIEWS:
    builtin_rule(_name)(partial(pointwise, kind=Kind.VIEW, flops=0.0))
