"""Residuals in the host's memory: the same results, and what is sent is what was chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import STEPS

import jaxauto
from jaxauto.blocks import find_blocks
from jaxauto.graph import DEVICE, HOST, build, walk
from jaxauto.rewrite.evaluate import evaluator, jaxpr_of
from jaxauto.rewrite.offload import offload
from jaxauto.rewrite.program import Rewritten
from jaxauto.rewrite.recompute import recompute
from jaxauto.trace import trace

EXAMPLES = ("transformer_loop", "transformer_scan", "gradient_accumulation", "recurrent_scan", "tied_embeddings")


def rewritten(step, args, *, again):
    """Everything large that is kept goes to the host; ``again``: beside that, half of the residuals are recomputed."""
    graph = build(trace(step, args).jaxpr)
    blocks = find_blocks(graph)
    kept = {b: frozenset(block.residuals[::2]) for b, block in enumerate(blocks)} if again else {}
    start = recompute(graph, kept) if kept else Rewritten(graph, {})
    chosen = {v for b, block in enumerate(blocks) for v in kept.get(b, block.residuals) if graph.values[v].nbytes > 64}
    return start, chosen, offload(start, frozenset(chosen))


def transfers(graph, space):
    return [node for node in walk(graph) if node.prim == "device_put" and node.params.get("space") == space]


@pytest.mark.parametrize(("name", "again"), [*((name, True) for name in EXAMPLES), ("transformer_loop", False), ("recurrent_scan", False)])
def test_results_are_the_same(name, again):
    step, args = STEPS[name]()
    start, chosen, result = rewritten(step, args, again=again)
    sent = {node.inputs[0] for node in transfers(result.graph, HOST)}
    assert sent and sent <= chosen
    leaves = jax.tree.leaves(args)
    expected = jax.jit(evaluator(start.graph))(*leaves)
    for want, got in zip(expected, jax.jit(evaluator(result.graph))(*leaves), strict=True):
        data = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (want, got))
        np.testing.assert_allclose(*map(np.asarray, data), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_sent_comes_back_and_is_read_there(name):
    step, args = STEPS[name]()
    _, _, result = rewritten(step, args, again=False)
    graph = result.graph
    for node in walk(graph):
        reads_host = {x for x in node.inputs if isinstance(x, int) and x in result.host}
        assert not reads_host or node.prim in ("device_put", "optimization_barrier", "scan"), node.prim
    sent = {node.inputs[0] for node in transfers(graph, HOST)}
    assert len(transfers(graph, DEVICE)) >= len(sent) > 0, "what was sent is fetched"
    assert "<host>" in str(jaxpr_of(graph)), "JAX itself sees arrays in host memory"


def test_nothing_chosen_changes_nothing():
    step, args = STEPS["transformer_scan"]()
    start = Rewritten(build(trace(step, args).jaxpr), {})
    assert offload(start, frozenset()) is start


# ------------------------------------------------------------------------------------------------------------ as planned


def deep(layers: int, batch: int = 64, width: int = 128):
    """Layers whose inputs alone are more than the rest: only host memory makes room for them."""

    def loss(params, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w) @ w.T, None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def step(params, x):
        value, gradient = jax.value_and_grad(loss)(params, x)
        return params - 0.1 * gradient, value

    return step, (jax.ShapeDtypeStruct((layers, width, width), jnp.float32), jax.ShapeDtypeStruct((batch * 1024, width), jnp.float32))


def test_a_plan_that_offloads_fits_where_recomputing_does_not():
    step, args = deep(16)
    options = {"mesh": {"data": 8}, "target": "v5e:2x4", "certify": False, "memory_budget": "14MiB"}
    with pytest.raises(jaxauto.InfeasibleError):
        jaxauto.plan(step, *args, **options)
    plan = jaxauto.plan(step, *args, **options, remat="offload")
    sent = [d for d in plan.remat if d.action == "offloaded"]
    assert sent and plan.estimate.peak_memory <= 14 * 2**20
    assert {(d.shape, d.bytes_) for d in sent} == {((16, 65536, 128), 16 * 65536 * 128 * 4 / 8)}, "the inputs of all layers, an eighth each"


def test_nothing_is_sent_where_layers_can_run_again_in_segments():
    """The inputs of all layers do not fit; those of some, and the others made again, do: that takes a tenth of the time on the link."""
    step, args = deep(16)
    options = {"mesh": {"data": 8}, "target": "v5e:2x4", "certify": False, "memory_budget": "30MiB"}
    plans = {remat: jaxauto.plan(step, *args, **options, remat=remat) for remat in ("auto", "offload")}
    assert plans["auto"].decisions.splits
    assert plans["offload"].estimate.step_time <= 1.001 * plans["auto"].estimate.step_time


@pytest.mark.parametrize("share", [0.5, 0.6])
def test_where_recomputing_is_quicker_it_is_what_is_chosen(share):
    """Unrolled layers, each of which may do otherwise: what goes to the host is not taken to be free."""

    def loss(weights, x):
        for w in weights:
            x = x + jnp.tanh(jnp.sin(x) * jnp.cos(x) @ w)
        return jnp.mean(x**2)

    def step(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    args = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 6, jax.ShapeDtypeStruct((8192, 512), jnp.float32)
    most = jaxauto.plan(step, *args, target="h100:1", remat="off", certify=False).estimate.peak_memory
    options = {"target": "h100:1", "certify": False, "memory_budget": share * most}
    recomputing, sending = (jaxauto.plan(step, *args, **options, remat=remat).estimate.step_time for remat in ("auto", "offload"))
    assert sending <= recomputing * 1.001


def test_the_sharded_step_that_offloads_trains_alike(tmp_path):
    step, (params, x) = deep(4, batch=1)
    options = {"mesh": {"data": 8}, "target": "cpu:8", "certify": False}
    with pytest.raises(jaxauto.InfeasibleError) as least:
        jaxauto.plan(step, params, x, **options, memory_budget=2**10)
    plan = jaxauto.plan(step, params, x, **options, memory_budget=int(0.95 * least.value.least_bytes), remat="offload")
    assert any(d.action == "offloaded" for d in plan.remat)
    loaded = jaxauto.Plan.load(plan.save(str(tmp_path / "plan.json")))
    assert loaded.decisions.offloaded == plan.decisions.offloaded != frozenset()
    rng = np.random.default_rng(0)
    arrays = [rng.normal(0, 0.05, a.shape).astype(np.float32) for a in (params, x)]
    expected = jax.jit(step)(*arrays)
    for want, got in zip(expected, plan.jit()(*plan.place(*arrays)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-6)
