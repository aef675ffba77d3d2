"""State in the host's memory: the same results, fetched one leaf after the other, each beside its own gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from zoo import STEPS, optimizers

import jaxauto
from jaxauto.graph import DEVICE, HOST, BarrierEqn
from jaxauto.planner import read
from jaxauto.rewrite.away import fetched
from jaxauto.rewrite.evaluate import evaluator
from jaxauto.rewrite.offload import offload
from jaxauto.rewrite.program import Rewritten

WIDTH, LAYERS = 64, 3


def moved(step):
    """The program with all of its movable state in the host's memory."""
    chosen = frozenset((*step.movable, *step.movable.values()))
    return offload(Rewritten(step.graph, {}), chosen), chosen


@pytest.mark.parametrize("name", sorted({*optimizers.STEPS} - {"multi_steps"}))
def test_results_are_the_same(name):
    written, args = STEPS[name]()
    step = read(written, args, {})
    assert step.movable
    result, chosen = moved(step)
    leaves = jax.tree.leaves(args)
    expected = jax.jit(evaluator(step.graph))(*leaves)
    sent = [number in chosen for number in step.graph.inputs]
    there = [jax.device_put(x, jax.memory.Space.Host) if away else x for x, away in zip(leaves, sent, strict=True)]
    for want, got in zip(expected, jax.jit(evaluator(result.graph))(*there), strict=True):
        data = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (want, got))
        np.testing.assert_allclose(*map(np.asarray, data), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp_sgd", "transformer_loop", "multi_steps"])
def test_what_has_no_moments_or_reads_them_in_branches_has_no_such_state(name):
    step = read(*STEPS[name](), {})
    assert not step.movable and moved(step)[0].graph is step.graph


# --------------------------------------------------------------------------------------------------------------- structure


def training(optimizer, layers=LAYERS):
    """A step of a chain of layers in a Python loop, and its abstract arguments."""

    def step(params, moments, x):
        def loss(p):
            h = x
            for w in p:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * layers
    return step, (params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((256, WIDTH), jnp.float32))


def barriers(graph):
    return [node for node in graph.nodes if isinstance(node.eqn, BarrierEqn) and not node.backward]


def together_scaled():
    """Every update depends on all moments (as a bound on the norm of all updates does)."""
    return optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.1), optax.scale(-1e-3))


@pytest.mark.parametrize("optimizer", [optax.adamw(1e-3), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))])
def test_the_moments_of_a_parameter_come_together_when_its_gradient_and_the_parameter_before_it_are_done(optimizer):
    step = read(*training(optimizer), {})
    graph = moved(step)[0].graph
    assert len(step.movable) == 2 * LAYERS
    made = {out: node for node in graph.nodes for out in node.outputs}
    position = {node.id: k for k, node in enumerate(graph.nodes)}
    gradients = []
    for turn, barrier in enumerate(barriers(graph)):
        moments, ties = barrier.inputs[:2], [made[x] for x in barrier.inputs[2:]]
        assert set(moments) <= step.movable.keys(), "the two moments of one parameter"
        gradient, *before = ties
        assert gradient.backward and gradient.prim in ("dot_general", "transpose")
        assert [node.prim for node in before] == ["add"] * (turn > 0), "a parameter plus its update"
        gradients.append(position[gradient.id])
    assert len(gradients) == LAYERS and gradients == sorted(gradients)


def test_the_norm_of_all_gradients_waits_for_no_moment():
    step = read(*training(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))), {})
    graph = moved(step)[0].graph
    root = next(k for k, node in enumerate(graph.nodes) if node.prim == "sqrt" and not graph.values[node.outputs[0]].shape)
    first = next(k for k, node in enumerate(graph.nodes) if node.params.get("space") == DEVICE)
    upstream, wanted = set(), [*graph.nodes[root].inputs]
    while wanted:
        node = graph.values[wanted.pop()].producer
        if node is not None and node.id not in upstream:
            upstream.add(node.id)
            wanted += [x for x in node.inputs if isinstance(x, int)]
    assert graph.nodes[first].id not in upstream


def test_what_depends_on_all_moments_is_no_sign_that_one_leaf_is_done():
    step = read(*training(together_scaled()), {})
    graph = moved(step)[0].graph
    assert [len(barrier.inputs) for barrier in barriers(graph)] == [2] * LAYERS, "moments alone: neither gradients nor parameters"


def test_what_is_fetched_says_which_gradient_the_next_waits_for():
    graph = moved(read(*training(optax.adamw(1e-3)), {}))[0].graph
    leaves = fetched(graph)
    assert [len(leaf.copies) for leaf in leaves] == [2] * LAYERS
    assert [leaf.following is not None and leaf.following.backward for leaf in leaves] == [True] * (LAYERS - 1) + [False]
    assert fetched(read(*training(optax.adamw(1e-3)), {}).graph) == []


