"""What the TPU compiler fuses into dots, on small programs; as seen in its schedules."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxauto.cost.compute import ops_per_byte
from jaxauto.cost.fusion import find_buffers
from jaxauto.graph import build, walk
from jaxauto.rewrite.hoist import hoist
from jaxauto.rewrite.program import Rewritten
from jaxauto.rules import rule_for
from jaxauto.targets.chips import CHIPS
from jaxauto.trace import trace

from .test_fusion import array, buffers_of, made_by

X = array(32, 32)


def on_tpu(fn, *args, bytes_per_flop=0.0, ops_per_byte=0.0):
    return buffers_of(fn, *args, platform="tpu", bytes_per_flop=bytes_per_flop, ops_per_byte=ops_per_byte)


def test_an_elementwise_operand_is_made_inside_the_dot():
    graph, buffers = on_tpu(lambda x, y: (x + 1) @ y, X, X)
    assert made_by(graph, buffers) == ["dot_general"]


def convolution(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_and_inside_a_convolution():
    graph, buffers = on_tpu(lambda x, k: convolution(x + 1, k), array(2, 8, 8, 4), array(3, 3, 4, 4))
    assert made_by(graph, buffers) == ["conv_general_dilated"]


@pytest.mark.parametrize(("taps", "stored"), [(3, False), (1, True)])
def test_what_two_convolutions_read_is_stored_if_it_is_dear_and_they_do_not_slide(taps, stored):
    """As compiled for v5p: the activations of a U-Net are made in both convolutions that read them, of 3 x 3 elements."""

    def fn(x, y, k, m):
        t = jnp.tanh(x) * y
        return convolution(t, k), convolution(t, m)

    graph, buffers = on_tpu(fn, array(2, 8, 8, 4), array(2, 8, 8, 4), array(taps, taps, 4, 4), array(taps, taps, 4, 4))
    assert ("mul" in made_by(graph, buffers)) == stored


def test_the_root_of_a_row_does_not_make_what_dots_read_dear():
    """A norm: the dots that read it make it from what was normed."""

    def fn(x, y):
        normed = x * jax.lax.rsqrt(jnp.sum(x * x, 1, keepdims=True))
        return normed @ y, y @ normed

    graph, buffers = on_tpu(fn, X, X)
    assert all(graph.values[int(n)].shape != X.shape or n in graph.inputs or n in graph.outputs for n in buffers.ids)


@pytest.mark.parametrize("beside", [False, True])
def test_a_result_that_a_fusion_makes_beside_others_is_not_written_over(beside):
    """A dot whose result is scaled by sums of its rows: its fusion sums it as well."""

    def fn(x, y, rows):
        made = x @ y if beside else jax.lax.optimization_barrier(x @ y)
        return jnp.tanh(made * (jnp.sum(made, 1, keepdims=True) if beside else rows))

    graph, buffers = on_tpu(fn, X, X, array(32, 1))
    live = {graph.values[int(n)].producer: (s, e) for n, s, e in zip(buffers.ids, buffers.start, buffers.end, strict=True)}
    made, scaled = (next(live[node] for node in graph.nodes if node.prim == prim and node in live) for prim in ("dot_general", "tanh"))
    assert (made[1] < scaled[0]) != beside


@pytest.mark.parametrize(("dtype", "stored"), [(jnp.bfloat16, False), (jnp.float32, True)])
def test_what_fans_out_is_stored_if_reading_what_it_is_made_of_moves_more(dtype, stored):
    """A float32 array is made again of two in bfloat16, as a norm's gradient in a U-Net; of two in float32 it is not."""

    def fn(x, y):
        z = x.astype(jnp.float32) * y.astype(jnp.float32)
        return z.sum(), z.max(0)

    wide = jax.ShapeDtypeStruct((32, 32), dtype)
    graph, buffers = on_tpu(fn, wide, wide)
    assert ("mul" in made_by(graph, buffers)) == stored


