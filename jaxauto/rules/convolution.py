"""conv_general_dilated, in all the roles that differentiation gives it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from jaxauto.core import Kind, OpRule
from jaxauto.rules.build import Dim, build
from jaxauto.rules.registry import Eqn, builtin_rule, shape_of
from jaxauto.rules.window import window_halo

GROUPS = "g"  # the factor of groups


@builtin_rule("conv_general_dilated")
def conv_general_dilated(eqn: Eqn) -> OpRule:
    """Batch b and output features o pass, input features i are reduced, group factors g pass, spatial dimensions exchange a border.

    The roles are those of ``dimension_numbers``, so that the gradient convolutions, in which batch and features swap roles, need no care.
    Groups split dimensions, major first: features, lhs ``(g i)``, rhs ``i`` and ``(g o)``, result ``(g o)``;
    batch, lhs ``(g b)``, rhs ``(g o)``, result ``b`` and ``(g o)``.
    """
    params = eqn.params
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    lhs_shape, rhs_shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    features, batches = params["feature_group_count"], params["batch_group_count"]
    groups = max(features, batches)
    sizes = {GROUPS: groups, "o": rhs_shape[rhs_spec[0]] // groups}
    lhs: list[Dim] = [None] * len(lhs_shape)
    rhs: list[Dim] = [None] * len(rhs_shape)
    out: list[Dim] = [None] * len(lhs_shape)
    lhs[lhs_spec[0]] = (GROUPS, "b") if batches > 1 else "b"
    lhs[lhs_spec[1]] = (GROUPS, "i") if features > 1 else "i"
    rhs[rhs_spec[0]] = out[out_spec[1]] = (GROUPS, "o") if groups > 1 else "o"
    rhs[rhs_spec[1]] = "i"
    out[out_spec[0]] = "b"
    if batches > 1:
        sizes["b"] = lhs_shape[lhs_spec[0]] // groups
    if features > 1:
        sizes["i"] = rhs_shape[rhs_spec[1]]
    # XLA's partitioner keeps images split for a depthwise convolution; for other groups it gathers them (scripts/results/borders.md).
    apart = groups == 1 or all(sizes.get(f, 1) == 1 for f in "oib")
    halo = _spatial(eqn, lhs, rhs, out) if apart else {}
    # Within a group, XLA partitions nothing, and its check fails (the process ends) when a grouped dimension has more parts than groups.
    whole = ["o"] * (groups > 1) + ["i"] * (features > 1) + ["b"] * (batches > 1)
    return build(
        eqn,
        [lhs, rhs],
        [out],
        kind=Kind.CONV,
        reduce={"k0": "sum", "k1": "sum", "k2": "sum"} | ({} if features > 1 else {"i": "sum"}),
        whole=whole,
        halo=halo,
        sizes=sizes if groups > 1 else {},
        flops=convolution_flops(eqn),
    )


def _spatial(eqn: Eqn, lhs: list[Dim], rhs: list[Dim], out: list[Dim]) -> dict[str, int]:
    """Fills in the spatial dimensions; returns the halos of their factors.

    A small window slides: s passes from lhs to result. A window as long as lhs (the gradient in a kernel) is contracted with it: k is
    reduced, and the borders exchanged are those of the forward convolution, whose kernel is the result and whose stride is the dilation.
    """
    lhs_spec, rhs_spec, out_spec = eqn.params["dimension_numbers"]
    halo = {}
    for index, (size, taps, after, stride, _, dilations) in enumerate(_spatial_columns(eqn)):
        border = window_halo((size, after), taps, stride, dilations)
        if border is not None and after > 1:
            factor, spec, partner, other = f"s{index}", out_spec, out, after
        elif taps * dilations[1] == size and stride == dilations[0] == 1:
            factor, spec, partner, other = f"k{index}", rhs_spec, rhs, taps
            border = max(0, after - dilations[1])
            if border == 0 and size != taps:  # disjoint patches: XLA gathers
                continue
        else:
            continue
        lhs[lhs_spec[2 + index]] = partner[spec[2 + index]] = factor
        if border or size != other:
            halo[factor] = border
    return halo


def _spatial_columns(eqn: Eqn) -> Iterator[tuple[int, int, int, int, tuple[int, int], tuple[int, int]]]:
    """For each spatial dimension: size, taps, size of the result, stride, padding, (operand dilation, window dilation)."""
    params = eqn.params
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    shapes = shape_of(eqn.invars[0]), shape_of(eqn.invars[1]), shape_of(eqn.outvars[0])
    for index, (i, j, k) in enumerate(zip(lhs_spec[2:], rhs_spec[2:], out_spec[2:], strict=True)):
        dilations = params["lhs_dilation"][index], params["rhs_dilation"][index]
        yield shapes[0][i], shapes[1][j], shapes[2][k], params["window_strides"][index], tuple(params["padding"][index]), dilations


def convolution_flops(eqn: Eqn) -> float:
    """2 × result batch × result features × input features of a group × (position, tap) pairs that meet a real element.

    Taps on padding or on the holes of a dilated operand are not work; XLA's own cost analysis counts the same way.
    """
    _, rhs_spec, out_spec = eqn.params["dimension_numbers"]
    out_shape, rhs_shape = shape_of(eqn.outvars[0]), shape_of(eqn.invars[1])
    pairs = math.prod(_real_taps(*column) for column in _spatial_columns(eqn))
    batch = out_shape[out_spec[0]]
    return 2.0 * batch * out_shape[out_spec[1]] * rhs_shape[rhs_spec[1]] * pairs


def _real_taps(size: int, taps: int, after: int, stride: int, padding: tuple[int, int], dilations: tuple[int, int]) -> int:
    operand_dilation, window_dilation = dilations
    position = np.arange(after)[:, None] * stride + np.arange(taps)[None, :] * window_dilation - padding[0]
    real = (position >= 0) & (position <= (size - 1) * operand_dilation) & (position % operand_dilation == 0)
    return int(real.sum())
