"""What the TPU compiler fuses into dots, on small programs; as seen in its schedules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from .test_fusion import array, buffers_of, made_by

X = array(32, 32)


def on_tpu(fn, *args, bytes_per_flop=0.0):
    return buffers_of(fn, *args, platform="tpu", bytes_per_flop=bytes_per_flop)


def test_an_elementwise_operand_is_made_inside_the_dot():
    graph, buffers = on_tpu(lambda x, y: (x + 1) @ y, X, X)
    assert made_by(graph, buffers) == ["dot_general"]


def test_but_not_inside_a_convolution():
    def fn(x, k):
        return jax.lax.conv_general_dilated(x + 1, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    graph, buffers = on_tpu(fn, array(2, 8, 8, 4), array(3, 3, 4, 4))
    assert made_by(graph, buffers) == ["add", "conv_general_dilated"]


def test_what_two_dots_read_is_stored_if_it_is_dear():
    shared = lambda x, y: (lambda t: (t @ y, y @ t))(jnp.tanh(x))  # noqa: E731
    assert "tanh" in made_by(*on_tpu(shared, X, X))
    cheap = lambda x, y: (lambda t: (t @ y, y @ t))(x * 2)  # noqa: E731
    assert "mul" not in made_by(*on_tpu(cheap, X, X))


def softmax_of_scores(q, k):
    scores = jnp.where(jnp.arange(k.shape[0]) < 7, q @ k.T, -1e9)
    return jax.nn.softmax(scores) @ k


def test_a_softmax_keeps_its_exp_and_nothing_else():
    graph, buffers = on_tpu(softmax_of_scores, array(64, 16), array(64, 16))
    wide = [n for n in buffers.ids if graph.values[int(n)].shape == (64, 64)]
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


def test_the_gradient_of_a_loss_is_made_beside_it():
    """log-softmax, the picked logits and the gradient read the same logits: one fusion makes both wide arrays."""

    def fn(w, x, labels):
        def loss(w):
            scores = jax.nn.log_softmax(x @ w)
            return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))

        return jax.value_and_grad(loss)(w)

    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    graph, buffers = on_tpu(fn, array(16, 8192), array(64, 16), labels)
    wide = [(s, e) for n, s, e in zip(buffers.ids, buffers.start, buffers.end, strict=True) if graph.values[int(n)].shape == (64, 8192)]
    at_once = max(sum(s <= p <= e for s, e in wide) for p in range(buffers.length))
    assert at_once >= 2
