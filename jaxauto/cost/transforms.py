"""Fourier transforms: XLA:TPU has no algorithm for them, but multiplies by the transform's matrix, exactly, each dimension in turn.

A complex product is three real ones. A long dimension is cut in two factors, n = a b: products by a and by b instead of n (Cooley and Tukey
1965). Which factors was read off compiled lengths (libtpu 0.0.42). The products come beside the traffic, most of which they do not hide; of
a dimension that is cut and does not fit on-chip memory, copies and twiddle factors take longer than the products. How far that is from what
was compiled: scripts/results/products.md. GPUs and CPUs take as long as the traffic (cuFFT, pocketfft).
"""

from __future__ import annotations

import math
from typing import Any

from jaxauto.core import Graph, Node
from jaxauto.cost.compute import traffic_seconds
from jaxauto.cost.hashing import seconds_of_hashes, unhidden
from jaxauto.cost.liveness import Buffers
from jaxauto.cost.onchip import capacity
from jaxauto.graph import walk

_WHOLE = 256  # powers of two up to this are one factor
_FACTOR = 128  # cut off
_LEAST = 32  # of a factor that is cut off
_PASSES = 8  # over HBM, of a dimension that is cut: 7 to 10 seen


def factors(n: int) -> int:
    """The sum of the factors that a dimension of ``n`` is cut in: products for each element."""
    even = n & -n  # the largest power of two in it
    if even < _LEAST or n == even <= _WHOLE:
        return n
    cut = min(_FACTOR, even)
    if n // cut > _WHOLE >= n // _WHOLE and even >= _WHOLE:
        cut = _WHOLE
    rest = n // cut
    return n if rest == 1 else cut + (rest if rest <= _WHOLE else factors(rest))


def _elements(node: Node) -> tuple[float, float]:
    """Complex numbers that the last dimension is transformed for, and what the others are: of real numbers half is left out."""
    length, kind = node.params["fft_lengths"][-1], node.params["fft_type"].name
    kept = 1.0 if kind in ("FFT", "IFFT") else (length // 2 + 1) / length
    return (node.eqn.outvars[0] if kind == "RFFT" else node.eqn.invars[0]).aval.size / kept, kept


def products(node: Node) -> float:
    """Multiplications and additions of real numbers of one ``fft`` as XLA:TPU does it, whole."""
    lengths, kind = node.params["fft_lengths"], node.params["fft_type"].name
    last, kept = _elements(node)
    real = 3 if kind != "RFFT" or len(lengths) > 1 or factors(lengths[-1]) < lengths[-1] else 2
    return 2.0 * last * (real * factors(lengths[-1]) + 3 * kept * sum(map(factors, lengths[:-1])))


def seconds_of_transform(node: Node, chip: Any) -> float:
    """What one run of a whole node takes beside what it reads and writes; 0 of what is no transform."""
    if node.prim != "fft" or chip.platform != "tpu" or not math.prod(node.params["fft_lengths"]):
        return 0.0
    lengths, bytes_ = node.params["fft_lengths"], 8 * _elements(node)[0]
    passes = _PASSES * sum(factors(n) < n for n in lengths) * (bytes_ > capacity(chip))
    return max(
        products(node) / (chip.flops_efficiency * chip.peak_flops("float32", "highest")), float(traffic_seconds(passes * bytes_, chip))
    )


def more_seconds(node: Node, chip: Any) -> float:
    """What one run of a whole node takes beside its roofline, if nothing hides it: random bits and transforms."""
    return seconds_of_hashes(node, chip) + seconds_of_transform(node, chip)


def beyond_traffic(graph: Graph, buffers: Buffers, chip: Any) -> dict[int, float]:
    """Node id → seconds that one run of it, whole, takes beyond the traffic of its kernels; of those that do."""
    transforms = {node.id: seconds for node in walk(graph) if (seconds := seconds_of_transform(node, chip))}
    return {**unhidden(graph, buffers, chip), **transforms}
