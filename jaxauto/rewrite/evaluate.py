"""Graph → a function of flat arrays. Constraints are applied here: every stage before only changes the Graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax

from jaxauto import compat
from jaxauto.core import Graph, Literal, Node
from jaxauto.graph import TransferEqn


class Pins:
    """Where arrays are pinned to shardings while a graph is evaluated; this one pins nothing."""

    def value(self, number: int, array: Any) -> Any:  # noqa: ARG002
        """Called with every value as it is made, and with the initial carries of loops; returns the array, pinned or not."""
        return array

    def operand(self, node: Node, index: int, array: Any, operands: list) -> Any:  # noqa: ARG002
        """Called with every operand of every equation, right before it."""
        return array

    def barrier(self, arrays: list) -> list:
        """Called for every optimization_barrier: lets ``arrays`` pass together."""
        return list(lax.optimization_barrier(tuple(arrays)))


def evaluator(graph: Graph, pins: Pins | None = None) -> Callable:
    """A function of the graph's inputs (flat) that returns its outputs (flat list)."""
    pin = pins or Pins()

    def run(*arrays):
        return evaluate(graph, arrays, {}, pin)

    return run


def evaluate(graph: Graph, arrays, outer: Mapping[int, Any], pin: Pins) -> list:
    """Evaluate ``graph`` on ``arrays``; ``outer`` holds the values of enclosing graphs."""
    env: dict[int, Any] = dict(outer)
    env.update(graph.consts)
    for number, array in zip(graph.inputs, arrays, strict=True):
        env[number] = pin.value(number, array)
    for node in graph.nodes:
        operands = [_read(env, x) for x in node.inputs]
        operands = [
            x if isinstance(a, Literal) else pin.operand(node, k, x, operands)
            for k, (a, x) in enumerate(zip(node.inputs, operands, strict=True))
        ]
        results = _EVALUATE.get(node.prim, _equation)(node, operands, pin)
        for number, result in zip(node.outputs, results, strict=True):
            env[number] = pin.value(number, result)
    return [_read(env, x) for x in graph.outputs]


def _read(env, x):
    return x.value if isinstance(x, Literal) else env[x]


def _equation(node: Node, operands: list, _: Pins) -> list:
    return compat.bind(node.eqn, operands, node.scope)


def _scan(node: Node, operands: list, pin: Pins) -> list:
    """Rebuilt with the public lax.scan: the parameters of the primitive differ between versions."""
    (body,) = node.bodies
    first, last = node.num_consts, node.num_consts + node.num_carry
    consts, init, xs = operands[:first], operands[first:last], operands[last:]

    def step(carry, x):
        results = evaluate(body, [*consts, *carry, *x], {}, pin)
        return results[: node.num_carry], results[node.num_carry :]

    init = [pin.value(number, _as(body, number, array)) for number, array in zip(body.inputs[first:last], init, strict=True)]
    with compat.source_of(node.eqn, node.scope):
        carry, ys = lax.scan(step, init, xs, length=node.trips, reverse=node.reverse, unroll=node.params.get("unroll", 1))
    return [*carry, *ys]


def _as(graph: Graph, number: int, array):
    """``array`` with the exact type of a body input (weak types and Python scalars would change the carry's type)."""
    aval = graph.values[number].aval
    if compat.is_key_dtype(aval.dtype):
        return array
    return lax.convert_element_type(array, aval.dtype)


def _while(node: Node, operands: list, pin: Pins) -> list:
    cond, body = node.bodies
    nc, nb = node.params["cond_nconsts"], node.params["body_nconsts"]
    cond_consts, body_consts, init = operands[:nc], operands[nc : nc + nb], operands[nc + nb :]
    init = [pin.value(number, _as(body, number, array)) for number, array in zip(body.inputs[nb:], init, strict=True)]
    with compat.source_of(node.eqn, node.scope):
        return lax.while_loop(
            lambda carry: evaluate(cond, [*cond_consts, *carry], {}, pin)[0],
            lambda carry: evaluate(body, [*body_consts, *carry], {}, pin),
            init,
        )


def _cond(node: Node, operands: list, pin: Pins) -> list:
    index, *rest = operands
    branches = [lambda *args, branch=branch: evaluate(branch, args, {}, pin) for branch in node.bodies]
    with compat.source_of(node.eqn, node.scope):
        return list(lax.switch(index, branches, *rest))


def _barrier(node: Node, operands: list, pin: Pins) -> list:
    with compat.source_of(node.eqn, node.scope):
        return pin.barrier(operands)


def _transfer(node: Node, operands: list, pin: Pins) -> list:
    if not isinstance(node.eqn, TransferEqn):
        return _equation(node, operands, pin)
    with compat.source_of(node.eqn, node.scope):
        return [compat.transferred(operands[0], node.params["space"])]


_EVALUATE: dict[str, Callable] = {"optimization_barrier": _barrier, "device_put": _transfer, "scan": _scan, "while": _while, "cond": _cond}


def jaxpr_of(graph: Graph) -> Any:
    """The closed jaxpr of a graph: what JAX itself says of a rewrite (it checks types while tracing)."""
    avals = [jax.ShapeDtypeStruct(graph.values[n].shape, graph.values[n].dtype) for n in graph.inputs]
    return jax.make_jaxpr(evaluator(graph))(*avals)
