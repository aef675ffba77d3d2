"""Rooflines of operations, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxauto
from jaxauto.cost.compute import bytes_per_flop, operation_seconds, traffic_seconds
from jaxauto.cost.onchip import Near, Side
from jaxauto.planner import read
from jaxauto.solve.check import check
from jaxauto.strategies import WHOLE
from jaxauto.targets.target import Target


@pytest.mark.parametrize(("target", "filled"), [("v5e:1", 2), ("h100:1", 1)])
@pytest.mark.parametrize("features", [64, 128])
def test_the_padding_of_tiles_takes_time(target, filled, features):
    """64 features fill half of a TPU's 128 lanes; batch and features are minor in a convolution, whatever they pad."""

    def fn(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x = jax.ShapeDtypeStruct((8, 32, 32, features), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((1, 1, features, features), jnp.bfloat16)
    groups, chip = read(fn, (x, kernel), {}).groups, Target(target).chip
    (op,) = groups.operations
    seconds = operation_seconds(op, groups.graph.values, np.array([[WHOLE]], np.int8), (1,), chip)
    moved = 2 * (2 * x.size + kernel.size) * (filled if features == 64 else 1)
    assert seconds == pytest.approx([traffic_seconds(moved, chip)])


def test_dimensions_of_a_dot_lie_as_they_pad_least():
    """Heads of 64 elements do not pad: the sequence is laid out last."""
    heads = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    groups, chip = read(lambda q, k: jnp.einsum("blhk,bmhk->bhlm", q, k), (heads, heads), {}).groups, Target("v5e:1").chip
    (op,) = groups.operations
    seconds = operation_seconds(op, groups.graph.values, np.array([[WHOLE]], np.int8), (1,), chip)
    assert seconds == pytest.approx([traffic_seconds(2 * (2 * heads.size + 2 * 4 * 256 * 256), chip)])


def test_of_a_split_dot_less_of_its_fusion_is_hidden():
    """A gradient [512, 512] added to a carry: whole, its flops hide the carry; over eight devices they do not, and it is as large."""
    rows = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16)
    groups, chip = read(lambda x, y: jnp.einsum("bm,bn->mn", x, y), (rows, rows), {}).groups, Target("v5p:2x2x2").chip
    (op,) = groups.operations
    batch = [f for f, _ in op.factors].index(op.operands[0].dims[0][1])
    states = np.array([[WHOLE], [batch]], np.int8)
    own, carry = [2.0 * (2 * rows.size + 512 * 512), 2.0 * (2 * rows.size / 8 + 512 * 512)], 2.0 * 512 * 512
    flops = [2.0 * 4096 * 512 * 512 / n for n in (1, 8)]
    hidden = [max(0.0, f * bytes_per_flop(chip) - o) for f, o in zip(flops, own, strict=True)]
    exposed = max(0.0, carry - hidden[0]) / carry
    near = Near(beside={op.node.id: Side(((2, carry),), exposed, 1.0)})
    alone = operation_seconds(op, groups.graph.values, states, (8,), chip)
    longer = operation_seconds(op, groups.graph.values, states, (8,), chip, near) - alone
    assert hidden[1] < carry
    assert longer == pytest.approx([0.0, float(traffic_seconds(carry - hidden[1] - exposed * carry, chip))], abs=1e-12)


@pytest.mark.parametrize("target", ["h200:1", "v5e:1"])
def test_what_a_dot_writes_counts_more_on_a_gpu(target):
    """Scores of short heads: their flops are few, and what is written is most of it."""
    heads = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    groups, chip = read(lambda q, k: jnp.einsum("blhk,bmhk->bhlm", q, k), (heads, heads), {}).groups, Target(target).chip
    (op,) = groups.operations
    (seconds,) = operation_seconds(op, groups.graph.values, np.array([[WHOLE]], np.int8), (1,), chip)
    scores = 2 * 2 * 4 * 256 * 256
    assert seconds == pytest.approx(traffic_seconds(2 * 2 * heads.size + chip.dot_writes * scores, chip))
    assert (chip.dot_writes > 1) == (target == "h200:1")


@pytest.mark.parametrize("precision", ["default", "high", "highest", "BF16_BF16_F32_X3", ("default", "highest")])
@pytest.mark.parametrize("target", ["v5e:1x1", "h100:1"])
def test_a_product_takes_as_long_as_the_precision_that_is_asked_for(target, precision):
    """Plan, profile and the independent check; float32, not what it is rounded to."""
    if isinstance(precision, tuple):
        precision = tuple(map(jax.lax.Precision, precision))
    matrix, chip = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), Target(target).chip
    asked = "highest" if isinstance(precision, tuple) else precision.lower()
    fn = lambda x, w: jnp.dot(x, w, precision=precision)  # noqa: E731
    plan = jaxauto.plan(fn, matrix, matrix, target=target, remat="off", donate_argnums=(), certify=False, progress=False)
    expected = 2 * 4096**3 / (chip.flops_efficiency * chip.peak_flops("float32", asked)) + chip.launch_seconds
    assert plan.estimate.compute_time == pytest.approx(expected, rel=0.02)
    assert jaxauto.profile(fn, matrix, matrix, target=target).seconds == pytest.approx(expected, rel=0.02)
    assert check(plan._bound().solved.best) == []
