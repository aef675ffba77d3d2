"""Splits of scans among the search's options: as told, as good as Rotor, and they run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rotor, tanh

import jaxauto
from jaxauto import certify
from jaxauto.aot import compiler_for
from jaxauto.core import Trips
from jaxauto.cost.liveness import live_bytes
from jaxauto.graph import multiplicity, walk
from jaxauto.planner import read
from jaxauto.solve import segments
from jaxauto.solve.choices import while_backward
from jaxauto.solve.remat import Remat
from jaxauto.targets.target import Target

LAYERS, WIDTH, ROWS = 16, 256, 4096


def chain(layers=LAYERS, width=WIDTH, rows=ROWS):
    def step(weights, x):
        def loss(weights):
            y, _ = jax.lax.scan(lambda y, w: (tanh(y @ w), None), x, weights)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    return step, (jax.ShapeDtypeStruct((layers, width, width), jnp.bfloat16), jax.ShapeDtypeStruct((rows, width), jnp.bfloat16))


def prepared(step, args, target="v5p:1x1x1"):
    found = read(step, args, {})
    remat = Remat(found.graph, found.groups, found.aliased, Target(target).chip)
    (number,) = remat.splittable
    block = remat.blocks[number]
    inside = {level.kept[number]: while_backward(remat, level, block) for level in remat.levels() if not level.offloaded}
    return remat, number, segments.ScanOptions(remat, block, lambda _: 1.0, inside)


def some_splits(count, ways, seed, most):
    rng = random.Random(seed)
    for _ in range(most):
        parts, left = [], count
        while left:
            n = rng.randint(1, left)
            lengths = [m for m in range(2, n + 1) if n % m == 0]
            cut = rng.choice(lengths) if lengths and rng.random() < 0.7 else 0
            parts.append(Trips(n, inside=tuple(some_parts(cut, ways, rng))) if cut else Trips(n, rng.choice(ways)))
            left -= n
        yield tuple(parts)


def some_parts(count, ways, rng):
    """What a segment is cut into as it runs again."""
    first = rng.randint(2, count) if count > 2 and rng.random() < 0.5 else count
    if first < count:
        yield Trips(first, inside=(Trips(first, rng.choice(ways)),))
        yield Trips(count - first, rng.choice(ways))
    else:
        yield Trips(count, rng.choice(ways))


def leveled(level, number, parts):
    (_, _, first), *_ = parts[0].leaves()
    keeps = tuple(first if b == number else keep for b, keep in enumerate(level.kept))
    return dataclasses.replace(level, kept=keeps, splits=((number, parts),))


@pytest.mark.parametrize("target", ["v5p:1x1x1", "h100:1"])
def test_memory_is_as_told(target):
    """Of splits at random, to one slice of the weights: what the rest of the step takes is the same for all. One trip that makes something
    again is straight code: it may take a carry, and a slice, less than in a loop, and never more."""
    remat, number, trips = prepared(*chain(), target)
    level, ways = remat.levels()[-1], [*trips.inside]
    off = {False: [], True: []}
    for parts in some_splits(LAYERS, ways, 0, 40):
        buffers = remat.variant(leveled(level, number, parts)).buffers
        option = trips.option(None, parts)
        straight = any(part.count == 1 and part.kept == frozenset() for part in parts)
        off[straight].append(live_bytes(buffers, buffers.bytes_).max() - option.kept_bytes - option.peak_bytes)
    slice_bytes, most = 2 * WIDTH * WIDTH, max(off[False])
    assert len(ways) > 2 and min(map(len, off.values())) > 5
    assert most - min(off[False]) <= slice_bytes
    assert most - min(off[True]) <= 2 * ROWS * WIDTH + 2 * slice_bytes and max(off[True]) <= most


def test_what_one_trip_alone_keeps_is_in_memory_for_none():
    """Of operands that a ring makes as it reads them: what holds of one trip in eight must not speed up all of them."""
    remat, number, _ = prepared(*chain())
    block, nothing = remat.blocks[number], frozenset()
    everything = frozenset(block.residuals)
    for kept, rest, partly in ((None, nothing, everything), (nothing, None, everything), (everything, None, nothing)):
        parts = Trips(1, kept), Trips(block.count - 1, rest)
        assert remat.variant(leveled(remat.levels()[-1], number, parts)).partly == partly


def test_how_often_nodes_run():
    """``Variant.extra`` counts what the rewritten program does."""
    step, args = chain(8, 16, 32)
    remat, number, _ = prepared(step, args)
    level, made = remat.levels()[-1], remat.blocks[number].made
    for parts in some_splits(8, [None, frozenset(), frozenset(made[:1])], 1, 20):
        variant = remat.variant(leveled(level, number, parts))
        graph, origin = variant.rewritten.graph, variant.rewritten.origin
        times = multiplicity(graph)
        runs = dict.fromkeys(remat.groups.times, 0)
        for node in (n for n in walk(graph) if n.prim not in ("optimization_barrier", "scan") and n.outputs):
            written = remat.graph.values[origin.get(node.outputs[0], node.outputs[0])].producer
            if written is not None and written.prim == node.prim:
                runs[written.id] += times[node.id]
        for node in remat.blocks[number].forward:
            assert runs[node.id] == remat.groups.times[node.id] + variant.extra.get(node.id, 0)


@pytest.mark.parametrize("count", [5, 8, 11])
def test_nothing_of_one_length_or_shorter_each_time_is_better(count):
    """All cuts into parts of one segment each, and a tail, against what is offered: to the step between options, and one trip."""
    _, _, trips = prepared(*chain(count))
    offered = trips.splits([None, frozenset()])
    one = max(trips.trip(None).held, trips.carry_bytes)
    for parts in range(1, min(count, 3) + 1):
        for ends in itertools.combinations(range(1, count), parts):
            lengths = np.diff([0, *ends, count]).tolist()
            if min(lengths[:-1]) < 2:
                continue
            for kept, tail in itertools.product((None, frozenset()), repeat=2):
                other = trips.option(kept, (*(Trips(n, inside=(Trips(n, kept),)) for n in lengths[:-1]), Trips(lengths[-1], tail)))
                need = other.kept_bytes + other.peak_bytes
                better = [
                    o for o in offered if o.seconds <= other.seconds * (1 + 1e-9) and o.kept_bytes + o.peak_bytes <= need * 1.03 + one
                ]
                assert better, (lengths, kept, tail)


@pytest.mark.parametrize("slots", [14, 11, 9, 8, 7, 6, 5, 4, 3])
def test_no_more_forward_passes_than_the_optimum_of_rotor(slots):
    """Down to what one more forward pass of a layer allows; counted from the plan that keeps every layer's input."""
    step, args = chain(LAYERS, 1024, 16384)
    activation, forward = 2.0 * 16384 * 1024, 2.0 * 16384 * 1024**2

    def planned(budget):
        return jaxauto.plan(step, *args, target="h100:1", memory_budget=budget, donate_argnums=(0,), certify=False, progress=False)

    every = planned(planned(60e9).estimate.peak_memory - (LAYERS - 1.5) * activation)
    plan = planned(every.estimate.peak_memory - (LAYERS - 1 - slots - 0.5) * activation)
    assert plan.decisions.splits
    assert (plan.estimate.flops - every.estimate.flops) / forward <= rotor(0, LAYERS - 1, slots) + 0.5


