import jax
import jax.numpy as jnp
import numpy as np

from jaxauto.graph import build, walk
from jaxauto.rewrite.evaluate import evaluator
from jaxauto.rewrite.program import Rewritten
from jaxauto.rewrite.sink import sink
from jaxauto.trace import trace


def step(weights, x):
    """A scan over layers that share a causal mask."""

    def layer(x, w):
        mask = jnp.tril(jnp.ones((8, 8), bool))
        logits = jnp.where(mask, jnp.einsum("bld,bmd->blm", x @ w, x), -1e9)
        return jnp.einsum("blm,bmd->bld", jax.nn.softmax(logits), x), None

    def loss(weights):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    return jax.value_and_grad(loss)(weights)


ARGS = 0.1 * np.arange(3 * 4 * 4, dtype=np.float32).reshape(3, 4, 4) % 1, np.linspace(-1, 1, 2 * 8 * 4, dtype=np.float32).reshape(2, 8, 4)


def masks(graph, shape):
    """(outside loops, inside) broadcasts of a mask to a shape."""
    made = [n for n in walk(graph) if n.prim == "broadcast_in_dim" and graph.values[n.outputs[0]].dtype == bool]
    made = [n for n in made if graph.values[n.outputs[0]].shape == shape]
    return sum(n in graph.nodes for n in made), sum(n not in graph.nodes for n in made)


def test_a_mask_is_broadcast_in_the_loops_that_read_it():
    graph = build(trace(step, ARGS).jaxpr)
    assert masks(graph, (2, 8, 8)) == (1, 0)  # differentiation has taken it out
    sunk = sink(Rewritten(graph, {}))
    assert masks(sunk.graph, (2, 8, 8)) == (0, 2)  # of the forward pass and of the backward pass
    for before, after in zip(jax.jit(evaluator(graph))(*ARGS), jax.jit(evaluator(sunk.graph))(*ARGS), strict=True):
        np.testing.assert_array_equal(before, after)


def test_what_something_else_reads_stays():
    def both(x, xs):
        wide = jnp.broadcast_to(x, (4, 3))
        return jax.lax.scan(lambda c, row: (c + wide * row, None), wide, xs)[0]

    args = np.arange(3.0, dtype=np.float32), np.arange(6.0, dtype=np.float32).reshape(2, 3)
    graph = build(trace(both, args).jaxpr)
    sunk = sink(Rewritten(graph, {}))
    count = [
        sum(n.prim == "broadcast_in_dim" and sunk.graph.values[n.outputs[0]].shape == (4, 3) for n in nodes)
        for nodes in (sunk.graph.nodes, list(walk(sunk.graph)))
    ]
    assert count == [1, 2]  # the initial carry is one
    np.testing.assert_array_equal(jax.jit(evaluator(graph))(*args)[0], jax.jit(evaluator(sunk.graph))(*args)[0])


def test_through_nested_loops():
    def nested(x, xs):
        wide = jnp.broadcast_to(x, (4, 3))
        inner = lambda c: jax.lax.scan(lambda c, row: (c + wide * row, None), c, xs)[0]  # noqa: E731
        return jax.lax.scan(lambda c, _: (inner(c), None), jnp.zeros((4, 3)), length=2)[0]

    args = np.arange(3.0, dtype=np.float32), np.arange(6.0, dtype=np.float32).reshape(2, 3)
    graph = build(trace(nested, args).jaxpr)
    sunk = sink(Rewritten(graph, {})).graph
    (outer,) = (n for n in sunk.nodes if n.bodies)
    (loop,) = (n for n in outer.bodies[0].nodes if n.bodies)
    assert [n.prim for n in outer.bodies[0].nodes if n.prim == "broadcast_in_dim"] == []
    assert loop.bodies[0].nodes[0].prim == "broadcast_in_dim"
    np.testing.assert_array_equal(jax.jit(evaluator(graph))(*args)[0], jax.jit(evaluator(sunk))(*args)[0])


def test_nothing_to_sink_is_left_as_it_is():
    rewritten = Rewritten(build(trace(lambda x: x * 2, ARGS[:1]).jaxpr), {})
    assert sink(rewritten) is rewritten
