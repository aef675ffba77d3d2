"""How the search behaves under memory pressure, and from run to run. Against brute force: ``test_optimal.py``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import STEPS

import jaxauto
from jaxauto.options import mesh_axes
from jaxauto.planner import read
from jaxauto.solve import remat as remat_module
from jaxauto.solve import search as search_module
from jaxauto.solve.candidate import Candidate, fastest_of_first, least_of_each
from jaxauto.solve.check import check
from jaxauto.solve.fold import fold
from jaxauto.solve.mixing import Mixer
from jaxauto.solve.model import Program
from jaxauto.solve.remat import Remat
from jaxauto.solve.search import Search
from jaxauto.targets.target import Target


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def two_layers(params, x):
    def loss(p):
        return jnp.sum(jax.nn.relu(x @ p[0]) @ p[1])

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


ARGS = ((struct(32, 512), struct(512, 32)), struct(64, 32))


def prepared(step, args, mesh, target, seconds=60.0):
    found = read(step, args, {})
    axes = mesh_axes(mesh, Target(target))
    remat = Remat(found.graph, found.groups, found.aliased, Target(target).chip)
    program = Program(found.groups, fold(found.groups, {}), found.known_early, found.late_only)
    return Search(program, remat, axes, Target(target).chip, {}, time.monotonic() + seconds), remat


def test_less_memory_never_makes_it_faster_and_is_kept_to():
    search, remat = prepared(two_layers, ARGS, {"a": 2, "b": 2}, "v5p:2x2x2")
    free = search.run(math.inf, remat.levels())
    assert free.best is not None
    last = free.best.seconds
    for share in (0.9, 0.7, 0.5):
        budget = share * free.best.peak_bytes
        search, remat = prepared(two_layers, ARGS, {"a": 2, "b": 2}, "v5p:2x2x2")
        found = search.run(budget, remat.levels())
        if found.best is None:
            assert found.leanest.peak_bytes > budget
            continue
        assert found.best.peak_bytes <= budget
        assert found.best.seconds >= last * (1 - 1e-6)


def test_the_answer_does_not_depend_on_the_run():
    answers = []
    for _ in range(2):
        search, remat = prepared(two_layers, ARGS, {"a": 2, "b": 2}, "cpu:8")
        answers.append(search.run(math.inf, remat.levels()).best.x)
    np.testing.assert_array_equal(*answers)


def test_the_bound_holds_under_pressure_and_nothing_that_fits_is_faster():
    """Over all levels and their mixtures: blocks that keep unalike are a program of their own, with a bound of its own."""
    step, args = STEPS["recurrent_scan"]()

    def run(budget):
        search, remat = prepared(step, args, {"a": 4, "b": 2}, "h100:8")
        return search.run(budget, remat.levels())

    free, least = run(math.inf), run(1.0).leanest.peak_bytes
    assert free.best is not None
    for budget in (math.inf, *(least + share * (free.best.peak_bytes - least) for share in (0.1, 0.3, 0.6))):
        found = run(budget)
        assert found.best is not None and found.best.peak_bytes <= budget
        assert found.bound <= found.best.seconds * (1 + 1e-9)
        assert all(found.best.seconds <= c.seconds for c in found.fitting)


def test_without_time_the_level_that_keeps_least_is_tried_all_the_same():
    step, args = STEPS["transformer_scan"]()
    search, remat = prepared(step, args, {"a": 1}, "v5p:1x1x1")
    levels = remat.levels()
    last = search.candidate(search.model(remat.variant(levels[-1])), search.run(math.inf, levels).best.x, 0)
    written = search.candidate(search.model(remat.variant(levels[0])), last.x, 0)
    assert last.peak_bytes < written.peak_bytes
    for seconds in (60.0, -1.0):
        search, remat = prepared(step, args, {"a": 1}, "v5p:1x1x1", seconds)
        found = search.run(last.peak_bytes, remat.levels())
        assert found.best is not None and found.best.peak_bytes <= last.peak_bytes


def test_never_worse_than_sharding_first():
    """The best sharding of the step as written, then the fastest level that fits with it: what a search in two stages finds."""
    step, args = STEPS["recurrent_scan"]()
    two_stage, remat = prepared(step, args, {"a": 4, "b": 2}, "h100:8")
    levels = remat.levels()
    first = two_stage.run(math.inf, levels[:1]).best
    assert first is not None
    then = [two_stage.candidate(two_stage.model(remat.variant(level)), first.x, k) for k, level in enumerate(levels)]
    for budget in {c.peak_bytes for c in then if c.peak_bytes < first.peak_bytes}:
        joint, _ = prepared(step, args, {"a": 4, "b": 2}, "h100:8")
        found = joint.run(budget, levels)
        assert found.best is not None
        assert found.best.seconds <= min(c.seconds for c in then if c.peak_bytes <= budget) * (1 + 1e-9)


def test_what_lies_between_the_levels_is_looked_at_where_memory_is_plenty(monkeypatch):
    """What takes less time to make again than to read goes, what does not stays, wherever the levels happen to lie."""
    step, args = STEPS["transformer_scan"]()
    monkeypatch.setattr(Search, "_swap", lambda *_: [])
    monkeypatch.setattr(Search, "_mix", lambda *_: None)
    monkeypatch.setattr(remat_module, "MAX_LEVELS", 4)  # the best lies between them
    found = {}
    for closer in (0, search_module._CLOSER):
        monkeypatch.setattr(search_module, "_CLOSER", closer)
        search, remat = prepared(step, args, {"a": 1}, "v5p:1x1x1")
        found[closer] = search.run(math.inf, remat.levels())
        assert check(found[closer].best) == []
    levels = {level.kept for level in remat.levels()}
    without, with_them = found[0].best, found[search_module._CLOSER].best
    assert without.variant.kept in levels and with_them.variant.kept not in levels
    assert with_them.seconds < without.seconds
    assert found[search_module._CLOSER].bound <= with_them.seconds * (1 + 1e-9)


def test_every_level_is_looked_at_though_the_first_fits(monkeypatch):
    """Saving less can be slower at one level and faster at the next: what is made again may hide, what is kept is written and read."""
    step, args = STEPS["transformer_loop"]()
    search, remat = prepared(step, args, {"a": 1}, "v5p:1x1x1")
    levels = remat.levels()
    base = search.candidate(search.model(remat.variant(levels[0])), search.run(math.inf, levels).best.x, 0)
    seconds = [3.0, 4.0, 5.0, *[2.0] * (len(levels) - 3)]

    def offers(self, number, level, budget_bytes):
        self.bounds[number] = seconds[number]
        yield dataclasses.replace(base, seconds=seconds[number], level=number)

    monkeypatch.setattr(Search, "_offers", offers)
    assert len(levels) > 3 and search.look(math.inf, levels).best.seconds == 2.0


def test_a_mixture_of_blocks_that_is_over_by_little_is_not_tried_twice(monkeypatch):
    step, args = STEPS["transformer_loop"]()
    search, remat = prepared(step, args, {"a": 1}, "v5p:1x1x1")
    levels = remat.levels()
    base = search.candidate(search.model(remat.variant(levels[-1])), search.run(math.inf, levels).best.x, len(levels) - 1)
    budget, tried = 4 * base.peak_bytes, []

    def over(self, base, levels, choice):
        tried.append(tuple(choice))
        return dataclasses.replace(base, peak_bytes=budget + 1.0)

    monkeypatch.setattr(Mixer, "mixture", over)
    assert list(search.mixer.mixtures(base, levels, budget)) == []
    assert len(tried) > 2 and len(set(tried)) == len(tried)


def test_mixtures_for_less_room_are_tried_too(monkeypatch):
    """The chain's programme adds up blocks one by one: what is best of little room can be faster than what is best of more."""
    step, args = STEPS["transformer_loop"]()
    search, remat = prepared(step, args, {"a": 1}, "v5p:1x1x1")
    levels = remat.levels()
    base = search.candidate(search.model(remat.variant(levels[-1])), search.run(math.inf, levels).best.x, len(levels) - 1)
    seconds, tried = iter([3.0, 4.0, 2.0, 2.5, 2.6, 1.0]), []

    def fits(self, base, levels, choice):
        tried.append(tuple(choice))
        return dataclasses.replace(base, seconds=next(seconds))

    monkeypatch.setattr(Mixer, "mixture", fits)
    assert fastest_of_first(search.mixer.mixtures(base, levels, math.inf), patience=2).seconds == 2.0
    assert len(tried) == len(set(tried)) == 5