@pytest.mark.parametrize("looped", [False, True])
def test_what_is_made_of_a_trips_slice_is_made_again(looped):
    """As compiled for v5e and v5p, in the gradient of a norm: the slice is made where it is read, so it is no second array to read."""

    def both(x, y):
        z = x * y
        return z / jnp.sum(z, 1, keepdims=True)

    def over(x, stack):
        return jax.lax.scan(lambda x, y: (both(x, y), None), x, stack)[0]

    graph, buffers = on_tpu(over, X, array(4, 32, 32)) if looped else on_tpu(both, X, X)
    body = [graph.values[int(n)].producer for n in buffers.ids if graph.values[int(n)].shape == X.shape]
    assert ("mul" in {node.prim for node in body if node is not None}) == (not looped)


def test_a_norm_of_a_product_with_a_weight_is_a_pass_of_its_own():
    """As compiled for v5e and v5p, rows of 1,024: the product is written, and read again."""

    def fn(x, w):
        y = jnp.einsum("bld,dk->blk", x, w)
        return jax.lax.optimization_barrier(y * jax.lax.rsqrt(jnp.sum(y * y, -1, keepdims=True)))

    graph, buffers = on_tpu(fn, array(2, 64, 64), array(64, 1024))
    reads = {graph.values[int(n)].producer: r for n, r in zip(buffers.ids, buffers.reads, strict=True)}
    assert sum(r for node, r in reads.items() if node is not None and node.prim == "dot_general") == 1


def test_what_two_dots_read_is_stored_if_it_is_dear():
    """And made of two arrays: of one, each dot makes it, as compiled of a tanh or a gelu of bfloat16 (scripts/results/shared.md)."""
    read_twice = lambda t, y: (t @ y, y @ t)  # noqa: E731
    assert "mul" in made_by(*on_tpu(lambda x, y: read_twice(jnp.tanh(x) * y, y), X, X))
    assert "tanh" not in made_by(*on_tpu(lambda x, y: read_twice(jnp.tanh(x), y), X, X))
    assert "mul" not in made_by(*on_tpu(lambda x, y: read_twice(x * 2 * y, y), X, X))


@pytest.mark.parametrize(("chip", "gated", "softmax"), [("v5p", True, True), ("v5e", False, False)])
@pytest.mark.parametrize(("scores", "narrow"), [(jnp.float32, False), (jnp.bfloat16, True)])
def test_what_two_dots_read_is_made_twice_where_the_vector_unit_is_quick(chip, gated, softmax, scores, narrow):
    """As compiled (scripts/results/shared.md): a gated product, and probabilities, which of narrow scores are made twice everywhere."""

    def read_twice(t, y):
        return t @ y, jax.lax.dot_general(t, y, (((0,), (0,)), ((), ())))

    wide, narrow_x = jax.ShapeDtypeStruct((32, 32), scores), jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)
    rate = ops_per_byte(CHIPS[chip])
    made = made_by(*on_tpu(lambda a, b, y: read_twice(jax.nn.silu(a) * b, y), narrow_x, narrow_x, narrow_x, ops_per_byte=rate))
    assert ("mul" in made) == gated
    probabilities = lambda s, y: read_twice(jax.nn.softmax(s.astype(jnp.float32)).astype(jnp.bfloat16), y)  # noqa: E731
    made = made_by(*on_tpu(probabilities, wide, narrow_x, ops_per_byte=rate))
    assert ("convert_element_type" in made) == (softmax and not narrow)


