"""Gradients that XLA:TPU makes with their update hold what they are made of until then."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxauto
from jaxauto.solve.beside import held_beside
from jaxauto.solve.check import check
from jaxauto.solve.put_off import held_for_gradients, put_off

ROWS, WIDTH, VOCABULARY, LAYERS = 1024, 256, 8192, 4
KIB = 1024


def step(state, x):
    def loss(state):
        y, _ = jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w), None), x, state[0])
        return jnp.mean(jax.nn.logsumexp((y @ state[1]).astype(jnp.float32), -1))

    return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))


def args():
    of = jax.ShapeDtypeStruct
    return (of((LAYERS, WIDTH, WIDTH), jnp.bfloat16), of((WIDTH, VOCABULARY), jnp.bfloat16)), of((ROWS, WIDTH), jnp.bfloat16)


def best_of(target, pins, devices=8):
    mesh = {"data": devices}
    plan = jaxauto.plan(step, *args(), target=target, mesh=mesh, constraints=pins, remat="off", certify=False, progress=False)
    best = plan.program.solved.best
    assert check(best, best.peak_bytes, {}) == []
    return best


VOCABULARY_SPLIT = {"0.0": P(), "0.1": P(None, "data"), "1": P()}


@pytest.mark.parametrize("target", ["v5e:2x4", "v5p:2x2x2"])
def test_a_cotangent_is_written_and_held_until_the_loops_have_run(target):
    best = best_of(target, VOCABULARY_SPLIT)
    loop = [n for n in best.variant.rewritten.graph.nodes if n.bodies and n.backward][-1]
    held = held_beside(best.model).timeline(best.x, best.model.buffers.length)
    cotangent = ROWS * VOCABULARY / 8 * 2
    end = best.model.buffers.position[loop.id]
    assert {gone.end for gone in put_off(best.model)} == {end}
    assert (held[best.model.buffers.loop_start[loop.id] : end + 1] >= cotangent).all() and held[end + 1] == 0
    assert cotangent == 2048 * KIB


def test_nothing_is_held_where_the_gradient_is_summed():
    model = best_of("v5e:2x4", {}).model
    (op,) = {id(gone.operation): gone.operation for gone in put_off(model)}.values()
    v, contracted = model.var("operation", op.node.id), [f for f, _ in op.factors].index("k0")
    rows = list(held_for_gradients(model))
    tables = [table if i == v else table.T for *_, i, _, table in rows]
    assert tables and all(((table > 0).any(1) == (model.states[v] != contracted).all(1)).all() for table in tables)


@pytest.mark.parametrize(("target", "devices"), [("h100:8", 8), ("v5e:1x1", 1), ("cpu:8", 8)])
def test_elsewhere_none_is_put_off_so(target, devices):
    assert put_off(best_of(target, VOCABULARY_SPLIT if devices > 1 else {}, devices).model) == []
