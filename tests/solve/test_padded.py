"""Operands that a dot on GPU reads padded, beside the array as others read it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxauto
from jaxauto.solve.beside import held_beside
from jaxauto.solve.check import check
from jaxauto.solve.padded import held_padded, may_be_padded


def projection(x, w):
    """The gradient of a last projection as of a loss: ``h`` is contracted over the words by one dot, over the rows by another."""
    h = jnp.sin(x @ w)
    return h @ w.T, h.T @ x


def best_of(words, rows=1024, width=1024, **options):
    args = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16), jax.ShapeDtypeStruct((width, words), jnp.bfloat16)
    best = jaxauto.plan(projection, *args, certify=False, progress=False, remat="off", **options).program.solved.best
    assert check(best, best.peak_bytes, {}) == []
    return best


@pytest.mark.parametrize(("words", "rows", "padded"), [(8201, 1024, True), (8208, 1024, False), (8201, 4096, False), (8001, 1024, False)])
def test_what_is_contracted_by_a_dot_of_few_tiles_is_padded(words, rows, padded):
    """As compiled for H100 (kernels.pads): no multiple of 16 elements is, nor what keeps all cores busy, or is short."""
    best = best_of(words, rows, target="h100:1", mesh={"data": 1})
    model = best.model
    rows_held = [(begin, table[best.x[i], best.x[j]]) for begin, _, i, j, table in held_padded(model)]
    wide = 2 * rows * words
    assert [bytes_ for _, bytes_ in rows_held if bytes_ == wide] == [wide] * padded
    timeline = held_beside(model).timeline(best.x, model.buffers.length)
    assert all(timeline[at] >= bytes_ for at, bytes_ in rows_held)


def test_what_a_device_contracts_of_a_split_dimension_decides():
    """16,402 words on two devices are 8,201 each."""
    pins = {"0": P(), "1": P(None, "model")}
    best = best_of(16402, target="h100:2", mesh={"model": 2}, constraints=pins)
    held = [table[best.x[i], best.x[j]] for *_, i, j, table in held_padded(best.model)]
    assert 1024 * 8201 * 2 in held


def test_nothing_is_padded_elsewhere():
    assert may_be_padded(best_of(8201, target="v5e:1x1", mesh={"data": 1}).model) == []
