"""Blocks are the layers of a model, found without names."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxauto.blocks import closure, find_blocks, phases
from jaxauto.graph import build
from jaxauto.trace import trace


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def graph_of(loss, *args):
    def step(params, *rest):
        value, grads = jax.value_and_grad(loss)(params, *rest)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return build(trace(step, args).jaxpr)


def normalize(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def attention(x, w, heads=4):
    batch, length, width = x.shape
    q, k, v = (a.reshape(batch, length, heads, -1) for a in jnp.split(x @ w["qkv"], 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(batch, length, width) @ w["out"]


def transformer_layer(x, w, key):
    x = x + attention(normalize(x), w)
    h = jax.nn.gelu(normalize(x) @ w["up"]) @ w["down"]
    return x + jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0.0)


def transformer(params, tokens, key):
    table = params["embedding"]
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params["layers"])  # all casts come first, as mixed precision does it
    x = table[tokens].astype(jnp.bfloat16)
    for w, one in zip(half, jax.random.split(key, len(half)), strict=True):
        x = transformer_layer(x, w, one)
    logits = normalize(x).astype(jnp.float32) @ table.T  # tied
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1).mean()


def transformer_args(layers, width=32, vocab=512):
    one = {"qkv": array(width, 3 * width), "out": array(width, width), "up": array(width, 4 * width), "down": array(4 * width, width)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    return {"embedding": array(vocab, width), "layers": [one] * layers}, array(2, 16, dtype=jnp.int32), key


def layers_of(blocks, prim, least):
    return [b for b in blocks if sum(node.prim == prim for node in b.forward) >= least]


def test_one_block_for_each_layer_of_a_transformer_loop():
    graph = graph_of(transformer, *transformer_args(12))
    blocks = find_blocks(graph)
    layers = layers_of(blocks, "dot_general", 6)
    assert len(layers) == 12
    assert len({b.name for b in blocks}) == len(blocks)
    assert {len(b.forward) for b in layers} == {len(layers[0].forward)}
    for block in layers:
        (output,) = block.outputs  # the residual stream
        assert graph.values[output].shape == (2, 16, 32)
        casts = [n for n in block.forward if n.prim == "convert_element_type" and set(n.inputs) & set(graph.inputs)]
        assert len(casts) == 4  # its own weights', although they stand at the beginning of the program
    head = blocks[-1]
    assert any(n.prim == "dot_general" for n in head.forward)
    assert sum(b.count for b in blocks) == len(blocks) <= 14


def test_blocks_partition_residuals():
    graph = graph_of(transformer, *transformer_args(3))
    blocks = find_blocks(graph)
    phase = phases(graph)
    made = [v for b in blocks for n in b.forward for v in n.outputs]
    assert len(made) == len(set(made))
    covered = {v for b in blocks for v in (*b.residuals, *b.outputs)}
    for value in graph.values.values():
        if value.producer is not None and phase.get(value.producer.id) == 0 and any(phase[u.id] == 1 for u in value.users):
            assert value.id in covered


def test_closure_reads_only_what_is_alive():
    graph = graph_of(transformer, *transformer_args(2))
    for block in find_blocks(graph):
        for kept in (set(), set(block.residuals[::2])):
            nodes, reads = closure(block, kept)
            made = {out for node in nodes for out in node.outputs}
            assert set(block.residuals) - kept <= made
            assert set(reads) <= {*block.inputs, *block.outputs, *kept}
            known = set(reads)
            for node in nodes:
                assert {x for x in node.inputs if isinstance(x, int)} <= known
                known |= set(node.outputs)
        assert closure(block, block.residuals) == ((), ())


def test_a_large_model_has_its_layers():
    graph = graph_of(transformer, *transformer_args(80))
    blocks = find_blocks(graph)
    assert len(layers_of(blocks, "dot_general", 6)) == 80


def test_one_block_for_each_layer_of_an_mlp():
    def loss(params, x):
        for w in params:
            x = jax.nn.relu(x @ w["kernel"] + w["bias"])
        return (x**2).sum()

    graph = graph_of(loss, [{"kernel": array(32, 32), "bias": array(32)}] * 6, array(8, 32))
    assert len(layers_of(find_blocks(graph), "dot_general", 1)) == 6


def convolve(x, kernel, stride=1):
    y = lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return (y - y.mean((0, 1, 2))) * lax.rsqrt(y.var((0, 1, 2)) + 1e-5)


def residual_net(params, x):
    for w in params:
        y = convolve(jax.nn.relu(convolve(x, w["first"], 2 if "skip" in w else 1)), w["second"])
        x = jax.nn.relu(y + (convolve(x, w["skip"], 2) if "skip" in w else x))
    return (x**2).mean()


def kernel(*shape):
    return array(3, 3, *shape)


def test_one_block_for_each_residual_block():
    widths = [8, 8, 8, 16, 16, 16, 32, 32, 32]
    params = []
    for before, after in zip([8, *widths[:-1]], widths, strict=True):
        skip = {"skip": kernel(before, after)} if before != after else {}
        params.append({"first": kernel(before, after), "second": kernel(after, after)} | skip)
    blocks = find_blocks(graph_of(residual_net, params, array(2, 32, 32, 8)))
    convolutions = [sum(n.prim == "conv_general_dilated" for n in b.forward) for b in blocks]
    assert [c for c in convolutions if c] == [2, 2, 2, 3, 2, 2, 3, 2, 2]


def u_net(params, x):
    skips = []
    for w in params["down"]:
        x = jax.nn.silu(convolve(jax.nn.silu(convolve(x, w["first"])), w["second"]))
        skips.append(x)
        x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    for w in params["up"]:
        x = jnp.concatenate([jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), skips.pop()], axis=-1)
        x = jax.nn.silu(convolve(jax.nn.silu(convolve(x, w["first"])), w["second"]))
    return (x**2).mean()


def test_skips_of_a_u_net_are_block_outputs():
    down = [{"first": kernel(a, b), "second": kernel(b, b)} for a, b in ((8, 8), (8, 16), (16, 32))]
    up = [{"first": kernel(a, b), "second": kernel(b, b)} for a, b in ((64, 16), (32, 8), (16, 8))]
    graph = graph_of(u_net, {"down": down, "up": up}, array(2, 32, 32, 8))
    blocks = find_blocks(graph)
    assert len(blocks) >= 4
    concatenated = {x for n in graph.nodes if n.prim == "concatenate" and not n.backward for x in n.inputs}
    for block in blocks:
        own = {out for n in block.forward for out in n.outputs}
        elsewhere = {v for v in concatenated & own if any(u not in block.forward and not u.backward for u in graph.values[v].users)}
        assert elsewhere <= set(block.outputs)


def stacked(layers, tree):
    return jax.tree.map(lambda a: array(layers, *a.shape), tree)


def scanned(params, tokens, key):
    x = params["embedding"][tokens]
    keys = jax.random.split(key, 5)
    x, _ = lax.scan(lambda c, wk: (transformer_layer(c, *wk), None), x, (params["layers"], keys))
    return ((x @ params["embedding"].T) ** 2).mean()


def scanned_args():
    params, tokens, key = transformer_args(1)
    return {"embedding": params["embedding"], "layers": stacked(5, params["layers"][0])}, tokens, key


def test_scan_pair_is_one_block_with_a_count():
    graph = graph_of(scanned, *scanned_args())
    (block,) = (b for b in find_blocks(graph) if b.scan)
    forward, backward = block.scan
    assert (block.count, forward.reverse, backward.reverse) == (5, False, True)
    assert block.forward == tuple(forward.bodies[0].nodes)
    stacks = dict(zip(forward.outputs[forward.num_carry :], forward.bodies[0].outputs[forward.num_carry :], strict=True))
    assert set(block.residuals) <= set(stacks.values())
    assert all(set(graph.values[y].users) == {backward} for y, v in stacks.items() if v in block.residuals)
    assert sum(graph.values[v].nbytes for v in block.residuals) > 0


def test_blocks_inside_gradient_accumulation():
    def step(params, batches, key):
        def one(total, tokens):
            return jax.tree.map(jnp.add, total, jax.grad(scanned)(params, tokens, key)), None

        return lax.scan(one, jax.tree.map(jnp.zeros_like, params), batches)[0]

    params, _, key = scanned_args()
    graph = build(trace(step, (params, array(3, 2, 16, dtype=jnp.int32), key)).jaxpr)
    (block,) = (b for b in find_blocks(graph) if b.scan)
    (outer,) = (n for n in graph.nodes if n.prim == "scan")
    assert block.graph is outer.bodies[0]
    assert block.count == 5


def test_result_of_the_step_is_not_dropped():
    def loss(params, x):
        hidden = jnp.sin(x @ params)
        return (jnp.sin(hidden) ** 2).sum(), hidden

    graph = build(trace(lambda p, x: jax.value_and_grad(loss, has_aux=True)(p, x), (array(8, 8), array(4, 8))).jaxpr)
    for block in find_blocks(graph):
        assert not set(block.residuals) & set(graph.outputs)


@pytest.mark.parametrize("microbatches", [2, 3])
def test_microbatches_in_a_python_loop(microbatches):
    """Forward and backward passes take turns: each forward pass has its own blocks."""

    def step(params, batches):
        total = jax.tree.map(jnp.zeros_like, params)
        for x in batches:
            total = jax.tree.map(jnp.add, total, jax.grad(residual_net)(params, x))
        return total

    params = [{"first": kernel(8, 8), "second": kernel(8, 8)}] * 3
    graph = build(trace(step, (params, [array(2, 8, 8, 8)] * microbatches)).jaxpr)
    blocks = find_blocks(graph)
    assert len([b for b in blocks if any(n.prim == "conv_general_dilated" for n in b.forward)]) == 3 * microbatches
    position = {n.id: k for k, n in enumerate(graph.nodes)}
    for block in blocks:
        places = [position[n.id] for n in block.forward]
        between = graph.nodes[min(places) : max(places)]
        assert not any(n.backward for n in between)
