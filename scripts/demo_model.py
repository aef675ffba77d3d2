"""What the demo trains: a byte-level GPT in flax nnx on the sources of Python's standard library. Nothing here knows of a mesh."""

from __future__ import annotations

import dataclasses
import math
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

BITS = 1 / math.log(2)  # nats to bits


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model and of a batch; ``steps`` only shapes the learning rate."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    length: int = 128
    batch: int = 16
    dropout: float = 0.05
    steps: int = 200
    rate: float = 4e-3
    seed: int = 0


# ---------------------------------------------------------------------------------------------------------------- data


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes of other files, held out."""

    train: np.ndarray
    held_out: np.ndarray
    files: tuple[int, int]

    def batches(self, config: Config, part: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (inputs, labels), each int32 of shape (batch, length), forever; the same ones for the same seed."""
        data = self.train if part == "train" else self.held_out
        random = np.random.default_rng([config.seed, zlib.crc32(part.encode())])
        while True:
            starts = random.integers(0, len(data) - config.length - 1, config.batch)
            text = data[starts[:, None] + np.arange(config.length + 1)].astype(np.int32)
            yield text[:, :-1], text[:, 1:]


def read_standard_library() -> Corpus:
    """The ``.py`` files at the top of the standard library; a tenth of them, picked by a checksum of the name, is held out.

    Raises:
      FileNotFoundError: this Python comes without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(folder.glob("*.py"))
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in paths:
        parts[zlib.crc32(path.name.encode()) % 10 == 0].append(path.read_bytes())
    if not parts[True] or not parts[False]:
        raise FileNotFoundError(f"the demo trains on the sources of Python's standard library, and there are none in {folder}")
    train, held_out = (np.frombuffer(b"".join(parts[held]), np.uint8) for held in (False, True))
    return Corpus(train, held_out, (len(parts[False]), len(parts[True])))


# --------------------------------------------------------------------------------------------------------------- model


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and beside a residual; bfloat16 compute, float32 parameters."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        width, half = config.width, jnp.bfloat16
        self.attention_norm = nnx.LayerNorm(width, dtype=half, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(config.heads, width, dtype=half, use_bias=False, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, dtype=half, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=half, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=half, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=nnx.make_causal_mask(x[..., 0])))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.mlp_norm(x)))))


class GPT(nnx.Module):
    """Bytes in, logits of the next byte out: int32 (batch, length) to float32 (batch, length, 256)."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, config.width, dtype=jnp.bfloat16, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.length, config.width)))
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(config.width, 256, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position[...].astype(jnp.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def cross_entropy(model: GPT, batch) -> jax.Array:
    """Mean loss in nats for each byte."""
    tokens, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), labels).mean()


# ----------------------------------------------------------------------------------------------------------- the step


class Training:
    """The functions of one run: ``init()``, ``step(state, batch)`` and ``evaluate(state, batch)``, written for one device.

    The state is a dict: ``params``, ``rest`` (the keys of dropout) and ``optimizer``.
    """

    def __init__(self, config: Config):
        warm_up = max(1, min(20, config.steps // 5))
        rate = optax.warmup_cosine_decay_schedule(0.0, config.rate, warm_up, max(config.steps, warm_up + 1), config.rate / 10)
        self.config = config
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, eps=1e-6, weight_decay=0.1))
        abstract = nnx.eval_shape(lambda: GPT(config, nnx.Rngs(config.seed)))
        self.definition = nnx.graphdef(abstract)
        abstract.eval()
        self.frozen_definition = nnx.graphdef(abstract)

    def init(self) -> dict:
        """The first state."""
        _, params, rest = nnx.split(GPT(self.config, nnx.Rngs(self.config.seed)), nnx.Param, ...)
        return {"params": params, "rest": rest, "optimizer": self.optimizer.init(params)}

    def step(self, state: dict, batch) -> tuple[dict, dict]:
        """One step of training; metrics are the loss and the norm of its gradient."""

        def loss_fn(params):
            model = nnx.merge(self.definition, params, state["rest"], copy=True)
            return cross_entropy(model, batch), nnx.state(model, nnx.Not(nnx.Param))

        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, optimizer = self.optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "rest": rest, "optimizer": optimizer}, {"loss": loss, "gradient_norm": optax.global_norm(grads)}

    def evaluate(self, state: dict, batch) -> jax.Array:
        """The loss without dropout."""
        return cross_entropy(nnx.merge(self.frozen_definition, state["params"], state["rest"]), batch)
