"""Primitives, one line each: a function that uses it, arguments, the expected spec.

Arrays hold small whole numbers, so that sums, dots and convolutions are exact in any order. Dimensions that may be sharded are multiples of
4; different dimensions have different sizes wherever that can show a mistake.
"""

from __future__ import annotations

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxauto.dilated import undilated
from jaxauto.rules.registry import words

from .harness import Row, distinct, ints, unit

GATHERS = frozenset({"all-gather"})
FLAGS = frozenset({"all-reduce"})


X = ints(4, 8)
I = ints(4, 8, low=1, high=9, dtype=np.int32)  # noqa: E741
U = unit(4, 8)
B = X > 0
KEY = jax.random.key


def _elementwise() -> list[Row]:
    one = "a b -> a b"
    two = "a b, a b -> a b"
    unary_unit = words("""acos asin atan atanh asinh sin cos tan sinh cosh tanh exp exp2 expm1 log log1p logistic sqrt rsqrt cbrt erf erfc
        erf_inv lgamma digamma bessel_i0e bessel_i1e""")
    unary = words("abs neg sign floor ceil round is_finite square")
    rows = [Row(n, getattr(lax, n), (U,), one) for n in unary_unit]
    rows += [Row(n, getattr(lax, n), (X,), one) for n in unary]
    rows += [Row(n, getattr(lax, n), (X, U), two) for n in words("add sub mul div max min atan2 nextafter eq ne lt le gt ge")]
    rows += [Row(n, getattr(lax, n), (U, U), two) for n in words("pow zeta polygamma")]
    # Loops until every element has converged: all devices agree on one flag, each turn.
    rows.append(Row("igamma", lax.igamma, (U, U), two, cpu_adds=FLAGS))
    ints_two = {"rem": lax.rem, "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}
    shifts = words("shift_left shift_right_logical shift_right_arithmetic")
    rows += [Row(n, f, (I, I), two) for n, f in {**ints_two, **{n: getattr(lax, n) for n in shifts}}.items()]
    rows += [Row(n, getattr(lax, n), (I,), one) for n in ("population_count", "clz")]
    rows += [
        Row("not", lax.bitwise_not, (B,), one),
        Row("acosh", lambda x: lax.acosh(x + 2), (U,), one),
        Row("integer_pow", lambda x: x**3, (X,), one),
        Row("mul", lambda x: 2.0 * x, (X,), ", a b -> a b", label="scalar"),
        Row("add_any", jax.grad(lambda x: (jnp.sin(x) * x).sum()), (X,), two),
        # A continued fraction of some 200 terms.
        Row("regularized_incomplete_beta", lax.betainc, (U, U, U), "a b, a b, a b -> a b", cpu_adds=FLAGS, rtol=1e-5),
        Row("select_n", jnp.where, (B, X, U), "a b, a b, a b -> a b"),
        Row("select_n", lambda p, x, y: lax.select(p, x, y), (np.bool_(True), X, U), ", a b, a b -> a b", label="scalar"),
        Row("clamp", lambda x: lax.clamp(-1.0, x, 1.0), (X,), ", a b,  -> a b"),
        Row("clamp", lax.clamp, (X - 1, U, X + 1), "a b, a b, a b -> a b", label="arrays"),
        Row("complex", lax.complex, (X, U), two),
        Row("real", lambda x: lax.real(lax.complex(x, x)), (X,), one),
        Row("imag", lambda x: lax.imag(lax.complex(x, x)), (X,), one),
        Row("conj", lambda x: lax.conj(lax.complex(x, x)), (X,), one),
        Row("convert_element_type", lambda x: x.astype(jnp.bfloat16), (X,), one),
        Row("reduce_precision", lambda x: lax.reduce_precision(x, 8, 7), (U,), one),
        Row("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.int32), (X,), one),
        Row("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.uint8), (X,), "a b -> a b _", label="narrower"),
        Row(
            "bitcast_convert_type",
            lambda x: lax.bitcast_convert_type(x, np.float32),
            (ints(8, 4, dtype=np.uint8),),
            "a _ -> a",
            label="wider",
        ),
        Row("exp", jnp.exp, (np.ones((1, 8), np.float32),), "_ b -> _ b", label="size 1"),
        Row("tanh", jax.grad(lambda x: jax.nn.gelu(x).sum()), (X,), one, label="gelu gradient"),
    ]
    return rows


def _passing() -> list[Row]:
    y = ints(8, 4, 12)
    return [
        Row("copy", jnp.copy, (X,), "a0_0 a0_1 -> a0_0 a0_1"),
        Row("name", lambda x: checkpoint_name(x, "kept"), (X,), "a0_0 a0_1 -> a0_0 a0_1"),
        Row(
            "optimization_barrier",
            lambda x, z: lax.optimization_barrier((x, z)),
            (X, y),
            "a0_0 a0_1, a1_0 a1_1 a1_2 -> a0_0 a0_1, a1_0 a1_1 a1_2",
        ),
    ]


def _shape() -> list[Row]:
    y = ints(8, 4, 12)
    return [
        Row("transpose", lambda x: x.transpose(2, 0, 1), (y,), "a b c -> c a b"),
        Row("broadcast_in_dim", lambda x: x[:, None] * X, (X[:, 0],), "a -> a _", label="new 1"),
        Row("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 12, 8), (0, 2)), (X,), "a c -> a b c"),
        Row("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (12, 8), (0, 1)), (ints(1, 8),), "_ b -> a b", label="stretched"),
        Row("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (12, 8), ()), (np.float32(2),), " -> a b", label="scalar"),
        Row("iota", lambda: lax.broadcasted_iota(np.int32, (4, 8), 1), (), " -> a b"),
        Row("squeeze", lambda x: lax.squeeze(x, (1, 3)), (ints(4, 1, 8, 1),), "a _ c _ -> a c"),
        Row("reshape", lambda x: x.reshape(8, 48), (y,), "a b c -> a (b c)", label="merge"),
        Row("reshape", lambda x: x.reshape(32, 12), (y,), "a b c -> (a b) c", label="merge major"),
        Row("reshape", lambda x: x.reshape(8, 4, 4, 3), (y,), "a b (c d) -> a b c d", label="split"),
        Row("reshape", lambda x: x.reshape(8, 1, 4, 12), (y,), "a b c -> a _ b c", label="ones"),
        Row("reshape", lambda x: x.reshape(-1), (y,), "a b c -> (a b c)", label="flat"),
        Row("reshape", lambda x: x.reshape(8, 12), (ints(12, 8),), "(a b) e -> (a c) d", label="coprime"),
        Row("tile", lambda x: jnp.tile(x, (1, 4)), (X,), "a b -> a (r1 b)"),
    ]


def _cutting() -> list[Row]:
    y = ints(8, 4, 12)
    cache, token = ints(4, 16, 8), ints(4, 1, 8)
    return [
        Row("slice", lambda x: x[:, 1:3], (y,), "a _ c -> a _ c"),
        Row("slice", lambda x: x[:, ::2, :], (y,), "a _ c -> a _ c", label="strided"),
        Row("dynamic_slice", lambda x, i: lax.dynamic_slice_in_dim(x, i, 2, 1), (y, np.int32(1)), "a _ c, , ,  -> a _ c"),
        Row(
            "dynamic_update_slice",
            lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 1),
            (cache, token, np.int32(3)),
            "a b c, a _ c, , ,  -> a b c",
            label="one",
        ),
        Row(
            "dynamic_update_slice",
            lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 1),
            (cache, ints(4, 4, 8), np.int32(3)),
            "a _ c, a _ c, , ,  -> a _ c",
        ),
        Row("pad", lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))), (y,), "a _ c,  -> a _ c"),
        Row("rev", lambda x: x[:, ::-1], (y,), "a _ c -> a _ c"),
        Row("concatenate", lambda x, z: jnp.concatenate([x, z], 1), (y, ints(8, 8, 12)), "a _ c, a _ c -> a _ c"),
        Row("split", lambda x: jnp.split(x, 2, axis=2), (y,), "a b _ -> a b _, a b _"),
        Row("stack", lambda x: jnp.stack([x, x], 1), (X,), "a b, a b -> a _ b"),
        Row("pad", jax.grad(lambda x: (x[:, 1:3] ** 2).sum()), (y,), "a _ c,  -> a _ c", label="gradient of slice"),
    ]


def _reduction() -> list[Row]:
    y = ints(8, 4, 12)
    b = y > 0
    return [
        Row("reduce_sum", lambda x: x.sum(1), (y,), "a b c -> a c"),
        Row("reduce_sum", lambda x: x.sum(), (X,), "a b -> ", label="all"),
        Row("reduce_max", lambda x: x.max((0, 2)), (y,), "a b c -> b"),
        Row("reduce_min", lambda x: x.min(2), (y,), "a b c -> a b"),
        Row("reduce_prod", lambda x: x.prod(0), (y,), "a b c -> b c"),
        Row("reduce_and", lambda x: x.all(0), (b,), "a b c -> b c"),
        Row("reduce_or", lambda x: x.any(2), (b,), "a b c -> a b"),
        Row("reduce_xor", lambda x: lax.reduce_xor_p.bind(x, axes=(1,)), (I,), "a _ -> a"),
        Row("argmax", lambda x: x.argmax(1), (y,), "a _ c -> a c"),
        Row("argmin", lambda x: x.argmin(-1), (y,), "a b _ -> a b"),
        Row(
            "reduce",
            lambda x, z: lax.reduce((x, z), (np.float32(0), np.float32(1)), lambda p, q: (p[0] + q[0], p[1] * q[1] + p[0]), (1,)),
            (y, y),
            "a _ c, a _ c, ,  -> a c, a c",
        ),
        Row("reduce_max", jax.nn.logsumexp, (X,), "a b -> ", label="logsumexp"),
    ]


def _contraction() -> list[Row]:
    ragged = (ints(8, 4), ints(3, 4, 12), np.array([3, 1, 4], np.int32))
    return [
        Row("dot_general", jnp.dot, (X, ints(8, 12)), "m0 k0, k0 n1 -> m0 n1"),
        Row(
            "dot_general",
            functools.partial(jnp.einsum, "bqhd,bkhd->bhqk"),
            (ints(4, 8, 4, 12), ints(4, 16, 4, 12)),
            "b0 m1 b1 k0, b0 n1 b1 k0 -> b0 b1 m1 n1",
            label="attention",
        ),
        Row(
            "dot_general",
            functools.partial(lax.dot_general, dimension_numbers=(((1, 2), (0, 1)), ((), ()))),
            (ints(4, 8, 12), ints(8, 12, 16)),
            "m0 k0 k1, k0 k1 n2 -> m0 n2",
            label="two contracted",
        ),
        Row("dot_general", lambda x, y: jnp.dot(x, y, preferred_element_type=np.int32), (I, I.T), "m0 k0, k0 n1 -> m0 n1", label="int"),
        Row("dot_general", lambda x, y: jnp.vdot(x, y), (X[0], X[1]), "k0, k0 -> ", label="vectors"),
        Row(
            "dot_general",
            jax.grad(lambda w, x: (jnp.einsum("btd,df->btf", x, w) ** 2).sum()),
            (ints(8, 12), ints(4, 16, 8)),
            "k0 k1 m2, k0 k1 n2 -> m2 n2",
            index=1,
            label="weight gradient",
        ),
        Row("ragged_dot_general", lax.ragged_dot, ragged, "m0 k0, _ k0 n1, _ -> m0 n1"),
    ]


def _indexing() -> list[Row]:
    table, tokens = ints(16, 8), ints(4, 12, low=0, high=16, dtype=np.int32)
    logits, labels = ints(4, 12, 16), ints(4, 12, low=0, high=16, dtype=np.int32)
    lookup = "v0 w1, a b _ -> a b w1"
    update = "v0 w1, a b _, a b w1 -> v0 w1"

    def cross_entropy(x, y):
        return jnp.take_along_axis(x, y[..., None], axis=-1)

    rows = [
        Row("gather", lambda t, i, m=m: t.at[i].get(mode=m), (table, tokens), lookup, label=m)
        for m in ("fill", "clip", "promise_in_bounds")
    ]
    rows += [
        Row("gather", lambda t, i: t[i], (table, tokens), lookup, label="getitem"),
        Row("gather", lambda t, i: t[:, i], (table.T, tokens), "w0 v1, a b _ -> w0 a b", label="columns"),
        Row("gather", lambda t, i, j: t[i, j], (table, tokens, tokens % 8), "v0 v1, a b _ -> a b", label="points"),
        Row("gather", cross_entropy, (logits, labels), "a b v2, a b _ _ -> a b _", label="cross entropy"),
        Row("gather", lambda t, i: t[i], (ints(16, 8) > 0, tokens), lookup, label="bool"),
        Row(
            "gather",
            jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, 4, 0)),
            (ints(4, 16, 8), labels[:, 0]),
            "a _ w2, a _ -> a _ w2",
            label="slices",
        ),
        Row("scatter-add", jax.grad(lambda t, i: (t[i] ** 2).sum()), (table, tokens), update, label="embedding gradient"),
        Row(
            "scatter-add",
            jax.grad(lambda x, y: (cross_entropy(x, y) ** 2).sum()),
            (logits, labels),
            "a b v2, a b _ _, a b _ -> a b v2",
            label="cross entropy gradient",
        ),
        Row(
            "scatter-add",
            lambda t, i, u: t.at[:, i].add(u),
            (table.T, tokens[0], ints(8, 12)),
            "w0 v1, a _, w0 a -> w0 v1",
            label="columns",
        ),
        Row("scatter-add", lambda t, i, u: t.at[i].add(u), (table, tokens, ints(4, 12, 8)), update),
    ]
    for how in ("multiply", "min", "max"):
        prim = {"multiply": "scatter-mul"}.get(how, f"scatter-{how}")
        rows.append(Row(prim, lambda t, i, u, how=how: getattr(t.at[i], how)(u), (table, tokens, ints(4, 12, 8)), update))
    rows += [
        Row(
            "scatter",
            lambda t, i, u: t.at[i].set(u),
            (table, np.arange(12, dtype=np.int32)[::-1].copy(), ints(12, 8)),
            "v0 w1, a _, a w1 -> v0 w1",
        ),
    ]
    return rows


