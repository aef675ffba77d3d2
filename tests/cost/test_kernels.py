"""What XLA:GPU makes in one kernel: rows, siblings, copies to another layout. What it does make: scripts/results/softmax_h100.md."""

import jax
import jax.numpy as jnp
import pytest
from cost.test_fusion import buffers_of, made_by

F32, BF16 = jnp.float32, jnp.bfloat16


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


S = array(4, 8, 64, 64)


def reads(fn, *args):
    """How often each input is read."""
    _, buffers = buffers_of(fn, *args)
    return list(buffers.reads[buffers.is_input])


def test_a_softmax_reads_its_rows_once():
    assert reads(jax.nn.softmax, S) == [1]
    assert reads(lambda s: jax.nn.softmax(s / 8).astype(BF16), S) == [1]
    graph, buffers = buffers_of(jax.nn.softmax, S)
    assert made_by(graph, buffers) == ["div"]


@pytest.mark.parametrize("shape, axis", [((4, 64, 64), 1), ((4, 32768), -1), ((64, 64, 1), 1)])
def test_a_softmax_of_what_does_not_lie_together_or_is_long_reads_them_for_each_reduction(shape, axis):
    assert reads(lambda s: jax.nn.softmax(s, axis), array(*shape)) == [3]


def test_a_mask_is_read_along():
    assert reads(lambda s, m: jax.nn.softmax(jnp.where(m, s, -1e30)), S, array(64, 64, dtype=bool)) == [1, 1]


def test_a_norm_and_its_gradient_read_once():
    def norm(x):
        centred = x - jnp.mean(x, -1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-6)

    assert reads(norm, array(64, 256)) == [1]
    assert reads(lambda x, d: jax.vjp(norm, x)[1](d)[0], array(64, 256), array(64, 256)) == [1, 1]


