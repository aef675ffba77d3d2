"""flax nnx: the state split off and merged inside the step, and modules and optimizers handed to the step as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from zoo.common import LENGTH, VOCAB, cross_entropy, mlp_loss, next_token_batch, regression_batch


class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, use_bias=False, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Transformer(nnx.Module):
    def __init__(self, layers, rngs):
        self.embed = nnx.Embed(VOCAB, 32, rngs=rngs)
        self.position = nnx.Param(0.1 * jax.random.normal(rngs.params(), (LENGTH, 32)))
        self.blocks = nnx.List([Block(32, 4, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(32, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class Regressor(nnx.Module):
    """The parameters of ``common.mlp``, as modules."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(32, 64, rngs=rngs)
        self.out = nnx.Linear(64, 8, rngs=rngs)

    def loss(self, batch):
        params = {name: {"kernel": layer.kernel[...], "bias": layer.bias[...]} for name, layer in (("in", self.hidden), ("out", self.out))}
        return mlp_loss(params, batch)


def optimizer():
    """With an epsilon at which Adam does not divide the rounding noise of small gradients by itself."""
    return optax.adamw(3e-3, eps=1e-2)


def nnx_split_merge():
    """``step(state, batch)``: state is (parameters, everything else with the dropout keys, optimizer state)."""
    transform = optimizer()
    definition, params, rest = nnx.split(Transformer(2, nnx.Rngs(0)), nnx.Param, ...)

    def step(state, batch):
        params, rest, moments = state

        def loss_fn(params):
            model = nnx.merge(definition, params, rest, copy=True)
            loss = cross_entropy(model(batch[0]), batch[1])
            return loss, nnx.state(model, nnx.Not(nnx.Param))

        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, moments = transform.update(grads, moments, params)
        return (optax.apply_updates(params, updates), rest, moments), {"loss": loss}

    return step, ((params, rest, transform.init(params)), next_token_batch())


def nnx_returned():
    """The module and its optimizer are arguments (nnx modules are pytrees); the step changes its copies and returns them."""

    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: model.loss(batch))(model)
        optimizer.update(model, grads)
        return model, optimizer, {"loss": loss}

    model = Regressor(nnx.Rngs(0))
    return step, (model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param), regression_batch())


def nnx_state_tuple():
    """One argument, (module, optimizer), with a transformer and its dropout."""

    def step(state, batch):
        model, optimizer = state
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch[0]), batch[1]))(model)
        optimizer.update(model, grads)
        return (model, optimizer), {"loss": loss}

    model = Transformer(1, nnx.Rngs(0))
    return step, ((model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param)), next_token_batch())


def nnx_mutated():
    """The step changes its arguments in place and returns metrics only, as under nnx.jit; jax.jit would lose the changes."""

    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: model.loss(batch))(model)
        optimizer.update(model, grads)
        return {"loss": loss, "largest": jnp.max(jnp.abs(model.out.kernel[...]))}

    model = Regressor(nnx.Rngs(0))
    return step, (model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param), regression_batch())


def nnx_mutated_transformer():
    """As nnx_mutated, with dropout: the keys inside the module change too."""

    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch[0]), batch[1]))(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    model = Transformer(1, nnx.Rngs(0))
    return step, (model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param), next_token_batch())


STEPS = {factory.__name__: factory for factory in (nnx_split_merge, nnx_returned, nnx_state_tuple)}
MUTATING_STEPS = {factory.__name__: factory for factory in (nnx_mutated, nnx_mutated_transformer)}
