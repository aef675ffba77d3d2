"""A decoder to measure with: plain JAX, GQA, rotary positions, RMSNorm, SwiGLU, AdamW; layers scanned or unrolled. Arguments are abstract.

``LLAMA`` has the published shapes (arXiv 2307.09288 table 1, 2407.21783 table 3); ``GPT`` smaller ones for compilers on a laptop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from layouts import checkpointed, put


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Sizes of a model and of its batch. ``scan``: layers are one ``lax.scan`` over stacked parameters, else a Python loop."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    batch: int = 8
    length: int = 1024
    scan: bool = True
    remat: bool = False  # jax.checkpoint around each layer
    chunk: int = 0  # keys that attention takes at a time; 0: all
    compute: Any = jnp.bfloat16
    stored: Any = jnp.float32

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    def with_(self, **changes: Any) -> Decoder:
        """The same with other sizes."""
        return dataclasses.replace(self, **changes)


LLAMA = {
    "7b": Decoder(32, 4096, 32, 32, 11008, 32000),
    "8b": Decoder(32, 4096, 32, 8, 14336, 128256),
    "70b": Decoder(80, 8192, 64, 8, 28672, 128256),
    "405b": Decoder(126, 16384, 128, 8, 53248, 128256),
}
GPT = {
    "tiny": Decoder(2, 128, 4, 4, 512, 1024, batch=8, length=128),
    "small": Decoder(4, 256, 8, 4, 1024, 4096, batch=8, length=256),
    "medium": Decoder(8, 512, 8, 8, 2048, 8192, batch=8, length=512),
}


# --------------------------------------------------------------------------------------------------------------- model


def init_params(config: Decoder) -> dict:
    """Parameters; call it under ``jax.eval_shape`` for their shapes."""
    c = config
    shapes = {
        "attention_norm": (c.width,),
        "query": (c.width, c.heads, c.head_dim),
        "key": (c.width, c.kv_heads, c.head_dim),
        "value": (c.width, c.kv_heads, c.head_dim),
        "out": (c.heads, c.head_dim, c.width),
        "mlp_norm": (c.width,),
        "gate": (c.width, c.hidden),
        "up": (c.width, c.hidden),
        "down": (c.hidden, c.width),
    }

    def layer(stack: tuple[int, ...]) -> dict:
        return {name: jnp.full((*stack, *shape), 1 / math.sqrt(shape[0]), c.stored) for name, shape in shapes.items()}

    return {
        "embed": jnp.full((c.vocab, c.width), 0.02, c.stored),
        "layers": layer((c.layers,)) if c.scan else [layer(()) for _ in range(c.layers)],
        "norm": jnp.ones((c.width,), c.stored),
        "head": jnp.full((c.width, c.vocab), 1 / math.sqrt(c.width), c.stored),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """In float32, back in the type of ``x``."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def rotary(x: jax.Array) -> jax.Array:
    """Rotates halves of the head dimension by the position; ``x`` is (batch, length, heads, head_dim)."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(config: Decoder, layer: dict, x: jax.Array) -> jax.Array:
    """Causal, grouped queries; scores in float32."""
    c = config
    query, key, value = (jnp.einsum("bld,dhk->blhk", x, layer[name].astype(x.dtype)) for name in ("query", "key", "value"))
    query = put(rotary(query), "batch length heads head_dim")
    key, value = put(rotary(key), "batch memory kv_heads head_dim"), put(value, "batch memory kv_heads head_dim")
    query = query.reshape(*query.shape[:2], c.kv_heads, c.heads // c.kv_heads, c.head_dim)
    if c.chunk:
        mixed = blockwise(query, key, value, c.chunk)
    else:
        scores = jnp.einsum("blhgk,bmhk->bhglm", query, key, preferred_element_type=jnp.float32) / math.sqrt(c.head_dim)
        scores = jnp.where(jnp.tril(jnp.ones((c.length, c.length), bool)), scores, -1e30)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bhglm,bmhk->blhgk", weights, value)
    mixed = put(mixed.reshape(*mixed.shape[:2], c.heads, c.head_dim), "batch length heads head_dim")
    return put(jnp.einsum("blhk,hkd->bld", mixed, layer["out"].astype(x.dtype)), "batch sequence width", "attention")


def blockwise(query: jax.Array, key: jax.Array, value: jax.Array, chunk: int) -> jax.Array:
    """Causal attention that never holds all scores (arXiv 2112.05682): a scan over chunks of keys with a running softmax.

    Args:
        query: (batch, length, kv heads, group, head_dim). key, value: (batch, length, kv heads, head_dim).
    """
    scale, rows = 1 / math.sqrt(query.shape[-1]), jnp.arange(query.shape[1])

    @jax.checkpoint
    def body(carry: tuple, now: tuple) -> tuple:
        total, mixed, most = carry
        start, key, value = now
        scores = jnp.einsum("blhgk,bmhk->bhglm", query, key, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(rows[:, None] >= start + jnp.arange(chunk), scores, -1e30)
        higher = jnp.maximum(most, jnp.max(scores, axis=-1))
        weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(most - higher)
        new = jnp.einsum("bhglm,bmhk->bhglk", weights.astype(value.dtype), value).astype(jnp.float32)
        return (total * shrink + jnp.sum(weights, axis=-1), mixed * shrink[..., None] + new, higher), None

    def chunks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    shape = (query.shape[0], *query.shape[2:4], query.shape[1])
    empty = (jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, query.shape[-1]), jnp.float32), jnp.full(shape, -1e30, jnp.float32))
    starts = jnp.arange(0, key.shape[1], chunk)
    (total, mixed, _), _ = jax.lax.scan(body, empty, (starts, chunks(key), chunks(value)))
    return jnp.transpose(mixed / total[..., None], (0, 3, 1, 2, 4)).astype(query.dtype)


def mlp(layer: dict, x: jax.Array) -> jax.Array:
    """SwiGLU."""
    gate, up = (put(x @ layer[name].astype(x.dtype), "batch length hidden") for name in ("gate", "up"))
    return put((jax.nn.silu(gate) * up) @ layer["down"].astype(x.dtype), "batch sequence width", "mlp")


def block(config: Decoder, layer: dict, x: jax.Array) -> jax.Array:
    """One layer."""
    with jax.named_scope("attention"):
        x = put(x + attention(config, layer, put(rms_norm(x, layer["attention_norm"]), "batch length features")), "batch sequence width")
    with jax.named_scope("mlp"):
        return put(x + mlp(layer, put(rms_norm(x, layer["mlp_norm"]), "batch length features")), "batch sequence width")


def loss_fn(config: Decoder, params: dict, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, in float32."""
    with jax.named_scope("embed"):
        x = put(params["embed"].astype(config.compute)[tokens], "batch sequence width")
    body = checkpointed(lambda layer, x: block(config, layer, x))
    body = jax.checkpoint(body) if config.remat else body
    if config.scan:
        with jax.named_scope("layers"):
            x, _ = jax.lax.scan(lambda x, layer: (body(layer, x), None), x, params["layers"])
    else:
        for number, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer{number}"):
                x = body(layer, x)
    with jax.named_scope("head"):
        x = put(rms_norm(x, params["norm"]), "batch length features")
        logits = put((x @ params["head"].astype(config.compute)).astype(jnp.float32), "batch length vocab")
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
        return -jnp.mean(picked)