GRADIENTS = {
    "relu": (lambda g, h: (jnp.where(h > 0, g, 0),), 1, ["convert_element_type"]),
    "gelu": (lambda g, h: jax.vjp(jax.nn.gelu, h)[1](g), 1, ["convert_element_type"]),
    "product": (lambda g, a, b: (g * a * b,), 2, ["convert_element_type"]),
    "gate": (lambda g, a, b: jax.vjp(lambda a, b: a * jax.nn.silu(b), a, b)[1](g), 2, ["convert_element_type", "dot_general"]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_through_an_activation_is_written_and_the_one_it_is_made_of_is_not(name):
    """As compiled for v5e (scripts/results/shared.md). Through a gate go two gradients: one of them is made in each dot, of the dot's
    result, which is written for that."""
    make, count, written = GRADIENTS[name]

    def fn(dy, matrix, made_of, y):
        made = make(*(x.astype(jnp.float32) for x in (dy @ matrix, *made_of)))
        return [(t @ y, jax.lax.dot_general(t, y, (((0,), (0,)), ((), ())))) for t in (t.astype(y.dtype) for t in made)]

    wide, narrow = (jax.ShapeDtypeStruct((256, n), jnp.bfloat16) for n in (256, 8))
    args = narrow, jax.ShapeDtypeStruct((8, 256), jnp.bfloat16), (wide,) * count, narrow
    graph, buffers = on_tpu(fn, *args, ops_per_byte=ops_per_byte(CHIPS["v5e"]))
    stored = (graph.values[int(n)] for n in buffers.ids)
    assert sorted(v.producer.prim for v in stored if v.shape == wide.shape and v.producer) == written


def gradient_of_scores(q, k, most, total, d, sums):
    """Of a softmax that is made again from scores; its sums are kept or not."""
    scores = jnp.einsum("blhk,bmhk->bhlm", q, k)
    exp = jnp.exp(scores - most)
    ds = exp / (jnp.sum(exp, -1, keepdims=True) if sums else total) * d
    return jnp.einsum("bhlm,bmhk->blhk", ds, k), jnp.einsum("bhlm,blhk->bmhk", ds, q)


@pytest.mark.parametrize(("steps", "batch", "written"), [(256, 64, True), (64, 256, False), (100, 64, False), (256, 128, False)])
def test_the_gradient_of_logits_of_a_loop_is_written_where_its_rows_lie_turned(steps, batch, written):
    """As compiled for v5p, 1,024 features over 32,768 words: by compiled memory, with 512 steps and batches of 96 and 120 as well."""

    def loss(w, x, labels):
        ys = jax.lax.scan(lambda c, x: (jnp.tanh(c + x),) * 2, jnp.zeros(x.shape[1:], x.dtype), x)[1]
        logits = (ys @ w).astype(jnp.float32)
        rows = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == labels[..., None]
        return (jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(rows, logits, 0), -1)).mean()

    shapes = ((8, 8192), "bfloat16"), ((steps, batch, 8), "bfloat16"), ((steps, batch), "int32")
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    graph, buffers = on_tpu(jax.grad(loss, (0, 1)), *args)
    wide = [graph.values[int(n)] for n in buffers.ids if graph.values[int(n)].elements == steps * batch * 8192]
    assert [value.producer.prim for value in wide] == ["dot_general"] + ["convert_element_type"] * written


@pytest.mark.parametrize("sums", [False, True])
def test_the_gradient_of_scores_that_two_dots_read_is_written_and_the_scores_are_not(sums):
    """As compiled for v5p, 8 x 16 x 1,024 x 1,024 scores, all in float32 or in bfloat16."""
    q, rows, wide = array(2, 64, 4, 8), array(2, 4, 64, 1), array(2, 4, 64, 64)
    graph, buffers = on_tpu(lambda *args: gradient_of_scores(*args, sums), q, q, rows, rows, wide)
    stored = [
        graph.values[int(n)].producer.prim
        for n in buffers.ids
        if graph.values[int(n)].shape == wide.shape and graph.values[int(n)].producer
    ]
    assert stored == ["mul"]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("dtype", "both"), [("bfloat16", True), ("float32", True), ("bfloat16", False)])
def test_the_exp_of_narrow_scores_is_not_written_if_dots_of_both_passes_make_it(dtype, both, grouped, masked):
    """As compiled (softmax_in_both_passes.md): what attention keeps for its backward pass is bfloat16 scores, if those are shifted as they
    are widened or come out of their dot in another order of dimensions. Else as many elements in float32. Weights are not written."""

    def attention(q, k):
        q = q.reshape(2, 64, 2, 2, 8) if grouped else q
        k = k[:, :, :2] if grouped else k
        into, out = ("blhgk,bmhk->bhglm", "bhglm,bmhk->blhgk") if grouped else ("blhk,bmhk->bhlm", "bhlm,bmhk->blhk")
        scores = jnp.einsum(into, q, k, preferred_element_type=dtype).astype(jnp.float32)
        if masked:
            scores = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), scores / 3, -1e9)
        return jnp.einsum(out, jax.nn.softmax(scores).astype(q.dtype), k).reshape(2, 64, 4, 8)

    def fn(q, k):
        out, pull = jax.vjp(attention, q, k)
        return (out, *pull(out * out)) if both else out

    q = jax.ShapeDtypeStruct((2, 64, 4, 8), jnp.bfloat16)
    made = made_by(*on_tpu(fn, q, q))
    made_again = both and dtype == "bfloat16" and (grouped or not masked)
    assert made.count("exp") == (0 if made_again else 1)
    assert made.count("div") == 0


