"""Paths, state pairs, donation, and what a step that cannot be traced says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxauto.errors import TraceError
from jaxauto.trace import trace


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


STATE = {"params": {"w": struct(4, 4), "b": struct(4)}, "step": struct(dtype=jnp.int32)}


def step(state, batch):
    params = jax.tree.map(lambda p: p - batch.sum(), state["params"])
    return {"params": params, "step": state["step"] + 1}, {"loss": batch.sum()}


def test_paths_name_every_leaf():
    found = trace(step, (STATE, struct(8, 4)))
    assert found.in_paths == ("0.params.b", "0.params.w", "0.step", "1")
    assert found.out_paths == ("0.params.b", "0.params.w", "0.step", "1.loss")
    assert trace(lambda x, scale: x * scale, (struct(2),), {"scale": struct()}).in_paths == ("0", "scale")


def test_a_key_that_is_called_value_is_kept():
    found = trace(lambda p: p["key"] @ p["value"], ({"key": struct(2, 3), "value": struct(3, 2)},))
    assert found.in_paths == ("0.key", "0.value")


def test_state_in_and_out_are_paired_and_donated():
    found = trace(step, (STATE, struct(8, 4)))
    assert found.state == ((0, 0), (1, 1), (2, 2))
    assert found.donated == (True, True, True, False)


PAIRS = {
    "a lone array at its own position": (lambda w, x: (w - x.sum(), x.sum()), (struct(4), struct(8)), {(0, 0)}),
    "labels are not predictions": (lambda w, x, y: (w * 2, w * 2 + y), (struct(4), struct(8), struct(4)), {(0, 0)}),
    "a scalar is nobody's state": (lambda rate, x: (x.sum(), rate), (struct(), struct(8)), set()),
    "state inside the result": (lambda s, x: ((s, x.sum()), 1.0), ((struct(2), struct(3)), struct(8)), {(0, 0), (1, 1)}),
    "each output once": (lambda a, b: (a,), ((struct(2),), (struct(2),)), {(0, 0)}),
    "dtype matters": (lambda s, x: ((s[0].astype(jnp.bfloat16),), x), ((struct(2),), struct(8)), {(1, 1)}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    fun, args, expected = PAIRS[name]
    assert set(trace(fun, args).state) == expected


def test_donation_can_be_given():
    assert trace(step, (STATE, struct(8, 4)), donate_argnums=()).donated == (False,) * 4
    assert trace(step, (STATE, struct(8, 4)), donate_argnums=1).donated == (False, False, False, True)


def test_tracing_allocates_nothing():
    before = len(jax.live_arrays())
    trace(step, (STATE, struct(8, 4)))
    assert len(jax.live_arrays()) == before


def test_a_step_that_needs_a_value_says_which_argument_was_abstract():
    def branches(x, training):
        return x if training else -x

    with pytest.raises(TraceError) as error:
        trace(branches, (struct(4), struct(dtype=bool)))
    text = str(error.value)
    assert "branches cannot be traced: TracerBoolConversionError" in text
    assert "Abstract while tracing were the arguments" in text and "1 (bool[])" in text
    assert "static_argnums" in text
    assert error.value.__cause__ is not None


def test_an_argument_that_is_no_array_is_named():
    with pytest.raises(TraceError, match=r"argument leaf 1\.mode is a str, not an array.*static_argnums"):
        trace(lambda x, options: x, (struct(4), {"mode": "train"}))
