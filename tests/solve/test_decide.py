"""What the compiler is told of a solution: which arrays are pinned."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from zoo import STEPS

import jaxauto
from jaxauto.core import Kind
from jaxauto.rewrite.order import in_order
from jaxauto.solve.check import check
from jaxauto.solve.decide import decisions_of

ROWS, WIDTH = 64, 256


def biased_step(params, x):
    """A bias in float32 between two matrices in bfloat16: its gradient is a sum over the rows."""

    def loss(p):
        y = (x @ p["into"]).astype(jnp.float32) + p["bias"]
        return jnp.mean((jnp.tanh(y).astype(x.dtype) @ p["out"]).astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


@pytest.fixture(scope="module")
def solved():
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    params = {"into": matrix, "bias": jax.ShapeDtypeStruct((WIDTH,), jnp.float32), "out": matrix}
    x = jax.ShapeDtypeStruct((ROWS * WIDTH, WIDTH), jnp.bfloat16)
    plan = jaxauto.plan(biased_step, params, x, target="v5e:2x4", mesh={"data": 8}, certify=False, progress=False)
    return plan._bound().solved.found.best


def sums_over_rows(model):
    """Reductions whose axes leave partial results that are summed over devices."""
    for e in model.groups.edges:
        node = model.values[e.result].producer
        if e.reduced and node is not None and model.groups.rules[node.id].kind is Kind.REDUCE:
            yield e


def test_what_is_only_summed_over_devices_is_pinned_where_it_arrives(solved):
    """Pinned before, a float32 array of the activations' size is written by XLA:TPU; unpinned it is added up as it is made."""
    model, values = solved.model, decisions_of(solved).values
    wide = [e for e in sums_over_rows(model) if e.result in values and model.values[e.value].elements == ROWS * WIDTH * WIDTH]
    assert wide, "the gradient of the bias is a sum over the devices' rows"
    made_by_operations = {o.value for op in model.groups.operations for o in op.results}
    assert not [e for e in wide if e.value in values and e.value not in made_by_operations]


def test_results_of_operations_are_pinned(solved):
    values = decisions_of(solved).values
    assert {o.value for op in solved.model.groups.operations for o in op.results if o.dims} <= set(values)


@pytest.mark.parametrize(("target", "pinned"), [("v5p:1x1x1", False), ("v5p:2x2x1", True)])
def test_on_one_device_nothing_is_pinned(target, pinned):
    """A constraint says nothing there, and XLA:TPU copies gradients to another layout for it before they are stacked."""
    step, args = STEPS["transformer_scan"]()
    plan = jaxauto.plan(step, *args, target=target, certify=False)
    module = plan.lower().as_text()
    assert ("sharding_constraint" in module) == pinned


@pytest.mark.parametrize(("rows", "awaited"), [(ROWS * WIDTH, 2), (16 * WIDTH, 2), (15 * WIDTH, 0)])
def test_tpu_waits_for_gradients_that_take_at_most_half_of_what_is_read_for_them(rows, awaited):
    """If they are summed over devices; what lies there until they are made is what is read for them: twice as much, of 16 * WIDTH rows."""
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    args = (
        {"into": matrix, "bias": jax.ShapeDtypeStruct((WIDTH,), jnp.float32), "out": matrix},
        jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16),
    )
    for target, count in (("v5e:2x4", awaited), ("v5e:1x1", 0)):
        mesh = {"data": 8 if target == "v5e:2x4" else 1}
        plan = jaxauto.plan(biased_step, *args, target=target, mesh=mesh, certify=False, progress=False)
        assert len(plan.decisions.in_order or ()) == count


def test_one_tpu_waits_for_a_gradient_that_lets_much_memory_go_where_there_is_little():
    """That of the last projection: with its update it would be made at the end of the step, and the logits would lie there until then."""
    width, vocabulary = 512, 16384

    def step(params, x):
        def loss(params):
            y = x
            for w in params["layers"]:
                y = y + jnp.tanh(jnp.tanh(y @ w[0]) @ w[1])
            return jnp.mean(jax.nn.logsumexp((y @ params["head"]).astype(jnp.float32), -1))

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    layers = [(of((width, 4 * width)), of((4 * width, width))) for _ in range(4)]
    args = {"layers": layers, "head": of((width, vocabulary))}, of((16384, width))
    make = functools.partial(jaxauto.plan, step, *args, target="v5e:1x1", mesh={"data": 1}, certify=False, progress=False)
    roomy = make(remat="off")
    tight = make(memory_budget=0.9 * roomy.estimate.peak_memory)
    assert roomy.decisions.in_order == frozenset() and any(d.action == "recomputed" for d in tight.remat)
    values = tight.program.solved.best.model.values
    assert [width, vocabulary] in [sorted(values[gradient].shape) for gradient in tight.decisions.in_order]


