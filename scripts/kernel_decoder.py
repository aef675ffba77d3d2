"""A decoder whose attention is one kernel, as published runs have it: scores never reach memory. To plan with: the kernel is not written.

jaxauto knows of the kernel what a user with a Pallas or FFI kernel tells it: ``register_rule`` with its dimensions and flops.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Primitive
from models import Decoder, mlp, rms_norm, rotary

import jaxauto

_FORWARD, _BACKWARD = Primitive("attention_kernel"), Primitive("attention_kernel_backward")


@dataclasses.dataclass(frozen=True)
class KernelDecoder(Decoder):
    """As ``Decoder``, with what published models differ in.

    Attributes:
      head_width: width of a head; 0: ``width / heads``. gated: SwiGLU, else two matrices and ReLU. tied: the head is the embedding.
      first_moment: dtype of AdamW's first moment.
    """

    head_width: int = 0
    gated: bool = True
    tied: bool = False
    first_moment: Any = None

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.head_width or self.width // self.heads


# -------------------------------------------------------------------------------------------------------------- kernel


def _shape(x: Any) -> Any:
    return jax.core.ShapedArray(x.shape, x.dtype)


_BACKWARD.multiple_results = True
_FORWARD.def_abstract_eval(lambda query, *_: _shape(query))
_BACKWARD.def_abstract_eval(lambda query, key, value, *_: (_shape(query), _shape(key), _shape(value)))


@jaxauto.register_rule("attention_kernel")
def forward_rule(eqn: Any) -> jaxauto.OpRule:
    """Causal: half of the two products. Query (batch, length, kv heads, group, width); key and value (batch, length, kv heads, width)."""
    return jaxauto.OpRule(
        "b l h g d, b m h d, b m h d -> b l h g d", whole=("l", "m", "g", "d"), flops=_products(eqn) * 2 / 2, kind=jaxauto.core.Kind.DOT
    )


@jaxauto.register_rule("attention_kernel_backward")
def backward_rule(eqn: Any) -> jaxauto.OpRule:
    """Causal: half of five products, scores made again among them (arXiv 2205.14135)."""
    return jaxauto.OpRule(
        "b l h g d, b m h d, b m h d, b l h g d, b l h g d -> b l h g d, b m h d, b m h d",
        whole=("l", "m", "g", "d"),
        flops=_products(eqn) * 5 / 2,
        kind=jaxauto.core.Kind.DOT,
    )


def _products(eqn: Any) -> float:
    """Flops of one product of all queries with all keys."""
    return 2.0 * math.prod(eqn.invars[0].aval.shape) * eqn.invars[1].aval.shape[1]


@jax.custom_vjp
def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention in one kernel; shapes as in ``forward_rule``."""
    return _FORWARD.bind(query, key, value)


def _attend_forward(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple:
    out = _FORWARD.bind(query, key, value)
    return out, (query, key, value, out)


attend.defvjp(_attend_forward, lambda kept, grad: tuple(_BACKWARD.bind(*kept, grad)))


# --------------------------------------------------------------------------------------------------------------- model


def init_params(config: KernelDecoder) -> dict:
    """Parameters; call it under ``jax.eval_shape``."""
    c = config
    shapes = {
        "attention_norm": (c.width,),
        "query": (c.width, c.heads, c.head_dim),
        "key": (c.width, c.kv_heads, c.head_dim),
        "values": (c.width, c.kv_heads, c.head_dim),
        "out": (c.heads, c.head_dim, c.width),
        "mlp_norm": (c.width,),
        "up": (c.width, c.hidden),
        "down": (c.hidden, c.width),
        **({"gate": (c.width, c.hidden)} if c.gated else {}),
    }
    params = {
        "embed": jnp.zeros((c.vocab, c.width), c.stored),
        "layers": {name: jnp.zeros((c.layers, *shape), c.stored) for name, shape in shapes.items()},
        "norm": jnp.zeros((c.width,), c.stored),
    }
    return params if c.tied else {**params, "head": jnp.zeros((c.width, c.vocab), c.stored)}


def block(config: KernelDecoder, layer: dict, x: jax.Array) -> jax.Array:
    """One layer."""
    c, h = config, rms_norm(x, layer["attention_norm"])
    query, key, value = (jnp.einsum("bld,dhk->blhk", h, layer[name].astype(h.dtype)) for name in ("query", "key", "values"))
    query, key = rotary(query), rotary(key)
    mixed = attend(query.reshape(*query.shape[:2], c.kv_heads, c.heads // c.kv_heads, c.head_dim), key, value)
    mixed = mixed.reshape(*mixed.shape[:2], c.heads, c.head_dim)
    x = x + jnp.einsum("blhk,hkd->bld", mixed, layer["out"].astype(x.dtype))
    h = rms_norm(x, layer["mlp_norm"])
    return x + (mlp(layer, h) if c.gated else jax.nn.relu(h @ layer["up"].astype(x.dtype)) @ layer["down"].astype(x.dtype))


def loss_fn(config: KernelDecoder, params: dict, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, in float32."""
    x = params["embed"].astype(config.compute)[tokens]
    body = lambda layer, x: block(config, layer, x)  # noqa: E731
    body = jax.checkpoint(body) if config.remat else body
    x, _ = jax.lax.scan(lambda x, layer: (body(layer, x), None), x, params["layers"])
    head = params["embed"].T if config.tied else params["head"]
    logits = (rms_norm(x, params["norm"]) @ head.astype(config.compute)).astype(jnp.float32)
    hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == labels[..., None]  # a mask fuses, a gather would want float32 logits
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(hit, logits, 0.0), axis=-1))


def step_and_args(config: KernelDecoder) -> tuple[Callable, tuple]:
    """``step(params, moments, batch)`` with AdamW, and abstract arguments."""
    optimizer = optax.adamw(3e-4, mu_dtype=config.first_moment)

    def step(params: dict, moments: Any, batch: tuple) -> tuple:
        loss, grads = jax.value_and_grad(lambda p: loss_fn(config, p, *batch))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, {"loss": loss}

    params = jax.eval_shape(lambda: init_params(config))
    tokens = jax.ShapeDtypeStruct((config.batch, config.length), jnp.int32)
    return step, (params, jax.eval_shape(optimizer.init, params), (tokens, tokens))
