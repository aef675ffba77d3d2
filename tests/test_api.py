"""The decorator and the function: signatures, caching, static arguments, options, placing, initialising, determinism."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxauto

WIDE, BATCH = 128, 1024
TX = optax.adamw(1e-3)


def loss_fn(params, batch):
    h = jax.nn.gelu(batch["x"] @ params["w1"] + params["b1"])
    return jnp.mean((h @ params["w2"] - batch["y"]) ** 2)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def init(key):
    a, b = jax.random.split(key)
    params = {
        "w1": jax.random.normal(a, (WIDE, 4 * WIDE)) * 0.05,
        "b1": jnp.zeros(4 * WIDE),
        "w2": jax.random.normal(b, (4 * WIDE, WIDE)) * 0.05,
    }
    return {"params": params, "opt": TX.init(params)}


def make_batch(size=BATCH):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(size, WIDE)).astype(np.float32), "y": rng.normal(size=(size, WIDE)).astype(np.float32)}


def abstract():
    return jax.eval_shape(init, jax.random.key(0)), jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_batch()))


@pytest.fixture(scope="module")
def planned():
    return jaxauto.plan(train_step, *abstract(), mesh={"data": 4, "model": 2})


def test_first_call_plans_later_calls_reuse_and_a_new_shape_plans_anew():
    step = jaxauto.auto_shard(train_step, mesh={"data": 8})
    state = init(jax.random.key(0))
    state, metrics = step(state, make_batch())
    assert len(step.plans) == 1
    state, metrics = step(state, make_batch())
    assert len(step.plans) == 1
    step(state, make_batch(2 * BATCH))
    assert len(step.plans) == 2
    assert metrics["loss"].shape == () and step.__name__ == "train_step"


def test_the_decorator_takes_options_and_plans_without_arrays():
    @jaxauto.auto_shard(mesh={"data": 2, "model": 4}, time_limit=20)
    def decorated(state, batch):
        return train_step(state, batch)

    shapes = abstract()
    before = len(jax.live_arrays())
    plan = decorated.plan(*shapes)
    assert len(jax.live_arrays()) == before
    assert dict(plan.mesh.shape) == {"data": 2, "model": 4}
    assert decorated.plan(*shapes) is plan


def test_the_plan_has_a_spec_for_every_argument(planned):
    state, batch = abstract()
    assert list(planned.specs) == list(planned.in_paths)
    assert planned.specs["0.params.w1"] == planned.out_shardings[0]["params"]["w1"].spec
    assert jax.tree.structure(planned.in_shardings) == jax.tree.structure((state, batch))
    assert isinstance(planned.in_shardings[0]["params"]["w1"], NamedSharding)
    assert planned.specs["1.x"][0] is not None, "a batch of 1024 rows is split"


def test_place_puts_arrays_where_the_plan_wants_them_and_leaves_the_users_alone(planned):
    state, batch = init(jax.random.key(0)), make_batch()
    placed_state, placed_batch = planned.place(state, batch)
    for leaf, sharding in zip(jax.tree.leaves(placed_state), jax.tree.leaves(planned.in_shardings[0]), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    planned.jit()(placed_state, placed_batch)
    assert np.isfinite(np.asarray(state["params"]["w1"])).all(), "the arrays that the user holds were not donated"
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed_state["params"])), "the placed ones were"


def test_what_is_replicated_is_placed_as_a_copy_too():
    """A count of steps, a key, weights that nothing divides: on the device where they were, the placed array must not be the user's."""

    def count(state, x):
        key, _ = jax.random.split(state["key"])
        return {"steps": state["steps"] + 1, "odd": state["odd"] * 0.5, "key": key}, x.sum()

    state, x = {"steps": jnp.int32(0), "odd": jnp.ones((3, 5)), "key": jax.random.key(0)}, jnp.ones((8, 4))
    plan = jaxauto.plan(count, state, x, mesh={"data": 8}, certify=False)
    placed = plan.place(state, x)
    plan.jit()(*placed)
    assert [leaf.is_deleted() for leaf in jax.tree.leaves(placed[0])] == [True] * 3
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, x)))


def test_init_makes_the_state_sharded_and_equal(planned):
    born = planned.init(init, jax.random.key(0))
    assert born["params"]["w1"].sharding.is_equivalent_to(planned.in_shardings[0]["params"]["w1"], 2)
    np.testing.assert_allclose(born["params"]["w1"], init(jax.random.key(0))["params"]["w1"], rtol=1e-6)  # compiled or not


def test_init_of_something_else_is_refused(planned):
    with pytest.raises(jaxauto.PlanMismatchError, match="none of the step's arguments"):
        planned.init(lambda: {"weights": jnp.zeros(3)})


def test_lower_and_compile_are_those_of_jax(planned):
    assert "stablehlo" in planned.lower().as_text()
    assert planned.compile() is planned.compile()
    assert planned.jit().lower(*abstract()).compile().memory_analysis() is not None


def test_the_same_inputs_give_the_same_plan(planned):
    again = jaxauto.plan(train_step, *abstract(), mesh={"data": 4, "model": 2})
    assert again.specs == planned.specs
    assert again.decisions == planned.decisions
    assert again.fingerprint == planned.fingerprint


def test_a_mesh_of_jax_is_taken_as_it_is():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("rows", "columns"))
    plan = jaxauto.plan(train_step, *abstract(), mesh=mesh)
    assert plan.mesh is mesh
    assert {a for spec in plan.in_specs for part in spec if part for a in ((part,) if isinstance(part, str) else part)} <= {
        "rows",
        "columns",
    }