@pytest.mark.parametrize(("scale", "dtype", "stored"), [(1, "bfloat16", 0), (3, "bfloat16", 1), (3, "float32", 0)])
def test_an_exp_that_is_made_again_of_narrow_scores_is_written_if_they_are_scaled_between(scale, dtype, stored):
    """As compiled: a backward pass whose maxima are kept. Of float32 each dot makes it, and of what is shifted as it is widened."""

    def again(q, k, highest, d):
        scores = jnp.einsum("blhk,bmhk->bhlm", q, k, preferred_element_type=dtype).astype(jnp.float32)
        exps = jnp.exp((scores if scale == 1 else scores / scale) - highest[..., None])
        mixed = jnp.einsum("bhlm,bmhk->blhk", exps.astype(q.dtype), k)
        return mixed, jnp.einsum("bhlm,bmhk->blhk", (exps * d).astype(q.dtype), k)

    q, highest, d = jax.ShapeDtypeStruct((2, 64, 4, 8), jnp.bfloat16), array(2, 4, 64), array(2, 4, 64, 64)
    assert made_by(*on_tpu(again, q, q, highest, d)).count("exp") == stored


def softmax_of_scores(q, k):
    scores = jnp.where(jnp.arange(k.shape[0]) < 7, q @ k.T, -1e9)
    return jax.nn.softmax(scores) @ k


def test_a_softmax_keeps_its_exp_and_nothing_else():
    graph, buffers = on_tpu(jax.vmap(softmax_of_scores), array(2, 64, 16), array(2, 64, 16))
    wide = [n for n in buffers.ids if graph.values[int(n)].shape == (2, 64, 64)]
    assert [graph.values[int(n)].producer.prim for n in wide] == ["exp"]


def test_a_softmax_over_a_vocabulary_keeps_its_logits():
    graph, buffers = on_tpu(softmax_of_scores, array(8, 16), array(8192, 16))
    wide = [graph.values[int(n)].producer.prim for n in buffers.ids if graph.values[int(n)].shape == (8, 8192)]
    assert "select_n" in wide or "dot_general" in wide
    assert "exp" not in wide


@pytest.mark.parametrize(("bytes_per_flop", "reads"), [(0.0, 1.0), (1e3, 0.0)])
def test_flops_hide_what_is_read_beside_them(bytes_per_flop, reads):
    """The residual that is added to a dot's result."""
    graph, buffers = on_tpu(lambda x, y, z: jnp.tanh(x @ y + z), X, X, X, bytes_per_flop=bytes_per_flop)
    residual = buffers.ids == graph.inputs[2]
    assert buffers.reads[residual] == reads
    result = buffers.ids == graph.outputs[0]
    assert buffers.written[result] == 0.0, "the operation is charged for its result already"


@jax.custom_vjp
def held(x):
    """The gradient that comes back has to be in memory, as where a recomputation waits for it."""
    return x


held.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.optimization_barrier(g),))


@pytest.mark.parametrize("waits", [True, False])
def test_the_rest_of_a_loss_is_made_beside_its_gradient_or_at_the_end(waits):
    """Log-softmax, the picked logits and the gradient read the same logits. A gradient that is stored has the rest of the loss made in its
    fusion; else the two dots make it each for itself, and the rest comes after the backward pass."""

    def fn(w, x, labels):
        def loss(w, x):
            logits = held(x @ w) if waits else x @ w
            normalised = jax.nn.log_softmax(logits)
            picked = normalised[jnp.arange(64)[::-1], labels]  # gathered: of each row the label of another
            return -jnp.sum(normalised * jax.nn.one_hot(labels, 16384)), -jnp.mean(picked)

        gradients, value = jax.grad(loss, (0, 1), has_aux=True)(w, x)
        return value, gradients

    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    graph, buffers = on_tpu(fn, array(16, 16384), array(64, 16), labels)
    dots = [buffers.position[node.id] for node in graph.nodes if node.prim == "dot_general" and node.backward]
    wide = {
        graph.values[int(n)].producer: s
        for n, s in zip(buffers.ids, buffers.start, strict=True)
        if graph.values[int(n)].shape == (64, 16384)
    }
    gradient = [start for node, start in wide.items() if node.backward]
    (rest,) = (start for node, start in wide.items() if not node.backward and node.prim != "dot_general")
    assert len(dots) == 2
    assert rest == gradient[0] < min(dots) if waits else not gradient and rest > max(dots)


