"""Tables whose rows are gathered: which are copied, for how long, and what that takes; by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxauto
from jaxauto.cost.tables import Table, beyond, lies_in_rows
from jaxauto.solve.check import check
from jaxauto.solve.live import timeline
from jaxauto.solve.tables import held_tables, tables_of
from jaxauto.targets import CHIPS

MIB = 2**20
INDICES, WIDTH = 4096, 128


def step(table, w, index, y):
    def loss(table, w):
        return jnp.mean((jnp.tanh(table[index].astype(jnp.float32) @ w) - y) ** 2)

    gradients = jax.grad(loss, (0, 1))(table, w)
    return jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), (table, w), gradients)


def scored(table, w, index, _):
    return table[index] @ w


def arguments(size, features, dtype="float32"):
    of = jax.ShapeDtypeStruct
    return of((size, features), dtype), of((features, WIDTH), "float32"), of((INDICES,), "int32"), of((INDICES, WIDTH), "float32")


def best_of(fn, args, target="v5e:1x1", **how):
    return jaxauto.plan(fn, *args, target=target, remat="off", certify=False, progress=False, **how).program.solved.best


@pytest.mark.parametrize(
    ("size", "features", "lies"),
    [
        (290000, 16, True),
        (310000, 16, False),  # 131 MiB of filling, seven eighths of it all
        (1600000, 64, False),  # half of it is filling
        (1650000, 64, True),  # less than half: V too is filled up, to a multiple of 128
        (2000000, 96, True),
        (50257, 1600, True),
        (50257, 768, False),  # whole tiles
        (500000, 128, False),
    ],
)
def test_rows_lie_along_the_lanes_where_they_were_seen_to(size, features, lies):
    """scripts/results/tables.md; the same on v5e, v5p and v6e."""
    model = best_of(step, arguments(size, features)).model
    _, table = tables_of(model)[0]
    copy, _ = beyond(model.values[table.number], CHIPS["v5e"].tile_of("float32"), np.zeros((1, 0), int), (), table)
    assert bool(copy[0]) is lies
    if lies:
        assert copy[0] == pytest.approx(size * -(-features // 128) * 128 * 4, rel=1e-3)


def test_half_filling_is_minded_from_128_mib_on():
    of = Table(0, 0, 0, 0, (1, 0), (1, 1), 1, None)
    assert lies_in_rows(200 * MIB, 100 * MIB, of) and not lies_in_rows(300 * MIB, 150 * MIB, of) and lies_in_rows(298 * MIB, 150 * MIB, of)


@pytest.mark.parametrize(("arrays", "filling", "updated"), [(1, 244, True), (2, 43, True), (3, 12, True), (3, 49, False), (3, 122, False)])
def test_several_arrays_that_fill_much_are_updated_as_they_come(arrays, filling, updated):
    """As compiled for v5e: gradient descent on [1M, 64], Adagrad on [100,000, 16], Adam on [50257, 1600], [200,000, 64], [500,000, 64]."""
    bytes_ = (250 + filling) * MIB, 250 * MIB
    so, as_it_comes = (lies_in_rows(*bytes_, Table(0, 0, 0, 0, (1, 0), (1, 1), arrays, how)) for how in (True, False))
    assert (bool(so), bool(as_it_comes)) == (updated, not updated)


def test_a_copy_is_there_from_the_gather_to_the_update_and_its_gradient_is_filled():
    best = best_of(step, arguments(500000, 64))
    model, live = best.model, timeline(best.model, best.x)
    (_, first), (_, read), (_, made), (_, apart) = tables_of(model)
    assert apart.updated is False
    nodes = {node.id: node for node in model.variant.rewritten.graph.nodes}
    assert nodes[read.node].prim == "gather" and nodes[made.node].prim == "scatter-add"
    assert first.begin == first.end == read.begin - 1 == model.buffers.position[read.node] < made.begin and read.end >= made.end
    whole = 500000 * 128 * 4
    held = [(begin, end, float(bytes_[best.x[i], best.x[j]])) for begin, end, i, j, bytes_ in held_tables(model)]
    assert held[:2] == [(first.begin, first.end, whole), (read.begin, read.end, whole)]
    assert held[2:] == [(made.begin, made.end, pytest.approx(whole / 2, rel=1e-3))]  # ``apart`` is not so
    assert live[made.end] == pytest.approx(whole / 2 + 2 * whole, rel=0.02)  # the argument, its copy, the gradient
    # four times the copy (made, read, written, brought back), and the gradient written and read with what fills it
    assert (*map(sum, zip(first.moved, read.moved, strict=True)),) == (4, 0) and made.moved == (2, -2)


def test_without_an_update_the_copy_is_made_and_gone():
    best = best_of(scored, arguments(500000, 64))
    ((_, table),) = tables_of(best.model)
    assert table.begin == table.end and table.moved == (1, 1)


def test_what_an_optimizer_keeps_of_a_table_is_copied_too():
    def with_moment(table, moment, w, index, y):
        new, _ = step(table, w, index, y)
        moment = 0.9 * moment + (table - new)
        return table - moment, moment

    table, *others = arguments(500000, 64)
    found = [t for _, t in tables_of(best_of(with_moment, (table, table, *others)).model)]
    assert {t.arrays for t in found} == {2}
    _, _, gradient, _, moment = found
    assert (moment.begin, moment.end, moment.held) == (gradient.begin, gradient.end, (1, 0))  # beside the table's own copy


@pytest.mark.parametrize(
    ("split", "copy"), [(P("data"), 200000 * 128 * 4), (P(None, "data"), 0)], ids=["by rows", "by features, seven eighths filling"]
)
def test_a_device_fills_the_rows_of_its_part(split, copy):
    best = best_of(step, arguments(800000, 64), "v5e:2x2", mesh={"data": 4}, constraints={"0": split})
    (_, _, i, j, bytes_), *_ = held_tables(best.model)
    assert bytes_[best.x[i], best.x[j]] == copy


@pytest.mark.parametrize("target", ["h100:1", "cpu:1"])
def test_only_tpus_fill_rows(target):
    assert tables_of(best_of(step, arguments(500000, 64), target).model) == []


def by_microbatches(table, w, index, y):
    """The sum of gradients over four of them."""

    def add(total, batch):
        gradients = jax.grad(lambda t, w: jnp.mean((jnp.tanh(t[batch[0]] @ w) - batch[1]) ** 2), (0, 1))(table, w)
        return jax.tree.map(jnp.add, total, gradients), None

    parts = index.reshape(4, -1), y.reshape(4, -1, WIDTH)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, (table, w)), parts)
    return jax.tree.map(lambda w, g: w - 0.1 * g, (table, w), total)


@pytest.mark.parametrize("fn", [step, scored, by_microbatches])
def test_a_profile_says_the_same(fn):
    args = arguments(500000, 64)
    plan = jaxauto.plan(fn, *args, target="v5e:1x1", remat="off", certify=False, progress=False)
    best, found = plan.program.solved.best, jaxauto.profile(fn, *args, target="v5e:1x1")
    assert tables_of(best.model) and {t.arrays for _, t in tables_of(best.model)} == {1}
    assert check(best, best.peak_bytes, {}) == []
    assert found.peak_memory == pytest.approx(plan.estimate.peak_memory, rel=1e-3)
    if fn is not by_microbatches:  # of the sum of its gradients the two tell one writing more or less, whatever the table
        assert found.seconds == pytest.approx(plan.estimate.compute_time, rel=1e-2)
