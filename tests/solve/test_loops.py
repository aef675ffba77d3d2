"""What hides behind a trip of a loop, and what is summed after the loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxauto
from jaxauto import planner
from jaxauto.graph import walk
from jaxauto.solve.loops import accumulated, combined, hidden_seconds, shadows
from jaxauto.targets.target import Target

WIDTH, TRIPS, BATCH = 256, 64, 64


def step(w, x):
    def loss(w):
        return jnp.sum(jax.lax.scan(lambda h, now: (jnp.tanh(now + (h @ w)[:, : now.shape[1]]), None), x[0], x)[0])

    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))


ARGS = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((TRIPS, BATCH, WIDTH), jnp.float32)


def groups_of(fn, *args):
    return planner.read(fn, args, {}).groups


@pytest.mark.parametrize(("width", "prims"), [(WIDTH, {"dot_general"}), (8 * WIDTH, {"dot_general", "transpose"})])
def test_a_gradient_that_a_loop_adds_up_is_summed_once(width, prims):
    """It is what the dot makes, and, where the cotangent is wide and nothing is exchanged (swapped.py), its transpose."""
    groups = groups_of(step, jax.ShapeDtypeStruct((WIDTH, width), jnp.float32), ARGS[1])
    found = {groups.graph.values[x].producer.prim: trips for x, trips in accumulated(groups).items()}
    assert found == dict.fromkeys(prims, TRIPS)


@pytest.mark.parametrize("used", ["carry", "term"])
def test_what_a_trip_reads_is_summed_in_it(used):
    def fn(w, x):
        def trip(total, now):
            term = now @ w
            return total + term, (total if used == "carry" else term).sum()

        return jax.lax.scan(trip, jnp.zeros((BATCH, WIDTH)), x)

    assert accumulated(groups_of(fn, *ARGS)) == {}


def test_a_trip_hides_as_much_as_it_works():
    chip, groups = Target("h100:8").chip, groups_of(step, *ARGS)
    dot = next(n for n in walk(groups.graph) if n.prim == "dot_general" and not n.backward)
    flops, bytes_ = 2 * BATCH * WIDTH * WIDTH, 4 * ((1 + chip.dot_writes) * BATCH * WIDTH + WIDTH * WIDTH)
    work = flops / (chip.flops_efficiency * chip.peak_flops("float32"))
    moved = bytes_ / (chip.bandwidth_efficiency * chip.hbm_bandwidth)
    found = shadows(groups, chip, 8)
    assert found[dot.id] == pytest.approx(max(work, moved) / 8)
    assert all(n.id not in found for n in groups.graph.nodes), "outside of loops anything may hide"


def test_of_a_long_collective_only_so_much_is_hidden():
    assert hidden_seconds(np.array([1.0, 3.0]), 2.0).tolist() == [1.0, 2.0]
    assert hidden_seconds(np.array([1.0, 3.0]), float("inf")).tolist() == [1.0, 3.0]


@pytest.mark.parametrize("target", ["h100:8", "v5p:2x2x2"])
def test_a_plan_moves_no_gradients_in_the_trips_of_a_short_loop(target):
    """A sum over devices in each trip would be 64 collectives, each with a dot of microseconds to hide behind."""
    args = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((64, 4096, 1024), jnp.bfloat16)
    plan = jaxauto.plan(step, *args, target=target, mesh={"data": 8}, certify=False)
    assert [(c.kind, c.count) for c in plan.estimate.collectives] == [("all-reduce", 1)]


def test_sums_of_one_body_and_dtype_are_one():
    """Two gradients in bfloat16 that a trip makes, and, after the loop, one in float32; what the backward pass reads on is none of them."""

    def step(params, x):
        def loss(params):
            layers, last = params
            trip = lambda h, w: (jnp.tanh(h @ w[0].astype(jnp.bfloat16)) @ w[1].astype(jnp.bfloat16), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(trip, x, layers)[0].astype(jnp.float32) @ last)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    stack, last = jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    read = planner.read(step, (((stack, stack), last), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16)), {})
    values = read.graph.values
    dots = {x: n for x, n in combined(read.groups, read.late_only).items() if values[x].producer.prim == "dot_general"}
    assert sorted((str(values[x].dtype), n) for x, n in dots.items()) == [("bfloat16", 2), ("bfloat16", 2), ("float32", 1)]
    assert combined(read.groups, frozenset()) == {}
