"""What stays in on-chip memory, by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxauto
from jaxauto.cost.compute import bytes_per_flop, operation_seconds, traffic_seconds
from jaxauto.cost.onchip import Near, capacity, place
from jaxauto.graph import walk
from jaxauto.rules import rule_for
from jaxauto.strategies import WHOLE
from jaxauto.targets import CHIPS
from jaxauto.targets.target import Target

from .test_fusion import array, buffers_of

CHIP = Target("v5e:1").chip
MIB = 2**20


def attention(q, k):
    scores = jnp.einsum("blhk,bmhk->bhlm", q, k)
    return jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores), k)


def found(fn, *args, target="v5e:1", devices=1, sizes=None):
    chip = Target(target).chip
    graph, buffers = buffers_of(fn, *args, platform="tpu", bytes_per_flop=bytes_per_flop(chip))
    rules = {n.id: rule_for(n.eqn) for n in walk(graph) if not n.bodies}
    return graph, buffers, place(graph, rules, buffers, buffers.bytes_ if sizes is None else sizes(buffers), chip, devices)


def dots(graph):
    return [node for node in walk(graph) if node.prim == "dot_general"]


def test_scores_and_weights_are_held_by_the_exp():
    graph, _, placed = found(attention, array(2, 256, 4, 16), array(2, 256, 4, 16))
    whole = 4.0 * 2 * 4 * 256 * 256
    first, second = dots(graph)
    assert placed.near.written == {(first.id, first.outputs[0]): whole}
    assert {by: n for by, n in placed.near.read.items() if by[1] not in graph.inputs} == {
        (second.id, x): whole for x in second.inputs if x not in graph.inputs
    }


def test_what_a_step_is_given_and_returns_lies_in_hbm():
    _, buffers, placed = found(lambda x, y: x @ y, array(64, 64), array(64, 64))
    assert placed.near == Near({}, {}) and not placed.written.any()
    assert buffers.is_input.sum() == 2


@pytest.mark.parametrize(("between", "stays"), [(1, True), (20, False)])
def test_what_is_used_long_after_goes_to_hbm(between, stays):
    """A dot of 2048 takes 0.1 ms; on-chip memory is full after 0.16, of which ten are waited for."""

    def late(x, w):
        y = x @ w
        z = y
        for _ in range(between):
            z = z @ w
        return z @ y

    graph, _, placed = found(late, array(2048, 2048), array(2048, 2048))
    first, last = dots(graph)[0], dots(graph)[-1]
    assert ((last.id, first.outputs[0]) in placed.near.read) is stays
    assert ((first.id, first.outputs[0]) in placed.near.written) is stays


def test_the_second_of_two_uses_finds_what_was_read_from_hbm_near():
    graph, _, placed = found(lambda x, w: (x @ w).sum() + (w @ x).sum(), array(512, 512), array(512, 512))
    first, second = dots(graph)
    assert {by for by in placed.near.read if by[0] == first.id} == set()
    assert {x for node, x in placed.near.read if node == second.id} == set(graph.inputs)


def test_there_is_room_for_so_much():
    """Three arrays of 32 MiB (only multiplied: in bfloat16), alive at once: those that save most for their size stay."""

    def wide(x, u, v):
        a, b, c = x @ u, x @ v, u @ v
        return a @ b + b @ c + c @ a

    _, buffers, placed = found(wide, *[array(4096, 4096)] * 3)
    made = (buffers.bytes_ == 32 * MIB) & ~buffers.is_input & ~buffers.is_output
    assert made.sum() >= 3
    taken = np.zeros(buffers.length + 1)
    for k in np.nonzero(placed.written)[0]:
        taken[buffers.start[k] : buffers.end[k] + 1] += buffers.bytes_[k]
    assert 0 < taken.max() <= capacity(CHIP)


def test_an_array_takes_the_room_of_its_tiles():
    """Of three of 32 MiB at once fewer stay if tiles make each 64."""

    def wide(x, u, v):
        a, b, c = x @ u, x @ v, u @ v
        return a @ b + b @ c + c @ a

    def near(filled):
        return int(found(wide, *[array(4096, 4096)] * 3, sizes=lambda b: filled * b.bytes_)[2].written.sum())

    assert near(1.0) > near(2.0) > near(4.0) == 0


def recurrent(w, x):
    def cell(h, now):
        h = jnp.tanh(now + h @ w)
        return h, None

    return jax.lax.scan(cell, jnp.zeros(x.shape[1:]), x)[0]


def test_what_all_trips_read_and_the_carry_stay_through_a_short_loop():
    graph, _, placed = found(recurrent, array(1024, 1024), array(256, 64, 1024))
    (dot,) = dots(graph)
    assert set(placed.near.read) == {(dot.id, x) for x in dot.inputs}


def test_but_not_through_a_loop_that_takes_long():
    def layers(w, x):
        def layer(x, _):
            for _ in range(12):
                x = jnp.tanh(x @ w)
            return x, None

        return jax.lax.scan(layer, x, None, length=4)[0]

    graph, _, placed = found(layers, array(2048, 2048), array(2048, 2048))
    first, *others = dots(graph)
    weight = first.inputs[1]
    assert (first.id, weight) not in placed.near.read, "each trip reads it once"
    assert all((node.id, weight) in placed.near.read for node in others)


def test_what_a_loop_stacks_is_written_to_hbm_and_read_on_chip():
    def stacked(x, w):
        def layer(x, w):
            y = x @ w
            return y @ w, y

        return jax.lax.scan(layer, x, w)

    graph, _, placed = found(stacked, array(64, 64), array(4, 64, 64))
    first, second = dots(graph)
    assert (first.id, first.outputs[0]) not in placed.near.written
    assert placed.near.read[second.id, first.outputs[0]] == 4.0 * 64 * 64


@pytest.mark.parametrize(("target", "trips", "stays"), [("v5e:1", 4, True), ("v5e:1", 4096, False), ("v5p:1x1x1", 4, False)])
def test_a_slice_is_read_from_hbm_by_each_dot_unless_the_stack_stays(target, trips, stays):
    """As XLA has the operands of these loops."""

    def twice(x, w):
        def layer(x, w):
            return jnp.tanh(x @ w) @ w, None

        return jax.lax.scan(layer, x, w)[0]

    graph, _, placed = found(twice, array(128, 128), array(trips, 128, 128), target=target)
    weight = dots(graph)[0].inputs[1]
    assert all(((node.id, weight) in placed.near.read) is stays for node in dots(graph))
    if stays:
        assert placed.near.read[dots(graph)[0].id, weight] == 4.0 * trips * 128 * 128  # what has to fit


def test_what_one_loop_hands_to_the_next_stays():
    def loops(x, w):
        for _ in range(2):
            x = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=4)[0]
        return x @ w

    graph, buffers, placed = found(loops, array(256, 256), array(256, 256))
    first, second = (node for node in graph.nodes if node.prim == "scan")
    (carry,) = first.outputs
    at = buffers.ids.tolist().index(carry)
    assert carry in second.inputs and placed.reads[at] == 1.0


@pytest.mark.parametrize(("target", "stays"), [("v5e:1", True), ("v5p:1x1x1", False)])
def test_two_cores_make_a_dots_result_in_hbm(target, stays):
    graph, _, placed = found(lambda x, w: jnp.tanh(x @ w) @ w, array(512, 512), array(512, 512), target=target)
    _, second = dots(graph)
    assert ((second.id, second.inputs[0]) in placed.near.read) is stays
    assert bool(placed.near.written) is stays


def test_what_is_split_over_devices_fits_sooner():
    _, _, alone = found(attention, array(64, 1024, 4, 16), array(64, 1024, 4, 16))
    _, _, split = found(attention, array(64, 1024, 4, 16), array(64, 1024, 4, 16), devices=16)
    assert not alone.near.written and split.near.written


@pytest.mark.parametrize(("batch", "stays"), [(8, True), (512, False)])
def test_a_dot_is_not_charged_for_what_stays_nor_memory(batch, stays):
    """512 KiB of scores for a sequence; 112 MiB are there for them."""
    args = array(batch, 256, 2, 16), array(batch, 256, 2, 16)
    plan = jaxauto.plan(attention, *args, target="v5e:1", certify=False)
    best = plan.program.solved.found.best
    model, op = best.model, best.model.groups.operations[0]
    scores = 4.0 * batch * 2 * 256 * 256
    assert (scores <= capacity(CHIP)) is stays
    whole = sum(model.values[o.value].nbytes for o in (*op.operands, *op.results))
    ((times, near),) = model.runs(op)
    seconds = operation_seconds(op, model.values, np.array([[WHOLE]]), (1,), CHIP, near)
    assert times == 1 and seconds == pytest.approx([traffic_seconds(whole - scores * stays, CHIP)])
    assert (plan.estimate.peak_memory < scores) is stays


def test_no_room_is_no_on_chip_memory():
    numbers = {k: v for k, v in CHIP.numbers.items() if k != "vmem_bytes"}
    assert capacity(dataclasses.replace(CHIP, numbers=numbers)) == 0


@pytest.mark.parametrize(("name", "mib"), [("v4", 128), ("v5e", 112), ("v5p", 48), ("v6e", 96), ("tpu7x", 32)])
def test_what_runs_needs_a_part_of_on_chip_memory(name, mib):
    """XLA's default scoped limit: 16 MiB on v5e and v5p, 32 on v6e and tpu7x; v4 keeps arrays in CMEM."""
    assert capacity(CHIPS[name]) == mib * 2**20


