"""Decoders in flax.linen with rotary positions, grouped queries, RMS norms, gated layers.

Unlike those of ``models.py``, scores come out of their dot in bfloat16 and are widened after it.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from models import rotary

HALF = jnp.bfloat16


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions (arXiv 2104.09864) as transformers writes them: the halves change places in an array of their own, in the type of
    ``x`` [batch, length, heads, dimension]. ``models.rotary`` is the form of MaxText."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = (jnp.concatenate([v, v], -1).astype(x.dtype) for v in (jnp.cos(angles), jnp.sin(angles)))
    a, b = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-b, a], -1) * sin


class Attention(nn.Module):
    heads: int
    groups: int
    rotary: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, length = x.shape[-1], x.shape[1]
        dense = lambda heads, name: nn.DenseGeneral((heads, width // self.heads), use_bias=False, dtype=HALF, name=name)  # noqa: E731
        q, k, v = dense(self.heads, "q")(x), dense(self.groups, "k")(x), dense(self.groups, "v")(x)
        q, k = self.rotary(q), self.rotary(k)
        q = q.reshape(*q.shape[:2], self.groups, -1, q.shape[-1])
        scores = jnp.einsum("blgnd,bmgd->bgnlm", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
        weights = nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)).astype(HALF)
        y = jnp.einsum("bgnlm,bmgd->blgnd", weights, v).reshape(x.shape)
        return nn.Dense(width, use_bias=False, dtype=HALF, name="o")(y)


class Llama(nn.Module):
    """arXiv 2302.13971, 2307.09288."""

    layers: int = 4
    width: int = 1024
    hidden: int = 2816
    heads: int = 8
    groups: int = 4
    words: int = 32000
    rotary: Callable[[jax.Array], jax.Array] = rotary

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        dense = lambda width: nn.Dense(width, use_bias=False, dtype=HALF)  # noqa: E731
        x = nn.Embed(self.words, self.width, dtype=HALF)(tokens)
        for _ in range(self.layers):
            x = x + Attention(self.heads, self.groups, self.rotary)(nn.RMSNorm(dtype=HALF)(x))
            y = nn.RMSNorm(dtype=HALF)(x)
            x = x + dense(self.width)(nn.silu(dense(self.hidden)(y)) * dense(self.hidden)(y))
        return dense(self.words)(nn.RMSNorm(dtype=HALF)(x))
