"""What blocks keep, changed value by value."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from solve.test_search import prepared, struct
from zoo import STEPS

from jaxauto.solve import swaps as swaps_module
from jaxauto.solve.check import check
from jaxauto.solve.swaps import swapped, swaps


def layers_and_head(params, x):
    """A scan over layers whose dots differ in what they cost for each byte of their results, and a head beside it."""

    def layer(y, w):
        return jax.nn.silu(y @ w["up"]) @ w["down"] @ w["out"] + y, None

    def loss(p):
        y, _ = jax.lax.scan(layer, x, p["layers"])
        return jnp.mean(jax.nn.logsumexp(y @ p["head"], axis=-1))

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


WIDTHS = {"up": (6, 512, 2048), "down": (6, 2048, 512), "out": (6, 512, 512)}
ARGS = ({"layers": {k: struct(*s) for k, s in WIDTHS.items()}, "head": struct(512, 4096)}, struct(4096, 512))


def searched(budget: float = math.inf):
    search, remat = prepared(layers_and_head, ARGS, {"a": 1}, "v5p:1x1x1")
    return search, remat, search.run(budget, remat.levels())


@pytest.mark.parametrize("name", ["transformer_loop", "transformer_scan", "linen_residual_net"])
def test_a_swap_changes_one_value_of_each_block_that_is_alike(name):
    step, args = STEPS[name]()
    _, remat = prepared(step, args, {"a": 1}, "v5p:1x1x1")
    for level in remat.levels():
        offered = swaps(remat, level.kept)
        assert offered and [s.gain for s in offered] == sorted((s.gain for s in offered), reverse=True)
        assert len({s.kept for s in offered}) == len(offered)
        for swap in offered:
            before = [frozenset(b.residuals) if k is None else k for b, k in zip(remat.blocks, level.kept, strict=True)]
            changed = [
                (b, now ^ then) for b, (now, then) in enumerate(zip(swap.kept, before, strict=True)) if now is not None and now != then
            ]
            assert changed and all(len(values) == 1 for _, values in changed)
            assert swap.value in changed[0][1]
            assert len({remat.forms[b] for b, _ in changed}) == 1
            assert len({remat.graph.values[v].nbytes for _, (v,) in changed}) == 1


def test_offloaded_values_stay_where_they_are():
    step, args = STEPS["transformer_scan"]()
    _, remat = prepared(step, args, {"a": 1}, "v5p:1x1x1")
    level = next(level for level in remat.levels_with_host() if level.offloaded)
    assert {s.value for s in swaps(remat, level.kept)} & level.offloaded
    assert not {s.value for s in swaps(remat, level.kept, level.offloaded)} & level.offloaded


def test_swaps_go_where_thresholds_do_not_and_near_the_best_of_all_sets():
    """All sets of the large residuals by brute force, under each budget between the least and the most that they take.

    Thresholds for the dearest elementwise equations alone: with those for cheap ones too the best sets are among them.
    """
    search, remat, free = searched()
    remat.drops, remat.other_drops = remat.other_drops[0], []
    base = free.best
    offered = [s for s in swaps(remat, remat.levels()[-1].kept) if s.gain > 0]
    kept = remat.levels()[-1].kept
    block_of = {v: b for b, block in enumerate(remat.blocks) for v in block.made}
    everything = []
    for chosen in itertools.chain.from_iterable(itertools.combinations([s.value for s in offered], r) for r in range(len(offered) + 1)):
        sets = [set(k) for k in kept]
        for value in chosen:
            sets[block_of[value]].add(value)
        everything.append(search.mixer.keeping(base, tuple(map(frozenset, sets)), frozenset()))
    assert len(everything) == 2 ** len(offered) >= 16
    levels = [search.candidate(search.model(remat.variant(level)), base.x, 0) for level in remat.levels()]
    peaks = sorted(c.peak_bytes for c in everything)
    better = optimal = 0
    for budget in np.linspace(peaks[0] * 1.01, peaks[-1] * 1.01, 9):
        start = min((c for c in levels if c.peak_bytes <= budget), key=lambda c: c.seconds)
        make = functools.partial(search.mixer.keeping, start, offloaded=frozenset())
        found = swapped(remat, start, make, budget, 1, lambda: False)
        best = min(c.seconds for c in everything if c.peak_bytes <= budget)
        assert found.seconds <= start.seconds and found.peak_bytes <= budget and check(found, budget) == []
        better += found.seconds < start.seconds
        optimal += found.seconds <= best * (1 + 1e-9)
    assert better >= 6 and optimal >= 8


def branches(params, x):
    """Two branches of unlike widths that join, and a skip around both: a small general graph."""

    def loss(p):
        h = jax.nn.gelu(x @ p["in"])
        wide = jax.nn.silu(h @ p["up"]) @ p["down"]
        narrow = jnp.tanh(h @ p["left"]) @ p["right"]
        return jnp.mean(jax.nn.logsumexp((wide * narrow + h) @ p["head"], axis=-1))

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


BRANCHES = {"in": (512, 512), "up": (512, 2048), "down": (2048, 512), "left": (512, 256), "right": (256, 512), "head": (512, 1024)}
BRANCHED = {k: struct(*s) for k, s in BRANCHES.items()}, struct(8192, 512)


CASES = {"layers": (layers_and_head, ARGS, "v5p:1x1x1"), "branches": (branches, BRANCHED, "h100:1")}


@pytest.mark.parametrize("name", CASES)
def test_the_search_is_as_fast_as_the_best_of_all_sets(name):
    """All sets of the eight residuals that promise most, by brute force, at the least memory of each time that they take."""
    step, args, target = CASES[name]
    search, remat = prepared(step, args, {"a": 1}, target)
    base, kept = search.run(math.inf, remat.levels()).best, remat.levels()[-1].kept
    values = [s.value for s in swaps(remat, kept) if s.gain > 0][:8]
    block_of = {v: b for b, block in enumerate(remat.blocks) for v in block.made}
    everything = []
    for chosen in itertools.product((False, True), repeat=len(values)):
        sets = [set(k) for k in kept]
        for value in itertools.compress(values, chosen):
            sets[block_of[value]].add(value)
        everything.append(search.mixer.keeping(base, tuple(map(frozenset, sets)), frozenset()))
    front = []
    for c in sorted(everything, key=lambda c: (c.peak_bytes, c.seconds)):
        front += [c] if not front or c.seconds < front[-1].seconds else []
    assert len(everything) >= 64 and len(front) >= 2
    for answer in front:
        search, remat = prepared(step, args, {"a": 1}, target)
        found = search.run(answer.peak_bytes * (1 + 1e-9), remat.levels()).best
        assert found is not None and found.seconds <= answer.seconds * (1 + 1e-9)


def test_blocks_are_as_written_again_where_that_is_faster():
    """At the least memory the head keeps nothing either, though nothing else is at the peak while it runs."""
    search, remat, free = searched()
    base = search.mixer.keeping(free.best, remat.levels()[-1].kept, frozenset())
    make = lambda kept: search.mixer.keeping(base, kept, frozenset())  # noqa: E731
    found = swapped(remat, base, make, base.peak_bytes, 1, lambda: False)
    assert None not in base.variant.kept and None in found.variant.kept
    assert found.seconds < base.seconds and found.peak_bytes <= base.peak_bytes


def test_without_time_nothing_is_tried():
    _, remat, found = searched()
    assert swapped(remat, found.best, lambda kept: 1 / 0, math.inf, 1, lambda: True) is found.best


def test_what_would_not_fit_is_not_made_to_see_it_where_few_answers_can_be(monkeypatch):
    """Of the layers' dots each takes more than there is room for; the head's exp does too."""
    search, remat, free = searched()
    monkeypatch.setattr(swaps_module, "_VALUES", 40 * len(remat.graph.values))
    base = search.mixer.keeping(free.best, remat.levels()[-1].kept, frozenset())
    offered = [s for s in swaps(remat, base.variant.kept) if s.gain > 0]
    small = min(-s.freed for s in offered)
    made = []

    def make(kept):
        made.append(kept)
        return search.mixer.keeping(base, kept, frozenset())

    assert swapped(remat, base, make, base.peak_bytes + small / 8, 1, lambda: False) is base
    tried = len(made)
    made.clear()
    swapped(remat, base, make, base.peak_bytes + small / 8, 1, lambda: False, pieces=lambda _: 1e9)  # as if nothing took any room
    assert tried < len(made)
