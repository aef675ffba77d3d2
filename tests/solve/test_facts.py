"""What the tables ask of a program: how often a buffer is made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxauto.planner import read
from jaxauto.solve.facts import buffer_runs
from jaxauto.solve.remat import Level, Remat
from jaxauto.targets.target import Target

LAYERS, WIDTH, ROWS = 6, 16, 8


def block(x, w):
    return x + jnp.tanh(x @ w["into"].astype(jnp.bfloat16)) @ w["out"].astype(jnp.bfloat16)


def step(weights, x):
    """Two matrices in each scanned layer; the first is multiplied again where the block is recomputed."""

    def loss(w):
        y, _ = jax.lax.scan(lambda y, w: (block(y, w), None), x, w)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


@pytest.fixture(scope="module", params=["v5e:2x4", "h100:8"])
def planned(request):
    matrix = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    found = read(step, ({"into": matrix, "out": matrix}, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)), {})
    return Remat(found.graph, found.groups, found.aliased, Target(request.param).chip), found.known_early


def everything_again(remat):
    """The leanest variant."""
    return remat.variant(Level(tuple(frozenset() for _ in remat.blocks)))


def test_a_stack_is_made_once_for_all_trips(planned):
    remat, _ = planned
    variant = everything_again(remat)
    runs = buffer_runs(variant, remat.groups)
    for k, number in enumerate(variant.buffers.ids):
        value = variant.rewritten.graph.values[int(number)]
        if value.shape[:1] == (LAYERS,):
            assert runs[k] == 1
    assert runs.max() == LAYERS, "what is made in the body is made in each trip"