@pytest.mark.parametrize(("target", "stays"), [("v5e:1", True), ("v5p:1x1x1", False)])
def test_what_both_cores_of_a_chip_leave_in_hbm_the_next_trip_finds_there(target, stays):
    """A gradient that a loop adds up, as compiled for both: v5p's two cores each write a part of what a dot's fusion makes."""

    def fn(total, x, y):
        return jnp.tanh(jax.lax.scan(lambda c, xy: (c + xy[0].T @ xy[1], None), 2 * total, (x, y))[0])

    graph, buffers, placed = found(fn, array(512, 512), array(8, 64, 512), array(8, 64, 512), target=target)
    (loop,) = (n for n in walk(graph) if n.prim == "scan")
    carry = loop.bodies[0].inputs[0]
    assert placed.reads[buffers.ids.tolist().index(carry)] == float(stays)


@pytest.mark.parametrize(("target", "stays"), [("v5e:1", True), ("v5p:1x1x1", False)])
def test_with_two_cores_only_fusions_leave_results_on_chip(target, stays):
    """As compiled: strided slices, dilating pads and lone equations are instructions of their own, which v5p writes to HBM."""

    def fn(x):
        even, odd = x[::2], x[1::2]
        mixed = jnp.tanh(even * 2 + odd)
        return jax.lax.reduce_max(mixed[::2] + mixed[1::2], (0, 1))

    graph, buffers, placed = found(fn, array(512, 1024), target=target)
    where = {graph.values[n].producer: bool(on) for n, on in zip(buffers.ids.tolist(), placed.written, strict=True)}
    made = {prim: {on for node, on in where.items() if node is not None and node.prim == prim} for prim in ("slice", "tanh")}
    assert made == {"slice": {stays}, "tanh": {True}}


def test_what_is_widened_in_the_dot_that_reads_it_moves_as_narrow_as_it_is():
    """Frames in uint8, as images often come; and the half of a float32 result that only products read."""

    def fn(frames, w, v):
        return (frames.astype(jnp.float32) / 255) @ w @ v

    frames = jax.ShapeDtypeStruct((64, 1024), jnp.uint8)
    graph, _, placed = found(fn, frames, array(1024, 256), array(256, 64))
    first, second = dots(graph)
    assert placed.near.narrow[first.id, first.inputs[0]] == 1 / 4
    assert placed.near.narrow[second.id, second.inputs[0]] == placed.near.narrow[first.id, first.outputs[0]] == 1 / 2
    assert (first.id, first.inputs[1]) not in placed.near.narrow
