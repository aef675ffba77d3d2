"""The estimate beside the compiler: what must agree exactly, what is measured, and what certification does when it does not fit."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxauto
from jaxauto import certify, verify
from jaxauto.aot import compiler_for
from jaxauto.cost.collectives import collective_seconds
from jaxauto.hlo_collectives import HloCollective
from jaxauto.options import mesh_axes
from jaxauto.tables import size
from jaxauto.targets import Target
from jaxauto.targets.compilers import CONVOLUTION_OPTIONS


def step(state, x, key):
    def loss(w):
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.mean((jnp.tanh(jnp.where(keep, x, 0) @ w["a"]) @ w["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}


ARGS = (
    {"a": jax.ShapeDtypeStruct((256, 1024), jnp.float32), "b": jax.ShapeDtypeStruct((1024, 256), jnp.float32)},
    jax.ShapeDtypeStruct((512, 256), jnp.float32),
    jax.eval_shape(lambda: jax.random.key(0)),
)
MESH = {"data": 4, "model": 2}
# Megatron's pair of column and row: one all-reduce forward; batch over data: gradients summed there.
PINS = {"0.a": P(None, "model"), "0.b": P("model"), "1": P("data")}


@pytest.fixture(scope="module")
def plan():
    return jaxauto.plan(step, *ARGS, mesh=MESH, constraints=PINS)


def test_flops_agree_to_the_digit_and_totals_are_there(plan):
    found = plan.verify()
    flops = found.row("matrix flops")
    assert flops.estimated == flops.compiled > 0
    arguments = found.row("arguments")
    assert arguments.estimated == pytest.approx(arguments.compiled, abs=64), "a key has its words beside it"
    assert arguments.compiled == plan.compile().memory_analysis().argument_size_in_bytes
    assert found.row("results beside arguments").estimated < 64, "the state is donated: only the loss is new"
    assert found.row("peak memory").compiled == found.row("allocated").compiled, "XLA:CPU's own peak leaves temporaries out"
    assert found.fits and found.target == "cpu:8"
    assert found.as_dict()["rows"][0]["name"] == "arguments"
    assert "peak memory" in str(found)


def test_planned_collectives_are_the_compiled_ones():
    pins = {"0.*": P(), "1": P("data")}
    found = jaxauto.plan(step, *ARGS, mesh={"data": 8}, constraints=pins).verify()
    big = [row for row in found.collectives if max(row.estimated, row.compiled) > 1e4]
    assert big, "gradients are summed over the batch"
    for row in big:
        assert row.estimated == pytest.approx(row.compiled, rel=0.05), row
        assert 0 < row.compiled_count <= row.estimated_count, "the compiler may combine them"


def test_an_array_read_in_parts_is_made_once():
    """Gradients of weights that are cut over "data" read parts of a hidden layer that is whole there; making it in parts costs a gather."""

    def step(state, x):  # without a mask: it would be cut too, and the batch with it
        grads = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    pins = {"0.a": P(None, "data"), "0.b": P("data"), "1": P("model")}
    plan = jaxauto.plan(step, *ARGS[:2], mesh=MESH, constraints=pins)
    cut = [number for number, sharding in plan.decisions.values.items() if len(sharding) == 2 and sharding[0] == ("model",)]
    assert cut, "activations stay whole over data"
    for row in plan.verify().collectives:
        if max(row.estimated, row.compiled) > 1e4:
            assert row.estimated == pytest.approx(row.compiled, rel=0.05), row


def test_a_measured_step_joins_the_table(plan):
    row = plan.verify(run=True, steps=2).row("step time (measured)")
    assert row.compiled > 0 and row.unit == "seconds"


def test_what_the_compiler_adds_is_named():
    planned = verify.Traffic("all-gather over data", 1e6, 2, 1e6, 2)
    added = verify.Traffic("collective-permute over data", 0.0, 0.0, 2.0**20, 7)
    small = verify.Traffic("all-reduce over data", 0.0, 0.0, 100.0, 1)
    assert verify._added([planned, added, small]) == [
        "the compiler's own addition: collective-permute over data, 1.0 MiB in 7 calls",
    ]


def test_collectives_of_another_form_are_named_by_both():
    made = lambda kind, role, count: SimpleNamespace(kind=kind, role=role, count=count)  # noqa: E731
    found = [
        made("all-reduce", "all-gather", 3.0),
        made("collective-permute", "reduce-scatter", 8.0),
        made("all-gather", "all-gather", 1.0),
    ]
    assert verify._written_otherwise(SimpleNamespace(collectives=found)) == [
        "the compiler writes all-gathers as 3 all-reduces; its step time charges them as such",
        "the compiler writes reduce-scatters as 8 collective-permutes; its step time charges them as such",
    ]


def test_errors_are_relative_to_the_compiler():
    assert verify.Row("x", 110.0, 100.0, "bytes").error == pytest.approx(0.1)
    assert verify.Row("x", None, 100.0, "bytes").error is None
    assert verify.Row("x", 1.0, 0.0, "bytes").error is None


def test_certification_gives_up_with_the_compilers_own_numbers(monkeypatch):
    monkeypatch.setattr(certify, "_needs", lambda plan: (10 * plan.estimate.peak_memory, "a wasteful compiler"))
    with pytest.raises(
        jaxauto.InfeasibleError, match=r"no plan was found that the compiler fits into .* of cpu:8: in [123] rounds it needed"
    ):
        jaxauto.plan(step, *ARGS, mesh=MESH, memory_budget="8MiB")


@pytest.mark.parametrize("share", [0.01, 1.1], ids=["below the estimate", "below what the compiler needs"])
def test_the_least_that_is_told_is_a_budget_that_the_compiler_keeps(share, monkeypatch):
    """A compiler that needs a third more than is estimated: who asks for the least that the error names gets a plan."""
    monkeypatch.setattr(certify, "_needs", lambda plan: (1.33 * plan.estimate.peak_memory, "a wasteful compiler"))
    with pytest.raises(jaxauto.InfeasibleError) as refusal:
        jaxauto.plan(step, *ARGS, mesh=MESH, memory_budget=1e4, certify=False)
    estimated = refusal.value.least_bytes
    with pytest.raises(jaxauto.InfeasibleError) as refusal:
        jaxauto.plan(step, *ARGS, mesh=MESH, memory_budget=share * estimated)
    assert refusal.value.least_bytes == pytest.approx(1.33 * estimated, rel=0.03)
    least = refusal.value.least_bytes
    assert size(least, up=True) in str(refusal.value)
    plan = jaxauto.plan(step, *ARGS, mesh=MESH, memory_budget=least)
    assert plan.certificate.fits and plan.certificate.bytes_ <= least


def test_the_least_of_a_compiler_that_closes_gaps_when_told_is_without_them(monkeypatch):
    """What lives at the peak is as estimated; the compiler takes half as much again if it is not told of a limit."""
    limited = lambda plan: plan.certificate is not None and plan.certificate.limit_bytes  # noqa: E731

    def needs(plan):
        peak = plan.estimate.peak_memory
        memory = {"argument": 0.0, "output": 0.0, "alias": 0.0, "temp": 1.5 * peak, "peak": peak}
        plan.__dict__["compilation"] = certify.Compilation("a compiler", "", memory, 1.0)
        return (peak if limited(plan) else 1.5 * peak), "a compiler"

    monkeypatch.setattr(certify, "_needs", needs)
    monkeypatch.setattr(certify, "_seconds", lambda plan: 1.0)
    with pytest.raises(jaxauto.InfeasibleError) as refusal:
        jaxauto.plan(step, *ARGS, target="v5e:2x4", memory_budget=1e4, certify=True)
    least = refusal.value.least_bytes
    plan = jaxauto.plan(step, *ARGS, target="v5e:2x4", memory_budget=least, certify=True)
    assert limited(plan) and plan.certificate.fits and least < 1.1 * plan.certificate.bytes_


def test_a_compiler_that_fails_leaves_a_plan_and_a_note(monkeypatch):
    def crash(plan):
        raise jaxauto.TargetError("no compiler for it is installed")

    monkeypatch.setattr(certify, "_needs", crash)
    plan = jaxauto.plan(step, *ARGS, mesh=MESH, memory_budget="64MiB")
    assert plan.certificate is None and plan.notes[-1] == "not certified: no compiler for it is installed"
    with pytest.raises(jaxauto.TargetError):
        jaxauto.plan(step, *ARGS, mesh=MESH, memory_budget="64MiB", certify=True)


@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_ahead_of_time(target):
    """The target's own compiler, in a child process: arguments as planned, flops to the digit, within the budget."""
    if compiler_for(Target(target)) is None:
        pytest.skip(f"the compiler for {target} is not installed (extras tpu-aot, gpu-aot)")
    plan = jaxauto.plan(step, *ARGS, target=target, memory_budget=0.5)
    assert plan.certificate is not None and plan.certificate.fits
    platform = "tpu" if target.startswith("v5e") else "gpu"
    assert any(f"xla_{platform}_" in name for name in plan.compiler_options), "the compiler is told, and takes the options"
    found = plan.verify()
    assert found.row("matrix flops").estimated == found.row("matrix flops").compiled
    assert found.row("arguments").compiled <= found.row("peak memory").compiled


