"""A program held to its order: the same results, and barriers where XLA:GPU would start too early or put off."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import STEPS

from jaxauto.blocks import find_blocks
from jaxauto.graph import build, walk
from jaxauto.rewrite.evaluate import evaluator
from jaxauto.rewrite.order import Habits, in_order
from jaxauto.rewrite.program import Rewritten
from jaxauto.rewrite.recompute import recompute
from jaxauto.trace import trace

VOCABULARY, WIDTH, ROWS = 64, 16, 8


def step(params, tokens, labels):
    """Looked up, three scanned layers, projected, one logit of each row picked."""

    def loss(p):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), p["table"][tokens], p["layers"])
        logits = jax.nn.log_softmax(x @ p["head"])
        return -jnp.mean(logits[jnp.arange(ROWS)[::-1], labels])  # gathered: each row the label of another

    return jax.value_and_grad(loss)(params)


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"table": (VOCABULARY, WIDTH), "layers": (3, WIDTH, WIDTH), "head": (WIDTH, VOCABULARY)}
    params = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return params, jnp.arange(ROWS), jnp.arange(ROWS) + 1


@pytest.fixture(scope="module")
def graph():
    return build(trace(step, arguments()).jaxpr)


def head_gradient(graph):
    (found,) = (x for x in graph.outputs if isinstance(x, int) and graph.values[x].shape == (WIDTH, VOCABULARY))
    return found


def barriers(graph):
    return [node for node in graph.nodes if node.prim == "optimization_barrier"]


def test_a_scatter_of_constants_waits_for_the_loss(graph):
    result = in_order(Rewritten(graph, {}), frozenset(), Habits()).graph
    (barrier,) = barriers(result)
    assert result.values[barrier.inputs[1]].shape == (), "the loss"
    (scatter,) = (
        n for n in result.nodes if n.prim.startswith("scatter") and n.outputs[0] in result.values and barrier.outputs[0] in n.inputs
    )
    assert result.values[scatter.outputs[0]].shape == (ROWS, VOCABULARY)
    assert barrier.outputs[1] in result.outputs, "the loss that is returned has passed as well"


def test_where_nothing_is_started_early_only_gradients_are_waited_for(graph):
    """As for XLA:TPU."""
    assert not barriers(in_order(Rewritten(graph, {}), frozenset(), Habits(strays=False)).graph)
    (barrier,) = barriers(in_order(Rewritten(graph, {}), frozenset([head_gradient(graph)]), Habits(strays=False)).graph)
    assert head_gradient(graph) in barrier.inputs


def test_a_backward_loop_waits_for_the_gradients_before_it(graph):
    gradient = head_gradient(graph)
    result = in_order(Rewritten(graph, {}), frozenset({gradient}), Habits()).graph
    (barrier,) = (b for b in barriers(result) if gradient in b.inputs)
    cotangent = next(out for x, out in zip(barrier.inputs, barrier.outputs, strict=True) if x != gradient)
    (loop,) = (node for node in result.nodes if node.prim == "scan" and node.backward)
    assert cotangent in loop.inputs[loop.num_consts : loop.num_consts + loop.num_carry]
    assert result.nodes.index(barrier) < result.nodes.index(loop)


@pytest.mark.parametrize("at_once", [True, False])
def test_the_backward_pass_waits_for_the_loss(at_once):
    """With the logits' cotangent, from before the first matmul that reads it; else the logits would lie there to the end of the step."""

    def step(params, x):
        def loss(params):
            logits = x @ params["head"]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0]), jnp.max(logits)

        (value, most), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda w, g: w - g, params, grads), value, most, jnp.float32(2) * params["rate"]

    params = {"head": jax.random.normal(jax.random.key(0), (WIDTH, VOCABULARY)), "rate": jnp.ones(())}
    args = params, jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    graph = build(trace(step, args).jaxpr)
    result = in_order(Rewritten(graph, {}), frozenset(), Habits(beside=not at_once)).graph
    leaves = jax.tree.leaves(args)
    for want, got in zip(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result))(*leaves), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    (barrier,) = barriers(result)
    assert [result.values[x].shape for x in barrier.inputs] == [(ROWS, VOCABULARY), (), ()]
    dots = [node for node in result.nodes if node.prim == "dot_general" and node.backward]
    assert dots and all(barrier.outputs[0] in node.inputs for node in dots)
    assert [x in barrier.outputs for x in result.outputs] == [False, False, True, True, False], "neither weights nor what needs no pass"


