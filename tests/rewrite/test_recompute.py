"""Rewritten steps give the same results, keep less, and cost what jax.checkpoint costs."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_consistent, fingerprint, graph_of, words
from jax import lax
from zoo import STEPS

from jaxauto.blocks import find_blocks
from jaxauto.core import Trips
from jaxauto.graph import walk
from jaxauto.rewrite.evaluate import evaluator, jaxpr_of
from jaxauto.rewrite.recompute import recompute

EXAMPLES = (
    "mlp_bfloat16",
    "dropout_new_key",
    "dropout_old_key",
    "tied_embeddings",
    "user_checkpoint",
    "custom_gradients",
    "gradient_accumulation",
    "recurrent_scan",
    "transformer_loop",
    "transformer_scan",
    "transformer_scan_checkpoint",
    "experts_gather",
    "control_flow",
    "adamw_clip_schedule",
)


def nothing(blocks):
    return {number: frozenset() for number in range(len(blocks))}


def residuals(blocks):
    return {number: frozenset(block.residuals) for number, block in enumerate(blocks)}


def some(blocks, seed=0):
    rng = random.Random(seed)
    made = [block.made for block in blocks]
    return {number: frozenset(v for v in values if rng.random() < 0.4) for number, values in enumerate(made)}


def every_other_block(blocks):
    return {number: frozenset() for number in range(0, len(blocks), 2)}


KEPT = {"all residuals": residuals, "nothing": nothing, "some values": some, "every other block": every_other_block}


def rewritten(step, args, kept=nothing):
    graph = graph_of(step, args)
    return recompute(graph, kept(find_blocks(graph))).graph


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", EXAMPLES)
def test_structure(name, kept):
    step, args = STEPS[name]()
    graph = graph_of(step, args)
    before = fingerprint(graph)
    result = recompute(graph, KEPT[kept](find_blocks(graph)))
    assert fingerprint(graph) == before
    assert_consistent(result.graph)
    assert set(result.origin) == set(result.graph.values) - set(graph.values)
    for new, old in result.origin.items():
        stacked = new in result.stacked
        assert result.graph.values[new].shape[stacked:] == graph.values[old].shape
        assert result.graph.values[new].dtype == graph.values[old].dtype
    assert [v.aval for v in jaxpr_of(result.graph).jaxpr.outvars] == [v.aval for v in jaxpr_of(graph).jaxpr.outvars]


@pytest.mark.parametrize("kept", ["nothing", "some values"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_results_under_jit(name, kept):
    """Equal to 1e-6 of the largest element: the compiler fuses recomputed values differently (bit for bit without fusion, below)."""
    step, args = STEPS[name]()
    expected = jax.jit(evaluator(graph_of(step, args)))(*jax.tree.leaves(args))
    actual = jax.jit(evaluator(rewritten(step, args, KEPT[kept])))(*jax.tree.leaves(args))
    for want, got in zip(expected, actual, strict=True):
        assert got.dtype == want.dtype
        if jnp.issubdtype(want.dtype, jnp.floating):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(float(jnp.abs(want).max()), 1e-30))
        else:
            np.testing.assert_array_equal(words(got), words(want))


@pytest.mark.parametrize("name", ["dropout_new_key", "custom_gradients", "tied_embeddings", "recurrent_scan"])
def test_results_are_bit_equal_without_fusion(name):
    """Operation by operation, nothing is fused: the recomputed values are the saved ones."""
    step, args = STEPS[name]()
    leaves = jax.tree.leaves(args)
    with jax.disable_jit():
        expected = evaluator(graph_of(step, args))(*leaves)
        for kept in (nothing, some):
            for want, got in zip(expected, evaluator(rewritten(step, args, kept))(*leaves), strict=True):
                np.testing.assert_array_equal(words(got), words(want))


# ----------------------------------------------------------------------------------------------------- what lies between blocks


def at_depths(values, deep):
    """All one deep, or 1, 2, 3, 1, 2, 3, ... in the order of the program."""
    return {(v, 1 + k % 3 * deep) for k, v in enumerate(sorted(values))}


def between(blocks):
    """All that lies between blocks, and all stacks of scans."""
    straight = {v for block in blocks if block.scan is None for v in block.outputs}
    return straight | {y for block in blocks if block.scan for y in block.scan[0].outputs[block.scan[0].num_carry :]}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", ["transformer_loop", "recurrent_scan", "gradient_accumulation", "dropout_old_key", "control_flow"])
def test_what_lies_between_blocks_is_made_again(name, deep):
    step, args = STEPS[name]()
    graph = graph_of(step, args)
    blocks, before = find_blocks(graph), fingerprint(graph)
    result = recompute(graph, nothing(blocks), at_depths(between(blocks) - {*graph.outputs}, deep))
    assert fingerprint(graph) == before
    assert_consistent(result.graph)
    assert set(result.origin) == set(result.graph.values) - set(graph.values)
    for new, old in result.origin.items():
        assert result.graph.values[new].shape[new in result.stacked :] == graph.values[old].shape
    leaves = jax.tree.leaves(args)
    expected, actual = jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result.graph))(*leaves)
    for want, got in zip(expected, actual, strict=True):
        np.testing.assert_allclose(words(got), words(want), rtol=0, atol=1e-6 * max(float(np.abs(words(want)).max()), 1e-30))


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", ["transformer_loop", "recurrent_scan"])
def test_made_again_between_blocks_bit_for_bit(name, deep):
    step, args = STEPS[name]()
    graph, leaves = graph_of(step, args), jax.tree.leaves(args)
    blocks = find_blocks(graph)
    with jax.disable_jit():
        expected = evaluator(graph)(*leaves)
        actual = evaluator(recompute(graph, nothing(blocks), at_depths(between(blocks) - {*graph.outputs}, deep)).graph)(*leaves)
    for want, got in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(words(got), words(want))


def test_a_scan_is_run_again_whole():
    """Forward it stacks nothing; before its backward scan it runs once more, behind a barrier, and stacks the carries."""
    args = (stacked(DENSE), ROWS)
    graph = graph_of(scan_step(layer), args)
    blocks = find_blocks(graph)
    ((number, block),) = ((n, b) for n, b in enumerate(blocks) if b.scan)
    (stack, *_) = block.scan[0].outputs[block.scan[0].num_carry :]
    result = recompute(graph, {number: frozenset()}, {(stack, 1)}).graph
    scans = [node for node in result.nodes if node.prim == "scan"]
    assert [(len(node.outputs) - node.num_carry, node.backward) for node in scans[:2]] == [(0, False), (1, True)]
    assert [node.reverse for node in scans] == [False, False, True]
    (barrier,) = (node for node in result.nodes if node.prim == "optimization_barrier")
    assert set(scans[1].inputs) & set(barrier.outputs)


# ------------------------------------------------------------------------------------------------- beside jax.checkpoint


def layer(x, w):
    a = jax.nn.softmax(x @ w["a"], axis=-1)
    return x + jnp.tanh(a @ w["b"]) @ w["c"]


def convolution(x, w):
    y = lax.conv_general_dilated(x, w["first"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = jax.nn.gelu(y - y.mean((0, 1, 2)))
    return x + lax.conv_general_dilated(y, w["second"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def loop_step(function):
    def step(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = function(h, w)
            return (h**2).sum()

        return jax.grad(loss)(weights)

    return step


def scan_step(function):
    def step(weights, x):
        return jax.grad(lambda w: (lax.scan(lambda h, one: (function(h, one), None), x, w)[0] ** 2).sum())(weights)

    return step


def accumulated_step(function):
    def step(weights, batches):
        def one(total, x):
            return jax.tree.map(jnp.add, total, scan_step(function)(weights, x)), None

        return lax.scan(one, jax.tree.map(jnp.zeros_like, weights), batches)[0]

    return step


def dense_weights(layers, width):
    one = {name: jax.ShapeDtypeStruct((width, width), jnp.float32) for name in "abc"}
    return [one] * layers


def stacked(weights):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((len(weights), *a.shape), a.dtype), weights[0])


DENSE = dense_weights(6, 128)
ROWS = jax.ShapeDtypeStruct((512, 128), jnp.float32)
KERNELS = [{"first": jax.ShapeDtypeStruct((3, 3, 8, 32), jnp.float32), "second": jax.ShapeDtypeStruct((3, 3, 32, 8), jnp.float32)}] * 4
IMAGES = jax.ShapeDtypeStruct((4, 16, 16, 8), jnp.float32)


def compiled(function, args):
    return jax.jit(function).lower(*args).compile()


def lowered_flops(function, args):
    return jax.jit(function).lower(*args).cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("make", "function", "args"),
    [(loop_step, layer, (DENSE, ROWS)), (loop_step, convolution, (KERNELS, IMAGES))],
    ids=["dense loop", "convolution loop"],
)
def test_loop_costs_the_flops_of_checkpoint(make, function, args):
    """Flops before the compiler: that of the CPU drops optimization barriers and then merges what is recomputed with the original."""
    graph = graph_of(make(function), args)
    blocks = find_blocks(graph)
    layers = {n: frozenset() for n, block in enumerate(blocks) if block.name == function.__name__}
    layers = layers or {n: frozenset() for n, block in enumerate(blocks) if len(block.residuals) > 3}
    result = recompute(graph, layers).graph
    plain, theirs = lowered_flops(make(function), args), lowered_flops(make(jax.checkpoint(function)), args)
    ours = lowered_flops(evaluator(result), jax.tree.leaves(args))
    assert theirs > 1.1 * plain
    assert ours == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize(
    ("make", "args"),
    [(scan_step, (stacked(DENSE), ROWS)), (accumulated_step, (stacked(DENSE), jax.ShapeDtypeStruct((3, 512, 128), jnp.float32)))],
    ids=["scan", "accumulated"],
)
def test_scan_costs_the_memory_and_flops_of_checkpoint(make, args):
    plain = compiled(make(layer), args)
    theirs = compiled(make(jax.checkpoint(layer)), args)
    ours = compiled(evaluator(rewritten(make(layer), args)), jax.tree.leaves(args))
    plain_bytes, their_bytes, our_bytes = (c.memory_analysis().temp_size_in_bytes for c in (plain, theirs, ours))
    assert their_bytes < 0.7 * plain_bytes
    assert our_bytes == pytest.approx(their_bytes, rel=0.05)
    assert ours.cost_analysis()["flops"] == pytest.approx(theirs.cost_analysis()["flops"], rel=0.01)


# --------------------------------------------------------------------------------------------------------- particulars


def test_dropped_residuals_are_no_longer_stacked():
    args = (stacked(DENSE), ROWS)
    graph = graph_of(scan_step(layer), args)
    blocks = find_blocks(graph)
    ((number, block),) = ((n, b) for n, b in enumerate(blocks) if b.scan)
    before = len(block.scan[0].outputs)
    result = recompute(graph, {number: frozenset()}).graph
    forward, _ = (node for node in result.nodes if node.prim == "scan")
    assert len(block.scan[0].outputs) == before  # the original is as it was
    assert len(forward.outputs) < before
    stacks = [result.values[y].shape for y in forward.outputs[forward.num_carry :]]
    assert stacks == [(6, 512, 128)]  # the carry that enters each trip
    assert not any(node.prim == "optimization_barrier" for node in walk(result)), "two loops are never merged"


@pytest.mark.parametrize("splits", [None, {0: (Trips(5, kept=frozenset()), Trips(1, kept=frozenset()))}], ids=["whole", "one apart"])
def test_one_trip_is_made_again_behind_a_barrier(splits):
    """Compilers unroll it, and would merge what is made again. The barrier waits for the cotangents; not for sums of gradients, which are
    zeros before the trip, nor are masks written for it."""
    bias = jax.ShapeDtypeStruct((128,), jnp.float32)

    def step(weights, x, bias):
        def one(h, w):
            return layer(h, w) * (jnp.arange(128) > 3) + bias, None

        return jax.grad(lambda w, b: (lax.scan(one, x, w)[0] ** 2).sum(), argnums=(0, 1))(weights, bias)

    graph = graph_of(step, (stacked(DENSE if splits else DENSE[:1]), ROWS, bias))
    result = recompute(graph, {} if splits else nothing(find_blocks(graph)), splits=splits).graph
    assert_consistent(result)
    loops = [node for node in result.nodes if node.prim == "scan"]
    barriers = {node.id: [n for n in node.bodies[0].nodes if n.prim == "optimization_barrier"] for node in loops}
    assert [len(barriers[node.id]) for node in loops] == [int(node.backward and node.trips == 1) for node in loops]
    (node,), body = next((barriers[n.id], n.bodies[0]) for n in loops if barriers[n.id])
    shapes = [result.values[x].shape for x in node.inputs]
    assert body.nodes[0] is node and shapes.count((512, 128)) == 2, "what is saved of the trip, and the cotangent"
    assert (128,) not in shapes and not any(result.values[x].dtype == bool for x in node.inputs)
    passed = {x for x in node.inputs if isinstance(x, int)}
    assert not any(passed & {*n.inputs} for n in body.nodes[1:]) and not passed & {*body.outputs}, "read from there on"


def test_kept_values_need_not_be_residuals():
    """Keeping the softmax's input alone: the matmul before it is not run again."""
    args = (DENSE, ROWS)
    graph = graph_of(loop_step(layer), args)
    blocks = find_blocks(graph)
    scores = {n: frozenset({next(node for node in b.forward if node.prim == "dot_general").outputs[0]}) for n, b in enumerate(blocks[:-1])}
    count = lambda g: sum(node.prim == "dot_general" for node in g.nodes)  # noqa: E731
    with_scores, without = recompute(graph, scores).graph, recompute(graph, {n: frozenset() for n in scores}).graph
    assert count(without) == count(with_scores) + len(scores)


