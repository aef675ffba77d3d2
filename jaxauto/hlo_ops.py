"""What single HLO instructions say: array shapes, attributes, floating-point operations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxauto.hlo import Computation, Instruction

# --------------------------------------------------------------------------------------------------------------------- shapes

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_SHAPE_TOKEN = re.compile(r"[()]|[a-z][a-z0-9]*\[[^\]]*\](?:\{[^}]*\})?|token\b|opaque\b")


@dataclass(frozen=True)
class Shape:
    """One array. ``layout`` is minor to major; ``tiles`` as in ``T(8,128)(2,1)``; ``memory_space`` as in ``S(1)``, 0: main memory."""

    dtype: str
    dims: tuple[int, ...] = ()
    layout: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    memory_space: int = 0

    @property
    def bits(self) -> int:
        """Of one element, from the digits of the type's name: bf16, s4, f8e4m3fn, c64; pred is a byte, token and opaque nothing."""
        found = re.match(r"[a-z]+(\d+)", self.dtype)
        return 8 if self.dtype == "pred" else int(found.group(1)) if found else 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes_(self) -> float:
        """Logical bytes, without padding."""
        return self.elements * self.bits / 8

    @property
    def padded_bytes(self) -> float:
        """Bytes in memory: the first tile pads the minor dimensions it covers (``T(8,128)``: two); later tiles only reorder inside it."""
        if not self.tiles or len(self.layout) != len(self.dims):
            return self.bytes_
        sizes = [self.dims[d] for d in reversed(self.layout)]  # major to minor
        tile = self.tiles[0]
        if len(tile) > len(sizes):
            sizes = [1] * (len(tile) - len(sizes)) + sizes
        for back, edge in enumerate(reversed(tile), start=1):
            sizes[-back] = -(-sizes[-back] // edge) * edge
        return math.prod(sizes) * self.bits / 8


def leaves(shape: Shape | tuple) -> Iterator[Shape]:
    """The arrays of a nested tuple shape, in order."""
    if isinstance(shape, Shape):
        yield shape
    else:
        for part in shape:
            yield from leaves(part)


@lru_cache(maxsize=65536)
def parse_shape(text: str) -> Shape | tuple:
    """``bf16[4,256]{1,0:T(8,128)(2,1)S(1)}`` or a tuple ``(f32[], (s32[2]{0}, token[]))``."""
    stack: list[list] = [[]]
    text = re.sub(r"\{[^{}]*\}", lambda m: m.group().replace("(", "<").replace(")", ">"), text)  # hide the parentheses of tiles
    for token in _SHAPE_TOKEN.findall(text):
        if token == "(":
            stack.append([])
        elif token == ")" and len(stack) > 1:
            stack[-2].append(tuple(stack.pop()))
        elif token != ")":
            stack[-1].append(_parse_array(token))
    return stack[0][0] if stack[0] else ()


def _parse_array(text: str) -> Shape:
    found = _ARRAY.match(text)
    if not found:
        return Shape(text)
    dims = tuple(int(d.strip().lstrip("<=") or 0) for d in found.group(2).split(",") if d.strip().lstrip("<=").isdigit())
    layout, _, rest = (found.group(3) or "").replace("<", "(").replace(">", ")").partition(":")
    order = tuple(int(d) for d in layout.split(",") if d.strip().isdigit())
    tiled = re.search(r"T((?:\([\d,*]+\))+)", rest)
    tiles = tuple(tuple(int(n) for n in t.split(",") if n.isdigit()) for t in re.findall(r"\(([\d,*]+)\)", tiled.group(1))) if tiled else ()
    space = re.search(r"S\((\d+)\)", rest)
    return Shape(found.group(1), dims, order, tiles, int(space.group(1)) if space else 0)


def attribute(text: str, key: str) -> str:
    """The value of ``key=`` among ``, key=value`` attributes, up to the comma that ends it outside brackets and quotes."""
    found = re.search(rf"(?:^|, ){re.escape(key)}=", text)
    if not found:
        return ""
    depth, quoted = 0, False
    for end in range(found.end(), len(text)):
        c = text[end]
        if c == '"' and text[end - 1] != "\\":
            quoted = not quoted
        elif not quoted and c in "{[(":
            depth += 1
        elif not quoted and c in "}])":
            depth -= 1
        elif c == "," and depth == 0 and not quoted and not text.startswith(", device_ids=", end):  # of a mesh's replica_groups
            return text[found.end() : end]
    return text[found.end() :]


# --------------------------------------------------------------------------------------------------------------------- flops

_ELEMENTWISE = frozenset(
    {"abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "cosine", "divide", "erf", "exponential", "exponential-minus-one"}
    | {"floor", "log", "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "power", "remainder"}
    | {"round-nearest-afz", "round-nearest-even", "rsqrt", "select", "sign", "sine", "sqrt", "subtract", "tan", "tanh", "xor"}
)
_MATMUL_CALLS = re.compile(r'custom_call_target="(__cublas\$|__onednn\$matmul|__cudnn\$conv|[^"]*(?:gemm|matmul|MatMul))')


def elementwise_flops(computation: Computation, i: Instruction) -> float:
    """One for each element of an arithmetic result; a reduction: one for each element read."""
    if i.opcode in _ELEMENTWISE:
        return float(sum(s.elements for s in i.shapes))
    if i.opcode in ("reduce", "reduce-window"):
        return float(sum(s.elements for s in computation.operand_shapes(i)))
    return 0.0


def matmul_flops(computation: Computation, i: Instruction) -> float:
    """Floating-point operations of one dot, convolution or matmul call, 2 for each multiply-add; 0 for anything else."""
    if i.opcode == "dot":
        return _dot_flops(computation.operand_shapes(i), i.shapes, i.attribute("lhs_contracting_dims"))
    if i.opcode == "convolution":
        return _convolution_flops(computation.operand_shapes(i), i.shapes, i)
    if i.opcode == "custom-call":
        return _call_flops(computation, i)
    return 0.0


def is_convolution(i: Instruction) -> bool:
    """Whether its flops are those of a convolution; XLA:TPU writes dots as convolutions too."""
    return i.opcode == "convolution" or (i.opcode == "custom-call" and '"__cudnn$conv' in i.attributes)


def _dot_flops(operands: list[Shape], results: tuple[Shape, ...], contracting: str) -> float:
    dims = [int(d) for d in re.findall(r"\d+", contracting)]
    if not operands or not results or any(d >= len(operands[0].dims) for d in dims):
        return 0.0
    return 2.0 * results[0].elements * math.prod(operands[0].dims[d] for d in dims)


def _convolution_flops(operands: list[Shape], results: tuple[Shape, ...], i: Instruction) -> float:
    """As XLA's HloCostAnalysis: 2 × input features × output features × batch × window taps that meet real input, groups divided out."""
    labels = re.match(r"([^_]+)_([^-]+)->(\S+)", i.attribute("dim_labels"))
    if not labels or len(operands) < 2:
        return 0.0
    left, kernel, out = labels.groups()
    lhs, rhs, result = operands[0].dims, operands[1].dims, results[0].dims
    window = {key: [int(n) for n in re.findall(r"-?\d+", value)] for key, value in re.findall(r"(\w+)=([\dx_\-]+)", i.attribute("window"))}
    spatial = sorted(c for c in left if c.isdigit())
    ones = [1] * len(spatial)
    strides, dilations, window_dilations = (window.get(key, ones) for key in ("stride", "lhs_dilate", "rhs_dilate"))
    padding = window.get("pad", [0, 0] * len(spatial))
    taps = 1.0
    for k, label in enumerate(spatial):
        sizes = lhs[left.index(label)], rhs[kernel.index(label)], result[out.index(label)]
        taps *= _taps(*sizes, strides[k], padding[2 * k], dilations[k], window_dilations[k])
    groups = int(i.attribute("feature_group_count") or 1) * int(i.attribute("batch_group_count") or 1)
    return 2.0 * taps * lhs[left.index("f")] * result[out.index("f")] * lhs[left.index("b")] / groups


@lru_cache(maxsize=4096)
def _taps(size: int, window: int, results: int, stride: int, pad_low: int, dilate: int, window_dilate: int) -> int:
    """Pairs (output position, window position) of one spatial dimension that meet an element of the undilated, unpadded input."""
    first = np.arange(results, dtype=np.int64) * stride - pad_low
    count = 0
    for tap in range(window):
        at = first + tap * window_dilate
        count += int(((at >= 0) & (at <= (size - 1) * dilate) & (at % dilate == 0)).sum())
    return count


def _as_forward(operands: list[Shape], results: tuple[Shape, ...], i: Instruction) -> tuple[list[Shape], tuple[Shape, ...]]:
    """Input and kernel, and result, of the convolution whose gradient a cuDNN call is: its window and labels are those of that."""
    if "convBackwardInput" in i.attributes:
        return [results[0], *operands[1:]], (operands[0],)
    if "convBackwardFilter" in i.attributes:
        return [operands[0], results[0]], (operands[1],)
    return operands, results


def _call_flops(computation: Computation, i: Instruction) -> float:
    stated = re.search(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', i.attributes)  # Pallas kernels may say it
    if stated:
        return float(stated.group(1))
    if not _MATMUL_CALLS.search(i.attributes):
        return 0.0
    operands = computation.operand_shapes(i)
    if i.attribute("dim_labels"):
        return _convolution_flops(*_as_forward(operands, i.shapes, i), i)
    stated = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.attributes)
    last = str(len(operands[0].dims) - 1) if operands else ""
    return _dot_flops(operands, i.shapes, stated.group(1) if stated else last)
