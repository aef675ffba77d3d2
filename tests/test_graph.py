"""jaxpr → Graph."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from zoo import STEPS

import jaxauto
from jaxauto.core import LinkKind
from jaxauto.errors import UnknownPrimitiveWarning
from jaxauto.graph import build, multiplicity, walk
from jaxauto.trace import trace

X, W = jnp.ones((2, 4)), jnp.ones((3, 4, 4))


def graph_of(function, *args):
    return build(trace(function, args).jaxpr)


def layers(x, w):
    return lax.scan(lambda c, kernel: (jnp.tanh(c @ kernel), c.sum()), x, w)


def test_calls_are_inlined():
    graph = graph_of(jax.jit(lambda x: jax.jit(jnp.sin)(x) * 2), X)
    assert [node.prim for node in graph.nodes] == ["sin", "mul"]


@pytest.mark.smoke
def test_functions_that_are_primitives_of_their_own_are_what_they_expand_to():
    """``nonzero`` and ``searchsorted`` on jax 0.12, in a loop too."""

    def loss(w, x):
        def body(carry, row):
            left, right = jnp.triu_indices(4, 1)
            return carry + row[left] @ row[right], jnp.searchsorted(jnp.arange(4.0), row)

        total, places = lax.scan(body, 0.0, x @ w)
        return total + w[places].sum()

    step = lambda w, x: w - 0.1 * jax.grad(loss)(w, x)  # noqa: E731
    args = jnp.arange(16.0).reshape(4, 4) / 16, jnp.ones((8, 4))
    prims = {node.prim for node in walk(graph_of(step, *args))}
    assert {"scan", "dot_general"} <= prims and not {prim for prim in prims if prim.startswith(("call", "eval"))}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnknownPrimitiveWarning)
        plan = jaxauto.plan(step, *args, mesh={"data": 4}, donate_argnums=(), progress=False)
    np.testing.assert_allclose(plan.jit()(*args), jax.jit(step)(*args), rtol=1e-5)


def test_the_derivative_of_a_tanh_is_written_out():
    """As it is lowered; what the activation has of it too is made once, as compilers do."""

    def of_two(w, x):
        return jnp.sum(0.5 * (1 + jnp.tanh(x @ w)))

    graph = graph_of(jax.value_and_grad(of_two), jnp.ones((4, 4)), X)
    (tanh,) = (node for node in graph.nodes if node.prim == "tanh")
    of_one = [node.prim for node in graph.values[tanh.outputs[0]].users if node.prim in ("add", "sub")]
    assert sorted(of_one) == ["add", "sub"], "each once"


def test_scan_is_a_node_with_a_body_and_links():
    graph = graph_of(layers, X, W)
    (scan,) = (node for node in graph.nodes if node.prim == "scan")
    assert (scan.num_consts, scan.num_carry, scan.trips, scan.reverse) == (0, 1, 3, False)
    kinds = [link.kind for link in scan.links]
    assert kinds == [LinkKind.INIT, LinkKind.XS, LinkKind.CARRY, LinkKind.FINAL, LinkKind.YS]
    for link in scan.links:
        extra = link.kind in (LinkKind.XS, LinkKind.YS)
        source, target = graph.values[link.source], graph.values[link.target]
        assert abs(len(source.shape) - len(target.shape)) == extra


def test_multiplicity_multiplies_nested_trips():
    graph = graph_of(lambda x, w: lax.scan(lambda c, _: (layers(c, w)[0], None), x, None, length=5)[0], X, W)
    times = multiplicity(graph)
    assert {node.prim: times[node.id] for node in walk(graph)}["tanh"] == 15


def test_backward_nodes_are_marked():
    graph = graph_of(jax.grad(lambda x: jnp.tanh(x).sum()), X)
    assert not next(node for node in graph.nodes if node.prim == "tanh").backward
    assert graph.nodes[-1].backward


def test_checkpoint_region_begins_with_a_barrier():
    graph = graph_of(jax.grad(lambda x: jax.checkpoint(lambda a: jnp.sin(jnp.sin(a)))(x).sum()), X)
    barrier = next(node for node in graph.nodes if node.prim == "optimization_barrier")
    assert barrier.backward
    again = [node for node in graph.nodes if node.prim == "sin" and node.id > barrier.id]
    assert again
    assert again[0].inputs[0] in barrier.outputs


@pytest.mark.parametrize("name", STEPS)
def test_producers_and_users_agree_with_the_nodes(name):
    step, args = STEPS[name]()
    graph = graph_of(step, *args)
    users = {number: [] for number in graph.values}
    seen = set()
    for node in walk(graph):
        for x in node.inputs:
            if isinstance(x, int):
                users[x].append(node)
        for out in node.outputs:
            assert out not in seen
            seen.add(out)
            assert graph.values[out].producer is node
    assert all(value.users == users[number] for number, value in graph.values.items())