def conv(x, w, stride=1, groups=1, padding="SAME", dims=("NHWC", "HWIO", "NHWC")):
    """A two-dimensional convolution."""
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=dims, feature_group_count=groups)


def conv_gradient(argnum: int, **options):
    """The gradient of ``conv`` in its input (0) or kernel (1)."""
    return jax.grad(lambda *xw: (conv(*xw, **options) * 2.0).sum(), argnums=argnum)


def transposed_gradient(x, cotangent, taps: int):
    """The gradient of a transposed convolution of stride 2 in its kernel, as graphs have it: its operands exchanged."""
    layer = functools.partial(lax.conv_transpose, strides=(2, 2), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    kernel = jax.ShapeDtypeStruct((taps, taps, x.shape[-1], cotangent.shape[-1]), x.dtype)
    traced = jax.make_jaxpr(lambda x, d: jax.linear_transpose(functools.partial(layer, x), kernel)(d)[0])(x, cotangent)
    (written,) = (found for eqn in traced.eqns if (found := undilated(eqn)) is not None)
    return jax.extend.core.jaxpr_as_fun(written)(x, cotangent)[0]


def _convolution() -> list[Row]:
    x, w, depthwise, several, grouped = (
        ints(*shape) for shape in ((4, 16, 16, 8), (3, 3, 8, 12), (3, 3, 1, 8), (3, 3, 1, 16), (3, 3, 2, 16))
    )
    forward = "b s0 s1 i, _ _ i o -> b s0 s1 o"
    to_kernel = "i k0 k1 b, i k0 k1 o -> _ _ b o"
    table = [
        ("stride 1", conv, w, forward, 0),
        ("stride 2", functools.partial(conv, stride=2), w, forward, 0),
        ("stride 1 to input", conv_gradient(0), w, "b s0 s1 i, _ _ o i -> b s0 s1 o", 1),
        ("stride 1 to kernel", conv_gradient(1), w, to_kernel, 1),
        ("stride 2 to input", conv_gradient(0, stride=2), w, "b s0 s1 i, _ _ o i -> b s0 s1 o", 1),
        ("stride 2 to kernel", conv_gradient(1, stride=2), w, to_kernel, 1),
        ("depthwise", functools.partial(conv, groups=8), depthwise, "b s0 s1 g, _ _ _ g -> b s0 s1 g", 0),
        ("depthwise to input", conv_gradient(0, groups=8), depthwise, "b s0 s1 g, _ _ g _ -> b s0 s1 g", 1),
        ("depthwise to kernel", conv_gradient(1, groups=8), depthwise, "i k0 k1 g, i k0 k1 g -> _ _ _ g", 1),
        ("two of each", functools.partial(conv, groups=8), several, "b _ _ g, _ _ _ (g o) -> b _ _ (g o)", 0),
        ("two of each to input", conv_gradient(0, groups=8), several, "b _ _ (g i), _ _ g i -> b _ _ g", 1),
        ("two of each to kernel", conv_gradient(1, groups=8), several, "i _ _ g, i _ _ (g o) -> _ _ _ (g o)", 1),
        ("grouped", functools.partial(conv, groups=4), grouped, "b _ _ (g i), _ _ i (g o) -> b _ _ (g o)", 0),
        ("grouped to input", conv_gradient(0, groups=4), grouped, "b _ _ (g i), _ _ (g o) i -> b _ _ (g o)", 1),
        ("grouped to kernel", conv_gradient(1, groups=4), grouped, "i _ _ (g b), i _ _ (g o) -> _ _ b (g o)", 1),
        ("patches", functools.partial(conv, stride=4, padding="VALID"), ints(4, 4, 8, 12), forward, 0),
        ("patches to input", conv_gradient(0, stride=4, padding="VALID"), ints(4, 4, 8, 12), "b s0 s1 i, _ _ o i -> b s0 s1 o", 1),
        ("patches to kernel", conv_gradient(1, stride=4, padding="VALID"), ints(4, 4, 8, 12), "i _ _ b, i _ _ o -> _ _ b o", 1),
        ("pointwise to kernel", conv_gradient(1), ints(1, 1, 8, 12), to_kernel, 1),
        ("whole image", functools.partial(conv, padding="VALID"), ints(16, 16, 8, 12), "b k0 k1 i, k0 k1 i o -> b _ _ o", 0),
        ("pointwise", conv, ints(1, 1, 8, 12), forward, 0),
    ]
    # The CPU compiler widens grouped convolutions before it partitions; the TPU compiler needs nothing.
    widened = {"two of each to input", "grouped", "grouped to input"}
    name = "conv_general_dilated"
    rows = [Row(name, f, (x, k), spec, index, label, GATHERS if label in widened else frozenset()) for label, f, k, spec, index in table]
    channels_first = functools.partial(conv, padding="VALID", dims=("NCHW", "OIHW", "NCHW"))
    rows.append(Row(name, channels_first, (ints(4, 8, 16, 16), ints(12, 8, 3, 3)), "b i _ _, o i _ _ -> b o _ _", label="NCHW valid"))
    for taps, spec in ((3, "i k0 k1 b, i k0 k1 o -> _ _ o b"), (2, "i _ _ b, i _ _ o -> _ _ o b")):
        gradient = functools.partial(transposed_gradient, taps=taps)
        rows.append(Row(name, gradient, (ints(4, 8, 8, 8), ints(4, 16, 16, 12)), spec, label=f"transposed, {taps} taps, to kernel"))
    return rows


def _window() -> list[Row]:
    x, y = distinct(4, 16, 16, 8), ints(4, 16, 16, 8)
    four = "a b c d -> a b c d"
    pool = {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 2, 1), "padding": "SAME"}
    resnet = {"window_dimensions": (1, 3, 3, 1), "window_strides": (1, 2, 2, 1), "padding": "SAME"}
    smooth = {"window_dimensions": (1, 3, 1, 1), "window_strides": (1, 1, 1, 1), "padding": "SAME"}

    def maximum(x, **options):
        return lax.reduce_window(x, -np.inf, lax.max, **options)

    def total(x, **options):
        return lax.reduce_window(x, 0.0, lax.add, **options)

    return [
        Row("reduce_window_max", functools.partial(maximum, **pool), (x,), four, label="pool"),
        Row("reduce_window_max", functools.partial(maximum, **smooth), (x,), four, label="overlap"),
        Row("reduce_window_min", lambda x: lax.reduce_window(x, np.inf, lax.min, **pool), (x,), four),
        Row("reduce_window_sum", functools.partial(total, **pool), (y,), four),
        Row("reduce_window_sum", jax.grad(lambda x: total(x, **smooth).sum()), (y,), "a _ c d -> a _ c d", index=1, label="gradient"),
        Row("select_and_scatter_add", jax.grad(lambda x: (maximum(x, **pool) * 2).sum()), (x,), "a b c d, a b c d -> a b c d"),
        Row("reduce_window_max", functools.partial(maximum, **resnet), (x,), "a b c d -> a b c d", label="ResNet"),
        Row(
            "select_and_scatter_add",
            jax.grad(lambda x: (maximum(x, **resnet) * 2).sum()),
            (x,),
            "a b c d, a b c d -> a b c d",
            label="ResNet",
        ),
        Row(
            "select_and_gather_add",
            lambda x: jax.jvp(functools.partial(maximum, **pool), (x,), (x,)),
            (x,),
            "a b c d, a b c d -> a b c d",
        ),
    ]


