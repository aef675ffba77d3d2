"""What the backward pass waits for, by platform and by how little memory there is; what waits is tested in ``rewrite/test_order.py``."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tanh
from jax.sharding import PartitionSpec

import jaxauto
from jaxauto.solve.awaited import _summed, _too_late, short
from jaxauto.solve.beside import borders_held

WIDTH, LAYERS, ROWS = 512, 8, 131072


def scaled_step(params, x):
    """Residual blocks, the branches of which are scaled."""

    def loss(params):
        y = x
        for into, out, scale in params:
            y = y + scale * (tanh(tanh(y @ into)) @ out)
        return jnp.mean(jnp.sin(y).astype(jnp.float32))

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def plans(target, devices, *, share=None):
    """Nothing recomputed; or under a share of the memory that this takes."""
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    args = [(of((WIDTH, 4 * WIDTH)), of((4 * WIDTH, WIDTH)), of((WIDTH,)))] * LAYERS, of((ROWS * devices // 8, WIDTH))
    make = functools.partial(jaxauto.plan, scaled_step, *args, target=target, mesh={"data": devices}, certify=False, progress=False)
    roomy = make(remat="off")
    return roomy if share is None else make(memory_budget=share * roomy.estimate.peak_memory)


def shapes(plan, numbers):
    values = plan._bound().solved.best.model.values
    return [values[x].shape for x in sorted(numbers or ())]


@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8", "v5e:1x1"])
def test_sums_are_waited_for_on_gpus_and_on_tpus_where_they_would_raise_the_peak(target):
    """One TPU has none of them to send."""
    plan = plans(target, 1 if target == "v5e:1x1" else 8)
    count = shapes(plan, plan.decisions.in_order).count((WIDTH,))
    assert {"v5e:1x1": count == 0, "v5e:2x4": 0 < count < LAYERS, "h100:8": count == 2 * LAYERS}[target]
    assert (WIDTH,) not in shapes(plan, plan.decisions.short) or target == "h100:8"


def test_several_cpu_devices_are_held_to_the_users_own_checkpoints():
    """Nothing is recomputed beside. Held to no order, XLA:CPU makes again what all blocks need at once: 163 MiB instead of 97."""
    rows, width, layers = 16384, 256, 8

    def block(x, weights):
        return x + tanh(tanh(x @ weights[0]) @ weights[1])

    def step(params, x):
        def loss(params):
            y = x
            for weights in params:
                y = jax.checkpoint(block)(y, weights)
            return jnp.mean(y**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    args = [(of((width, 4 * width)), of((4 * width, width)))] * layers, of((rows, width))
    plan = jaxauto.plan(step, *args, target="cpu:4", mesh={"data": 4}, remat="off", certify=False, progress=False)
    found = plan.verify().row("allocated")
    assert plan.decisions.in_order is not None and abs(found.error) < 0.05
    assert found.compiled < 110 * 2**20


@pytest.mark.parametrize("share", [None, 0.5])
def test_operations_on_tpus_wait_where_no_recomputation_does_it_soon(share):
    """With something made again in each block but the last, there is little to wait for; with nothing, all of the pass lies ahead."""
    plan = plans("v5e:2x4", 8, share=share)
    again = any(d.action == "recomputed" for d in plan.remat)
    assert again is (share is not None)
    assert plan.decisions.short <= plan.decisions.in_order
    assert (len(plan.decisions.short) <= 1) is again


def test_a_sum_reads_what_the_operation_reads_that_is_fused_with_it():
    """Values 0 to 4: a cotangent and a weight in memory, a dot's operand that is made of 4 as it is read, its result that lies nowhere."""
    dot, total = SimpleNamespace(id=7, inputs=[1, 2]), SimpleNamespace(id=8)
    buffers = SimpleNamespace(read_at={8: [0, 3]}, held={2: (4,)})
    assert {*_summed(buffers, total, {3: dot}, {0, 4})} == {0, 1, 4}
    assert {*_summed(buffers, total, {3: dot}, {0, 3, 4})} == {0, 3}, "a result that is in memory"
    assert {*_summed(buffers, total, {}, {0, 4})} == {0, 3}


def test_what_is_made_for_its_borders_is_in_memory_until_the_gradient_is(monkeypatch):
    """Convolutions split by rows of images: some are waited for that would not be, were nothing held for their borders."""

    def step(params, x):
        def loss(params):
            y = x
            for w in params:
                y = jax.nn.silu(jax.lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    args, pins = ([of((3, 3, 256, 256))] * 6, of((1, 8192, 64, 256))), {"1": PartitionSpec(None, "data")}
    plan = jaxauto.plan(step, *args, target="v5e:2x4", mesh={"data": 8}, constraints=pins, remat="off", certify=False, progress=False)
    best = plan._bound().solved.best
    assert sum(bytes_ for _, _, bytes_ in borders_held(best.model, best.x))
    known = short(best)
    monkeypatch.setattr("jaxauto.solve.awaited.borders_held", lambda model, x: ())
    assert short(best) < known


@pytest.mark.parametrize(
    ("live", "late"),
    [
        ([12, 8, 4, 12, 12, 12], []),
        ([12, 10, 4, 1, 1, 1], [0]),
        ([12, 8, 7, 1, 1, 1], [1]),  # with what the first reads there would be 13
        ([12, 10, 7, 1, 1, 1], [0]),  # the first is not put off, so the second can be
    ],
)
def test_what_would_raise_the_peak_is_too_late(monkeypatch, live, late):
    """Three gradients, each of an array of 3 bytes that is read there last; a loop waits for them at the fourth position."""
    nodes = [SimpleNamespace(id=k, backward=True) for k in range(6)]
    places = {node.id: node.id for node in nodes}
    buffers = SimpleNamespace(position=places, loop_start={3: 3})
    variant = SimpleNamespace(rewritten=SimpleNamespace(graph=SimpleNamespace(nodes=nodes)))
    model = SimpleNamespace(buffers=buffers, variant=variant)
    monkeypatch.setattr("jaxauto.solve.awaited.timeline", lambda model, x: np.array(live, float))
    gradients = [(node, node.id, [(node.id, 3.0)]) for node in nodes[:3]]
    assert [*_too_late(SimpleNamespace(model=model, x=None), gradients, [nodes[3]])] == late
