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
    assert_same(graph, result, *jax.tree.leaves(args))


def assert_same(graph, result, *leaves):
    """What two programs make of the same arguments."""
    for want, got in zip(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result))(*leaves), strict=True):
        data = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (want, got))
        np.testing.assert_allclose(*map(np.asarray, data), rtol=2e-4, atol=1e-5)


def recurrent(weights, x):
    """Three weights of a recurrence, in float32, that each trip narrows, and rows that it does."""

    def cell(h, row):
        read = row.astype(jnp.bfloat16) @ weights[0].astype(jnp.bfloat16)
        kept = h.astype(jnp.bfloat16) @ weights[1].astype(jnp.bfloat16)
        return jnp.tanh((read + kept) @ weights[2].astype(jnp.bfloat16)).astype(jnp.float32), None

    return jax.lax.scan(cell, jnp.zeros_like(x[0]), x)[0]


RECURRENT = [jnp.eye(WIDTH) * k for k in (1.0, 2.0, 3.0)], jnp.ones((LAYERS, ROWS, WIDTH)) / WIDTH


def test_each_constant_is_the_one_that_was_narrowed():
    graph = build(trace(recurrent, RECURRENT).jaxpr)
    result = hoist(Rewritten(graph, {})).graph
    made = narrowings(result)
    assert {node.inputs[0] for node in made} == set(graph.inputs[:3])
    for node in made:
        assert result.values[node.inputs[0]].shape == result.values[node.outputs[0]].shape
    assert_same(graph, result, *jax.tree.leaves(RECURRENT))


def test_what_no_trip_reads_any_more_is_no_operand():
    result = hoist(Rewritten(build(trace(recurrent, RECURRENT).jaxpr), {})).graph
    loop = next(node for node in result.nodes if node.prim == "scan")
    assert not set(result.inputs) & set(loop.inputs)
    (body,) = loop.bodies
    assert len(body.inputs) == len(loop.inputs) and not any(narrowings(body))