def test_the_leanest_answer_without_splits_is_at_hand():
    """What certification compiles where the compiler does not fit a plan that splits a scan."""
    step, args = chain(LAYERS, 1024, 16384)
    budget = 1000 * 2**20
    plan = jaxauto.plan(step, *args, target="v5p:1x1x1", memory_budget=budget, donate_argnums=(0,), certify=False, progress=False)
    other = certify._otherwise(plan, plan, budget)
    assert plan.decisions.splits and other is not None and not other.decisions.splits
    assert other.estimate.peak_memory < plan.estimate.peak_memory <= budget
    assert certify._otherwise(plan, plan, other.estimate.peak_memory - 1) is None


@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 4, "model": 2}])
def test_a_plan_with_segments_runs_and_is_stored(mesh, tmp_path):
    step, shapes = chain(12, 32, 256)
    keys = jax.random.split(jax.random.key(0))
    args = [(0.2 * jax.random.normal(k, s.shape)).astype(jnp.float32) for k, s in zip(keys, shapes, strict=True)]
    options = {"target": f"cpu:{math.prod(mesh.values())}", "mesh": mesh, "certify": False, "progress": False}
    with pytest.raises(jaxauto.InfeasibleError) as error:
        jaxauto.plan(step, *args, memory_budget=1e3, **options)
    plan = jaxauto.plan(step, *args, memory_budget=1.05 * error.value.least_bytes, **options)
    assert plan.decisions.splits
    told = [d for d in plan.remat if "carry of every segment" in d.name]
    assert told and all(d.action == "kept" for d in told)
    assert "in segments of" in str(plan.explain())
    assert "or run again in segments" in plan.export()
    plan.save(tmp_path / "plan.json")
    loaded = jaxauto.Plan.load(tmp_path / "plan.json", step, *args)
    assert loaded.decisions == plan.decisions
    want = jax.jit(step)(*args)
    for planned in (plan, loaded):  # sums are made in another order: as exact as their largest terms are
        np.testing.assert_allclose(planned.jit()(*args), want, rtol=1e-5, atol=1e-6 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_stacks_of_a_segment_are_in_memory_for_it_alone(target):
    """Outside of a loop the compilers would allocate them as the step begins, on several devices."""
    if compiler_for(Target(target)) is None:
        pytest.skip(f"the compiler for {target} is not installed (extras tpu-aot, gpu-aot)")
    step, args = chain(LAYERS, 1024, 65536)
    options = {"target": target, "mesh": {"data": 8}, "donate_argnums": (0,), "certify": False, "progress": False}
    with pytest.raises(jaxauto.InfeasibleError) as error:
        jaxauto.plan(step, *args, memory_budget=1e3, **options)
    plan = jaxauto.plan(step, *args, memory_budget=1.02 * error.value.least_bytes, **options)
    (parts,) = plan.decisions.splits.values()
    assert any(part.inside and part.length == part.count for part in parts)
    memory = plan.verify().row("peak memory")
    assert memory.compiled < 1.02 * memory.estimated


@pytest.mark.parametrize(("target", "dtype", "split"), [("cpu:1", "bfloat16", 0), ("cpu:1", "float32", 1), ("v5p:1x1x1", "bfloat16", 1)])
def test_scans_whose_stacks_would_be_copied_in_float32_are_not_split(target, dtype, split):
    step, args = chain()
    found = read(step, tuple(jax.ShapeDtypeStruct(a.shape, dtype) for a in args), {})
    assert len(Remat(found.graph, found.groups, found.aliased, Target(target).chip).splittable) == split
