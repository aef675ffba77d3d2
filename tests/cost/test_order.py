"""In which order a compiler runs a program."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxauto.cost.order import schedule, short_sums
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


def test_weight_gradients_are_put_off():
    """Out of a loop's body to its end; of a straight program behind the second barrier, or to before the next loop."""

    def step(params, x):
        def loss(params):
            y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None), x, params["layers"])
            return jnp.sum(jnp.tanh(y @ params["head"]))

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {"layers": array(3, 32, 32), "head": array(32, 32)}
    graph = build(trace(step, (params, array(8, 32))).jaxpr)

    def matmul(node):
        return node.prim == "dot_general"

    (loop,) = (node for node in graph.nodes if node.backward and node.bodies)
    before, after = schedule(graph), schedule(graph, delayed=matmul)
    (weight,) = (n for n in graph.nodes if n.backward and matmul(n) and not any(u.backward and u is loop for u in users(graph, n)))
    assert before.index(weight) < before.index(loop) - 1 and after.index(weight) < after.index(loop)
    assert not [n for n in after[after.index(weight) : after.index(loop)] if n.backward and feeds(graph, n, loop)]

    (body,) = loop.bodies
    stacked = {x for x in body.outputs[loop.num_carry :] if isinstance(x, int)}
    ordered = schedule(body, delayed=matmul, loose=stacked)
    gradients = [n for n in body.nodes if matmul(n) and not any(matmul(u) or u.prim == "mul" for u in users(body, n))]
    assert {n.id for n in ordered[-len(gradients) :]} >= {n.id for n in gradients if {*n.outputs} & stacked}
    for program, nodes in ((graph, after), (body, ordered)):
        place = {node.id: k for k, node in enumerate(nodes)}
        assert sorted(place) == sorted(n.id for n in program.nodes)
        assert all(
            place[p.id] < place[n.id]
            for n in nodes
            for x in n.inputs
            if isinstance(x, int) and (p := program.values[x].producer) is not None and p.id in place
        )


def test_the_sum_of_a_gradient_is_short_that_is_made_of_much_and_small():
    """A convolution over large images; not those of dense layers of the same features over few rows, nor a bias's of a small array."""

    def step(params, images):
        def loss(params):
            x = jax.lax.conv_general_dilated(images, params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.sum(jnp.tanh(jnp.mean(jnp.tanh(x), (1, 2)) @ params["dense"]))

        return jax.grad(loss)(params)

    params = {"conv": array(3, 3, 8, 8), "dense": array(8, 8)}
    graph = build(trace(step, (params, array(32, 64, 64, 8))).jaxpr)
    dots = [n for n in graph.nodes if n.backward and n.prim in ("conv_general_dilated", "dot_general")]
    convolution = next(n.id for n in dots if n.prim == "conv_general_dilated")
    assert {n.id for n in dots} & short_sums(graph, 8) == {convolution}
    read, own = 32 * 64 * 64 * 8, 3 * 3 * 8 * 8
    most = read // (64 * own)
    assert convolution in short_sums(graph, most) and convolution not in short_sums(graph, most + 1), "a device's part is what it reads"


def users(graph, node):
    """Nodes that read a node's results, views between them left out."""
    found = []
    for out in node.outputs:
        for user in graph.values[out].users:
            found += users(graph, user) if user.prim in ("transpose", "reshape", "convert_element_type") else [user]
    return found


def feeds(graph, node, target):
    """Whether ``target`` needs ``node``."""
    return any(user is target or feeds(graph, user, target) for out in node.outputs for user in graph.values[out].users)
