"""Random bits in a program, and the masks that are made of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxauto
from jaxauto.blocks import find_blocks
from jaxauto.cost.fusion import find_buffers
from jaxauto.graph import build, walk
from jaxauto.masks import hashes, kept_masks
from jaxauto.rewrite.recompute import recompute
from jaxauto.rules import rule_for
from jaxauto.trace import trace

N = 2**10
X = jax.ShapeDtypeStruct((N,), jnp.float32)
SEED = jax.ShapeDtypeStruct((), jnp.int32)


def graph_of(fun, *args):
    return build(jax.make_jaxpr(fun)(*args))


def drop(x, seed):
    return jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape), x, 0)


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda seed: jax.random.bits(jax.random.key(seed), (N,)), N),
        (lambda seed: jax.random.bits(jax.random.key(seed), (N,), "uint8"), N),
        (lambda seed: jax.vmap(lambda k: jax.random.normal(k, (8,)))(jax.random.split(jax.random.key(seed), 16)), 8 * 16),
        (lambda seed: jax.random.bits(jax.random.key(seed, impl="rbg"), (N,)), 0),
        (lambda seed: seed ^ 1, 0),
    ],
)
def test_one_hash_for_each_number_that_threefry_makes(fun, expected):
    assert sum(map(hashes, walk(graph_of(fun, SEED)))) == expected


def train(params, x, seed):
    """Two layers with dropout, the second with a mask of its own."""

    def loss(p):
        y = x
        for k, w in enumerate(p):
            y = drop(jnp.tanh(y @ w), seed + k)
        return jnp.sum(y * y)

    return [w - 0.1 * g for w, g in zip(params, jax.grad(loss)(params), strict=True)]


ARGS = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 2, jax.ShapeDtypeStruct((4096, 128), jnp.float32), SEED


def scanned(params, x, seed):
    """The layers of ``train`` in a loop."""

    def loss(p):
        body = lambda y, wk: (drop(jnp.tanh(y @ wk[0]), seed + wk[1]), None)  # noqa: E731
        y, _ = jax.lax.scan(body, x, (jnp.stack(p), jnp.arange(len(p))))
        return jnp.sum(y * y)

    return [w - 0.1 * g for w, g in zip(params, jax.grad(loss)(params), strict=True)]


@pytest.mark.parametrize(("step", "count"), [(train, 2), (scanned, 1)])
def test_masks_that_both_passes_read_are_found(step, count):
    graph = graph_of(step, *ARGS)
    masks = kept_masks(graph)
    assert len(masks) == count and {graph.values[m].dtype for m in masks} == {jnp.dtype(bool)}


def test_masks_that_are_made_again_are_found_where_several_kernels_read_them():
    """The first layer's, by its activation and by the cotangent; and one that goes into what several dots read."""
    graph = build(trace(train, ARGS).jaxpr)
    again = recompute(graph, {k: frozenset() for k, _ in enumerate(find_blocks(graph))}).graph
    assert [m for m in kept_masks(again) if {user.backward for user in again.values[m].users} == {True}]

    def gradients(count, w, x, ct, seed):
        ct = drop(ct, seed) * 2.0
        return [dot() for dot in (lambda: x.T @ ct, lambda: ct @ w.T)[:count]]

    for count in (1, 2):
        graph = graph_of(functools.partial(gradients, count), ARGS[0][0], ARGS[1], ARGS[1], SEED)
        assert len(kept_masks(graph)) == count - 1


@pytest.mark.parametrize("kept", [None, frozenset()], ids=["as written", "made again"])
@pytest.mark.parametrize("step", [train, scanned])
def test_the_cost_model_gives_memory_to_the_masks_that_are_written(step, kept):
    """And to no other: what is told to be written once is what has a barrier."""
    graph = build(trace(step, ARGS).jaxpr)
    if kept is not None:
        graph = recompute(graph, {k: kept for k, _ in enumerate(find_blocks(graph))}).graph
    rules = {node.id: rule_for(node.eqn) for node in walk(graph) if not node.bodies}
    buffers = find_buffers(graph, rules, platform="tpu")
    made = {x: graph.values[x].producer for x in buffers.ids.tolist() if graph.values[x].dtype == bool}
    assert {x for x, node in made.items() if node is not None and not node.bodies} == kept_masks(graph)


def test_others_are_not():
    """Of a forward pass alone; and what a mask and an array come to, which both passes read."""
    assert not kept_masks(graph_of(drop, X, SEED))

    def straight_through(x, seed):
        def loss(x):
            y = jnp.exp(x)
            y = y + jax.lax.stop_gradient(drop(y, seed) - y)
            return jnp.sum(y * y)

        return jax.grad(loss)(x)

    graph = graph_of(straight_through, X, SEED)
    assert any(hashes(node) for node in walk(graph)) and not kept_masks(graph)


@pytest.mark.parametrize(("step", "barriers"), [(train, 2), (scanned, 1)])
@pytest.mark.parametrize(("target", "written"), [("v5e:1x1", True), ("v5e:2x4", True), ("h100:1", False)])
def test_only_tpus_are_told_to_write_them(step, barriers, target, written):
    mesh = {"data": jaxauto.Target(target).num_devices}
    plan = jaxauto.plan(step, *ARGS, target=target, mesh=mesh, remat="off", certify=False, progress=False)
    lines = [line for line in plan.lower().as_text().splitlines() if "optimization_barrier" in line and "xi1>" in line]
    assert len(lines) == barriers * written
