"""Train steps drawn at random, of sizes that are worth a chip: plain JAX, float32 parameters, bfloat16 compute, abstract arguments.

Nothing in jaxauto was fitted to them. ``draw(seed)`` is a ``Recipe``; ``make(recipe, batch)`` is (step, (params, optimizer state, batch)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bench_vision import COMPUTE, abstract, cross_entropy, ints, train_step

MIXERS = ("attention", "grouped attention", "recurrence", "shifts")
MLPS: dict[str, Callable] = {"gelu": jax.nn.gelu, "tanh": jnp.tanh, "relu squared": lambda x: jax.nn.relu(x) ** 2, "gated": jax.nn.silu}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "momentum": lambda: optax.sgd(1e-2, 0.9),
    "lion": lambda: optax.lion(1e-4),
}


@dataclass(frozen=True)
class Recipe:
    """What a step is made of. ``batch``: sequences of one device."""

    mixer: str
    mlp: str
    norm: str
    post: bool
    masked: bool
    wide_scores: bool
    dropout: bool
    scan: bool
    layers: int
    width: int
    hidden: int
    head: int
    length: int
    vocab: int
    batch: int
    optimizer: str

    def __str__(self) -> str:
        form = f"{self.layers} layers {'scanned' if self.scan else 'unrolled'}, {self.width} wide, {self.length} tokens"
        parts = [self.mixer, self.mlp, f"{'post' if self.post else 'pre'} {self.norm}", "dropout" if self.dropout else "", self.optimizer]
        return f"{form}: {', '.join(filter(None, parts))}"


def draw(seed: int) -> Recipe:
    """The recipe of a seed."""
    rng = np.random.default_rng([seed, 2024])
    pick = lambda *of: of[int(rng.integers(len(of)))]  # noqa: E731
    scan, width, length = pick(True, False), pick(512, 768, 1024, 1536, 2048), pick(256, 512, 1024)
    return Recipe(
        mixer=pick(*MIXERS),
        mlp=pick(*MLPS),
        norm=pick("rms", "layer"),
        post=pick(True, False),
        masked=pick(True, False),
        wide_scores=pick(True, False),
        dropout=pick(True, False, False),
        scan=scan,
        layers=pick(6, 8, 12) if scan else pick(2, 3, 4),
        width=width,
        hidden=width * pick(2, 3, 4),
        head=pick(64, 128),
        length=length,
        vocab=pick(8192, 16384, 32768),
        batch=pick(2048, 4096, 8192) // length,
        optimizer=pick(*OPTIMIZERS),
    )


def make(recipe: Recipe, batch: int) -> tuple[Callable, tuple]:
    """(step, (params, optimizer state, (tokens, labels, seed)))."""
    r, optimizer = recipe, OPTIMIZERS[recipe.optimizer]()

    def init() -> dict:
        def layer(stack: tuple[int, ...]) -> dict:
            return jax.tree.map(lambda s: jnp.full((*stack, *s), 1 / math.sqrt(s[0])), _shapes(r), is_leaf=lambda s: isinstance(s, tuple))

        layers = layer((r.layers,)) if r.scan else [layer(()) for _ in range(r.layers)]
        return {"embed": jnp.full((r.vocab, r.width), 0.02), "layers": layers, "head": jnp.full((r.width, r.vocab), 0.02)}

    def loss_fn(params: dict, tokens: jax.Array, labels: jax.Array, seed: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.key(seed), r.layers)
        x = params["embed"].astype(COMPUTE)[tokens]
        if r.scan:
            x = jax.lax.scan(lambda x, now: (_block(r, *now, x), None), x, (params["layers"], keys))[0]
        else:
            for k, layer in enumerate(params["layers"]):
                with jax.named_scope(f"layer{k}"):
                    x = _block(r, layer, keys[k], x)
        with jax.named_scope("head"):
            return cross_entropy(x @ params["head"].astype(COMPUTE), labels)

    return train_step(loss_fn, optimizer), abstract(init, (ints(batch, r.length), ints(batch, r.length), ints()), optimizer)


def _shapes(r: Recipe) -> dict:
    heads, groups = r.width // r.head, max(1, r.width // r.head // 4)
    mixers = {
        "attention": dict.fromkeys(("query", "key", "value"), (r.width, heads, r.head)) | {"out": (heads, r.head, r.width)},
        "grouped attention": {"query": (r.width, groups, heads // groups, r.head), "key": (r.width, groups, r.head)}
        | {"value": (r.width, groups, r.head), "out": (groups, heads // groups, r.head, r.width)},
        "recurrence": {"into": (r.width, r.width), "gate": (r.width, r.width), "out": (r.width, r.width)},
        "shifts": {"taps": (4, r.width), "into": (r.width, r.width), "out": (r.width, r.width)},
    }
    mlp = {"up": (r.width, r.hidden), "down": (r.hidden, r.width)} | ({"gate": (r.width, r.hidden)} if r.mlp == "gated" else {})
    return {"mixer": mixers[r.mixer], "mlp": mlp, "norm1": (r.width,), "norm2": (r.width,)}


def _block(r: Recipe, layer: dict, key: jax.Array, x: jax.Array) -> jax.Array:
    for name, part in (("norm1", _mixer), ("norm2", _mlp)):
        key, used = jax.random.split(key)
        new = part(r, layer["mixer" if part is _mixer else "mlp"], x if r.post else _norm(r, x, layer[name]))
        if r.dropout:
            new = jnp.where(jax.random.bernoulli(used, 0.9, new.shape), new / 0.9, 0).astype(new.dtype)
        x = _norm(r, x + new, layer[name]) if r.post else x + new
    return x


def _norm(r: Recipe, x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    if r.norm == "layer":
        wide = wide - jnp.mean(wide, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def _mlp(r: Recipe, p: dict, x: jax.Array) -> jax.Array:
    h = MLPS[r.mlp](x @ p["up"].astype(x.dtype))
    h = h * (x @ p["gate"].astype(x.dtype)) if r.mlp == "gated" else h
    return h @ p["down"].astype(x.dtype)


def _mixer(r: Recipe, p: dict, x: jax.Array) -> jax.Array:
    p = jax.tree.map(lambda w: w.astype(x.dtype), p)
    if r.mixer == "shifts":  # a convolution over time, a tap at a time
        h = x @ p["into"]
        late = sum(jnp.pad(h, ((0, 0), (k, 0), (0, 0)))[:, : r.length] * p["taps"][k] for k in range(4))
        return jax.nn.silu(late) @ p["out"]
    if r.mixer == "recurrence":
        gate = jax.nn.sigmoid((x @ p["gate"]).astype(jnp.float32))
        fed = (1 - gate) * (x @ p["into"]).astype(jnp.float32)
        state = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (gate, fed), axis=1)[1]
        return state.astype(x.dtype) @ p["out"]
    group = "g" if r.mixer == "grouped attention" else ""
    project = f"bld,dh{group}k->blh{group}k"
    query, key, value = jnp.einsum(project, x, p["query"]), *(jnp.einsum("bmd,dhk->bmhk", x, p[n]) for n in ("key", "value"))
    wide = jnp.float32 if r.wide_scores else None
    scores = jnp.einsum(f"blh{group}k,bmhk->bh{group}lm", query, key, preferred_element_type=wide) / math.sqrt(r.head)
    scores = jnp.where(jnp.tril(jnp.ones((r.length, r.length), bool)), scores, -1e9) if r.masked else scores
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    return jnp.einsum(f"blh{group}k,h{group}kd->bld", jnp.einsum(f"bh{group}lm,bmhk->blh{group}k", weights, value), p["out"])
