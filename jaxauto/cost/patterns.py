"""What equations look like that the TPU compiler fuses in ways of its own, read off its schedules.

Those of scripts/results/softmax.md and softmax_in_both_passes.md, and a few more by hand: head dimensions between 64 and 127, rows of
8,192 and 32,768, matrices and dimensions of one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from jaxauto.core import Kind, Node, OpRule, Value
from jaxauto.flow import is_widening

ROW = 4096  # elements: a softmax over as many does not fuse with the dot that makes its operand
LONG = 4096  # elements: over more it writes no exp either
_LANES, _SUBLANES = 128, 8
DEPTH = 112  # elements of a head dimension: seen fused up to here, apart from 127 on
# XLA:TPU makes a value in each dot that reads it where that moves less than this share of the bytes of writing it once. What takes long it
# makes again where the vector unit does many operations while HBM moves a byte: on v5e (7.5), not on v5p (5.2): bench_shared.py
_WORTH, _WORTH_SLOW, _QUICK = 1.05, 0.77, 6.0


def sums_later(node: Node) -> bool:
    """A dot that does not wait for the sum of its rows: over a long head dimension, or by a weight, whatever that is."""
    if node.prim != "dot_general":
        return False
    (contracted, _), (batch, _) = node.params["dimension_numbers"]
    return not batch or math.prod(node.eqn.invars[0].aval.shape[d] for d in contracted) > DEPTH


def is_flat(value: Value) -> bool:
    """Scores that are a matrix or have a dimension of one element."""
    return len(value.shape) < 3 or 1 in value.shape


def is_strided(node: Node) -> bool:
    """A slice or pad that moves elements apart or together, which the compiler fuses with nothing."""
    if node.prim == "slice":
        return max(node.params["strides"] or (1,)) > 1
    return node.prim == "pad" and any(inside for _, _, inside in node.params["padding_config"])


def slides(node: Node) -> bool:
    """A convolution with a window of more than one element, or the gradient in such a kernel: it makes what it reads from what that is
    made of, whatever that takes."""
    return node.prim == "conv_general_dilated" and min(window_and_result(node)) > 1


def window_and_result(node: Node) -> tuple[int, int]:
    """Places in the window of a convolution, and in its result for each image and feature."""
    numbers = node.params["dimension_numbers"]
    window, result = (
        math.prod(value.aval.shape[d] for d in spec[2:])
        for value, spec in ((node.eqn.invars[1], numbers.rhs_spec), (node.eqn.outvars[0], numbers.out_spec))
    )
    return window, result


def lanes_filled(node: Node) -> float:
    """By how much tiles enlarge the largest array of a convolution, of which batch or features are minor (``layout.py``)."""
    if node.prim != "conv_general_dilated":
        return 1.0
    specs, values = node.params["dimension_numbers"], (*node.eqn.invars[:2], node.eqn.outvars[0])
    largest, spec = max(((v.aval, spec) for v, spec in zip(values, specs, strict=True)), key=lambda pair: pair[0].size)
    return min(-(-largest.shape[d] // _LANES) * _LANES / largest.shape[d] for d in spec[:2])


def is_softmax(value: Value, sums: Sequence[Node]) -> bool:
    """An exp (``sums``: its users that reduce it) whose sum is needed before it is used again; dots make it again each for itself.

    So is the gradient of a loss over a vocabulary, unless something wants it in memory.
    """
    return 0 < len(sums) < len(value.users)


def is_shifted(value: Value, values: Mapping[int, Value]) -> bool:
    """The exp of what a smaller array was subtracted from: a softmax made again whose sums are kept. Dots make it each for itself."""
    node = value.producer
    below = values[node.inputs[0]].producer if node is not None and node.prim == "exp" and isinstance(node.inputs[0], int) else None
    if below is None or below.prim != "sub" or not isinstance(below.inputs[1], int):
        return False
    shift = values[below.inputs[1]]
    return shift.elements < value.elements or (shift.producer is not None and shift.producer.prim == "broadcast_in_dim")


def is_spread_twice(value: Value, roots: Iterable[int], values: Mapping[int, Value]) -> bool:
    """Whether two or more numbers for each row go into a value, as into a norm's result and its gradient."""
    rows = value.shape[:-1]
    return len(rows) > 0 and sum(values[r].shape in (rows, (*rows, 1)) for r in roots) > 1


