"""The text of every message, and that after it the user's arrays and function are as before."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import jaxauto


def step(state, batch):
    grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grads}, {"loss": jnp.float32(0)}


STATE, BATCH = {"w": jax.ShapeDtypeStruct((60, 64), jnp.float32)}, jax.ShapeDtypeStruct((48, 60), jnp.float32)
MESH = {"data": 4, "model": 2}

REFUSED = {
    "a constraint that names no argument": (
        {"constraints": {"0.weights": P("data")}},
        jaxauto.ConstraintError,
        r"constraint '0\.weights' matches no argument; paths look like 0\.w",
    ),
    "a constraint that names no axis": (
        {"constraints": {"0.w": P("tensor")}},
        jaxauto.ConstraintError,
        r"0\.w: .*\('tensor',\) names mesh axis 'tensor'; the mesh has \{'data': 4, 'model': 2\}",
    ),
    "a dimension that does not divide": (
        {"mesh": {"data": 8}, "constraints": {"0.w": P("data")}},
        jaxauto.ConstraintError,
        r"0\.w has shape \(60, 64\): dimension 0 of size 60 cannot be split 8 ways .*Pad it to 64",
    ),
    "more dimensions than there are": (
        {"constraints": {"0.w": P("data", None, "model")}},
        jaxauto.ConstraintError,
        r"0\.w has shape \(60, 64\): .* names 3 dimensions, it has 2",
    ),
    "a constraint that is no PartitionSpec": (
        {"constraints": {"0.w": "data"}},
        jaxauto.ConstraintError,
        r"0\.w: constraints are jax\.sharding\.PartitionSpec objects, not str",
    ),
    "a mesh larger than the devices": (
        {"mesh": {"data": 16}},
        jaxauto.ArgumentError,
        r"mesh \{'data': 16\} needs 16 devices; cpu:8 has 8\. .*--xla_force_host_platform_device_count",
    ),
    "a budget that is none": ({"memory_budget": "lots"}, jaxauto.ArgumentError, r"memory_budget='lots': give bytes .*\"14GiB\""),
    "an unknown remat": ({"remat": "full"}, jaxauto.ArgumentError, r"remat='full': give \"auto\", \"off\" or \"offload\""),
    "an unknown chip": ({"target": "v9x:8"}, jaxauto.TargetError, r"v9x"),
    "a budget that nothing meets": (
        {"memory_budget": 4000, "certify": False},
        jaxauto.InfeasibleError,
        r"no plan fits 3\.91 KiB on each of 8 x cpu: the least that any plan needs is [0-9.]+ KiB .*made of .*parameters",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, error, text = REFUSED[name]
    with pytest.raises(error) as caught:
        jaxauto.plan(step, STATE, BATCH, **{"mesh": MESH, **({"mesh": None} if "target" in options else {}), **options})
    assert re.search(text, str(caught.value), re.DOTALL), str(caught.value)
    assert isinstance(caught.value, jaxauto.JaxAutoError)


def arrays():
    return {"w": jnp.ones((60, 64))}, jnp.ones((48, 60))


def test_a_call_with_other_shapes_names_the_leaf():
    plan = jaxauto.plan(step, STATE, BATCH, mesh=MESH)
    with pytest.raises(jaxauto.PlanMismatchError, match=r"argument 1 is float32\[24, 60\]; the plan was made for float32\[48, 60\]"):
        plan.jit()({"w": jnp.ones((60, 64))}, jnp.ones((24, 60)))
    with pytest.raises(jaxauto.PlanMismatchError, match=r"argument 0\.w is int32\[60, 64\]; the plan was made for float32\[60, 64\]"):
        plan.jit()({"w": jnp.ones((60, 64), jnp.int32)}, jnp.ones((48, 60)))
    with pytest.raises(jaxauto.PlanMismatchError, match="another structure than the plan was made for: 3 leaves instead of 2"):
        plan.jit()({"w": jnp.ones((60, 64)), "b": jnp.ones(64)}, jnp.ones((48, 60)))


def test_deleted_arrays_are_named():
    sharded = jaxauto.auto_shard(step, mesh=MESH)
    state, batch = arrays()
    state, _ = sharded(state, batch)
    kept = state
    state, _ = sharded(state, batch)
    with pytest.raises(
        jaxauto.ArgumentError, match=r"argument 0\.w is an array that was deleted: an earlier call took \(donated\) its buffer"
    ):
        sharded(kept, batch)
    sharded(state, batch)


def test_a_step_that_cannot_be_traced_leaves_everything_usable():
    def bad(state, batch):
        if batch.sum() > 0:
            return state
        return state

    state, batch = arrays()
    sharded = jaxauto.auto_shard(bad, mesh=MESH)
    with pytest.raises(jaxauto.TraceError, match="bad cannot be traced: TracerBoolConversionError"):
        sharded(state, batch)
    assert bad(state, batch) is state
    np.testing.assert_array_equal(state["w"], 1.0)


def test_after_an_infeasible_budget_the_arrays_are_there():
    state, batch = arrays()
    with pytest.raises(jaxauto.InfeasibleError):
        jaxauto.auto_shard(step, mesh=MESH, memory_budget=1000)(state, batch)
    np.testing.assert_array_equal(state["w"], 1.0)
    jaxauto.auto_shard(step, mesh=MESH)(state, batch)


def test_an_unknown_option_is_named():
    with pytest.raises(jaxauto.ArgumentError, match="auto_shard has no option 'meshes'; it takes"):
        jaxauto.auto_shard(step, meshes=MESH)


def tripling(name):
    """A primitive of a user's own, as a Pallas kernel or an FFI call would be."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x * 3)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x * 3, multiple_results=False))
    return primitive


def test_an_unknown_primitive_is_replicated_with_one_warning():
    primitive = tripling("mystery_scale")

    def uses_it(state, batch):
        y = primitive.bind(primitive.bind(batch))
        return {"w": state["w"] - y.sum()}, {"loss": y.mean()}

    with pytest.warns(jaxauto.UnknownPrimitiveWarning) as caught:
        plan = jaxauto.plan(uses_it, STATE, BATCH, mesh=MESH)
    assert len(caught) == 1
    assert "mystery_scale" in str(caught[0].message) and "test_errors.py" in str(caught[0].message)
    assert any("mystery_scale" in note for note in plan.notes)
    state, batch = arrays()
    out, metrics = plan.jit()(state, batch)
    assert float(metrics["loss"]) == pytest.approx(9.0)
    np.testing.assert_allclose(out["w"], 1 - 9.0 * 48 * 60, rtol=1e-5)


def test_a_registered_rule_is_used_instead():
    primitive = tripling("known_scale")

    @jaxauto.register_rule("known_scale")
    def rule(eqn):
        return jaxauto.OpRule("b m -> b m")

    plan = jaxauto.plan(lambda x: primitive.bind(x) * 2, jax.ShapeDtypeStruct((64, 128), jnp.float32), mesh=MESH)
    assert plan.notes == ()
    np.testing.assert_array_equal(plan.jit()(np.ones((64, 128), np.float32)), 6.0)