def test_single_values_are_swapped_in_the_best_answer_whose_trips_are_alike_too(monkeypatch):
    """A swap in a scan that is cut changes its head alone."""
    step, args = STEPS["transformer_scan"]()
    search, remat = prepared(step, args, {"a": 1}, "cpu:1")
    most = search.run(math.inf, remat.levels()).best.peak_bytes
    search, remat = prepared(step, args, {"a": 1}, "cpu:1")
    found, swapped = search.run(0.6 * most, remat.levels()), []
    cut = [c for c in found.fitting if c.variant.level.splits]
    assert cut and all(c.peak_bytes <= 0.6 * most for c in found.fitting)  # mixtures of blocks are known to whoever asks for others
    monkeypatch.setattr(Search, "_swap", lambda self, start, levels, budget: swapped.append(start) or [])
    alike = min((c for c in found.fitting if not c.variant.level.splits), key=lambda c: c.seconds)
    found.best = dataclasses.replace(cut[0], seconds=0.5 * alike.seconds)
    found.fitting.append(found.best)
    search._change(found, 0.6 * most)
    assert swapped == [found.best, alike]


def recurrent(params, tokens, labels):
    """One recurrent layer under a vocabulary that is much wider."""

    def loss(p):
        into, hidden, head = (w.astype(jnp.bfloat16) for w in p)
        first = jnp.zeros((tokens.shape[1], head.shape[0]), jnp.bfloat16)
        _, h = jax.lax.scan(lambda h, now: (jnp.tanh(now + h @ hidden),) * 2, first, into[tokens])
        logits = (h @ head).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def planned(target, rows=64):
    """(plan under a share of the least memory) of ``recurrent``."""
    vocabulary, width, trips = 8192, 256, 64
    weights = struct(vocabulary, width), struct(width, width), struct(width, vocabulary)
    args = (weights, *(struct(trips, rows, dtype=jnp.int32),) * 2)
    plan = functools.partial(jaxauto.plan, recurrent, *args, target=target, mesh={"data": 4, "model": 2}, certify=False, progress=False)
    with pytest.raises(jaxauto.InfeasibleError) as refused:
        plan(memory_budget=1.5)
    return lambda share: plan(memory_budget=share * refused.value.least_bytes)


