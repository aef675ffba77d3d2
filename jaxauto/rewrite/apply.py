"""A plan's decisions on a graph: what is recomputed, and where arrays are pinned to shardings. The only user of with_sharding_constraint.

GSPMD and Shardy propagate what they are told and guess the rest; parameters' shardings alone make them guess wrong. So every result of
an operation, every operand of one, every loop input and both ends of every resharding are pinned, but for results that can only be sharded
as planned (``implied.py``).
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxauto import compat
from jaxauto.core import Decisions, Graph, Node, Sharding
from jaxauto.graph import walk
from jaxauto.masks import kept_masks
from jaxauto.rewrite import for_gpu, implied
from jaxauto.rewrite.evaluate import Pins, evaluator
from jaxauto.rewrite.offload import offload
from jaxauto.rewrite.order import SCATTERS, habits_of, in_order
from jaxauto.rewrite.passage import bring
from jaxauto.rewrite.program import Rewritten
from jaxauto.rewrite.recompute import recompute
from jaxauto.rewrite.sink import sink
from jaxauto.swapped import turned

_FOLLOWED = 64  # values made of a gradient that are looked at
_SUBLANES, _LANES = 8, 128  # of a TPU's tiles


def partition_spec(sharding: Sharding) -> PartitionSpec:
    """``(("data",), (), ("model",))`` → ``P("data", None, "model")``, without trailing Nones."""
    parts = [None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in sharding]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def apply(graph: Graph, decisions: Decisions, mesh: Any, platform: str = "") -> Callable:
    """The function of flat arrays that runs ``graph`` as decided; to be jitted with the plan's shardings.

    Args:
      platform: whose compiler it is for, where ``mesh`` is abstract: ``"tpu" | "gpu" | "cpu"``.
    """
    chosen = {b: kept for b, kept in enumerate(decisions.kept) if kept is not None}
    pressed = bool(chosen or decisions.splits)
    made_again = recompute(graph, chosen, decisions.remade, splits=decisions.splits) if pressed else Rewritten(graph, {})
    rewritten = offload(made_again, decisions.offloaded)
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else platform
    if decisions.in_order is not None:
        rewritten = in_order(rewritten, decisions.in_order, habits_of(platform, mesh.size, pressed=pressed), short=decisions.short)
    rewritten = sink(rewritten)
    return evaluator(rewritten.graph, _Constraints(decisions, mesh, rewritten, platform))


class _Constraints(Pins):
    def __init__(self, decisions: Decisions, mesh: Any, rewritten: Rewritten, platform: str):
        self.decisions, self.mesh, self.host = decisions, mesh, rewritten.host
        self.origin, self.stacked, self.values = rewritten.origin, rewritten.stacked, rewritten.graph.values
        self.on_cpu, self.on_gpu = platform == "cpu", platform == "gpu"
        self.late = {x for node in walk(rewritten.graph) if node.backward for x in node.outputs} if self.on_cpu else set()
        self.orders = _told_their_layout(rewritten, decisions, dict(mesh.shape)) if platform == "tpu" and mesh.size > 1 else {}
        self.drawn = kept_masks(rewritten.graph) if platform == "tpu" else set()

    def barrier(self, arrays: list, numbers: Sequence = ()) -> list:
        if not self.on_cpu:
            return super().barrier(arrays)
        return after_last(arrays, {k for k, number in enumerate(numbers) if number in self.late})

    def instead(self, node: Node, operands: list) -> list | None:
        return for_gpu.instead(node, operands, self.values, self.value) if self.on_gpu else None

    def begin(self, node: Node, operands: list) -> tuple[Any, list]:
        return for_gpu.begin(node, operands, self.values) if self.on_gpu else (None, operands)

    def pinned(self, array: Any, sharding: Sharding, *, stacked: bool = False) -> Any:
        if self.mesh.size == 1 or array.ndim != len(sharding) + stacked or jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            return array
        spec = partition_spec(((),) * stacked + sharding)
        return lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

    def value(self, number: int, array: Any) -> Any:
        if number in self.host:  # pinned, it would have to be on the device
            return array
        origin = self.origin.get(number, number)
        stacked = number in self.stacked
        made, kept = self.decisions.made.get(origin), self.decisions.values.get(origin)
        if kept is not None and (stacked or self._is_passed(number)):  # it has been brought there already
            made = None
        if not stacked and made in (None, kept) and self._is_implied(number, kept) and not self._leaves(number, kept):
            made = kept = None
        array = array if made is None else self.pinned(array, made, stacked=stacked)
        if made is not None and kept is not None and len(made) == len(kept):
            array = bring(array, made, kept, dict(self.mesh.shape), self.pinned)
        array = array if kept is None else self.pinned(array, kept, stacked=stacked)
        array = lax.optimization_barrier(array) if number in self.drawn else array
        if number not in self.orders:
            return array
        order, sharding = self.orders[number]
        return compat.laid_out(array, order, self.mesh, partition_spec(sharding))

    def _is_passed(self, number: int) -> bool:
        """Whether it is called as what another operation made, and has only come through a barrier."""
        node = self.values[number].producer
        return node is not None and node.prim == "optimization_barrier"

    def _is_implied(self, number: int, sharding: Sharding | None) -> bool:
        """Whether a dot of the backward pass has its result split over all devices by its operands alone. Of the forward pass they are
        pinned: they are joined with others, and propagation goes that way too (seen in a DLRM: its features were gathered)."""
        node = self.values[number].producer
        if sharding is None or node is None or node.prim != "dot_general" or not node.backward:
            return False
        lhs, rhs = (self._of_operand(node, index) for index in (0, 1))
        if lhs is None or rhs is None:
            return False
        return implied.is_over_all(sharding, self.mesh.shape) and implied.of_dot(node, lhs, rhs) == sharding

    def _leaves(self, number: int, sharding: Sharding | None) -> bool:
        """Whether a value, or what is made of it before the next pin, is brought to another sharding: a pin says from which. Without it the
        partitioner gathered all (a cotangent of an LSTM's inputs, scattered to an embedding that is split by features)."""
        waiting = deque([(number, sharding or ())])
        seen = {number}
        while waiting:
            x, here = waiting.popleft()
            for node in self.values[x].users if len(seen) < _FOLLOWED else ():
                first = next(iter(node.outputs), -1)
                name = self.origin.get(first, first)
                pins = (self.decisions.operands.get((name, k)) for k, y in enumerate(node.inputs) if y == x)
                if any(pin is not None and not implied.may_be_same(here, pin) for pin in pins):
                    return True
                free = [y for y in node.outputs if self.origin.get(y, y) not in self.decisions.values and y not in seen]
                waiting += [(y, implied.passed(node, here)) for y in free if not node.bodies]
                seen.update(free)
        return False

    def _of_operand(self, node: Node, index: int) -> Sharding | None:
        """What an operand is pinned to."""
        name, number = self.origin.get(node.outputs[0], node.outputs[0]), node.inputs[index]
        value = self.decisions.values.get(self.origin.get(number, number)) if isinstance(number, int) else None
        return self.decisions.operands.get((name, index), value)

    def operand(self, node: Node, index: int, array: Any, env: Mapping[int, Any]) -> Any:
        if not node.outputs or node.prim == "optimization_barrier":  # what it lets pass is called as what made that
            return array
        key = (self.origin.get(node.outputs[0], node.outputs[0]), index)
        sharding = self.decisions.operands.get(key)
        if sharding is None:
            return array
        if key in self.decisions.gathered_late:
            awaited = self._awaited(node, index, self.decisions.gathered_late[key])
            array = self.barrier([array] if awaited is None else [array, env[awaited]])[0]
        number = node.inputs[index]
        here = self.decisions.values.get(self.origin.get(number, number)) if isinstance(number, int) else None
        if here is not None and len(here) == len(sharding):
            array = bring(array, here, sharding, dict(self.mesh.shape), self.pinned)
        return self.pinned(array, sharding)

    def _awaited(self, node: Node, index: int, value: int | None) -> int | None:
        """What ``value`` is called in what the other operand of a node is made of; else that operand."""
        others = [x for k, x in enumerate(node.inputs) if k != index and isinstance(x, int)][:1]
        waiting, seen = deque(others if value is not None else ()), set(others)
        while waiting:
            number = waiting.popleft()
            if self.origin.get(number, number) == value:
                return number
            made = self.values[number].producer
            read = [] if made is None else [x for x in made.inputs if isinstance(x, int) and x not in seen]
            seen.update(read)
            waiting += read
        return others[0] if others else None


def _told_their_layout(rewritten: Rewritten, decisions: Decisions, mesh: Mapping[str, int]) -> dict[int, tuple[tuple[int, ...], Sharding]]:
    """Gradients that XLA:TPU would lay out otherwise than parameters, and then copies those and moments there and back for the update.

    A vocabulary's (``swapped.turned``), an embedding's, which is scattered into, where a device's part has fewer columns than fill tiles,
    and what leaves another dimension than the first: gathered, or exchanged for a part of that. But not where a device's part of that has
    a last dimension so short that most of each tile would be padding: weights split within a head.

    Returns:
      Value → the order of its dimensions in memory, major first, and its sharding.
    """
    values = rewritten.graph.values
    gradients = [x for node in rewritten.graph.nodes if node.backward for x in node.outputs if _leaves_backward(rewritten.graph, x)]
    inside = {x for x in gradients if _leaves_inside(decisions.made.get(x, ()), decisions.values.get(x, ()))}
    scattered = {n.outputs[0] for n in rewritten.graph.nodes if n.prim in SCATTERS}.intersection(gradients)
    told = {}
    for x in (known := {*turned(rewritten.graph), *inside}) | scattered:
        sharding = _sharding_of(rewritten, decisions, x) or ((),) * len(values[x].shape)
        pieces = [math.prod(mesh[a] for a in axes) for axes in sharding]
        part = [n // k for n, k in zip(values[x].shape, pieces, strict=True)]
        order = _compact(part)
        even = all(n % k == 0 for n, k in zip(values[x].shape, pieces, strict=True))  # parts alike, as a shard_map wants them
        otherwise = x in known or list(order) != sorted(order)  # what is scattered is written as its shape says
        if even and otherwise and (x not in inside or 2 * part[-1] >= _LANES):
            told[x] = order, sharding
    return told


def _compact(shape: Sequence[int]) -> tuple[int, ...]:
    """The order of dimensions in which XLA:TPU has a step's arguments: of the last two that which pads tiles less, else as written."""
    *major, rows, columns = range(len(shape))

    def padded(order: tuple[int, int]) -> int:
        return math.prod(-(-shape[d] // edge) * edge for d, edge in zip(order, (_SUBLANES, _LANES), strict=True))

    return *major, *min((rows, columns), (columns, rows), key=padded)


def _sharding_of(rewritten: Rewritten, decisions: Decisions, number: int) -> Sharding:
    """What a value is pinned to, or has of what it is a transpose of; (): neither is pinned."""
    own = decisions.values.get(rewritten.origin.get(number, number))
    node = rewritten.graph.values[number].producer
    if own is None and node is not None and node.prim == "transpose" and isinstance(x := node.inputs[0], int):
        own = implied.passed(node, decisions.values.get(rewritten.origin.get(x, x), ()))
    return own or ()


def _leaves_backward(graph: Graph, number: int) -> bool:
    """Whether nothing of the backward pass computes with a value: the optimizer has it, retyped at most."""
    users = graph.values[number].users
    return all(not u.backward or (u.prim == "convert_element_type" and _leaves_backward(graph, u.outputs[0])) for u in users)


def _leaves_inside(here: Sharding, there: Sharding) -> bool:
    """Whether axes leave a dimension of an array that is not its first."""
    return len(here) == len(there) and any(set(a) - set(b) for a, b in zip(here[1:], there[1:], strict=True))


def after_last(arrays: list, awaited: Set[int] = frozenset()) -> list:
    """A barrier that XLA:CPU respects: it drops ``optimization_barrier`` before it merges equal subexpressions.

    Every array passes through a select whose predicate is always true, reads the last floating-point array and those at ``awaited``, and
    cannot be folded: 0 · x is 0 or NaN, and neither is k. Each has its own: what reads two selects with one predicate is made before them,
    and merged. But what is in the host's memory, where nothing can be computed, passes as it is.
    """
    here = [k for k, x in enumerate(arrays) if not compat.is_in_host(x)]
    floating = [k for k in here if jnp.issubdtype(arrays[k].dtype, jnp.floating) and arrays[k].size]
    if not floating:
        return list(lax.optimization_barrier(tuple(arrays)))
    read = [arrays[k] for k in floating if k in awaited or k == floating[-1]]
    nothing = _written(functools.reduce(jnp.add, [0 * _first(x).astype(jnp.float32) for x in read]))
    return [_selected(nothing != k + 1, x) if k in here else x for k, x in enumerate(arrays)]


def _written(scalar: Any) -> Any:
    """The scalar, in memory: sorts are not fused. What goes into a fusion is made in each, and all that it is made of lies there for it."""
    bits = lax.bitcast_convert_type(scalar, jnp.int32)  # numbers are compared in more steps
    return lax.bitcast_convert_type(lax.sort(jnp.stack([bits, bits]))[0], scalar.dtype)


def _first(array: Any) -> Any:
    return lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(())


def _selected(always: Any, array: Any) -> Any:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_selected(always, jax.random.key_data(array)), impl=jax.random.key_impl(array))
    if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize == 2:  # as a number it would be rounded, and written for that
        return lax.bitcast_convert_type(_selected(always, lax.bitcast_convert_type(array, jnp.uint16)), array.dtype)
    return lax.select(jnp.broadcast_to(always, array.shape), array, jnp.zeros_like(array))
