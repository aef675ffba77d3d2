"""What a dot's operands say of its result; which gradients are not pinned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxauto
from jaxauto.aot import abstract_mesh
from jaxauto.core import Decisions
from jaxauto.graph import build
from jaxauto.rewrite import implied
from jaxauto.rewrite.apply import apply
from jaxauto.trace import trace

A, B, NONE = ("a",), ("b",), ()


@pytest.mark.parametrize(
    ("spec", "lhs", "rhs", "result"),
    [
        ("bmk,bkn->bmn", (A, NONE, NONE), (A, NONE, NONE), (A, NONE, NONE)),
        ("bmk,bkn->bmn", (A, B, NONE), (A, NONE, NONE), (A, B, NONE)),
        ("bmk,kn->bmn", (A, NONE, NONE), (NONE, B), (A, NONE, B)),
        ("kbm,nkb->bmn", (NONE, A, B), (NONE, NONE, A), (A, B, NONE)),
        ("bmk,bkn->bmn", (A, NONE, B), (A, B, NONE), None),  # a sum is left
        ("bmk,bkn->bmn", (A, NONE, NONE), (NONE, NONE, NONE), None),  # they disagree
        ("bmk,bkn->bmn", (A, NONE, B), (A, NONE, NONE), None),
    ],
)
def test_the_result_of_a_dot_has_what_its_operands_have(spec, lhs, rhs, result):
    arrays = [jax.ShapeDtypeStruct((8,) * len(dims), jnp.float32) for dims in (lhs, rhs)]
    (node,) = (n for n in build(trace(lambda x, y: jnp.einsum(spec, x, y), arrays).jaxpr).nodes if n.prim == "dot_general")
    if node.inputs[0] != 0:  # einsum may change their places
        lhs, rhs = rhs, lhs
    assert implied.of_dot(node, lhs, rhs) == result


def test_an_array_split_over_every_axis_is_over_all():
    mesh = {"a": 2, "b": 4, "one": 1}
    assert implied.is_over_all((("a",), ("b",)), mesh) and implied.is_over_all((("a", "b"), ()), mesh)
    assert not implied.is_over_all((("a",), ()), mesh)


def attend(w, x):
    def loss(w):
        q, k, v = jnp.einsum("blc,jcgd->jblgd", x, w)
        weights = jax.nn.softmax(jnp.einsum("blgd,bmgd->bglm", q, k) / 3)
        return jnp.mean(jnp.einsum("bglm,bmgd->blgd", weights, v) ** 2)

    return jax.grad(loss)(w)


ARGS = (jax.ShapeDtypeStruct((3, 32, 2, 16), jnp.float32), jax.ShapeDtypeStruct((8, 64, 32), jnp.float32))


def test_gradients_that_no_device_can_have_more_of_are_not_pinned():
    """Those of activations, split as the batch is; those of weights are sums over devices."""
    plan = jaxauto.plan(attend, *ARGS, target="v5e:2x4", mesh={"data": 8}, constraints={"1": P("data")}, certify=False, progress=False)
    graph = plan.program.graph
    pinned = jax.make_jaxpr(apply(graph, plan.decisions, abstract_mesh((8,), ("data",)), "tpu"))(*ARGS).eqns
    dots = [out for eqn in pinned if eqn.primitive.name == "dot_general" for out in eqn.outvars]
    told = {eqn.invars[0] for eqn in pinned if eqn.primitive.name == "sharding_constraint"}
    batched = [x for x in dots if 8 in x.aval.shape and x.aval.shape != ARGS[0].shape]
    assert len([x for x in batched if x not in told]) >= 3  # of weights, of scores in q and in k
    assert any(x in told for x in dots)


def test_what_is_not_pinned_is_sharded_all_the_same_and_no_number_changes():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=a.shape) / 4, jnp.float32) for a in ARGS)
    plan = jaxauto.plan(attend, w, x, mesh=mesh, constraints={"1": P("data"), "0": P(None, None, "model")}, certify=False, progress=False)
    placed = jax.device_put(w, NamedSharding(mesh, P(None, None, "model"))), jax.device_put(x, NamedSharding(mesh, P("data")))
    found, expected = plan.compile()(*placed)[0], jax.jit(attend)(w, x)
    assert jnp.max(jnp.abs(found - expected)) < 1e-6 * jnp.max(jnp.abs(expected))


@pytest.mark.parametrize("wanted", [(("data",), (), ()), ((), (), ("data",))], ids=["batch", "features"])
def test_what_is_brought_to_another_sharding_is_pinned_to_the_one_that_it_comes_from(wanted):
    """A cotangent that is split as the batch is, and scattered to a table so, or by features."""

    def step(table, w, tokens):
        return jax.grad(lambda table: jnp.mean(jnp.tanh(jnp.tanh(table[tokens] @ w) @ w) ** 2))(table)

    args = *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 128), (128, 128))), jax.ShapeDtypeStruct((8, 4096), jnp.int32)
    graph = build(trace(step, args).jaxpr)
    dots = [n for n in graph.nodes if n.prim == "dot_general"]
    (scatter,) = (n for n in graph.nodes if n.prim == "scatter-add")
    batch, whole = (("data",), (), ()), ((), ())
    operands = {(n.outputs[0], k): whole if x == 1 else batch for n in dots for k, x in enumerate(n.inputs)}
    decisions = Decisions({n.outputs[0]: batch for n in dots}, {**operands, (scatter.outputs[0], 2): wanted})
    applied = jax.make_jaxpr(apply(graph, decisions, abstract_mesh((8,), ("data",)), "tpu"))(*args).eqns
    *_, last = (eqn for eqn in applied if eqn.primitive.name == "dot_general")
    pins, x = [], last.outvars[0]
    while pin := next((eqn for eqn in applied if x in eqn.invars and eqn.primitive.name == "sharding_constraint"), None):
        pins.append(pin.params["sharding"].spec)
        (x,) = pin.outvars
    assert pins[0] == P("data")
    assert {*pins[1:]} <= {P("data")} if wanted == batch else pins[-1] == P(None, None, "data")
