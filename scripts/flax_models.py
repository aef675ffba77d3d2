"""Train steps as users of flax.linen write them, to judge the estimates by: no number of the cost model is fitted to one of them.

What was learnt from looking at one is measured on programs of its own (results/short_rows.md, dilated.md, pooling.md).

``MODELS[name]`` is ``(make, batch)``: ``make(n)`` is ``(step, arguments)`` for ``n`` examples, abstract; ``batch`` is what one device has.
Parameters are float32, most compute bfloat16; the optimizer is AdamW but where the model says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from bench_vision import abstract, floats, ints, train_step
from flax_decoders import Llama, rotated

HALF = jnp.bfloat16
Step = tuple[Callable, tuple]


def classes(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def _tokens(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return classes(logits[:, :-1], tokens[:, 1:])


def init_of(module: nn.Module, *inputs: jax.ShapeDtypeStruct) -> Any:
    """The module's variables, abstract."""
    return jax.eval_shape(lambda: module.init(jax.random.key(0), *(jnp.zeros(x.shape, x.dtype) for x in inputs)))


def step_of(loss: Callable, variables: Any, batch: tuple, optimizer: Any = None) -> Step:
    optimizer = optimizer or optax.adamw(3e-4)
    return train_step(loss, optimizer), abstract(lambda: variables, batch, optimizer)


# -------------------------------------------------------------------------------------------------------------- images


class ConvNextBlock(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Conv(self.width, (7, 7), feature_group_count=self.width, dtype=HALF)(x)
        y = nn.Dense(4 * self.width, dtype=HALF)(nn.LayerNorm(dtype=HALF)(y))
        y = nn.Dense(self.width, dtype=HALF)(nn.gelu(y))
        return x + y * self.param("scale", nn.initializers.constant(1e-6), (self.width,)).astype(HALF)


class ConvNext(nn.Module):
    """arXiv 2201.03545, tiny."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(96, (4, 4), (4, 4), dtype=HALF)(x)
        for i, (width, blocks) in enumerate([(96, 3), (192, 3), (384, 6), (768, 3)]):
            x = nn.Conv(width, (2, 2), (2, 2), dtype=HALF)(nn.LayerNorm(dtype=HALF)(x)) if i else x
            for _ in range(blocks):
                x = ConvNextBlock(width)(x)
        return nn.Dense(1000)(x.mean((1, 2)).astype(jnp.float32))


class Autoencoder(nn.Module):
    """Variational (arXiv 1312.6114): group norms, transposed convolutions."""

    @nn.compact
    def __call__(self, x: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y = x.astype(HALF)
        for width in (64, 128, 256):
            y = nn.silu(nn.GroupNorm(8, dtype=HALF)(nn.Conv(width, (3, 3), (2, 2), dtype=HALF)(y)))
        mean, log_var = jnp.split(nn.Conv(16, (1, 1))(y.astype(jnp.float32)), 2, axis=-1)
        y = (mean + jnp.exp(log_var / 2) * noise).astype(HALF)
        for width in (256, 128, 64):
            y = nn.silu(nn.GroupNorm(8, dtype=HALF)(nn.ConvTranspose(width, (4, 4), (2, 2), dtype=HALF)(y)))
        return nn.Conv(3, (3, 3))(y.astype(jnp.float32)), mean, log_var


class Residual(nn.Module):
    """Of a diffusion model (arXiv 2006.11239)."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = nn.Conv(self.width, (3, 3), dtype=HALF)(nn.silu(nn.GroupNorm(16, dtype=HALF)(x)))
        y = y + nn.Dense(self.width, dtype=HALF)(nn.silu(time))[:, None, None]
        y = nn.Conv(self.width, (3, 3), dtype=HALF)(nn.silu(nn.GroupNorm(16, dtype=HALF)(y)))
        return y + (x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1), dtype=HALF)(x))


class Diffusion(nn.Module):
    """Noise prediction with attention at the lowest resolution."""

    widths: tuple[int, ...] = (64, 128, 256)

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        angles = time[:, None] * jnp.exp(-jnp.arange(64) / 8)
        t = nn.Dense(256, dtype=HALF)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(HALF))
        x, skips = nn.Conv(self.widths[0], (3, 3), dtype=HALF)(x), []
        for width in self.widths:
            x = Residual(width)(x, t)
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        shape = x.shape
        y = nn.GroupNorm(16, dtype=HALF)(x).reshape(shape[0], -1, shape[-1])
        x = Residual(self.widths[-1])(x + nn.MultiHeadDotProductAttention(4, dtype=HALF)(y, y).reshape(shape), t)
        for width in reversed(self.widths):
            x = jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")
            x = Residual(width)(jnp.concatenate([x, skips.pop()], -1), t)
        return nn.Conv(3, (3, 3))(nn.silu(x).astype(jnp.float32))