def test_what_is_kept_is_read_where_it_passed_the_barrier():
    """Read as it was made, a compiler could make it again there from what was not kept: XLA:GPU kept scores beside their exp."""
    args = (DENSE, ROWS)
    graph = graph_of(loop_step(lambda x, w: x + jax.nn.softmax(jnp.tanh(x @ w["a"])) @ w["b"]), args)
    blocks = find_blocks(graph)
    exps = {n: frozenset({next(node for node in b.forward if node.prim == "exp").outputs[0]}) for n, b in enumerate(blocks[:-1])}
    result = recompute(graph, exps).graph
    passing = {x: node for node in result.nodes if node.prim == "optimization_barrier" for x in node.inputs}
    order = {node.id: k for k, node in enumerate(result.nodes)}
    for (kept,) in exps.values():
        late = [u for u in result.values[kept].users if order[u.id] > order[passing[kept].id]]
        through = passing[kept].outputs[passing[kept].inputs.index(kept)]
        assert not late and any(u.prim == "mul" for u in result.values[through].users)


def test_masks_do_not_pass_the_barrier():
    """A triangle of (64, 64) made of iotas is made again where it is read, not written to memory because a barrier holds it."""

    def masked(x, w):
        scores = jnp.where(jnp.tril(jnp.ones((64, 64), bool))[None], jnp.einsum("bqd,bkd->bqk", x @ w["in"], x), -1e9)
        return jax.nn.softmax(scores) @ x + x @ w["out"]

    weights = {name: jnp.full((3, 16, 16), 0.01) for name in ("in", "out")}

    def step(w, x):
        def loss(w):
            y = x
            for k in range(3):
                y = masked(y, jax.tree.map(lambda a, k=k: a[k], w))
            return jnp.sum(y)

        return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))

    args = (weights, jnp.ones((2, 64, 16)))
    graph = graph_of(step, args)
    result = recompute(graph, nothing(find_blocks(graph))).graph
    barriers = [node for node in walk(result) if node.prim == "optimization_barrier"]
    masks = [x for node in barriers for x in node.inputs if result.values[x].dtype == bool]
    assert barriers and not masks
    for ours, theirs in zip(jax.jit(evaluator(result))(*jax.tree.leaves(args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_effects_are_not_repeated():
    seen = []

    def noisy(x, w):
        jax.debug.callback(lambda value: seen.append(float(value)), x[0, 0])
        return layer(x, w)

    weights = jax.tree.map(lambda a: jnp.full(a.shape, 0.01), dense_weights(3, 8))
    result = rewritten(loop_step(noisy), (weights, jnp.ones((4, 8))))
    jax.block_until_ready(jax.jit(evaluator(result))(*jax.tree.leaves((weights, jnp.ones((4, 8))))))
    jax.effects_barrier()
    assert len(seen) == 3


def test_messages():
    graph = graph_of(loop_step(layer), (DENSE, ROWS))
    blocks = find_blocks(graph)
    with pytest.raises(ValueError, match=rf"there is no block 99: find_blocks found {len(blocks)} of them, counted from 0"):
        recompute(graph, {99: frozenset()})
    with pytest.raises(ValueError, match=r"block 0 \(.*\) does not make value 0: keep values that its forward nodes return"):
        recompute(graph, {0: frozenset({0})})


def post_norm_step(params, x):
    """Blocks that end with a norm in float32: the backward pass of each begins with a cotangent that is widened."""

    def block(y, w):
        h = jnp.tanh(y @ w).astype(jnp.float32)
        return y + (h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True))).astype(jnp.bfloat16)

    def loss(params):
        y = x
        for w in params[:-1]:
            y = block(y, w)
        return jnp.mean((y @ params[-1]).astype(jnp.float32) ** 2)

    return jax.grad(loss)(params)


def test_what_is_made_again_for_a_widened_cotangent_waits_for_it_as_it_was():
    """Not for the loss, or a compiler makes the last block again before the gradient of the head, with the logits' cotangent there."""
    args = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 3, jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)
    graph = graph_of(post_norm_step, args)
    result = recompute(graph, nothing(find_blocks(graph))).graph
    made = {x: node for node in result.nodes for x in node.outputs}
    _, *barriers = (node for node in result.nodes if node.prim == "optimization_barrier")  # the first is the loss's own
    assert len(barriers) == 2
    for barrier in barriers:
        (tie,) = (x for x in barrier.inputs if x in made and made[x].backward)
        assert result.values[tie].dtype == jnp.bfloat16 and result.values[tie].shape == (256, 64), "written as narrow as it is"
        assert made[tie].prim in ("dot_general", "add_any"), "what the backward pass has come to"


def residual_step(params, x):
    """Residual blocks with a norm in float32: where the mask of a relu is, what is widened is made of two arrays."""

    def block(y, w):
        h = (y @ w).astype(jnp.float32)
        return jax.nn.relu(y + (h * lax.rsqrt(jnp.mean(h * h, 0))).astype(jnp.bfloat16))

    def loss(params):
        y = x
        for w in params:
            y = block(y, w)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return jax.grad(loss)(params)


def test_nothing_is_widened_for_a_barrier_and_what_passes_is_read_from_there_on():
    args = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 3, jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)
    graph = graph_of(residual_step, args)
    result = recompute(graph, nothing(find_blocks(graph))).graph
    place = {node.id: k for k, node in enumerate(result.nodes)}
    barriers = [node for node in result.nodes if node.prim == "optimization_barrier"]
    assert len(barriers) >= 2
    for barrier in barriers:
        for x in barrier.inputs:
            value = result.values[x]
            if value.shape != (256, 64):
                continue
            assert value.dtype == jnp.bfloat16
            late = [u for u in value.users if place[u.id] > place[barrier.id] and u.prim != "optimization_barrier"]
            assert not late or value.producer is None, "but what the step is given"
