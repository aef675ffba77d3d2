"""Equal equations are made once: which, and that nothing but their number changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

import jaxauto
from jaxauto.alike import repeated
from jaxauto.core import Graph, Literal
from jaxauto.graph import build, walk
from jaxauto.trace import trace

X, W = jnp.ones((8, 16)), jnp.ones((16, 16))


def graph_of(function, *args) -> Graph:
    return build(trace(function, args).jaxpr)


def prims(graph: Graph, name: str) -> int:
    return sum(node.prim == name for node in walk(graph))


@pytest.mark.parametrize(
    ("function", "name", "made"),
    [
        (lambda y, _, w: y @ w + jnp.sin(y @ w), "dot_general", 2),  # with the one that makes y
        (lambda y, _, w: (jnp.tanh(y) + 1.0) @ w + (jnp.tanh(y) + 1.0) @ w.T, "add", 2),  # of tanh, and of the products
        (lambda y, _, w: (jnp.tanh(y) + 1.0) @ w + (jnp.tanh(y) + 2.0) @ w.T, "add", 3),
        (lambda y, _, w: jnp.dot(y, w) + jnp.dot(y, w, precision="highest"), "dot_general", 3),
        (lambda y, x, w: (x + 1.0) @ w + (x + 1.0) @ w.T + y, "add", 4),
    ],
    ids=["products", "derived", "other literals", "other parameters", "of arguments alone: as written"],
)
def test_what_is_equal_and_late_is_made_once(function, name, made):
    assert prims(graph_of(lambda x, w: function(x @ w, x, w), X, W), name) == made


def test_what_is_made_once_says_how_often_it_was_written():
    def function(x, w):
        y = jnp.sin(x @ w)
        return jnp.tanh(y @ w) + jnp.tanh(y @ w) * jnp.tanh(y @ w)

    graph = graph_of(function, X, W)
    (tanh,) = (node for node in graph.nodes if node.prim == "tanh")
    _, dot = (node for node in graph.nodes if node.prim == "dot_general")
    assert len(tanh.also) == len(dot.also) == 2
    order = sorted([*dot.also, *tanh.also])
    assert order == [dot.also[0], tanh.also[0], dot.also[1], tanh.also[1]] and order[0] > tanh.id > dot.id


def test_barriers_keep_apart():
    def function(x, w):
        y = jnp.sin(x @ w)
        return jnp.tanh(lax.optimization_barrier(y)) + jnp.tanh(lax.optimization_barrier(y))

    graph = graph_of(function, X, W)
    assert prims(graph, "dot_general") == 1 and prims(graph, "optimization_barrier") == 2 and prims(graph, "tanh") == 2


def test_what_is_traced_for_another_place_is_another():
    def function(x, w):
        y = jnp.sin(x @ w)
        with set_xla_metadata(place="there"):
            z = y @ w
        return z + jnp.tanh(y @ w) + jnp.cos(y @ w)

    assert prims(graph_of(function, X, W), "dot_general") == 3


def test_random_draws_with_one_key_are_one_and_with_two_keys_two():
    def function(first, second, x, w):
        y = x @ w
        return sum(y * jax.random.normal(jax.random.fold_in(key, y.shape[0]), y.shape) for key in (first, first, second))

    keys = jax.random.key(0), jax.random.key(1)
    graph = graph_of(function, *keys, X, W)
    assert prims(graph, "mul") >= 2
    plan = jaxauto.plan(function, *keys, X, W, mesh={"data": 4}, donate_argnums=(), progress=False)
    np.testing.assert_allclose(plan.jit()(*keys, X, W), jax.jit(function)(*keys, X, W), rtol=1e-6)


def test_the_backward_pass_makes_its_own():
    """What ``jax.checkpoint`` makes again is not what the forward pass has."""

    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda y: jnp.tanh(jnp.sin(y @ w)) @ w)(x @ w))

    assert prims(graph_of(jax.value_and_grad(loss), W, X), "sin") == 2


def test_a_scan_has_no_stack_twice():
    """Of residuals that are equal, one is stacked: the narrowed input of three products."""

    def body(w, x):
        y = jnp.tanh(x)
        q, k, v = (y.astype(jnp.bfloat16) @ w[n].astype(jnp.bfloat16) for n in range(3))
        return x + (q * k + v).astype(jnp.float32)

    def loss(w, x):
        return jnp.sum(lax.scan(lambda x, w: (body(w, x), None), x, w)[0])

    w = jnp.ones((4, 3, 16, 16)) / 16
    graph = graph_of(jax.grad(loss), w, X)
    forward, backward = (node for node in graph.nodes if node.prim == "scan")
    narrow = [x for x in forward.outputs if graph.values[x].aval.dtype == jnp.bfloat16 and graph.values[x].shape[1:] == X.shape]
    inside = [n for n in forward.bodies[0].nodes if n.prim == "convert_element_type" and n.eqn.outvars[0].aval.shape == X.shape]
    assert sum(n.eqn.outvars[0].aval.dtype == jnp.bfloat16 for n in inside) == 1
    assert len({*forward.outputs}) == len(forward.outputs) and len({*backward.inputs}) == len(backward.inputs)
    assert len(narrow) == len({*narrow}) <= 3  # the input, narrowed, and what the products of q and k read
    for scan in (forward, backward):
        (stepped,) = scan.bodies
        assert len(stepped.inputs) == len(scan.inputs)
        assert len(stepped.outputs) == len(scan.outputs)
        assert all(graph.values[x].users.count(scan) == scan.inputs.count(x) for x in scan.inputs if isinstance(x, int))
    plan = jaxauto.plan(jax.grad(loss), w, X, mesh={"data": 4}, donate_argnums=(), progress=False)
    np.testing.assert_allclose(plan.jit()(w, X), jax.jit(jax.grad(loss))(w, X), rtol=2e-2, atol=1e-4)


def test_positions_of_what_stands_before():
    literal = Literal(1.0, jax.core.ShapedArray((), jnp.float32))
    assert repeated([4, 5, 4, literal, literal, 5, 4]) == {2: 0, 5: 1, 6: 0}
    assert repeated([]) == {}


class Layer(nn.Module):
    """Every ``Dense`` narrows its input itself."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        q, k, v = (nn.Dense(x.shape[-1], dtype=jnp.bfloat16)(y) for _ in range(3))
        return x + nn.Dense(x.shape[-1], dtype=jnp.bfloat16)(jax.nn.softmax(q * k) * v)


class Net(nn.Module):
    """A few of them."""

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = Layer()(x)
        return x


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_a_step_is_the_same_with_what_is_made_once(share):
    """Kept or made again, as a plan says: equations that one node stands for are all told the same."""
    net, optimiser = Net(), optax.sgd(0.1)
    x = jax.random.normal(jax.random.key(1), (64, 32))
    params = net.init(jax.random.key(0), x)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((net.apply(p, x) - 1) ** 2))(params)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    args = params, optimiser.init(params), x
    make = lambda **more: jaxauto.plan(step, *args, mesh={"data": 8}, donate_argnums=(), certify=False, progress=False, **more)  # noqa: E731
    whole = make(remat="off")
    plan = whole if share == 1.0 else make(memory_budget=share * whole.estimate.peak_memory)
    assert any(node.also for node in walk(build(trace(step, args).jaxpr))) if share == 1.0 else plan.remat
    for told, expected in zip(jax.tree.leaves(plan.jit()(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(told, expected, rtol=2e-2, atol=1e-5)
