"""Copies that dots on CPU read, and results that are not rounded yet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxauto
from jaxauto.solve.beside import held_beside
from jaxauto.solve.widened import widened

WIDTH, BATCH = 32, 64


def model_of(fn, *args, target="cpu:1", **options):
    plan = jaxauto.plan(fn, *args, target=target, remat="off", memory_budget=2**40, certify=False, **options)
    return plan._bound().solved.best


def shared(x, w):
    """Two dots that read one array in one order, and a third in another."""
    h = jnp.tanh(x @ w)
    first = h @ w
    second = jnp.sin(first) + h
    return second.T @ (h @ w.T), first


@pytest.mark.parametrize(
    ("dtype", "target", "copies"), [("bfloat16", "cpu:1", True), ("float32", "cpu:1", False), ("bfloat16", "v5p:1x1x1", False)]
)
def test_what_is_narrow_is_copied_on_cpu_alone(dtype, target, copies):
    args = jax.ShapeDtypeStruct((BATCH, WIDTH), dtype), jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)
    found = widened(model_of(shared, *args, target=target).model)
    assert (found is not None and bool(found.copies) and bool(found.results)) == copies


def test_dots_share_a_copy():
    args = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16), jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    best = model_of(shared, *args)
    found, values = widened(best.model), best.model.variant.rewritten.graph.values
    copy = max((c for c in found.copies if values[c.node.inputs[c.place]].shape == (BATCH, WIDTH)), key=lambda c: c.end - c.begin)
    assert copy.end > copy.begin
    held = held_beside(best.model).timeline(best.x, best.model.buffers.length)
    assert held[copy.begin : copy.end + 1].min() >= 4 * BATCH * WIDTH


def test_copies_are_of_what_a_device_reads():
    args = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16), jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    split = {"0": jax.sharding.PartitionSpec("data"), "1": jax.sharding.PartitionSpec()}
    peaks = []
    for target, options in (("cpu:1", {}), ("cpu:8", {"mesh": {"data": 8}, "constraints": split})):
        best = model_of(lambda x, w: jnp.tanh(x @ w) @ w, *args, target=target, **options)
        peaks.append(held_beside(best.model).timeline(best.x, best.model.buffers.length).max())
    whole, part = peaks
    weights = 4 * WIDTH * WIDTH
    assert (whole - weights) / 8 == pytest.approx(part - weights)