def narrow_step(params, x):
    """Two layers in half precision, straight; conversions of the gradients come right after them in the program."""

    def loss(params):
        y = x
        for k, w in enumerate(params):
            with jax.named_scope(f"layer{k}"):
                y = jnp.tanh(jnp.tanh(y @ w.astype(y.dtype)))
        return jnp.sum(y.astype(jnp.float32))

    grads = jax.grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)]


@pytest.mark.parametrize(("at_once", "small"), [(True, 0), (False, 0), (False, 1 << 20)])
def test_a_recomputation_waits_for_the_gradients_before_it(monkeypatch, at_once, small):
    """By a barrier that they are read from: the conversion that came before it comes after it. If not at once, a block later."""
    monkeypatch.setattr("jaxauto.rewrite.order.SMALL", small)
    args = [jnp.ones((WIDTH, WIDTH))] * 4, jnp.ones((ROWS, WIDTH), jnp.bfloat16)
    graph = build(trace(narrow_step, args).jaxpr)
    rewritten = recompute(graph, {k: frozenset() for k, _ in enumerate(find_blocks(graph))})
    gradients = [
        n.outputs[0] for n in graph.nodes if n.backward and graph.values[n.outputs[0]].shape == (WIDTH, WIDTH) and n.prim == "dot_general"
    ]
    assert len(gradients) == 4
    result = in_order(rewritten, frozenset(gradients), Habits(beside=not at_once))
    waited = {x: barrier for barrier in barriers(result.graph) for x in barrier.inputs if x in gradients}
    assert waited
    place = {node.id: k for k, node in enumerate(result.graph.nodes)}
    for gradient, barrier in waited.items():
        passed = barrier.outputs[barrier.inputs.index(gradient)]
        assert [user.prim for user in result.graph.values[passed].users] == ["convert_element_type"]
        assert list(result.graph.values[gradient].users) == [barrier]
        made = place[result.graph.values[gradient].producer.id]
        between = sum(made < place[b.id] < place[barrier.id] for b in barriers(result.graph))
        assert between == (0 if at_once or small else 1), "a long sum over devices has a block to hide behind"
    leaves = jax.tree.leaves(args)
    for want, got in zip(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result.graph))(*leaves), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-2)


@pytest.mark.parametrize("again", [True, False])
def test_each_step_of_the_backward_pass_waits_for_the_gradients_before_it(again):
    """Where it is asked for; those of the last layer have nothing after them."""
    args = [jnp.ones((WIDTH, WIDTH))] * 4, jnp.ones((ROWS, WIDTH), jnp.bfloat16)
    graph = build(trace(narrow_step, args).jaxpr)
    rewritten = recompute(graph, {k: frozenset() for k, _ in enumerate(find_blocks(graph))}) if again else Rewritten(graph, {})
    dots = [n.outputs[0] for n in graph.nodes if n.backward and n.prim == "dot_general"]
    gradients = [x for x in dots if graph.values[x].shape == (WIDTH, WIDTH)]
    result = in_order(rewritten, frozenset(gradients), Habits(stepwise=True)).graph
    place = {node.id: k for k, node in enumerate(result.nodes)}
    steps = [place[n.id] for n in result.nodes if n.prim == "dot_general" and n.backward and n.outputs[0] in {*dots} - {*gradients}]
    assert len(gradients) == 4 and len(steps) == 3
    for gradient in gradients[:-1]:
        (barrier,) = (b for b in barriers(result) if gradient in b.inputs)
        made = place[result.values[gradient].producer.id]
        assert made < place[barrier.id] <= min(k for k in steps if k > made), "before the next cotangent is made"
    leaves = jax.tree.leaves(args)
    for want, got in zip(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result))(*leaves), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-2)


