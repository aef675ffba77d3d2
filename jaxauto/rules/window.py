"""Primitives along a dimension: sliding windows, cumulative sums, sorts, Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxauto.core import Kind, OpRule
from jaxauto.rules.build import Dim, array_bytes, build, elements, names
from jaxauto.rules.registry import Eqn, builtin_rule, shape_of


def window_halo(sizes: tuple[int, int], window: int, stride: int, dilations: tuple[int, int]) -> int | None:
    """What a device needs of its neighbours when a dimension under a sliding window is sharded.

    Args:
      sizes: of the dimension, before and after.
      window: taps.
      stride: of the window.
      dilations: of the operand and of the window.

    Returns:
      Elements of the operand in which neighbouring windows overlap, over a shard's border; 0 when the blocks under them are disjoint;
      None when the dimension must be whole: blocks before and after do not line up, or a window spans more than half of it.
    """
    before, after = sizes
    operand_dilation, window_dilation = dilations
    extent = (window - 1) * window_dilation + 1
    if extent == stride == operand_dilation == 1 and before == after:
        return 0
    if before * operand_dilation != after * stride or min(stride, operand_dilation) > 1:
        return None
    if 2 * extent > before * operand_dilation:
        return None
    return max(0, extent - stride) // operand_dilation


def _sliding(before: Sequence[int], after: Sequence[int], *columns: Sequence[int]) -> tuple[list[Dim], dict[str, int]]:
    """Dimensions and halos of a window (sizes, strides, operand dilations, window dilations) that slides over all dimensions."""
    dims: list[Dim] = []
    halo: dict[str, int] = {}
    for factor, n, m, window, stride, *dilations in zip(names(len(before)), before, after, *columns, strict=True):
        border = window_halo((n, m), window, stride, (dilations[0], dilations[1]))
        dims.append(None if border is None else factor)
        if border is not None and (border or n != m):
            halo[factor] = border
    return dims, halo


@builtin_rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", "select_and_gather_add")
def reduce_window(eqn: Eqn) -> OpRule:
    """Dimensions without a window pass; those with one exchange a border. Scalars are initial values."""
    shape, params = shape_of(eqn.invars[0]), eqn.params
    dilations = [params.get(name) or (1,) * len(shape) for name in ("base_dilation", "window_dilation")]
    dims, halo = _sliding(shape, shape_of(eqn.outvars[0]), params["window_dimensions"], params["window_strides"], *dilations)
    operands = [dims if shape_of(v) else () for v in eqn.invars]
    flops = float(elements(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"]))
    return build(eqn, operands, [dims] * len(eqn.outvars), kind=Kind.REDUCE, halo=halo, flops=flops)


@builtin_rule("select_and_scatter_add", "select_and_scatter")
def select_and_scatter_add(eqn: Eqn) -> OpRule:
    """The gradient of max pooling: (source, operand) or (operand, source, initial value) -> like the operand. As ``reduce_window``."""
    source, operand = (shape_of(v) for v in (eqn.invars if len(eqn.invars) == 2 else eqn.invars[1::-1]))
    windows, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
    dims, halo = _sliding(operand, source, windows, strides, (1,) * len(operand), (1,) * len(operand))
    operands = [dims if shape_of(v) else () for v in eqn.invars]
    flops = float(elements(eqn.invars[0]) * math.prod(windows))
    return build(eqn, operands, [dims], kind=Kind.SCATTER, halo=halo, flops=flops)


def _along(eqn: Eqn, axes: Sequence[int], flops: float) -> OpRule:
    """Every operand and result has the same dimensions, and those of ``axes`` are whole."""
    factors = names(len(shape_of(eqn.invars[0])))
    whole = [factors[a] for a in axes]
    return build(eqn, [factors] * len(eqn.invars), [factors] * len(eqn.outvars), kind=Kind.SCAN, whole=whole, flops=flops)


@builtin_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(eqn: Eqn) -> OpRule:
    """The axis is whole."""
    return _along(eqn, [eqn.params["axis"]], float(elements(eqn.invars[0])))


@builtin_rule("sort")
def sort(eqn: Eqn) -> OpRule:
    """Several operands sorted along one dimension, which is whole. n log2 n comparisons."""
    axis = eqn.params["dimension"]
    length = shape_of(eqn.invars[0])[axis]
    return _along(eqn, [axis], elements(eqn.invars[0]) * math.log2(max(length, 2)))


@builtin_rule("top_k", "approx_top_k")
def top_k(eqn: Eqn) -> OpRule:
    """Values and indices of the largest along one axis, which is whole."""
    rank = len(shape_of(eqn.invars[0]))
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % rank
    dims: list[Dim] = [None if i == axis else f for i, f in enumerate(names(rank))]
    return build(eqn, [dims], [dims] * len(eqn.outvars), kind=Kind.SCAN, flops=float(elements(eqn.invars[0])))


@builtin_rule("fft")
def fft(eqn: Eqn) -> OpRule:
    """The last ``len(fft_lengths)`` dimensions are whole. 5 n log2 n operations (the usual convention, fftw.org/speed)."""
    rank, transformed = len(shape_of(eqn.invars[0])), len(eqn.params["fft_lengths"])
    dims: list[Dim] = [f if i < rank - transformed else None for i, f in enumerate(names(rank))]
    length = math.prod(eqn.params["fft_lengths"])
    largest = max(elements(eqn.invars[0]), elements(eqn.outvars[0]))
    bytes_ = array_bytes(eqn.invars[0]) + array_bytes(eqn.outvars[0])
    return build(eqn, [dims], [dims], kind=Kind.SCAN, flops=5.0 * largest * math.log2(max(length, 2)), bytes_=bytes_)