def attention(scores, mixed, dtype=jnp.float32):
    def fn(q, k):
        weights = jax.nn.softmax(jnp.einsum(scores, q, k, preferred_element_type=dtype).astype(jnp.float32))
        return jnp.einsum(mixed, weights.astype(q.dtype), k)

    return fn


def near(reads):
    """But for the rows' sums, which are small."""
    return pytest.approx(reads, abs=0.02)


def passes(fn, *args, shape, of="reads"):
    """How often fused equations read (write) each array of ``shape``, by the primitive that makes it."""
    graph, buffers = on_tpu(fn, *args)
    found = zip(buffers.ids, getattr(buffers, of), strict=True)
    return {graph.values[int(n)].producer.prim: float(x) for n, x in found if graph.values[int(n)].shape == shape}


ONCE, TWICE = {"exp": 0.0}, {"dot_general": 1.0}
APART = {"dot_general": 1.0, "exp": 0.0}


@pytest.mark.parametrize(
    ("group", "head_dim", "kept"), [(4, 64, ONCE), (1, 64, TWICE), (4, 128, APART), (1, 128, TWICE)], ids=["fused", "flat", "deep", "both"]
)
def test_what_a_softmax_fuses_with_depends_on_its_scores(group, head_dim, kept):
    """A dimension of one element: the exp is made again. A long head dimension: it is written by a pass that sums it too."""
    fn = attention("blhgk,bmhk->bhglm", "bhglm,bmhk->blhgk")
    graph, buffers = on_tpu(fn, array(2, 512, 2, group, head_dim), array(2, 1024, 2, head_dim))
    wide = {n: r for n, r in zip(buffers.ids, buffers.reads, strict=True) if graph.values[int(n)].aval.size == 2 * 2 * group * 512 * 1024}
    assert {graph.values[int(n)].producer.prim: float(r) for n, r in wide.items()} == near(kept)


@pytest.mark.parametrize(("row", "kept"), [(2048, ONCE), (4096, APART), (16384, TWICE)])
def test_a_softmax_over_long_rows_sums_in_a_pass_of_its_own(row, kept):
    fn = attention("blhk,bmhk->bhlm", "bhlm,bmhk->blhk")
    assert passes(fn, array(2, 2048, 4, 8), array(2, row, 4, 8), shape=(2, 4, 2048, row)) == near(kept)


def test_a_softmax_of_a_matrix_makes_its_exp_again():
    assert passes(softmax_of_scores, array(512, 16), array(1024, 16), shape=(512, 1024)) == near(TWICE)


def test_a_gradient_of_scores_waits_for_the_sum_of_its_rows():
    """The sum needs the weights beside the dot's result: a second pass reads that."""

    fn = attention("blhk,bmhk->bhlm", "bhlm,bmhk->blhk", jnp.bfloat16)
    q = jax.ShapeDtypeStruct((2, 64, 4, 8), jnp.bfloat16)
    found = passes(jax.grad(lambda q, k: jnp.sum(fn(q, k)), (0, 1)), q, q, shape=(2, 4, 64, 64))
    assert found["dot_general"] == 1.0 and "convert_element_type" in found


def test_a_bias_gradient_does_not_part_a_dot_from_what_is_made_of_it():
    def fn(x, w, pre):
        back = (x @ w) * (1 - jnp.tanh(pre)) * pre
        return back, jnp.sum(back, 0) * 2.0

    graph, buffers = on_tpu(fn, array(8192, 16), array(16, 32), array(8192, 32))
    assert "dot_general" not in made_by(graph, buffers)


def test_a_written_result_has_its_maximum_made_beside_it():
    def fn(x, w):
        logits = x @ w
        return logits, jnp.max(logits, -1)

    assert passes(fn, array(64, 16), array(16, 8192), shape=(64, 8192)) == {"dot_general": 0.0}


