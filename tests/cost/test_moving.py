"""What puts elements elsewhere: which programs of small arrays write what, as compiled for larger ones (scripts/results/moved.md)."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxauto.cost.moving import is_regrouping

from .test_clusters import on_tpu
from .test_fusion import array, made_by

BATCH, ROWS, WIDTH = 2, 64, 16
X, W, Z = array(BATCH, ROWS, 8), array(8, WIDTH), array(BATCH, ROWS, WIDTH)


def halves(x):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([-b, a], -1)


def windows(x):
    """Of 4 x 4, of rows of 8 x 8."""
    return x.reshape(BATCH, 2, 4, 2, 4, WIDTH).swapaxes(2, 3).reshape(BATCH, ROWS, WIDTH)


def shifted(x):
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :ROWS]


def heads(x):
    """Cut, turned, turned back: what was one dimension is one again."""
    y = jnp.tanh(x.reshape(BATCH, ROWS, 4, WIDTH // 4).swapaxes(1, 2))
    return y.swapaxes(1, 2).reshape(BATCH, ROWS, WIDTH)


@pytest.mark.parametrize(
    ("moves", "written"),
    [
        (lambda y: 2 * y, []),
        (heads, []),
        (shifted, ["dot_general"]),
        (lambda y: y + shifted(y), ["dot_general"]),
        (lambda y: jnp.roll(y, 3, 1), ["dot_general"]),
        (lambda y: y + halves(y), ["dot_general", "neg"]),
        (windows, ["dot_general", "reshape"]),
        (lambda y: y[:, ::-1], ["dot_general", "rev"]),
    ],
)
def test_a_dot_whose_result_is_moved_is_written(moves, written):
    """All but the result of the program, which adds something to what is moved."""
    assert made_by(*on_tpu(lambda x, w, z: moves(x @ w) + z, X, W, Z)) == [*written, "add"]


def test_a_joined_slice_of_what_is_computed_is_written_as_a_whole():
    rolled = lambda x, w: (lambda y: y @ w)(jnp.roll(jnp.tanh(x), 3, 1))  # noqa: E731
    assert made_by(*on_tpu(rolled, X, W)) == ["tanh", "dot_general"]
    assert made_by(*on_tpu(lambda x, w: jnp.roll(x, 3, 1) @ w, X, W)) == ["dot_general"]


@pytest.mark.parametrize(
    ("shape", "cut", "order", "merged", "regroups"),
    [
        ((32, 64, 64, 96), (32, 8, 8, 8, 8, 96), (0, 1, 3, 2, 4, 5), (2048, 64, 96), True),  # windows
        ((2048, 64, 96), (32, 8, 8, 8, 8, 96), (0, 1, 3, 2, 4, 5), (32, 64, 64, 96), True),  # and back
        ((8, 64, 64, 96), (8, 32, 2, 32, 2, 96), (0, 1, 3, 2, 4, 5), (8, 32, 32, 384), True),  # patches
        ((8, 128, 96), (8, 128, 3, 32), (0, 2, 1, 3), (24, 128, 32), True),  # heads beside examples
        ((8, 128, 96), (8, 128, 3, 32), (0, 1, 3, 2), (8, 128, 96), True),  # channels shuffled
        ((8, 3, 128, 32), (8, 3, 128, 32), (0, 2, 1, 3), (8, 128, 96), False),  # heads that were never one dimension
    ],
)
def test_what_regroups(shape, cut, order, merged, regroups):
    graph, _ = on_tpu(lambda x: x.reshape(cut).transpose(order).reshape(merged) * 2, array(*shape))
    found = [node for node in graph.nodes if is_regrouping(node, graph.values)]
    assert len(found) == regroups
