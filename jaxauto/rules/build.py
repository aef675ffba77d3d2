"""From lists of dimensions to an ``OpRule``: what every family of rules is written with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from jaxauto.core import Kind, OpRule
from jaxauto.rules.registry import Eqn, Var, shape_of

Dim = str | tuple[str, ...] | None  # a factor, a product of factors (major first), or whole


def names(count: int, prefix: str = "") -> list[str]:
    """``count`` different factor names: a, b, c, …; with a prefix: x0, x1, …"""
    if prefix:
        return [f"{prefix}{i}" for i in range(count)]
    return [chr(ord("a") + i) if i < 26 else f"a{i}" for i in range(count)]


def build(
    eqn: Eqn,
    operands: Iterable[Sequence[Dim]],
    results: Iterable[Sequence[Dim]],
    *,
    kind: Kind,
    reduce: Mapping[str, str] | None = None,
    whole: Iterable[str] = (),
    halo: Mapping[str, int] | None = None,
    sizes: Mapping[str, int] | None = None,
    flops: float | None = None,
    bytes_: float | None = None,
) -> OpRule:
    """The rule with these dimensions: those of size 1 (or 0) become ``_``, and annotations of factors that are gone go too.

    Args:
      eqn: the equation, for its shapes.
      operands: for each operand, its dimensions.
      results: for each result, its dimensions.
      kind: as in ``OpRule``, like all that follow.
      reduce: how factors are reduced.
      whole: factors that must not be sharded.
      halo: borders of factors.
      sizes: of factors inside products.
      flops: of the whole equation.
      bytes_: that it touches.
    """
    sizes = dict(sizes or {})
    left = [_shrunk(dims, var, sizes) for dims, var in zip(operands, eqn.invars, strict=True)]
    right = [_shrunk(dims, var, sizes) for dims, var in zip(results, eqn.outvars, strict=True)]
    present = {f for value in (*left, *right) for dim in value for f in dim}
    return OpRule(
        f"{', '.join(map(_text, left))} -> {', '.join(map(_text, right))}",
        reduce={f: how for f, how in (reduce or {}).items() if f in present},
        whole=frozenset(f for f in whole if f in present),
        halo={f: n for f, n in (halo or {}).items() if f in present},
        sizes={f: n for f, n in sizes.items() if f in present},
        flops=flops,
        bytes_=bytes_,
        kind=kind,
    )


def _shrunk(dims: Sequence[Dim], var: Var, sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    shape = shape_of(var)
    if len(dims) != len(shape):
        raise ValueError(f"{len(dims)} dimensions {dims} for shape {shape}")
    out = []
    for dim, size in zip(dims, shape, strict=True):
        factors = () if dim is None or size <= 1 else (dim,) if isinstance(dim, str) else dim
        out.append(tuple(f for f in factors if sizes.get(f, 2) > 1))
    return out


def _text(value: list[tuple[str, ...]]) -> str:
    return " ".join("_" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in value)


def elements(var: Var) -> int:
    """Number of elements."""
    return math.prod(shape_of(var))


def array_bytes(var: Var) -> float:
    """Bytes of an operand or result."""
    return float(elements(var) * getattr(getattr(var.aval, "dtype", None), "itemsize", 0))
