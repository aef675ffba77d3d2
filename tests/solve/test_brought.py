"""What operands are brought into lies in memory where their operations run, and so does what only a collective reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxauto
from jaxauto.cost.onchip import room
from jaxauto.solve.check import check
from jaxauto.solve.live import timeline

MIB = 2**20
DEEP, WIDE, ROWS = 4, 2048, 4096


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def chain(weights, x):
    """Layers with weights of 16 MiB, whose pieces are 2 MiB on eight devices."""

    def loss(weights):
        y = x
        for k, w in enumerate(weights):
            with jax.named_scope(f"layer{k}"):
                y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return [w - g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


@pytest.mark.parametrize("remat", ["off", "auto"])
def test_recomputed_operations_have_their_operands_brought_too(remat):
    """FSDP: at every dot that reads a weight there is the gathered one, in the backward pass of a step that recomputes as well."""
    args = [spec(WIDE, WIDE)] * DEEP, spec(4 * ROWS, WIDE)  # so many that weights are what is gathered, not rows
    pins = {"0.*": P("data"), "1": P("data")}
    make = {"target": "h100:8", "mesh": {"data": 8}, "constraints": pins, "certify": False, "progress": False}
    budget = 1e15
    if remat == "auto":
        with pytest.raises(jaxauto.InfeasibleError) as error:
            jaxauto.plan(chain, *args, memory_budget=2, **make)
        budget = error.value.least_bytes * 1.01
    best = jaxauto.plan(chain, *args, remat=remat, memory_budget=budget, **make).program.solved.best
    assert check(best, best.peak_bytes, {}) == []
    model = best.model
    held = model.arrivals.timeline(best.x, model.buffers.length)
    weights = {x for x in model.groups.graph.inputs if model.values[x].shape == (WIDE, WIDE)}
    runs = [(op, node) for op, node in model.variant.operations if weights & set(op.node.inputs)]
    copies = [node for op, node in runs if node.id != op.node.id]
    assert bool(copies) == (remat == "auto")
    assert all(held[model.buffers.position[n.id]] >= 16 * MIB for _, n in runs)
    for n in copies:
        row = model.memory_row(model.buffers.position[n.id])
        assert row.bytes_at(best.x) == pytest.approx(timeline(model, best.x)[row.position])


def test_a_collective_reads_from_memory_what_would_stay_on_chip():
    """An activation of 32 MiB on v5e is made and read on chip, but not if it is exchanged in between."""

    def step(x, a, b):
        return jnp.tanh(x @ a) @ b

    def held(there):
        args = spec(2**16, 1024, dtype=jnp.bfloat16), spec(1024, 2048, dtype=jnp.bfloat16), spec(2048, 1024, dtype=jnp.bfloat16)
        pins = {"0": P("data"), "1": P(), "2": there}
        plan = jaxauto.plan(
            step,
            *args,
            target="v5e:2x4",
            mesh={"data": 8},
            constraints=pins,
            remat="off",
            certify=False,
            progress=False,
        )
        best = plan.program.solved.best
        assert check(best, best.peak_bytes, {}) == []
        return best

    best = held(P())
    model = best.model
    assert model.arrivals.timeline(best.x, model.buffers.length).max() == 0
    (second,) = [
        op for op in model.groups.operations if op.node.prim == "dot_general" and op.node.inputs[1] == model.groups.graph.inputs[2]
    ]
    x = best.x.copy()
    v = model.var("operation", second.node.id)
    contracted = [k for k, (f, _) in enumerate(second.factors) if f not in {f for _, f in second.results[0].dims}]
    x[v] = next(k for k, state in enumerate(model.states[v]) if state[0] == contracted[0])
    at = model.buffers.position[second.node.id]
    assert model.arrivals.timeline(x, model.buffers.length)[at] >= 2 * 32 * MIB  # where it comes from, and what it becomes


def test_what_on_chip_memory_has_no_room_for_is_in_hbm():
    """Arrays that stay on chip if they are cut evenly, and lie there whole."""

    def step(weights, x):
        loss = lambda weights: jnp.mean(chain_of(weights, x).astype(jnp.float32) ** 2)  # noqa: E731
        return [w - g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

    def chain_of(weights, y):
        for w in weights:
            y = jnp.tanh(y @ w)
        return y

    args = [spec(1024, 1024, dtype=jnp.bfloat16)] * 6, spec(2**14, 1024, dtype=jnp.bfloat16)
    make = {"target": "v5e:2x4", "mesh": {"data": 8}, "remat": "off", "certify": False, "progress": False}
    split = jaxauto.plan(step, *args, constraints={"0.*": P(), "1": P("data")}, **make).program.solved.best
    assert not split.model.crowded_out(split.x).any()
    whole = jaxauto.plan(step, *args, constraints={"0.*": P(), "1": P()}, **make).program.solved.best
    x = np.array([next(k for k, s in enumerate(table) if (s < 0).all()) for table in whole.model.states])
    over = whole.model.crowded_out(x)
    at = int(over.argmax())
    assert over[at] > 0
    plain, crowded = (whole.model.memory_row(at, crowded=kind).bytes_at(x) for kind in (False, True))
    assert crowded - plain == pytest.approx(over[at]) and timeline(whole.model, x)[at] == pytest.approx(crowded)
    assert over[at] < 32 * MIB * 8 and room(whole.model.chip) < 128 * MIB
