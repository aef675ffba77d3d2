"""Random bits in a program, and the masks that are made of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxauto
from jaxauto.graph import build, walk
from jaxauto.masks import hashes, kept_masks

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


def test_masks_that_both_passes_read_are_found():
    graph = graph_of(train, *ARGS)
    masks = kept_masks(graph)
    assert len(masks) == 2 and {graph.values[m].dtype for m in masks} == {jnp.dtype(bool)}
    assert not kept_masks(graph_of(drop, X, SEED))


@pytest.mark.parametrize(("target", "barriers"), [("v5e:1x1", 2), ("v5e:2x4", 2), ("h100:1", 0)])
def test_only_tpus_are_told_to_write_them(target, barriers):
    mesh = {"data": jaxauto.Target(target).num_devices}
    plan = jaxauto.plan(train, *ARGS, target=target, mesh=mesh, remat="off", certify=False, progress=False)
    written = [line for line in plan.lower().as_text().splitlines() if "optimization_barrier" in line and "xi1>" in line]
    assert len(written) == barriers
