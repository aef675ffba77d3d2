"""Graph → a function of flat arrays. Constraints are applied here: every stage before only changes the Graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxauto import compat
from jaxauto.core import Graph, Literal, Node, Window
from jaxauto.graph import FillEqn, TransferEqn


class Pins:
    """Where arrays are pinned to shardings while a graph is evaluated; this one pins nothing."""

    def value(self, number: int, array: Any) -> Any:  # noqa: ARG002
        """Called with every value as it is made, and with the initial carries of loops; returns the array, pinned or not."""
        return array

    def operand(self, node: Node, index: int, array: Any, env: Mapping[int, Any]) -> Any:  # noqa: ARG002
        """Called with every operand of every equation, right before it; ``env``: the arrays of values made so far."""
        return array

    def barrier(self, arrays: list, numbers: Sequence = ()) -> list:  # noqa: ARG002
        """Called for every optimization_barrier: lets ``arrays``, of these values, pass together."""
        return list(lax.optimization_barrier(tuple(arrays)))

    def instead(self, node: Node, operands: list) -> list | None:  # noqa: ARG002
        """Called with every equation: its results made another way that a compiler makes more of, or None."""
        return None

    def begin(self, node: Node, operands: list) -> tuple[Any, list]:  # noqa: ARG002
        """Called with the operands of every scan; returns a zero to fill its stacks with, or None, and the operands."""
        return None, operands


def evaluator(graph: Graph, pins: Pins | None = None) -> Callable:
    """A function of the graph's inputs (flat) that returns its outputs (flat list)."""
    pin = pins or Pins()

    def run(*arrays):
        return evaluate(graph, arrays, pin)

    return run


def evaluate(graph: Graph, arrays, pin: Pins, first: Any = 0) -> list:
    """Evaluate ``graph`` on ``arrays``; ``first``: the slice that the trip it is the body of begins with, see ``core.Window``."""
    env: dict[int, Any] = dict(graph.consts)
    for number, array in zip(graph.inputs, arrays, strict=True):
        env[number] = pin.value(number, array)
    for node in graph.nodes:
        operands = [_read(env, x) for x in node.inputs]
        operands = [
            x if isinstance(a, Literal) else pin.operand(node, k, x, env)
            for k, (a, x) in enumerate(zip(node.inputs, operands, strict=True))
        ]
        results = pin.instead(node, operands)
        if results is None:
            results = _EVALUATE.get(node.prim, _equation)(node, operands, pin, first)
        for number, result in zip(node.outputs, results, strict=True):
            env[number] = pin.value(number, result)
    return [_read(env, x) for x in graph.outputs]


def _read(env, x):
    return x.value if isinstance(x, Literal) else env[x]


def _equation(node: Node, operands: list, _: Pins, __: Any) -> list:
    return compat.bind(node.eqn, operands, node.scope)


def _scan(node: Node, operands: list, pin: Pins, first: Any) -> list:
    """Rebuilt with the public lax.scan: the parameters of the primitive differ between versions."""
    (body,) = node.bodies
    zero, operands = pin.begin(node, operands)
    consts, init, xs, stacks = _cut(operands, node.num_consts, node.num_carry, len(body.inputs) - node.num_consts - node.num_carry)
    window = node.window or Window(node.trips, 0)
    start, whole = first + window.first, [node.window is not None and x.shape[0] == window.whole for x in xs]

    ys = body.outputs[node.num_carry : len(body.outputs) - len(stacks)]
    late = [] if zero is None or node.window else [_filled(body, y, node.trips, zero) for y in ys]
    counted = node.window is not None or bool(late)

    def step(carry, x):
        (carry, stacks), (trip, slices) = carry, x
        at = start + trip * window.each if counted else 0
        cut = iter(slices)
        read = [lax.dynamic_index_in_dim(x, at, keepdims=False) if all_of_it else next(cut) for x, all_of_it in zip(xs, whole, strict=True)]
        results = evaluate(body, [*consts, *carry, *read], pin, at)
        carry, ys, over = _cut(results, node.num_carry, len(results) - node.num_carry - len(stacks))
        stacks = [lax.dynamic_update_index_in_dim(stack, y, at, 0) for stack, y in zip(stacks, over, strict=True)]
        return (carry, stacks), ys

    carries = body.inputs[node.num_consts : node.num_consts + node.num_carry]
    init = [pin.value(number, _as(body, number, array)) for number, array in zip(carries, init, strict=True)]
    given = (lax.iota("int32", node.trips) if counted else None, [x for x, all_of_it in zip(xs, whole, strict=True) if not all_of_it])
    unroll = node.params.get("unroll", 1) if window.each == 1 else 1
    stacks = [*late, *stacks]
    with compat.source_of(node.eqn, node.scope):
        if node.trips == 1 and window.each > 1:
            return list(itertools.chain(*_once(lambda carry: step(carry, (0, []))[0], (init, stacks))))
        (carry, stacks), ys = lax.scan(step, (init, stacks), given, length=node.trips, reverse=node.reverse, unroll=unroll)
    return [*carry, *ys, *stacks]


