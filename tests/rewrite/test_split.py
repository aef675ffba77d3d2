"""Scans whose trips differ: the same results, nothing copied, and in memory what the segments promise."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_consistent, fingerprint, graph_of, words
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import STEPS

from jaxauto.blocks import find_blocks
from jaxauto.core import Trips
from jaxauto.graph import walk
from jaxauto.rewrite.evaluate import evaluator, jaxpr_of
from jaxauto.rewrite.recompute import recompute
from jaxauto.rewrite.split import can_split

LENGTH = 12


def layers(*, reverse=False, metrics=False, keys=False):
    """A scan over layers, with a weight that all of them share, a counter, and what was asked for."""

    def loss(params, x):
        def layer(carry, inputs):
            x, count = carry
            w, key = inputs
            h = jnp.tanh(x @ w) * params["scale"]
            if keys:
                h = jnp.where(jax.random.bernoulli(jax.random.wrap_key_data(key), 0.8, h.shape), h, 0.0)
            return (x + jnp.sin(h @ w.T), count + 1), (jnp.mean(h, axis=0) if metrics else None)

        keyed = jax.random.key_data(jax.random.split(jax.random.key(0), LENGTH))
        (x, count), means = jax.lax.scan(layer, (x, 0), (params["w"], keyed), reverse=reverse)
        return jnp.sum(x**2) / count + (jnp.sum(means**3) if metrics else 0.0), means

    def step(params, x):
        (value, means), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "means": means}

    w = 0.3 * jax.random.normal(jax.random.key(1), (LENGTH, 8, 8))
    return step, ({"w": w, "scale": jnp.ones(8)}, jax.random.normal(jax.random.key(2), (4, 8)))


def accumulating():
    """The gradients of two batches, summed by a scan."""
    _, (params, x) = layers()

    def loss(w, x):
        y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)
        return jnp.sum(y**2)

    def step(w, xs):
        total, losses = jax.lax.scan(lambda total, x: (total + jax.grad(loss)(w, x), loss(w, x)), jnp.zeros_like(w), xs)
        return w - 0.1 * total, {"loss": jnp.mean(losses)}

    return step, (params["w"], jnp.stack([x, 2 * x]))


CASES = {
    "layers": layers,
    "backwards": lambda: layers(reverse=True),
    "stacks that others read": lambda: layers(metrics=True),
    "those backwards": lambda: layers(reverse=True, metrics=True),
    "keys": lambda: layers(keys=True),
    "recurrent": STEPS["recurrent_scan"],
    "in a loop": accumulating,
}


def some_parts(trips, made, rng, depth=0):
    """As written, segments, one segment, cut into alike and unlike parts again, in random order and keeping something else each."""
    found, left = [], trips
    while left:
        count = rng.randint(1, left)
        if depth < 3 and rng.random() < 0.6:
            length = rng.choice([m for m in range(1, count + 1) if count % m == 0])
            found.append(Trips(count, inside=some_parts(length, made, rng, depth + 1)))
        else:
            found.append(Trips(count, rng.choice([None, frozenset(), frozenset(v for v in made if rng.random() < 0.4)])))
        left -= count
    return tuple(found)


def again(count, length, *kept):
    """Trips that run again in segments."""
    return Trips(count, inside=(Trips(length, *kept),))


def split_program(graph, seed):
    blocks, rng = find_blocks(graph), random.Random(seed)
    chosen = {n: some_parts(block.count, block.made, rng) for n, block in enumerate(blocks) if can_split(blocks, n)}
    return recompute(graph, {}, splits=chosen), chosen


def assert_alike(expected, actual, exactly=False):
    for want, got in zip(expected, actual, strict=True):
        assert got.dtype == want.dtype
        atol = 0 if exactly else 1e-5 * max(float(np.abs(words(want)).max()), 1e-30)
        np.testing.assert_allclose(words(got), words(want), rtol=0, atol=atol)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_results_and_structure(name, seed):
    step, args = CASES[name]()
    graph = graph_of(step, args)
    before = fingerprint(graph)
    result, chosen = split_program(graph, seed)
    assert chosen and fingerprint(graph) == before
    assert_consistent(result.graph)
    assert set(result.origin) == set(result.graph.values) - set(graph.values)
    for new, old in result.origin.items():
        assert result.graph.values[new].shape[new in result.stacked :] == graph.values[old].shape
    assert [v.aval for v in jaxpr_of(result.graph).jaxpr.outvars] == [v.aval for v in jaxpr_of(graph).jaxpr.outvars]
    leaves = jax.tree.leaves(args)
    assert_alike(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result.graph))(*leaves))


@pytest.mark.parametrize("name", ["stacks that others read", "keys"])
def test_bit_for_bit_without_fusion(name):
    """Operation by operation a layer that runs again makes what it made."""
    step, args = CASES[name]()
    graph, leaves = graph_of(step, args), jax.tree.leaves(args)
    keep = frozenset()
    parts = again(4, 2, keep), Trips(5, inside=(again(3, 3, keep), Trips(2))), Trips(3)
    result = recompute(graph, {}, splits={0: parts}).graph
    with jax.disable_jit():
        assert_alike(evaluator(graph)(*leaves), evaluator(result)(*leaves), exactly=True)


def test_what_lies_between_the_passes():
    """Of 12 trips: 3 segments of 2, one of 2, and 4 that keep all; the stacks of the loops in the order that they run."""
    step, args = layers()
    graph = graph_of(step, args)
    result = recompute(graph, {}, splits={0: (again(6, 2), again(2, 2), Trips(4))}).graph
    loops = [node for node in result.nodes if node.prim == "scan"]
    stacked = [{result.values[y].shape[0] for y in node.outputs[node.num_carry :] if result.values[y].shape} for node in loops]
    assert stacked == [{3}, set(), {4}, {LENGTH}, set(), set()]
    assert [node.trips for node in loops] == [3, 2, 4, 4, 1, 3]
    inside = [[(n.trips, n.backward) for n in node.bodies[0].nodes if n.prim == "scan"] for node in loops]
    assert inside == [[(2, False)], [], [], [], [(2, True), (2, True)], [(2, True), (2, True)]]


def test_weights_are_not_cut_and_gradients_are_written_in_place():
    """A compiled split makes no second stack of the weights' size, whatever the parts."""
    step, args = layers()
    graph = graph_of(step, args)
    result = recompute(graph, {}, splits={0: (again(6, 2, frozenset()), again(2, 2, frozenset()), Trips(4, frozenset()))}).graph
    whole = [node for node in walk(result) for out in node.outputs if result.values[out].shape == (LENGTH, 8, 8) and not node.bodies]
    assert {node.prim for node in whole} == {"broadcast_in_dim", "sub", "mul"}  # the zeros, and the update
    assert not [node for node in walk(result) if node.prim in ("slice", "dynamic_slice", "concatenate", "dynamic_update_slice")]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ((again(12, 5),), "12 trips in segments of 5"),
        ((Trips(11),), "11 trips together"),
        ((Trips(0), Trips(12)), "0 trips"),
        ((Trips(9), again(3, 2)), "3 trips in segments of 2"),
        ((Trips(12, inside=(again(6, 4),)),), "6 trips in segments of 4"),
    ],
)
def test_splits_that_cannot_be(split, message):
    graph = graph_of(*layers())
    with pytest.raises(ValueError, match=message):
        recompute(graph, {}, splits={0: split})


