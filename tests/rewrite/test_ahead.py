"""What could start long before its place in the backward pass is held to it; the same results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxauto.graph import build
from jaxauto.rewrite.evaluate import evaluator
from jaxauto.rewrite.order import habits_of, in_order
from jaxauto.rewrite.program import Rewritten
from jaxauto.trace import trace

WIDTH, ROWS, LAYERS = 16, 32768, 4  # a layer's activations: 2 MiB


def skips(params, x):
    """A layer goes on to the next, and by another matrix to the sum of skips."""

    def loss(params):
        y, total = x, 0.0
        for w, on, skip in params:
            y = jnp.tanh(y @ w)
            total, y = total + y @ skip, y @ on
        return jnp.sum(jnp.tanh(total))

    return jax.grad(loss)(params)


def layered(params, x):
    def loss(params):
        y = x
        for w, on, skip in params:
            y = jnp.tanh(jnp.tanh(y @ w) @ on) @ skip
        return jnp.sum(y)

    return jax.grad(loss)(params)


def attention(params, x):
    """q, k and v of each layer could start in any order: not held."""

    def loss(params):
        y = x
        for wq, wk, wv in params:
            scores = jax.nn.softmax((y @ wq).reshape(-1, WIDTH, WIDTH) @ (y @ wk).reshape(-1, WIDTH, WIDTH))
            y = y + (scores @ (y @ wv).reshape(-1, WIDTH, WIDTH)).reshape(y.shape)
        return jnp.sum(y)

    return jax.grad(loss)(params)


def arguments(rows):
    keys = iter(jax.random.split(jax.random.key(0), 3 * LAYERS + 1))
    params = [tuple(jax.random.normal(next(keys), (WIDTH, WIDTH)) / 4 for _ in range(3)) for _ in range(LAYERS)]
    return params, jax.random.normal(next(keys), (rows, WIDTH))


@pytest.mark.parametrize(
    ("step", "rows", "platform", "pressed", "held"),
    [
        (skips, ROWS, "tpu", True, LAYERS - 1),  # the backward pass begins with the last one
        (skips, ROWS, "tpu", False, 0),
        (skips, ROWS // 2, "tpu", True, 0),  # 1 MiB
        (skips, ROWS, "gpu", True, 0),
        (layered, ROWS, "tpu", True, 0),
        (attention, ROWS, "tpu", True, 0),
    ],
)
def test_what_could_start_early_waits(step, rows, platform, pressed, held):
    args = arguments(rows)
    graph = build(trace(step, args).jaxpr)
    result = in_order(Rewritten(graph, {}), frozenset(), habits_of(platform, 1, pressed=pressed)).graph
    found = [node for node in result.nodes if node.prim == "optimization_barrier" and node.backward]
    assert len(found) == held
    readers = [next(n for n in result.nodes if n.prim == "dot_general" and not {*n.inputs}.isdisjoint(b.outputs)) for b in found]
    assert all(result.values[n.outputs[0]].shape == (rows, WIDTH) for n in readers), "products of the cotangent, no weight's gradient"
    leaves = jax.tree.leaves(args)
    for want, got in zip(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result))(*leaves), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_each_waits_for_what_the_operation_before_it_has_read():
    args = arguments(ROWS)
    graph = build(trace(skips, args).jaxpr)
    result = in_order(Rewritten(graph, {}), frozenset(), habits_of("tpu", 1, pressed=True)).graph
    place = {node.id: k for k, node in enumerate(result.nodes)}
    maker = {x: node for node in result.nodes for x in node.outputs}
    for barrier in (node for node in result.nodes if node.prim == "optimization_barrier" and node.backward):
        (early, awaited) = barrier.inputs
        before = [n for n in result.nodes[: place[barrier.id]] if n.prim == "dot_general" and n.backward and awaited in n.inputs]
        assert before and place[maker[awaited].id] > place[maker[early].id]
