"""Kinds of train steps that no other bench has, told and compiled for one TPU: python scripts/bench_kinds.py [--only …] [--target …].

Volumes, transposed convolutions, recurrent nets, long rows of one example, graphs, Fourier layers, scans, sound, radiance fields, two
softmaxes of one matrix, cross-attention, tables. One device, nothing recomputed. The last led to cost/tables.py, the LSTM to a loop's share
of a stack in cost/onchip.py; off the others nothing was read. Writes results/kinds.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench_tables import compared  # noqa: E402

from jaxauto.aot import close_workers  # noqa: E402
from jaxauto.errors import JaxAutoError  # noqa: E402

S = jax.ShapeDtypeStruct
f32, b16 = jnp.float32, jnp.bfloat16
Made = tuple[Callable, tuple]
KINDS: dict[str, Callable[[], Made]] = {}


def kind(make: Callable[[], Made]) -> Callable[[], Made]:
    KINDS[make.__name__.replace("_", " ")] = make
    return make


def sgd(loss: Callable, params: Any, *batch: Any, opt: Any = None) -> Made:
    if opt is None:

        def step(p, *b):
            value, g = jax.value_and_grad(loss)(p, *b)
            return jax.tree.map(lambda w, d: w - 1e-3 * d.astype(w.dtype), p, g), value

        return step, (params, *batch)
    st = jax.eval_shape(opt.init, params)

    def step(p, s, *b):
        value, g = jax.value_and_grad(loss)(p, *b)
        u, s = opt.update(g, s, p)
        return optax.apply_updates(p, u), s, value

    return step, (params, st, *batch)


def init(m: nn.Module, *x: Any) -> Any:
    return jax.eval_shape(lambda *a: m.init(jax.random.key(0), *a), *x)


@kind
def conv3d() -> Made:
    class M(nn.Module):
        @nn.compact
        def __call__(self, x):
            for c in (32, 64, 64, 128):
                x = nn.relu(nn.Conv(c, (3, 3, 3), dtype=b16)(x))
                if c != 32:
                    x = nn.max_pool(x, (2, 2, 2), (2, 2, 2))
            return nn.Dense(10)(x.mean((1, 2, 3)))

    m = M()
    x = S((16, 32, 64, 64, 3), f32)
    return sgd(
        lambda p, x, y: optax.softmax_cross_entropy_with_integer_labels(m.apply(p, x), y).mean(),
        init(m, x),
        x,
        S((16,), jnp.int32),
        opt=optax.adam(1e-3),
    )


@kind
def gan_generator() -> Made:
    class M(nn.Module):
        @nn.compact
        def __call__(self, z):
            x = nn.Dense(4 * 4 * 512)(z).reshape(-1, 4, 4, 512)
            for c in (512, 256, 128, 64):
                x = nn.relu(nn.GroupNorm(32)(nn.ConvTranspose(c, (4, 4), (2, 2), dtype=b16)(x)))
            return jnp.tanh(nn.ConvTranspose(3, (4, 4), (2, 2))(x))

    m = M()
    z = S((128, 128), f32)
    return sgd(lambda p, z, t: jnp.mean((m.apply(p, z) - t) ** 2), init(m, z), z, S((128, 128, 128, 3), f32), opt=optax.adam(1e-3))


@kind
def lstm() -> Made:
    class M(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.RNN(nn.OptimizedLSTMCell(1024))(x)
            return nn.Dense(256)(x)

    m = M()
    x = S((256, 256, 512), f32)
    return sgd(
        lambda p, x, y: optax.softmax_cross_entropy_with_integer_labels(m.apply(p, x), y).mean(), init(m, x), x, S((256, 256), jnp.int32)
    )


@kind
def gru_bf16() -> Made:
    class M(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.Bidirectional(nn.RNN(nn.GRUCell(512, dtype=b16)), nn.RNN(nn.GRUCell(512, dtype=b16)))(x)
            return nn.Dense(128)(x)

    m = M()
    x = S((128, 200, 256), b16)
    return sgd(
        lambda p, x, y: optax.softmax_cross_entropy_with_integer_labels(m.apply(p, x).astype(f32), y).mean(),
        init(m, x),
        x,
        S((128, 200), jnp.int32),
    )


@kind
def long_context() -> Made:
    D, H, T = 1024, 16, 4096

    def block(p, x):
        h = x * jax.lax.rsqrt(jnp.mean(x.astype(f32) ** 2, -1, keepdims=True) + 1e-6).astype(b16)
        q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[n].astype(b16)) for n in "qkv")
        x = x + jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), p["o"].astype(b16))
        h = x * jax.lax.rsqrt(jnp.mean(x.astype(f32) ** 2, -1, keepdims=True) + 1e-6).astype(b16)
        return x + (jax.nn.silu(h @ p["g"].astype(b16)) * (h @ p["u"].astype(b16))) @ p["d"].astype(b16)

    P = [
        {
            "q": S((D, H, 64), f32),
            "k": S((D, H, 64), f32),
            "v": S((D, H, 64), f32),
            "o": S((H, 64, D), f32),
            "g": S((D, 4 * D), f32),
            "u": S((D, 4 * D), f32),
            "d": S((4 * D, D), f32),
        }
        for _ in range(2)
    ]

    def loss(P, x, y):
        for p in P:
            x = block(p, x)
        return jnp.mean((x.astype(f32) - y) ** 2)

    return sgd(loss, P, S((1, T, D), b16), S((1, T, D), f32))


@kind
def gnn() -> Made:
    n, e, d = 100_000, 800_000, 128

    def loss(P, x, s, t, y):
        for w, b in P:
            m = x[s]
            a = jax.ops.segment_sum(m, t, num_segments=n)
            x = jax.nn.relu((x + a) @ w + b)
        return jnp.mean((x - y) ** 2)

    return sgd(loss, [(S((d, d), f32), S((d,), f32))] * 3, S((n, d), f32), S((e,), jnp.int32), S((e,), jnp.int32), S((n, d), f32))


@kind
def mlp_batchnorm() -> Made:
    class M(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(4):
                x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(2048)(x)))
            return nn.Dense(1000)(x)

    m = M()
    x = S((16384, 1024), f32)
    v = init(m, x)

    def loss(p, st, x, y):
        o, st = m.apply({"params": p, "batch_stats": st}, x, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(o, y).mean(), st

    def step(p, st, x, y):
        (value, st), g = jax.value_and_grad(loss, has_aux=True)(p, st, x, y)
        return jax.tree.map(lambda w, d: w - 1e-3 * d, p, g), st["batch_stats"], value

    return step, (v["params"], v["batch_stats"], x, S((16384,), jnp.int32))


@kind
def fno() -> Made:
    c, n = 32, 256

    def loss(P, x, y):
        for wr, wi, w in P:
            f = jnp.fft.rfft2(x, axes=(1, 2))
            k = wr + 1j * wi
            z = jnp.einsum("bxyi,xyio->bxyo", f[:, :32, :32], k)
            f = jnp.zeros_like(f).at[:, :32, :32].set(z)
            x = jax.nn.gelu(jnp.fft.irfft2(f, axes=(1, 2)) + x @ w)
        return jnp.mean((x - y) ** 2)

    return sgd(loss, [(S((32, 32, c, c), f32), S((32, 32, c, c), f32), S((c, c), f32))] * 3, S((16, n, n, c), f32), S((16, n, n, c), f32))


@kind
def linear_rnn() -> Made:
    D = 1024

    def comb(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    def loss(P, x, y):
        for wi, wa, wo in P:
            u = x @ wi
            a = jax.nn.sigmoid(x @ wa)
            _, h = jax.lax.associative_scan(comb, (a, (1 - a) * u), axis=1)
            x = x + h @ wo
        return jnp.mean((x - y) ** 2)

    return sgd(loss, [(S((D, D), f32),) * 3] * 2, S((8, 1024, D), f32), S((8, 1024, D), f32))


@kind
def wav2vec_frontend() -> Made:
    class M(nn.Module):
        @nn.compact
        def __call__(self, x):
            for k, s in ((10, 5), (3, 2), (3, 2), (3, 2), (2, 2)):
                x = nn.gelu(nn.LayerNorm()(nn.Conv(512, (k,), (s,), dtype=b16, use_bias=False)(x)))
            return x

    m = M()
    x = S((16, 80000, 1), b16)
    return sgd(lambda p, x: jnp.mean(m.apply(p, x).astype(f32) ** 2), init(m, x), x)


@kind
def vgg_f32() -> Made:
    class M(nn.Module):
        @nn.compact
        def __call__(self, x):
            for c in (64, 64, 0, 128, 128, 0, 256, 256, 0, 512, 512):
                x = nn.max_pool(x, (2, 2), (2, 2)) if not c else nn.relu(nn.Conv(c, (3, 3))(x))
            return nn.Dense(1000)(x.mean((1, 2)))

    m = M()
    x = S((64, 128, 128, 3), f32)
    return sgd(
        lambda p, x, y: optax.softmax_cross_entropy_with_integer_labels(m.apply(p, x), y).mean(),
        init(m, x),
        x,
        S((64,), jnp.int32),
        opt=optax.sgd(0.1, momentum=0.9),
    )


@kind
def nerf() -> Made:
    def enc(x, L):
        f = 2.0 ** jnp.arange(L)
        z = (x[..., None, :] * f[:, None]).reshape(x.shape[0], -1)
        return jnp.concatenate([x, jnp.sin(z), jnp.cos(z)], -1)

    class M(nn.Module):
        @nn.compact
        def __call__(self, x, d):
            h = e = enc(x, 10)
            for i in range(8):
                if i == 4:
                    h = jnp.concatenate([h, e], -1)
                h = nn.relu(nn.Dense(256)(h))
            s = nn.softplus(nn.Dense(1)(h))
            h = nn.relu(nn.Dense(128)(jnp.concatenate([nn.Dense(256)(h), enc(d, 4)], -1)))
            return nn.sigmoid(nn.Dense(3)(h)), s

    m = M()
    B, N = 4096, 64

    def loss(p, x, d, c):
        rgb, s = m.apply(p, x, d)
        rgb = rgb.reshape(B, N, 3)
        a = 1 - jnp.exp(-s.reshape(B, N))
        t = jnp.cumprod(1 - a + 1e-10, -1)
        w = a * t
        return jnp.mean(((w[..., None] * rgb).sum(1) - c) ** 2)

    x = S((B * N, 3), f32)
    return sgd(loss, init(m, x, x), x, x, S((B, 3), f32), opt=optax.adam(1e-3))


@kind
def clip_adamw_swiglu() -> Made:
    D = 1024

    def loss(P, x, y):
        for g, u, d, s in P:
            h = (x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * s).astype(b16)
            x = x + ((jax.nn.silu(h @ g.astype(b16)) * (h @ u.astype(b16))) @ d.astype(b16)).astype(f32)
        return jnp.mean((x - y) ** 2)

    return sgd(
        loss,
        [(S((D, 4 * D), f32), S((D, 4 * D), f32), S((4 * D, D), f32), S((D,), f32))] * 4,
        S((16384, D), f32),
        S((16384, D), f32),
        opt=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    )


@kind
def contrastive() -> Made:
    class M(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = nn.gelu(nn.Dense(2048, dtype=b16)(x))
            return nn.Dense(256)(x)

    m = M()
    x = S((8192, 1024), b16)

    def loss(p, a, b):
        u, v = m.apply(p, a), m.apply(p, b)
        u = u / jnp.linalg.norm(u, axis=-1, keepdims=True)
        v = v / jnp.linalg.norm(v, axis=-1, keepdims=True)
        scores = u @ v.T * 10
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores))) - jnp.mean(jnp.diag(jax.nn.log_softmax(scores.T)))

    return sgd(loss, init(m, x), x, x, opt=optax.adamw(1e-3))


@kind
def perceiver() -> Made:
    class B(nn.Module):
        @nn.compact
        def __call__(self, q, kv):
            q = q + nn.MultiHeadDotProductAttention(8, dtype=b16)(nn.LayerNorm()(q), nn.LayerNorm()(kv))
            return q + nn.Dense(512)(nn.gelu(nn.Dense(2048, dtype=b16)(nn.LayerNorm()(q))))

    class M(nn.Module):
        @nn.compact
        def __call__(self, x):
            z = jnp.broadcast_to(self.param("z", nn.initializers.normal(), (256, 512)), (x.shape[0], 256, 512))
            x = nn.Dense(512)(x)
            for _i in range(2):
                z = B()(z, x)
                z = B()(z, z)
            return nn.Dense(1000)(z.mean(1))

    m = M()
    x = S((32, 4096, 64), f32)
    return sgd(
        lambda p, x, y: optax.softmax_cross_entropy_with_integer_labels(m.apply(p, x), y).mean(),
        init(m, x),
        x,
        S((32,), jnp.int32),
        opt=optax.adamw(1e-3),
    )


@kind
def weighted_bce_tabular() -> Made:
    class M(nn.Module):
        @nn.compact
        def __call__(self, c, x):
            e = jnp.concatenate([nn.Embed(100_000, 16, name=f"e{i}")(c[:, i]) for i in range(16)] + [x], -1)
            for w in (1024, 512, 256):
                e = nn.relu(nn.Dense(w)(e))
                e = nn.Dropout(0.1, deterministic=False)(e)
            return nn.Dense(1)(e)[:, 0]

    m = M()
    c, x = S((65536, 16), jnp.int32), S((65536, 32), f32)
    p = jax.eval_shape(lambda c, x: m.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, c, x), c, x)
    return sgd(
        lambda p, c, x, y, k: optax.sigmoid_binary_cross_entropy(m.apply(p, c, x, rngs={"dropout": k}), y).mean(),
        p,
        c,
        x,
        S((65536,), f32),
        jax.eval_shape(lambda: jax.random.key(0)),
        opt=optax.adagrad(0.1),
    )


def measure(target: str, name: str) -> str:
    """A table row."""
    try:
        cells = compared(target, *KINDS[name]())
    except JaxAutoError as problem:
        cells = type(problem).__name__ + " | " * 5
    return f"| {target} | {name} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="v5e:1x1")
    parser.add_argument("--only", default="", help="a regular expression")
    options = parser.parse_args()
    lines = ["# Kinds of train steps", "", f"Made by scripts/bench_kinds.py; jax {jax.__version__}. MiB and milliseconds.", ""]
    lines += ["| target | kind | told: peak | compiled | | told: time | roofline of what was compiled | |", "|---" * 8 + "|"]
    for name in KINDS:
        if re.search(options.only, name):
            lines.append(measure(options.target, name))
            print(lines[-1], flush=True)
            (HERE / "results" / "kinds.md").write_text("\n".join(lines) + "\n")
    close_workers()


if __name__ == "__main__":
    main()
