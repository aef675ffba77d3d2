"""In which order a compiler runs a program."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxauto.cost.order import schedule
from jaxauto.graph import build
from jaxauto.trace import trace

from .test_fusion import array


def test_what_an_optimizer_makes_of_its_state_alone_holds_no_update_up():
    """The count and the decayed moment come last in the program; each update comes as soon as its gradient is there all the same."""

    def step(first, second, moments, count, x):
        def loss(first, second):
            return jnp.sum(jnp.tanh(jnp.tanh(x @ first) @ second))

        grads = jax.grad(loss, argnums=(0, 1))(first, second)
        count = count + 1
        rate = 0.1 / count
        moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
        return [p - rate * m for p, m in zip((first, second), moments, strict=True)], moments, count

    weight = array(32, 32)
    graph = build(trace(step, (weight, weight, [weight, weight], array(), array(8, 32))).jaxpr)
    nodes = schedule(graph)
    assert sorted(n.id for n in nodes) == [n.id for n in graph.nodes]
    place = {node.id: k for k, node in enumerate(nodes)}
    for node in nodes:
        producers = [graph.values[x].producer for x in node.inputs if isinstance(x, int)]
        assert all(place[p.id] < place[node.id] for p in producers if p is not None)
    backward = [place[n.id] for n in nodes if n.backward and n.prim == "dot_general"]
    updates = [place[n.id] for n in nodes if n.prim == "sub" and not n.backward]
    assert min(updates) < max(backward), "the second layer is updated before the first has its gradient"
