"""Programs to time on a GPU (calibrate.py): name → factory of (function, abstract arguments); none of a benchmark's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

F32, BF16 = jnp.float32, jnp.bfloat16


def _like(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def products(rows: int, width: int, hidden: int, dtype: Any, pairs: int = 8) -> tuple[Callable, tuple]:
    """A chain of matrix products (rows, width) x (width, hidden) x (hidden, width) …"""

    def chain(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        for _ in range(pairs):
            x = (x @ up) @ down
        return x

    return chain, (_like(dtype, rows, width), _like(dtype, width, hidden), _like(dtype, hidden, width))


def weight_gradients(rows: int, width: int, hidden: int, dtype: Any, count: int = 4) -> tuple[Callable, tuple]:
    """Products that contract over rows, as a weight's gradient does, in float32."""

    def grads(xs: jax.Array, ys: jax.Array) -> list[jax.Array]:
        return [jnp.einsum("tk,tn->kn", x, y, preferred_element_type=F32) for x, y in zip(xs, ys, strict=True)]

    return grads, ([_like(dtype, rows, width)] * count, [_like(dtype, rows, hidden)] * count)


def attend(batch: int, heads: int, length: int, size: int, dtype: Any) -> tuple[Callable, tuple]:
    """Softmax attention and its gradients."""

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("blhd,bmhd->bhlm", q, k, preferred_element_type=F32) * size**-0.5
        return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores).astype(q.dtype), v).astype(F32).sum()

    return jax.grad(mixed, argnums=(0, 1, 2)), (_like(dtype, batch, length, heads, size),) * 3


def convolve(batch: int, side: int, channels: int, dtype: Any, depth: int = 3) -> tuple[Callable, tuple]:
    """3 x 3 convolutions one after the other, and the gradients of their kernels and of the image."""

    def loss(kernels: list, x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        return jnp.square(x.astype(F32)).sum()

    kernels = [_like(dtype, 3, 3, channels, channels)] * depth
    return jax.grad(loss, argnums=(0, 1)), (kernels, _like(dtype, batch, side, side, channels))


def depthwise(batch: int, length: int, channels: int, taps: int = 4) -> tuple[Callable, tuple]:
    """A causal convolution of each channel by itself, and its gradients."""

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        dims = ("NWC", "WIO", "NWC")
        made = lax.conv_general_dilated(x, kernel, (1,), [(taps - 1, 0)], dimension_numbers=dims, feature_group_count=channels)
        return jnp.square(made.astype(F32)).sum()

    return jax.grad(loss, argnums=(0, 1)), (_like(BF16, taps, 1, channels), _like(BF16, batch, length, channels))


def elementwise(size: int, dtype: Any, count: int = 1) -> tuple[Callable, tuple]:
    """Reads two arrays of ``size`` elements and writes one, ``count`` times."""
    return lambda xs, ys: [x * 0.5 + y for x, y in zip(xs, ys, strict=True)], ([_like(dtype, size)] * count,) * 2


def gelu(rows: int, width: int, dtype: Any) -> tuple[Callable, tuple]:
    return jax.grad(lambda x, y: (jax.nn.gelu(x) * y).astype(F32).sum(), argnums=(0, 1)), (_like(dtype, rows, width),) * 2


def layer_norm(rows: int, width: int, dtype: Any) -> tuple[Callable, tuple]:
    """With the gradients of its input and scale."""

    def loss(scale: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        wide = x.astype(F32)
        wide -= wide.mean(-1, keepdims=True)
        return ((wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(dtype) * y).astype(F32).sum()

    return jax.grad(loss, argnums=(0, 1)), (_like(F32, width), _like(dtype, rows, width), _like(dtype, rows, width))


def cross_entropy(rows: int, classes: int) -> tuple[Callable, tuple]:
    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits.astype(F32)), labels[:, None], axis=-1).mean()

    return jax.value_and_grad(loss), (_like(BF16, rows, classes), _like(jnp.int32, rows))


def adam(size: int) -> tuple[Callable, tuple]:
    def update(p: jax.Array, m: jax.Array, nu: jax.Array, g: jax.Array) -> tuple:
        m, nu = 0.9 * m + 0.1 * g, 0.999 * nu + 0.001 * g * g
        return p - 1e-3 * m / (jnp.sqrt(jnp.abs(nu)) + 1e-8), m, nu

    return update, (_like(F32, size),) * 4


def turned(batch: int, length: int, heads: int, size: int) -> tuple[Callable, tuple]:
    return lambda x: jnp.transpose(x, (0, 2, 1, 3)), (_like(BF16, batch, length, heads, size),)


def summed(rows: int, width: int, axis: int) -> tuple[Callable, tuple]:
    return lambda x: jnp.square(x).sum(axis), (_like(F32, rows, width),)


def embedding(rows: int, width: int, tokens: int) -> tuple[Callable, tuple]:
    """A table's rows looked up, and the gradient of the table."""

    def loss(params: dict, ids: jax.Array, y: jax.Array) -> jax.Array:
        return (params["table"].astype(BF16)[ids] * y).astype(F32).sum()

    return jax.grad(loss, argnums=(0, 2)), ({"table": _like(F32, rows, width)}, _like(jnp.int32, tokens), _like(BF16, tokens, width))


def dropout(size: int) -> tuple[Callable, tuple]:
    def drop(x: jax.Array, seed: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape), x / 0.9, 0)

    return drop, (_like(BF16, size), _like(jnp.int32))


