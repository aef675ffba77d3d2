"""What the benchmark models share (training, parameters, attention), and those that see images: ViT, ResNet, U-Net."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from layouts import checkpointed, put
from models import Decoder

COMPUTE = jnp.bfloat16
IMAGE_LAYOUT = ("NHWC", "HWIO", "NHWC")


# ------------------------------------------------------------------------------------------------------------ training


ADAMW = optax.adamw(3e-4)


def train_step(loss_fn: Callable, optimizer: Any = ADAMW) -> Callable:
    """``step(params, moments, batch) -> (params, moments, {"loss"})`` of ``loss_fn(params, *batch)``."""

    def step(params: Any, moments: Any, batch: tuple) -> tuple:
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, *batch))(params)
        with jax.named_scope("optimizer"):
            updates, moments = optimizer.update(grads, moments, params)
            params = optax.apply_updates(params, updates)
        return params, moments, {"loss": loss}

    return step


def abstract(init: Callable[[], Any], batch: tuple, optimizer: Any = ADAMW) -> tuple:
    """``(params, moments, batch)`` as ShapeDtypeStructs; ``init()`` makes the parameters, ``batch`` is abstract already."""
    params = jax.eval_shape(init)
    return params, jax.eval_shape(optimizer.init, params), batch


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """An abstract array of ids."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """An abstract array of float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Mean over the positions, or over those with a weight, in float32."""
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), labels[..., None], axis=-1)[..., 0]
    if weights is None:
        return jnp.mean(losses)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


# ---------------------------------------------------------------------------------------------------------- parameters


def repeated(make_layer: Callable[[], Any], config: Decoder) -> Any:
    """Parameters of all layers: with ``scan`` one tree of stacked leaves, else a list of trees."""
    if not config.scan:
        return [make_layer() for _ in range(config.layers)]
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (config.layers, *leaf.shape)), make_layer())


def run_layers(block: Callable[[Any, Any], Any], layers: Any, x: Any) -> Any:
    """``x = block(layer, x)`` for each layer, as one ``lax.scan`` or a Python loop: what :func:`repeated` made."""
    block = checkpointed(block)
    if isinstance(layers, list):
        for number, layer in enumerate(layers):
            with jax.named_scope(f"layer{number}"):
                x = block(layer, x)
        return x
    with jax.named_scope("layers"):
        return jax.lax.scan(lambda x, layer: (block(layer, x), None), x, layers)[0]


def weight(*shape: int, fan: int | None = None) -> jax.Array:
    """A float32 parameter; ``fan`` is the length of the sum it is used in, by default its first dimension."""
    return jnp.full(shape, 1 / math.sqrt(fan or shape[0]), jnp.float32)


def norm_params(width: int) -> dict:
    """Scale and bias."""
    return {"scale": jnp.ones((width,)), "bias": jnp.zeros((width,))}


def dense_params(*widths: int) -> list[dict]:
    """Weights and biases of dense layers between the given widths."""
    return [{"weight": weight(n, m), "bias": jnp.zeros((m,))} for n, m in itertools.pairwise(widths)]


def attention_params(config: Decoder) -> dict:
    """Four projections, ``heads`` and ``head_dim`` as two dimensions."""
    c = config
    inward = {name: weight(c.width, c.heads, c.head_dim) for name in ("query", "key", "value")}
    return {**inward, "out": weight(c.heads, c.head_dim, c.width, fan=c.width)}


# ------------------------------------------------------------------------------------------------------- common layers


def normalised(x: jax.Array, axes: Sequence[int], params: dict) -> jax.Array:
    """Mean 0 and variance 1 over ``axes``, then scale and bias; in float32, back in the type of ``x``."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axes, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axes, keepdims=True) + 1e-5)
    return (scaled * params["scale"] + params["bias"]).astype(x.dtype)


def layer_norm(x: jax.Array, params: dict) -> jax.Array:
    """Over the last dimension."""
    return normalised(x, (-1,), params)


def dense(layers: list[dict], x: jax.Array, activation: Callable = jax.nn.gelu) -> jax.Array:
    """Dense layers with an activation between them, none after the last."""
    for number, layer in enumerate(layers):
        x = activation(x) if number else x
        x = x @ layer["weight"].astype(x.dtype) + layer["bias"].astype(x.dtype)
        x = put(x, "batch length hidden") if x.ndim == 3 and number + 1 < len(layers) else x
    return x


