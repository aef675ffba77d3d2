"""What an estimate counts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxauto

WIDTH, HIDDEN, ROWS, LAYERS = 128, 512, 1024, 3


def train(params, x, checkpoint, scanned):
    def block(y, layer):
        return y + jnp.tanh(jnp.tanh(y @ layer["up"]) @ layer["down"]), None

    block = checkpoint(block)

    def loss(params):
        y = x
        if scanned:
            y, _ = jax.lax.scan(block, y, params)
        else:
            for k in range(LAYERS):
                y, _ = block(y, {name: p[k] for name, p in params.items()})
        return jnp.sum(y * y)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGS = ({"up": struct(LAYERS, WIDTH, HIDDEN), "down": struct(LAYERS, HIDDEN, WIDTH)}, struct(ROWS, WIDTH))
CHECKPOINTS = {
    "none": lambda block: block,
    "all": jax.checkpoint,
    "dots saved": partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
    "in a loop": partial(jax.checkpoint, prevent_cse=False),
    "twice": lambda block: jax.checkpoint(jax.checkpoint(block)),
}


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_model_flops_leave_recomputation_out_the_users_own_too(name, scanned):
    """A dot of the forward pass has two in the backward pass, but for the first layer's: nothing asks for the gradient of the batch."""
    step = partial(train, checkpoint=CHECKPOINTS[name], scanned=scanned)
    plan = jaxauto.plan(step, *ARGS, target="h100:1", certify=False, progress=False)
    peak = jaxauto.Target("h100:1").chip.peak_flops("float32")
    dots = 6 * LAYERS - (0 if scanned else 1)
    expected = dots * 2 * ROWS * WIDTH * HIDDEN
    assert plan.estimate.mfu * plan.estimate.step_time * peak == pytest.approx(expected)
    if name in ("all", "in a loop", "twice"):
        assert plan.estimate.flops > 1.2 * expected
    elif not any(d.action == "recomputed" for d in plan.remat):
        assert plan.estimate.flops == pytest.approx(expected)


@pytest.mark.parametrize(("rows", "longer"), [(2**20, "communication"), (64, "communication"), (64, "computation")])
def test_of_communication_no_more_is_waited_for_than_there_is(rows, longer):
    """A share of what could hide is waited for: of the shorter of the two, be it the computation that hides or the communication."""
    width = 128 if longer == "communication" else 8192

    def step(params, x):
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))(params)
        return {"w": params["w"] - 0.1 * grads["w"]}

    args = {"w": struct(width, width)}, struct(rows, width)
    estimate = jaxauto.plan(step, *args, target="v5p:1x1x1", certify=False, progress=False).estimate
    assert (estimate.comm_time > estimate.compute_time) == (longer == "communication")
    share = jaxauto.Target("v5p:1x1x1").chip.exposed_share
    shorter = min(estimate.comm_time, estimate.compute_time)
    assert estimate.step_time == pytest.approx(max(estimate.comm_time, estimate.compute_time) + share * shorter)
    assert estimate.exposed_comm_time < estimate.comm_time


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, None, None, "x")], ids=["whole", "batch", "channels"])
def test_xla_on_cpu_convolves_all_groups_of_a_batch_with_all(spec):
    """The gradient of a depthwise convolution's kernel; other compilers keep the groups apart."""

    def step(x, cotangent):
        def forward(kernel):
            return jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=32
            )

        return jax.vjp(forward, jnp.zeros((5, 5, 1, 32)))[1](cotangent)[0]

    args = struct(8, 16, 16, 32), struct(8, 16, 16, 32)
    plan = jaxauto.plan(step, *args, target="cpu:8", mesh={"x": 8}, constraints={"0": spec, "1": spec}, progress=False)
    flops = plan.verify().row("matrix flops")
    assert flops.estimated == pytest.approx(flops.compiled)
    apart = jaxauto.plan(step, *args, target="h100:8", mesh={"x": 8}, constraints={"0": spec, "1": spec}, certify=False, progress=False)
    assert apart.estimate.flops < flops.estimated / 3
