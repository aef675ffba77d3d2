"""Train steps of many kinds to benchmark a planner with: plain JAX, AdamW, float32 parameters, bfloat16 compute, abstract arguments.

``MODELS[family][size]()`` is ``(step, (params, moments, batch))``. Sizes: "small" compiles in seconds; "medium" is a
model as published or near it; "tight", where the medium one would fit, has a batch so large that an eighth of the activations still exceeds
16 GiB: something must be recomputed; "8b" is Llama 3 8B.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from bench_vision import (
    COMPUTE,
    VISION,
    abstract,
    attend,
    attention_params,
    cross_entropy,
    dense,
    dense_params,
    floats,
    ints,
    layer_norm,
    norm_params,
    repeated,
    run_layers,
    train_step,
    weight,
)
from layouts import put
from models import GPT, LLAMA, Decoder, rms_norm, step_and_args

# ------------------------------------------------------------------------------------------------------------- encoder


def encoder(config: Decoder) -> tuple[Callable, tuple]:
    """BERT (arXiv 1810.04805): bidirectional, post-norm, loss of the masked tokens; the batch has a padding and a loss mask."""
    c = config

    def layer() -> dict:
        norms = {"norm1": norm_params(c.width), "norm2": norm_params(c.width)}
        return {**norms, "attention": attention_params(c), "mlp": dense_params(c.width, c.hidden, c.width)}

    def init() -> dict:
        return {
            "embed": weight(c.vocab, c.width, fan=c.width),
            "position": weight(c.length, c.width, fan=c.width),
            "norm": norm_params(c.width),
            "layers": repeated(layer, c),
            "transform": dense_params(c.width, c.width),
            "head_norm": norm_params(c.width),
            "head_bias": jnp.zeros((c.vocab,)),
        }

    def loss_fn(params: dict, tokens: jax.Array, real: jax.Array, labels: jax.Array, masked: jax.Array) -> jax.Array:
        def block(layer: dict, x: jax.Array) -> jax.Array:
            with jax.named_scope("attention"):
                x = layer_norm(x + attend(layer["attention"], x, x, real[:, None, None, :]), layer["norm1"])
            with jax.named_scope("mlp"):
                return layer_norm(x + dense(layer["mlp"], x), layer["norm2"])

        with jax.named_scope("embed"):
            embed = params["embed"].astype(COMPUTE)
            x = layer_norm(embed[tokens] + params["position"].astype(COMPUTE), params["norm"])
        x = run_layers(block, params["layers"], x)
        with jax.named_scope("head"):
            x = layer_norm(jax.nn.gelu(dense(params["transform"], x)), params["head_norm"])
            logits = jnp.einsum("bld,vd->blv", x, embed) + params["head_bias"].astype(COMPUTE)
            return cross_entropy(logits, labels, masked.astype(jnp.float32))

    tokens, mask = ints(c.batch, c.length), jax.ShapeDtypeStruct((c.batch, c.length), jnp.bool_)
    return train_step(loss_fn), abstract(init, (tokens, mask, tokens, mask))


# --------------------------------------------------------------------------------------------------- mixture of experts


def routes(scores: jax.Array, choices: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Where each token goes (arXiv 2006.16668, algorithm 1).

    Args:
        scores: (batch, length, experts), float32, each token's sum is 1.
        choices: experts per token.
        capacity: tokens an expert takes from one sequence; those beyond are dropped.

    Returns:
        The weights (batch, length, experts, capacity), zero where a token does not go, and the loss that balances the load.
    """
    experts = scores.shape[-1]
    gates, chosen = jax.lax.top_k(scores, choices)
    gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    combine, taken = jnp.zeros((*scores.shape, capacity), COMPUTE), jnp.zeros((scores.shape[0], 1, experts))
    for choice in range(choices):
        picked = jax.nn.one_hot(chosen[..., choice], experts)
        position = jnp.sum((jnp.cumsum(picked, axis=1) - 1 + taken) * picked, axis=-1).astype(jnp.int32)
        slot = jax.nn.one_hot(position, capacity, dtype=COMPUTE)  # all zero beyond the capacity
        gated = (gates[..., choice, None] * picked).astype(COMPUTE)
        combine = combine + gated[..., None] * slot[..., None, :]
        taken = taken + jnp.sum(picked, axis=1, keepdims=True)
    first = jax.nn.one_hot(chosen[..., 0], experts)
    return combine, experts * jnp.sum(jnp.mean(first, axis=(0, 1)) * jnp.mean(scores, axis=(0, 1)))


