"""Strategies that experts know, found in plain models without a hint, and shown by the collectives of the compiled program."""

from __future__ import annotations

import fnmatch
import math

import pytest

import jaxauto
from discovery.cases import CASES, DATA, DLRM_DENSE, LADDER, MODEL, SPLIT, compiled, in_loops, planned, traffic
from jaxauto import aot
from jaxauto.targets import Target


def needs(name):
    case = CASES[name]
    target = case.compiled_for or case.target
    missing = aot.compiler_for(Target(target)) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"no ahead-of-time compiler for {target} is installed"))


def compiles(name):
    return pytest.mark.parametrize("name", [needs(name)])


@pytest.fixture(scope="module", autouse=True)
def end_workers():
    yield
    aot.close_workers()


def axes_of(spec):
    return {axis for part in spec if part is not None for axis in ((part,) if isinstance(part, str) else part)}


@pytest.mark.parametrize("name", list(CASES))
def test_specs(name):
    case, specs = CASES[name], planned(name).specs
    for pattern, wanted in case.specs.items():
        found = {path: spec for path, spec in specs.items() if fnmatch.fnmatchcase(path, pattern) and math.prod(shape_of(name, path)) > 1}
        assert found, pattern
        for path, spec in found.items():
            assert (axes_of(spec) == set(case.mesh)) if wanted == SPLIT else spec == wanted, (path, spec)


def shape_of(name, path):
    plan = planned(name)
    return plan.in_avals[plan.in_paths.index(path)].shape


@pytest.mark.parametrize("name", [needs(name) for name in CASES])
def test_collectives(name):
    """The traffic of the strategy is there, to the element, and no other of its size."""
    case, found = CASES[name], dict(traffic(name))
    for expected in case.moves:
        moved = found.pop(expected.key, None)
        assert moved is not None, f"no {expected.kind} over {expected.axes}; there are {[*traffic(name)]}"
        assert moved.elements == pytest.approx(expected.elements, rel=0.02), expected
        assert expected.calls is None or moved.calls == expected.calls, expected
    assert sum(moved.elements for moved in found.values()) <= case.rest, {key: moved.elements for key, moved in found.items()}


def test_less_memory_costs_time():
    plans = [planned(name) for name in LADDER]
    assert [p.estimate.peak_memory for p in plans] == sorted((p.estimate.peak_memory for p in plans), reverse=True)
    assert [p.estimate.step_time for p in plans] == sorted(p.estimate.step_time for p in plans)
    for plan in plans:
        assert plan.estimate.peak_memory <= plan.budget_bytes and plan.solver.gap < 0.01


def test_optimizer_state_is_sharded_before_gradients_and_parameters():
    states = [spec for path, spec in planned("ZeRO-1").specs.items() if ".trace." in path]
    assert sorted(axes_of(spec) for spec in states) == [set(), {"data"}], "of one of the two matrices: the other still fits"


@compiles("FSDP")
def test_float32_parameters_are_gathered_in_bfloat16(name):
    moved = traffic(name)["all-gather", DATA, True]
    assert moved.bytes_ == pytest.approx(2 * moved.elements, rel=0.01)