class Policy(nn.Module):
    """Of images of a game (Nature's network), with a value."""

    @nn.compact
    def __call__(self, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = frames.astype(jnp.float32) / 255
        for width, window, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(nn.Conv(width, (window, window), (stride, stride), padding="VALID")(x))
        x = nn.relu(nn.Dense(512)(x.reshape(x.shape[0], -1)))
        return nn.log_softmax(nn.Dense(18)(x)), nn.Dense(1)(x)[:, 0]


def convnext(n: int) -> Step:
    m, images = ConvNext(), floats(n, 224, 224, 3)
    return step_of(lambda p, x, y: classes(m.apply(p, x), y), init_of(m, images), (images, ints(n)))


def vae(n: int) -> Step:
    m, images, noise = Autoencoder(), floats(n, 128, 128, 3), floats(n, 16, 16, 8)

    def loss(params: Any, x: jax.Array, noise: jax.Array) -> jax.Array:
        y, mean, log_var = m.apply(params, x, noise)
        return jnp.mean((y - x) ** 2) + 1e-3 * jnp.mean(mean**2 + jnp.exp(log_var) - log_var)

    return step_of(loss, init_of(m, images, noise), (images, noise))


def diffusion(n: int) -> Step:
    m, images, times = Diffusion(), floats(n, 64, 64, 3), floats(n)

    def loss(params: Any, x: jax.Array, noise: jax.Array, time: jax.Array) -> jax.Array:
        keep = jnp.cos(time)[:, None, None, None] ** 2
        noisy = (jnp.sqrt(keep) * x + jnp.sqrt(1 - keep) * noise).astype(HALF)
        return jnp.mean((m.apply(params, noisy, time) - noise) ** 2)

    return step_of(loss, init_of(m, images, times), (images, images, times))


def ppo(n: int) -> Step:
    """arXiv 1707.06347: clipped ratios, the value's loss, an entropy bonus; norms of gradients clipped."""
    m, frames = Policy(), jax.ShapeDtypeStruct((n, 84, 84, 4), jnp.uint8)

    def loss(params: Any, x: jax.Array, action: jax.Array, before: jax.Array, advantage: jax.Array, gain: jax.Array) -> jax.Array:
        logs, value = m.apply(params, x)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = jnp.exp(jnp.take_along_axis(logs, action[:, None], 1)[:, 0] - before)
        gained = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
        return 0.5 * jnp.mean((value - gain) ** 2) - gained + 0.01 * jnp.mean(jnp.sum(jnp.exp(logs) * logs, -1))

    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4))
    return step_of(loss, init_of(m, frames), (frames, ints(n), floats(n), floats(n), floats(n)), optimizer)


# ------------------------------------------------------------------------------------------------------- transformers


class Block(nn.Module):
    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        y = nn.LayerNorm(dtype=HALF)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=HALF)(y, y, mask=mask)
        y = nn.LayerNorm(dtype=HALF)(x)
        return x + nn.Dense(self.width, dtype=HALF)(nn.gelu(nn.Dense(4 * self.width, dtype=HALF)(y)))


