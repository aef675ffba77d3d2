"""What a block keeps and makes again, as its buffers tell; and a plan that mixes blocks by it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from helpers import centred_rows
from solve.test_search import prepared

from jaxauto.core import Kind
from jaxauto.planner import read
from jaxauto.solve.choices import choices
from jaxauto.solve.remat import Level, Remat
from jaxauto.targets import Target

ROWS, WIDTH = 4096, 512


def step(ws, x):
    def loss(ws):
        y = x
        for k, w in enumerate(ws):
            with jax.named_scope(f"layer{k}"):
                y = jax.nn.relu(centred_rows(y @ w["a"].astype(y.dtype))) @ w["b"].astype(y.dtype)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))


@pytest.fixture(scope="module")
def remat():
    layer = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for name in "ab"}
    found = read(step, ([layer] * 4, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)), {}, None)
    return Remat(found.graph, found.groups, found.aliased, Target("v5p:1x1x1").chip, devices=1)


def test_as_written_a_norm_keeps_no_float32_rows(remat):
    """XLA:TPU makes them again in the matmuls of the backward pass; its residuals would be twice as large and more."""
    nothing = Level(tuple(frozenset() for _ in remat.blocks), threshold=math.inf)
    narrow = ROWS * WIDTH * 2
    for block, (written, least) in zip(remat.blocks, choices(remat, [*remat.levels()[:1], nothing], lambda _: 1.0), strict=True):
        residuals = sum(remat.graph.values[v].nbytes for v in block.residuals)
        if any(remat.operations[n.id].rule.kind is Kind.DOT for n in block.forward if n.id in remat.operations):
            assert written.kept_bytes <= 2.2 * narrow < residuals
        assert least.kept_bytes <= written.kept_bytes and least.seconds >= written.seconds == 0.0


def test_pieces_and_the_way_to_the_host_count(remat):
    level = remat.levels_with_host()[-1]
    assert level.offloaded
    whole, split = (choices(remat, [level], lambda _, n=n: n) for n in (1.0, 4.0))
    waits = choices(remat, [level], lambda _: 1.0, host_bandwidth=1e9)
    for (a,), (b,), (c,) in zip(whole, split, waits, strict=True):
        assert b.kept_bytes == pytest.approx(a.kept_bytes / 4) and b.peak_bytes == pytest.approx(a.peak_bytes / 4)
        assert c.seconds >= a.seconds
    assert sum(c.seconds for (c,) in waits) > sum(a.seconds for (a,) in whole)


def test_options_add_up_to_what_whole_levels_take(remat):
    """What each level takes longer than the first as the model of the whole step tells, however its blocks share it."""
    levels = remat.levels()
    plain = choices(remat, levels, lambda _: 1.0)
    whole = {0: 5.0, **{n: 5.0 + 0.1 * n for n in range(1, len(levels))}}
    told = choices(remat, levels, lambda _: 1.0, whole=whole)
    assert len(levels) > 2 and [[o.kept_bytes for o in block] for block in told] == [[o.kept_bytes for o in block] for block in plain]
    written = sum(block[0].seconds for block in told)
    for n in range(1, len(levels)):
        assert sum(block[n].seconds for block in told) - written == pytest.approx(0.1 * n)
    for block, before in zip(told, plain, strict=True):
        miss = {}
        for option, untold in zip(block, before, strict=True):  # what is kept alike is charged alike, and nothing for the first
            miss.setdefault(option.what, option.seconds - untold.seconds)
            assert option.seconds - untold.seconds == pytest.approx(miss[option.what])
        assert miss[block[0].what] == 0.0


def test_a_mixture_takes_what_the_programme_says():
    """Of layers that keep all or nothing: half of them each way takes half of the difference, within a tenth of it."""
    layer = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for name in "ab"}
    search, remat = prepared(step, ([layer] * 8, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)), {"a": 1}, "v5p:1x1x1")
    levels = remat.levels()
    base = search.run(math.inf, levels).best
    most = search.candidate(search.model(remat.variant(levels[-1])), base.x, len(levels) - 1)
    search.models[len(levels) - 1] = most.model
    least = search.candidate(search.model(remat.variant(levels[0])), base.x, 0)
    search.models[0] = least.model
    options = search.mixer.options(most, levels)
    choice = [0 if b % 2 else len(levels) - 1 for b in range(len(options))]
    told = most.seconds + sum(block[c].seconds - block[-1].seconds for block, c in zip(options, choice, strict=True))
    made = search.mixer.mixture(most, options, choice).seconds
    assert least.seconds < made < most.seconds
    assert abs(made - told) < 0.1 * (most.seconds - least.seconds)
