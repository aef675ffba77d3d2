"""The zoo itself: every step trains under jax.jit, and the comparison in helpers.py passes what is right and catches what is wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import MUTATING_STEPS, SMOKE_STEPS, STEPS, assert_same_mutation, assert_same_training, precise
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def shard_by_hand(args):
    """Arguments on a 4 × 2 mesh, each leaf split along the first dimensions that divide; the compiler does the rest."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    def place(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        spec, free = [None] * leaf.ndim, ["data", "model"]
        for dimension, size in enumerate(leaf.shape):
            if free and size % mesh.shape[free[0]] == 0:
                spec[dimension] = free.pop(0)
        return jax.device_put(leaf, NamedSharding(mesh, P(*spec)))

    return jax.tree.map(place, args)


def smoke_or_not(name):
    return pytest.param(name, marks=pytest.mark.smoke if name in SMOKE_STEPS else ())


@pytest.mark.parametrize("name", [smoke_or_not(name) for name in STEPS])
def test_step_trains_alike_when_its_arguments_are_sharded_by_hand(name):
    step, args = STEPS[name]()
    jitted = jax.jit(step)
    with precise(name, args) as args:
        losses = assert_same_training(step, args, lambda *now: jitted(*shard_by_hand(now)), steps=4)
    assert min(losses[1:]) < losses[0], losses


@pytest.mark.parametrize("name", MUTATING_STEPS)
def test_mutating_step_changes_its_arguments_and_trains(name):
    step, args = MUTATING_STEPS[name]()
    losses = assert_same_mutation(step, args, nnx.jit(step), steps=4)
    assert min(losses[1:]) < losses[0], losses


@pytest.mark.parametrize("name", STEPS)
def test_factory_is_deterministic(name):
    first, second = (jax.tree.leaves(jax.tree.map(unwrap, STEPS[name]()[1])) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def unwrap(leaf):
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def test_comparison_catches_a_gradient_that_is_slightly_wrong():
    step, (params, batch) = STEPS["mlp_sgd"]()

    def wrong(params, batch):
        new, metrics = step(params, batch)
        return jax.tree.map(lambda p, n: p + 1.01 * (n - p), params, new), metrics

    with pytest.raises(AssertionError, match=r"step 0, result \[0\]\['in'\]\['bias'\]"):
        assert_same_training(step, (params, batch), wrong)


def test_comparison_catches_other_randomness():
    step, args = STEPS["dropout_new_key"]()

    def wrong(state, batch):
        return step(state | {"key": jax.random.fold_in(state["key"], 1)}, batch)

    with pytest.raises(AssertionError, match="step 0"):
        assert_same_training(step, args, wrong)


def test_comparison_catches_a_lost_result():
    step, args = STEPS["value_and_grad_with_aux"]()

    def wrong(params, batch):
        new, metrics = step(params, batch)
        return new, {"loss": metrics["loss"]}

    with pytest.raises(AssertionError, match="differ in structure"):
        assert_same_training(step, args, wrong)
