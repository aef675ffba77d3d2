"""What XLA:CPU writes: types, copies for dots, arrays for reductions; and the memory of whole steps against what it allocates."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxauto
from jaxauto.cost.widened import beside_dots, is_merged, order
from jaxauto.verify import compile_ahead

from .test_fusion import buffers_of, made_by

WIDTH = 64
NARROW = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
WIDE = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)


def size_of(fn, prim, *args):
    """Bytes for each element of the buffer of what the first equation of a kind makes."""
    graph, buffers = buffers_of(fn, *args, platform="cpu")
    made = next(n.outputs[0] for n in graph.nodes if n.prim == prim)
    (bytes_,) = buffers.bytes_[buffers.ids == made].tolist()
    return bytes_ / graph.values[made].elements


@pytest.mark.parametrize(
    ("fn", "prim", "bytes_"),
    [
        (lambda x: jnp.tanh(x @ x) @ x, "tanh", 4),  # nothing but the copy that the dot reads
        (lambda x: (lambda h: (h @ x) * h)(jnp.tanh(x @ x)), "tanh", 2),  # kept rounded
        (lambda x: (lambda h: (h @ x, 2 * h.astype(jnp.float32)))(jnp.tanh(x @ x)), "tanh", 4),  # as it was made: it is widened
        (lambda x: jnp.tanh(x @ x), "dot_general", 4),  # rounded by the one that reads it
        (lambda x: (lambda h: jnp.tanh(h) @ h)(x @ x), "dot_general", 2),
        (lambda x: jnp.exp((x @ x).astype(jnp.float32)), "dot_general", 4),
    ],
)
def test_types(fn, prim, bytes_):
    assert size_of(fn, prim, NARROW) == bytes_


def test_random_bits_are_two_words():
    def fn(seed, x):
        kept = jax.random.bernoulli(jax.random.key(seed), 0.5, x.shape)
        return jnp.where(kept, x, 0) @ jnp.where(kept, 1, x)

    assert size_of(fn, "random_bits", jax.ShapeDtypeStruct((), jnp.int32), WIDE) == 8


@pytest.mark.parametrize(("elements", "platform", "written"), [(64, "cpu", True), (32, "cpu", False), (64, "tpu", False)])
def test_a_long_reduction_reads_an_array(elements, platform, written):
    rows = jax.ShapeDtypeStruct((WIDTH, elements), jnp.float32)
    graph, buffers = buffers_of(lambda x: jnp.sum(x * 2 + 1, axis=1), rows, platform=platform)
    assert ("add" in made_by(graph, buffers)) == written
    for number, start, end in zip(buffers.ids, buffers.start, buffers.end, strict=True):
        producer = graph.values[int(number)].producer
        assert producer is None or producer.prim != "add" or start == end, "while it runs"


@pytest.mark.parametrize(
    ("equation", "shapes", "orders"),
    [
        ("ij,jk->ik", ((4, 5), (5, 6)), ((), ())),
        ("ji,jk->ik", ((5, 4), (5, 6)), ((), ())),  # a matrix's rows and columns, in any order
        ("aij,jk->aik", ((2, 4, 5), (5, 6)), ((), ())),
        ("aij,aik->jk", ((2, 4, 5), (2, 4, 6)), ((2, 0, 1), ())),  # a gradient of weights
        ("bij,bkj->bik", ((2, 4, 5), (2, 6, 5)), ((), (0, 2, 1))),
        ("bij,bjk->bik", ((1, 4, 5), (1, 5, 6)), ((), ())),
        ("aij,aik->jk", ((1, 4, 5), (1, 4, 6)), ((2, 1), ())),
    ],
)
def test_orders(equation, shapes, orders):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    graph, _ = buffers_of(lambda x, y: jnp.einsum(equation, x, y), *args, platform="cpu")
    node = next(n for n in graph.nodes if n.prim == "dot_general")
    straight = node.eqn.invars[0].aval.shape == shapes[0]  # einsum swaps some
    assert tuple(order(node, k) for k in (range(2) if straight else (1, 0))) == orders


ROWS = jax.ShapeDtypeStruct((4, 32, WIDTH), jnp.float32)


@pytest.mark.parametrize(("made", "again"), [(jax.nn.relu, True), (jnp.tanh, False)])
def test_what_is_cheap_is_made_again_for_a_dot_that_wants_another_order(made, again):
    def fn(x, w):
        h = made(x @ w)
        straight = h @ w
        return jnp.einsum("abi,abj->ij", h, jnp.sin(straight))

    graph, buffers = buffers_of(fn, ROWS, WIDE, platform="cpu")
    dots = [n for n in graph.nodes if n.prim == "dot_general"]
    value = dots[1].inputs[0]
    ends = dict(zip(buffers.ids.tolist(), buffers.end.tolist(), strict=True))
    straight, turned = (buffers.position[dot.id] for dot in dots[1:])
    assert ends[value] == (straight if again else turned)
    assert (ends[dots[0].outputs[0]] >= turned) == again, "what it is made of is read then"


@pytest.mark.parametrize(("make", "copies"), [(lambda x: 2 * x, 0), (lambda x: x, 1)])
def test_what_dots_alone_read_is_written_in_their_order(make, copies):
    graph, buffers = buffers_of(lambda x, y: jnp.einsum("abi,abj->ij", make(x), y), ROWS, ROWS, platform="cpu")
    dots = [n for n in graph.nodes if n.prim == "dot_general"]
    found, _ = beside_dots(dots, graph.values, buffers, lambda x: x)
    assert len(found) == copies


@pytest.mark.parametrize(("rows", "taken"), [((8, 16), False), ((128,), True)])
def test_a_dot_with_several_dimensions_left_is_written_with_one(rows, taken):
    """What is made of it has all of them, and is no array of its form: it cannot take its place."""
    x, w = jax.ShapeDtypeStruct((*rows, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    graph, buffers = buffers_of(lambda x, w: jnp.tanh(x @ w) @ w, x, w, platform="cpu")
    (dot,) = (node.outputs[0] for node in graph.nodes if node.prim == "dot_general" and node.outputs[0] not in graph.outputs)
    (tanh,) = (node.id for node in graph.nodes if node.prim == "tanh")
    end = int(buffers.end[buffers.ids == dot][0])
    assert end == buffers.position[tanh] - taken
    assert is_merged(graph.values[dot]) != taken


@pytest.mark.parametrize(("other", "kept"), [(lambda h: h**3, True), (jnp.sin, False)])
def test_a_square_is_kept_for_a_cube_of_the_same(other, kept):
    def fn(x):
        h = x @ x
        return other(h) @ x, jnp.sum((3 * h**2).astype(jnp.float32))  # and its derivative

    graph, buffers = buffers_of(fn, NARROW, platform="cpu")
    squares = [n.outputs[0] for n in graph.nodes if n.prim in ("integer_pow", "square") and n.params.get("y", 2) == 2]
    assert (squares[-1] in buffers.ids.tolist()) == kept


def step_of(loss):
    optimizer = optax.adamw(1e-3)

    def step(params, state, x, seed):
        value, gradients = jax.value_and_grad(loss)(params, x, seed)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def make(shapes):
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        return step, (params, jax.eval_shape(optimizer.init, params))

    return make


def gated(params, x, seed):
    x, up, down = x.astype(jnp.bfloat16), params["up"].astype(jnp.bfloat16), params["down"].astype(jnp.bfloat16)
    kept = jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape)
    return jnp.mean(jnp.where(kept, jax.nn.gelu(x @ up) @ down, 0).astype(jnp.float32) ** 2)


def attention(params, x, seed):
    del seed
    query, key, value = (jnp.einsum("bld,dhk->blhk", x.astype(jnp.bfloat16), params[n].astype(jnp.bfloat16)) for n in ("up", "down", "out"))
    weights = jax.nn.softmax(jnp.einsum("blhk,bmhk->bhlm", query, key).astype(jnp.float32)).astype(jnp.bfloat16)
    return jnp.mean(jnp.einsum("bhlm,bmhk->blhk", weights, value).astype(jnp.float32) ** 2)


# 8 % low there; strict: once it is told, the mark goes.
LATE_LOSS = pytest.mark.xfail(
    jax.__version_info__ >= (0, 12),
    reason="that compiler has the loss at the end, and the random bits that it reads lie there until then",
    strict=True,
)


@pytest.mark.parametrize(
    ("loss", "shapes", "x"),
    [
        pytest.param(gated, {"up": (256, 1024), "down": (1024, 256)}, (16, 128, 256), marks=LATE_LOSS),
        (attention, dict.fromkeys(("up", "down", "out"), (128, 4, 64)), (8, 256, 128)),
    ],
)
def test_steps_take_what_they_are_told_to(loss, shapes, x):
    step, state = step_of(loss)(shapes)
    args = *state, jax.ShapeDtypeStruct(x, jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    plan = jaxauto.plan(step, *args, target="cpu:1", remat="off", memory_budget=2**40, certify=False)
    memory = compile_ahead(plan, 300).memory
    compiled = memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]
    assert plan.estimate.peak_memory == pytest.approx(compiled, rel=0.08)


def residual_network(params, x, seed):
    """Four residual convolutions, each normed over the batch: what the norms' gradients sum is as large as what the convolutions read."""
    del seed
    x = jax.lax.conv_general_dilated(x, params["stem"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")).astype(jnp.bfloat16)
    for weight, scale in zip(params["weights"], params["scales"], strict=True):
        y = jax.lax.conv_general_dilated(x, weight.astype(jnp.bfloat16), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = y.astype(jnp.float32)
        mean, square = jnp.mean(y, (0, 1, 2), keepdims=True), jnp.mean(y * y, (0, 1, 2), keepdims=True)
        y = (y - mean) * jax.lax.rsqrt(square - mean * mean + 1e-5) * scale
        x = jax.nn.relu(x + y.astype(jnp.bfloat16))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def test_what_a_norms_gradient_sums_goes_before_the_next_block_is_made_again():
    step, _ = step_of(residual_network)({})
    shapes = {"stem": (3, 3, 3, 64), "weights": [(3, 3, 64, 64)] * 4, "scales": [(64,)] * 4}
    params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))
    args = params, jax.eval_shape(optax.adamw(1e-3).init, params), jax.ShapeDtypeStruct((16, 64, 64, 3), jnp.float32)
    args = *args, jax.ShapeDtypeStruct((), jnp.int32)
    make = functools.partial(jaxauto.plan, step, *args, target="cpu:1", certify=False, progress=False)
    tight = make(memory_budget=0.6 * make(remat="off", memory_budget=2**40).estimate.peak_memory)
    assert any(d.action == "recomputed" for d in tight.remat)
    memory = compile_ahead(tight, 300).memory
    compiled = memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]
    assert tight.estimate.peak_memory == pytest.approx(compiled, rel=0.1)
