"""Fourier transforms: XLA:TPU has no algorithm for them, but multiplies by the transform's matrix, exactly, each dimension in turn.

A complex product is three real ones. A long dimension is cut in two factors, n = a b: products by a and by b instead of n (Cooley and Tukey
1965). Which factors was read off 40 compiled lengths (libtpu 0.0.42). The products come beside the traffic, most of which they do not hide:
of twelve compiled transforms ten are within 7 % of the roofline, two small ones with little traffic left are told 21 and 33 % too long.
GPUs and CPUs take as long as the traffic (cuFFT, pocketfft).
"""

from __future__ import annotations

import math
from typing import Any

from jaxauto.core import Graph, Node
from jaxauto.cost.hashing import seconds_of_hashes, unhidden
from jaxauto.cost.liveness import Buffers
from jaxauto.graph import walk

_WHOLE = 256  # powers of two up to this are one factor
_FACTOR = 128  # cut off
_LEAST = 32  # of a factor that is cut off


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


def products(node: Node) -> float:
    """Multiplications and additions of real numbers of one ``fft`` as XLA:TPU does it, whole."""
    lengths, kind = node.params["fft_lengths"], node.params["fft_type"].name
    x, y = (max(v.aval.size, 1) for v in (node.eqn.invars[0], node.eqn.outvars[0]))
    halved = max(lengths[-1] // 2 + 1, 1) / max(lengths[-1], 1)  # what is kept of the last dimension of real numbers
    last = y / halved if kind == "RFFT" else x / halved if kind == "IRFFT" else x
    real = 3 if kind != "RFFT" or len(lengths) > 1 or factors(lengths[-1]) < lengths[-1] else 2
    others = last * (1.0 if kind == "FFT" or kind == "IFFT" else halved)
    return 2.0 * (real * last * factors(lengths[-1]) + 3 * others * sum(map(factors, lengths[:-1])))


def seconds_of_transform(node: Node, chip: Any) -> float:
    """Of the products of one run of a whole node; 0 of what is no transform."""
    if node.prim != "fft" or chip.platform != "tpu" or not math.prod(node.params["fft_lengths"]):
        return 0.0
    return products(node) / (chip.flops_efficiency * chip.peak_flops("float32", "highest"))


def more_seconds(node: Node, chip: Any) -> float:
    """What one run of a whole node takes beside its roofline, if nothing hides it: random bits and transforms."""
    return seconds_of_hashes(node, chip) + seconds_of_transform(node, chip)


def beyond_traffic(graph: Graph, buffers: Buffers, chip: Any) -> dict[int, float]:
    """Node id → seconds that one run of it, whole, takes beyond the traffic of its kernels; of those that do."""
    transforms = {node.id: seconds for node in walk(graph) if not node.bodies and (seconds := seconds_of_transform(node, chip))}
    return {**unhidden(graph, buffers, chip), **transforms}
