"""What a recomputed operation gathers is there for the backward pass, and told so: once for both, in memory from one to the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxauto
from jaxauto.planner import read
from jaxauto.solve.check import check
from jaxauto.solve.read_twice import held_for_both, read_together
from jaxauto.solve.remat import Level, Remat
from jaxauto.targets.target import Target

LAYERS, WIDTH, ROWS = 6, 16, 8


def block(x, w):
    return x + jnp.tanh(x @ w["into"].astype(jnp.bfloat16)) @ w["out"].astype(jnp.bfloat16)


def step(weights, x):
    """Two matrices in each scanned layer; the first is multiplied again where the block is recomputed."""

    def loss(w):
        y, _ = jax.lax.scan(lambda y, w: (block(y, w), None), x, w)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


@pytest.fixture(scope="module", params=["v5e:2x4", "h100:8"])
def planned(request):
    matrix = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    found = read(step, ({"into": matrix, "out": matrix}, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)), {})
    return Remat(found.graph, found.groups, found.aliased, Target(request.param).chip), found.known_early


def everything_again(remat):
    """The leanest variant."""
    return remat.variant(Level(tuple(frozenset() for _ in remat.blocks)))


def test_recomputed_and_backward_matmuls_read_one_gathered_weight(planned):
    remat, weights = planned
    variant, values = everything_again(remat), remat.graph.values
    pairs = read_together(variant, weights)
    again = {op.node.id for op in remat.groups.operations if variant.extra.get(op.node.id)}
    assert again and {node for node, _ in pairs} == again
    assert {values[x].shape for _, x in pairs} == {(WIDTH, WIDTH)}


def test_nothing_is_read_together_where_nothing_is_recomputed(planned):
    remat, weights = planned
    assert read_together(remat.variant(remat.levels()[0]), weights) == {}


def test_what_a_recomputation_gathers_is_not_gathered_for_the_backward_pass_again():
    """Compiled as told: three layers of two matrices, and each is gathered for both passes. Nothing is differentiated by the input: of the
    first layer one is gathered to make its product again alone."""
    width, layers = 256, 3

    def straight(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = block(y, w)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    matrix = jax.ShapeDtypeStruct((width, width), jnp.float32)
    args = [{"into": matrix, "out": matrix}] * layers, jax.ShapeDtypeStruct((4096, width), jnp.bfloat16)
    pins = {"0.*": P("data"), "1": P("data")}
    given = {"target": "cpu:8", "mesh": {"data": 8}, "constraints": pins, "certify": False, "progress": False}
    with pytest.raises(jaxauto.InfeasibleError) as least:
        jaxauto.plan(straight, *args, memory_budget=1.001, **given)
    plan = jaxauto.plan(straight, *args, memory_budget=1.05 * least.value.least_bytes, **given)
    best = plan.program.solved.best
    assert check(best, best.peak_bytes, {}) == []
    assert sum(best.model.variant.extra.get(op.node.id, 0) for op in best.model.groups.operations) == layers
    (gathers,) = (c for c in plan.verify().collectives if c.name.startswith("all-gather"))
    assert gathers.compiled_count == gathers.estimated_count == 2 * 2 * layers
    held = [(begin, end, table[best.x[i], best.x[j]]) for begin, end, i, j, table in held_for_both(best.model)]
    assert [bytes_ for *_, bytes_ in held] == [2 * width**2] * (layers - 1) and all(begin < end for begin, end, _ in held)
