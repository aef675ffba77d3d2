"""The order in which residuals are dropped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers import centred_rows
from zoo import STEPS

from jaxauto.blocks import closure, find_blocks
from jaxauto.core import Kind
from jaxauto.graph import build
from jaxauto.planner import read
from jaxauto.rules import rule_for
from jaxauto.solve.frontier import form, frontier
from jaxauto.solve.remat import MAX_LEVELS, Remat
from jaxauto.targets import Target
from jaxauto.trace import trace

MODELS = ("transformer_scan", "transformer_loop", "linen_residual_net", "experts_one_hot", "recurrent_scan")


def one_dot_costs(node):
    return 1.0 if node.prim == "dot_general" else 0.01


def kind(node):
    return Kind.CONTROL if node.bodies else rule_for(node.eqn).kind


@pytest.mark.parametrize("name", MODELS)
def test_sets_are_nested_and_prices_rise(name):
    step, args = STEPS[name]()
    for block in find_blocks(build(trace(step, args).jaxpr)):
        drops = frontier(block, one_dot_costs, kind)
        assert [d.price for d in drops] == sorted(d.price for d in drops)
        kept = {v for v in block.residuals if v not in block.outputs}
        for drop in drops:
            kept = (kept - {drop.value}) | ({drop.instead} - {None})
            freed = sum(block.graph.values[v].nbytes * sign for v, sign in ((drop.value, 1), (drop.instead, -1)) if v is not None)
            assert drop.kept == frozenset(kept) and drop.bytes_ == freed * block.count > 0
        assert not kept, "all can be dropped"


def test_what_a_saved_value_makes_again_for_nothing_goes_first():
    """tanh(x @ a) * 2: the dot is dear, what follows from it is not."""

    def step(ws, x):
        def loss(ws):
            y = x
            for w in ws:
                y = jnp.tanh(y @ w["a"]) @ w["b"]
            return jnp.sum(y * y)

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    layer = {"a": jnp.ones((16, 64)), "b": jnp.ones((64, 16))}
    graph = build(trace(step, ([layer] * 3, jnp.ones((32, 16)))).jaxpr)
    for block in find_blocks(graph)[:2]:
        prims = [graph.values[d.value].producer.prim for d in frontier(block, one_dot_costs, kind)]
        dots = [k for k, p in enumerate(prims) if p == "dot_general"]
        assert all(p == "dot_general" for p in prims[min(dots, default=len(prims)) :]), prims


def test_prices_are_those_of_the_closure():
    """Each step costs what jax would run again: the nodes that the closure gains."""
    step, args = STEPS["transformer_scan"]()
    (block,) = [b for b in find_blocks(build(trace(step, args).jaxpr)) if b.scan]
    before = 0.0
    for drop in frontier(block, one_dot_costs, kind):
        nodes, _ = closure(block, drop.kept)
        cost = block.count * sum(map(one_dot_costs, nodes))
        assert (cost - before) / drop.bytes_ <= drop.price * (1 + 1e-9)
        before = cost


def test_the_narrow_result_of_a_dot_stands_in_for_the_centred_rows_that_a_norm_saves():
    """float32 rows less their mean are saved; half the bytes, the bfloat16 that they are made of, are as good."""

    def step(ws, x):
        def loss(ws):
            y = x
            for w in ws:
                y = jnp.tanh(centred_rows(y @ w["a"])) @ w["b"]
            return jnp.sum(y * y)

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    layer = {"a": jnp.ones((16, 64), jnp.bfloat16), "b": jnp.ones((64, 16), jnp.bfloat16)}
    graph = build(trace(step, ([layer] * 3, jnp.ones((32, 16), jnp.bfloat16))).jaxpr)
    block = find_blocks(graph)[0]
    drops = frontier(block, one_dot_costs, kind)
    dot = next(node for node in block.forward if node.prim == "dot_general").outputs[0]
    centred = [drop for drop in drops if graph.values[drop.value].producer.prim == "sub" and graph.values[drop.value].dtype == jnp.float32]
    assert dot not in block.residuals and [drop.instead for drop in centred] == [dot]
    assert any(drop.value == dot and drop.instead is None for drop in drops), "and is dropped in its turn"
    assert centred[0].bytes_ == graph.values[dot].nbytes


def test_layers_written_one_after_another_are_alike():
    step, args = STEPS["transformer_loop"]()
    blocks = find_blocks(build(trace(step, args).jaxpr))
    assert len({form(b) for b in blocks}) < len(blocks)
    found = read(step, args, {}, None)
    remat = Remat(found.graph, found.groups, found.aliased, Target("v5p:2x2x1").chip)
    levels = remat.levels()
    ladders = [len(remat._thresholds(drops)) for drops in (remat.drops, *remat.other_drops)]
    assert max(ladders) < MAX_LEVELS and 3 <= len(levels) <= 1 + sum(ladders), "as written, and those of each ladder"
    assert levels[0].kept == (None,) * len(remat.blocks)
    assert all(not kept for kept in levels[-1].kept if kept is not None)