def attend(params: dict, x: jax.Array, memory: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Multi-head attention of ``x`` (batch, length, width) to ``memory``; ``mask`` broadcasts to (batch, heads, length, memory length)."""
    query = put(jnp.einsum("bld,dhk->blhk", x, params["query"].astype(x.dtype)), "batch length heads head_dim")
    key, value = (jnp.einsum("bmd,dhk->bmhk", memory, params[name].astype(x.dtype)) for name in ("key", "value"))
    key, value = put(key, "batch memory kv_heads head_dim"), put(value, "batch memory kv_heads head_dim")
    scores = jnp.einsum("blhk,bmhk->bhlm", query, key, preferred_element_type=jnp.float32) / math.sqrt(query.shape[-1])
    scores = scores if mask is None else jnp.where(mask, scores, -1e30)
    mixed = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores, axis=-1).astype(x.dtype), value)
    mixed = put(mixed, "batch length heads head_dim")
    return put(jnp.einsum("blhk,hkd->bld", mixed, params["out"].astype(x.dtype)), "batch sequence width", "attention")


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Over images (batch, height, width, channels) with a kernel (height, width, in, out)."""
    return jax.lax.conv_general_dilated(x, kernel.astype(x.dtype), (stride, stride), "SAME", dimension_numbers=IMAGE_LAYOUT)


def conv_params(size: int, channels: int, features: int) -> jax.Array:
    """A square kernel."""
    return weight(size, size, channels, features, fan=size * size * channels)


# ----------------------------------------------------------------------------------------------------------------- ViT


def vit(config: Decoder, image: int, patch: int, classes: int) -> tuple[Callable, tuple]:
    """Vision transformer (arXiv 2010.11929), pre-norm, class from the mean of the patches."""
    c, patches = config, (image // patch) ** 2

    def layer() -> dict:
        norms = {"norm1": norm_params(c.width), "norm2": norm_params(c.width)}
        return {**norms, "attention": attention_params(c), "mlp": dense_params(c.width, c.hidden, c.width)}

    def init() -> dict:
        return {
            "patch": conv_params(patch, 3, c.width),
            "position": jnp.zeros((patches, c.width)),
            "layers": repeated(layer, c),
            "norm": norm_params(c.width),
            "head": dense_params(c.width, classes),
        }

    def block(layer: dict, x: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            normed = put(layer_norm(x, layer["norm1"]), "batch length features")
            x = put(x + attend(layer["attention"], normed, normed), "batch sequence width")
        with jax.named_scope("mlp"):
            y = dense(layer["mlp"], put(layer_norm(x, layer["norm2"]), "batch length features"))
            return put(x + put(y, "batch sequence width", "mlp"), "batch sequence width")

    def loss_fn(params: dict, images: jax.Array, labels: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            x = conv(images.astype(COMPUTE), params["patch"], patch)
            x = x.reshape(x.shape[0], patches, c.width) + params["position"].astype(COMPUTE)
        x = run_layers(block, params["layers"], x)
        with jax.named_scope("head"):
            return cross_entropy(dense(params["head"], jnp.mean(layer_norm(x, params["norm"]), axis=1)), labels)

    return train_step(loss_fn), abstract(init, (floats(c.batch, image, image, 3), ints(c.batch)))


# -------------------------------------------------------------------------------------------------------------- ResNet


def bottleneck_params(channels: int, inner: int) -> dict:
    """1×1, 3×3 and 1×1 kernels and their norms, and a projection of the shortcut where the channels change."""
    kernels = {"conv1": conv_params(1, channels, inner), "conv2": conv_params(3, inner, inner), "conv3": conv_params(1, inner, 4 * inner)}
    norms = {"norm1": norm_params(inner), "norm2": norm_params(inner), "norm3": norm_params(4 * inner)}
    if channels == 4 * inner:
        return {**kernels, **norms}
    return {**kernels, **norms, "shortcut": conv_params(1, channels, 4 * inner), "shortcut_norm": norm_params(4 * inner)}


def batch_norm(x: jax.Array, params: dict) -> jax.Array:
    """With the statistics of this batch; no running averages."""
    return normalised(x, (0, 1, 2), params)


def bottleneck(params: dict, x: jax.Array, stride: int) -> jax.Array:
    """A residual block; its 3×3 convolution has the stride."""
    y = jax.nn.relu(batch_norm(conv(x, params["conv1"]), params["norm1"]))
    y = jax.nn.relu(batch_norm(conv(y, params["conv2"], stride), params["norm2"]))
    y = batch_norm(conv(y, params["conv3"]), params["norm3"])
    if "shortcut" in params:
        x = batch_norm(conv(x, params["shortcut"], stride), params["shortcut_norm"])
    return jax.nn.relu(x + y)


def resnet(stages: Sequence[int], base: int, image: int, batch: int, classes: int) -> tuple[Callable, tuple]:
    """Bottleneck residual network (arXiv 1512.03385); ``stages`` holds the blocks of each, (3, 4, 6, 3) is ResNet-50."""

    def init() -> dict:
        blocks, channels = [], base
        for stage, count in enumerate(stages):
            inner = base * 2**stage
            blocks.append([bottleneck_params(channels if number == 0 else 4 * inner, inner) for number in range(count)])
            channels = 4 * inner
        return {"stem": conv_params(7, 3, base), "norm": norm_params(base), "stages": blocks, "head": dense_params(channels, classes)}

    def loss_fn(params: dict, images: jax.Array, labels: jax.Array) -> jax.Array:
        with jax.named_scope("stem"):
            x = jax.nn.relu(batch_norm(conv(images.astype(COMPUTE), params["stem"], 2), params["norm"]))
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for stage, blocks in enumerate(params["stages"]):
            for number, block in enumerate(blocks):
                with jax.named_scope(f"stage{stage}/block{number}"):
                    x = bottleneck(block, x, 2 if stage and number == 0 else 1)
        with jax.named_scope("head"):
            return cross_entropy(dense(params["head"], jnp.mean(x, axis=(1, 2))), labels)

    return train_step(loss_fn), abstract(init, (floats(batch, image, image, 3), ints(batch)))


# --------------------------------------------------------------------------------------------------------------- U-Net


def group_norm(x: jax.Array, params: dict) -> jax.Array:
    """Over the image and groups of 8 channels."""
    grouped = x.reshape(*x.shape[:-1], -1, 8)
    return normalised(grouped, (1, 2, 4), jax.tree.map(lambda p: p.reshape(-1, 8), params)).reshape(x.shape)


def double_params(channels: int, features: int) -> dict:
    """Two 3×3 kernels with their norms."""
    norms = {"norm1": norm_params(features), "norm2": norm_params(features)}
    return {"conv1": conv_params(3, channels, features), "conv2": conv_params(3, features, features), **norms}


def double_conv(params: dict, x: jax.Array) -> jax.Array:
    """Two 3×3 convolutions, each normed."""
    x = put(jax.nn.silu(group_norm(conv(x, params["conv1"]), params["norm1"])), "batch rows columns channels")
    return put(jax.nn.silu(group_norm(conv(x, params["conv2"]), params["norm2"])), "batch rows columns channels", "mlp")


def unet(levels: int, base: int, image: int, batch: int) -> tuple[Callable, tuple]:
    """Denoiser with skips (arXiv 1505.04597): ``levels`` halvings, channels doubled each time; mean squared error."""
    widths = [base * 2**level for level in range(levels + 1)]

    def init() -> dict:
        return {
            "down": [double_params(n, m) for n, m in zip([3, *widths[:-2]], widths[:-1])],
            "middle": double_params(widths[-2], widths[-1]),
            "grow": [conv_params(2, m, n) for n, m in itertools.pairwise(widths)],
            "up": [double_params(2 * n, n) for n in widths[:-1]],
            "head": conv_params(1, base, 3),
        }

    def loss_fn(params: dict, noisy: jax.Array, clean: jax.Array) -> jax.Array:
        stage = checkpointed(double_conv)
        x, skips = noisy.astype(COMPUTE), []
        for level, layer in enumerate(params["down"]):
            with jax.named_scope(f"down{level}"):
                skips.append(stage(layer, x))
                x = jax.lax.reduce_window(skips[-1], -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        with jax.named_scope("middle"):
            x = stage(params["middle"], x)
        for level in reversed(range(levels)):
            with jax.named_scope(f"up{level}"):
                x = jax.lax.conv_transpose(x, params["grow"][level].astype(x.dtype), (2, 2), "SAME", dimension_numbers=IMAGE_LAYOUT)
                x = stage(params["up"][level], jnp.concatenate([skips[level], x], axis=-1))
        with jax.named_scope("head"):
            return jnp.mean((conv(x, params["head"]).astype(jnp.float32) - clean) ** 2)

    images = floats(batch, image, image, 3)
    return train_step(loss_fn), abstract(init, (images, images))


LARGE = Decoder(12, 1024, 16, 16, 4096, 0, batch=256, length=0)

VISION: dict[str, dict[str, Callable[[], tuple[Callable, tuple]]]] = {
    "vit": {
        "small": partial(vit, Decoder(2, 128, 4, 4, 512, 0, batch=8, length=0, scan=False), 64, 8, 128),
        "medium": partial(vit, LARGE, 224, 16, 1024),
        "tight": partial(vit, LARGE.with_(batch=768), 224, 16, 1024),
    },
    "resnet": {
        "small": partial(resnet, (1, 2), 16, 32, 8, 16),
        "medium": partial(resnet, (3, 4, 6, 3), 64, 224, 256, 1024),
        "tight": partial(resnet, (3, 4, 6, 3), 64, 224, 4096, 1024),
    },
    "unet": {
        "small": partial(unet, 2, 16, 32, 8),
        "medium": partial(unet, 4, 64, 256, 32),
        "tight": partial(unet, 4, 64, 256, 768),
    },
}