@pytest.mark.parametrize(("lags", "small"), [(False, 0), (True, 0), (True, 1 << 20)])
@pytest.mark.parametrize("short", [0, 1, 2, 3])
def test_the_next_operation_waits_for_a_gradient_whose_sum_is_short(short, lags, small, monkeypatch):
    """And for no other: nothing is made again here, so nothing else has to be held to an order. Or it waits for all but the last, unless
    that is small."""
    monkeypatch.setattr("jaxauto.rewrite.order.SMALL", small)
    lagging = lags and not small
    args = [jnp.ones((WIDTH, WIDTH))] * 4, jnp.ones((ROWS, WIDTH), jnp.bfloat16)
    graph = build(trace(narrow_step, args).jaxpr)
    dots = [n.outputs[0] for n in graph.nodes if n.backward and n.prim == "dot_general"]
    gradients = [x for x in dots if graph.values[x].shape == (WIDTH, WIDTH)]
    chosen = gradients[:short]
    result = in_order(Rewritten(graph, {}), frozenset(gradients), Habits(beside=True, lags=lags), short=frozenset(chosen)).graph
    place = {node.id: k for k, node in enumerate(result.nodes)}
    steps = [place[n.id] for n in result.nodes if n.prim == "dot_general" and n.backward and n.outputs[0] not in gradients]
    waited = {x: place[b.id] for b in barriers(result) for x in b.inputs if x in gradients}
    assert [*waited] == (chosen[:-1] if lagging else chosen)
    for k, (gradient, at) in enumerate(waited.items()):
        made = place[result.values[chosen[k + 1] if lagging else gradient].producer.id]
        assert made < at <= min(k for k in steps if k > made)
    leaves = jax.tree.leaves(args)
    for want, got in zip(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result))(*leaves), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-2)


def test_in_steps_and_on_gpus_gradients_in_the_body_of_a_loop_are_waited_for_too():
    """Microbatches: each trip makes its layers again."""

    def step(params, batches):
        def loss(params, x):
            for k, w in enumerate(params):
                with jax.named_scope(f"layer{k}"):
                    x = jnp.tanh(jnp.tanh(x @ w))
            return jnp.sum(x)

        add = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None)  # noqa: E731
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, total)

    args = [jnp.ones((WIDTH, WIDTH))] * 3, jnp.ones((2, ROWS, WIDTH))
    graph = build(trace(step, args).jaxpr)
    blocks = find_blocks(graph)
    rewritten = recompute(graph, {k: frozenset() for k, block in enumerate(blocks) if not block.scan})
    (loop,) = (node for node in graph.nodes if node.bodies)
    made = [n.outputs[0] for n in loop.bodies[0].nodes if n.backward and n.prim == "dot_general"]
    gradients = frozenset(x for x in made if graph.values[x].shape == (WIDTH, WIDTH))
    for how, count in ((Habits(stepwise=True), 2), (Habits(sums=True), 2), (Habits(sums=True, beside=True), 2), (Habits(), 0)):
        result = in_order(rewritten, gradients, how).graph
        (loop,) = (node for node in result.nodes if node.bodies)
        waited = [x for b in barriers(loop.bodies[0]) for x in b.inputs if x in gradients]
        assert len(gradients) == 3 and len(waited) == count
        leaves = jax.tree.leaves(args)
        for want, got in zip(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result))(*leaves), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_gradient_made_after_the_loop_is_not_waited_for(graph):
    (table,) = (x for x in graph.outputs if isinstance(x, int) and graph.values[x].shape == (VOCABULARY, WIDTH))
    result = in_order(Rewritten(graph, {}), frozenset({table}), Habits()).graph
    assert not [b for b in barriers(result) if table in b.inputs]