def scanned(length: int, batch: int, width: int) -> tuple[Callable, tuple]:
    """A recurrent layer: small kernels in a loop."""

    def run(w: jax.Array, x: jax.Array, xs: jax.Array) -> tuple:
        return lax.scan(lambda x, now: (jnp.tanh(x @ w + now),) * 2, x, xs)

    return run, (_like(BF16, width, width), _like(BF16, batch, width), _like(BF16, length, batch, width))


def gated(length: int, batch: int, width: int) -> tuple[Callable, tuple]:
    """A gated recurrent layer and its gradients: small kernels in two loops."""

    def loss(w: jax.Array, u: jax.Array, x: jax.Array, xs: jax.Array) -> jax.Array:
        def cell(x: jax.Array, now: jax.Array) -> tuple:
            keep, new = jnp.split(now @ u + x @ w, 2, axis=-1)
            keep = jax.nn.sigmoid(keep)
            x = keep * x + (1 - keep) * jnp.tanh(new)
            return x, x

        return jnp.square(lax.scan(cell, x, xs)[1].astype(F32)).mean()

    matrix = _like(BF16, width, 2 * width)
    return jax.grad(loss, argnums=(0, 1)), (matrix, matrix, _like(BF16, batch, width), _like(BF16, length, batch, width))


def layers(count: int, rows: int, width: int, hidden: int) -> tuple[Callable, tuple]:
    """Narrow residual layers in a scan, and their gradients."""

    def loss(params: tuple, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, ws: tuple) -> tuple:
            scaled = x * lax.rsqrt(jnp.square(x.astype(F32)).mean(-1, keepdims=True) + 1e-6).astype(x.dtype)
            return x + jax.nn.gelu(scaled @ ws[0].astype(BF16)) @ ws[1].astype(BF16), None

        return jnp.square(lax.scan(layer, x, params)[0].astype(F32)).mean()

    return jax.grad(loss), ((_like(F32, count, width, hidden), _like(F32, count, hidden, width)), _like(BF16, rows, width))


def counted(trips: int, size: int) -> tuple[Callable, tuple]:
    """One elementwise kernel in a loop."""
    return lambda x: lax.fori_loop(0, trips, lambda _, x: jnp.sin(x), x), (_like(F32, size),)


def small(count: int, width: int) -> tuple[Callable, tuple]:
    """A chain of small products, unrolled."""

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(count):
            x = jnp.tanh(x @ w)
        return x

    return chain, (_like(BF16, width, width),) * 2


