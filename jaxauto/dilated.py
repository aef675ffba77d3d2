"""The weight gradient of a transposed convolution, with its operands exchanged.

Differentiation slides the cotangent over the dilated input of the layer. XLA:TPU exchanges the two, and reverses the cotangent in memory
for that: one more array as large as the layer's result, there and back. Written with the operands exchanged, as the weight gradient of a
strided convolution is, the small result alone is reversed (scripts/results/dilated.md). The same products are summed.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
from jax import lax

from jaxauto import compat


def undilated(eqn: Any) -> Any | None:
    """The closed jaxpr, of the operands of such a convolution, of the exchanged one; None where ``eqn`` is no such convolution."""
    if eqn.primitive.name != "conv_general_dilated" or not _slides_a_larger(eqn):
        return None
    params = dict(eqn.params)
    numbers, dilation = params["dimension_numbers"], params["lhs_dilation"]
    left, right, out = _spatial_sizes(eqn)
    if isinstance(precision := params["precision"], tuple) and len(precision) == 2:
        params["precision"] = precision[::-1]
    params["lhs_dilation"], params["rhs_dilation"] = params["rhs_dilation"], dilation
    sides = zip(out, left, dilation, right, params["padding"], strict=True)
    params["padding"] = tuple((n - 1 - low, (m - 1) * step + 1 - taps + low) for n, m, step, taps, (low, _) in sides)
    batch, features, *spatial = numbers.out_spec
    params["dimension_numbers"] = lax.ConvDimensionNumbers(numbers.rhs_spec, numbers.lhs_spec, (features, batch, *spatial))

    def other_way_round(a: Any, b: Any) -> Any:
        return lax.rev(lax.conv_general_dilated_p.bind(b, a, **params), spatial)

    with compat.source_of(eqn):
        return jax.make_jaxpr(other_way_round)(*(v.aval for v in eqn.invars))


def _slides_a_larger(eqn: Any) -> bool:
    """Whether an undilated right operand, larger than the result, slides over a dilated left one in steps of one, without groups."""
    params, (_, right, out) = eqn.params, _spatial_sizes(eqn)
    plain = (*params["window_strides"], *params["rhs_dilation"], params["feature_group_count"], params["batch_group_count"])
    return max(params["lhs_dilation"], default=1) > 1 and set(plain) == {1} and prod(right) > prod(out)


def _spatial_sizes(eqn: Any) -> list[list[int]]:
    """Of both operands and the result."""
    arrays = zip((*eqn.invars, *eqn.outvars), eqn.params["dimension_numbers"], strict=True)
    return [[v.aval.shape[d] for d in spec[2:]] for v, spec in arrays]
