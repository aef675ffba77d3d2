"""The lists that tests are products of (adding to a list adds tests everywhere), and the comparison of a sharded run with a plain one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from zoo import MUTATING_STEPS, STEPS

from jaxauto.graph import build, walk
from jaxauto.planner import read
from jaxauto.solve.remat import Level, Remat
from jaxauto.targets.target import Target
from jaxauto.trace import trace

__all__ = [
    "MESHES",
    "MUTATING_STEPS",
    "SCANNED",
    "SMOKE_STEPS",
    "STEPS",
    "TOLERANCES",
    "assert_consistent",
    "assert_same_mutation",
    "assert_same_training",
    "copy_args",
    "everything_again",
    "fingerprint",
    "graph_of",
    "next_args",
    "precise",
    "rotor",
    "scanned_blocks",
    "tanh",
    "tolerance_of",
    "two_matrices",
    "words",
]

MESHES = {
    "data8": {"data": 8},
    "data4_model2": {"data": 4, "model": 2},
    "data2_model4": {"data": 2, "model": 4},
    "model8": {"model": 8},
}

SMOKE_STEPS = ("mlp_sgd", "transformer_scan", "linen_transformer_loop", "nnx_split_merge", "adamw_clip_schedule", "dropout_new_key")


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """``|a - b| <= relative * |b| + of_largest * max |b|`` for every element of a leaf."""

    relative: float
    of_largest: float


# By the coarsest floating-point type in the program: reassociation errs by some units in the last place of that type, and a few steps of
# training carry it on. test_zoo.py holds the zoo itself to these with arguments sharded by hand; where Adam would divide the rounding noise
# of small gradients by itself, the zoo's step has a larger epsilon. A gradient that is 1 % wrong errs by 1e-2 of the largest element.
TOLERANCES = {
    "float32": Tolerance(relative=1e-4, of_largest=5e-5),
    "bfloat16": Tolerance(relative=2e-2, of_largest=5e-3),
    "float16": Tolerance(relative=4e-3, of_largest=1e-3),
}


def tolerance_of(step, args) -> Tolerance:
    """The tolerance of the coarsest floating-point type that the step computes in."""
    found = set(re.findall(r"\b(bf16|f16)\[", str(jax.make_jaxpr(step)(*args))))
    coarsest = "bfloat16" if "bf16" in found else "float16" if found else "float32"
    return TOLERANCES[coarsest]


# Sums that cancel to 1e-4 of their terms: float32 leaves 8e-5 of a leaf's largest element to chance, and which sharding passes is luck.
# Compared in float64, to the same tolerance, the luck is gone and an error is not.
CANCELLING = frozenset({"linen_encoder_decoder"})


@contextlib.contextmanager
def precise(name, args):
    """The arguments of a step, in double precision for the steps of CANCELLING."""
    if name not in CANCELLING:
        yield args
        return
    with jax.enable_x64(True):
        single = lambda leaf: isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32  # noqa: E731
        yield jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if single(leaf) else leaf, args)


def copy_args(args):
    """Fresh arrays, so that a step that donates its arguments leaves the originals alone."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, args)


def next_args(args, outputs):
    """Every result but the last replaces the leading argument at its place."""
    state = outputs[:-1]
    return (*state, *args[len(state) :])


def assert_same_training(step, args, sharded_step, steps=3, tolerance=None):
    """Runs both for some steps, each on its own results, and compares the loss and every leaf of every result.

    Args:
      step: the step as written; it runs under jax.jit on one device.
      args: its arguments; they are copied, so either may donate.
      sharded_step: called the same way.
      steps: how many steps.
      tolerance: default: ``tolerance_of(step, args)``. Integers, booleans and keys must be equal.

    Returns:
      The losses of the plain run.
    """
    tolerance = tolerance or tolerance_of(step, args)
    plain = jax.jit(step)
    expected_args, actual_args = copy_args(args), copy_args(args)
    losses = []
    for number in range(steps):
        expected, actual = plain(*expected_args), sharded_step(*actual_args)
        assert_same_leaves(expected, actual, tolerance, f"step {number}")
        expected_args, actual_args = next_args(expected_args, expected), next_args(actual_args, actual)
        losses.append(float(expected[-1]["loss"]))
    return losses


def assert_same_mutation(step, args, sharded_step, steps=3, tolerance=None):
    """As assert_same_training, for a step of MUTATING_STEPS: compares metrics and the state of every nnx object among the arguments."""
    tolerance = tolerance or TOLERANCES["float32"]
    plain = nnx.jit(step)
    expected_args, actual_args = copy_args(args), copy_args(args)
    losses = []
    for number in range(steps):
        expected, actual = plain(*expected_args), sharded_step(*actual_args)
        assert_same_leaves((expected, expected_args), (actual, actual_args), tolerance, f"step {number}")
        losses.append(float(expected["loss"]))
    return losses


