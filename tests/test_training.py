"""The promise: a step's results are those of one device. Models × meshes × remat modes, several steps, every leaf.

With the costs of a small step the planner often does best to split little. So that every rule, constraint and rewrite is put to work, each
model runs with communication made free (then all that can be split is), under a memory budget that only rematerialisation meets.
"""

from __future__ import annotations

import helpers
import pytest

import jaxauto
from jaxauto.cost import halo, reshard
from jaxauto.solve import check, check_passages

MODELS = list(helpers.STEPS)
MESH_NAMES = list(helpers.MESHES)


@pytest.fixture
def free_communication(monkeypatch):
    """Collectives cost next to nothing: the planner splits everything."""
    for module in (reshard, halo, check, check_passages):
        monkeypatch.setattr(module, "collective_seconds", lambda kind, full_bytes, sizes, links: full_bytes * 1e-18)


def same(step, args, steps=3, **options):
    sharded = jaxauto.auto_shard(step, certify=False, **options)
    helpers.assert_same_training(step, args, sharded, steps=steps)
    return sharded.plans[-1]


def least_bytes(step, args, mesh):
    with pytest.raises(jaxauto.InfeasibleError) as least:
        jaxauto.plan(step, *args, mesh=mesh, memory_budget=2, certify=False)
    return least.value.least_bytes


@pytest.mark.parametrize(("name", "mesh"), [(name, MESH_NAMES[k % len(MESH_NAMES)]) for k, name in enumerate(MODELS)])
def test_split_and_recomputed_as_far_as_it_goes(name, mesh, free_communication):
    step, args = helpers.STEPS[name]()
    with helpers.precise(name, args) as args:
        budget = least_bytes(step, args, helpers.MESHES[mesh]) * 1.02
        plan = same(step, args, steps=2, mesh=helpers.MESHES[mesh], memory_budget=budget)
    assert plan.estimate.peak_memory <= budget
    sizes = helpers.MESHES[mesh].values()
    divisible = any(n % k == 0 for aval in plan.in_avals for n in aval.shape for k in sizes)
    assert divisible == any(axes for spec in plan.in_specs for axes in spec), "with free communication all is split that divides"


@pytest.mark.parametrize("name", helpers.MUTATING_STEPS)
def test_objects_that_the_step_changes_in_place(name):
    step, args = helpers.MUTATING_STEPS[name]()
    helpers.assert_same_mutation(step, args, jaxauto.auto_shard(step, mesh=helpers.MESHES["data4_model2"]))


@pytest.mark.smoke
@pytest.mark.parametrize("name", helpers.SMOKE_STEPS)
def test_the_smoke_set(name):
    step, args = helpers.STEPS[name]()
    same(step, args, mesh=helpers.MESHES["data4_model2"])


@pytest.mark.parametrize("mesh", ["data8", "data2_model4", "model8"])
@pytest.mark.parametrize("name", ["transformer_scan", "adamw_clip_schedule"])
def test_every_mesh(name, mesh):
    step, args = helpers.STEPS[name]()
    same(step, args, mesh=helpers.MESHES[mesh])


@pytest.mark.parametrize("name", ["transformer_loop", "transformer_scan"])
def test_as_written(name, free_communication):
    """remat="off": everything is split, nothing recomputed."""
    step, args = helpers.STEPS[name]()
    plan = same(step, args, mesh=helpers.MESHES["data4_model2"], remat="off")
    assert all(d.action == "kept" for d in plan.remat)
