"""Copies between dots over a batch and dots by weights, by hand; compiled: scripts/results/short_rows.md."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxauto.core import OPERATIONS
from jaxauto.cost.compute import operation_seconds, traffic_seconds
from jaxauto.cost.lanes import Copied, batch_dims, copied_between, differs
from jaxauto.cost.onchip import Near
from jaxauto.graph import build, walk
from jaxauto.planner import read
from jaxauto.rules import rule_for
from jaxauto.strategies import WHOLE
from jaxauto.targets.target import Target
from jaxauto.trace import trace


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def attention(x, q, k, v, out):
    """Four dots by weights, two over a batch."""
    q, k, v = (jnp.einsum("bsf,fhd->bshd", x, w) for w in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q / 8.0, k)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return jnp.einsum("bshd,hdf->bsf", mixed, out)


def graph_of(fn, *args):
    graph = build(trace(fn, args).jaxpr)
    return graph, {n.id for n in walk(graph) if not n.bodies and rule_for(n.eqn).kind in OPERATIONS}


def copies(fn, *args):
    """(which dot over a batch, shape, copies), in order."""
    graph, operations = graph_of(fn, *args)
    batched = [n.id for n in walk(graph) if n.prim == "dot_general" and n.params["dimension_numbers"][1][0]]
    found = copied_between(graph, operations)
    return sorted((batched.index(node), graph.values[x].shape, copied) for (node, x), copied in found.items())


HEADS, OUT, X = array(384, 6, 64), array(6, 64, 384), array(256, 48, 384)


def test_what_projections_make_and_what_one_reads():
    """Of what the second makes, [b, h, d, s], the rows have to be last."""
    heads = (256, 48, 6, 64)
    result = (256, 6, 64, 48)
    assert copies(attention, X, HEADS, HEADS, HEADS, OUT) == [
        (0, heads, Copied(1)),
        (0, heads, Copied(1)),
        (1, result, Copied(1, 3)),
        (1, heads, Copied(1)),
    ]


def test_one_copy_serves_all_dots_over_a_batch():
    def twice(x, w):
        q = jnp.einsum("bsf,fhd->bshd", x, w)
        first, second = (jnp.einsum("bqhd,bkhd->bhqk", y, q) for y in (q, jnp.tanh(q)))
        return (first + second).sum()

    assert copies(twice, X, HEADS) == [(0, (256, 48, 6, 64), Copied(1))]


def test_each_dot_by_a_weight_reads_its_own():
    def two(scores, v, a, b):
        mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
        return jnp.einsum("bshd,hdf->bsf", mixed, a).sum() + jnp.einsum("bshd,hdf->bsf", mixed * 2, b).sum()

    ((_, _, copied),) = copies(two, array(256, 6, 48, 48), array(256, 48, 6, 64), OUT, OUT)
    assert copied == Copied(2)


def test_of_gradients_the_rows_have_to_be_last():
    """Those of queries, keys and values, each for two dots: [b, h, q, d] or [b, h, d, k], as JAX has them."""
    loss = lambda x, *w: attention(x, *w).astype(jnp.float32).sum()  # noqa: E731
    found = copies(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)), X, HEADS, HEADS, HEADS, OUT)
    twice = [(shape, copied.last) for _, shape, copied in found if copied.times == 2]
    assert len(twice) == 4  # and the result, which the gradient of the last weight reads too
    assert all(shape[last] == 48 for shape, last in twice)


def test_what_is_reduced_or_given_is_not_copied():
    def none(q, k, w):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return scores.sum(-1) @ w

    assert copies(none, array(256, 48, 6, 64), array(256, 48, 6, 64), array(48, 8)) == []


CASES = [
    ("examples fill lanes, matrices do not", (512, 64, 6, 64), None, True),
    ("the rows do", (512, 128, 6, 64), None, False),
    ("the columns do", (512, 64, 6, 128), None, False),
    ("examples pad", (500, 64, 6, 64), None, False),
    ("too few examples", (64, 64, 6, 64), None, False),
    ("long rows that pad", (512, 192, 6, 64), None, True),
    ("of two that pad alike the last is last", (512, 64, 6, 64), 1, False),
    ("of two that pad alike the last is last, indeed", (512, 64, 6, 64), 3, True),
    ("rows that pad less", (512, 120, 6, 64), 1, True),
    ("rows that pad more", (512, 32, 6, 64), 1, False),
]


@pytest.mark.parametrize(("name", "shape", "last", "expected"), CASES, ids=[c[0] for c in CASES])
def test_who_fills_the_lanes(name, shape, last, expected):
    batch = np.array([True, False, True, False])
    assert differs(np.array([shape], float), batch, last, 128).tolist() == [expected]


def test_which_dimensions_are_the_batch():
    graph, _ = graph_of(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), array(8, 4, 2, 16), array(8, 5, 2, 16))
    (node,) = [n for n in walk(graph) if n.prim == "dot_general"]
    assert batch_dims(node, node.inputs[0]).tolist() == [True, False, True, False]
    assert batch_dims(node, node.outputs[0]).tolist() == [True, True, False, False]


@pytest.mark.parametrize(("devices", "copied"), [(1, True), (2, True), (4, False)])
def test_the_copy_takes_time_where_a_devices_examples_fill_lanes(devices, copied):
    """Of 256 examples, 64 to a device fill no lanes. What the dot over a batch reads has 288 rows in the lanes of 384."""
    q = array(256, 288, 6, 64)
    groups, chip = read(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), (q, q), {}).groups, Target("v5e:1").chip
    (op,) = groups.operations
    examples = [f for f, _ in op.factors].index(op.operands[0].dims[0][1])
    state = np.array([[examples if devices > 1 else WHOLE]], np.int8)
    near = Near(copied={(op.node.id, op.operands[0].value): Copied(1)})
    with_, without = (operation_seconds(op, groups.graph.values, state, (devices,), chip, n) for n in (near, Near()))
    bytes_ = 2.0 * q.size / devices * (1 + 384 / 288)
    assert with_ - without == pytest.approx([float(traffic_seconds(bytes_, chip)) if copied else 0.0], abs=1e-12)