def assert_same_leaves(expected, actual, tolerance, when):
    expected_leaves, expected_tree = jax.tree_util.tree_flatten_with_path(expected)
    actual_leaves, actual_tree = jax.tree_util.tree_flatten_with_path(actual)
    assert actual_tree == expected_tree, f"{when}: results differ in structure: {actual_tree} instead of {expected_tree}"
    for (path, want), (_, got) in zip(expected_leaves, actual_leaves, strict=True):
        where = f"{when}, result {jax.tree_util.keystr(path)}"
        assert got.shape == want.shape and got.dtype == want.dtype, f"{where}: {got.dtype}{got.shape} instead of {want.dtype}{want.shape}"
        assert_same_array(host(want), host(got), tolerance, where)


def host(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same_array(want, got, tolerance, where):
    if not jnp.issubdtype(want.dtype, jnp.floating):
        np.testing.assert_array_equal(got, want, err_msg=where)
        return
    want, got = want.astype(np.float64), got.astype(np.float64)
    assert np.isfinite(want).all(), f"{where}: the plain step's own result is not finite"
    largest = np.abs(want).max(initial=0.0)
    np.testing.assert_allclose(got, want, rtol=tolerance.relative, atol=tolerance.of_largest * largest, err_msg=where)


def centred_rows(x):
    """A norm without a scale, in float32, of rows in a narrower type."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    return (centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-6)).astype(x.dtype)


@jax.custom_jvp
def tanh(x):
    """``jnp.tanh`` whose derivative is made of the same operations on every JAX: a difference in the forward pass, two products."""
    return jnp.tanh(x)


@tanh.defjvp
def _tanh_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    y = tanh(x)
    return y, (t + t * y) * (1 - y)


def graph_of(step, args):
    return build(trace(step, args).jaxpr)


def words(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def fingerprint(graph):
    return [(node.id, node.prim, node.inputs, node.outputs, node.links, len(node.bodies)) for node in walk(graph)], list(graph.values)


def assert_consistent(graph):
    """Producers, users and links are those of the nodes, and every value that a node reads is made before it in its own graph."""
    users = {number: [] for number in graph.values}

    def visit(g):
        known = {*g.inputs, *g.consts}
        for node in g.nodes:
            assert {x for x in node.inputs if isinstance(x, int)} <= known
            assert not known & set(node.outputs)
            known |= set(node.outputs)
            for x in node.inputs:
                if isinstance(x, int):
                    users[x].append(node)
            assert all(graph.values[out].producer is node for out in node.outputs)
            inside = {v for body in node.bodies for v in (*body.inputs, *body.outputs)}
            for link in node.links:
                assert {link.source, link.target} <= {*node.inputs, *node.outputs, *inside}
            for body in node.bodies:
                visit(body)
        assert {x for x in g.outputs if isinstance(x, int)} <= known

    visit(graph)
    ids = [node.id for node in walk(graph)]
    assert len(ids) == len(set(ids))
    assert all(value.users == users[number] for number, value in graph.values.items())


@functools.cache
def rotor(first, last, slots):
    """Forward passes run more than once for layers ``first`` to ``last`` of a chain (Rotor, Inria RR-9302, theorem 1).

    ``slots``: of activations beside the input of ``first``. That layer's result stays, or the input of a later one does.
    """
    if slots < 0 or first == last:
        return math.inf if slots < 0 else 0
    kept = rotor(first + 1, last, slots - 1)
    return min([kept, *(k - first + rotor(k, last, slots - 1) + rotor(first, k - 1, slots) for k in range(first + 1, last + 1))])


# ------------------------------------------------------------------------------------------------ what a recomputation does

SCANNED = 6  # layers of ``scanned_blocks``


def two_matrices(x, w):
    """A layer; its first product is made again where it is recomputed."""
    return x + jnp.tanh(x @ w["into"].astype(jnp.bfloat16)) @ w["out"].astype(jnp.bfloat16)


def scanned_blocks(target):
    """(``Remat``, values that depend on no batch) of a step with a scan of layers, 16 wide."""

    def step(weights, x):
        def loss(w):
            y, _ = jax.lax.scan(lambda y, w: (two_matrices(y, w), None), x, w)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    matrix = jax.ShapeDtypeStruct((SCANNED, 16, 16), jnp.float32)
    found = read(step, ({"into": matrix, "out": matrix}, jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)), {})
    return Remat(found.graph, found.groups, found.aliased, Target(target).chip), found.known_early


def everything_again(remat):
    """The leanest variant."""
    return remat.variant(Level(tuple(frozenset() for _ in remat.blocks)))