@pytest.mark.parametrize(("target", "at_once"), [("v5e:2x4", True), ("h100:8", False), ("h100:1", True)])
def test_on_tpu_a_recomputation_waits_for_all_gradients_before_it(monkeypatch, target, at_once):
    """No sum runs beside the block there, as it does on several GPUs; what is read for a gradient lies there until it is made."""
    asked = []
    told = lambda graph, finished, habits, **how: asked.append(not habits.beside) or in_order(graph, finished, habits, **how)  # noqa: E731
    monkeypatch.setattr("jaxauto.rewrite.apply.in_order", told)
    step, args = STEPS["transformer_loop"]()
    plan = jaxauto.plan(step, *args, target=target, certify=False, progress=False)
    plan.lower()
    assert asked == [at_once]


def classifier_step(params, x, labels):
    """Cross-entropy over a vocabulary much wider than the model."""

    def loss(p):
        logits = (jnp.tanh(x @ p["into"]) @ p["head"]).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1))

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


@pytest.mark.parametrize(("target", "of_logits"), [("v5p:2x2x1", 0), ("h100:4", 1)])
def test_a_late_gather_waits_for_what_is_in_memory(target, of_logits):
    """Dots of the TPU make the gradient of the logits as they read it: a barrier that it passes would have it written. GPUs write it."""
    vocabulary = 16 * WIDTH
    weights = {"into": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16), "head": jax.ShapeDtypeStruct((WIDTH, vocabulary), jnp.bfloat16)}
    rows = jax.ShapeDtypeStruct((4 * ROWS * WIDTH, WIDTH), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct(rows.shape[:1], jnp.int32)
    pinned = {"0.*": P("data"), "1": P("data"), "2": P("data")}
    plan = jaxauto.plan(
        classifier_step, weights, rows, labels, target=target, mesh={"data": 4}, constraints=pinned, certify=False, progress=False
    )
    late, graph = plan.decisions.gathered_late, plan._bound().solved.best.model.groups.graph
    head = next(n for n in graph.nodes if n.prim == "dot_general" and n.outputs[0] in {key[0] for key in late})
    assert [graph.values[x].shape for x in head.inputs] == [(*labels.shape, vocabulary), (WIDTH, vocabulary)]
    barriers = [line for line in plan.lower().as_text().splitlines() if "optimization_barrier" in line]
    short = [x for x in plan.decisions.short if graph.values[x].shape == (WIDTH, vocabulary)]
    assert len(short) == of_logits  # the gradient, that the next operation waits for on GPUs
    assert sum(f"{WIDTH}x{vocabulary}x" in line for line in barriers) == 1 + len(short)
    assert sum(f"{labels.shape[0]}x{vocabulary}x" in line for line in barriers) == of_logits + len(short)
    awaited = late[head.outputs[0], 1]
    assert (awaited is None) == bool(of_logits)
    assert awaited is None or graph.values[awaited].elements < rows.size * vocabulary / WIDTH


def test_a_piece_that_is_brought_elsewhere_leaves_the_others_where_they_are():
    """Pinned before it is cut, all of an array would go there, and the other piece back."""

    def step(w, x):
        a, b = jnp.split(jnp.tanh(x), 2, axis=-1)
        return w + a, jnp.sum(b**2)

    args = jax.ShapeDtypeStruct((64, 256, 64), jnp.float32), jax.ShapeDtypeStruct((64, 256, 128), jnp.float32)
    pins = {"0": P(None, "data"), "1": P("data")}
    plan = jaxauto.plan(step, *args, target="cpu:8", mesh={"data": 8}, constraints=pins, remat="off", certify=False, progress=False)
    (split,) = (n for n in plan.program.graph.nodes if n.prim == "split")
    decisions, batch, rows = plan.decisions, (("data",), (), ()), ((), ("data",), ())
    assert (split.outputs[0], 0) not in decisions.operands
    assert decisions.made[split.outputs[0]] == batch and decisions.values[split.outputs[0]] == rows
    (exchange,) = (c for c in plan.verify().collectives if c.name.startswith("all-to-all"))
    assert exchange.compiled_count == 1 and exchange.compiled == 4 * args[0].size == exchange.estimated


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("along", [False, True])
def test_pieces_are_told_as_they_are_brought(along, both):
    """Both pieces go: all of the array, in two exchanges. One: half of it, if the array is not split along what is cut; then all of it."""

    def step(v, w, x):
        a, b = jnp.split(jnp.tanh(x), 2, axis=-1)
        return (w + a, v + b) if both else (w + a, jnp.sum(v) + jnp.sum(b**2))

    half = jax.ShapeDtypeStruct((64, 256, 64), jnp.float32)
    args = half, half, jax.ShapeDtypeStruct((64, 256, 128), jnp.float32)
    pins = {"0": P(None, "data"), "1": P(None, "data"), "2": P(None, None, "data") if along else P("data")}
    best = jaxauto.plan(step, *args, target="cpu:8", mesh={"data": 8}, constraints=pins, remat="off", certify=False, progress=False)
    best = best.program.solved.best
    assert check(best, best.peak_bytes, {}) == []
    assert [p.pieces for p in best.model.passages() if p.cut] == [4 * half.size] * 2
    sent = [bytes_ for kind, bytes_, *_ in best.model.collectives(best.x) if kind == "all-to-all"]
    assert sum(sent) == 4 * half.size * (2 if both or along else 1)
