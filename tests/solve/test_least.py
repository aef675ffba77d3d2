"""The least memory that an InfeasibleError names: that of the enumeration, and one that ``plan`` accepts."""

from __future__ import annotations

import math
import re
import time

import jax
import jax.numpy as jnp
import pytest
from solve.test_optimal import MESHES, enumerated, instances
from zoo import STEPS

import jaxauto
from jaxauto.options import mesh_axes
from jaxauto.planner import read
from jaxauto.solve.fold import fold
from jaxauto.solve.least import least_memory
from jaxauto.solve.model import Program
from jaxauto.solve.remat import Level, Remat
from jaxauto.solve.search import Search
from jaxauto.targets.target import Target


@pytest.mark.parametrize("mesh", range(len(MESHES)))
@pytest.mark.parametrize("kind", ["chain", "two_layers", "attention"])
def test_the_least_is_that_of_the_enumeration(kind, mesh):
    for instance in instances(kind, mesh)[:3]:
        _, peak = enumerated(instance.model().problem)
        levels = instance.remat.levels()[:1]
        search = instance.search()
        found = search.run(1.0, levels)
        least_memory(search, levels, found, 1.0)
        assert found.best is None
        assert peak.min() * (1 - 1e-9) <= found.leanest.peak_bytes <= peak.min() * 1.005


def layers(params, x):
    """Four alike layers, wide inside."""

    def loss(params):
        y = x
        for up, down in params:
            y = y + jnp.tanh(jnp.tanh(y @ up) @ down)
        return jnp.sum(y * y)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_blocks_are_mixed_from_several_levels():
    """Levels of which none recomputes all: a mixture needs less than any of them."""
    step = read(layers, ([(struct(128, 1024), struct(1024, 128))] * 4, struct(2048, 128)), {})
    target = Target("h100:1")
    remat = Remat(step.graph, step.groups, step.aliased, target.chip, devices=1)
    written, *_, lean = remat.levels()
    some = [tuple(k if b % 2 == odd else None for b, k in enumerate(lean.kept)) for odd in (0, 1)]

    def least(levels):
        program = Program(step.groups, fold(step.groups, {}), step.known_early, step.late_only)
        search = Search(program, remat, mesh_axes({"a": 1}, target), target.chip, {}, time.monotonic() + 60)
        found = search.run(1.0, levels)
        alone = found.leanest.peak_bytes
        least_memory(search, levels, found, 1.0)
        return alone, found.leanest.peak_bytes

    alone, mixed = least([written, *(Level(kept, threshold=math.inf) for kept in some)])
    assert mixed < 0.9 * alone
    assert mixed <= least([written, lean])[1] * (1 + 1e-9)


CASES = {
    "user_checkpoint": (STEPS["user_checkpoint"], "v5e:2x4", {"a": 8}),
    "recurrent_scan": (STEPS["recurrent_scan"], "h100:8", {"a": 4, "b": 2}),
    "experts_gather": (STEPS["experts_gather"], "v5e:2x4", {"a": 8}),
    "gradient_accumulation": (STEPS["gradient_accumulation"], "h100:2", {"a": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_for_the_least_budget_exists_and_none_for_less(name):
    make, target, mesh = CASES[name]
    step, args = make()

    def plan(budget):
        return jaxauto.plan(step, *args, target=target, mesh=mesh, memory_budget=budget, certify=False, progress=False)

    with pytest.raises(jaxauto.InfeasibleError) as refused:
        plan(2.0)
    least = refused.value.least_bytes
    assert plan(least).estimate.peak_memory <= least
    with pytest.raises(jaxauto.InfeasibleError):
        plan(0.98 * least)
    told = re.search(r"the least that any plan needs is ([0-9.]+ [KMG]iB)", str(refused.value))
    assert told is not None and plan(told[1]).estimate.peak_memory <= 1.01 * least