def _filled(body: Graph, y: int | Literal, trips: int, zero: Any) -> Any:
    """A stack of what each trip makes as ``y``, not written yet."""
    aval = body.values[y].aval if isinstance(y, int) else y.aval
    return jnp.broadcast_to(lax.convert_element_type(zero, aval.dtype), (trips, *aval.shape))


def _once(step: Callable, carry: Any) -> Any:
    """``step(carry)``, in a loop that compilers take for one: what it makes is in memory while it runs, not from the step's begin on."""
    trips, carry = lax.optimization_barrier((jnp.int32(1), carry))
    return lax.while_loop(lambda at: at[0] < trips, lambda at: (at[0] + 1, step(at[1])), (jnp.int32(0), carry))[1]


def _cut(arrays: list, *lengths: int) -> list[list]:
    """``arrays`` in pieces of these lengths, and the rest."""
    ends = list(itertools.accumulate(lengths, initial=0))
    return [*(arrays[a:b] for a, b in itertools.pairwise(ends)), arrays[ends[-1] :]]


def _as(graph: Graph, number: int, array):
    """``array`` with the exact type of a body input (weak types and Python scalars would change the carry's type)."""
    aval = graph.values[number].aval
    if compat.is_key_dtype(aval.dtype):
        return array
    return lax.convert_element_type(array, aval.dtype)


def _while(node: Node, operands: list, pin: Pins, _: Any) -> list:
    cond, body = node.bodies
    nc, nb = node.params["cond_nconsts"], node.params["body_nconsts"]
    cond_consts, body_consts, init = operands[:nc], operands[nc : nc + nb], operands[nc + nb :]
    init = [pin.value(number, _as(body, number, array)) for number, array in zip(body.inputs[nb:], init, strict=True)]
    with compat.source_of(node.eqn, node.scope):
        return lax.while_loop(
            lambda carry: evaluate(cond, [*cond_consts, *carry], pin)[0],
            lambda carry: evaluate(body, [*body_consts, *carry], pin),
            init,
        )


def _cond(node: Node, operands: list, pin: Pins, _: Any) -> list:
    index, *rest = operands
    branches = [lambda *args, branch=branch: evaluate(branch, args, pin) for branch in node.bodies]
    with compat.source_of(node.eqn, node.scope):
        return list(lax.switch(index, branches, *rest))


def _barrier(node: Node, operands: list, pin: Pins, _: Any) -> list:
    with compat.source_of(node.eqn, node.scope):
        return pin.barrier(operands, node.inputs)


def _transfer(node: Node, operands: list, pin: Pins, first: Any) -> list:
    if not isinstance(node.eqn, TransferEqn):
        return _equation(node, operands, pin, first)
    with compat.source_of(node.eqn, node.scope):
        return [compat.transferred(operands[0], node.params["space"])]


def _broadcast(node: Node, operands: list, pin: Pins, first: Any) -> list:
    if not isinstance(node.eqn, FillEqn):
        return _equation(node, operands, pin, first)
    with compat.source_of(node.eqn, node.scope):
        return [jnp.zeros(node.params["shape"], node.eqn.zero.aval.dtype)]


_EVALUATE: dict[str, Callable] = {
    "optimization_barrier": _barrier,
    "broadcast_in_dim": _broadcast,
    "device_put": _transfer,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def jaxpr_of(graph: Graph) -> Any:
    """The closed jaxpr of a graph: what JAX itself says of a rewrite (it checks types while tracing)."""
    avals = [jax.ShapeDtypeStruct(graph.values[n].shape, graph.values[n].dtype) for n in graph.inputs]
    return jax.make_jaxpr(evaluator(graph))(*avals)
