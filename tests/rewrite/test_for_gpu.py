"""What is written in another way for XLA:GPU has the same numbers, on one device and under shardings."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxauto.core import Decisions, Trips
from jaxauto.graph import FillEqn, build, walk
from jaxauto.rewrite import apply as applying
from jaxauto.rewrite import for_gpu
from jaxauto.rewrite.apply import apply
from jaxauto.rewrite.evaluate import Pins, evaluator
from jaxauto.rewrite.recompute import recompute
from jaxauto.trace import trace

NUMBERS = ("NHWC", "HWIO", "NHWC")


class ForGpu(Pins):
    def __init__(self, graph):
        self.values = graph.values

    def instead(self, node, operands):
        return for_gpu.instead(node, operands, self.values, lambda _, array: array)

    def begin(self, node, operands):
        return for_gpu.begin(node, operands, self.values)


class OnGpu(applying._Constraints):
    """As for a GPU, on emulated devices."""

    def __init__(self, decisions, mesh, rewritten, platform):
        super().__init__(decisions, mesh, rewritten, platform)
        self.on_cpu, self.on_gpu = False, True


def both_ways(fun, *args):
    """The graph, and the jaxpr of it as written and for a GPU, having compared the numbers bit for bit."""
    graph = build(trace(fun, args).jaxpr)
    arrays = jax.tree.leaves(args)
    run = evaluator(graph, ForGpu(graph))
    for x, y in zip(jax.jit(run)(*arrays), jax.jit(evaluator(graph))(*arrays), strict=True):
        np.testing.assert_array_equal(x, y)
    return str(jax.make_jaxpr(evaluator(graph))(*arrays)), str(jax.make_jaxpr(run)(*arrays))


def normal(*shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


# ------------------------------------------------------------------------------------------------------- convolutions


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((2, 1), (0, 3))])
@pytest.mark.parametrize("window", [(2, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("numbers", [NUMBERS, ("NCHW", "OIHW", "NCHW")])
def test_a_transposed_convolution_is_the_gradient_of_a_strided_one(numbers, window, padding):
    x, w = normal(2, 5, 6, 4), normal(*window, 4, 3)
    x, w = (x, w) if numbers is NUMBERS else (x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1))
    layer = functools.partial(lax.conv_transpose, strides=(2, 2), padding=padding, dimension_numbers=numbers)
    before, after = both_ways(layer, x, w)
    assert " rev" not in before and after.count(" rev[") == 2 and after.count("optimization_barrier") == 1


def test_the_gradient_of_a_strided_one_is_seen_as_it_is():
    layer = functools.partial(lax.conv_general_dilated, window_strides=(2, 2), padding="SAME", dimension_numbers=NUMBERS)
    gradient = lambda x, w: jax.vjp(layer, x, w)[1](jnp.ones((2, 3, 3, 3)))[0]  # noqa: E731
    before, after = both_ways(gradient, normal(2, 5, 6, 4), normal(3, 3, 4, 3))
    assert before == after


@pytest.mark.parametrize(("padding", "padded", "anew"), [("SAME", False, False), (((4, 0),), False, True), ("VALID", True, True)])
def test_a_dilated_convolution_that_is_padded_on_one_side_reads_a_padded_input(padding, padded, anew):
    def layer(x, w):
        x = jnp.pad(x, ((0, 0), (4, 0), (0, 0))) if padded else x
        return lax.conv_general_dilated(x, w, (1,), padding, rhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC"))

    before, after = both_ways(layer, normal(2, 9, 4), normal(3, 4, 5))
    assert "optimization_barrier" not in before and ("optimization_barrier" in after) is anew


# -------------------------------------------------------------------------------------------------------------- zeros

INTO_ZEROS = {
    "gather": lambda x, i: jnp.sin(x[i]),
    "resize": lambda x, i: jnp.sin(jax.image.resize(x, (16, 8), "nearest")) * i[0],
    "slice": lambda x, i: jnp.sin(lax.dynamic_slice_in_dim(x, i[0], 3)),
}


@pytest.mark.parametrize("case", INTO_ZEROS)
def test_zeros_wait_for_what_is_scattered_into_them(case):
    gradient = jax.grad(lambda x, i: jnp.sum(INTO_ZEROS[case](x, i)))
    before, after = both_ways(gradient, normal(8, 4), jnp.array([1, 5, 1]))
    assert "optimization_barrier" not in before and "optimization_barrier" in after


def test_what_is_no_zeros_waits_for_nothing():
    before, after = both_ways(lambda x, i, y: x.at[i].add(y), normal(8, 4), jnp.array([1, 5]), normal(2, 4))
    assert before == after


@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P()])
def test_scattered_under_shardings(monkeypatch, spec):
    monkeypatch.setattr(applying, "_Constraints", OnGpu)
    gradient = jax.grad(lambda x, i: jnp.sum(jnp.sin(x[i])))
    x, i = normal(16, 8), jnp.array([1, 5, 1, 15])
    graph = build(trace(gradient, (x, i)).jaxpr)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = tuple(() if axis is None else (axis,) for axis in (*spec, *[None] * (2 - len(spec))))
    (scatter,) = (n for n in graph.nodes if n.prim == "scatter-add")
    zeros = scatter.inputs[0]
    assert isinstance(zeros, int)
    run = apply(graph, Decisions({scatter.outputs[0]: cut, zeros: cut}, {}), mesh)
    (got,) = jax.jit(run, in_shardings=(NamedSharding(mesh, spec), NamedSharding(mesh, P())))(x, i)
    np.testing.assert_allclose(got, jax.jit(gradient)(x, i), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("split", [True, False])
def test_the_gradient_of_a_strided_convolution_is_seen_through_a_constraint(monkeypatch, split):
    """Its kernel is gathered once reversed, and XLA:GPU looks for the reversal right before the convolution."""
    monkeypatch.setattr(applying, "_Constraints", OnGpu)
    strided = functools.partial(lax.conv_general_dilated, window_strides=(2, 2), padding="SAME", dimension_numbers=NUMBERS)
    gradient = jax.grad(lambda x, w: jnp.sum(jnp.sin(strided(x, w))))
    x, w = normal(8, 8, 8, 4), normal(3, 3, 4, 16)
    graph = build(trace(gradient, (x, w)).jaxpr)
    (back,) = (n for n in graph.nodes if n.prim == "conv_general_dilated" and n.backward)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = ((), (), (), ())
    run = apply(graph, Decisions({back.inputs[1]: whole} if split else {}, {}), mesh)
    after = str(jax.make_jaxpr(run)(x, w))
    assert after.count("= rev[") == (3 if split else 1)
    given = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, None, None, "data"))
    (got,) = jax.jit(run, in_shardings=given)(x, w)
    np.testing.assert_allclose(got, jax.jit(gradient)(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((0, 0), (2, 1), (1, 1), (0, 0))])
@pytest.mark.parametrize(("start", "largest"), [(-jnp.inf, lax.max), (jnp.inf, lax.min)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_of_pooling_into_zeros_that_are_made_late(dtype, start, largest, padding):
    x = jnp.round(3 * jnp.sin(jnp.arange(2 * 7 * 7 * 3.0))).reshape(2, 7, 7, 3).astype(dtype)  # with ties

    def gradient(x, y):
        pool = lambda x: lax.reduce_window(x, start, largest, (1, 3, 3, 1), (1, 2, 2, 1), padding)  # noqa: E731
        return jax.grad(lambda x: jnp.sum(jnp.cos(pool(x).astype(jnp.float32)) * y))(x)

    _, after = both_ways(gradient, x, jnp.float32(2.0))
    assert "select_and_scatter[" in after


@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P(None, None, None, "data"), P()])
def test_zeros_of_a_pool_that_are_made_late_under_shardings(monkeypatch, spec):
    monkeypatch.setattr(applying, "_Constraints", OnGpu)

    def pooled(x, w):
        pool = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")  # noqa: E731
        return jax.grad(lambda x: jnp.sum(jnp.sin(pool(x) * w)))(x)

    x, w = jax.random.normal(jax.random.key(0), (8, 16, 8, 8)), jnp.linspace(0.5, 2.0, 8)
    graph = build(trace(pooled, (x, w)).jaxpr)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = tuple(() if axis is None else (axis,) for axis in (*spec, *[None] * (4 - len(spec))))
    (scatter,) = (n for n in graph.nodes if n.prim == "select_and_scatter_add")
    run = apply(graph, Decisions({scatter.outputs[0]: cut}, {}), mesh)
    assert "select_and_scatter[" in str(jax.make_jaxpr(run)(x, w))
    (got,) = jax.jit(run, in_shardings=(NamedSharding(mesh, spec), NamedSharding(mesh, P())))(x, w)
    np.testing.assert_allclose(got, jax.jit(pooled)(x, w), rtol=1e-6, atol=1e-6)


# -------------------------------------------------------------------------------------------------------------- loops


def recurrent(*, reverse=False, carried=False):
    """The gradients of a recurrence; ``carried``: its last state is used too, so the backward pass begins with no constant."""

    def loss(w, xs):
        state, ys = lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, jnp.zeros((2, 4)), xs, reverse=reverse)
        return jnp.sum(jnp.sin(ys)) + (jnp.sum(jnp.cos(state)) if carried else 0.0)

    return jax.grad(loss, argnums=(0, 1)), (0.3 * normal(4, 4), normal(12, 2, 4))


@pytest.mark.parametrize("reverse", [False, True])
def test_stacks_of_a_backward_scan_that_begins_with_zeros_wait_for_its_cotangents(reverse):
    gradient, args = recurrent(reverse=reverse)
    before, after = both_ways(gradient, *args)
    assert "optimization_barrier" not in before and after.count("optimization_barrier") == 1
    assert "dynamic_update_slice" in after


def test_one_that_begins_with_a_cotangent_waits_for_it_anyhow():
    gradient, args = recurrent(carried=True)
    before, after = both_ways(gradient, *args)
    assert before == after


@pytest.mark.parametrize("parts", [(Trips(9), Trips(3, frozenset())), (Trips(8, inside=(Trips(4, frozenset()),)), Trips(4))])
def test_a_stack_that_parts_of_a_backward_scan_write_waits_too(parts):
    gradient, args = recurrent()
    graph = recompute(build(trace(gradient, args).jaxpr), {}, splits={0: parts}).graph
    filled = [n for n in graph.nodes if isinstance(n.eqn, FillEqn) and n.backward]
    late = [n for n in walk(graph) if for_gpu.fills_late(n, graph.values)]
    assert filled and any({*n.inputs} & {*filled[0].outputs} for n in late)
    arrays = jax.tree.leaves(args)
    for x, y in zip(jax.jit(evaluator(graph, ForGpu(graph)))(*arrays), jax.jit(gradient)(*args), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