class Language(nn.Module):
    """Biases, an approximate gelu, the head tied to the embedding. ``kept``: blocks are not under nn.remat."""

    layers: int = 6
    width: int = 768
    vocab: int = 32000
    kept: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab, self.width, dtype=HALF)
        x, mask = embed(tokens), nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = (Block if self.kept else nn.remat(Block))(self.width, self.width // 64)(x, mask)
        return embed.attend(nn.LayerNorm(dtype=HALF)(x)).astype(jnp.float32)


class Tower(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.width, dtype=HALF)(x)
        for _ in range(4):
            x = Block(self.width, 8)(x)
        x = nn.Dense(512)(x.mean(1).astype(jnp.float32))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class Pair(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array, texts: jax.Array) -> jax.Array:
        return 100 * Tower(768)(images) @ Tower(512)(texts).T


class Window(nn.Module):
    """A block of Swin (arXiv 2103.14030): attention within windows, which every second block moves by half of one."""

    width: int
    window: int
    shift: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        n, h, w, c = x.shape
        k = self.window
        y = jnp.roll(nn.LayerNorm(dtype=HALF)(x), (-self.shift, -self.shift), (1, 2))
        y = y.reshape(n, h // k, k, w // k, k, c).swapaxes(2, 3).reshape(-1, k * k, c)
        y = nn.MultiHeadDotProductAttention(c // 32, dtype=HALF)(y, y)
        y = y.reshape(n, h // k, w // k, k, k, c).swapaxes(2, 3).reshape(n, h, w, c)
        x = x + jnp.roll(y, (self.shift, self.shift), (1, 2))
        y = nn.gelu(nn.Dense(4 * c, dtype=HALF)(nn.LayerNorm(dtype=HALF)(x)))
        return x + nn.Dense(c, dtype=HALF)(y)


class Swin(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm(dtype=HALF)(nn.Conv(96, (4, 4), (4, 4), dtype=HALF)(x))
        for i, (width, blocks) in enumerate([(96, 2), (192, 2), (384, 4)]):
            if i:
                n, h, w, c = x.shape
                x = x.reshape(n, h // 2, 2, w // 2, 2, c).swapaxes(2, 3).reshape(n, h // 2, w // 2, 4 * c)
                x = nn.Dense(width, use_bias=False, dtype=HALF)(nn.LayerNorm(dtype=HALF)(x))
            for j in range(blocks):
                x = Window(width, 8, 4 * (j % 2))(x)
        return nn.Dense(1000)(x.mean((1, 2)).astype(jnp.float32))


class Mixer(nn.Module):
    """arXiv 2105.01601: dense layers over patches, then over channels."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(512, (16, 16), (16, 16), dtype=HALF)(x).reshape(x.shape[0], -1, 512)
        for _ in range(8):
            y = nn.LayerNorm(dtype=HALF)(x).swapaxes(1, 2)
            x = x + nn.Dense(x.shape[1], dtype=HALF)(nn.gelu(nn.Dense(256, dtype=HALF)(y))).swapaxes(1, 2)
            x = x + nn.Dense(512, dtype=HALF)(nn.gelu(nn.Dense(2048, dtype=HALF)(nn.LayerNorm(dtype=HALF)(x))))
        return nn.Dense(1000)(x.mean(1).astype(jnp.float32))


def language(n: int, m: nn.Module) -> Step:
    tokens = ints(n, 1024)
    return step_of(lambda p, t: _tokens(m.apply(p, t), t), init_of(m, tokens), (tokens,))


def lora(n: int) -> Step:
    """arXiv 2106.09685: of each matrix two thin factors are trained; the model itself is bfloat16, and an argument."""
    m, tokens = Language(), ints(n, 1024)
    base = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, HALF), init_of(m, tokens))
    name = lambda path: "/".join(key.key for key in path)  # noqa: E731
    shapes = {name(path): v.shape for path, v in jax.tree_util.tree_leaves_with_path(base) if v.ndim == 2}
    thin = {path: {"a": floats(rows, 8), "b": floats(8, columns)} for path, (rows, columns) in shapes.items()}

    def tuned(thin: Any, base: Any) -> Any:
        def one(path: Any, v: jax.Array) -> jax.Array:
            pair = thin.get(name(path))
            return v if pair is None else v + (pair["a"] @ pair["b"]).astype(v.dtype)

        return jax.tree_util.tree_map_with_path(one, base)

    return step_of(lambda p, base, t: _tokens(m.apply(tuned(p, base), t), t), thin, (base, tokens))


def microbatches(n: int, pieces: int = 4) -> Step:
    """Gradients of four pieces of the batch, summed in a loop."""
    m, tokens, optimizer = Language(), ints(pieces, n // pieces, 1024), optax.adamw(3e-4)

    def step(params: Any, moments: Any, batch: tuple) -> tuple:
        def piece(total: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
            loss, grads = jax.value_and_grad(lambda p: _tokens(m.apply(p, tokens), tokens))(params)
            return jax.tree.map(jnp.add, total, grads), loss

        grads, losses = jax.lax.scan(piece, jax.tree.map(jnp.zeros_like, params), batch[0])
        updates, moments = optimizer.update(jax.tree.map(lambda g: g / pieces, grads), moments, params)
        return optax.apply_updates(params, updates), moments, {"loss": losses.mean()}

    return step, abstract(lambda: init_of(m, ints(1, 1024)), (tokens,), optimizer)


def clip(n: int) -> Step:
    """arXiv 2103.00020: each image's own text among all, and the other way round."""
    m, images, texts = Pair(), jax.ShapeDtypeStruct((n, 256, 768), HALF), jax.ShapeDtypeStruct((n, 64, 512), HALF)

    def loss(params: Any, images: jax.Array, texts: jax.Array) -> jax.Array:
        logits = m.apply(params, images, texts)
        return (classes(logits, jnp.arange(n)) + classes(logits.T, jnp.arange(n))) / 2

    return step_of(loss, init_of(m, images, texts), (images, texts))


def images_of(module: nn.Module, size: int, n: int) -> Step:
    x = floats(n, size, size, 3)
    return step_of(lambda p, x, y: classes(module.apply(p, x), y), init_of(module, x), (x, ints(n)))


# --------------------------------------------------------------------------------------------------------------- others


class Normed(nn.Module):
    """A network of dense layers with batch norms, in float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(2048)(x)))
        return nn.Dense(128)(x)


class Wave(nn.Module):
    """arXiv 1609.03499: causal convolutions, ever more dilated, gated, with skips."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x, skips = nn.Embed(256, 256, dtype=HALF)(x), 0.0
        for k in range(10):
            y = nn.Conv(512, (2,), kernel_dilation=(2**k,), padding="CAUSAL", dtype=HALF)(x)
            gate, value = jnp.split(y, 2, -1)
            y = nn.sigmoid(gate) * jnp.tanh(value)
            x, skips = x + nn.Dense(256, dtype=HALF)(y), skips + nn.Dense(256, dtype=HALF)(y)
        return nn.Dense(256, dtype=HALF)(nn.relu(skips))


class Tagger(nn.Module):
    """Gated recurrent units from both ends."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(32000, 512)(tokens)
        for _ in range(2):
            x = nn.Bidirectional(nn.RNN(nn.GRUCell(512)), nn.RNN(nn.GRUCell(512)))(x)
        return nn.Dense(64)(x)


class Field(nn.Module):
    """u(x, y, t)"""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(5):
            x = jnp.tanh(nn.Dense(512)(x))
        return nn.Dense(1)(x)[..., 0]


def normed(n: int) -> Step:
    m, x = Normed(), floats(n, 512)
    variables = init_of(m, x)
    optimizer = optax.adamw(1e-3)

    def step(params: Any, moments: Any, batch: tuple) -> tuple:
        def loss(weights: Any) -> tuple[jax.Array, Any]:
            logits, stats = m.apply({**params, "params": weights}, batch[0], mutable=["batch_stats"])
            return classes(logits, batch[1]), stats

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params["params"])
        updates, moments = optimizer.update(grads, moments, params["params"])
        return {"params": optax.apply_updates(params["params"], updates), **stats}, moments, {"loss": value}

    return step, (variables, jax.eval_shape(optimizer.init, variables["params"]), (x, ints(n)))


def wavenet(n: int) -> Step:
    m, samples = Wave(), ints(n, 8192)
    return step_of(lambda p, x: _tokens(m.apply(p, x), x), init_of(m, samples), (samples,))


def tagger(n: int) -> Step:
    m, tokens = Tagger(), ints(n, 128)
    return step_of(lambda p, x, y: classes(m.apply(p, x), y), init_of(m, tokens), (tokens, tokens))


def heat(n: int) -> Step:
    """Physics in the loss (arXiv 1711.10561): u_t = u_xx + u_yy, by derivatives of the network itself."""
    m, points = Field(), floats(n, 3)

    def loss(params: Any, points: jax.Array) -> jax.Array:
        u = partial(m.apply, params)

        def residual(point: jax.Array) -> jax.Array:
            second = jax.hessian(u)(point)
            return jax.grad(u)(point)[2] - second[0, 0] - second[1, 1]

        return jnp.mean(jax.vmap(residual)(points) ** 2)

    return step_of(loss, init_of(m, points), (points,))


MODELS: dict[str, tuple[Callable[[int], Step], int]] = {
    "ConvNeXt": (convnext, 64),
    "autoencoder": (vae, 64),
    "diffusion": (diffusion, 64),
    "PPO": (ppo, 4096),
    "language model": (partial(language, m=Language()), 8),
    "language model, nn.remat": (partial(language, m=Language(kept=False)), 8),
    "LoRA": (lora, 8),
    "microbatches": (microbatches, 16),
    "CLIP": (clip, 128),
    "Swin": (partial(images_of, Swin(), 256), 32),
    "Mixer": (partial(images_of, Mixer(), 256), 64),
    "batch norms": (normed, 16384),
    "WaveNet": (wavenet, 8),
    "tagger": (tagger, 128),
    "heat equation": (heat, 16384),
    "Llama": (partial(language, m=Llama()), 8),
    "Llama, rotated": (partial(language, m=Llama(heads=16, groups=16, rotary=rotated)), 8),
}
