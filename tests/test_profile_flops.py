"""Flops of the profiler: closed forms of products, attention and convolutions with their gradients; XLA's own counts; loops times trips.

XLA counts a loop's body once, whatever its trips: only programs without loops are compared with it. It also counts conversions of type and
some thirty operations for each random number, where jaxauto counts 0 and 1: programs that are mostly of those are no comparison either.
"""

import functools
import importlib
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from zoo import STEPS

import jaxauto


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul_flops(fn, *args):
    return jaxauto.profile(fn, *args).matmul_flops


def with_gradients(fn, *wrt):
    """``fn`` and its gradients with respect to ``wrt``; the loss is not linear, so the result itself is needed."""
    return jax.value_and_grad(lambda *args: jnp.sum(fn(*args) ** 2), argnums=wrt)


# ------------------------------------------------------------------------------------------------------------ products


def test_matmul_flops_and_bytes():
    prof = jaxauto.profile(jnp.matmul, array(30, 70), array(70, 50))
    assert prof.flops == prof.matmul_flops == 2 * 30 * 70 * 50
    assert prof.bytes_accessed == 4 * (30 * 70 + 70 * 50 + 30 * 50)
    assert prof.argument_bytes == 4 * (30 * 70 + 70 * 50)
    assert prof.output_bytes == 4 * 30 * 50
    assert prof.peak_memory == prof.argument_bytes + prof.output_bytes


@pytest.mark.parametrize(
    ("formula", "sizes"),
    [
        ("mk,kn->mn", {"m": 30, "k": 70, "n": 50}),
        ("mk,k->m", {"m": 30, "k": 70}),
        ("bmk,bkn->bmn", {"b": 6, "m": 10, "k": 20, "n": 30}),
        ("bld,dhk->blhk", {"b": 2, "l": 16, "d": 32, "h": 4, "k": 8}),
        ("bqhgk,bmhk->bhgqm", {"b": 2, "q": 16, "m": 24, "h": 2, "g": 3, "k": 8}),
    ],
)
def test_a_product_and_its_gradients(formula, sizes):
    """2 for each multiply-add, over all indices; each gradient is a product over the same indices."""
    left, right, _ = formula.replace("->", ",").split(",")
    args = [array(*(sizes[i] for i in side)) for side in (left, right)]
    product = functools.partial(jnp.einsum, formula)
    once = 2 * math.prod(sizes.values())
    assert matmul_flops(product, *args) == once
    if formula != "mk,k->m":  # the matrix's gradient is an outer product, which is elementwise
        assert matmul_flops(with_gradients(product, 0, 1), *args) == 3 * once


