"""Which values follow which, where edges are left, and that both survive loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxauto.graph import build
from jaxauto.groups import MAX_GROUP_DIMS, WHOLE, find_groups
from jaxauto.trace import trace


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def grouped(fun, *args):
    found = trace(fun, args)
    graph = build(found.jaxpr)
    return graph, find_groups(graph, found.state)


def out_group(groups, k=0):
    return groups.place[groups.graph.outputs[k]]


def test_elementwise_chains_and_normalisation_are_one_group():
    def norm(x):
        y = jnp.sin(x) * 2
        return (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)

    graph, groups = grouped(norm, struct(8, 16, 32))
    members = groups.groups[out_group(groups)[0]].members
    wide = [n for n, v in graph.values.items() if v.shape == (8, 16, 32) and n not in graph.inputs]
    assert set(wide) <= set(members)


def test_inputs_stay_groups_of_their_own():
    graph, groups = grouped(lambda x, b: x * 2 + b, struct(8, 4), struct(4))
    places = {groups.place[n][0] for n in graph.inputs} | {out_group(groups)[0]}
    assert len(places) == 3
    assert all(groups.groups[groups.place[n][0]].leaf for n in graph.inputs)


def test_a_transpose_is_a_renaming():
    _graph, groups = grouped(lambda x: (lambda y: (y, y.T * 2))(jnp.sin(x)), struct(8, 4))
    (a, dims_a), (b, dims_b) = out_group(groups, 0), out_group(groups, 1)
    assert a == b and dims_a == dims_b[::-1]


def test_a_contradiction_leaves_an_edge():
    _graph, groups = grouped(lambda x: jnp.sin(x) + jnp.sin(x).T, struct(8, 8))
    own = [e for e in groups.edges if (e.node >= 0 and e.source != e.target) or any(a != b for a, b in e.dims)]
    assert own, "x + x.T must not tie the two dimensions of one array"
    _group, dims = out_group(groups)
    assert len({d for d in dims if d != WHOLE}) == 2


def test_logits_and_their_gradient_are_sharded_alike():
    """Their row sums tie them first, by one dimension; that must not leave the vocabulary with two names, of which one can be split."""

    def step(x, w, labels):
        def loss(w):
            scores = jax.nn.log_softmax(x @ w)
            return -jnp.take_along_axis(scores, labels[:, None], axis=-1).mean()

        return jax.grad(loss)(w)

    graph, groups = grouped(step, struct(16, 8), struct(8, 64), struct(16, dtype=jnp.int32))
    made_by = {v.producer.prim: groups.place[n] for n, v in graph.values.items() if v.shape == (16, 64) and n in groups.place}
    forward, backward = made_by["sub"], made_by["add_any"]
    assert forward == backward
    assert sorted(groups.groups[forward[0]].sizes) == [16, 64]
    wide = [e for e in groups.edges if e.source == e.target == forward[0] and not e.reduced]
    assert not wide, "no logits are resharded on the way"


def test_dimensions_that_one_array_has_both_stay_two():
    """Products of all pairs and their transpose, tied by row sums: rows and columns are not the same dimension."""

    def fun(x):
        pairs = jnp.sin(x)
        rows = pairs.sum(1)
        return pairs, pairs * rows[:, None] + pairs.T * rows[:, None]

    _graph, groups = grouped(fun, struct(8, 8))
    group, dims = out_group(groups)
    assert len(set(dims)) == len(groups.groups[group].sizes) == 2


def test_splitting_a_dimension_keeps_the_major_part():
    graph, groups = grouped(lambda x: jnp.sin(x).reshape(8, 4, 16) * 2, struct(8, 64))
    group, dims = out_group(groups)
    assert groups.groups[group].sizes[dims[1]] == 4  # what axes must divide: the heads, not the features
    sine = next(n for n, v in graph.values.items() if v.shape == (8, 64) and n not in graph.inputs)
    assert groups.place[sine] == (group, (dims[0], dims[1]))


def test_a_dot_is_an_operation_with_its_factors():
    _, groups = grouped(lambda x, w: x @ w, struct(8, 16), struct(16, 32))
    (op,) = groups.operations
    assert sorted(n for _, n in op.factors) == [8, 16, 32]
    reduced = {f for o in op.operands for _, f in o.dims} - {f for _, f in op.results[0].dims}
    assert [n for f, n in op.factors if f in reduced] == [16]


def test_operands_shared_by_operations_are_resharded_once():
    _, groups = grouped(lambda x, a, b: (lambda y: (y @ a, y @ b))(jnp.sin(x)), struct(8, 16), struct(16, 32), struct(16, 32))
    assert len({op.operands[0].group for op in groups.operations}) == 1


def test_loops_tie_carries_and_slices():
    def fun(ws, x):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum(-1)), x, ws)

    graph, groups = grouped(fun, struct(3, 16, 16), struct(8, 16))
    (loop,) = [n for n in graph.nodes if n.bodies]
    body = loop.bodies[0]
    stacked, slice_ = graph.inputs[0], body.inputs[-1]
    (a, dims_a), (b, dims_b) = groups.place[stacked], groups.place[slice_]
    assert a == b and dims_a[1:] == dims_b
    assert groups.groups[a].sizes[dims_a[0]] == 1, "the loop dimension is not split"
    assert groups.place[body.outputs[0]] == groups.place[body.inputs[0]] == groups.place[graph.outputs[0]]


def test_every_piece_of_a_split_passes_on_an_edge():
    """Free of charge, a piece could be sharded along what was cut."""

    def fun(x, w):
        a, b = jnp.split(jnp.sin(x), 2, axis=1)
        return a @ w, b @ w

    graph, groups = grouped(fun, struct(8, 32), struct(16, 8))
    node = next(n for n in graph.nodes if n.prim == "split")
    source = groups.place[node.inputs[0]][0]
    for piece in node.outputs:
        cut = groups.place[piece][1][1]
        assert any(e.source == source and e.result == piece and (-1, cut) not in e.dims[:1] for e in groups.edges)


def test_a_stack_of_results_passes_out_of_its_loop():
    """A stack of five dimensions and the loop's is too wide for its value's group; the edge leads from the loop to it, as the bytes do."""

    def fun(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), jnp.sin(c)), x, None, length=3)

    graph, groups = grouped(fun, struct(2, 4, 8, 4, 2))
    loop = next(n for n in graph.nodes if n.bodies)
    inside = {groups.place[x][0] for body in loop.bodies for n in body.nodes for x in n.outputs}
    stacks = {groups.place[n][0] for n in graph.outputs[1:]} - inside
    assert any(e.target in stacks and e.source in inside for e in groups.edges)
    assert not any(e.source in stacks and e.target in inside for e in groups.edges)


def test_groups_stay_narrow():
    def fun(x):
        for k in range(6):
            x = jnp.sin(x)[..., None] * jnp.ones(2 + k)
            x = x.sum(-2) if x.ndim > 3 else x
        return x

    _, groups = grouped(fun, struct(4, 4))
    assert max(len(g.sizes) for g in groups.groups.values()) <= MAX_GROUP_DIMS


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1,), ()])
def test_dimensions_of_size_one_are_whole(shape):
    _, groups = grouped(lambda x: jnp.sin(x), struct(*shape))
    _, dims = out_group(groups)
    assert [d == WHOLE for d in dims] == [n == 1 for n in shape]