def adamw_step(config: Decoder) -> Callable:
    """``step(params, moments, batch) -> (params, moments, {"loss"})``."""
    optimizer = optax.adamw(3e-4)

    def step(params: dict, moments: Any, batch: tuple) -> tuple:
        loss, grads = jax.value_and_grad(lambda p: loss_fn(config, p, *batch))(params)
        with jax.named_scope("optimizer"):
            updates, moments = optimizer.update(grads, moments, params)
            params = optax.apply_updates(params, updates)
        return params, moments, {"loss": loss}

    return step


def abstract_args(config: Decoder) -> tuple:
    """The step's arguments as ShapeDtypeStructs."""
    params = jax.eval_shape(lambda: init_params(config))
    moments = jax.eval_shape(optax.adamw(3e-4).init, params)
    tokens = jax.ShapeDtypeStruct((config.batch, config.length), jnp.int32)
    return params, moments, (tokens, tokens)


def step_and_args(config: Decoder) -> tuple[Callable, tuple]:
    """A train step and abstract arguments for it."""
    return adamw_step(config), abstract_args(config)


def llama_70b() -> tuple[Callable, tuple]:
    """For the command line, in this folder: ``jaxauto plan models:llama_70b --target v5p:8x8x8 --budget 0.9 --verify``."""
    return step_and_args(LLAMA["70b"].with_(batch=512, length=4096))
