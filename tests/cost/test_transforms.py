"""Fourier transforms on TPU: products, as they were compiled (libtpu 0.0.42), and what they take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxauto
from jaxauto.cost.compute import traffic_seconds
from jaxauto.cost.transforms import factors, products, seconds_of_transform
from jaxauto.graph import build, walk
from jaxauto.solve.check import check
from jaxauto.solve.work import unhidden_seconds
from jaxauto.strategies import shards
from jaxauto.targets.chips import CHIPS

# length -> products of each element in a compiled transform: flops / (6 x rows x length)
COMPILED = {
    2: 2,
    8: 8,
    30: 30,
    48: 48,
    64: 64,
    80: 80,
    96: 35,
    100: 100,
    120: 120,
    128: 128,
    144: 144,
    160: 37,
    192: 67,
    224: 39,
    240: 240,
    256: 256,
    288: 41,
    320: 69,
    384: 131,
    400: 400,
    480: 47,
    500: 500,
    512: 132,
    640: 133,
    768: 134,
    1008: 1008,
    1024: 136,
    1280: 138,
    1536: 140,
    4096: 160,
    4800: 139,
    6144: 176,
    8192: 192,
    16384: 256,
    32768: 384,
    65536: 512,
    131072: 264,
    262144: 272,
}


def transform(fun, *shapes):
    graph = build(jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)))
    (node,) = (node for node in walk(graph) if node.prim == "fft")
    return node


def complex_of(fun):
    return lambda x, y: fun(jax.lax.complex(x, y))


@pytest.mark.parametrize("length", COMPILED)
def test_factors_of_a_length(length):
    assert factors(length) == COMPILED[length]


@pytest.mark.parametrize(
    ("fun", "shapes", "compiled"),
    [
        (complex_of(jnp.fft.fft), ((4096, 256),) * 2, 1.611e9),
        (complex_of(jnp.fft.ifft), ((4096, 1024),) * 2, 3.423e9),
        (jnp.fft.rfft, ((4096, 256),), 1.074e9),
        (jnp.fft.rfft, ((4096, 1024),), 3.423e9),
        (complex_of(jnp.fft.irfft), ((4096, 129),) * 2, 1.611e9),
        (complex_of(jnp.fft.irfft), ((4096, 513),) * 2, 3.423e9),
        (jnp.fft.rfft2, ((64, 256, 256),), 9.689e9),
        (complex_of(jnp.fft.irfft2), ((64, 256, 129),) * 2, 9.689e9),
    ],
)
def test_products_of_a_transform(fun, shapes, compiled):
    assert products(transform(fun, *shapes)) == pytest.approx(compiled, rel=1e-3)


def convolved(kernel, x):
    """A layer that multiplies frequencies, and its gradient."""

    def loss(kernel):
        return jnp.mean(jnp.fft.irfft(jnp.fft.rfft(x) * kernel, n=x.shape[-1]) ** 2)

    return kernel - jax.grad(loss)(kernel)


def args(rows, length=1024):
    return jax.ShapeDtypeStruct((length // 2 + 1,), jnp.float32), jax.ShapeDtypeStruct((rows, length), jnp.float32)


@pytest.mark.parametrize(("target", "slower"), [("v5e:1x1", True), ("h100:1", False)])
def test_a_plan_and_a_profile_tell_them_alike(target, slower):
    plan = jaxauto.plan(convolved, *args(65536), target=target, remat="off", certify=False, progress=False)
    assert jaxauto.profile(convolved, *args(65536), target=target).seconds == pytest.approx(plan.estimate.compute_time, rel=0.02)
    assert ("Fourier transforms" in plan.explain()) == slower


def test_devices_share_them_and_the_independent_check_agrees():
    make = lambda target, n: jaxauto.plan(  # noqa: E731
        convolved, *args(65536), target=target, mesh={"data": n}, remat="off", certify=False, progress=False
    )
    found = [plan._bound().solved.best for plan in (make("v5e:1x1", 1), make("v5e:2x4", 8))]
    assert [check(best) for best in found] == [[], []]
    of_one, of_eight = (
        sum(seconds / float(shards(best.model.position(best.x, n)[None], best.model.mesh.sizes)[0]) for n, seconds in more.items())
        for best, more in ((best, unhidden_seconds(best.model)) for best in found)
    )
    assert of_eight == pytest.approx(of_one / 8) and of_one > 0


@pytest.mark.parametrize(("rows", "length", "passes"), [(2**14, 1024, True), (2**11, 1024, False), (2**16, 256, False)])
def test_a_dimension_that_is_cut_is_passed_over_unless_it_is_on_chip(rows, length, passes):
    node, chip = transform(complex_of(jnp.fft.fft), *((rows, length),) * 2), CHIPS["v5e"]
    of_products = products(node) / (chip.flops_efficiency * chip.peak_flops("float32", "highest"))
    assert seconds_of_transform(node, chip) == pytest.approx(traffic_seconds(8 * 8 * rows * length, chip) if passes else of_products)
    assert seconds_of_transform(node, CHIPS["h100"]) == 0
