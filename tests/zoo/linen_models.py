"""flax linen models with a TrainState: transformers (one for images), a residual and a U-shaped convolution net, encoder and decoder."""

from __future__ import annotations

import math
import zlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

from zoo.common import VOCAB, cross_entropy, floats, integers, next_token_batch


class TrainState(train_state.TrainState):
    batch_stats: Any = None


class Block(nn.Module):
    width: int = 32
    heads: int = 4
    causal: bool = True
    scanned: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        mask = nn.make_causal_mask(x[..., 0]) if self.causal else None
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, use_bias=False)(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        x = x + nn.Dense(self.width)(hidden)
        return (x, None) if self.scanned else x


class Transformer(nn.Module):
    layers: int = 2
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 32)(tokens) + self.param("position", nn.initializers.normal(0.1), (tokens.shape[-1], 32))
        if self.scanned:
            stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
            x, _ = stack(scanned=True)(x, None)
        else:
            for _ in range(self.layers):
                x = Block()(x)
        return nn.Dense(VOCAB, use_bias=False)(nn.LayerNorm()(x))


class VisionTransformer(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(32, (4, 4), strides=(4, 4))(images)
        x = x.reshape(x.shape[0], -1, 32)
        first = self.param("first", nn.initializers.normal(0.1), (1, 1, 32))
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, 32)), x], axis=1)
        for _ in range(2):
            x = Block(causal=False)(x)
        return nn.Dense(10)(nn.LayerNorm()(x)[:, 0])


class ResidualNet(nn.Module):
    """Convolutions with batch normalisation and strides; one skip connection is projected."""

    @nn.compact
    def __call__(self, images):
        x = nn.relu(self.normalized(nn.Conv(16, (3, 3), use_bias=False)(images)))
        for channels, stride in ((16, 1), (32, 2)):
            skip = x if stride == 1 else nn.Conv(channels, (1, 1), strides=(stride, stride), use_bias=False)(x)
            x = nn.relu(self.normalized(nn.Conv(channels, (3, 3), strides=(stride, stride), use_bias=False)(x)))
            x = nn.relu(skip + self.normalized(nn.Conv(channels, (3, 3), use_bias=False)(x)))
        return nn.Dense(10)(nn.max_pool(x, (2, 2), strides=(2, 2)).mean(axis=(1, 2)))

    def normalized(self, x):
        return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)


class UNet(nn.Module):
    @nn.compact
    def __call__(self, images):
        first = nn.relu(nn.Conv(16, (3, 3))(images))
        down = nn.relu(nn.Conv(32, (3, 3), strides=(2, 2))(first))
        bottom = nn.relu(nn.GroupNorm(num_groups=4)(nn.Conv(32, (3, 3))(nn.avg_pool(down, (2, 2), strides=(2, 2)))))
        up = jax.image.resize(bottom, down.shape, method="nearest")
        up = nn.relu(nn.Conv(32, (3, 3))(jnp.concatenate([up, down], axis=-1)))
        up = nn.ConvTranspose(16, (2, 2), strides=(2, 2))(up)
        return nn.Conv(images.shape[-1], (1, 1))(jnp.concatenate([up, first], axis=-1))


class EncoderDecoder(nn.Module):
    """Cross attention from a causal decoder to an encoder over padded input, with dropout."""

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(VOCAB, 32)
        padding = (source > 3)[:, None, None, :]
        memory = embed(source)
        memory = memory + nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)(nn.LayerNorm()(memory), mask=padding)
        memory = memory + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(memory))))
        x = Block()(embed(target))
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)(nn.LayerNorm()(x), memory, mask=padding)
        return embed.attend(nn.Dropout(0.1, deterministic=False)(nn.LayerNorm()(x)))


def optimizer():
    """With an epsilon at which Adam does not divide the rounding noise of small gradients by itself."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, eps=1e-2))


def fill(path, leaf):
    """Initial values by name, without compiling the model's own initialisers."""
    name = path[-1].key
    if name in ("bias", "mean"):
        return jnp.asarray(np.zeros(leaf.shape), leaf.dtype)
    if name in ("scale", "var"):
        return jnp.asarray(np.ones(leaf.shape), leaf.dtype)
    fan_in = {"embedding": 4, "position": 64, "first": 64}.get(name, math.prod(leaf.shape[-4:-1]) if leaf.ndim > 3 else leaf.shape[-2])
    return floats(*leaf.shape, seed=zlib.crc32(jax.tree_util.keystr(path).encode()), scale=fan_in**-0.5)


def create_state(model, *inputs):
    variables = jax.eval_shape(model.init, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, *inputs)
    variables = jax.tree_util.tree_map_with_path(fill, variables)
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optimizer(), batch_stats=variables.get("batch_stats"))


def supervised(model, inputs, labels, loss_of):
    """``step(state, batch)`` with a TrainState."""

    def step(state, batch):
        def loss_fn(params):
            return loss_of(state.apply_fn({"params": params}, batch[0]), batch[1])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step, (create_state(model, inputs), (inputs, labels))


def linen_transformer_loop():
    return supervised(Transformer(), *next_token_batch(), cross_entropy)


def linen_transformer_scan():
    return supervised(Transformer(scanned=True, layers=3), *next_token_batch(), cross_entropy)


def linen_vision_transformer():
    return supervised(VisionTransformer(), floats(16, 16, 16, 3, seed=100), integers(10, 16, seed=101), cross_entropy)


def linen_unet():
    images = floats(8, 16, 16, 4, seed=102)
    return supervised(UNet(), images, jnp.tanh(images[..., ::-1]), lambda a, b: jnp.mean((a - b) ** 2))


def linen_residual_net():
    """Running statistics of batch normalisation are part of the state."""

    def step(state, batch):
        def loss_fn(params):
            logits, updated = state.apply_fn({"params": params, "batch_stats": state.batch_stats}, batch[0], mutable=["batch_stats"])
            return cross_entropy(logits, batch[1]), updated["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss}

    images = floats(16, 8, 8, 4, seed=103)
    return step, (create_state(ResidualNet(), images), (images, integers(10, 16, seed=104)))


def linen_encoder_decoder():
    """The dropout key is an argument; the step folds its own counter into it."""

    def step(state, batch, key):
        source, target, labels = batch

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, source, target, rngs={"dropout": jax.random.fold_in(key, state.step)})
            return cross_entropy(logits, labels)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    source = integers(VOCAB, 16, 12, seed=105).at[:, 0].set(5)
    target, labels = next_token_batch()
    return step, (create_state(EncoderDecoder(), source, target), (source, target, labels), jax.random.key(2))


STEPS = {
    factory.__name__: factory
    for factory in (
        linen_transformer_loop,
        linen_transformer_scan,
        linen_vision_transformer,
        linen_unet,
        linen_residual_net,
        linen_encoder_decoder,
    )
}