def test_a_part_of_a_result_is_no_sum_and_has_its_maximum_made_beside_it():
    """Logits of all tokens but the last, passed to where they are needed again: as compiled for v5e with 32,000 words."""

    def fn(x, w):
        logits = (x @ w)[:-1]
        return jax.lax.optimization_barrier(logits), jnp.max(logits, -1)

    graph, buffers = on_tpu(fn, array(64, 16), array(16, 8192))
    assert {graph.values[n].producer.prim for n in buffers.in_tuple} == {"slice", "reduce_max"}
    assert "dot_general" not in made_by(graph, buffers)


def test_strided_slices_and_dilating_pads_are_passes_of_their_own():
    graph, buffers = on_tpu(lambda x: jnp.tanh(jax.lax.pad(jnp.exp(x[::2]) + 1, 0.0, [(0, 0, 1), (0, 0, 0)])) + 1, X)
    assert made_by(graph, buffers) == ["slice", "add", "pad", "add"]


@pytest.mark.parametrize("group", [1, 4], ids=["flat", "fused"])
def test_an_exp_that_a_stack_keeps_takes_a_pass_of_its_own(group):
    """Flat: one pass over the scores sums, the next writes the stack. Else it is written with its sum, and copied into the stack."""

    def layer(k, q):
        scores = jnp.einsum("blhgk,bmhk->bhglm", q, k, preferred_element_type=jnp.float32)
        exp = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
        weights = (exp / jnp.sum(exp, -1, keepdims=True)).astype(q.dtype)
        return k, (exp, jnp.einsum("bhglm,bmhk->blhgk", weights, k))

    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 2, 512, 2, group, 64), (2, 1024, 2, 64)))
    found = passes(lambda k, q: jax.lax.scan(layer, k, q)[1], k, q, shape=(2, 2, group, 512, 1024))
    dot = 0.5  # is charged for weights in bfloat16, and reads the exp
    assert found == near({"exp": dot + 1})


def test_each_pass_over_a_slice_is_one_over_the_stack():
    def once(c, x):
        return c, jnp.tanh(x)

    def twice(c, x):  # the sum comes before what divides by it
        return c, x / jnp.sum(jnp.exp(x))

    def reads(body):
        graph, buffers = on_tpu(lambda xs: jax.lax.scan(body, 0.0, xs)[1], array(4, 64, 128))
        (stack,) = (r for n, r in zip(buffers.ids, buffers.reads, strict=True) if int(n) in graph.inputs)
        return float(stack)

    assert (reads(once), reads(twice)) == (1.0, 2.0)


def test_a_dot_makes_again_what_a_stack_keeps():
    """Weights that are stacked are written by a pass of their own; the dot reads the scores, as it does where nothing is stacked."""

    def layer(k, q):
        scores = jnp.einsum("blhgk,bmhk->bhglm", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores).astype(q.dtype)
        return k, (weights, jnp.einsum("bhglm,bmhk->blhgk", weights, k))

    def alone(k, q):
        return layer(k, q)[0], layer(k, q)[1][1]

    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 2, 512, 2, 1, 64), (2, 1024, 2, 64)))

    def reads_of_scores(body):
        graph, buffers = on_tpu(lambda k, q: jax.lax.scan(body, k, q)[1], k, q)
        (reads,) = (r for n, r in zip(buffers.ids, buffers.reads, strict=True) if graph.values[int(n)].shape == (2, 2, 1024, 512, 1))
        return float(reads)

    sums, dot = 1, 0.5  # a pass; the dot is charged for weights in bfloat16, and reads scores in float32
    assert reads_of_scores(alone) == pytest.approx(sums + dot, abs=0.01)
    assert reads_of_scores(layer) == pytest.approx(sums + dot + 1, abs=0.01)


def passes_over(graph, buffers, shape):
    """How often fused equations read the buffers of a shape."""
    return sum(float(r) for n, r in zip(buffers.ids, buffers.reads, strict=True) if graph.values[int(n)].shape == shape)


