"""What is made again between blocks: as little memory as any choice has, as told, with the same results."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rotor, tanh

import jaxauto
from jaxauto.cost.liveness import live_bytes
from jaxauto.planner import read
from jaxauto.solve import nested
from jaxauto.solve.depths import Depths
from jaxauto.solve.remat import Remat
from jaxauto.targets.target import Target

LAYERS = 4


def chain(width=16, rows=512, layers=LAYERS, dtype=jnp.float32):
    """Layers of one shape: what lies between them is much of what there is."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = tanh(tanh(y @ w["in"]) @ w["out"])
            return jnp.mean(y**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, jax.grad(loss)(weights))

    key = jax.random.key(0)
    one = lambda k: {name: jax.random.normal(k, (width, width), dtype) / 4 for name in ("in", "out")}  # noqa: E731
    return step, ([one(k) for k in jax.random.split(key, layers)], jax.random.normal(key, (rows, width), dtype))


def recurrent(width=16, rows=64, length=32):
    """Two scans over time, one after the other."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jax.lax.scan(lambda h, now, w=w: (tanh((h + now) @ w),) * 2, jnp.zeros((rows, width)), y)[1]
            return jnp.mean(y**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, jax.grad(loss)(weights))

    key = jax.random.key(0)
    return step, (
        [jax.random.normal(k, (width, width)) / 4 for k in jax.random.split(key, 2)],
        jax.random.normal(key, (length, rows, width)),
    )


def prepared(step, args, target="h100:1"):
    found = read(step, args, {})
    remat = Remat(found.graph, found.groups, found.aliased, Target(target).chip, devices=Target(target).num_devices)
    return remat, remat.levels()[-1]


def peak(remat, level, remade=frozenset()):
    buffers = remat.variant(dataclasses.replace(level, remade=remade)).buffers
    return float(live_bytes(buffers, buffers.bytes_).max())


def values_of(remat, level):
    before = remat.variant(level)
    live = live_bytes(before.buffers, before.buffers.bytes_)
    kept = dict(enumerate(level.kept))
    return nested._Survey(remat.blocks, before.rewritten.graph, before.buffers, live).values(kept, remat.again_seconds), live


@pytest.mark.parametrize(("make", "target"), [(functools.partial(chain, layers=2), "h100:1"), (recurrent, "v5p:1x1x1")])
def test_no_choice_takes_less_memory(make, target):
    """XLA:GPU fills all stacks of one shape at once, see ``liveness.fill_together``: there running a scan again frees nothing."""
    remat, level = prepared(*make(), target)
    values, _ = values_of(remat, level)
    assert 2 <= len(values) <= 4
    depths = itertools.product(range(len(values) + 1), repeat=len(values))
    every = [frozenset((v.number, d) for v, d in zip(values, depth, strict=True) if d) for depth in depths]
    least = min(peak(remat, level, remade) for remade in every)
    found = [peak(remat, other, other.remade) for other in remat.nested(level)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.95 * peak(remat, level)
    assert found[-1] <= 1.02 * least


LONG = functools.partial(chain, layers=8, dtype=jnp.bfloat16)


@pytest.mark.parametrize(("make", "target"), [(chain, "h100:1"), (recurrent, "h100:1"), (LONG, "h100:1"), (LONG, "v5p:1x1x1")])
def test_memory_is_as_told(make, target):
    remat, level = prepared(*make(), target)
    values, live = values_of(remat, level)
    for other in remat.nested(level):
        told = Depths(values, live).profile(dict(other.remade))
        assert peak(remat, other, other.remade) == pytest.approx(told.max(), rel=0.02)


@pytest.mark.parametrize(("make", "deep", "share"), [(chain, True, 1.001), (recurrent, False, 1.2)])  # at the least scans are cut
def test_a_plan_with_less_than_blocks_alone_need(make, deep, share, tmp_path):
    step, args = make()
    target = "cpu:1"
    with pytest.raises(jaxauto.InfeasibleError) as error:
        jaxauto.plan(step, *args, target=target, mesh={"data": 1}, memory_budget=1e3, certify=False, progress=False)
    least = error.value.least_bytes
    plan = jaxauto.plan(step, *args, target=target, mesh={"data": 1}, memory_budget=share * least, certify=False, progress=False)
    remade = plan.decisions.remade
    assert (max(depth for _, depth in remade) > 1) == deep
    plan.save(tmp_path / "plan.json")
    plan = jaxauto.Plan.load(tmp_path / "plan.json", step, *args)
    assert plan.decisions.remade == remade
    for want, got in zip(jax.tree.leaves(jax.jit(step)(*args)), jax.tree.leaves(plan.jit()(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_no_more_forward_passes_than_the_optimum_of_rotor():
    """Equal layers; budgets for every number of activations, down to one."""
    layers, rows, width = 10, 8192, 512
    args = [jax.ShapeDtypeStruct((width, width), jnp.bfloat16)] * layers, jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)

    def step(ws, x):
        loss = lambda ws: jnp.sum(functools.reduce(lambda h, w: tanh(h @ w), ws, x).astype(jnp.float32) ** 2)  # noqa: E731
        return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws), strict=True)]

    def planned(budget):
        options = {"donate_argnums": (0,), "certify": False, "progress": False}
        return jaxauto.plan(step, *args, target="h100:1", memory_budget=budget, **options).estimate

    activation, forward = 2.0 * rows * width, 2.0 * rows * width * width
    full = planned(60e9)
    again = {}
    for slots in range(layers - 1, 0, -1):
        found = planned(full.peak_memory - (layers - 1 - slots - 0.5) * activation)
        again[slots] = (found.flops - full.flops) / forward
    assert [slots for slots, n in again.items() if n < 1 - 1e-6] == [layers - 1], "only with all of them is nothing run again"
    assert again[1] > 2 * layers, "each layer many times"
    assert all(n <= rotor(0, layers - 1, slots) + 1e-6 for slots, n in again.items()), again
