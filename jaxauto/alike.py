"""Equal equations are made once, as compilers make them (XLA's HloCSE).

``x.astype(bfloat16)`` stands wherever x is used: every layer of flax with a ``dtype`` narrows its input itself, so query, key and value
have three equal operands. Each is a residual of its own, and a stack of its own where layers are scanned; compilers keep one.

What hangs on arguments and constants alone (masks, positions, narrowed weights) stays as written: compilers make it inside whatever reads
it, and layers that each make their own stay alike, so that they are planned once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jaxauto import compat
from jaxauto.core import Literal, Node

# Made from arguments and constants by these alone, a value is cheap to make again and belongs to whoever uses it.
# fmt: off
SOURCES = frozenset([
    "abs", "add", "and", "bitcast_convert_type", "broadcast", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy",
    "copy_p", "cos", "div", "dynamic_slice", "eq", "erf_inv", "exp", "expand_dims", "ge", "gt", "imag", "integer_pow", "iota",
    "is_finite", "le", "log", "log1p", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "random_bits",
    "random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap", "real", "reduce_precision", "rem", "reshape", "rev",
    "rsqrt", "select_n", "shift_left", "shift_right_logical", "sign", "sin", "slice", "split", "sqrt", "square", "squeeze",
    "stop_gradient", "sub", "threefry2x32", "transpose", "xor",
])
# fmt: on
# Two of these are two on purpose, or do more than their results say.
_APART = frozenset(["optimization_barrier", "pallas_call", "custom_call", "ffi_call", "shard_map", "custom_partitioning"])


class Alike:
    """The equations of one graph, known by what they make.

    Args:
      late: inputs of the graph that are no arguments or constants: what the trips of a loop bring.
    """

    def __init__(self, late: set[int]):
        self.late = late
        self.made: dict[Hashable, Node] = {}

    def key(self, eqn: Any, inputs: tuple[int | Literal, ...], side: tuple[bool, bool]) -> Hashable | None:
        """What ``eqn`` makes. None: it is made as often as it is written. ``side``: (of the backward pass, made again)."""
        if eqn.effects or eqn.primitive.name in _APART or self.late.isdisjoint(x for x in inputs if isinstance(x, int)):
            return None
        operands = tuple(x if isinstance(x, int) else _of_literal(x) for x in inputs)
        key = eqn.primitive.name, side, operands, tuple(sorted(eqn.params.items())), compat.context(eqn)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def add(self, node: Node, key: Hashable | None) -> None:
        """Remember a node of the graph, and what it makes."""
        if node.prim not in SOURCES or not self.late.isdisjoint(x for x in node.inputs if isinstance(x, int)):
            self.late.update(node.outputs)
        if key is not None and not node.bodies:
            self.made[key] = node


def repeated(values: Sequence[int | Literal]) -> dict[int, int]:
    """Positions of values that stand before → where they stand first."""
    first: dict[int, int] = {}
    return {k: first[x] for k, x in enumerate(values) if isinstance(x, int) and first.setdefault(x, k) != k}


def _of_literal(literal: Literal) -> Hashable:
    value = np.asarray(literal.value)
    return str(value.dtype), value.shape, value.tobytes()