def test_rows_of_a_sum_are_added_where_they_are_normalised():
    """Though what comes out is read by a matmul and added to what that makes, which is normalised in turn."""

    def norm(x, y):
        wide = (x + y).astype(F32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(BF16)

    x, w = array(64, 256, dtype=BF16), array(256, 256, dtype=BF16)
    graph, buffers = buffers_of(lambda x, w: norm(y := norm(x, x @ w), y @ w), x, w)
    assert made_by(graph, buffers) == ["dot_general", "convert_element_type"] * 2


def loss_of(function):
    """The mean of one element of each row, gathered: the label of another row."""
    return lambda x, labels: -jnp.mean(function(x.astype(F32))[jnp.arange(len(labels))[::-1], labels])


def compared(function):
    """The same, found by comparison."""
    return lambda x, labels: -jnp.mean(jnp.take_along_axis(function(x.astype(F32)), labels[:, None], -1))


def shifted(graph, buffers, size):
    """Arrays that the centring of rows wrote."""
    made = [graph.values[int(n)] for n, s, e in zip(buffers.ids, buffers.start, buffers.end, strict=True) if e >= s]
    return sum(v.producer is not None and v.producer.prim == "sub" and v.elements == size for v in made)


@pytest.mark.parametrize(
    "function, wanted",
    [
        (jax.value_and_grad(loss_of(jax.nn.log_softmax)), 1),  # the exp is read by its sum and by the gradient
        (loss_of(jax.nn.log_softmax), 1),  # by its sum alone: what is gathered from is written
        (jax.value_and_grad(loss_of(jax.nn.softmax)), 0),  # combined with what is summed: one kernel
        (jax.value_and_grad(compared(jax.nn.log_softmax)), 0),  # the loss is a sum of rows as well
        (compared(jax.nn.log_softmax), 0),
    ],
)
def test_the_centring_of_rows_is_written_where_its_kernel_ends(function, wanted):
    rows, length = 32, 1024
    arguments = array(rows, length, dtype=BF16), jax.ShapeDtypeStruct((rows,), jnp.int32)
    assert shifted(*buffers_of(function, *arguments), rows * length) == wanted
    long = array(rows, 32768, dtype=BF16), arguments[1]
    assert not shifted(*buffers_of(function, *long), rows * 32768)


def test_what_is_gathered_is_made_there():
    graph, buffers = buffers_of(lambda x, i: (x * 2)[i], array(64, 256), jax.ShapeDtypeStruct((8,), jnp.int32))
    assert made_by(graph, buffers)[-1] == "gather" and "mul" not in made_by(graph, buffers)
    graph, buffers = buffers_of(lambda x, i: (x * 2)[i], array(64, 256), jax.ShapeDtypeStruct((8,), jnp.int32), platform="tpu")
    assert "mul" in made_by(graph, buffers)


def test_a_slice_reads_its_share():
    x = array(8, 64)
    assert reads(lambda x: x[:, :16] * 2, x) == [0.25]
    assert reads(lambda x: x[:, ::2] + x[:, 1::2], x) == [1]
    assert reads(lambda x: x[:, ::2] * jnp.exp(x[:, ::2]), x) == [0.5]  # the same slice
    assert reads(lambda x: (x * 2)[:, :32][:, :16] * 2, x) == [0.25]
    index = jax.ShapeDtypeStruct((), jnp.int32)
    cut = lambda x, i: jax.lax.dynamic_slice(x, (i, 0), (2, 64))  # noqa: E731
    assert reads(lambda x, i, j: cut(x, i) * cut(x, j), x, index, index)[0] == 0.5  # not the same slice


def test_a_sum_that_is_returned_takes_a_pass():
    def fn(s):
        e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
        total = jnp.sum(e, -1, keepdims=True)
        return e / total, total

    assert reads(fn, S) == [2]


def test_rows_of_one_array_scaled_by_those_of_another_take_two_passes():
    assert reads(lambda x, y: x * jnp.sum(y, -1, keepdims=True), array(64, 256), array(64, 256)) == [1, 1]
    assert reads(lambda x, y: x * (y - jnp.sum(x * y, -1, keepdims=True)), array(64, 256), array(64, 256)) == [2, 2]


def test_siblings_read_once_and_write_nothing_for_each_other():
    def fn(x, y, w):
        z = jnp.sin(x) * y
        return z @ w, (z + x) @ w, z.sum(0)

    wide = array(512, 128)
    graph, buffers = buffers_of(fn, wide, wide, array(128, 128))
    assert list(buffers.reads[buffers.is_input])[:2] == [1, 1]
    assert {"add", "mul", "reduce_sum"} == {*made_by(graph, buffers)} - {"dot_general"}

    def inner(x, y):
        z = x * y
        return z.sum(), z.max()

    graph, buffers = buffers_of(inner, wide, wide)
    assert sorted(made_by(graph, buffers)) == ["reduce_max", "reduce_sum"], "their operand stays inside"


def test_what_waits_for_a_sum_is_no_sibling():
    assert reads(lambda x: x / (1 + jnp.sum(x * x)), array(512, 128)) == [2]


def test_what_loops_stack_is_written_apart():
    def body(c, x):
        a = jnp.tanh(x)
        return c + 1.0, (a * 2, a * 3)

    graph, buffers = buffers_of(lambda xs: jax.lax.scan(body, 0.0, xs), array(8, 512, 128))
    slices = {int(n): r for n, r in zip(buffers.ids, buffers.reads, strict=True)}
    assert max(slices.values()) >= 2, graph


def test_scores_and_their_gradient_lie_alike():
    """Grouped queries: both einsums write their dimensions in an order of their own, and one of them is copied."""

    def attention(q, k, v):
        scores = jnp.einsum("blhgk,bmhk->bhglm", q, k, preferred_element_type=F32)
        return jnp.einsum("bhglm,bmhk->blhgk", jax.nn.softmax(scores).astype(BF16), v)

    q, k = array(2, 64, 4, 2, 16, dtype=BF16), array(2, 64, 4, 16, dtype=BF16)
    grouped = buffers_of(lambda q, k, v, d: jax.vjp(attention, q, k, v)[1](d), q, k, k, q)
    assert copies(*grouped) == 1

    def plain(q, k, v):
        scores = jnp.einsum("blhk,bmhk->bhlm", q, k, preferred_element_type=F32)
        return jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores).astype(BF16), v)

    assert copies(*buffers_of(lambda q, k, v, d: jax.vjp(plain, q, k, v)[1](d), k, k, k, k)) == 0


@pytest.mark.parametrize(("scores", "copied"), [("bhglm", True), ("bhlgm", False)])
def test_a_loops_stack_lies_as_what_it_was_filled_with(scores, copied):
    """The loop that reads it has it copied whole, unless slices lie in their own order: then one is copied out at a time."""

    def loss(x, q, k):
        def block(x, now):
            q, k = now
            products = jnp.einsum(f"blhgk,bmhk->{scores}", q * x, k, preferred_element_type=F32)
            weights = jax.nn.softmax(products).astype(BF16)
            return x + jnp.sum(jnp.einsum(f"{scores},bmhk->blhgk", weights, k)), None

        return jax.lax.scan(block, x, (q, k))[0]

    q, k = array(3, 2, 64, 4, 2, 16, dtype=BF16), array(3, 2, 64, 4, 16, dtype=BF16)
    graph, buffers = buffers_of(jax.grad(loss, (1, 2)), array(dtype=BF16), q, k)
    taken = zip(buffers.ids, buffers.bytes_, buffers.start, buffers.end, strict=True)
    slices = {int(n): b for n, b, s, e in taken if e >= s and graph.values[int(n)].producer is None}
    sizes = sorted(slices[n] / graph.values[n].elements for n in slices if graph.values[n].elements == 2 * 8 * 64 * 64)
    assert sizes == ([3 * 2, 3 * 4] if copied else [2])


def copies(graph, buffers):
    """Conversions of arrays as large as scores that take a buffer and that no operation reads."""
    made = [graph.values[int(n)] for n, s, e in zip(buffers.ids, buffers.start, buffers.end, strict=True) if e >= s]
    wide = [v for v in made if v.producer is not None and v.producer.prim == "convert_element_type" and v.elements >= 2 * 8 * 64 * 64]
    return sum(str(v.dtype) == "float32" for v in wide)