def moe(config: Decoder, experts: int = 8, choices: int = 2) -> tuple[Callable, tuple]:
    """Decoder whose MLPs are experts with a capacity, reached by one-hot einsums."""
    c, capacity = config, config.length * choices * 5 // (4 * experts)

    def layer() -> dict:
        return {
            "attention_norm": jnp.ones((c.width,)),
            "attention": attention_params(c),
            "mlp_norm": jnp.ones((c.width,)),
            "router": weight(c.width, experts),
            "up": weight(experts, c.width, c.hidden, fan=c.width),
            "down": weight(experts, c.hidden, c.width, fan=c.hidden),
        }

    def init() -> dict:
        head = weight(c.width, c.vocab)
        return {"embed": weight(c.vocab, c.width), "layers": repeated(layer, c), "norm": jnp.ones((c.width,)), "head": head}

    def expert_mlp(layer: dict, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jax.nn.softmax(x.astype(jnp.float32) @ layer["router"], axis=-1)
        combine, balance = routes(scores, choices, capacity)
        sent = put(jnp.einsum("blec,bld->ebcd", (combine > 0).astype(x.dtype), x), "expert groups capacity features")
        hidden = jax.nn.silu(jnp.einsum("ebcd,edh->ebch", sent, layer["up"].astype(x.dtype)))
        hidden = put(hidden, "expert groups capacity hidden")
        back = put(jnp.einsum("ebch,ehd->ebcd", hidden, layer["down"].astype(x.dtype)), "expert groups capacity features")
        return put(jnp.einsum("blec,ebcd->bld", combine, back), "batch sequence width", "mlp"), balance

    def block(layer: dict, carry: tuple) -> tuple:
        x, total = carry
        with jax.named_scope("attention"):
            normed = put(rms_norm(x, layer["attention_norm"]), "batch length features")
            mixed = attend(layer["attention"], normed, normed, jnp.tril(jnp.ones((c.length, c.length), bool)))
            x = put(x + mixed, "batch sequence width")
        with jax.named_scope("mlp"):
            y, balance = expert_mlp(layer, put(rms_norm(x, layer["mlp_norm"]), "batch length features"))
        return put(x + y, "batch sequence width"), total + balance

    def loss_fn(params: dict, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            x = params["embed"].astype(COMPUTE)[tokens]
        x, balance = run_layers(block, params["layers"], (x, jnp.zeros(())))
        with jax.named_scope("head"):
            logits = rms_norm(x, params["norm"]) @ params["head"].astype(COMPUTE)
            return cross_entropy(logits, labels) + 0.01 * balance

    return train_step(loss_fn), abstract(init, (ints(c.batch, c.length),) * 2)


# ----------------------------------------------------------------------------------------------------------- recurrent


def ssm(config: Decoder) -> tuple[Callable, tuple]:
    """Gated linear recurrence with decays that depend on the input, ``hidden`` states; a short causal convolution before it."""
    c, window = config, 4

    def layer() -> dict:
        inward = {name: weight(c.width, c.hidden) for name in ("input", "gate", "decay")}
        return {"norm": jnp.ones((c.width,)), **inward, "conv": weight(window, 1, c.hidden), "out": weight(c.hidden, c.width)}

    def init() -> dict:
        head = weight(c.width, c.vocab)
        return {"embed": weight(c.vocab, c.width), "layers": repeated(layer, c), "norm": jnp.ones((c.width,)), "head": head}

    def after(left: tuple, right: tuple) -> tuple:
        return left[0] * right[0], left[1] * right[0] + right[1]

    def block(layer: dict, x: jax.Array) -> jax.Array:
        with jax.named_scope("project"):
            normed = rms_norm(x, layer["norm"])
            u, gate, decay = (normed @ layer[name].astype(x.dtype) for name in ("input", "gate", "decay"))
        with jax.named_scope("conv"):
            layout = ("NWC", "WIO", "NWC")
            kernel = layer["conv"].astype(x.dtype)
            u = jax.lax.conv_general_dilated(u, kernel, (1,), [(window - 1, 0)], dimension_numbers=layout, feature_group_count=c.hidden)
        with jax.named_scope("recurrence"):
            keep = jax.nn.sigmoid(decay.astype(jnp.float32))
            _, state = jax.lax.associative_scan(after, (keep, (1 - keep) * jax.nn.silu(u.astype(jnp.float32))), axis=1)
        with jax.named_scope("out"):
            return x + (state.astype(x.dtype) * jax.nn.silu(gate)) @ layer["out"].astype(x.dtype)

    def loss_fn(params: dict, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            x = params["embed"].astype(COMPUTE)[tokens]
        x = run_layers(block, params["layers"], x)
        with jax.named_scope("head"):
            return cross_entropy(rms_norm(x, params["norm"]) @ params["head"].astype(COMPUTE), labels)

    return train_step(loss_fn), abstract(init, (ints(c.batch, c.length),) * 2)


def lstm(width: int, vocab: int, batch: int, length: int, layers: int = 2) -> tuple[Callable, tuple]:
    """Language model of LSTM layers, each one ``lax.scan`` over time; the cell state is float32."""

    def layer() -> dict:
        return {"input": weight(width, 4, width), "hidden": weight(width, 4, width), "bias": jnp.zeros((4, width))}

    def init() -> dict:
        return {"embed": weight(vocab, width), "layers": [layer() for _ in range(layers)], "head": weight(width, vocab)}

    def recur(layer: dict, x: jax.Array) -> jax.Array:
        projected = jnp.einsum("tbd,dgk->tbgk", x, layer["input"].astype(x.dtype)) + layer["bias"].astype(x.dtype)
        kernel = layer["hidden"].astype(x.dtype)

        def cell(carry: tuple, now: jax.Array) -> tuple:
            h, memory = carry
            gates = (now + jnp.einsum("bd,dgk->bgk", h, kernel)).astype(jnp.float32)
            enter, forget, leave = (jax.nn.sigmoid(gates[:, gate]) for gate in range(3))
            memory = forget * memory + enter * jnp.tanh(gates[:, 3])
            h = (leave * jnp.tanh(memory)).astype(x.dtype)
            return (h, memory), h

        zero = jnp.zeros((batch, width), x.dtype)
        return jax.lax.scan(cell, (zero, zero.astype(jnp.float32)), projected)[1]

    def loss_fn(params: dict, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            x = params["embed"].astype(COMPUTE)[tokens.T]
        x = run_layers(recur, params["layers"], x)
        with jax.named_scope("head"):
            return cross_entropy(x @ params["head"].astype(COMPUTE), labels.T)

    return train_step(loss_fn), abstract(init, (ints(batch, length),) * 2)


# --------------------------------------------------------------------------------------------- graph, speech, clicks


def gnn(nodes: int, edges: int, width: int, hidden: int, rounds: int = 4) -> tuple[Callable, tuple]:
    """Message passing: edges gather their two nodes, nodes sum their incoming edges; each node is classified."""
    features, classes = 64, 64

    def one_round() -> dict:
        return {
            "edge_norm": norm_params(width),
            "edge": dense_params(3 * width, hidden, width),
            "node_norm": norm_params(width),
            "node": dense_params(2 * width, hidden, width),
        }

    def init() -> dict:
        ends = {"nodes": dense_params(features, width), "edges": dense_params(features, width), "head": dense_params(width, classes)}
        return {**ends, "rounds": [one_round() for _ in range(rounds)]}

    def block(layer: dict, carry: tuple) -> tuple:
        node, edge, senders, receivers = carry
        with jax.named_scope("edge"):
            message = dense(layer["edge"], jnp.concatenate([edge, node[senders], node[receivers]], axis=-1), jax.nn.silu)
            edge = edge + layer_norm(message, layer["edge_norm"])
        with jax.named_scope("node"):
            total = jax.ops.segment_sum(edge.astype(jnp.float32), receivers, num_segments=nodes).astype(COMPUTE)
            update = dense(layer["node"], jnp.concatenate([node, total], axis=-1), jax.nn.silu)
            node = node + layer_norm(update, layer["node_norm"])
        return node, edge, senders, receivers

    def loss_fn(params: dict, node: jax.Array, edge: jax.Array, senders: jax.Array, receivers: jax.Array, labels: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            node, edge = dense(params["nodes"], node.astype(COMPUTE)), dense(params["edges"], edge.astype(COMPUTE))
        node, *_ = run_layers(block, params["rounds"], (node, edge, senders, receivers))
        with jax.named_scope("head"):
            return cross_entropy(dense(params["head"], node), labels)

    return train_step(loss_fn), abstract(init, (floats(nodes, features), floats(edges, features), ints(edges), ints(edges), ints(nodes)))


def encoder_decoder(config: Decoder, frames: int, mels: int = 80) -> tuple[Callable, tuple]:
    """Speech to text (arXiv 2212.04356): two convolutions, ``layers`` encoder layers over half the frames and as many decoder layers."""
    c = config

    def layer(*attentions: str) -> dict:
        parts = {name: {"norm": norm_params(c.width), **attention_params(c)} for name in attentions}
        return {**parts, "mlp_norm": norm_params(c.width), "mlp": dense_params(c.width, c.hidden, c.width)}

    def init() -> dict:
        return {
            "conv1": weight(3, mels, c.width, fan=3 * mels),
            "conv2": weight(3, c.width, c.width, fan=3 * c.width),
            "frame_position": weight(frames // 2, c.width, fan=c.width),
            "encoder": repeated(lambda: layer("self"), c),
            "encoder_norm": norm_params(c.width),
            "embed": weight(c.vocab, c.width, fan=c.width),
            "position": weight(c.length, c.width, fan=c.width),
            "decoder": repeated(lambda: layer("self", "cross"), c),
            "decoder_norm": norm_params(c.width),
        }

    def listen(params: dict, mel: jax.Array) -> jax.Array:
        x, layout = mel.astype(COMPUTE), ("NWC", "WIO", "NWC")
        for name, stride in (("conv1", 1), ("conv2", 2)):
            x = jax.nn.gelu(jax.lax.conv_general_dilated(x, params[name].astype(COMPUTE), (stride,), "SAME", dimension_numbers=layout))
        return x + params["frame_position"].astype(COMPUTE)

    def block(layer: dict, x: jax.Array, memory: jax.Array | None, mask: jax.Array | None) -> jax.Array:
        with jax.named_scope("attention"):
            normed = layer_norm(x, layer["self"]["norm"])
            x = x + attend(layer["self"], normed, normed, mask)
        if memory is not None:
            with jax.named_scope("cross_attention"):
                x = x + attend(layer["cross"], layer_norm(x, layer["cross"]["norm"]), memory)
        with jax.named_scope("mlp"):
            return x + dense(layer["mlp"], layer_norm(x, layer["mlp_norm"]))

    def loss_fn(params: dict, mel: jax.Array, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        with jax.named_scope("encoder"):
            x = run_layers(lambda layer, x: block(layer, x, None, None), params["encoder"], listen(params, mel))
            memory = layer_norm(x, params["encoder_norm"])
        with jax.named_scope("decoder"):
            embed, causal = params["embed"].astype(COMPUTE), jnp.tril(jnp.ones((c.length, c.length), bool))
            x = embed[tokens] + params["position"].astype(COMPUTE)
            x = run_layers(lambda layer, x: block(layer, x, memory, causal), params["decoder"], x)
        with jax.named_scope("head"):
            return cross_entropy(jnp.einsum("bld,vd->blv", layer_norm(x, params["decoder_norm"]), embed), labels)

    tokens = ints(c.batch, c.length)
    return train_step(loss_fn), abstract(init, (floats(c.batch, frames, mels), tokens, tokens))


def dlrm(rows: int, width: int, batch: int, hidden: int, tables: int = 8) -> tuple[Callable, tuple]:
    """Clicks (arXiv 1906.00091): embedding tables of ``rows`` each, products of all pairs of features, two MLPs."""
    numbers, pairs = 16, tables * (tables + 1) // 2

    def init() -> dict:
        embeddings = [weight(rows, width, fan=width) for _ in range(tables)]
        top = dense_params(pairs + width, hidden, hidden, hidden // 2, 1)
        return {"tables": embeddings, "bottom": dense_params(numbers, hidden, hidden // 2, width), "top": top}

    def loss_fn(params: dict, values: jax.Array, ids: jax.Array, clicked: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            looked_up = [table[ids[:, number]].astype(COMPUTE) for number, table in enumerate(params["tables"])]
        with jax.named_scope("bottom/mlp"):
            bottom = dense(params["bottom"], values.astype(COMPUTE), jax.nn.relu)
        with jax.named_scope("interaction"):
            vectors = jnp.stack([bottom, *looked_up], axis=1)
            left, right = jnp.triu_indices(tables + 1, 1)
            products = jnp.einsum("bfd,bgd->bfg", vectors, vectors)[:, left, right]
        with jax.named_scope("top/mlp"):
            logits = dense(params["top"], jnp.concatenate([bottom, products], axis=-1), jax.nn.relu)[:, 0].astype(jnp.float32)
        with jax.named_scope("head"):
            return jnp.mean(jax.nn.softplus(logits) - clicked * logits)

    return train_step(loss_fn), abstract(init, (floats(batch, numbers), ints(batch, tables), floats(batch)))


# -------------------------------------------------------------------------------------------------------------- the zoo

SMALL = GPT["small"].with_(vocab=2048)
MEDIUM = Decoder(12, 1536, 16, 4, 6144, 32768, batch=32, length=1024)
THIN = Decoder(2, 128, 4, 4, 512, 1024, batch=8, length=64)
WIDE = Decoder(12, 1024, 16, 16, 4096, 32768, batch=128, length=512)

MODELS: dict[str, dict[str, Callable[[], tuple[Callable, tuple]]]] = {
    "decoder scan": {
        "small": partial(step_and_args, SMALL),
        "medium": partial(step_and_args, MEDIUM),
        "tight": partial(step_and_args, MEDIUM.with_(batch=64)),
        "8b": partial(step_and_args, LLAMA["8b"].with_(batch=16, length=2048)),
    },
    "decoder unrolled": {
        "small": partial(step_and_args, SMALL.with_(scan=False)),
        "medium": partial(step_and_args, MEDIUM.with_(scan=False, layers=8)),
        "tight": partial(step_and_args, MEDIUM.with_(scan=False, layers=8, batch=128)),
    },
    "encoder": {"small": partial(encoder, THIN.with_(scan=False)), "medium": partial(encoder, WIDE.with_(batch=192))},
    **VISION,
    "moe": {"small": partial(moe, THIN), "medium": partial(moe, WIDE.with_(layers=8, hidden=3584, batch=64, length=1024))},
    "ssm": {"small": partial(ssm, THIN.with_(hidden=256)), "medium": partial(ssm, WIDE.with_(hidden=2048, length=768))},
    "lstm": {"small": partial(lstm, 128, 1024, 8, 32), "medium": partial(lstm, 2048, 32768, 768, 512)},
    "gnn": {
        "small": partial(gnn, 256, 1024, 64, 128, 2),
        "medium": partial(gnn, 65536, 524288, 256, 1024),
        "tight": partial(gnn, 786432, 6291456, 256, 1024),
    },
    "encoder-decoder": {
        "small": partial(encoder_decoder, THIN.with_(scan=False), 128),
        "medium": partial(encoder_decoder, WIDE.with_(scan=False, layers=6, vocab=51968, length=448), 1536),
    },
    "dlrm": {"small": partial(dlrm, 1024, 64, 64, 128), "medium": partial(dlrm, 524288, 64, 2097152, 4096)},
}