@pytest.mark.parametrize(("devices", "written"), [(1, False), (2, True)])
def test_on_one_device_the_optimizer_is_made_with_the_gradient(devices, written):
    """Elsewhere the gradient is summed over devices first."""

    def step(w, m, x):
        grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        m = 0.9 * m + grad
        return w - 0.1 * m, m

    shape = 64, 32
    graph, buffers = buffers_of(step, array(*shape), array(*shape), array(128, 64), donate=(0, 1), platform="tpu", devices=devices)
    made = [graph.values[int(n)].producer for n in buffers.ids if graph.values[int(n)].shape in (shape, shape[::-1])]
    assert any(node is not None and node.prim == "dot_general" for node in made) is written


def test_what_is_made_of_the_same_arrays_is_made_in_one_pass():
    """Adam reads the weight, its moments and its gradient once, and none of the moments that it has just made."""

    def adam(w, m, v, g):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return w - 0.1 * m * jax.lax.rsqrt(v + 1e-8), m, v

    graph, buffers = buffers_of(adam, X, X, X, X, donate=(0, 1, 2), platform="tpu")
    assert passes_over(graph, buffers, X.shape) == 4


def test_but_not_across_a_sum_that_one_of_them_needs():
    def fn(x):
        return x * 2, x - jnp.sum(x)

    graph, buffers = on_tpu(fn, X)
    assert passes_over(graph, buffers, X.shape) == 3


def test_stacks_of_a_loop_that_runs_backward_are_filled_with_zeros():
    def reads(reverse):
        graph, buffers = on_tpu(lambda xs: jax.lax.scan(lambda c, x: (c, x @ x), 0.0, xs, reverse=reverse)[1], array(4, 64, 64))
        return sum(float(r) for n, r in zip(buffers.ids, buffers.reads, strict=True) if int(n) in graph.outputs)

    assert (reads(reverse=True), reads(reverse=False)) == (1.0, 0.0)


def test_a_slice_that_goes_from_stack_to_stack_is_read():
    """Weights that are converted before a loop and kept for another are copied by the loop, slice by slice."""

    def fn(x, ws):
        def layer(x, w):
            w = w.astype(jnp.bfloat16)
            return x @ w, w

        return jax.lax.scan(layer, x, ws)

    traced = trace(fn, (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), array(4, 64, 64)))
    graph = hoist(Rewritten(build(traced.jaxpr), {})).graph
    rules = {node.id: rule_for(node.eqn) for node in walk(graph) if not node.bodies}
    buffers = find_buffers(graph, rules, frozenset(), "tpu", devices=2)
    stacks = {
        graph.values[int(n)].producer.prim: float(r)
        for n, r in zip(buffers.ids, buffers.reads, strict=True)
        if graph.values[int(n)].shape == (4, 64, 64) and int(n) not in graph.inputs
    }
    assert stacks == {"convert_element_type": 1.0, "scan": 0.0}


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_a_tied_embedding_does_not_wait_for_the_scatter(tied):
    """XLA scatters into what the dot made: the dot is not fused with the optimizer, which would keep its operands until the end."""

    def fn(w, x, dy, rows, ids):
        gradient = x.T @ dy
        late = jnp.tanh(jnp.tanh(rows))
        gradient = gradient + jnp.zeros_like(w).at[ids].add(late) if tied else gradient * 3
        return w - 0.1 * gradient

    graph, buffers = on_tpu(fn, X, X, X, X, jax.ShapeDtypeStruct((32,), jnp.int32))
    dot = next(node for node in graph.nodes if node.prim == "dot_general")
    assert (dot.outputs[0] in buffers.ids) == tied


@pytest.mark.parametrize("stacked", [False, True])
def test_probabilities_that_are_written_are_not_made_in_the_fusion_that_makes_their_sum(stacked):
    """As compiled for v5p and v5e (16 heads, 1,024 keys), and for the stacks of a scan over layers on v5p: that is a pass of its own."""

    def probabilities(q, k):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        e = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
        return (e / jnp.sum(e, -1, keepdims=True)).astype(jnp.bfloat16)

    def layers(q, ks):
        return jax.lax.scan(lambda c, k: (c, probabilities(c, k)), q, ks)[1]

    q = array(2, 256, 4, 64)
    graph, buffers = on_tpu(layers, q, array(3, 2, 256, 4, 64)) if stacked else on_tpu(probabilities, q, q)
    made = made_by(graph, buffers)
    assert "exp" in made and "dot_general" not in made


