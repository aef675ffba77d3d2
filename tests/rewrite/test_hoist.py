"""Narrowed weights before the loop, as the cost model sees them on TPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import STEPS

from jaxauto.graph import build, walk
from jaxauto.rewrite.evaluate import evaluator
from jaxauto.rewrite.hoist import hoist
from jaxauto.rewrite.program import Rewritten
from jaxauto.trace import trace

LAYERS, WIDTH, ROWS = 3, 16, 4


def step(weights, x):
    """Weights in float32, compute in bfloat16."""

    def loss(w):
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w.astype(jnp.bfloat16)), None), x, w)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)(weights)


ARGUMENTS = (jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH, jnp.ones((ROWS, WIDTH), jnp.bfloat16))


def narrowings(graph):
    """Of weights, whole or one slice, in the nodes of one graph."""
    made = [(node, graph.values[node.outputs[0]]) for node in graph.nodes if node.prim == "convert_element_type"]
    return [node for node, value in made if value.dtype == jnp.bfloat16 and value.shape[-2:] == (WIDTH, WIDTH)]


def test_the_stack_is_narrowed_once_before_the_loop():
    graph = build(trace(step, ARGUMENTS).jaxpr)
    result = hoist(Rewritten(graph, {}))
    (made,) = narrowings(result.graph)
    (stack,) = made.outputs
    assert made.inputs == (graph.inputs[0],) and result.graph.values[stack].shape == (LAYERS, WIDTH, WIDTH)
    assert stack in result.stacked and graph.values[result.origin[stack]].shape == (WIDTH, WIDTH)
    loops = [node for node in result.graph.nodes if node.prim == "scan"]
    assert stack in loops[0].inputs
    assert not any(narrowings(body) for loop in loops for body in loop.bodies if not loop.backward)


def test_without_narrowing_nothing_is_done():
    start = Rewritten(build(trace(*STEPS["mlp_sgd"]()).jaxpr), {})
    assert hoist(start) is start


@pytest.mark.parametrize("name", ["transformer_scan", "transformer_scan_checkpoint"])
def test_the_program_still_does_the_same(name):
    zoo_step, args = STEPS[name]()
    graph = build(trace(zoo_step, args).jaxpr)
    result = hoist(Rewritten(graph, {})).graph
    for node in walk(result):
        for link in node.links:
            assert link.source in result.values and link.target in result.values
    leaves = jax.tree.leaves(args)
    for want, got in zip(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result))(*leaves), strict=True):
        data = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (want, got))
        np.testing.assert_allclose(*map(np.asarray, data), rtol=2e-4, atol=1e-5)
