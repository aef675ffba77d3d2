"""Data, losses and small layers that several steps share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

BATCH, LENGTH, VOCAB, WIDTH = 16, 8, 64, 32


def floats(*shape, seed=0, scale=1.0):
    """Made by numpy: nothing is compiled."""
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def weights(*shape, seed=0):
    """Normal with variance 1 / fan-in, where fan-in is the last dimension but one."""
    return floats(*shape, seed=seed, scale=shape[-2] ** -0.5)


def integers(bound, *shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, bound, shape), jnp.int32)


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), labels[..., None], axis=-1))


def next_token_batch(vocab=VOCAB, batch=BATCH, length=LENGTH, seed=1):
    text = integers(vocab, batch, length + 1, seed=seed)
    return text[:, :-1], text[:, 1:]


def regression_batch(inputs=WIDTH, outputs=8, batch=BATCH):
    return floats(batch, inputs, seed=2), floats(batch, outputs, seed=3)


def mlp_params(inputs=WIDTH, hidden=64, outputs=8):
    return {
        "in": {"kernel": weights(inputs, hidden, seed=4), "bias": jnp.zeros(hidden)},
        "out": {"kernel": weights(hidden, outputs, seed=5), "bias": jnp.zeros(outputs)},
    }


def mlp(params, x):
    x = jax.nn.gelu(x @ params["in"]["kernel"] + params["in"]["bias"])
    return x @ params["out"]["kernel"] + params["out"]["bias"]


def mlp_loss(params, batch):
    x, y = batch
    return jnp.mean((mlp(params, x) - y) ** 2)


def sgd(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def sgd_step(loss_fn, rate=0.1):
    """The plainest step: ``step(params, batch)``."""

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return sgd(params, grads, rate), {"loss": loss}

    return step
