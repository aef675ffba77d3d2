"""What a recomputed operation gathers is there for the backward pass, and told so: once for both, in memory from one to the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers import everything_again, scanned_blocks, two_matrices
from jax.sharding import PartitionSpec as P

import jaxauto
from jaxauto.solve.check import check
from jaxauto.solve.read_twice import gathered_before, held_for_both, read_together, read_twice


@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_recomputed_and_backward_matmuls_read_one_gathered_weight(target):
    remat, weights = scanned_blocks(target)
    variant, values = everything_again(remat), remat.graph.values
    pairs = read_together(read_twice(variant, weights, remat.chip.platform))
    again = {op.node.id for op in remat.groups.operations if variant.extra.get(op.node.id)}
    assert again and {node for node, _ in pairs} == again
    assert {values[x].shape for _, x in pairs} == {(16, 16)}


@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_nothing_is_read_together_where_nothing_is_recomputed(target):
    remat, weights = scanned_blocks(target)
    assert read_twice(remat.variant(remat.levels()[0]), weights, remat.chip.platform) == []


def straight(weights, x):
    """Layers of ``helpers.two_matrices``."""

    def loss(weights):
        y = x
        for w in weights:
            y = two_matrices(y, w)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


def planned_for(target):
    """Three layers, weights and batch split, in little more than the least memory."""
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    args = [{"into": matrix, "out": matrix}] * 3, jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16)
    given = {"target": target, "mesh": {"data": 8}, "constraints": {"0.*": P("data"), "1": P("data")}, "certify": False, "progress": False}
    with pytest.raises(jaxauto.InfeasibleError) as least:
        jaxauto.plan(straight, *args, memory_budget=1.001, **given)
    return jaxauto.plan(straight, *args, memory_budget=1.05 * least.value.least_bytes, **given)


def test_what_a_recomputation_gathers_is_not_gathered_for_the_backward_pass_again():
    plan = planned_for("h100:8")
    best = plan.program.solved.best
    model, graph = best.model, best.model.groups.graph
    assert check(best, best.peak_bytes, {}) == []
    ahead = gathered_before(model.read_twice)
    late = {(node.id, node.inputs[k]) for node in graph.nodes for out, k in plan.decisions.gathered_late if out in node.outputs}
    assert ahead and late and not ahead & late
    held = [(begin, end) for begin, end, *_ in held_for_both(model)]
    assert held and all(begin < end for begin, end in held)
    assert "optimization_barrier" in plan.lower().as_text()


def test_on_cpu_each_pass_gathers_for_itself_as_compiled():
    """Two matrices of three layers for the forward and the backward pass, and one of each for products that are made again; but nothing is
    differentiated by the input."""
    plan = planned_for("cpu:8")
    best = plan.program.solved.best
    assert check(best, best.peak_bytes, {}) == [] and not [*held_for_both(best.model)]
    assert sum(best.model.variant.extra.get(op.node.id, 0) for op in best.model.groups.operations) == 3
    (gathers,) = (c for c in plan.verify().collectives if c.name.startswith("all-gather"))
    assert gathers.compiled_count == gathers.estimated_count == 2 * 2 * 3 - 1 + 3