def test_a_few_images_stay_images_on_a_tpu():
    """By default XLA:TPU makes a batch of pieces of four images, and keeps copies of what each convolution reads: 2.7 times as much."""
    if compiler_for(Target("v5e:1x1")) is None:
        pytest.skip("the compiler for v5e:1x1 is not installed (extra tpu-aot)")

    def step(kernels, x):
        def loss(kernels):
            y = x
            for kernel in kernels:
                y = jax.nn.relu(jax.lax.conv_general_dilated(y, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, kernels, jax.grad(loss)(kernels))

    of = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    how = {"target": "v5e:1x1", "remat": "off", "certify": False, "progress": False}
    plan = jaxauto.plan(step, [of((3, 3, 128, 128))] * 4, of((4, 512, 256, 128)), **how)
    assert abs(plan.verify().row("peak memory").error) < 0.1
    dense = jaxauto.plan(lambda w, x: w + x @ w, jnp.ones((8, 8)), jnp.ones((8, 8)), **how)
    assert [{*CONVOLUTION_OPTIONS["tpu"]} & {*p.compiler_options} for p in (plan, dense)] == [{*CONVOLUTION_OPTIONS["tpu"]}, set()]


def stubborn(needs):
    """A compiler that needs ``needs(plan)`` bytes, and what it was asked."""
    asked = []

    def told(plan):
        asked.append(plan)
        return needs(plan), "a compiler"

    return told, asked


def test_certification_tries_a_plan_between_one_that_fits_with_room_and_one_that_did_not(monkeypatch):
    """The compiler takes a little more than estimated, of the first plan a lot: the second leaves room that a third can use."""
    budget = jaxauto.plan(step, *ARGS, mesh=MESH, certify=False).estimate.peak_memory
    free = jaxauto.plan(step, *ARGS, mesh=MESH, memory_budget=budget, certify=False)  # under a budget more is looked at
    most = free.estimate.peak_memory
    needs, asked = stubborn(lambda plan: plan.estimate.peak_memory + (1.0 if plan.estimate.peak_memory == most else 0.2) * 0.2 * most)
    monkeypatch.setattr(certify, "_needs", needs)
    monkeypatch.setattr(certify, "_leaner", lambda plan, share, *_: leaner_of(free, share))
    plan = jaxauto.plan(step, *ARGS, mesh=MESH, memory_budget=budget, certify=True)
    shares = [p.estimate.peak_memory / most for p in asked]
    assert len(shares) == 3 and shares[0] == 1 and shares[1] < shares[2] < 1, "the third lies between"
    assert plan.certificate.rounds == 3 and plan.certificate.bytes_ <= budget and plan.estimate.peak_memory == asked[2].estimate.peak_memory


def test_certification_tries_a_smaller_one_where_the_plan_between_does_not_fit(monkeypatch):
    free = jaxauto.plan(step, *ARGS, mesh=MESH, certify=False)
    budget = most = free.estimate.peak_memory
    needs, asked = stubborn(lambda plan: [2.0, 0.6, 1.05, 0.9][len(asked) - 1] * budget)
    monkeypatch.setattr(certify, "_needs", needs)
    monkeypatch.setattr(certify, "_leaner", lambda plan, share, *_: leaner_of(free, share * plan.estimate.peak_memory / most))
    plan = jaxauto.plan(step, *ARGS, mesh=MESH, memory_budget=budget, certify=True)
    first, fits, between, smaller = (p.estimate.peak_memory for p in asked)
    assert fits < smaller < between < first, "the second that is tried lies below the first"
    assert plan.certificate.rounds == 4 and plan.estimate.peak_memory == smaller


def test_certification_tries_a_plan_between_where_the_leanest_alone_fits(monkeypatch):
    """Estimates that stray further with each plan: the leanest leaves half of the budget."""
    free = jaxauto.plan(step, *ARGS, mesh=MESH, certify=False)
    budget = most = free.estimate.peak_memory
    needs, asked = stubborn(lambda plan: [1.2, 1.1, 1.3, 0.5, 0.8][len(asked) - 1] * budget)
    shares = iter([0.9, 0.8, 0.4])
    monkeypatch.setattr(certify, "_needs", needs)
    between = lambda plan, share: leaner_of(free, share * plan.estimate.peak_memory / most)  # noqa: E731
    planned = lambda plan, share: leaner_of(free, left) if (left := next(shares, None)) else between(plan, share)  # noqa: E731
    monkeypatch.setattr(certify, "_leaner", lambda plan, share, *_: planned(plan, share))
    plan = jaxauto.plan(step, *ARGS, mesh=MESH, memory_budget=budget, certify=True)
    third, leanest, last = (p.estimate.peak_memory for p in asked[2:])
    assert leanest < last < third and plan.estimate.peak_memory == last
    assert plan.certificate.rounds == 5 and plan.certificate.fits


@pytest.mark.parametrize("alive, slower, packed", [(0.9, 1.0, True), (0.9, 1.5, False), (1.1, 1.0, False)])
def test_where_gaps_in_the_heap_alone_are_too_much_the_compiler_is_told_of_the_budget(monkeypatch, alive, slower, packed):
    """The same plan, if what is alive at once fits and the step takes no longer; else a leaner one."""
    told = lambda plan: plan.certificate is not None and bool(plan.certificate.limit_bytes)  # noqa: E731

    def compiled(plan):
        memory = {"argument": 0.0, "output": 0.0, "alias": 0.0, "temp": 2.0 * plan.budget_bytes, "peak": alive * plan.budget_bytes}
        plan.__dict__["compilation"] = certify.Compilation("a compiler", "", memory, 1.0)
        fits = told(plan) or plan.estimate.peak_memory < most
        return (0.95 if fits else 2.0) * plan.budget_bytes

    needs, asked = stubborn(compiled)
    monkeypatch.setattr(certify, "_needs", needs)
    monkeypatch.setattr(certify, "_seconds", lambda plan: slower if told(plan) else 1.0)
    monkeypatch.setattr(certify, "_leaner", lambda plan, share, *_: leaner_of(plan, share))
    free = jaxauto.plan(step, *ARGS, target="v5e:2x4", certify=False)
    most = free.estimate.peak_memory
    plan = jaxauto.plan(step, *ARGS, target="v5e:2x4", memory_budget=2 * most, certify=True)
    assert told(plan) == packed and plan.certificate.fits
    expected = [False, True] if packed else [False, True, False] if alive < 1 else [False, False]
    assert [told(p) for p in asked][: len(expected)] == expected
    assert (plan.estimate.peak_memory == most) == packed


@pytest.mark.parametrize("share", [0.0, 1e-6, 0.9])
@pytest.mark.parametrize("least, found", [(0.99, True), (0.9999, True), (1.0, False)])
def test_the_leanest_plan_is_compiled_though_it_is_told_to_need_nearly_as_much(monkeypatch, least, found, share):
    """The compiler may see that otherwise: what users are told of is what it needs for that very plan. It is not compiled twice."""
    free = jaxauto.plan(step, *ARGS, mesh=MESH, remat="off", certify=False)  # with nothing made again there are no others near it
    most = free.estimate.peak_memory

    def solve(_step, _target, budget, *_):
        if budget < least * most:
            raise jaxauto.InfeasibleError("nothing fits", least * most)
        return leaner_of(free, least)

    monkeypatch.setattr("jaxauto.planner.solve", solve)
    monkeypatch.setattr(certify, "between", lambda *_: [])
    leaner = certify._leaner(free, share, None, print)
    assert (leaner is not None) == found


def leaner_of(plan, share):
    """A made-up plan with that share of memory, slower in proportion."""
    estimate = plan.estimate
    slower = dataclasses.replace(estimate, peak_memory=estimate.peak_memory * share, step_time=estimate.step_time * (3 - 2 * share))
    return dataclasses.replace(plan, estimate=slower)


def test_what_does_not_fit_is_compiled_with_a_limit_where_the_compiler_knows_one(monkeypatch):
    limited = lambda plan: plan.certificate is not None and plan.certificate.limit_bytes  # noqa: E731
    needs, asked = stubborn(lambda plan: plan.certificate.budget_bytes * 0.99 if limited(plan) else 2 * plan.budget_bytes)
    monkeypatch.setattr(certify, "_needs", needs)
    monkeypatch.setattr(certify, "_leaner", lambda *_: None)
    plan = jaxauto.plan(step, *ARGS, target="v5e:2x4", memory_budget="8MiB", certify=True)
    assert [bool(limited(p)) for p in asked] == [False, True]
    assert plan.certificate.limit_bytes == 8 * 2**20 and plan.certificate.fits
    assert plan.compiler_options["xla_tpu_max_hbm_size_mib"] == "8" and "the compiler is told" in plan.notes[-1]
    with pytest.raises(jaxauto.InfeasibleError, match="no plan was found that the compiler fits"):
        jaxauto.plan(step, *ARGS, target="h100:8", memory_budget="8MiB", certify=True)


def test_the_answer_that_the_least_memory_was_told_by_is_tried_before_a_refusal(monkeypatch):
    """It comes of the search for little more than the least, not of that for the budget."""
    free = jaxauto.plan(step, *ARGS, target="h100:8", certify=False)
    most = free.estimate.peak_memory
    needs, asked = stubborn(lambda plan: most if plan.estimate.peak_memory < 0.6 * most else 2 * most)
    monkeypatch.setattr(certify, "_needs", needs)
    monkeypatch.setattr(certify, "_leaner", lambda *_: None)
    monkeypatch.setattr("jaxauto.planner.solve", lambda *_: leaner_of(free, 0.9))
    monkeypatch.setattr(certify, "_otherwise", lambda searched, plan, _: None if searched is plan else leaner_of(free, 0.5))
    plan = jaxauto.plan(step, *ARGS, target="h100:8", memory_budget=1.01 * most, certify=True)
    assert len(asked) == 2 and plan.estimate.peak_memory == 0.5 * most


@pytest.mark.parametrize(("peak", "expected"), [(0, 130.0), (120, 120.0), (160, 130.0)])
def test_no_more_is_alive_in_memory_than_is_allocated(peak, expected):
    """Not told; less than the heap with its gaps; more, where arrays in on-chip memory are counted too."""
    memory = {"argument": 50, "output": 50, "alias": 40, "temp": 70, "peak": peak}
    assert verify.Compilation("a compiler", "", memory, 1.0).peak_bytes == expected


def test_a_permute_takes_as_long_whatever_its_rings():
    """Every device sends what it holds: in rings of three over two axes (pieces 2a + b against 4b + a) as in rings of eight."""
    axes = mesh_axes(MESH, Target("v5p:2x2x2"))
    turned = [(2 * a + b, 4 * b + a) for a in range(4) for b in range(2)]
    rings = [tuple(p for p in turned if p[0] != p[1]), tuple((d, (d + 1) % 8) for d in range(8))]
    one, other = (
        HloCollective("p", "main", "collective-permute", 2**20 * n, 2**20, "f32", n, (), pairs, 1.0, asynchronous=False)
        for n, pairs in zip((3, 8), rings, strict=True)
    )
    assert verify.hlo_collective_seconds(one, axes) == verify.hlo_collective_seconds(other, axes)
    assert verify.hlo_collective_seconds(one, axes) == collective_seconds("collective-permute", 8 * 2**20, axes.sizes, axes.links)


def test_what_the_batch_takes_from_the_host_is_told_but_not_compared():
    """A compiled step begins with its batch on the device."""

    def step(params, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x.astype(jnp.float32) @ p["w"])))(params)
        return {"w": params["w"] - 1e-3 * grads["w"]}

    args = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}, jax.ShapeDtypeStruct((2**16, 256), jnp.uint8)
    plan = jaxauto.plan(step, *args, target="h100:1", certify=False, progress=False)
    e, host = plan.estimate, jaxauto.Target("h100:1").chip.host_bandwidth
    assert e.feed_time == pytest.approx(2**24 / host, rel=1e-6) == pytest.approx(e.comm_time, rel=1e-3)
    assert 0 < e.exposed_feed_time <= e.feed_time
    rows = {row.name: row for row in plan.verify().rows}
    assert rows["communication time"].estimated == pytest.approx(e.comm_time - e.feed_time)
    assert rows["step time (roofline of the schedule)"].estimated == pytest.approx(e.step_time - e.exposed_feed_time)
