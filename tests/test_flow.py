from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxauto.flow import data_dependent, feeding_operations, light_operations
from jaxauto.graph import build
from jaxauto.groups import find_groups
from jaxauto.trace import trace


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_what_still_feeds_operations_and_what_depends_on_data():
    def step(w, x):
        g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return w * 0.9 - g

    found = trace(step, (struct(16, 16), struct(8, 16)))
    graph = build(found.jaxpr)
    groups = find_groups(graph, found.state)
    feeding = feeding_operations(graph, groups.rules)
    dependent = data_dependent(graph, [graph.inputs[1]])
    assert graph.outputs[0] not in feeding and graph.inputs[0] in feeding
    assert graph.outputs[0] in dependent and graph.inputs[0] not in dependent


def test_carries_feed_the_trip_before_them():
    def fun(x, w):
        return jax.lax.scan(lambda c, _: (c * 2, c @ w), x, None, length=3)

    graph = build(trace(fun, (struct(8, 8), struct(8, 8))).jaxpr)
    groups = find_groups(graph)
    body = graph.nodes[-1].bodies[0] if graph.nodes[-1].bodies else next(n for n in graph.nodes if n.bodies).bodies[0]
    feeding = feeding_operations(graph, groups.rules)
    assert body.outputs[0] in feeding, "what one trip hands on is multiplied in the next"
    assert set(body.outputs[1:]).isdisjoint(feeding)
    dependent = data_dependent(graph, [graph.inputs[1]])
    assert graph.outputs[1] in dependent and graph.outputs[0] not in dependent


def test_gradients_of_low_rank_factors_are_made_of_results():
    """Of a weight that is merged from them: its own gradient feeds nothing heavy. A cotangent of layers does, however small the next."""

    def step(factors, head, x):
        def loss(factors, head):
            y = jnp.tanh(x @ (factors[0] @ factors[1]))
            return jnp.sum(jnp.tanh(jnp.tanh(y @ head) @ head.T))

        return jax.grad(loss, argnums=(0, 1))(factors, head)

    found = trace(step, ([struct(256, 2), struct(2, 256)], struct(256, 128), struct(4096, 256)))
    graph = build(found.jaxpr)
    rules = find_groups(graph, found.state).rules
    dependent = data_dependent(graph, [graph.inputs[3]])
    light = light_operations(graph, rules, dependent)
    late = {*graph.values} - feeding_operations(graph, rules, light)
    dots = [n for n in graph.nodes if n.prim == "dot_general" and n.backward]
    shape = {n.id: graph.values[n.outputs[0]].shape for n in dots}
    assert sorted(shape[n.id] for n in dots if n.id in light) == [(256, 2), (256, 2)]
    assert sorted(shape[n.id] for n in dots if n.outputs[0] not in late) == [(4096, 128), (4096, 256)]
    assert (256, 256) in [shape[n.id] for n in dots if n.outputs[0] in late]
    assert (256, 256) not in [shape[n.id] for n in dots if n.outputs[0] not in feeding_operations(graph, rules)]
