"""Dimensions that no mesh axis divides: named, and what padding them would gain is what the padded step gets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxauto
from jaxauto.alternatives import if_padded
from jaxauto.core import AxisLink, MeshAxes
from jaxauto.undivided import notes, padded, undivided

LINK = AxisLink(1e9, 1e-6)
MESH = MeshAxes(("data", "model"), (4, 2), (LINK, LINK))


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def step(params, ids, labels):
    def loss(p):
        logits = jnp.tanh(p["embed"][ids] @ p["inner"]) @ p["head"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


def plan_of(vocabulary):
    params = {"embed": struct(vocabulary, 256), "inner": struct(256, 256), "head": struct(256, vocabulary)}
    ids = struct(8, 64, dtype=jnp.int32)
    return jaxauto.plan(step, params, ids, ids, mesh={"model": 8}, target="v5e:2x4", certify=False)


@pytest.mark.parametrize(("size", "expected"), [(50257, 50264), (50264, 50264), (25, 25), (1001, 1008), (1, 1)])
def test_padding_goes_to_all_devices_unless_it_wastes_much(size, expected):
    assert padded(size, MESH) == expected


def test_only_large_arguments_and_dimensions_that_no_axis_divides():
    avals = [struct(1001, 512), struct(1002, 512), struct(1001)]
    found = undivided(["0.a", "0.b", "0.c"], avals, MESH)
    assert [(u.path, u.dim, u.size, u.padded) for u in found] == [("0.a", 0, 1001, 1008)], "2 divides 1002; 0.c is small"
    assert undivided(["0.a"], avals[:1], MeshAxes(("data",), (1,), (LINK,))) == []


def test_one_note_names_what_shares_a_size():
    (note,) = notes(["0.a", "0.b"], [struct(1001, 64), struct(64, 1001)], MESH)
    assert "divides 1001: 0.a (dimension 0), 0.b (dimension 1) cannot be split there. Padded to 1008" in note


def test_what_padding_gains_is_what_the_padded_step_gets():
    odd, even = plan_of(20011), plan_of(20016)
    assert any("divides 20011: 0.embed (dimension 0), 0.head (dimension 1)" in note for note in odd.notes)
    assert not any("divides" in note for note in even.notes)
    promised = if_padded(odd)
    assert promised is not None
    assert promised.step_time == pytest.approx(even.estimate.step_time, rel=0.02) and promised.step_time < odd.estimate.step_time
    text = odd.explain()
    assert "What no mesh axis divides" in text and "20016" in text and "Padded, the best plan found takes" in text
    assert "What no mesh axis divides" not in even.explain()