def test_without_a_mesh_shapes_are_searched():
    plan = jaxauto.plan(train_step, *abstract())
    assert set(plan.solver.meshes) == {"8", "4x2"}
    assert plan.mesh.size == 8


def test_constraints_pin_arguments_by_glob():
    pins = {"0.params.w*": P(None, "model"), "1.*": P("data")}
    plan = jaxauto.plan(train_step, *abstract(), mesh={"data": 4, "model": 2}, constraints=pins)
    assert plan.specs["0.params.w1"] == plan.specs["0.params.w2"] == P(None, "model")
    assert plan.specs["1.x"] == plan.specs["1.y"] == P("data")


def test_static_arguments():
    def scaled(x, power, *, mode):
        return (x**power if mode == "power" else x * power).sum()

    step = jaxauto.auto_shard(scaled, mesh={"data": 8}, static_argnums=1, static_argnames="mode")
    x = np.arange(16.0, dtype=np.float32)
    assert float(step(x, 2, mode="power")) == float((x**2).sum())
    assert float(step(x, 3, mode="times")) == float((x * 3).sum())
    assert len(step.plans) == 2


def test_donation_can_be_refused():
    plan = jaxauto.plan(train_step, *abstract(), mesh={"data": 8}, donate_argnums=())
    assert not any(plan.donated)
    state, batch = plan.place(init(jax.random.key(0)), make_batch())
    plan.jit()(state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_an_undecorated_inference_function_works_too():
    plan = jaxauto.plan(
        lambda w, x: jax.nn.softmax(x @ w), jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    )
    w, x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32), np.ones((32, 64), np.float32)
    np.testing.assert_allclose(plan.jit()(w, x), jax.nn.softmax(x @ w), rtol=1e-5)


def deep_step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = h + jax.nn.gelu(h @ w[0]) @ w[1]
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), {"loss": value}


def compiled_bytes(plan):
    stats = plan.compile().memory_analysis()
    return stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes


def test_a_budget_below_the_free_plan_is_met_by_the_compiled_step():
    params = [(jax.ShapeDtypeStruct((32, 128), jnp.float32), jax.ShapeDtypeStruct((128, 32), jnp.float32))] * 8
    args = (params, jax.ShapeDtypeStruct((8192, 32), jnp.float32))
    free = jaxauto.plan(deep_step, *args, mesh={"data": 4, "model": 2})
    budget = int(0.5 * compiled_bytes(free))
    plan = jaxauto.plan(deep_step, *args, mesh={"data": 4, "model": 2}, memory_budget=budget)
    assert plan.certificate is not None and plan.certificate.fits
    assert compiled_bytes(plan) <= budget
    assert any(d.action == "recomputed" for d in plan.remat)


def test_a_plan_for_devices_that_are_elsewhere_is_complete_but_does_not_run():
    plan = jaxauto.plan(train_step, *abstract(), target="v5e:2x4", certify=False)
    assert not plan.is_here and plan.mesh.size == 8
    assert "stablehlo" in plan.lower().as_text()
    assert jax.tree.leaves(plan.in_shardings)[0].mesh == plan.mesh
    for call in (lambda: plan.jit()(init(jax.random.key(0)), make_batch()), lambda: plan.place(*abstract()), plan.compile):
        with pytest.raises(jaxauto.ArgumentError, match="the plan is for v5e:2x4, whose devices are not here"):
            call()


def explicit_mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


@pytest.mark.smoke
@pytest.mark.parametrize("inside", [False, True], ids=["passed", "set"])
def test_a_mesh_whose_axes_are_explicit(inside):
    """What ``jax.make_mesh`` makes unless it is told otherwise: steps have pins, which such axes do not allow."""
    mesh, state, batch = explicit_mesh(), init(jax.random.key(0)), make_batch()
    want, _ = train_step(*jax.tree.map(jnp.asarray, train_step(state, batch)[:1]), batch)
    step = jaxauto.auto_shard(mesh=mesh, progress=False)(train_step)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        state, _ = step(state, batch)
        state, metrics = step(state, batch)
        assert np.isfinite(2 * metrics["loss"]), "results are of the mesh that is set"
        plan = step.plans[-1]
        plan.lower()
        (placed, _), made = plan.place(state, batch), plan.init(init, jax.random.key(1))
        assert {x.sharding.mesh.axis_types for x in jax.tree.leaves((placed, made, state))} == {
            (AxisType.Explicit if inside else AxisType.Auto,) * 2
        }
        for x, y in zip(jax.tree.leaves(want), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
        step(placed, batch)


def test_arrays_that_are_on_explicit_axes_where_the_plan_wants_them():
    mesh, state, batch = explicit_mesh(), init(jax.random.key(0)), make_batch()
    step = jaxauto.auto_shard(mesh=mesh, progress=False)(train_step)
    plan = step.plan(state, batch)
    there = [NamedSharding(mesh, sharding.spec) for sharding in plan.flat_in_shardings]
    leaves, tree = jax.tree.flatten((state, batch))
    placed = jax.tree.unflatten(tree, [jax.device_put(x, s, may_alias=False) for x, s in zip(leaves, there, strict=True)])
    want = jax.tree.leaves(train_step(state, batch))
    for x, y in zip(want, jax.tree.leaves(step(*placed)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_an_array_on_explicit_axes_that_the_step_reads_and_is_not_given():
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        table = jnp.ones(8)
        with pytest.raises(jaxauto.errors.TraceError, match=r"(?s)axes are Explicit and is no argument.*AxisType\.Auto"):
            jaxauto.plan(lambda x: x * table, jnp.ones(8), mesh=mesh, progress=False)
