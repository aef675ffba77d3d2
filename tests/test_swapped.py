"""A dot that is only read turned around is made the other way round, with the same numbers; others stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxauto.aot import abstract_mesh
from jaxauto.core import Decisions
from jaxauto.graph import build, walk
from jaxauto.rewrite.apply import apply
from jaxauto.rewrite.evaluate import evaluator
from jaxauto.swapped import turned

LEFT, RIGHT = (2, 5, 3), (2, 5, 4)


def dot(a, b, contracted, batch=(), **options):
    return jax.lax.dot_general(a, b, ((contracted, contracted), (batch, batch)), **options)


def gradient(a, b):
    return dot(a, b, (0, 1)).T


def batched(a, b):
    return dot(a, b, (1,), (0,)).transpose(0, 2, 1)


def two_free(a, b):
    return dot(a, b, (0,)).transpose(2, 3, 0, 1)


def wider_type(a, b):
    return dot(a, b, (0, 1), preferred_element_type=jnp.float32, precision=("high", "highest")).T


def within_a_loop(a, b):
    return jax.lax.scan(lambda c, ab: (c + dot(*ab, (0,)).T, None), jnp.zeros((4, 3)), (a, b))[0]


def of_a_weight(a, b):
    return jax.grad(lambda w: jnp.sin(a @ w).sum())(dot(a, b, (0, 1)))


SWAPPED = [gradient, batched, two_free, wider_type, within_a_loop, of_a_weight]


def read_twice(a, b):
    c = dot(a, b, (0, 1))
    return c.T, c.sum()


def kept(a, b):
    c = dot(a, b, (0, 1))
    return c.T, c


def otherwise_turned(a, b):
    return dot(a, b, (0,)).transpose(3, 2, 0, 1)


def not_turned(a, b):
    return dot(a, b, (0, 1)) + 1


def wide(a, b):
    return dot(jnp.tile(a, 11), b, (0, 1)).T


def turned_back(a, b):
    return dot(a, b, (0, 1)).T.T + 1


def wide_turned_back(a, b):
    return dot(jnp.tile(a, 11), b, (0, 1)).T.T + 1


NOT_SWAPPED = [read_twice, kept, otherwise_turned, not_turned, wide, turned_back, wide_turned_back]


def test_what_is_turned_on_and_not_back_is_swapped():
    def fun(a, b):
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((0,), (0,)))).transpose(0, 2, 1).transpose(1, 0, 2)

    closed = jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in (LEFT, RIGHT)))
    assert str(closed).count("transpose[") == 2 and prims(closed) == ["dot_general", "transpose"]


def prims(closed):
    return [node.prim for node in walk(build(closed)) if node.prim in ("dot_general", "transpose")]


@pytest.mark.parametrize("fun", SWAPPED + NOT_SWAPPED, ids=lambda f: f.__name__)
def test_the_numbers_are_those_as_written(fun):
    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (LEFT, RIGHT))
    closed = jax.make_jaxpr(fun)(*args)
    got = evaluator(build(closed))(*args)
    want = jax.tree.leaves(fun(*args))
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fun", SWAPPED, ids=lambda f: f.__name__)
def test_no_transpose_is_left(fun):
    closed = jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in (LEFT, RIGHT)))
    assert "transpose" in str(closed) and "transpose" not in prims(closed)


@pytest.mark.parametrize("fun", NOT_SWAPPED, ids=lambda f: f.__name__)
def test_what_is_read_as_made_stays(fun):
    closed = jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in (LEFT, RIGHT)))
    assert prims(closed) == [eqn.primitive.name for eqn in closed.eqns if eqn.primitive.name in ("dot_general", "transpose")]


def test_the_source_and_the_scope_stay():
    def fun(a, b):
        with jax.named_scope("head"):
            return gradient(a, b)

    (node,) = [n for n in build(jax.make_jaxpr(fun)(jnp.ones(LEFT), jnp.ones(RIGHT))).nodes if n.prim == "dot_general"]
    assert node.scope == "head" and "test_swapped.py" in node.source


@pytest.mark.parametrize("fun", SWAPPED + NOT_SWAPPED, ids=lambda f: f.__name__)
def test_what_could_be_exchanged_and_was_not_is_told_its_layout(fun):
    """On several TPUs: XLA would keep parameters and moments turned around for the update, and copy them there and back."""
    args = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in (LEFT, RIGHT))
    graph = build(jax.make_jaxpr(fun)(*args))
    found = turned(graph)
    assert [graph.values[x].shape for x in sorted(found)] == ([(4, 33)] if fun is wide else [(4, 3)] if fun in (read_twice, kept) else [])
    whole, split = (Decisions(dict.fromkeys(found, sharding)) for sharding in (((), ()), ((), ("data",))))
    for platform, devices, decisions in [("tpu", 3, whole), ("tpu", 3, split), ("tpu", 1, whole), ("gpu", 3, whole), ("cpu", 3, whole)]:
        mesh = abstract_mesh((devices,), ("data",))
        text = str(jax.make_jaxpr(apply(graph, decisions, mesh, platform))(*args))
        assert text.count("layout_constraint") == len(found) * (platform == "tpu" and devices > 1)


@pytest.mark.parametrize(
    ("here", "there", "width", "told"),
    [
        ((("data",), ()), ((), ()), 256, False),
        (((), ("data",)), ((), ()), 256, True),
        (((), ("data",)), (("data",), ()), 256, True),
        ((("data",), ()), ((), ("data",)), 256, False),
        (((), ("data",)), ((), ()), 48, False),
    ],
    ids=["the first gathered", "another gathered", "another exchanged", "for another", "too short for tiles"],
)
def test_a_gradient_whose_axes_leave_another_dimension_than_the_first_is_told_its_layout(here, there, width, told):
    """On several TPUs: XLA lays it out by the dimension that it gathers, and the update with it. In the order told a device's part of a
    short last dimension would be padding mostly."""

    def step(table, rows, cotangent):
        return table - jax.vjp(lambda t: t[rows], table)[1](cotangent)[0]

    args = (jnp.ones((8, width)), jnp.arange(4), jnp.ones((4, width)))
    graph = build(jax.make_jaxpr(step)(*args))
    (gradient,) = [x for node in graph.nodes if node.prim == "scatter-add" and node.backward for x in node.outputs]
    decisions = Decisions({gradient: there}, made={gradient: here})
    for platform, devices in [("tpu", 2), ("tpu", 1), ("gpu", 2)]:
        mesh = abstract_mesh((devices,), ("data",))
        text = str(jax.make_jaxpr(apply(graph, decisions, mesh, platform))(*args))
        assert text.count("layout_constraint") == (told and platform == "tpu" and devices > 1)


def test_what_the_backward_pass_reads_on_is_not_told_its_layout():
    def step(weight, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)))(weight)

    args = (jnp.ones((8, 8)), jnp.ones((4, 8)))
    graph = build(jax.make_jaxpr(step)(*args))
    dots = [node for node in graph.nodes if node.prim == "dot_general" and node.backward]
    (cotangent,) = [x for node in dots for x in node.outputs if graph.values[x].shape == (4, 8)]
    decisions = Decisions({cotangent: ((), ())}, made={cotangent: ((), ("data",))})
    mesh = abstract_mesh((2,), ("data",))
    assert "layout_constraint" not in str(jax.make_jaxpr(apply(graph, decisions, mesh, "tpu"))(*args))
