"""The promise: a step's results are those of one device. Models × meshes × remat modes, several steps, every leaf.

With the costs of a small step the planner often does best to split little. So that every rule, constraint and rewrite is put to work, each
model also runs with communication made free (then all that can be split is) and under a memory budget that only rematerialisation meets.
"""

from __future__ import annotations

import helpers
import pytest

import jaxauto
from jaxauto.cost import reshard

MODELS = list(helpers.STEPS)
MESH_NAMES = list(helpers.MESHES)


@pytest.fixture
def free_communication(monkeypatch):
    """Collectives cost next to nothing: the planner splits everything."""
    monkeypatch.setattr(reshard, "collective_seconds", lambda kind, full_bytes, sizes, links: full_bytes * 1e-18)


def same(name, **options):
    step, args = helpers.STEPS[name]()
    sharded = jaxauto.auto_shard(step, **options)
    helpers.assert_same_training(step, args, sharded)
    return sharded.plans[-1]


@pytest.mark.parametrize(("name", "mesh"), [(name, MESH_NAMES[k % len(MESH_NAMES)]) for k, name in enumerate(MODELS)])
def test_split_as_far_as_it_goes(name, mesh, free_communication):
    plan = same(name, mesh=helpers.MESHES[mesh])
    assert any(axes for spec in plan.in_specs for axes in spec), "with free communication something is split"


@pytest.mark.parametrize("mesh", MESH_NAMES)
@pytest.mark.parametrize("name", helpers.SMOKE_STEPS)
def test_every_mesh(name, mesh):
    same(name, mesh=helpers.MESHES[mesh])


@pytest.mark.smoke
@pytest.mark.parametrize("name", helpers.SMOKE_STEPS)
def test_the_smoke_set(name):
    same(name, mesh=helpers.MESHES["data4_model2"])


@pytest.mark.parametrize("name", MODELS)
def test_recomputed(name):
    """Under a budget a little over the least that any plan needs, so that what can be recomputed is."""
    step, args = helpers.STEPS[name]()
    with pytest.raises(jaxauto.InfeasibleError) as least:
        jaxauto.plan(step, *args, mesh=helpers.MESHES["data8"], memory_budget=2, certify=False)
    budget = helpers.bytes_in(str(least.value)) * 1.05
    plan = same(name, mesh=helpers.MESHES["data8"], memory_budget=budget, certify=False)
    assert plan.estimate.peak_memory <= budget
