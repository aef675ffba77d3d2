"""One small model under optax's optimizers: chains, schedules, accumulation, factored moments, masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from zoo.common import mlp_loss, mlp_params, regression_batch


def with_optimizer(optimizer):
    """``step(state, batch)`` with state ``{"params", "optimizer"}``."""

    def step(state, batch):
        loss, grads = jax.value_and_grad(mlp_loss)(state["params"], batch)
        updates, moments = optimizer.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, {"loss": loss}

    params = mlp_params()
    return step, ({"params": params, "optimizer": optimizer.init(params)}, regression_batch())


def adamw_clip_schedule():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=2, decay_steps=10)
    return with_optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)))


def multi_steps():
    """Two mini-steps for each update: a cond-like select over the whole state."""
    return with_optimizer(optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2))


def adafactor():
    """Second moments factored into rows and columns: state of other shapes than the parameters."""
    return with_optimizer(optax.adafactor(1e-2, min_dim_size_to_factor=16))


def masked_decay():
    """Decay for kernels only; biases keep a plain optimizer (MaskedNode leaves nothing behind)."""
    params = mlp_params()
    kernels = jax.tree.map(lambda p: p.ndim > 1, params)
    return with_optimizer(optax.chain(optax.masked(optax.add_decayed_weights(1e-2), kernels), optax.sgd(0.1, momentum=0.9)))


def partitioned_optimizer():
    """Kernels under Nesterov momentum, biases frozen."""
    labels = jax.tree.map(lambda p: "kernels" if p.ndim > 1 else "frozen", mlp_params())
    transforms = {"kernels": optax.sgd(0.1, nesterov=True, momentum=0.9), "frozen": optax.set_to_zero()}
    return with_optimizer(optax.multi_transform(transforms, labels))


def exponential_average():
    """Adam in bfloat16 moments, with an average of the parameters beside it."""
    inner = optax.adam(1e-2, mu_dtype=jnp.bfloat16)
    average = optax.ema(0.9)

    def step(state, batch):
        loss, grads = jax.value_and_grad(mlp_loss)(state["params"], batch)
        updates, moments = inner.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        _, averaged = average.update(params, state["average"])
        return {"params": params, "optimizer": moments, "average": averaged}, {"loss": loss}

    params = mlp_params()
    return step, ({"params": params, "optimizer": inner.init(params), "average": average.init(params)}, regression_batch())


STEPS = {
    factory.__name__: factory
    for factory in (
        adamw_clip_schedule,
        multi_steps,
        adafactor,
        masked_decay,
        partitioned_optimizer,
        exponential_average,
    )
}
