"""What dots hand to each other without HBM, by hand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxauto
from jaxauto.core import Kind
from jaxauto.cost.compute import bytes_per_flop, operation_seconds, traffic_seconds
from jaxauto.cost.onchip import SHARE, Near, fleeting, near_bytes
from jaxauto.graph import value_bytes, walk
from jaxauto.rules import rule_for
from jaxauto.strategies import WHOLE
from jaxauto.targets.target import Target

from .test_fusion import array, buffers_of

CHIP = Target("v5e:1").chip


def attention(q, k):
    scores = jnp.einsum("blhk,bmhk->bhlm", q, k)
    return jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores), k)


def found(fn, *args, short=None):
    graph, buffers = buffers_of(fn, *args, platform="tpu", bytes_per_flop=bytes_per_flop(CHIP))
    dots = {n.id: rule for n in walk(graph) if (rule := rule_for(n.eqn)).kind is Kind.DOT}
    near = near_bytes(graph, dots, buffers, fleeting(buffers) if short is None else short(buffers), bytes_per_flop(CHIP))
    return graph, near


def test_scores_and_weights_are_held_by_the_exp():
    graph, near = found(attention, array(2, 256, 4, 16), array(2, 256, 4, 16))
    whole = 4.0 * 2 * 4 * 256 * 256
    wide = [{graph.values[x].producer.prim: n for x, n in part.items() if graph.values[x].shape == (2, 4, 256, 256)} for part in near]
    assert wide == [{"div": whole}, {"dot_general": whole}]
    assert all(near.read[x] == math.inf for x in graph.inputs), "what a step is given lies in HBM"


def test_what_lives_long_is_not_near():
    _, near = found(attention, array(2, 256, 4, 16), array(2, 256, 4, 16), short=lambda b: np.zeros(len(b.ids), bool))
    assert {*near.read.values(), *near.written.values()} == {math.inf}


def test_what_a_loop_stacks_is_written_to_hbm_and_read_on_chip():
    def stacked(x, w):
        def layer(x, w):
            y = x @ w
            return y @ w, y

        return jax.lax.scan(layer, x, w)

    graph, near = found(stacked, array(64, 64), array(4, 64, 64))
    first, _ = (node for node in walk(graph) if node.prim == "dot_general")
    assert near.written[first.outputs[0]] == math.inf
    assert near.read[first.outputs[0]] == 4.0 * 64 * 64


def test_a_result_is_written_to_hbm():
    _, near = found(lambda x, y: x @ y, array(64, 64), array(64, 64))
    assert set(near.written.values()) == {math.inf}


def test_dots_bound_by_flops_are_not_asked():
    _, near = found(lambda x, y: x @ y @ y, array(16384, 16384), array(16384, 16384))
    assert near == Near({}, {})


@pytest.mark.parametrize(("batch", "stays"), [(8, True), (512, False)])
def test_a_dot_is_not_charged_for_what_stays(batch, stays):
    """512 KiB of scores for a sequence; 80 % of 128 MiB are there for them."""
    args = array(batch, 256, 2, 16), array(batch, 256, 2, 16)
    plan = jaxauto.plan(attention, *args, target="v5e:1", certify=False)
    best = plan.program.solved.found.best
    op = best.model.groups.operations[0]
    scores = 4.0 * batch * 2 * 256 * 256
    assert (scores <= SHARE * CHIP.vmem_bytes) is stays
    whole = sum(value_bytes(best.model.values[o.value]) for o in (*op.operands, *op.results))
    seconds = operation_seconds(op, best.model.values, np.array([[WHOLE]]), (1,), CHIP, best.model.near)
    assert seconds == pytest.approx([traffic_seconds(whole - scores * stays, CHIP)])
