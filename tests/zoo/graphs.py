"""A graph network by segment_sum, and a loss that needs a while loop and a cond."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zoo.common import floats, integers, mlp, mlp_params, regression_batch, sgd, sgd_step, weights

NODES, EDGES = 40, 96


def graph_segment_sum():
    """Two rounds of messages along 96 edges between 40 nodes, then one output for each of 4 graphs."""

    def loss_fn(params, batch):
        features, senders, receivers, membership, targets = batch
        x = features
        for kernels in params["rounds"]:
            messages = jax.nn.relu(jnp.concatenate([x[senders], x[receivers]], axis=-1) @ kernels["message"])
            gathered = jax.ops.segment_sum(messages, receivers, num_segments=NODES)
            x = x + jnp.tanh(gathered @ kernels["update"])
        pooled = jax.ops.segment_sum(x, membership, num_segments=4) / (NODES / 4)
        return jnp.mean((pooled @ params["head"] - targets) ** 2)

    rounds = [{"message": weights(32, 32, seed=80 + i), "update": weights(32, 16, seed=90 + i)} for i in range(2)]
    batch = (
        floats(NODES, 16, seed=81),
        integers(NODES, EDGES, seed=82),
        integers(NODES, EDGES, seed=83),
        jnp.arange(NODES) // (NODES // 4),
        floats(4, 8, seed=84),
    )
    return sgd_step(loss_fn), ({"rounds": rounds, "head": weights(16, 8, seed=85)}, batch)


def control_flow():
    """A cond on a traced value inside the loss, and a while loop that halves the rate until the step is short enough."""

    def loss_fn(params, batch):
        error = mlp(params, batch[0]) - batch[1]
        return jax.lax.cond(jnp.max(jnp.abs(error)) > 1.0, lambda e: jnp.mean(jnp.abs(e)), lambda e: jnp.mean(e * e), error)

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        rate = jax.lax.while_loop(lambda r: r * norm > 0.05, lambda r: r / 2, jnp.float32(0.4))
        return sgd(params, grads, rate), {"loss": loss, "rate": rate}

    return step, (mlp_params(), regression_batch())


STEPS = {factory.__name__: factory for factory in (graph_segment_sum, control_flow)}