def is_turned(value: Value, roots: Iterable[int], values: Mapping[int, Value]) -> bool:
    """Rows that a dot reads beside what a loop stacks, in another order of dimensions than that: it does not make them itself.

    Sums of rows fill the lanes with a dimension that does, and lay the rows by it; stacks of a loop lie as they come.
    """
    if len(value.shape) < 3 or not value.shape[-2] < _LANES <= value.shape[-3]:
        return False
    summed = any(values[r].shape == value.shape[:-1] for r in roots)
    dots = [user for user in value.users if user.prim == "dot_general"]
    read = (values[x].producer for dot in dots for x in dot.inputs if isinstance(x, int) and x != value.id)
    made = (user for dot in dots for out in dot.outputs for user in values[out].users)
    return summed and any(node is not None and node.bodies for node in (*read, *made))


def is_of_images(value: Value, user: Node, roots: Iterable[int], values: Mapping[int, Value]) -> bool:
    """Rows of images that a dot reads, made of what a convolution makes.

    XLA:TPU lays a convolution's images by rows and columns, then by batch, and a dot's operand by its rows, unless that pads them: what is
    between is written, in the convolution's order. Seen in ConvNeXts: of 56 columns it is, of 28, which make no whole tiles, it is not.
    """
    if user.prim != "dot_general" or len(value.shape) < 4 or value.shape[-2] % _SUBLANES:
        return False
    made = (values[r].producer for r in roots if values[r].shape == value.shape)
    return any(node is not None and node.prim == "conv_general_dilated" for node in made)


def is_narrowed_image(value: Value, user: Node, values: Mapping[int, Value]) -> bool:
    """Whether a value is an argument narrowed for a convolution with a window: XLA:TPU copies it to the order that convolutions have."""
    node = value.producer
    narrows = node is not None and node.prim == "convert_element_type" and isinstance(node.inputs[0], int)
    if node is None or not narrows or not slides(user) or value.id != user.inputs[0]:
        return False
    source = values[node.inputs[0]]
    return source.producer is None and source.dtype.itemsize > value.dtype.itemsize


def _longest(value: Value, sums: Sequence[Node]) -> float:
    """How many elements the longest row has."""
    return max(value.elements / max(1, user.eqn.outvars[0].aval.size) for user in sums)


def keeps_exp(value: Value, roots: Iterable[int], sums: Sequence[Node], values: Mapping[int, Value]) -> bool:
    """Whether the exp of a softmax is written with its sums, for the second pass to read. Else both passes make it from the scores.

    So do dots of the forward pass and of the backward pass where all as large that it is made of (``roots``) is of a narrower type, if it
    is shifted as it is widened. If it is scaled or masked between, so they do where the scores come out of their dot with dimensions in
    another order (grouped queries): XLA:TPU moves that to where they are used, and each pass has an exp of its own.
    """
    if _longest(value, sums) > LONG or is_flat(value):
        return False
    narrow = _is_widened(value, roots, values) and len(_passes(value, values)) > 1
    return not (narrow and _is_cheap(value, values))


def is_written_wide(value: Value, roots: Iterable[int], values: Mapping[int, Value]) -> bool:
    """Whether an exp that is made again of narrow scores (``is_shifted``) is written all the same, for several to read."""
    return len(value.users) > 1 and not is_flat(value) and _is_widened(value, roots, values) and not _is_cheap(value, values)


def _is_widened(value: Value, roots: Iterable[int], values: Mapping[int, Value]) -> bool:
    """Whether all as large that a value is made of is of a narrower type."""
    wide = [values[r].dtype.itemsize for r in roots if values[r].elements == value.elements]
    return bool(wide) and max(wide) < value.dtype.itemsize


def _is_cheap(value: Value, values: Mapping[int, Value]) -> bool:
    """Whether each reader makes the exp of scores that are widened: shifted as they are, or in another order of dimensions."""
    return _is_shifted_as_widened(value, values) or any(node.prim == "transpose" for node in _above(value, values))


