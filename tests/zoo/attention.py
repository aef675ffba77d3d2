"""Transformers in plain JAX: layers by lax.scan and by a Python loop, three heads, mixtures of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zoo.common import VOCAB, cross_entropy, floats, next_token_batch, sgd_step, weights


def normalize(x):
    return (x - jnp.mean(x, axis=-1, keepdims=True)) * jax.lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5)


def causal_attention(kernels, x):
    """``kernels["qkv"]``: (width, 3, heads, head width); ``kernels["out"]``: (heads, head width, width)."""
    q, k, v = jnp.einsum("bld,dthk->tblhk", x, kernels["qkv"])
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    attended = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)
    return jnp.einsum("bqhk,hkd->bqd", attended, kernels["out"])


def dense_block(kernels, x):
    x = x + causal_attention(kernels, normalize(x))
    return x + jax.nn.gelu(normalize(x) @ kernels["up"]) @ kernels["down"]


def block_kernels(*lead, width=32, heads=4, seed=0):
    head = width // heads
    return {
        "qkv": weights(*lead, width, 3 * width, seed=seed).reshape(*lead, width, 3, heads, head),
        "out": weights(*lead, width, width, seed=seed + 1).reshape(*lead, heads, head, width),
        "up": weights(*lead, width, 4 * width, seed=seed + 2),
        "down": weights(*lead, 4 * width, width, seed=seed + 3),
    }


def language_model_params(blocks, width=32, vocab=VOCAB):
    return {
        "embedding": floats(vocab, width, seed=50, scale=0.5),
        "position": floats(8, width, seed=51, scale=0.1),
        "blocks": blocks,
        "head": weights(width, vocab, seed=52),
    }


def loop_loss(params, batch):
    tokens, labels = batch
    x = params["embedding"][tokens] + params["position"]
    for kernels in params["blocks"]:
        x = dense_block(kernels, x)
    return cross_entropy(normalize(x) @ params["head"], labels)


def scan_loss(params, batch):
    tokens, labels = batch
    x = params["embedding"][tokens] + params["position"]
    x, _ = jax.lax.scan(lambda x, kernels: (dense_block(kernels, x), None), x, params["blocks"])
    return cross_entropy(normalize(x) @ params["head"], labels)


def checkpointed_scan_loss(params, batch):
    tokens, labels = batch
    x = params["embedding"][tokens] + params["position"]
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, kernels: (dense_block(kernels, x), None)), x, params["blocks"])
    return cross_entropy(normalize(x) @ params["head"], labels)


def transformer_loop():
    blocks = [block_kernels(seed=60 + 10 * i) for i in range(3)]
    return sgd_step(loop_loss), (language_model_params(blocks), next_token_batch())


def transformer_scan():
    return sgd_step(scan_loss), (language_model_params(block_kernels(3)), next_token_batch())


def transformer_scan_checkpoint():
    return sgd_step(checkpointed_scan_loss), (language_model_params(block_kernels(3)), next_token_batch())


def transformer_three_heads():
    """Three heads, width 24, vocabulary 50."""
    params = language_model_params(block_kernels(2, width=24, heads=3), width=24, vocab=50)
    return sgd_step(scan_loss), (params, next_token_batch(vocab=50))


def expert_params(experts=8, width=32, hidden=64):
    return {
        "router": weights(width, experts, seed=70),
        "up": weights(experts, width, hidden, seed=71),
        "down": weights(experts, hidden, width, seed=72),
        "head": weights(width, 8, seed=73),
    }


def experts_one_hot():
    """Top-2 of eight experts, dispatched by einsum with capacity 8 (tokens over capacity are dropped)."""
    capacity, experts = 8, 8

    def mixture(params, x):
        gates = jax.nn.softmax(x @ params["router"])
        top, chosen = jax.lax.top_k(gates, 2)
        assigned = jax.nn.one_hot(chosen, experts)
        order = jnp.cumsum(assigned.sum(1), axis=0) - assigned.sum(1)
        slot = jnp.einsum("tke,te->tk", assigned, order).astype(jnp.int32)
        combine = jnp.einsum("tk,tke,tkc->tec", top, assigned, jax.nn.one_hot(slot, capacity))
        dispatch = (combine > 0).astype(x.dtype)
        gathered = jnp.einsum("tec,td->ecd", dispatch, x)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edh->ech", gathered, params["up"]))
        return jnp.einsum("tec,ech,ehd->td", combine, hidden, params["down"]), gates

    def loss_fn(params, batch):
        mixed, gates = mixture(params, batch[0])
        balance = jnp.sum(jnp.mean(gates, axis=0) ** 2)
        return jnp.mean(((batch[0] + mixed) @ params["head"] - batch[1]) ** 2) + 0.01 * balance

    return sgd_step(loss_fn), (expert_params(), (floats(32, 32, seed=74), floats(32, 8, seed=75)))


def experts_gather():
    """The best of eight experts: each token gathers its own expert's weights."""

    def loss_fn(params, batch):
        x, y = batch
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jnp.argmax(gates, axis=-1)
        hidden = jax.nn.gelu(jnp.einsum("td,tdh->th", x, params["up"][chosen]))
        mixed = jnp.einsum("th,thd->td", hidden, jnp.take(params["down"], chosen, axis=0))
        mixed = mixed * jnp.take_along_axis(gates, chosen[:, None], axis=-1)
        return jnp.mean(((x + mixed) @ params["head"] - y) ** 2)

    return sgd_step(loss_fn), (expert_params(), (floats(32, 32, seed=76), floats(32, 8, seed=77)))


STEPS = {
    factory.__name__: factory
    for factory in (
        transformer_loop,
        transformer_scan,
        transformer_scan_checkpoint,
        transformer_three_heads,
        experts_one_hot,
        experts_gather,
    )
}