def test_a_dot_of_vectors():
    assert matmul_flops(jnp.vdot, array(90), array(90)) == 2 * 90


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("gradients", [False, True])
def test_attention(kv_heads, gradients):
    """Two products over (batch, query head, position, position, width), each with two gradients; shared keys change nothing."""
    batch, queries, keys, heads, width = 2, 32, 48, 8, 16

    def attend(q, k, v):
        q = q.reshape(batch, queries, kv_heads, heads // kv_heads, width)
        weights = jax.nn.softmax(jnp.einsum("blhgd,bmhd->bhglm", q, k), axis=-1)
        return jnp.einsum("bhglm,bmhd->blhgd", weights, v)

    args = (array(batch, queries, heads, width), *[array(batch, keys, kv_heads, width)] * 2)
    forward = 2 * 2 * batch * heads * queries * keys * width
    assert matmul_flops(with_gradients(attend, 0, 1, 2) if gradients else attend, *args) == forward * (3 if gradients else 1)


def test_jax_attention():
    shapes = (array(2, 64, 8, 16), array(2, 64, 2, 16), array(2, 64, 2, 16))
    assert matmul_flops(jax.nn.dot_product_attention, *shapes) == 2 * 2 * 2 * 8 * 64 * 64 * 16


def test_softmax_is_five_or_six_for_each_score():
    prof = jaxauto.profile(lambda s: jax.nn.softmax(s, axis=-1), array(8, 64, 64))
    assert 4 * 8 * 64 * 64 <= prof.flops <= 6 * 8 * 64 * 64  # max, subtract, exp, sum, divide, and rows
    assert prof.matmul_flops == 0


# -------------------------------------------------------------------------------------------------------- convolutions


def valid(size, taps, stride=1, dilation=1):
    """Results of a convolution without padding along one side."""
    return (size - dilation * (taps - 1) - 1) // stride + 1


CONVOLUTIONS = {  # name → (kernel, options, results along a side of 20)
    "plain": ((3, 3), {}, valid(20, 3)),
    "pointwise": ((1, 1), {}, 20),
    "strided": ((3, 3), {"window_strides": (2, 2)}, valid(20, 3, stride=2)),
    "dilated": ((3, 3), {"rhs_dilation": (4, 4)}, valid(20, 3, dilation=4)),
    "strided and dilated": ((3, 3), {"window_strides": (3, 3), "rhs_dilation": (2, 2)}, valid(20, 3, stride=3, dilation=2)),
    "patches": ((4, 4), {"window_strides": (4, 4)}, 5),
}


@pytest.mark.parametrize("groups", [1, 2, 8])  # 8: depthwise
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_and_its_gradients(name, groups):
    """2 × results × input features of a group × taps; either gradient pairs the same elements."""
    kernel, options, side = CONVOLUTIONS[name]
    conv = functools.partial(
        lax.conv_general_dilated,
        **{"window_strides": (1, 1), **options},
        padding="VALID",
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x, w = array(4, 20, 20, 8), array(*kernel, 8 // groups, 16)
    forward = 2 * (4 * side * side * 16) * (8 // groups) * math.prod(kernel)
    assert matmul_flops(conv, x, w) == forward
    assert matmul_flops(with_gradients(conv, 1), x, w) == 2 * forward
    assert matmul_flops(with_gradients(conv, 0, 1), x, w) == 3 * forward


@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (5, 1), (3, 2), (4, 4)])
def test_padding_is_not_work(taps, stride):
    """Taps that fall on padding are not counted, as XLA does not."""
    size = 20
    conv = functools.partial(lax.conv_general_dilated, window_strides=(stride,), padding="SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    results = -(-size // stride)
    before = max((results - 1) * stride + taps - size, 0) // 2
    real = sum(0 <= i * stride + t - before < size for i in range(results) for t in range(taps))
    x, w = array(4, size, 8), array(taps, 8, 16)
    assert matmul_flops(conv, x, w) == 2 * 4 * 8 * 16 * real
    assert matmul_flops(with_gradients(conv, 0, 1), x, w) == 3 * 2 * 4 * 8 * 16 * real


@pytest.mark.parametrize(("taps", "stride"), [(2, 2), (3, 2), (4, 2), (3, 3)])
def test_a_transposed_convolution_meets_every_input_with_every_tap(taps, stride):
    conv = functools.partial(lax.conv_transpose, strides=(stride, stride), padding="VALID")
    x, w = array(4, 10, 10, 8), array(taps, taps, 8, 16)
    forward = 2 * (4 * 10 * 10 * 8) * taps * taps * 16
    assert matmul_flops(conv, x, w) == forward
    assert matmul_flops(with_gradients(conv, 0, 1), x, w) == 3 * forward


# --------------------------------------------------------------------------------------------------------- other work


def test_elementwise_equations_count_one_for_each_element_and_reductions_what_they_read():
    assert jaxauto.profile(lambda x: x * 2 + 1, array(100)).flops == 200
    assert jaxauto.profile(lambda x: x.sum(), array(10, 10)).flops == 100
    assert jaxauto.profile(lambda x: x.reshape(100).astype(jnp.bfloat16), array(10, 10)).flops == 0


# ---------------------------------------------------------------------------------------------------------------- loops


def test_loops_count_every_trip():
    def layers(x, w):
        return lax.scan(lambda c, k: (c @ k, None), x, w)[0]

    prof = jaxauto.profile(layers, array(8, 32), array(12, 32, 32))
    assert prof.flops == 12 * 2 * 8 * 32 * 32
    assert [r.times for r in prof.table() if "dot_general" in r.name] == [12]


def test_loops_in_loops_multiply():
    def inner(c, k):
        return lax.scan(lambda d, _: (d @ k, None), c, None, length=5)[0], None

    assert matmul_flops(lambda x, w: lax.scan(inner, x, w)[0], array(8, 32), array(12, 32, 32)) == 5 * 12 * 2 * 8 * 32 * 32


def test_a_loop_counts_as_its_unrolled_form():
    def step(w, x, unroll):
        def loss(w):
            return jnp.sum(lax.scan(lambda c, k: (jnp.tanh(c @ k), None), x, w, unroll=unroll)[0])

        return jax.value_and_grad(loss)(w)

    args = (array(6, 16, 16), array(4, 16))
    rolled, unrolled = (jaxauto.profile(functools.partial(step, unroll=n), *args) for n in (1, 6))
    assert rolled.matmul_flops == unrolled.matmul_flops == 3 * 6 * 2 * 4 * 16 * 16


# --------------------------------------------------------------------------------------------------------------- by XLA

UNROLLED = [
    "mlp_sgd",
    "tied_embeddings",
    "user_checkpoint",
    "custom_gradients",
    "experts_one_hot",
    "graph_segment_sum",
    "transformer_loop",
    "adafactor",
    "linen_transformer_loop",
    "linen_vision_transformer",
    "linen_residual_net",
    "linen_unet",
]


def counted(cost):
    """XLA keeps transcendentals apart."""
    return cost["flops"] + cost.get("transcendentals", 0)


@pytest.mark.parametrize("name", UNROLLED)
def test_flops_are_those_that_xla_counts_in_the_step_as_written(name):
    step, args = STEPS[name]()
    prof = jaxauto.profile(step, *args)
    assert not any(r.name.split("/")[-1].startswith(("scan", "while", "cond")) for r in prof.table())
    assert prof.flops == pytest.approx(counted(jax.jit(step).lower(*args).cost_analysis()), rel=0.02)


@pytest.mark.parametrize("name", ["user_checkpoint", "custom_gradients", "experts_one_hot", "graph_segment_sum"])
def test_flops_are_those_of_the_compiled_step(name):
    step, args = STEPS[name]()
    compiled = jax.jit(step).lower(*args).compile()
    assert jaxauto.profile(step, *args).flops == pytest.approx(counted(compiled.cost_analysis()), rel=0.02)


def test_flops_are_those_of_a_compiled_transformer(monkeypatch):
    """Grouped queries, in float32: XLA:CPU widens bfloat16 and counts the conversions."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "scripts")
    models = importlib.import_module("models")
    config = models.Decoder(2, 256, 8, 2, 1024, 512, batch=4, length=128, scan=False, compute=jnp.float32)
    step, args = models.step_and_args(config)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    assert jaxauto.profile(step, *args).flops == pytest.approx(counted(compiled.cost_analysis()), rel=0.02)


def test_flops_are_those_of_a_compiled_convolutional_step():
    def step(params, x):
        def loss(p):
            h = lax.conv_general_dilated(x, p[0], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            h = lax.conv_general_dilated(jax.nn.relu(h), p[1], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.mean(h**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    args = ((array(5, 5, 8, 32), array(3, 3, 32, 32)), array(4, 32, 32, 8))
    compiled = jax.jit(step).lower(*args).compile()
    assert jaxauto.profile(step, *args).flops == pytest.approx(counted(compiled.cost_analysis()), rel=0.02)


def test_xla_counts_a_loop_once():
    """Why loops are compared with closed forms alone."""
    args = (array(8, 32), array(12, 32, 32))
    cost = jax.jit(lambda x, w: lax.scan(lambda c, k: (c @ k, None), x, w)[0]).lower(*args).compile().cost_analysis()
    assert cost["flops"] == pytest.approx(2 * 8 * 32 * 32, rel=0.02)


def test_literal_operands_are_counted():
    table = np.ones((32, 8), np.float32)
    assert matmul_flops(lambda x: x @ table, array(4, 32)) == 2 * 4 * 32 * 8
