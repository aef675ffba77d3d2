"""Steps in plain JAX that differ in how they are written: state, keys, wrappers, constraints."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zoo.common import floats, integers, mlp, mlp_loss, mlp_params, regression_batch, sgd, sgd_step, weights


def mlp_sgd():
    return sgd_step(mlp_loss), (mlp_params(), regression_batch())


def mlp_bfloat16():
    def loss_fn(params, batch):
        x, y = batch
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return jnp.mean((mlp(half, x.astype(jnp.bfloat16)).astype(jnp.float32) - y) ** 2)

    return sgd_step(loss_fn), (mlp_params(), regression_batch())


@partial(jax.tree_util.register_dataclass, data_fields=["params", "momentum", "count"], meta_fields=["rate"])
@dataclasses.dataclass
class MomentumState:
    params: dict
    momentum: dict
    count: jax.Array
    rate: float


def dataclass_state():
    def step(state, batch):
        loss, grads = jax.value_and_grad(mlp_loss)(state.params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, grads)
        params = jax.tree.map(lambda p, m: p - state.rate * m, state.params, momentum)
        return MomentumState(params, momentum, state.count + 1, state.rate), {"loss": loss}

    params = mlp_params()
    return step, (MomentumState(params, jax.tree.map(jnp.zeros_like, params), jnp.int32(0), 0.05), regression_batch())


def value_and_grad_with_aux():
    def loss_fn(params, batch):
        prediction = mlp(params, batch[0])
        return jnp.mean((prediction - batch[1]) ** 2), {"prediction": prediction, "largest": jnp.max(jnp.abs(prediction))}

    def step(params, batch):
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        return sgd(params, grads), {"loss": loss, "norm": norm, **aux}

    return step, (mlp_params(), regression_batch())


def dropout_step(state, batch):
    """The key is part of the state and is split at every step; written alike for old and new keys."""
    key, now = jax.random.split(state["key"])

    def loss_fn(params):
        x, y = batch
        hidden = jax.nn.relu(x @ params["in"]["kernel"] + params["in"]["bias"])
        hidden = jnp.where(jax.random.bernoulli(now, 0.8, hidden.shape), hidden / 0.8, 0.0)
        return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    return {"params": sgd(state["params"], grads), "key": key}, {"loss": loss, "noise": jax.random.normal(now, (4,))}


def dropout_new_key():
    return dropout_step, ({"params": mlp_params(), "key": jax.random.key(0)}, regression_batch())


def dropout_old_key():
    return dropout_step, ({"params": mlp_params(), "key": jax.random.PRNGKey(0)}, regression_batch())


def tied_embeddings():
    """Vocabulary 50 and context 7 divide by nothing; the embedding is also the output layer."""

    def loss_fn(params, tokens):
        hidden = jnp.tanh(params["embedding"][tokens[:, :-1]] @ params["kernel"])
        logits = jnp.einsum("bld,vd->blv", hidden, params["embedding"])
        labels = jax.nn.one_hot(tokens[:, 1:], 50)
        return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1))

    params = {"embedding": floats(50, 24, seed=6, scale=0.3), "kernel": weights(24, 24, seed=7)}
    return sgd_step(loss_fn), (params, integers(50, 16, 8, seed=8))


def user_checkpoint():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    @partial(jax.checkpoint, policy=policy)
    def block(kernels, x):
        return x + jnp.tanh(x @ kernels["up"]) @ kernels["down"]

    def loss_fn(params, batch):
        x, y = batch
        for kernels in params["blocks"]:
            x = block(kernels, x)
        return jnp.mean((x @ params["head"] - y) ** 2)

    blocks = [{"up": weights(32, 64, seed=10 + i), "down": weights(64, 32, seed=20 + i)} for i in range(3)]
    return sgd_step(loss_fn), ({"blocks": blocks, "head": weights(32, 8, seed=9)}, regression_batch())


def user_sharding_constraint():
    """The user pins one activation on a mesh of the user's own, over the first eight devices."""
    batch_sharded = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("data",)), P("data"))

    def loss_fn(params, batch):
        x, y = batch
        hidden = jax.nn.gelu(x @ params["in"]["kernel"] + params["in"]["bias"])
        hidden = jax.lax.with_sharding_constraint(hidden, batch_sharded)
        return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"] - y) ** 2)

    return sgd_step(loss_fn), (mlp_params(), regression_batch())


