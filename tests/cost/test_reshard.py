"""Resharding: known passages by hand, and the vectorised seconds against the collectives of each single pair."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxauto.core import AxisLink, MeshAxes
from jaxauto.cost.collectives import collective_seconds
from jaxauto.cost.reshard import passage_collectives, passage_seconds, passage_tables
from jaxauto.strategies import states

LINK = AxisLink(1e9, 1e-6)
MESH = MeshAxes(("a", "b"), (4, 2), (LINK, LINK))
W = -1


def steps(source, target, partial=None, mesh=MESH):
    found = passage_collectives(
        np.array(source, np.int8), np.array(target, np.int8), 800.0, mesh, None if partial is None else np.array(partial)
    )
    return [(kind, bytes_, axes) for kind, bytes_, axes, _ in found]


PASSAGES = [
    ("stays", (0, 1), (0, 1), None, []),
    ("is cut for free", (W, W), (0, 1), None, []),
    ("gathers one axis", (0, W), (W, W), None, [("all-gather", 800.0, (0,))]),
    ("gathers one axis of two", (0, 1), (W, 1), None, [("all-gather", 400.0, (0,))]),
    ("gathers both axes at once", (0, 0), (W, W), None, [("all-gather", 800.0, (0, 1))]),
    ("moves to another dimension", (0, W), (1, W), None, [("all-to-all", 800.0, (0,))]),
    ("sums whole", (W, W), (W, W), (True, False), [("all-reduce", 800.0, (0,))]),
    ("sums and cuts", (W, W), (0, W), (True, False), [("reduce-scatter", 800.0, (0,))]),
    ("sums to a split dimension, on its minor side", (0, W), (0, 0), (False, True), [("reduce-scatter", 200.0, (1,))]),
    ("on its major side", (W, 0), (0, 0), (True, False), [("reduce-scatter", 400.0, (0,)), ("collective-permute", 800.0, (0, 1))]),
    ("of one that leaves", (W, 0), (0, 1), (True, False), [("all-reduce", 400.0, (0,)), ("collective-permute", 800.0, (0, 1))]),
    ("of one that is gathered", (W, 0), (0, W), (True, False), [("all-reduce", 400.0, (0,)), ("collective-permute", 1600.0, (0, 1))]),
    ("sums a piece", (W, 0), (W, 0), (True, False), [("all-reduce", 400.0, (0,))]),
    ("joins on the major side", (W, 0), (0, 0), None, [("collective-permute", 800.0, (0, 1))]),
    ("joins on the minor side", (0, W), (0, 0), None, []),
    ("leaves on the major side", (0, 0), (W, 0), None, [("collective-permute", 800.0, (0, 1)), ("all-gather", 400.0, (0,))]),
    ("leaves on the minor side", (0, 0), (0, W), None, [("all-gather", 200.0, (1,))]),
    ("cuts one axis before gathering the other", (0, W), (W, 1), None, [("all-gather", 400.0, (0,))]),
    ("moves where another cuts, into as many", (W, 0), (0, 1), None, [("collective-permute", 800.0, (0, 1))]),
    ("into fewer", (0, W), (1, 0), None, [("all-to-all", 200.0, (0,)), ("collective-permute", 800.0, (0, 1))]),
    ("goes where another cuts, into as many", (W, 0), (0, W), None, [("collective-permute", 1600.0, (0, 1))]),
    (
        "into fewer, of joined pieces",
        (0, W),
        (W, 0),
        None,
        [("collective-permute", 3200.0, (0, 1)), ("all-gather", pytest.approx(400 / 3), (0,))],
    ),
    (
        "comes on the major side of one that is cut",
        (1, W),
        (0, 0),
        None,
        [("all-to-all", 400.0, (0,)), ("collective-permute", 800.0, (0, 1))],
    ),
    ("comes on the minor side of one that is cut", (W, 1), (0, 0), None, [("all-to-all", 200.0, (1,))]),
]


@pytest.mark.parametrize(("name", "source", "target", "partial", "expected"), PASSAGES, ids=[p[0] for p in PASSAGES])
def test_passages(name, source, target, partial, expected):
    assert steps(source, target, partial) == expected


INSIDE = [  # of a sum to a dimension that an axis splits on the minor side, on a mesh of 2 x 2 x 2; as in results/exchanges.md
    ("two stay", (W, 0, 0), (0, 0, 0), (True, False, False), [("reduce-scatter", 200.0, (0,)), ("collective-permute", 800.0, (0, 1, 2))]),
    ("one leaves", (W, 0, 0), (0, 0, 1), (True, False, False), [("reduce-scatter", 200.0, (0,)), ("collective-permute", 800.0, (0, 1, 2))]),
    ("one goes", (W, 0, 0), (0, 0, W), (True, False, False), [("all-reduce", 200.0, (0,)), ("collective-permute", 1600.0, (0, 1, 2))]),
    (
        "two go",
        (W, 0, 0),
        (0, W, W),
        (True, False, False),
        [("all-reduce", 200.0, (0,)), ("collective-permute", 1600.0, (0, 1, 2)), ("all-gather", 400.0, (1, 2))],
    ),
    ("around it", (W, 0, W), (0, 0, 0), (True, False, True), [("reduce-scatter", 400.0, (0, 2)), ("collective-permute", 800.0, (0, 1, 2))]),
    ("and beside", (W, 0, W), (0, 0, 1), (True, False, True), [("all-reduce", 400.0, (0, 2)), ("collective-permute", 800.0, (0, 1, 2))]),
    ("and whole", (W, 0, W), (0, 0, W), (True, False, True), [("all-reduce", 400.0, (0, 2)), ("collective-permute", 800.0, (0, 1))]),
]


@pytest.mark.parametrize(("source", "target", "partial", "expected"), [t[1:] for t in INSIDE], ids=[t[0] for t in INSIDE])
def test_sums_to_a_dimension_that_is_split_inside(source, target, partial, expected):
    assert steps(source, target, partial, MeshAxes(("a", "b", "c"), (2, 2, 2), (LINK,) * 3)) == expected


def test_without_reduce_scatter_the_sum_is_whole():
    mesh = MeshAxes(MESH.names, MESH.sizes, MESH.links, scatters=False)
    assert steps((W, W), (0, W), (True, False), mesh) == [("all-reduce", 800.0, (0,))]


def test_on_a_closed_torus_whole_gathers_are_sums_that_are_waited_for():
    """As XLA:TPU writes them on 4x4x4 and larger; over a part of the devices a gather is a gather."""
    closed = MeshAxes(MESH.names, MESH.sizes, MESH.links, sums_whole=True)
    source, target = np.array([[0, 0], [0, 0]], np.int8), np.array([[W, W], [0, W]], np.int8)
    hidden, waited = passage_tables(source[:1], target, 800.0, closed)
    open_mesh = passage_seconds(source[:1], target, 800.0, MESH)
    assert hidden[0, 0] == 0 and hidden[0, 1] == open_mesh[0, 1] > 0
    assert waited[0, 0] == float(collective_seconds("all-reduce", 800.0, MESH.sizes, MESH.links)) and waited[0, 1] == 0
    assert steps((0, 0), (W, W), mesh=closed) == [("all-gather", 800.0, (0, 1))], "by kind it is what it is for"


def test_on_a_closed_torus_a_gather_of_two_dimensions_is_one_sum():
    closed = MeshAxes(MESH.names, MESH.sizes, MESH.links, sums_whole=True)
    assert steps((0, 1), (W, W)) == [("all-gather", 400.0, (0,)), ("all-gather", 800.0, (1,))]
    assert steps((0, 1), (W, W), mesh=closed) == [("all-gather", 800.0, (0, 1))]


# where the axes go, over which axes is summed, scatters_whole -> what XLA:TPU writes (results/sums.md)
ON_TPU = [
    ("to one dimension", (0, 0), (True, True), False, "reduce-scatter"),
    ("to two dimensions", (0, 1), (True, True), False, "all-reduce"),
    ("over all devices of a square", (0, 0), (True, True), True, "all-reduce"),
    ("over some devices of a square", (0, W), (True, False), True, "reduce-scatter"),
    ("to two dimensions, one of them not summed for", (0, 1), (True, False), True, "reduce-scatter"),
]


def ring(bytes_, sizes, links):
    """Seconds of what is sent beside a dot: n + 1 pieces."""
    n = int(np.prod(sizes))
    return float(collective_seconds("reduce-scatter", bytes_ * (n + 1) / (n - 1), sizes, links))


@pytest.mark.parametrize(("target", "partial", "square", "expected"), [t[1:] for t in ON_TPU], ids=[t[0] for t in ON_TPU])
def test_how_a_scattered_sum_is_written_on_tpu(target, partial, square, expected):
    mesh = MeshAxes(MESH.names, MESH.sizes, MESH.links, scatters_whole=square, windows=32)
    source, there, part = np.full((1, 2), W, np.int8), np.array([target], np.int8), np.array([partial])
    axes = [a for a, p in enumerate(partial) if p]
    bytes_ = 800.0
    sizes, links = [MESH.sizes[a] for a in axes], [LINK] * len(axes)
    hidden, waited = passage_tables(source, there, bytes_, mesh, part)[:, 0, 0]
    assert (hidden, waited) == (0.0, float(collective_seconds(expected, bytes_, sizes, links)))
    ((kind, _, _, seconds),) = passage_collectives(source[0], there[0], bytes_, mesh, part[0])
    assert (kind, seconds) == ("reduce-scatter", waited), "by kind it is what it is for"
    hidden, waited = passage_tables(source, there, bytes_, mesh, part, np.ones((1, 1), bool))[:, 0, 0]
    assert expected != "reduce-scatter" or (hidden, waited) == (ring(bytes_, sizes, links), 0.0)


@pytest.mark.parametrize(("windows", "beside", "waits"), [(8, True, False), (8, False, True), (8, None, True), (None, None, False)])
def test_a_sum_is_hidden_beside_its_dot_alone(windows, beside, waits):
    """Without windows (not TPU) any sum can be hidden."""
    source, target, partial = np.full((1, 2), W, np.int8), np.array([[0, W]], np.int8), np.array([[True, False]])
    mesh = MeshAxes(MESH.names, MESH.sizes, MESH.links, windows=windows)
    told = None if beside is None else np.array([[beside]])
    hidden, waited = passage_tables(source, target, 800.0, mesh, partial, told)[:, 0, 0]
    total = passage_seconds(source, target, 800.0, MESH, partial)[0, 0]
    assert (hidden, waited) == ((0.0, total) if waits else (ring(800.0, [4], [LINK]) if windows else total, 0.0))


def test_of_a_passage_the_sum_alone_goes_round_the_ring():
    source, target, partial = np.array([0, W], np.int8), np.array([1, 0], np.int8), np.array([False, True])
    tpu = MeshAxes(MESH.names, MESH.sizes, MESH.links, windows=32)
    found = passage_collectives(source, target, 800.0, tpu, partial, beside=True)
    assert [kind for kind, *_ in found] == ["reduce-scatter", "all-to-all"]
    assert [bytes_ for _, bytes_, *_ in found] == pytest.approx([200.0 * 3, 400.0])
    tables = passage_tables(source[None], target[None], 800.0, tpu, partial[None], np.ones((1, 1), bool))
    assert tables.sum() == pytest.approx(sum(seconds for *_, seconds in found))


def test_an_exchange_is_waited_for_on_tpu():
    source, target = np.array([[0, W]], np.int8), np.array([[1, W]], np.int8)
    tpu = MeshAxes(MESH.names, MESH.sizes, MESH.links, windows=32)
    total = passage_seconds(source, target, 800.0, MESH)[0, 0]
    assert tuple(passage_tables(source, target, 800.0, MESH)[:, 0, 0]) == (total, 0.0)
    assert tuple(passage_tables(source, target, 800.0, tpu)[:, 0, 0]) == (0.0, total)


@pytest.mark.parametrize("with_partial", [False, True])
def test_seconds_are_those_of_the_collectives(with_partial):
    table = states((8, 8), MESH.sizes)
    partial = None
    if with_partial:
        partial = np.random.default_rng(0).random(table.shape) < 0.5
        partial &= table == W
    seconds = passage_seconds(table, table, 4096.0, MESH, partial)
    for i, source in enumerate(table):
        for j, target in enumerate(table):
            found = passage_collectives(source, target, 4096.0, MESH, None if partial is None else partial[i])
            assert seconds[i, j] == pytest.approx(sum(s for *_, s in found), rel=1e-12)
            for kind, bytes_, axes, s in found:
                together = kind == "reduce-scatter" and found[0][0] == "all-gather"  # a split dimension, put together before
                assert s == collective_seconds(
                    "all-reduce" if together else kind, bytes_, [MESH.sizes[a] for a in axes], [LINK] * len(axes)
                )


@pytest.mark.parametrize("beside", [False, True])
def test_sums_that_are_made_as_one_share_what_a_collective_takes_at_the_least(beside):
    """XLA:TPU, where sums are waited for but beside their dots: ten small all-reduces cost one; a scattered sum costs what it did."""
    mesh = dataclasses.replace(MESH, windows=8)
    nowhere, where, partial = np.array([[W, W]], np.int8), np.array([[W, W], [0, W]], np.int8), np.array([[True, False]])
    alone = passage_tables(nowhere, where, 800.0, mesh, partial, np.array([[False, beside]]))
    shared = passage_tables(nowhere, where, 800.0, mesh, partial, np.array([[False, beside]]), together=10)
    assert shared[1, 0, 0] == pytest.approx(collective_seconds("all-reduce", 8000.0, (4,), (LINK,)) / 10)
    assert shared[1, 0, 0] < alone[1, 0, 0]
    assert shared[:, 0, 1].tolist() == alone[:, 0, 1].tolist()
    (one,) = passage_collectives(nowhere[0], where[0], 800.0, mesh, partial[0], together=10)
    assert one[3] == pytest.approx(shared[1, 0, 0])
