"""What the tables charge to which resource."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import jaxauto
from jaxauto.solve.turns import updating


def step(state, x):
    params, momentum = state

    def loss(params):
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), value


WEIGHTS = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 3
ARGS = ((WEIGHTS, WEIGHTS), jax.ShapeDtypeStruct((8192, 1024), jnp.float32))


@pytest.fixture(scope="module")
def best():
    pins = {"0.0.*": PartitionSpec(), "0.1.*": PartitionSpec("data"), "1": PartitionSpec("data")}
    plan = jaxauto.plan(step, *ARGS, target="v5e:2x4", mesh={"data": 8}, constraints=pins, certify=False)
    return plan.program.solved.found.best


def test_what_leaves_the_step_at_its_end_is_waited_for(best):
    """Parameters kept whole, their update cut as the momentum is: the gather has nothing left to hide behind."""
    model, outputs = best.model, set(best.model.groups.graph.outputs)
    leaving = [e for e in model.groups.edges if e.node < 0 and e.value in outputs]
    assert len(leaving) >= 3 and {model.edge_resource(e) for e in leaving} == {"blocking"}
    weights = [e for e in model.groups.edges if e.value in model.program.known_early and e.value not in outputs]
    read = updating(model)  # for the update
    assert {model.edge_resource(e) for e in weights if (e.node, e.operand) not in read} <= {"prefetch"}
    ahead = [gradient for gradient, first in read.values() if first]
    assert ahead and len(ahead) == len({*ahead}) == len({gradient for gradient, _ in read.values()}), "one of each weight's"
    resources = {key: model.edge_resource(e) for e in weights if (key := (e.node, e.operand)) in read}
    assert resources == {key: "prefetch" if first else "blocking" for key, (_, first) in read.items()}


def test_the_gathers_of_an_update_are_in_the_time_of_the_step(best):
    found = [(kind, resource, seconds) for kind, _, _, _, seconds, resource, _ in best.model.collectives(best.x)]
    waited = [seconds for kind, resource, seconds in found if (kind, resource) == ("all-gather", "blocking")]
    assert len(waited) == 3 and sum(waited) <= best.model.problem.resource("blocking", best.x) * (1 + 1e-9)
    assert [resource for kind, resource, _ in found if kind == "reduce-scatter"] == ["prefetch"] * 3


@pytest.mark.parametrize(("target", "precision", "width"), [("v5e:2x4", None, 2), ("v5e:2x4", "highest", 4), ("h100:8", None, 4)])
def test_tpus_are_brought_in_bfloat16_what_they_multiply_so(target, precision, width):
    """Weights in float32, cut over all devices, gathered for the forward pass and for the backward one; the update reads its part."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(jnp.dot(y, w, precision=precision))
            return jnp.mean(y**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    pins = {"0.*": PartitionSpec("data"), "1": PartitionSpec("data")}
    plan = jaxauto.plan(step, WEIGHTS, ARGS[1], target=target, mesh={"data": 8}, constraints=pins, certify=False)
    gathered = {c.bytes_ for c in plan.estimate.collectives if c.kind == "all-gather"}
    assert gathered == {width * 1024 * 1024}


@pytest.mark.parametrize("precision", [None, "highest"])
def test_what_several_operations_read_is_rounded_if_all_of_them_round_it(precision):
    def step(x, weights):
        y = jnp.tanh(x)
        return y @ weights, jnp.dot(weights, y, precision=precision)

    matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    model = jaxauto.plan(step, matrix, matrix, target="v5e:2x4", mesh={"data": 8}, certify=False).program.solved.found.best.model
    shared = [e for e in model.groups.edges if e.node < 0 and e.target in {o.group for op in model.groups.operations for o in op.operands}]
    assert len(shared) == 2  # both operands of both products
    assert {model.edge_bytes(e) for e in shared} == {(2.0 if precision is None else 4.0) * 1024**2}


@pytest.mark.parametrize(("target", "sent"), [("v5e:2x4", 7), ("h100:8", 11)])
def test_borders_are_exchanged_once_for_a_convolution_and_its_gradient(target, sent):
    """Four layers on rows of images: each forward, and for each input's gradient but the first; on GPU for the weights' too."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(jax.lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
            return jnp.mean(y**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    args = [jax.ShapeDtypeStruct((3, 3, 128, 128), jnp.bfloat16)] * 4, jax.ShapeDtypeStruct((1, 4096, 64, 128), jnp.bfloat16)
    pins = {"0.*": PartitionSpec(), "1": PartitionSpec(None, "data")}
    plan = jaxauto.plan(step, *args, target=target, mesh={"data": 8}, constraints=pins, remat="off", certify=False)
    assert sum(c.count for c in plan.estimate.collectives if c.kind == "collective-permute") == 2 * sent