def jit_in_jit():
    loss_fn = jax.jit(mlp_loss)

    @jax.jit
    def update(params, grads):
        return sgd(params, grads)

    @jax.jit
    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return update(params, grads), {"loss": loss}

    return step, (mlp_params(), regression_batch())


@jax.custom_vjp
def clipped_identity(x):
    """The identity, whose gradient is clipped to ±0.01."""
    return x


clipped_identity.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@jax.custom_vjp
def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def rms_norm_forward(x, scale):
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x * inverse * scale, (x, inverse, scale)


def rms_norm_backward(residuals, g):
    x, inverse, scale = residuals
    along = jnp.mean(g * scale * x, axis=-1, keepdims=True)
    return inverse * (g * scale - x * inverse**2 * along), jnp.sum(g * x * inverse, axis=0)


rms_norm.defvjp(rms_norm_forward, rms_norm_backward)


def custom_gradients():
    def loss_fn(params, batch):
        x, y = batch
        hidden = clipped_identity(rms_norm(x @ params["in"]["kernel"], params["scale"]))
        return jnp.mean((hidden @ params["out"]["kernel"] - y) ** 2)

    return sgd_step(loss_fn), (mlp_params() | {"scale": jnp.ones(64)}, regression_batch())


def gradient_accumulation():
    """Four micro-batches by lax.scan inside the step."""

    def step(params, batch):
        def accumulate(total, part):
            loss, grads = jax.value_and_grad(mlp_loss)(params, part)
            return jax.tree.map(jnp.add, total, grads), loss

        parts = jax.tree.map(lambda a: a.reshape(4, a.shape[0] // 4, *a.shape[1:]), batch)
        grads, losses = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), parts)
        return sgd(params, grads, 0.025), {"loss": jnp.mean(losses)}

    return step, (mlp_params(), regression_batch(batch=32))


def recurrent_scan():
    """A gated recurrent unit over 12 steps of time."""

    def loss_fn(params, batch):
        x, y = batch

        def cell(hidden, now):
            both = jnp.concatenate([now, hidden], axis=-1)
            gate = jax.nn.sigmoid(both @ params["gate"])
            hidden = (1 - gate) * hidden + gate * jnp.tanh(both @ params["candidate"])
            return hidden, hidden

        last, _ = jax.lax.scan(cell, jnp.zeros((x.shape[0], 32)), x.swapaxes(0, 1))
        return jnp.mean((last @ params["head"] - y) ** 2)

    params = {"gate": weights(48, 32, seed=30), "candidate": weights(48, 32, seed=31), "head": weights(32, 8, seed=32)}
    return sgd_step(loss_fn), (params, (floats(16, 12, 16, seed=33), floats(16, 8, seed=34)))


def odd_sizes():
    """Nothing here divides by two: batch 9, widths 15, 21 and 5."""
    return sgd_step(mlp_loss), (mlp_params(15, 21, 5), (floats(9, 15, seed=35), floats(9, 5, seed=36)))


STEPS = {
    factory.__name__: factory
    for factory in (
        mlp_sgd,
        mlp_bfloat16,
        dataclass_state,
        value_and_grad_with_aux,
        dropout_new_key,
        dropout_old_key,
        tied_embeddings,
        user_checkpoint,
        user_sharding_constraint,
        jit_in_jit,
        custom_gradients,
        gradient_accumulation,
        recurrent_scan,
        odd_sizes,
    )
}
