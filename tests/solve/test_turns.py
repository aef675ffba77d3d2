"""Copies that layouts cost are in the tables, and no plan has more of them than it needs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxauto
from jaxauto.solve.check import check
from jaxauto.solve.live import timeline
from jaxauto.solve.turns import beside_results, cut_results
from jaxauto.strategies import WHOLE

WEIGHTS = jax.ShapeDtypeStruct((4, 512, 1024), jnp.float32), jax.ShapeDtypeStruct((4, 1024, 512), jnp.float32)
BATCH = jax.ShapeDtypeStruct((2048, 512), jnp.float32)


def step(state, x):
    weights, momentum = state

    def layer(x, w):
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    grads = jax.grad(lambda weights: jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2))(weights)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, weights, momentum), momentum


def planned(target, weights, momentum):
    pins = {"0.0.*": weights, "0.1.*": momentum, "1": PartitionSpec("data")}
    return jaxauto.plan(step, (WEIGHTS, WEIGHTS), BATCH, target=target, mesh={"data": 8}, constraints=pins, remat="off", certify=False)


@pytest.mark.parametrize(("target", "dim", "copies"), [("h100:8", 1, 2), ("h100:8", 2, 2), ("v5e:2x4", 1, 2), ("v5e:2x4", 2, 2)])
def test_results_that_are_gathered_lie_beside_their_memory(target, dim, copies):
    """Weights kept whole and updated in pieces: what is gathered beside it is copied into it."""
    best = planned(target, PartitionSpec(), PartitionSpec(*[None] * dim, "data")).program.solved.best
    last = best.model.buffers.length - 1
    beside = sum(float(t[best.x[i], best.x[j]]) for begin, end, i, j, t in beside_results(best.model) if begin <= end == last)
    assert beside == copies * 4 * 512 * 1024 * 4
    assert check(best, best.peak_bytes, {}) == []
    row = best.model.memory_row(last)
    buffers = replace(row, pairs={}).bytes_at(best.x)
    assert row.bytes_at(best.x) == buffers + beside == timeline(best.model, best.x)[-1]


def test_a_gpu_plan_gathers_weights_along_their_first_dimension():
    cut = [planned("h100:8", PartitionSpec(*[None] * dim, "data"), PartitionSpec(*[None] * dim, "data")) for dim in (1, 2)]
    first, last = (plan.estimate.compute_time for plan in cut)
    assert first < last
    free = jaxauto.plan(step, (WEIGHTS, WEIGHTS), BATCH, target="h100:8", mesh={"data": 8}, remat="off", certify=False)
    assert free.estimate.step_time <= min(plan.estimate.step_time for plan in cut)


@pytest.mark.parametrize(("target", "whole"), [("v5e:2x4", True), ("h100:8", False)])
def test_momentum_that_is_made_whole_is_written_beside_the_part_that_is_kept(target, whole):
    """A device that updates whole weights but keeps a part of the momentum; XLA:GPU makes that part alone."""
    best = planned(target, PartitionSpec(), PartitionSpec(None, "data")).program.solved.best
    model, x = best.model, best.x.copy()
    momentum = {model.var("group", e.source) for e in model.groups.edges if e.node < 0 and model.values[e.value].users}
    for group in momentum:
        x[group] = int(np.flatnonzero((model.states[group] == WHOLE).all(1))[0])
    cut = sum(float(t[x[i], x[j]]) for begin, end, i, j, t in cut_results(model) if begin <= model.buffers.length - 1 == end)
    assert cut == whole * 2 * 4 * 512 * 1024 * 4
    assert check(replace(best, x=x, seconds=model.problem.seconds(x), peak_bytes=timeline(model, x).max())) == []
