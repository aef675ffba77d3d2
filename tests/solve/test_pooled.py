"""What the gradient of max pooling takes beside its arrays."""

from __future__ import annotations

import jax
import pytest
from flax import linen as nn

import jaxauto
from jaxauto.solve.beside import held_beside
from jaxauto.solve.check import check
from jaxauto.solve.pooled import pooled

MIB = 2**20


def best_of(target, dtype, padding, mesh):
    def gradient(x, cotangent):
        return jax.vjp(lambda x: nn.max_pool(x, (2, 2) if padding == "VALID" else (3, 3), (2, 2), padding), x)[1](cotangent)[0]

    args = [jax.ShapeDtypeStruct((64, n, n, 64), dtype) for n in (64, 32)]
    plan = jaxauto.plan(gradient, *args, target=target, mesh=mesh, donate_argnums=(), certify=False, progress=False)
    return plan.program.solved.best


@pytest.mark.parametrize(
    ("target", "dtype", "padding", "beside"),
    [
        ("cpu:1", "float32", "VALID", 4 * 64 + 5 * 16),
        ("cpu:1", "bfloat16", "VALID", 5 * 64 + 5 * 16),
        ("cpu:1", "float32", "SAME", 5 * 64 * (65 / 64) ** 2 + 5 * 16),
        ("h100:1", "bfloat16", "SAME", 5 * 16),
    ],
)
def test_coordinates_are_reduced_beside_the_arrays(target, dtype, padding, beside):
    """As in results/pooling.md: of 64 MiB in float32 or int32 each, and a quarter of the windows."""
    best = best_of(target, dtype, padding, {"data": 1})
    ((_, _, at, bytes_),) = pooled(best.model)
    assert bytes_ == beside * MIB
    assert held_beside(best.model).timeline(best.x, best.model.buffers.length)[at] >= bytes_
    assert check(best, best.peak_bytes, {}) == []


def test_of_a_split_batch_a_device_has_its_part():
    best = best_of("h100:8", "bfloat16", "SAME", {"data": 8})
    ((_, _, at, bytes_),) = pooled(best.model)
    assert held_beside(best.model).timeline(best.x, best.model.buffers.length)[at] == bytes_ / 8
    assert check(best, best.peak_bytes, {}) == []


def test_on_tpu_there_is_nothing_of_the_kind():
    assert pooled(best_of("v5e:1x1", "bfloat16", "SAME", {"data": 1}).model) == []