def test_everything_goes_back_as_soon_as_it_is_made():
    step = read(*training(optax.adamw(1e-3)), {})
    result, _ = moved(step)
    graph = result.graph
    sent = [node for node in graph.nodes if node.params.get("space") == HOST]
    assert {node.inputs[0] for node in sent} == set(step.movable.values())
    assert {node.outputs[0] for node in sent} == set(graph.outputs) & result.host
    for k, node in enumerate(graph.nodes):
        if node.params.get("space") == HOST:
            assert node.inputs[0] in graph.nodes[k - 1].outputs


def test_what_the_forward_pass_reads_does_not_move():
    """The weights of a moving average that the loss is made with; a state that is returned twice, or not at all."""

    def step(params, slow, seen, x):
        value, gradient = jax.value_and_grad(lambda p: jnp.mean((x @ p - x @ slow) ** 2))(params)
        seen = 0.9 * seen + gradient
        return params - 0.1 * seen, 0.99 * slow + 0.01 * params, seen, {"momentum": seen, "loss": value}

    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    args = matrix, matrix, matrix, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    assert read(step, args, {}).movable == {}
    once = lambda *a: (*step(*a)[:3], step(*a)[3]["loss"])  # noqa: E731
    assert len(read(once, args, {}).movable) == 1, "the momentum"


# -------------------------------------------------------------------------------------------------------------- as planned


def least(step, args, remat, **options):
    with pytest.raises(jaxauto.InfeasibleError) as error:
        jaxauto.plan(step, *args, memory_budget=2**10, remat=remat, certify=False, **options)
    return error.value.least_bytes


def test_a_plan_that_only_the_hosts_memory_makes_room_for_trains_alike(tmp_path):
    step, (params, moments, _) = training(optax.adamw(1e-3), layers=8)
    options = {"mesh": {"data": 8}, "target": "cpu:8"}
    args = params, moments, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    without, offloading = (least(step, args, remat, **options) for remat in ("auto", "offload"))
    assert offloading < 0.8 * without
    plan = jaxauto.plan(step, *args, memory_budget=int(0.9 * without), remat="offload", certify=False, **options)
    state = [d for d in plan.remat if d.name.startswith("state: ")]
    assert state and {d.action for d in state} == {"offloaded"} and plan.estimate.peak_memory <= 0.9 * without
    assert {d.name.removeprefix("state: ") for d in state} == {plan.in_paths[k] for k in plan.in_host}
    assert len(plan.in_host) == len(plan.out_host)
    loaded = jaxauto.Plan.load(plan.save(str(tmp_path / "plan.json")))
    assert (loaded.in_host, loaded.out_host) == (plan.in_host, plan.out_host)
    assert "in host memory between steps" in plan.export()
    rng = np.random.default_rng(0)
    weights = [rng.normal(0, 0.1, (WIDTH, WIDTH)).astype(np.float32) for _ in params]
    here = weights, optax.adamw(1e-3).init(weights), rng.normal(0, 1, (8, WIDTH)).astype(np.float32)
    planned, ran = loaded.bind(step, *args), jax.jit(step)
    there, expected = planned.place(*here), here
    for _ in range(2):
        there, expected = (*planned.jit()(*there)[:2], there[2]), (*ran(*expected)[:2], here[2])
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(there)]
    assert [k for k, kind in enumerate(kinds) if kind == HOST] == sorted(plan.in_host)
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=2e-5)


def test_init_makes_it_there():
    optimizer = optax.adamw(1e-3)
    step, (params, moments, _) = training(optimizer, layers=8)
    args = params, moments, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    room = least(step, args, "offload", mesh={"data": 8})
    plan = jaxauto.plan(step, *args, mesh={"data": 8}, memory_budget=int(1.05 * room), remat="offload", certify=False)
    weights = [jnp.ones((WIDTH, WIDTH))] * 8
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(plan.init(lambda: (weights, optimizer.init(weights))))]
    assert [k for k, kind in enumerate(kinds) if kind == HOST] == sorted(plan.in_host) != []


def test_with_room_enough_everything_stays():
    step, args = training(optax.adamw(1e-3))
    plan = jaxauto.plan(step, *args, target="h100:1", remat="offload", certify=False)
    assert not plan.in_host and not plan.out_host


def test_on_tpu_state_stays_where_the_compiler_would_fetch_all_at_once():
    step, args = training(optax.adamw(1e-3), layers=8)
    assert least(step, args, "offload", target="v5e:1x1") == pytest.approx(least(step, args, "auto", target="v5e:1x1"), rel=0.02)
