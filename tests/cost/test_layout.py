"""Padding by hand: tiles of 8 rows and 128 lanes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxauto.cost.layout import Laid, minor_dims, padding
from jaxauto.graph import build
from jaxauto.groups import find_groups
from jaxauto.solve.facts import major_dims
from jaxauto.targets import CHIPS
from jaxauto.targets.chip import Tile
from jaxauto.trace import trace

TILE = Tile(8, 128)
W = -1
CASES = [
    ("fills its tiles", (64, 256), (W,), (), 1.0),
    ("lanes", (64, 64), (W,), (), 2.0),
    ("the better of two orders", (128, 64), (W,), (), 1.0),
    ("any pair of dimensions", (16, 4, 128), (W,), (), 1.0),
    ("odd", (200, 50257), (W,), (), 50304 / 50257),
    ("a part of it", (64, 256), (1,), (), 2.0),
    ("few rows make a small tile", (4, 128), (W,), (), 1.0),
    ("batch and features of a convolution", (4, 128, 128, 64), (W,), (0, 3), 2.0),
    ("features in groups", (16, 128, 128, 8, 8), (W,), (0, 3, 4), 2.0),
    ("features in groups, cut", (16, 128, 128, 8, 8), (3,), (0, 3, 4), 8.0),
    ("vectors are not padded", (100,), (W,), (), 1.0),
]


@pytest.mark.parametrize(("name", "shape", "position", "minor", "expected"), CASES, ids=[c[0] for c in CASES])
def test_padding(name, shape, position, minor, expected):
    found = padding(np.array([position], np.int8), Laid(shape, minor, TILE), (4,))
    assert found == pytest.approx([expected])


def test_all_states_at_once():
    found = padding(np.array([[W], [0], [1]], np.int8), Laid((64, 256), (0, 1), TILE), (4,))
    assert found == pytest.approx([1.0, 1.0, 1.0 if 256 / 4 % 128 == 0 else 2.0])


@pytest.mark.parametrize(
    ("dtype", "images", "expected"), [("float32", 1, 1.0), ("bfloat16", 1, 2.0), ("bfloat16", 2, 1.0), ("int8", 2, 2.0)]
)
def test_rows_that_share_a_register_are_padded_to_be_as_many(dtype, images, expected):
    """As XLA:TPU lays out images for convolutions: ``bf16[1,256,256,128]{3,0,2,1:T(2,128)(2,1)}``."""
    of = Laid((images, 256, 256, 128), (0, 3), CHIPS["v5e"].tile_of(dtype))
    assert padding(np.zeros((1, 0), int), of, ()) == expected


def test_what_a_dot_goes_over_as_a_batch_is_major():
    """As XLA:TPU lays them out: small matrices are padded each, however many there are."""

    def scores(x, wq, wk):
        q, k = (jnp.einsum("bsf,fhd->bshd", x, w) for w in (wq, wk))
        return jnp.einsum("bqhd,bkhd->bhqk", q, k)

    graph = build(trace(scores, [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 16, 64), (64, 4, 16), (64, 4, 16))]).jaxpr)
    groups = find_groups(graph)
    major = major_dims(groups)
    minor = {n.outputs[0]: minor_dims(major, *groups.place[n.outputs[0]]) for n in graph.nodes if n.prim == "dot_general"}
    shapes = {graph.values[x].shape: [graph.values[x].shape[k] for k in found] for x, found in minor.items()}
    assert sorted(shapes[(256, 4, 16, 16)]) == [16, 16] and sorted(shapes[(256, 16, 4, 16)]) == [16, 16]
    whole = np.zeros((1, 0), int)
    assert padding(whole, Laid((256, 4, 16, 16), (2, 3), TILE), ()) == 128 / 16
    assert minor_dims(major, *groups.place[graph.outputs[0]], stacked=True) == tuple(k + 1 for k in minor[graph.outputs[0]])
