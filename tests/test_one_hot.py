"""A gather or scatter of one element of each row becomes a comparison, with the same numbers; others stay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxauto.graph import build, walk
from jaxauto.rewrite.evaluate import evaluator

LOGITS, LABELS = (4, 6, 10), (4, 6)


def picked(logits, labels):
    return jnp.take_along_axis(jnp.sin(logits), labels[..., None], axis=-1).sum()


def along_the_middle(logits, labels):
    return jnp.take_along_axis(jnp.sin(logits), labels[:, :1, None], axis=1).sum()


def clipped(logits, labels):
    return jnp.take_along_axis(jnp.sin(logits), labels[..., None], axis=-1, mode="clip").sum()


def of_one_sequence(logits, labels):
    return jnp.take_along_axis(jnp.sin(logits[:1]), labels[:1, :, None], axis=-1).sum()


def by_position(logits, labels):
    """As many write it by hand."""
    logits, labels = jnp.sin(logits).reshape(-1, logits.shape[-1]), labels.reshape(-1)
    return (2 * logits)[jnp.arange(len(labels)), labels].sum()


def by_both_positions(logits, labels):
    return jnp.sin(logits)[np.arange(logits.shape[0])[:, None], jnp.arange(logits.shape[1]), labels].sum()


def by_another_position(logits, labels):
    """Not of each row: the rows in reverse."""
    return jnp.sin(logits)[:, 0][jnp.arange(logits.shape[0])[::-1], labels[:, 0]].sum()


def by_positions_of_another_shape(logits, labels):
    """Counted along another dimension before the reshape: of no row its own position."""
    counted = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (6, 4)).reshape(4, 6)
    return jnp.sin(logits)[counted, jnp.arange(6), labels].sum()


def by_positions_that_begin_again(logits, labels):
    wide = jnp.broadcast_to(jnp.sin(logits[:, :1]), (4, 300, logits.shape[-1])).sum(0)
    return (2 * wide)[jnp.arange(300).astype(jnp.int8).astype(jnp.uint8), jnp.broadcast_to(labels[0, 0], (300,))].sum()


def of_some_rows(logits, labels):
    return (2 * jnp.sin(logits)[:, 0])[jnp.arange(2), labels[:2, 0]].sum()


def several(logits, labels):
    return jnp.take_along_axis(jnp.sin(logits), jnp.stack([labels, labels], -1), axis=-1).sum()


def two_indices(logits, labels):
    """One element of each matrix."""
    numbers = lax.GatherDimensionNumbers((), (1, 2), (1, 2), (0,), (0,))
    return lax.gather(jnp.sin(logits), labels[:, :2], numbers, (1, 1, 1), mode="fill").sum()


def argument(logits, labels):
    """It is in memory: one element of each row is less than all."""
    return jnp.take_along_axis(logits, labels[..., None], axis=-1).sum()


def of_the_next(logits, labels):
    """As many write the loss of a language model: the last logits have no label."""
    return jnp.take_along_axis(jnp.sin(logits)[:, :-1], labels[:, 1:, None], axis=-1).sum()


def flattened(logits, labels):
    flat = jnp.sin(logits).reshape(-1, logits.shape[-1])
    return jnp.take_along_axis(flat, labels.reshape(-1)[:, None], axis=-1).sum()


def rows(logits, labels):
    return jnp.sin(logits[0])[labels[:, 0]].sum()


def found(closed, *prims):
    return [node for node in walk(build(closed)) if node.prim in prims]


def scatters(closed):
    return found(closed, "scatter-add")


@pytest.mark.parametrize(
    "loss, compared",
    [
        (picked, True),
        (along_the_middle, False),
        (clipped, True),
        (argument, True),
        (two_indices, True),
        (of_one_sequence, True),
        (of_the_next, True),
        (flattened, True),
        (by_position, True),
        (by_both_positions, True),
        (by_another_position, False),
        (by_positions_of_another_shape, False),
        (by_positions_that_begin_again, False),
        (of_some_rows, False),
        (several, False),
        (rows, False),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("index", [jnp.int32, jnp.int8, jnp.uint32])
def test_one_element_of_a_row_is_found_by_comparison(loss, compared, dtype, index):
    keys = jax.random.split(jax.random.key(0))
    logits = jax.random.normal(keys[0], LOGITS, dtype)
    labels = jax.random.randint(keys[1], LABELS, -2 if index != jnp.uint32 else 0, 14).astype(index)  # some belong to no element
    gradient = jax.grad(loss)
    closed = jax.make_jaxpr(gradient)(logits, labels)
    assert bool(scatters(closed)) != compared
    (result,) = evaluator(build(closed))(logits, labels)
    np.testing.assert_array_equal(result, gradient(logits, labels))
    forward = jax.make_jaxpr(loss)(logits, labels)
    assert bool(found(forward, "gather")) == (not compared or loss is argument)
    (value,) = evaluator(build(forward))(logits, labels)
    np.testing.assert_array_equal(np.float32(value), np.float32(loss(logits, labels)))


def test_nothing_is_left_of_the_array_it_was_added_to():
    closed = jax.make_jaxpr(jax.grad(picked))(jnp.ones(LOGITS), jnp.zeros(LABELS, jnp.int32))
    graph = build(closed)
    unread = [n.prim for n in graph.nodes for x in n.outputs if not graph.values[x].users and x not in graph.outputs]
    assert "broadcast_in_dim" not in unread


def test_more_elements_than_the_index_counts():
    def loss(x, i):
        return jnp.take_along_axis(jnp.sin(x), i[:, None], axis=-1).sum()

    x, i = jnp.ones((3, 300)), jnp.asarray([0, 44, 127], jnp.int8)
    closed = jax.make_jaxpr(jax.grad(loss))(x, i)
    assert not scatters(closed)
    np.testing.assert_array_equal(evaluator(build(closed))(x, i)[0], jax.grad(loss)(x, i))


def test_what_is_added_to_an_array_that_is_not_constant_stays():
    numbers = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
    closed = jax.make_jaxpr(lambda x, i, u: lax.scatter_add(x, i, u, numbers))(jnp.ones((3, 5)), jnp.ones((3, 1), int), jnp.ones(3))
    assert scatters(closed)


def test_of_a_constant_that_is_not_zero():
    numbers = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))

    def fun(i, u):
        return lax.scatter_add(jnp.full((3, 5), 2.0), i, u, numbers)

    arrays = jnp.asarray([[1], [4], [9]]), jnp.asarray([1.0, 2.0, 3.0])
    closed = jax.make_jaxpr(fun)(*arrays)
    assert not scatters(closed)
    np.testing.assert_array_equal(evaluator(build(closed))(*arrays)[0], fun(*arrays))


def test_a_cross_entropy_adds_to_no_array_as_large_as_the_logits():
    def loss(logits, labels):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    logits, labels = jax.random.normal(jax.random.key(0), LOGITS), jnp.arange(24).reshape(LABELS) % 10
    closed = jax.make_jaxpr(jax.grad(loss))(logits, labels)
    assert all(node.eqn.outvars[0].aval.size < logits.size for node in scatters(closed))
    (result,) = jax.jit(evaluator(build(closed)))(logits, labels)
    np.testing.assert_allclose(result, jax.jit(jax.grad(loss))(logits, labels), rtol=2e-6, atol=1e-8)