def test_what_shows_does_not_run_again():
    def loss(w, x):
        def layer(x, w):
            jax.debug.print("{}", x[0, 0])
            return jnp.tanh(x @ w), None

        return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

    _, (params, x) = layers()
    blocks = find_blocks(graph_of(lambda w, x: w - 0.1 * jax.grad(loss)(w, x), (params["w"], x)))
    assert blocks[0].scan is not None and not can_split(blocks, 0)


def test_a_straight_block_cannot_be_split():
    graph = graph_of(*STEPS["transformer_loop"]())
    with pytest.raises(ValueError, match="block 0 cannot be split: it is no scan"):
        recompute(graph, {}, splits={0: (Trips(1),)})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("split", [(Trips(9), Trips(3, frozenset())), (again(8, 4), Trips(4, frozenset()))])
def test_what_lies_between_split_scans_runs_again(split, depth):
    """Two recurrent layers: what the second one reads is made again where the backward pass of a split scan has just ended."""

    def loss(weights, x):
        for w in weights:
            _, x = jax.lax.scan(lambda h, x, w=w: (new := jnp.tanh(h @ w + x), new * jnp.sin(new)), jnp.zeros(x.shape[1:]), x)
            x = 2 * jnp.cos(x)
        return jnp.sum(x**2)

    def step(weights, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, jax.grad(loss)(weights, x))

    args = [0.3 * jax.random.normal(jax.random.key(k), (8, 8)) for k in range(2)], jax.random.normal(jax.random.key(2), (LENGTH, 4, 8))
    graph = graph_of(step, args)
    blocks = find_blocks(graph)
    splits = {k: split for k, block in enumerate(blocks) if block.scan}
    made = {x for block in blocks if not block.scan for x in block.made} & {x for block in blocks for x in block.residuals}
    assert splits and made
    for value in sorted(made):
        result = recompute(graph, {k: frozenset() for k in range(len(blocks))}, [(value, depth)], splits=splits)
        assert_consistent(result.graph)
    assert_alike(jax.tree.leaves(step(*args)), jax.jit(evaluator(result.graph))(*jax.tree.leaves(args)))