def test_near_the_least_memory_a_leanest_sharding_that_is_slow_is_not_the_only_one_mixed():
    """Where the leanest sharding alone is mixed, a plan at 4 % over the least memory is a tenth slower than one at 7 %."""
    some, more = map(planned("h100:8"), (1.04, 1.07))
    assert some.estimate.step_time < 1.05 * more.estimate.step_time


def test_with_more_memory_no_plan_is_slower():
    """Where sets that blocks keep are judged with the sharding as it is, it takes 129, 159, 117, 129 and 117 µs under these budgets.

    Where levels around a centre that was left for a better one are forgotten, the third takes 127.5 µs and the second 125.8.
    """
    times = [plan.estimate.step_time for plan in map(planned("v5p:2x2x2"), (1.09, 1.12, 1.15, 1.2, 1.5))]
    assert all(after <= before * (1 + 1e-6) for before, after in itertools.pairwise(times))
    assert times[-1] < 100e-6


def test_the_fastest_of_each_kind_comes_first():
    found = [Candidate(None, np.zeros(0), seconds, 0.0, level) for seconds, level in ((3.0, 1), (2.0, 2), (1.0, 1), (4.0, 3))]
    assert [c.seconds for c in least_of_each(found, lambda c: c.level)] == [1.0, 2.0, 4.0]
    assert fastest_of_first([], patience=1) is None