@compiles("Megatron")
def test_the_loss_is_computed_in_parts_of_the_vocabulary(name):
    """Each device has the logits of its 16,032 words; of the loss only the maximum, the sum and the label's logit of a position move."""
    shapes = {s.dims for c in compiled(name).computations.values() for i in c.instructions for s in i.shapes}
    logits = {dims for dims in shapes if math.prod(dims) == 256 * 128256 // 8 and 128256 // 8 in dims}
    assert logits and not any(dims[-1:] == (128256,) for dims in shapes)
    sums = traffic(name)["all-reduce", MODEL, False].arrays
    of_the_loss = sum(count * math.prod(whole) for (whole, _), count in sums.items() if whole != (256, 8192))
    assert 3 * 256 <= of_the_loss < 10 * 256, "beside them the embedding and the gradient of the last activations are summed"


@compiles("sequence parallelism")
def test_the_residual_stream_is_split_by_position_between_the_pairs(name):
    """Two gathers and two scatters of the stream in each layer, for the one all-reduce forward and the one backward of Megatron's pair."""
    whole, part, layers = (8192, 8192), (1024, 8192), 2
    assert traffic(name)["all-gather", MODEL, True].arrays[part, whole] >= 2 * layers
    assert traffic(name)["reduce-scatter", MODEL, True].arrays[whole, part] >= 2 * layers
    sums = traffic(name)["all-reduce", MODEL, True]
    assert sums.elements < 3 * layers * 8192, "only gradients of the norms are summed whole"
    gathered = traffic(name)["all-gather", MODEL, True].arrays
    assert not any(28672 in (*before, *after) for before, after in gathered), "the weights of the pairs stay where they are"


@compiles("context parallelism by heads")
def test_positions_are_exchanged_for_heads(name):
    """As in Ulysses (arXiv 2309.14509): queries, keys, values and the result, forward, again in the recomputation, and backward."""
    for before, after in traffic(name)["all-to-all", DATA, True].arrays:
        assert 131072 // 8 in before and before == after and 8 in before
    assert max(c.count for c in compiled(name).collectives) < 64, "nothing moves in the loop over the 64 chunks of keys"


@compiles("context parallelism by keys")
def test_keys_and_values_are_gathered_where_heads_are_too_few(name):
    """8 heads of keys for 64 devices: each device has its positions' queries and all keys, as in Llama 3 (arXiv 2407.21783, 3.3.2)."""
    gathered = traffic(name)["all-gather", DATA, True].arrays
    assert gathered[(131072 // 64, 8, 128), (131072, 8, 128)] == 2 * 2 * 2, "keys and values in 2 layers, again in the recomputation"
    stream = [key for moved in traffic(name).values() for key in moved.arrays if math.prod(key[0]) >= 131072 * 4096 // 64]
    assert not [key for key in stream if 131072 // 64 in key[0] and 4096 in key[0]], "the stream and the queries do not move"


@compiles("2-D (SUMMA)")
def test_weights_move_along_one_axis_and_activations_along_the_other(name):
    """As in SUMMA (Optimus, arXiv 2104.05343): a block of each operand is gathered from the row or the column of the grid of devices.

    For the weights' gradients too: their sums along a column, as rings beside the dots, take 4 % longer (as compiled for v5p).
    """
    weights, rows, layers = 16384 * 65536, 16384 * 16384, 2
    gathered = {axes: moved.elements for (kind, axes, _), moved in traffic(name).items() if kind == "all-gather"}
    assert sorted(gathered) == [DATA, MODEL]
    assert sorted(gathered.values()) == pytest.approx([4 * layers * rows / 8, 4 * layers * weights / 8], rel=0.02)
    both = [moved.elements for (_, axes, _), moved in traffic(name).items() if axes == (*DATA, *MODEL)]
    assert sum(both) < 10, "nothing is gathered or summed over all devices but the loss"


def test_no_layout_on_one_axis_is_as_fast():
    """The best that 64 devices in one row can do, be it data-parallel, fully sharded or Megatron's."""
    case = CASES["2-D (SUMMA)"]
    step, args = case.made()
    row = jaxauto.plan(step, *args, target=case.target, mesh={"row": 64}, certify=False, progress=False)
    assert row.estimate.step_time > 1.2 * planned(case.name).estimate.step_time


@compiles("expert parallelism")
def test_experts_stay_and_tokens_travel(name):
    arrays = [key for (_, _, inside), moved in traffic(name).items() if inside for key in moved.arrays]
    assert not [key for key in arrays if 8192 in (*key[0], *key[1])], "no expert's weight moves, no hidden layer either"
    assert all(320 in before for before, _ in traffic(name)["all-to-all", DATA, True].arrays), "what moves are slots of experts"


@compiles("spatial partitioning")
def test_neighbours_exchange_rows(name):
    halos = traffic(name)["collective-permute", DATA, False]
    assert {(before, after) for before, after in halos.arrays} == {((1, 1, 2048, c), (1, 1, 2048, c)) for c in (4, 64)}
    shifts = [c.pairs for c in compiled(name).collectives if c.kind == "collective-permute"]
    assert {target - source for pairs in shifts for source, target in pairs} == {1, -1}
    convolved = {s.dims for c in compiled(name).computations.values() for i in c.instructions for s in i.shapes if len(s.dims) == 4}
    assert any(2048 // 8 in dims for dims in convolved) and not any(dims.count(2048) == 2 for dims in convolved)


@compiles("vocabulary-sharded tables")
def test_rows_are_looked_up_where_they_are_and_summed(name):
    sums = traffic(name)["all-reduce", DATA, False].arrays
    assert sum(math.prod(before) * n for (before, _), n in sums.items()) == 8 * 65536 * 16 + DLRM_DENSE + 1, "and the loss"
    largest = max(math.prod(after) for moved in traffic(name).values() for _, after in moved.arrays)
    assert largest < (1 << 24) * 16 / 32, "no table and no gradient of a table moves, not even one device's part"


def test_members_have_nothing_to_say_to_each_other():
    assert not compiled("ensemble axis").collectives


def test_loops_are_told_from_what_runs_once():
    looped = in_loops(compiled("ensemble axis"))
    assert compiled("ensemble axis").entry.name not in looped