def test_results_are_the_same_bit_for_bit(graph):
    leaves = jax.tree.leaves(arguments())
    result = in_order(Rewritten(graph, {}), frozenset({head_gradient(graph)}), Habits()).graph
    with jax.disable_jit():
        for want, got in zip(evaluator(graph)(*leaves), evaluator(result)(*leaves), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["tied_embeddings", "gradient_accumulation", "recurrent_scan"])
def test_steps_of_the_zoo(name):
    zoo_step, args = STEPS[name]()
    graph = build(trace(zoo_step, args).jaxpr)
    finished = frozenset(out for node in graph.nodes if node.backward and node.prim == "dot_general" for out in node.outputs)
    before = [(node.id, node.inputs, node.outputs) for node in walk(graph)]
    result = in_order(Rewritten(graph, {}), finished, Habits())
    assert [(node.id, node.inputs, node.outputs) for node in walk(graph)] == before, "the graph that came in is as it was"
    for new, old in result.origin.items():
        assert result.graph.values[new].shape == graph.values[old].shape
    leaves = jax.tree.leaves(args)
    for want, got in zip(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result.graph))(*leaves), strict=True):
        data = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (want, got))
        np.testing.assert_allclose(*map(np.asarray, data), rtol=2e-5, atol=1e-6)


def chained(result):
    """Whether each barrier of the backward pass lets something pass that the one before let pass."""
    found = [b for b in barriers(result) if b.backward]
    return len(found) > 1 and all({*a.outputs} & {*b.inputs} for a, b in itertools.pairwise(found))


def test_in_steps_each_waits_for_all_before_it_and_for_what_is_not_read_yet():
    """Layers that share a matrix: its gradient is finished with the first of them. A cotangent that all of them read is there early."""

    def step(params, x):
        def loss(params):
            skips, y = 0.0, x
            for bias in params["biases"]:
                y = jnp.tanh(y @ params["w"] + bias)
                skips = skips + y @ params["skip"]
            return jnp.sum(jnp.sin(skips))

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    matrices = 0.1 * jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH))
    args = {"w": matrices[0], "skip": matrices[1], "biases": [jnp.ones(WIDTH)] * 3}, jnp.ones((ROWS, WIDTH))
    graph = build(trace(step, args).jaxpr)
    sums = [n.outputs[0] for n in graph.nodes if n.backward and n.prim == "reduce_sum"]
    products = [
        n.outputs[0] for n in graph.nodes if n.backward and n.prim == "dot_general" and graph.values[n.outputs[0]].shape == (WIDTH,) * 2
    ]
    result = in_order(Rewritten(graph, {}), frozenset(sums), Habits(stepwise=True)).graph
    assert sums and len(products) == 6 and chained(result)
    assert len({*products} & {x for b in barriers(result) for x in b.inputs}) > 1
    assert not {*products} & {x for b in barriers(in_order(Rewritten(graph, {}), frozenset(sums), Habits()).graph) for x in b.inputs}
    leaves = jax.tree.leaves(args)
    for want, got in zip(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result))(*leaves), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sums", [True, False])
def test_the_sums_of_rows_that_alone_are_kept_are_waited_for_in_the_forward_pass(sums):
    def step(params, x):
        def loss(params):
            y = x
            for k, w in enumerate(params):
                with jax.named_scope(f"layer{k}"):
                    y = y + jax.nn.softmax(y @ w) @ w.T
            return jnp.sum(jnp.sin(y))

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    args = [0.1 * jax.random.normal(jax.random.key(k), (WIDTH, VOCABULARY)) for k in range(3)], jnp.ones((ROWS, WIDTH))
    graph = build(trace(step, args).jaxpr)
    rows = {n.outputs[0] for n in graph.nodes if not n.backward and graph.values[n.outputs[0]].shape == (ROWS, 1)}
    blocks = find_blocks(graph)
    rewritten = recompute(graph, {k: frozenset(rows & {*block.made}) for k, block in enumerate(blocks)})
    result = in_order(rewritten, frozenset(), Habits(sums=sums)).graph
    forward = [b for b in barriers(result) if {*b.inputs} & rows and not any(n.backward for n in result.nodes[: result.nodes.index(b)])]
    assert bool(forward) is sums
    for barrier in forward:
        after = result.nodes[result.nodes.index(barrier) + 1]
        assert after.prim == "dot_general" and {*after.inputs} & {*barrier.outputs}
    leaves = jax.tree.leaves(args)
    for want, got in zip(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result))(*leaves), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sums", [True, False])
