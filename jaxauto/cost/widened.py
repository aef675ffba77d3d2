"""What XLA:CPU writes to memory, read off its schedules (without its library's fusions: ``targets/compilers.py``).

Its kernels compute in float32: what is narrow is widened as it is read and rounded as it is made. Rounding is dear
(cpu_instruction_fusion.cc, IsExpensive): where several read a result it is kept rounded. But where the program widens it itself, what was
made in float32 is kept, and rounded by each of the others that reads it. Dots and convolutions read arrays: a float32 copy of each narrow
operand, in the order of dimensions that they want; of what dots alone read, and all in one order, nothing but that copy is made. Their
results are rounded after them, or by what reads them if there is but one that does. A reduction over many elements is made in steps, and
reads an array too. Random bits are made by a loop (of Threefry's rounds).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxauto import compat
from jaxauto.core import MATRIX, Graph, Kind, Node, OpRule, Value
from jaxauto.cost.liveness import Buffers
from jaxauto.cost.patterns import makes_view
from jaxauto.graph import walk
from jaxauto.masks import hashes

NARROW = frozenset({"bfloat16", "float16"})
WIDE = 4  # bytes
_ELEMENTWISE = frozenset({Kind.CHEAP, Kind.EXPENSIVE})
_ALONE = MATRIX | _ELEMENTWISE | {Kind.VIEW, Kind.MOVE, Kind.REDUCE}  # what reads a copy of its own, or makes what it reads
_STEP = 32  # elements that one step of a reduction reduces (tree_reduction_rewriter.cc)


class Rounded:
    """The choices of one program.

    Attributes:
      passed: values that dots and other operations read as arrays. again: those that every fusion makes for itself.
      made_of: powers → the squares that they are made of.
    """

    def __init__(self, kind_of: Callable[[Node], Kind], values: Mapping[int, Value]):
        self.kind_of, self.values = kind_of, values
        self.passed: set[int] = set()
        self.again: set[int] = set()
        self.made_of: dict[int, tuple[int, ...]] = {}

    def bytes_of(self, value: Value, readers: float) -> float:
        """Bytes of a value's buffer, of no argument's, result's or loop's; ``readers``: fused equations that read it."""
        if value.producer is not None and hashes(value.producer):
            return 2.0 * value.nbytes  # two words for each
        return float(WIDE * value.elements if is_narrow(value) and self._stays_wide(value, readers) else value.nbytes)

    def is_made_once(self, node: Node, value: Value) -> bool:
        """Whether a result is made once for all that read it, as transcendentals are: a quotient, or what has to be rounded."""
        if node.prim == "div":
            return jnp.issubdtype(value.dtype, jnp.floating) and isinstance(node.inputs[1], int)
        return is_narrow(value) and (self.kind_of(node) is Kind.CHEAP or node.prim == "convert_element_type")

    def _stays_wide(self, value: Value, readers: float) -> bool:
        if value.producer is not None and self.kind_of(value.producer) in MATRIX:
            return (readers <= 1 and value.id not in self.passed) or self.is_wide_alone(value)
        return any(map(_widens, value.users)) or self._is_read_in_one_order(value.users, value.id)

    def is_wide_alone(self, value: Value) -> bool:
        """Whether all that read the result of a dot widen it, also past a barrier: the select there rounds it as it reads it."""
        made = value.producer
        if made is None or self.kind_of(made) not in MATRIX or not (len(value.shape) == 2 or made.prim == "conv_general_dilated"):
            return False  # others are reshaped, and rounded for that
        return all(map(_widens, self._readers(value)))

    def _readers(self, value: Value) -> Iterator[Node]:
        for user in value.users:
            if user.prim == "optimization_barrier":
                yield from self._readers(self.values[user.outputs[user.inputs.index(value.id)]])
            else:
                yield user

    def is_copy(self, value: Value) -> bool:
        """Whether a value is written as the copy that dots read: made elementwise, for them alone, or anew for each of the others."""
        made = value.producer
        if made is None or self.kind_of(made) not in _ELEMENTWISE:
            return False
        again = value.id in self.again
        return self._is_read_in_one_order([u for u in value.users if not again or self.kind_of(u) in MATRIX], value.id)

    def is_part_of_a_power(self, value: Value) -> bool:
        """Whether a square is rounded for a higher power of the same too, which is made of it (the derivative of a GELU's cube)."""
        made = value.producer
        if made is None or _power(made) != 2 or not is_narrow(value) or not isinstance(of := made.inputs[0], int):
            return False
        higher = [user.outputs[0] for user in self.values[of].users if _power(user) > 2]
        self.made_of.update(dict.fromkeys(higher, (value.id,)))
        return bool(higher)

    def makes_again(self, value: Value) -> bool:
        """Whether each fusion that reads a value makes it for itself, a copy in another order too; from then on it is known."""
        made = value.producer
        if made is None or self.kind_of(made) is not Kind.CHEAP or self.is_made_once(made, value):
            return False
        if not all(self.kind_of(u) in _ALONE and (u.backward or u.prim != "optimization_barrier") for u in value.users):
            return False
        self.again.add(value.id)
        return True

    def reads(self, node: Node, value: Value) -> bool:
        """Whether an operation reads the array that is written of a value, not a copy in another order that is made for it."""
        places = [k for k, x in enumerate(node.inputs) if x == value.id]
        return self.is_copy(value) or self.kind_of(node) not in MATRIX or any(order(node, k) == () for k in places)

    def _is_read_in_one_order(self, users: list[Node], number: int) -> bool:
        """Whether all of ``users`` are dots that read a value in one order."""
        orders = {order(u, k) for u in users if self.kind_of(u) in MATRIX for k, x in enumerate(u.inputs) if x == number}
        return len(orders) == 1 and all(self.kind_of(u) in MATRIX for u in users)


def is_merged(value: Value) -> bool:
    """Whether a dot writes its result with fewer dimensions than the program has there: those of each operand that are left are one."""
    made = value.producer
    if made is None or made.prim != "dot_general":
        return False
    contracted, batch = made.params["dimension_numbers"]
    return any(v.aval.ndim - len(c) - len(b) > 1 for v, c, b in zip(made.eqn.invars, contracted, batch, strict=True))


def is_narrow(value: Value) -> bool:
    """Whether XLA:CPU computes a value in another type than its own."""
    return compat.dtype_name(value.dtype) in NARROW


def order(node: Node, place: int) -> tuple[int, ...]:
    """The order of dimensions that a dot or convolution has its operand copied into; () for that which it has.

    A matrix's rows and columns may lie in any. A convolution wants the batch first and the features last, in its kernel those that it makes
    (conv_canonicalization.cc); that of a kernel's gradient has the features for its batch. Dimensions of one element have no place.
    """
    shape = node.eqn.invars[place].aval.shape
    if node.prim == "conv_general_dilated":
        first, second, *space = node.params["dimension_numbers"][place]  # batch and features; features made and read
        parts = [first, *space, second] if place == 0 else [*space, second, first]
    elif node.prim == "dot_general" and len(shape) > 2:
        contracted, batch = (sides[place] for sides in node.params["dimension_numbers"])
        free = [d for d in range(len(shape)) if d not in contracted and d not in batch]
        parts = [*batch, *free, *contracted] if place == 0 else [*batch, *contracted, *free]
    else:
        return ()
    wanted = tuple(d for d in parts if shape[d] > 1)
    return () if all(a < b for a, b in pairwise(wanted)) else wanted


def is_in_steps(node: Node) -> bool:
    """Whether a reduction reads an array that is made for it."""
    shape = node.eqn.invars[0].aval.shape if node.prim.startswith("reduce_") else ()
    return any(shape[d] > _STEP for d in node.params.get("axes", ()) if shape)


def _power(node: Node) -> int:
    return 2 if node.prim == "square" else node.params.get("y", 0) if node.prim == "integer_pow" else 0


def _widens(node: Node) -> bool:
    return node.prim == "convert_element_type" and str(node.eqn.outvars[0].aval.dtype) in ("float32", "float64")


class Copy(NamedTuple):
    """A float32 copy of operand ``place`` of a dot, the last that shares it, there from ``begin`` to ``end``."""

    node: Node
    place: int
    begin: int
    end: int


class Result(NamedTuple):
    """Result ``place`` of a dot, which is rounded after it; ``gone``: which copies are gone by then."""

    node: Node
    place: int
    at: int
    gone: tuple[int, ...]


def beside_dots(dots: Iterable[Node], values: Mapping[int, Value], buffers: Buffers, view: Callable) -> tuple[list[Copy], list[Result]]:
    """What dots and convolutions have in float32 beside buffers.

    Args:
      dots: those of the program, in its order. view: value → the one that it is a view of, up to one with a buffer.
    """
    sizes = {int(number): float(bytes_) for number, bytes_ in zip(buffers.ids, buffers.bytes_, strict=True)}
    found: dict[tuple, Copy] = {}
    read: dict[int, list[tuple]] = defaultdict(list)  # dot → the copies that it reads
    placed = sorted(((node, buffers.position[node.id]) for node in dots if node.id in buffers.position), key=lambda pair: pair[1])
    for node, at in placed:
        for k, x in enumerate(node.inputs):
            if (number := view(x)) not in sizes:
                continue
            if number in buffers.copies:
                continue
            key = number, (wanted := order(node, k))
            if wanted or (is_narrow(values[x]) and sizes[number] < WIDE * values[number].elements):
                begin = found[key].begin if key in found else at
                found[key] = Copy(node, k, begin, at)
                read[node.id].append(key)
    places = {key: k for k, key in enumerate(found)}
    results = [
        Result(node, k, at, tuple(places[key] for key in read[node.id] if found[key].end == at))
        for node, at in placed
        for k, x in enumerate(node.outputs)
        if is_narrow(values[x]) and sizes.get(x, math.inf) < WIDE * values[x].elements
    ]
    return list(found.values()), results


def live_beside_dots(graph: Graph, rules: Mapping[int, OpRule], buffers: Buffers) -> np.ndarray:
    """Bytes of it at each position, of a program on one device."""
    values, held = graph.values, frozenset(buffers.ids.tolist())

    def view(number: Any) -> Any:
        while isinstance(number, int) and number not in held and (node := values[number].producer) is not None and makes_view(node, rules):
            number = node.inputs[0]
        return number

    dots = (node for node in walk(graph) if node.id in rules and rules[node.id].kind in MATRIX)
    copies, results = beside_dots(dots, values, buffers, view)
    sizes = [WIDE * values[c.node.inputs[c.place]].elements for c in copies]
    live = np.zeros(buffers.length)
    for c, size in zip(copies, sizes, strict=True):
        live[c.begin : c.end + 1] += size
    for node, place, at, gone in results:
        live[at] += beside_result(WIDE * values[node.outputs[place]].elements, sum(sizes[k] for k in gone))
    return live


def beside_result(made: Any, gone: Any) -> Any:
    """Bytes of a result beside what is counted: it lies beside its copies, then beside itself rounded, which has a buffer."""
    return made - np.minimum(made / 2, gone)