def test_what_a_dots_fusion_moves_beside_its_own():
    """A gradient is added to a carry (read) and made of a wider operand; a bias is a row, too small to matter."""

    def fn(total, x, y, bias):
        return total + jnp.einsum("bm,bn->mn", x.astype(jnp.bfloat16), y).astype(jnp.float32) + bias

    graph, buffers = on_tpu(fn, array(256, 256), array(64, 256), jax.ShapeDtypeStruct((64, 256), jnp.bfloat16), array(256))
    total, x, *_ = graph.inputs
    (dot,) = (n for n in walk(graph) if n.prim == "dot_general")
    side = buffers.beside[dot.id]
    operand = next(k for k, v in enumerate(dot.inputs) if graph.values[v].shape == (64, 256) and v != graph.inputs[2])
    assert sorted(side.reads) == sorted([(total, 2, 1.0), (x, operand, 0.5)])
    assert side.writes == ((graph.outputs[0], 2, 0.5),)  # in float32, where the dot is charged for half as much
    assert side.exposed == 1.0 and side.lanes == 1.0


def test_what_is_gathered_wide_is_written_beside_what_it_is_made_of():
    """XLA:TPU's outputs of the dot of such logits: float32 for the gather, bfloat16 for all others."""

    def loss(x, w, labels):
        logits = (x @ w).astype(jnp.float32)
        label = logits[jnp.arange(256)[::-1], labels]  # of each row the label of another: no comparison does that
        return jnp.sum(jax.nn.logsumexp(logits, axis=1) - label)

    shapes = ((256, 64), jnp.bfloat16), ((64, 4096), jnp.bfloat16), ((256,), jnp.int32)
    graph, buffers = on_tpu(loss, *(jax.ShapeDtypeStruct(*s) for s in shapes))
    wide, narrow = (
        [k for k, n in enumerate(buffers.ids.tolist()) if graph.values[n].shape == (256, 4096) and graph.values[n].dtype == dtype]
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    gather = next(buffers.position[node.id] for node in walk(graph) if node.prim == "gather")
    assert len(wide) == len(narrow) == 1
    assert buffers.end[wide[0]] == gather
    assert buffers.reads[narrow[0]] > 0 and buffers.reads[wide[0]] == 0  # the gather is charged for its own


@pytest.mark.parametrize("bias", [True, False])
def test_what_is_summed_beside_convolutions_is_written(bias):
    """A cotangent that two convolutions read and, with a bias, its gradient sums."""

    def gradients(dy, scale, x, kernel):
        cotangent = dy * scale
        back = convolution(cotangent, kernel)
        weight = jax.lax.conv_general_dilated(x, cotangent, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("CHWN", "IHWO", "HWNC"))
        return back, weight, *((jnp.sum(cotangent, (0, 1, 2)),) if bias else ())

    images = array(8, 16, 16, 128)
    graph, buffers = on_tpu(gradients, images, images, images, array(3, 3, 128, 128))
    (product,) = (node.outputs[0] for node in walk(graph) if node.prim == "mul")
    assert (product in buffers.ids) is bias


def test_what_is_padded_for_dots_is_written_as_narrow_as_they_read_it():
    """The gradient of logits of which the last position has none: XLA:TPU fuses the padding into dots, and nothing beyond it."""

    def gradients(logits, scale, x, w, *, pads):
        gradient = jnp.exp(logits.astype(jnp.float32)) * scale
        gradient = (jnp.pad(gradient, ((0, 1), (0, 0))) if pads else gradient).astype(jnp.bfloat16)
        return gradient @ w, x.T @ gradient

    shapes = lambda rows: ((63, 4096), (63, 1), (rows, 64), (4096, 64))  # noqa: E731
    for pads, rows in ((True, 64), (False, 63)):
        arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes(rows)]
        graph, buffers = on_tpu(partial(gradients, pads=pads), *arguments)
        (product,) = (node.outputs[0] for node in walk(graph) if node.prim == "mul")
        assert (product in buffers.ids) is pads
        if pads:
            assert buffers.bytes_[buffers.ids.tolist().index(product)] == 2 * 63 * 4096