def test_a_cotangent_is_summed_as_it_was_before_the_barrier(sums):
    """For a scale; what goes on to a matmul reads what has passed."""

    def step(params, x):
        def loss(params):
            y = x
            for k, (w, scale) in enumerate(params):
                with jax.named_scope(f"layer{k}"):
                    y = y + scale * jnp.tanh(jnp.tanh(y @ w) @ w.T)
            return jnp.sum(jnp.sin(y))

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    keys = jax.random.split(jax.random.key(0), 3)
    args = [(0.1 * jax.random.normal(key, (WIDTH, VOCABULARY)), jnp.ones(WIDTH)) for key in keys], jnp.ones((ROWS, WIDTH))
    graph = build(trace(step, args).jaxpr)
    rewritten = recompute(graph, {k: frozenset() for k, _ in enumerate(find_blocks(graph))})
    result = in_order(rewritten, frozenset(), Habits(sums=sums)).graph
    passed = {y: x for b in barriers(result) for x, y in zip(b.inputs, b.outputs, strict=True)}
    (*_, last) = (n for n in result.nodes if n.prim == "reduce_sum" and n.backward and result.values[n.inputs[0]].shape == (ROWS, WIDTH))
    (product,) = (n for n in result.nodes if last.inputs[0] in n.outputs)
    (barrier,) = (b for b in barriers(result) if {*product.inputs} & {*b.inputs, *b.outputs})
    assert bool({*product.inputs} & {*barrier.inputs}) is sums and bool({*product.inputs} & passed.keys()) is not sums
    others = [n for n in result.nodes if n.prim in ("mul", "add_any") and {*n.inputs} & {*barrier.outputs}]
    assert others, "the cotangent goes on from there"
    leaves = jax.tree.leaves(args)
    for want, got in zip(jax.jit(evaluator(graph))(*leaves), jax.jit(evaluator(result))(*leaves), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_thin_factor_made_again_waits_for_what_was_renamed():
    """LoRA: what is made again of weights alone (the product of thin factors) is early, and is tied to a cotangent that has a new name."""

    def lora(thin, base, x):
        def loss(thin):
            h = x
            for pair, weight in zip(thin, base, strict=True):
                h = h + jnp.tanh(h @ (weight + (pair["a"] @ pair["b"]).astype(weight.dtype)))
            return jnp.mean(h.astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(thin)
        return jax.tree.map(lambda p, g: p - g, thin, gradients), value

    keys = jax.random.split(jax.random.key(0), 9)
    thin = [{"a": jax.random.normal(keys[2 * k], (WIDTH, 2)), "b": jax.random.normal(keys[2 * k + 1], (2, WIDTH))} for k in range(4)]
    base = [jax.random.normal(key, (WIDTH, WIDTH)).astype(jnp.bfloat16) for key in keys[4:8]]
    args = thin, base, jax.random.normal(keys[8], (ROWS, WIDTH)).astype(jnp.bfloat16)
    graph = build(trace(lora, args).jaxpr)
    again = recompute(graph, {b: frozenset() for b in range(len(find_blocks(graph)))})
    made = [n.outputs[0] for n in graph.nodes if n.backward and n.prim == "dot_general"]
    held = in_order(again, {x for x in made if graph.values[x].shape != (ROWS, WIDTH)}, Habits(stepwise=True))
    assert len(barriers(held.graph)) > len(barriers(again.graph))
    results = jax.jit(evaluator(held.graph))(*jax.tree.leaves(args))
    for ours, theirs in zip(results, jax.tree.leaves(jax.jit(lora)(*args)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=1e-2)