def _along() -> list[Row]:
    y = ints(8, 6, 12, low=1, high=3)
    cumulative = words("cumsum cumprod cummax cummin cumlogsumexp")
    rows = [Row(n, functools.partial(getattr(lax, n), axis=1), (y,), "a b c -> a b c") for n in cumulative]
    rows += [
        Row("sort", lambda x: jnp.sort(x, axis=1), (distinct(4, 8, 12),), "a b c -> a b c"),
        Row("sort", lambda x: jnp.argsort(x, axis=0), (distinct(8, 12),), "a b, a b -> a b, a b", label="argsort"),
        # Some CPU compilers call a library for these and gather around the call; the TPU compiler needs nothing.
        Row("top_k", lambda x: lax.top_k(x, 3), (distinct(4, 8, 12),), "a b _ -> a b _, a b _", cpu_adds=GATHERS),
        Row("fft", jnp.fft.rfft, (ints(4, 8, 12),), "a b _ -> a b _", label="real", cpu_adds=GATHERS),
        Row("fft", jnp.fft.fft2, (ints(4, 8, 12),), "a _ _ -> a _ _", cpu_adds=GATHERS),
        Row("approx_top_k", lambda x: lax.approx_max_k(x, 3), (distinct(8, 12),), "a _ -> a _, a _"),
    ]
    return rows


