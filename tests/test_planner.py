"""How the planner goes through meshes."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxauto
from jaxauto import planner
from jaxauto.options import Options
from jaxauto.solve.search import Search
from jaxauto.targets.target import resolve

LAYERS, WIDTH, BATCH = 6, 512, 256


def step(params, x):
    def loss(params):
        def layer(h, w):
            return h + jnp.tanh(h @ w["in"]) @ w["out"], None

        y, _ = jax.lax.scan(layer, jnp.tanh(x), params)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGS = ({"in": array(LAYERS, WIDTH, 4 * WIDTH), "out": array(LAYERS, 4 * WIDTH, WIDTH)}, array(BATCH, 512, WIDTH))
TARGET, OPTIONS = resolve("v5e:4x4"), Options(target="v5e:4x4")


def search(budget, before=None):
    found = planner.read(step, ARGS, {}) if before is None else before.step
    return planner.searched(found, TARGET, budget, OPTIONS, lambda _: None, before)


@pytest.fixture(scope="module")
def free():
    return search(math.inf)


@pytest.fixture
def refined(monkeypatch):
    """Meshes that are refined, in order."""
    names, refine = [], Search.refine

    def noted(self, found, budget):
        names.append("x".join(map(str, self.mesh.sizes)))
        refine(self, found, budget)

    monkeypatch.setattr(Search, "refine", noted)
    return names


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_meshes_that_are_far_behind_are_not_refined_and_nothing_is_lost(monkeypatch, free, refined, share):
    budget = share * free.best.peak_bytes
    some = search(budget)
    here = set(refined)
    assert 0 < len(here) < len(some.meshes)
    refined.clear()
    monkeypatch.setattr(planner, "BEHIND", math.inf)
    monkeypatch.setattr(planner, "ABREAST", math.inf)
    every = search(budget)
    assert set(refined) == set(every.meshes) > here
    assert some.best.seconds == pytest.approx(every.best.seconds, rel=1e-6)


def test_planning_again_under_less_memory_leaves_slow_meshes_out_and_keeps_rewritten_programs(free):
    budget, slowest = 0.6 * free.best.peak_bytes, max(free.meshes, key=lambda name: free.meshes[name])
    behind = {**free.meshes, slowest: planner.ABREAST * 1.01 * free.best.seconds}
    again = search(budget, dataclasses.replace(free, meshes=behind))
    assert set(again.meshes) == {*free.meshes} - {slowest}
    assert again.remat is free.remat
    assert again.best.peak_bytes <= budget
    assert again.best.seconds == pytest.approx(search(budget).best.seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "bound", "may"),
    [(1.02, 1.01, True), (1.2, 1.19, False), (1.2, 0.9, True), (1.2, 0.98, False), (None, 0.5, True)],
)
def test_a_mesh_may_win_that_is_near_or_whose_bound_leaves_much_open(seconds, bound, may):
    best = None if seconds is None else SimpleNamespace(seconds=seconds)
    assert planner._may_win(SimpleNamespace(best=best, bound=bound), 1.0, 1.03) is may


@pytest.mark.parametrize("target", ["v5e:1x1", "h100:8", "cpu:8"])
def test_a_loop_of_no_trips_can_be_planned(target):
    """A model without layers: a baseline, or a test of somebody's."""

    def step(weights, x):
        loss = lambda w: jnp.sum(jax.lax.scan(lambda y, v: (jnp.tanh(y @ v), None), x, w)[0] ** 2)  # noqa: E731
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    arguments = jax.ShapeDtypeStruct((0, 64, 64), jnp.float32), jax.ShapeDtypeStruct((8, 64), jnp.float32)
    plan = jaxauto.plan(step, *arguments, target=target, certify=False, progress=False)
    assert plan.estimate.flops == 0 and plan.estimate.peak_memory > 0
    assert jaxauto.profile(step, *arguments, target=target).matmul_flops == 0
