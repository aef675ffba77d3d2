"""Room for gaps in the compiler's heap, and the answers between the levels that make it cheap."""

from __future__ import annotations

import copy
import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxauto
from jaxauto import certify, planner, reserve
from jaxauto.options import Options
from jaxauto.reserve import GAPS, between, has_room, heap_gaps
from jaxauto.solve.check import check
from jaxauto.solve.finer import finer
from jaxauto.solve.model import Model

BATCH, WIDTH, VOCABULARY, LAYERS = 64, 512, 16384, 8


def step(params, tokens):
    def loss(params):
        def layer(x, w):
            h = jnp.tanh(x @ w["in"])
            return x + jnp.exp(-(h**2)) @ w["out"], None

        x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
        return jnp.mean(jax.nn.logsumexp((x @ params["embed"].T).astype(jnp.float32), -1))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, grads), value


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


LAYER = {"in": array(LAYERS, WIDTH, 8 * WIDTH), "out": array(LAYERS, 8 * WIDTH, WIDTH)}
ARGS = ({"embed": array(VOCABULARY, WIDTH), "layers": LAYER}, array(BATCH, 512, dtype=jnp.int32))
LOGITS = BATCH * 512 * VOCABULARY * 2 / 8  # bytes on one of eight devices; in float32 they are fused away


@pytest.fixture(scope="module")
def roomy():
    return jaxauto.plan(step, *ARGS, target="v5e:2x4", certify=False)


def best(plan):
    return plan._bound().solved.found.best


def test_the_largest_array_that_is_no_stack_makes_the_gaps(roomy):
    assert heap_gaps(best(roomy)) == pytest.approx(GAPS["tpu"] * LOGITS)
    on_gpu = jaxauto.plan(step, *ARGS, target="h100:8", certify=False)
    assert heap_gaps(best(on_gpu)) == 0 and has_room(best(on_gpu), best(on_gpu).peak_bytes)


def test_a_plan_with_room_is_left_alone(roomy):
    needed = best(roomy).peak_bytes + heap_gaps(best(roomy))
    again = jaxauto.plan(step, *ARGS, target="v5e:2x4", certify=False, memory_budget=needed * 1.001)
    assert again.estimate.peak_memory == roomy.estimate.peak_memory and not again.notes


def tight(roomy):
    """A plan under a budget that leaves the best one no room."""
    budget = best(roomy).peak_bytes + 0.9 * heap_gaps(best(roomy))
    return jaxauto.plan(step, *ARGS, target="v5e:2x4", certify=False, memory_budget=budget), budget


def test_a_plan_without_room_gives_way_and_says_so(monkeypatch, roomy):
    monkeypatch.setattr(reserve, "_DEAREST", 0.1)
    plan, budget = tight(roomy)
    assert plan.estimate.peak_memory + heap_gaps(best(plan)) <= budget == plan.budget_bytes
    assert roomy.estimate.step_time <= plan.estimate.step_time <= 1.1 * roomy.estimate.step_time
    (note,) = plan.notes
    assert "of the budget are left for gaps in the compiler's heap" in note and "certify=True" in note


def test_room_that_takes_too_much_time_is_not_taken(monkeypatch, roomy):
    monkeypatch.setattr(reserve, "_DEAREST", 1e-4)
    plan, _ = tight(roomy)
    assert plan.estimate.step_time == roomy.estimate.step_time
    assert plan.notes[-1].startswith("the compiler's heap may take")


def test_where_nothing_leaves_room_the_plan_says_what_may_happen():
    with pytest.raises(jaxauto.InfeasibleError) as caught:
        jaxauto.plan(step, *ARGS, target="v5e:2x4", certify=False, memory_budget=1e6)
    budget = caught.value.least_bytes * 1.02
    plan = jaxauto.plan(step, *ARGS, target="v5e:2x4", certify=False, memory_budget=budget)
    assert plan.estimate.peak_memory <= budget
    assert plan.notes[-1].startswith("the compiler's heap may take") and "may not fit" in plan.notes[-1]


def test_answers_between_the_levels_are_right_and_differ(roomy):
    found = between(roomy._bound().solved, Options(), 20)
    known = {c.variant.kept for c in roomy._bound().solved.fitting}
    assert len({c.variant.kept for c in found} - known) == len(found) > 0
    assert all(check(c) == [] for c in found)
    assert any(c.peak_bytes < best(roomy).peak_bytes for c in (*found, *roomy._bound().solved.fitting))


def around(plan, base, count):
    """Answers around ``base``, of which none is known yet."""
    solved = plan._bound().solved
    old = base.model
    return finer(solved.remat, base, lambda v: Model(old.program, v, old.mesh, old.chip, {}, old.cache), {base.variant.level}, count)


def test_the_nearest_come_first(roomy):
    few = [c.variant.kept for c in around(roomy, best(roomy), 2)]
    assert few == [c.variant.kept for c in around(roomy, best(roomy), 5)][:2]


def test_answers_between_make_again_what_their_base_does(roomy):
    solved = roomy._bound().solved
    model = copy.copy(best(roomy).model)
    model.variant = solved.remat.variant(dataclasses.replace(model.variant.level, remade=frozenset({(0, 1)})))
    found = around(roomy, dataclasses.replace(best(roomy), model=model), 3)
    assert len(found) == 3 and {c.variant.level.remade for c in found} == {frozenset({(0, 1)})}


def test_where_nothing_may_be_made_again_there_is_nothing_between():
    plan = jaxauto.plan(step, *ARGS, target="v5e:2x4", remat="off", certify=False)
    assert all(kept is None for kept in best(plan).variant.kept)
    assert between(plan._bound().solved, Options(), 20) == []


def test_certification_takes_an_answer_between_the_levels_where_the_search_has_none(monkeypatch, roomy):
    def refuse(*args):
        raise jaxauto.InfeasibleError("nothing fits", None)

    monkeypatch.setattr(planner, "solve", refuse)
    options = roomy._bound().solved.options
    plan = certify._leaner(roomy, 0.9, options, print)
    assert plan is not None and plan.estimate.peak_memory <= 0.9 * roomy.estimate.peak_memory
    known = [*roomy._bound().solved.fitting, *between(roomy._bound().solved, options, 24)]
    assert plan.estimate.step_time == min(c.seconds for c in known if c.peak_bytes <= 0.9 * roomy.estimate.peak_memory)


def test_of_equal_meshes_the_one_with_fewer_axes_is_taken(roomy):
    seconds = roomy.solver.meshes
    assert roomy.mesh.size == 8
    simple = [name for name, s in seconds.items() if s <= min(seconds.values()) * 1.005]
    assert "x".join(map(str, roomy.mesh.shape.values())) == min(simple, key=lambda name: (name.count("x"), seconds[name]))
