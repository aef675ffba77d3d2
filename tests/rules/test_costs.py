"""Flops, bytes and kinds that rules declare."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxauto.core import Kind
from jaxauto.rules import rule_for
from jaxauto.rules.window import window_halo

from .harness import Row, find_equation
from .table import conv, conv_gradient


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def rule_of(primitive, function, *args, index=0):
    return rule_for(find_equation(Row(primitive, function, args, "", index)).eqn)


def test_dot_flops():
    assert rule_of("dot_general", lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), ones(2, 3, 5), ones(2, 5, 7)).flops == 2 * 2 * 3 * 5 * 7
    assert rule_of("dot_general", jnp.vdot, ones(5), ones(5)).flops == 2 * 5


def test_ragged_dot_flops_are_those_of_one_group():
    assert rule_of("ragged_dot_general", lax.ragged_dot, ones(8, 4), ones(3, 4, 12), np.array([3, 1, 4], np.int32)).flops == 2 * 8 * 4 * 12


def test_convolution_flops_count_real_taps():
    x, w = ones(2, 8, 8, 4), ones(3, 3, 4, 6)
    taps = (8 * 3 - 2) ** 2  # along each side, one tap at either end meets padding
    assert rule_of("conv_general_dilated", conv, x, w).flops == 2 * 2 * 4 * 6 * taps
    patches = rule_of("conv_general_dilated", lambda x, w: conv(x, w, 4, 1, "VALID"), x, ones(4, 4, 4, 6))
    assert patches.flops == 2 * (2 * 2 * 2 * 6) * (4 * 4 * 4)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 4])
def test_gradient_convolutions_do_the_work_of_the_forward_one(stride, groups):
    x, w = ones(2, 8, 8, 4), ones(3, 3, 4 // groups, 8)
    forward = rule_of("conv_general_dilated", lambda x, w: conv(x, w, stride, groups), x, w)
    for argnum in (0, 1):
        gradient = rule_of("conv_general_dilated", conv_gradient(argnum, stride=stride, groups=groups), x, w, index=1)
        assert gradient.flops == forward.flops


def test_xla_counts_the_same_convolution_flops():
    x, w = ones(2, 8, 8, 4), ones(3, 3, 4, 6)
    counted = jax.jit(conv).lower(x, w).compile().cost_analysis()["flops"]
    assert rule_of("conv_general_dilated", conv, x, w).flops == counted


def test_cuts_touch_what_they_move():
    cache, token = ones(4, 1024, 8), ones(4, 1, 8)
    moved = 2 * token.nbytes
    assert rule_of("slice", lambda x: x[:, :1], cache).bytes_ == moved
    assert rule_of("dynamic_slice", lambda x, i: lax.dynamic_slice_in_dim(x, i, 1, 1), cache, np.int32(3)).bytes_ == moved
    update = rule_of("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 1), cache, token, np.int32(3))
    assert update.bytes_ == moved


def test_lookups_touch_the_rows_they_look_up():
    table, tokens = ones(1000, 8), np.zeros((4, 3), np.int32)
    looked_up = 4 * 3 * 8 * 4
    assert rule_of("gather", lambda t, i: t[i], table, tokens).bytes_ == 2 * looked_up + tokens.nbytes
    gradient = rule_of("scatter-add", jax.grad(lambda t, i: t[i].sum()), table, tokens)
    assert gradient.bytes_ == 3 * looked_up + tokens.nbytes


KINDS = [
    (Kind.VIEW, "broadcast_in_dim", lambda x: x[:, None, :]),
    (Kind.VIEW, "convert_element_type", lambda x: x.astype(jnp.bfloat16)),
    (Kind.VIEW, "reshape", lambda x: x.reshape(-1)),
    (Kind.CHEAP, "select_n", lambda x: jnp.where(x > 0, x, 0)),
    (Kind.CHEAP, "gt", lambda x: x > 0),
    (Kind.EXPENSIVE, "exp", jnp.exp),
    (Kind.EXPENSIVE, "rsqrt", lax.rsqrt),
    (Kind.RANDOM, "random_bits", lambda x: jax.random.bits(jax.random.key(0), x.shape)),
    (Kind.REDUCE, "reduce_sum", jnp.sum),
    (Kind.REDUCE, "argmax", jnp.argmax),
    (Kind.MOVE, "transpose", jnp.transpose),
    (Kind.MOVE, "concatenate", lambda x: jnp.concatenate([x, x])),
    (Kind.SCAN, "cumsum", lambda x: lax.cumsum(x)),
    (Kind.SCAN, "sort", jnp.sort),
]


@pytest.mark.parametrize(("kind", "primitive", "function"), KINDS, ids=[k[1] for k in KINDS])
def test_kinds(kind, primitive, function):
    rule = rule_of(primitive, function, ones(4, 8))
    assert rule.kind is kind
    assert (rule.flops == 0) == (kind in (Kind.VIEW, Kind.MOVE))


def test_reductions_work_on_every_element():
    assert rule_of("reduce_sum", lambda x: x.sum(0), ones(4, 8)).flops == 32


@pytest.mark.parametrize(
    ("expected", "sizes", "window", "stride", "dilations"),
    [
        (0, (16, 16), 1, 1, (1, 1)),
        (2, (16, 16), 3, 1, (1, 1)),
        (1, (16, 8), 3, 2, (1, 1)),
        (0, (16, 4), 4, 4, (1, 1)),
        (4, (16, 16), 3, 1, (1, 2)),
        (1, (8, 16), 3, 1, (2, 1)),  # the gradient of stride 2
        (0, (4, 16), 4, 1, (4, 1)),  # the gradient of patches
        (None, (16, 14), 3, 1, (1, 1)),  # blocks do not line up
        (None, (16, 16), 9, 1, (1, 1)),  # more than half
        (None, (16, 16), 3, 2, (2, 1)),
    ],
)
def test_window_halo(expected, sizes, window, stride, dilations):
    assert window_halo(sizes, window, stride, dilations) == expected
