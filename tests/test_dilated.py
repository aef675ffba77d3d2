"""The weight gradient of a transposed convolution slides the layer's input over the cotangent, with the same numbers; others stay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxauto.compat import dead_code_eliminated
from jaxauto.dilated import undilated
from jaxauto.graph import build
from jaxauto.rewrite.evaluate import evaluator

NUMBERS = ("NHWC", "HWIO", "NHWC")
IMAGE, FEATURES, CHANNELS = (3, 5, 6, 4), 5, 4


def gradient(strides=(2, 2), window=(2, 2), padding="SAME", numbers=NUMBERS, **options):
    """Of a transposed convolution's kernel."""
    layer = functools.partial(lax.conv_transpose, strides=strides, padding=padding, dimension_numbers=numbers, **options)
    image = jax.ShapeDtypeStruct(tuple(IMAGE["NHWC".index(c)] for c in numbers[0]), jnp.float32)
    sizes = {"H": window[0], "W": window[1], "I": CHANNELS, "O": FEATURES}
    kernel = jax.ShapeDtypeStruct(tuple(sizes[c] for c in numbers[1]), jnp.float32)
    cotangent = jax.eval_shape(layer, image, kernel)
    return (lambda x, w, d: jax.vjp(layer, x, w)[1](d)[1]), (image, kernel, cotangent)


def strided():
    layer = functools.partial(lax.conv_general_dilated, window_strides=(2, 2), padding="SAME", dimension_numbers=NUMBERS)
    image, kernel = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (IMAGE, (3, 3, CHANNELS, FEATURES)))
    return (lambda x, w, d: jax.vjp(layer, x, w)[1](d)), (image, kernel, jax.eval_shape(layer, image, kernel))


def forward():
    layer = functools.partial(lax.conv_transpose, strides=(2, 2), padding="SAME", dimension_numbers=NUMBERS)
    return layer, tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in (IMAGE, (2, 2, CHANNELS, FEATURES)))


EXCHANGED = {
    "a kernel as wide as the stride": gradient(),
    "a wider kernel": gradient(window=(3, 3)),
    "a narrower kernel, no padding": gradient((3, 2), (1, 1), "VALID"),
    "one dimension dilated": gradient((2, 1), (4, 1)),
    "uneven padding": gradient((3, 2), (3, 2), ((2, 1), (0, 3))),
    "channels first": gradient(numbers=("NCHW", "IOHW", "NCHW")),
    "the transposed kernel": gradient(numbers=("NHWC", "HWOI", "NHWC"), window=(3, 3)),
    "precision of each operand": gradient(precision=("high", "highest"), preferred_element_type=jnp.float32),
}
AS_WRITTEN = {"a strided convolution": strided(), "the transposed convolution": forward(), "no dilation": gradient((1, 1), (2, 2))}


@pytest.mark.parametrize("case", EXCHANGED | AS_WRITTEN)
def test_the_numbers_are_those_as_written(case):
    fun, avals = (EXCHANGED | AS_WRITTEN)[case]
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=a.shape), a.dtype) for a in avals]
    got = evaluator(build(jax.make_jaxpr(fun)(*args)))(*args)
    for x, y in zip(got, jax.tree.leaves(fun(*args)), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", EXCHANGED)
def test_no_operand_is_dilated_to_be_slid_over(case):
    fun, avals = EXCHANGED[case]
    nodes = build(dead_code_eliminated(jax.make_jaxpr(fun)(*avals))).nodes
    (conv,) = (n for n in nodes if n.prim == "conv_general_dilated")
    assert set(conv.params["lhs_dilation"]) == {1} and max(conv.params["rhs_dilation"]) > 1
    assert "rev" in [n.prim for n in nodes] and "test_dilated.py" in conv.source and conv.backward


@pytest.mark.parametrize("case", AS_WRITTEN)
def test_others_stay(case):
    fun, avals = AS_WRITTEN[case]
    found = [eqn for eqn in jax.make_jaxpr(fun)(*avals).eqns if eqn.primitive.name == "conv_general_dilated"]
    assert found and [undilated(eqn) for eqn in found] == [None] * len(found)


def test_groups_stay():
    """Their features would have to be exchanged too."""
    kernel = jax.ShapeDtypeStruct((2, 2, 1, CHANNELS), jnp.float32)

    def layer(x, w):
        options = {"lhs_dilation": (2, 2), "dimension_numbers": NUMBERS, "feature_group_count": CHANNELS}
        return lax.conv_general_dilated(x, w, (1, 1), ((1, 1), (1, 1)), **options)

    image = jax.ShapeDtypeStruct(IMAGE, jnp.float32)
    eqns = jax.make_jaxpr(lambda x, w, d: jax.vjp(layer, x, w)[1](d)[1])(image, kernel, jax.eval_shape(layer, image, kernel)).eqns
    assert all(undilated(eqn) is None for eqn in eqns)
