"""The evaluator of a graph is the function it was traced from, bit for bit."""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata

import jaxauto
from jaxauto.graph import build
from jaxauto.rewrite.apply import after_last
from jaxauto.rewrite.evaluate import Pins, evaluator, jaxpr_of
from jaxauto.trace import trace

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
W = jnp.cos(jnp.arange(16.0)).reshape(4, 4)


@jax.custom_vjp
def doubled_gradient(x):
    return jnp.sin(x)


doubled_gradient.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda r, g: (2 * r * g,))


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -0.5, 0.5)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), tangents[0]))


def with_scan(x, w):
    return lax.scan(lambda c, row: (jnp.tanh(c @ w) + row, c.sum()), x, jnp.stack([x, 2 * x]), reverse=True)


def with_consts_only_scan(x, w):
    return lax.scan(lambda c, _: (c @ w, None), x, None, length=3)[0]


def with_while(x, w):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1]


def with_cond(x, w):
    return lax.cond(x.sum() > 0, lambda a: a @ w, lambda a: a - 1.0, x), lax.switch(2, [jnp.sin, jnp.cos, jnp.tan], x)


def with_nested_jit(x, w):
    return jax.jit(lambda a: jax.jit(jnp.tanh)(a @ w) + jnp.asarray(np.arange(4.0, dtype=np.float32)))(x)


def with_keys(x, w):
    key = jax.random.key(3)
    first, second = jax.random.split(key)
    rows = lax.map(lambda k: jax.random.normal(k, (2,)), jax.random.split(first, 3))
    return x + jax.random.normal(second, x.shape), rows, jax.random.fold_in(key, 1)


def with_old_keys(x, w):
    return x * jax.random.bernoulli(jax.random.PRNGKey(0), 0.5, x.shape)


def with_literals(x, w):
    return lax.fori_loop(0, 3, lambda i, c: c + i * 0.5, x), jnp.float32(1), x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


def gradient_of(f):
    def loss(x, w):
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(f(x, w)))

    return jax.value_and_grad(loss, argnums=(0, 1))


FUNCTIONS = {
    "scan": with_scan,
    "scan without xs": with_consts_only_scan,
    "while": with_while,
    "cond and switch": with_cond,
    "nested jit": with_nested_jit,
    "keys": with_keys,
    "old keys": with_old_keys,
    "literals": with_literals,
    "gradient of scan": gradient_of(with_scan),
    "gradient of scan without xs": gradient_of(with_consts_only_scan),
    "gradient of cond": gradient_of(with_cond),
    "gradient of nested jit": gradient_of(with_nested_jit),
    "gradient of custom_vjp": gradient_of(lambda x, w: doubled_gradient(x @ w)),
    "gradient of custom_jvp": gradient_of(lambda x, w: clipped(x @ w)),
    "gradient of checkpoint": gradient_of(jax.checkpoint(lambda x, w: jnp.sin(jnp.tanh(x @ w)))),
    "gradient of checkpoint in scan": gradient_of(
        lambda x, w: lax.scan(lambda c, _: (jax.checkpoint(lambda a: jnp.tanh(a @ w))(c), None), x, None, length=3)[0]
    ),
}


def words(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


@pytest.mark.smoke
@pytest.mark.parametrize("name", FUNCTIONS)
def test_evaluator_equals_the_function_bit_for_bit(name):
    function = FUNCTIONS[name]
    graph = build(trace(function, (X, W)).jaxpr)
    expected = jax.tree.leaves(jax.jit(function)(X, W))
    actual = jax.jit(evaluator(graph))(X, W)
    assert len(actual) == len(expected)
    for want, got in zip(expected, actual, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(words(got), words(want))
    assert [v.aval.shape for v in jaxpr_of(graph).jaxpr.outvars] == [want.shape for want in expected]


def test_pins_see_every_value_once_and_can_change_it():
    graph = build(trace(lambda x, w: jnp.sin(x) @ w, (X, W)).jaxpr)
    seen = []

    class Doubling(Pins):
        def value(self, number, array):
            seen.append(number)
            producer = graph.values[number].producer
            return array * 2 if producer is not None and producer.prim == "sin" else array

    (actual,) = evaluator(graph, Doubling())(X, W)
    np.testing.assert_array_equal(actual, (2 * jnp.sin(X)) @ W)
    assert sorted(seen) == sorted(graph.values)


def test_a_barrier_for_cpu_lets_keys_and_narrow_floats_wait_too():
    """Each array by a predicate of its own, bit for bit; keys too, or the bits made of them again would be those that are there."""
    arrays = [jax.random.key(3), jnp.array([1.5, float("nan")], jnp.bfloat16), jnp.arange(3), jnp.array([2.0])]
    passed = jax.jit(after_last)(arrays)
    assert jnp.array_equal(jax.random.key_data(passed[0]), jax.random.key_data(arrays[0]))
    for before, after in zip(arrays[1:], passed[1:], strict=True):
        assert before.dtype == after.dtype and before.tobytes() == after.tobytes()
    lines = jax.jit(after_last).lower(arrays).as_text().splitlines()
    predicates = [line.split("stablehlo.select ")[1].split(",")[0] for line in lines if "stablehlo.select" in line]
    assert len(set(predicates)) == len(predicates) == len(arrays)


def test_what_is_awaited_is_read_before_anything_passes():
    def fn(x, gradient):
        return after_last([gradient, x], {0})[1]

    here = jnp.ones(4)
    text = jax.jit(fn).lower(here, here).as_text()
    assert text.count("stablehlo.slice %arg0") == text.count("stablehlo.slice %arg1") == 1


@pytest.mark.smoke
def test_what_the_user_asked_of_equations_is_kept():
    """``compute_on`` (on jax 0.12 a primitive of its own) and metadata, in the forward and the backward pass, in a loop too."""
    by_context = "f" not in inspect.signature(compute_on).parameters

    def loss(w, x):
        def body(x, _):
            with compute_on("device_host") if by_context else contextlib.nullcontext():
                y = jnp.sin(x)
            with set_xla_metadata(asked="there"):
                return x + y @ w, None

        return jnp.sum(lax.scan(body, x, None, length=2)[0])

    step = lambda w, x: w - 0.1 * jax.grad(loss)(w, x)  # noqa: E731
    plan = jaxauto.plan(step, W, X, mesh={"data": 1}, donate_argnums=(), certify=False, progress=False)
    for lowered in (jax.jit(step).lower(W, X), plan.jit().lower(W, X)):
        assert 'asked = "there"' in lowered.as_text() and ("_xla_compute_type" in lowered.as_text()) == by_context