def _random() -> list[Row]:
    keys = functools.partial(jax.random.split, num=4)
    uint = I.astype(np.uint32)
    return [
        Row("random_bits", lambda k: jax.random.bits(k, (4, 8)), (KEY(0),), " -> a b"),
        Row("random_bits", lambda k: jax.random.bits(k, (8,), np.uint8), (KEY(0),), " -> a", label="8 bits"),
        Row("random_bits", jax.vmap(lambda k: jax.random.bits(k, (8,))), (keys(KEY(0)),), "a -> a b", label="batch"),
        Row("random_split", lambda k: jax.random.split(k, 8), (KEY(0),), " -> a"),
        Row("random_fold_in", jax.vmap(jax.random.fold_in), (keys(KEY(0)), np.arange(4, dtype=np.uint32)), "a, a -> a"),
        Row("random_seed", jax.vmap(KEY), (np.arange(4),), "a -> a"),
        Row("random_wrap", jax.random.wrap_key_data, (uint[:, :2],), "a _ -> a"),
        Row("random_unwrap", jax.random.key_data, (keys(KEY(0)),), "a -> a _"),
        Row("random_clone", jax.random.clone, (keys(KEY(0)),), "a -> a"),
    ]


def _linalg() -> list[Row]:
    m = unit(4, 3, 3)
    positive = m @ m.transpose(0, 2, 1) + 4 * np.eye(3, dtype=np.float32)
    return [
        Row("cholesky", jnp.linalg.cholesky, (positive,), "a _ _ -> a _ _"),
        Row(
            "triangular_solve",
            functools.partial(lax.linalg.triangular_solve, left_side=True),
            (positive, unit(4, 3, 2)),
            "a _ _, a _ _ -> a _ _",
        ),
        Row("eigh", jnp.linalg.eigh, (positive,), "a _ _ -> a _ _, a _"),
        Row("lu", jax.scipy.linalg.lu_factor, (positive,), "a _ _ -> a _ _, a _, a _"),
        Row("qr", lambda x: lax.linalg.qr(x, full_matrices=False), (positive,), "a _ _ -> a _ _, a _ _"),
        Row("svd", lambda x: lax.linalg.svd(x, full_matrices=False), (positive,), "a _ _ -> a _, a _ _, a _ _"),
    ]


ROWS: list[Row] = [
    *_elementwise(),
    *_passing(),
    *_shape(),
    *_cutting(),
    *_reduction(),
    *_contraction(),
    *_indexing(),
    *_convolution(),
    *_window(),
    *_along(),
    *_random(),
    *_linalg(),
]
