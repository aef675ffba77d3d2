"""Plain train steps, written for one device: no shardings, no hints. ``(step, args)`` with abstract arguments; compute in bfloat16."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

COMPUTE = jnp.bfloat16


def train_step(loss_fn: Callable, optimizer: Any = None) -> Callable:
    """``step(params, moments, batch) -> (params, moments, loss)``, AdamW by default."""
    optimizer = optimizer or optax.adamw(3e-4)

    def step(params: Any, moments: Any, batch: tuple) -> tuple:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    return step


def abstract(shapes: Any, batch: tuple, optimizer: Any = None, stored: Any = jnp.float32) -> tuple:
    """Arguments of a train step; ``shapes``: a tree of tuples."""
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, stored), shapes, is_leaf=lambda s: isinstance(s, tuple))
    return params, jax.eval_shape((optimizer or optax.adamw(3e-4)).init, params), batch


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean, in float32."""
    logits = logits.astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))


# ------------------------------------------------------------------------------------------------------------ decoders


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder. ``chunk``: keys and values that attention takes at a time; 0: all. ``experts``: instead of one MLP."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    batch: int
    length: int
    chunk: int = 0
    experts: int = 0
    remat: bool = False
    stored: Any = jnp.float32

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def softmax_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal, whole scores; query (batch, length, kv heads, group, head_dim), key and value (batch, length, kv heads, head_dim)."""
    length = query.shape[1]
    scores = jnp.einsum("blhgk,bmhk->bhglm", query, key, preferred_element_type=jnp.float32) / math.sqrt(query.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    return jnp.einsum("bhglm,bmhk->blhgk", jax.nn.softmax(scores, axis=-1).astype(query.dtype), value)


def blockwise_attention(query: jax.Array, key: jax.Array, value: jax.Array, chunk: int) -> jax.Array:
    """The same by chunks of keys, with a running maximum and sum (arXiv 2112.05682): no scores of the whole length."""
    batch, length, heads, dim = key.shape
    chunked = lambda x: jnp.moveaxis(x.reshape(batch, length // chunk, chunk, heads, dim), 1, 0)  # noqa: E731
    position = jnp.arange(length)

    @jax.checkpoint
    def body(carry: tuple, part: tuple) -> tuple:
        top, total, mixed = carry
        keys, values, start = part
        scores = jnp.einsum("blhgk,bmhk->blhgm", query, keys, preferred_element_type=jnp.float32) / math.sqrt(dim)
        seen = position[:, None] >= start + jnp.arange(chunk)
        scores = jnp.where(seen[None, :, None, None, :], scores, -1e30)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights, old = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        found = jnp.einsum("blhgm,bmhk->blhgk", weights.astype(query.dtype), values, preferred_element_type=jnp.float32)
        return (higher, total * old + jnp.sum(weights, axis=-1), mixed * old[..., None] + found), None

    start = (jnp.full(query.shape[:-1], -1e30), jnp.zeros(query.shape[:-1]), jnp.zeros(query.shape))
    (_, total, mixed), _ = jax.lax.scan(body, start, (chunked(key), chunked(value), jnp.arange(0, length, chunk)))
    return (mixed / total[..., None]).astype(query.dtype)


def attention(c: Decoder, layer: dict, x: jax.Array) -> jax.Array:
    query = jnp.einsum("bld,dhgk->blhgk", x, layer["query"].astype(x.dtype))
    key, value = (jnp.einsum("bld,dhk->blhk", x, layer[name].astype(x.dtype)) for name in ("key", "value"))
    mixed = blockwise_attention(query, key, value, c.chunk) if c.chunk else softmax_attention(query, key, value)
    return jnp.einsum("blhgk,hgkd->bld", mixed, layer["out"].astype(x.dtype))


def mlp(layer: dict, x: jax.Array) -> jax.Array:
    """SwiGLU."""
    gate, up = x @ layer["gate"].astype(x.dtype), x @ layer["up"].astype(x.dtype)
    return (jax.nn.silu(gate) * up) @ layer["down"].astype(x.dtype)


def expert_mlp(c: Decoder, layer: dict, x: jax.Array, choices: int = 2) -> jax.Array:
    """Each token to two of the experts, a capacity for each of them in each sequence (arXiv 2006.16668, algorithm 1)."""
    capacity = c.length * choices * 5 // (4 * c.experts)
    scores = jax.nn.softmax(x.astype(jnp.float32) @ layer["router"], axis=-1)
    gates, chosen = jax.lax.top_k(scores, choices)
    combine, taken = jnp.zeros((*scores.shape, capacity), x.dtype), jnp.zeros((x.shape[0], 1, c.experts))
    for choice in range(choices):
        picked = jax.nn.one_hot(chosen[..., choice], c.experts)
        position = jnp.sum((jnp.cumsum(picked, axis=1) - 1 + taken) * picked, axis=-1).astype(jnp.int32)
        slot = jax.nn.one_hot(position, capacity, dtype=x.dtype)  # all zero beyond the capacity
        combine = combine + (gates[..., choice, None] * picked).astype(x.dtype)[..., None] * slot[..., None, :]
        taken = taken + jnp.sum(picked, axis=1, keepdims=True)
    sent = jnp.einsum("blec,bld->ebcd", (combine > 0).astype(x.dtype), x)
    hidden = jax.nn.silu(jnp.einsum("ebcd,edh->ebch", sent, layer["up"].astype(x.dtype)))
    back = jnp.einsum("ebch,ehd->ebcd", hidden, layer["down"].astype(x.dtype))
    return jnp.einsum("blec,ebcd->bld", combine, back)


def decoder(c: Decoder) -> tuple[Callable, tuple]:
    """Grouped queries, RMSNorm, SwiGLU or experts; layers scanned; loss of the next token."""
    group, feed = c.heads // c.kv_heads, {"gate": (c.width, c.hidden), "up": (c.width, c.hidden), "down": (c.hidden, c.width)}
    if c.experts:
        feed = {
            "router": (c.width, c.experts),
            "up": (c.experts, c.width, c.hidden),
            "down": (c.experts, c.hidden, c.width),
        }
    layer = {
        "attention_norm": (c.width,),
        "query": (c.width, c.kv_heads, group, c.head_dim),
        "key": (c.width, c.kv_heads, c.head_dim),
        "value": (c.width, c.kv_heads, c.head_dim),
        "out": (c.kv_heads, group, c.head_dim, c.width),
        "mlp_norm": (c.width,),
        **feed,
    }
    shapes = {
        "embed": (c.vocab, c.width),
        "layers": {name: (c.layers, *shape) for name, shape in layer.items()},
        "norm": (c.width,),
        "head": (c.width, c.vocab),
    }

    def block(x: jax.Array, layer: dict) -> tuple:
        x = x + attention(c, layer, rms_norm(x, layer["attention_norm"]))
        normed = rms_norm(x, layer["mlp_norm"])
        return x + (expert_mlp(c, layer, normed) if c.experts else mlp(layer, normed)), None

    def loss_fn(params: dict, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embed"].astype(COMPUTE)[tokens]
        x, _ = jax.lax.scan(jax.checkpoint(block) if c.remat else block, x, params["layers"])
        return cross_entropy(rms_norm(x, params["norm"]) @ params["head"].astype(COMPUTE), labels)

    return train_step(loss_fn), abstract(shapes, (ints(c.batch, c.length),) * 2, stored=c.stored)


# ----------------------------------------------------------------------------------------------------- other families


def convnet(size: int, batch: int, channels: int, depth: int, dims: int = 2) -> tuple[Callable, tuple]:
    """Residual 3×3 convolutions at full resolution (restoration of large images): mean squared error; SGD with momentum."""
    space = "DHW"[-dims:]
    layout = (f"N{space}C", f"{space}IO", f"N{space}C")
    shapes = {
        "first": (*(3,) * dims, 4, channels),
        "blocks": [(*(3,) * dims, channels, channels)] * depth,
        "last": (*(3,) * dims, channels, 4),
    }

    def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel.astype(x.dtype), (1,) * dims, "SAME", dimension_numbers=layout)

    def loss_fn(params: dict, noisy: jax.Array, clean: jax.Array) -> jax.Array:
        x = conv(noisy.astype(COMPUTE), params["first"])
        for kernel in params["blocks"]:
            x = x + conv(jax.nn.relu(x), kernel)
        return jnp.mean((conv(x, params["last"]).astype(jnp.float32) - clean) ** 2)

    optimizer = optax.sgd(0.1, momentum=0.9)
    image = floats(batch, *(size,) * dims, 4)
    return train_step(loss_fn, optimizer), abstract(shapes, (image, image), optimizer)


def dense(weights: list, x: jax.Array) -> jax.Array:
    """Dense layers, relu between them."""
    for number, weight in enumerate(weights):
        x = (jax.nn.relu(x) if number else x) @ weight.astype(x.dtype)
    return x


def dlrm(rows: int, width: int, batch: int, hidden: int, tables: int) -> tuple[Callable, tuple]:
    """Clicks (arXiv 1906.00091): tables of ``rows`` each, products of all pairs of features, two MLPs; Adagrad."""
    numbers, pairs = 16, tables * (tables + 1) // 2
    shapes = {
        "tables": [(rows, width)] * tables,
        "bottom": [(numbers, hidden), (hidden, width)],
        "top": [(pairs + width, hidden), (hidden, hidden), (hidden, 1)],
    }

    def loss_fn(params: dict, values: jax.Array, ids: jax.Array, clicked: jax.Array) -> jax.Array:
        found = [table[ids[:, number]].astype(COMPUTE) for number, table in enumerate(params["tables"])]
        bottom = dense(params["bottom"], values.astype(COMPUTE))
        vectors = jnp.stack([bottom, *found], axis=1)
        left, right = jnp.triu_indices(tables + 1, 1)
        products = jnp.einsum("bfd,bgd->bfg", vectors, vectors)[:, left, right]
        logits = dense(params["top"], jnp.concatenate([bottom, products], axis=-1))[:, 0].astype(jnp.float32)
        return jnp.mean(jax.nn.softplus(logits) - clicked * logits)

    optimizer = optax.adagrad(0.01)
    return train_step(loss_fn, optimizer), abstract(shapes, (floats(batch, numbers), ints(batch, tables), floats(batch)), optimizer)


def ensemble(members: int, width: int, depth: int, batch: int) -> tuple[Callable, tuple]:
    """A step of one small network, ``jax.vmap``-ed over members with parameters and batches of their own."""

    def loss_fn(params: list, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((dense(params, x.astype(COMPUTE)).astype(jnp.float32) - y) ** 2)

    params, moments, rows = abstract([(width, width)] * depth, (floats(batch, width),) * 2)
    every = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct((members, *a.shape), a.dtype), tree)  # noqa: E731
    return jax.vmap(train_step(loss_fn)), (every(params), every(moments), every(rows))


def mlp_tower(width: int, hidden: int, depth: int, batch: int, stored: Any = jnp.float32, optimizer: Any = None) -> tuple[Callable, tuple]:
    """Pairs of dense layers, scanned, with residuals; mean squared error."""
    shapes = {"up": (depth, width, hidden), "down": (depth, hidden, width)}

    def loss_fn(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        def block(x: jax.Array, layer: dict) -> tuple:
            return x + jax.nn.relu(x @ layer["up"].astype(x.dtype)) @ layer["down"].astype(x.dtype), None

        x, _ = jax.lax.scan(block, x.astype(COMPUTE), params)
        return jnp.mean((x.astype(jnp.float32) - y) ** 2)

    return train_step(loss_fn, optimizer), abstract(shapes, (floats(batch, width),) * 2, optimizer, stored)