def prefixes(batch: int, length: int, width: int) -> tuple[Callable, tuple]:
    """A linear recurrence by an associative scan."""

    def after(left: tuple, right: tuple) -> tuple:
        return left[0] * right[0], left[1] * right[0] + right[1]

    return lambda a, b: lax.associative_scan(after, (a, b), axis=1)[1], (_like(F32, batch, length, width),) * 2


PROGRAMS: dict[str, Callable[[], tuple[Callable, tuple]]] = {
    **{
        f"products {'x'.join(map(str, shape))} {jnp.dtype(dtype).name}": lambda s=shape, d=dtype: products(*s, d)
        for shape, dtype in (
            ((2048, 2048, 2048), BF16),
            ((8192, 1024, 4096), BF16),
            ((16384, 512, 2048), BF16),
            ((8192, 768, 3072), BF16),
            ((8192, 4096, 4096), BF16),
            ((8192, 8192, 8192), BF16),
            ((65536, 256, 256), BF16),
            ((4096, 1024, 32768), BF16),
            ((8192, 1024, 4096), F32),
            ((4096, 4096, 4096), F32),
        )
    },
    "weight gradients 8192x1024x4096": lambda: weight_gradients(8192, 1024, 4096, BF16),
    "weight gradients 16384x512x2048": lambda: weight_gradients(16384, 512, 2048, BF16),
    "weight gradients 65536x2048x2048": lambda: weight_gradients(65536, 2048, 2048, BF16),
    "attention 8x16x1024x64": lambda: attend(8, 16, 1024, 64, BF16),
    "attention 32x12x512x64": lambda: attend(32, 12, 512, 64, BF16),
    "attention 4x32x2048x128": lambda: attend(4, 32, 2048, 128, BF16),
    "convolution 16x128x128x64 bfloat16": lambda: convolve(16, 128, 64, BF16),
    "convolution 32x32x32x256 bfloat16": lambda: convolve(32, 32, 256, BF16),
    "convolution 64x16x16x512 bfloat16": lambda: convolve(64, 16, 512, BF16),
    "convolution 16x64x64x128 float32": lambda: convolve(16, 64, 128, F32),
    "depthwise 16x1024x1024": lambda: depthwise(16, 1024, 1024),
    "depthwise 4x4096x4096": lambda: depthwise(4, 4096, 4096),
    "elementwise 1G bfloat16": lambda: elementwise(2**30, BF16),
    "elementwise 256M float32": lambda: elementwise(2**28, F32),
    "elementwise 64 x 16M float32": lambda: elementwise(2**24, F32, 64),
    "elementwise 64 x 1M float32": lambda: elementwise(2**20, F32, 64),
    "gelu 8192x16384": lambda: gelu(8192, 16384, BF16),
    "layer norm 16384x1024": lambda: layer_norm(16384, 1024, BF16),
    "layer norm 32768x4096": lambda: layer_norm(32768, 4096, BF16),
    "cross entropy 8192x32000": lambda: cross_entropy(8192, 32000),
    "adam 256M": lambda: adam(2**28),
    "turned 32x1024x32x64": lambda: turned(32, 1024, 32, 64),
    "summed rows 32768x8192": lambda: summed(32768, 8192, 1),
    "summed columns 32768x8192": lambda: summed(32768, 8192, 0),
    "embedding 32000x1024x16384": lambda: embedding(32000, 1024, 16384),
    "dropout 256M": lambda: dropout(2**28),
    "scanned 512x64x1024": lambda: scanned(512, 64, 1024),
    "scanned 256x256x2048": lambda: scanned(256, 256, 2048),
    "scanned gates 256x64x512": lambda: gated(256, 64, 512),
    "scanned gates 128x256x1024": lambda: gated(128, 256, 1024),
    "scanned layers 48x1024x256x1024": lambda: layers(48, 1024, 256, 1024),
    "scanned layers 48x4096x512x2048": lambda: layers(48, 4096, 512, 2048),
    "counted 1000x4096": lambda: counted(1000, 4096),
    "counted 200x64M": lambda: counted(200, 2**26),
    "small 200x256": lambda: small(200, 256),
    "small 100x1024": lambda: small(100, 1024),
    "prefixes 8x512x2048": lambda: prefixes(8, 512, 2048),
}