def _is_shifted_as_widened(value: Value, values: Mapping[int, Value]) -> bool:
    node, shifted = value.producer, None
    if node is not None and isinstance(node.inputs[0], int) and (below := values[node.inputs[0]].producer) is not None:
        shifted = values[below.inputs[0]].producer if isinstance(below.inputs[0], int) else None
    return shifted is None or is_widening(shifted, values)


def _above(value: Value, values: Mapping[int, Value]) -> Iterator[Node]:
    """What makes a value, and all as large that this is made of, from the last dot on, or from what is in memory."""
    waiting, seen = [value], {value.id}
    while waiting:
        node = waiting.pop().producer
        if node is None or node.prim in ("dot_general", "optimization_barrier"):
            continue
        yield node
        made = [values[x] for x in node.inputs if isinstance(x, int) and x not in seen and values[x].elements == value.elements]
        seen.update(x.id for x in made)
        waiting += made


def _passes(value: Value, values: Mapping[int, Value]) -> set[bool]:
    """Of which passes the dots are that read a value or what is made of it alone with nothing less wide: forward, backward."""
    found: set[bool] = set()
    waiting, seen = [value], {value.id}
    while waiting:
        for user in waiting.pop().users:
            if user.prim == "dot_general":
                found.add(user.backward)
                continue
            made = [values[x] for x in user.outputs if x not in seen and values[x].elements >= value.elements and not user.bodies]
            seen.update(x.id for x in made)
            waiting += made
    return found


def makes_view(node: Node, rules: Mapping[int, OpRule]) -> bool:
    """Whether a node makes a view of its operand, or that transposed."""
    return bool(node.inputs) and node.id in rules and (rules[node.id].kind is Kind.VIEW or node.prim == "transpose")


def is_bound(value: Value) -> bool:
    """Whether a value enters or leaves a loop or passes a barrier: XLA:CPU does not change its type."""
    return is_given(value) or any(u.bodies or u.prim == "optimization_barrier" for u in value.users)


def is_given(value: Value) -> bool:
    """Whether a value is an argument, also of a loop's body, or comes out of a loop."""
    return value.producer is None or bool(value.producer.bodies)


def pads_for_dots(node: Node, values: Mapping[int, Value]) -> bool:
    """Whether dots read what ``node`` pads, maybe narrowed: XLA:TPU fuses the padding, not what is padded."""
    if node.prim != "pad":
        return False
    users = values[node.outputs[0]].users
    users = [w for u in users for w in (values[u.outputs[0]].users if u.prim == "convert_element_type" else [u])]
    return any(user.prim == "dot_general" for user in users)


def is_only_narrowed(value: Value, values: Mapping[int, Value]) -> bool:
    """Whether all that is done with a value is to make half as many bytes of it."""
    size = value.dtype.itemsize
    halves = (u.prim == "convert_element_type" and 2 * values[u.outputs[0]].dtype.itemsize == size for u in value.users)
    return bool(value.users) and all(halves)


def is_shared(
    value: Value,
    roots: frozenset[int],
    values: Mapping[int, Value],
    dots: int,
    *,
    narrowed: Set[int] = frozenset(),
    unread: Set[int] = frozenset(),
    unwritten: Set[int] = frozenset(),
    dear: bool = False,
    ops_per_byte: float = 0.0,
) -> bool:
    """Whether several dots read a value from memory: making it in each takes long, or moves more.

    Args:
      narrowed: values that are written in half their bytes.
      unread, unwritten: those of ``roots`` that are not read for the value, and not written, if it is written (``Clusters.made_with``).
      dear: it takes long: a transcendental is part of it, a quotient or numbers for each row (``is_spread_twice``).
      ops_per_byte: what the vector unit does while HBM moves a byte.
    """
    if is_turned(value, roots, values):
        return True
    wide, read, spared = (sum(values[r].nbytes / (1 + (r in narrowed)) for r in rs) for rs in (roots, roots - unread, unwritten))
    again, once = dots * wide + spared, read + (dots + 1) * value.nbytes
    return again > (_WORTH_SLOW if dear and ops_per_byte <= _QUICK else _WORTH) * once