def test_what_passes_a_barrier_together_is_not_combined():
    """Arrays of another shape have no order that a copy could lie in."""

    def fn(a, b, c, d):
        other = jnp.einsum("bimk,bjmk->bmij", c, d)
        passed, more = jax.lax.optimization_barrier((other, jnp.tanh(jnp.einsum("bik,bjk->bij", a, b) / 8 + 1)))
        return passed * 2, more * 2

    shapes = (2, 16, 32), (2, 8, 32), (2, 8, 4, 32), (2, 4, 4, 32)
    graph, buffers = buffers_of(fn, *(array(*shape, dtype=BF16) for shape in shapes))
    assert made_by(graph, buffers) == ["dot_general", "dot_general", "tanh", "mul", "mul"]


@pytest.mark.parametrize(
    ("fun", "width", "overwritten"),
    [
        (lambda wide, y: jnp.sin(wide) @ y.T, 512, True),
        (lambda wide, y: (jnp.sum(wide * wide, 0), jnp.sin(wide) @ y.T), 512, True),
        (lambda wide, y: jnp.sin(wide) @ y.T, 8208, True),
        (lambda wide, y: jnp.sin(wide) @ y.T, 8201, False),
    ],
    ids=["alone", "beside a sum", "aligned", "padded"],
)
def test_what_is_made_element_by_element_lies_over_what_it_is_made_of(fun, width, overwritten):
    """As compiled for H100, by its temporaries: not where a dot reads it padded."""
    graph, buffers = buffers_of(lambda x, y: fun(x @ y, y), array(256, 64), array(64, width))
    first = next(node for node in graph.nodes if node.prim == "dot_general").outputs[0]
    last = next(node for node in reversed(graph.nodes) if node.prim == "dot_general").inputs[0]
    start = dict(zip(buffers.ids.tolist(), buffers.start.tolist(), strict=True))
    end = dict(zip(buffers.ids.tolist(), buffers.end.tolist(), strict=True))
    assert (end[first] < start[last]) == overwritten


@pytest.mark.parametrize(("swapped", "by_position"), [("", False), ("logits", False), ("labels", False), ("", True)])
def test_the_gradient_of_logits_lies_over_them_unless_their_dimensions_are_swapped(swapped, by_position):
    """As compiled for H100, 256 steps of 64 sequences over 32,768 words: one array where the loss has the order of the dot, else two."""

    def loss(w, x, labels):
        logits = x @ w
        logits = (jnp.swapaxes(logits, 0, 1) if swapped == "logits" else logits).astype(jnp.float32)
        labels = labels.T if swapped == "labels" else labels
        if by_position:  # a slice of the indices moves labels alone
            logits, labels = logits.reshape(-1, 32768), labels.reshape(-1)
            return (jax.nn.logsumexp(logits, -1) - (logits * 1)[jnp.arange(len(labels)), labels]).mean()
        picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    labels = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    graph, buffers = buffers_of(jax.value_and_grad(loss, (0, 1)), array(16, 32768, dtype=BF16), array(8, 8, 16, dtype=BF16), labels)
    wide = [k for k, n in enumerate(buffers.ids) if graph.values[int(n)].elements == 8 * 8 * 32768]
    together = max(sum(buffers.start[k] <= at <= buffers.end[k] for k in wide) for at in range(buffers.length))
    assert together == 1 + bool(swapped)


def convolution(x, w, stride=1):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def gradient(x, w, stride=1):
    """In the input, as large as ``x`` times the strides."""
    shape = (x.shape[0], stride * x.shape[1], stride * x.shape[2], w.shape[2])
    return jax.vjp(lambda y: convolution(y, w, stride), jnp.zeros(shape))[1](x)[0]


def other(x, w):
    return jnp.sin(x) * 2


IMAGE = array(4, 16, 16, 8)


@pytest.mark.parametrize(
    ("made", "window", "written"),
    [
        (convolution, (3, 3), True),
        (gradient, (1, 1), True),  # its kernel needs no reversal
        (gradient, (3, 3), False),
        (lambda x, w: gradient(x[:, ::2, ::2], w, 2), (3, 3), False),
        (other, (3, 3), False),
    ],
)
def test_cudnn_adds_to_what_a_forward_convolution_makes(made, window, written):
    """The sum is in memory though what reads it could make it; what it was made of is not any more."""
    graph, buffers = buffers_of(lambda x, y, w: jnp.sin(made(x, w) + y), IMAGE, IMAGE, array(*window, 8, 8), platform="gpu")
    assert ("add" in made_by(graph, buffers)) is written


def test_cudnn_adds_nothing_to_a_convolution_that_others_read_too():
    def step(x, y, w):
        made = convolution(x, w)
        return jnp.sin(made + y), jnp.cos(made)

    graph, buffers = buffers_of(step, IMAGE, IMAGE, array(3, 3, 8, 8), platform="gpu")
    assert "add" not in made_by(graph, buffers)
