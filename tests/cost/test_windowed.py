"""Sums scattered beside their dot: which, as the compiler was seen to do it, and what the dot takes longer, by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxauto.cost.collectives import collective_seconds
from jaxauto.cost.compute import operation_seconds
from jaxauto.cost.onchip import capacity
from jaxauto.cost.windowed import Inside, made_inside, windowed
from jaxauto.options import mesh_axes
from jaxauto.planner import read
from jaxauto.solve.positions import reduced_factors
from jaxauto.strategies import WHOLE
from jaxauto.targets.target import Target


def asked(target, shape, local, state, goes_to, batch=1, dtype=jnp.bfloat16, mesh=None):
    """``windowed`` of one dot ``gkm,gkn->gmn`` for one state and one target.

    Args:
      local: (k, m, n) of one device.
      state: for each mesh axis the name of the factor that it splits, or "".
      goes_to: for each mesh axis the dimension of the result.
    """
    target = Target(target)
    mesh = mesh or mesh_axes(shape, target)
    k, m, n = (size * int(np.prod([s for s, f in zip(mesh.sizes, state, strict=True) if f == name])) for name, size in zip("kmn", local))
    batch *= int(np.prod([s for s, f in zip(mesh.sizes, state, strict=True) if f == "g"]))
    args = jax.ShapeDtypeStruct((batch, k, m), jnp.bfloat16), jax.ShapeDtypeStruct((batch, k, n), jnp.bfloat16)
    groups = read(lambda a, b: jnp.einsum("gkm,gkn->gmn", a, b, preferred_element_type=dtype), args, {}).groups
    (op,) = groups.operations
    (result,) = op.results
    names = [f for f, _ in op.factors]
    of = dict(zip("gmn", (f for _, f in result.dims), strict=True))
    of["k"] = names[reduced_factors(op, result)[0]]
    row = np.array([[names.index(of[f]) if f else WHOLE for f in state]], np.int8)
    partial = np.isin(row, reduced_factors(op, result))
    hidden, extra, *_ = windowed(op, result, groups.graph.values, row, np.array([goes_to], np.int8), partial, mesh, target.chip)
    own = operation_seconds(op, groups.graph.values, row, mesh.sizes, target.chip)
    return bool(hidden[0, 0]), float(extra[0, 0]), float(own[0]), target.chip


BIG = (8192, 4096, 4096)
# name, target, mesh, (k, m, n) of one device, factors on the axes, where the sum goes, beside the dot: all compiled alone, and looked at
SEEN = [
    ("2 devices", "v5e:2x4", {"a": 2, "b": 4}, (8192, 2048, 4096), "km", (2, 1), False),
    ("4 devices", "v5e:2x4", {"a": 4, "b": 2}, (8192, 2048, 4096), "km", (2, 1), True),
    ("8 devices", "v5e:2x4", {"a": 8}, BIG, "k", (2,), True),
    ("16 devices", "v5e:4x4", {"a": 16}, BIG, "k", (2,), True),
    ("32 devices", "v5p:4x4x4", {"a": 32, "b": 2}, (2048, 2048, 4096), "km", (2, 1), True),
    ("64 devices", "v5e:8x8", {"a": 64}, BIG, "k", (2,), False),
    ("little to do, 8 devices", "v5e:2x4", {"a": 8}, (256, 4096, 4096), "k", (2,), False),
    ("as little, 32 devices", "v5p:4x4x4", {"a": 32, "b": 2}, (256, 2048, 4096), "km", (2, 1), True),
    ("to the other operand's dimension", "v5e:2x4", {"a": 8}, BIG, "k", (1,), True),
    ("to the batch", "v5p:4x4x4", {"a": 8, "b": 8}, (8192, 256, 2048), "km", (0, 1), False),
    ("to a dimension that is split already", "v5p:4x4x4", {"a": 8, "b": 8}, (8192, 256, 2048), "km", (1, 1), False),
    ("split in the batch", "v5p:4x4x4", {"a": 8, "b": 8}, (65536, 1024, 64), "kg", (2, 0), True),
    ("whole", "v5e:2x4", {"a": 8}, BIG, "k", (WHOLE,), False),
    ("over two axes together", "v5e:2x4", {"a": 4, "b": 2}, BIG, "kk", (2, 2), True),
    ("to two dimensions", "v5e:2x4", {"a": 4, "b": 2}, BIG, "kk", (1, 2), False),
]


SEEN += [  # results/ring_limits.md
    (f"{8 * k} contracted on {target}", target, {"a": 8}, (k, 2048, 2048), "k", (1,), k == above)
    for target, below, above in (("v5e:2x4", 520, 528), ("v5p:2x2x2", 520, 528), ("v6e:2x4", 1224, 1232))
    for k in (below, above)
]


@pytest.mark.parametrize(("target", "shape", "local", "state", "goes_to", "expected"), [s[1:] for s in SEEN], ids=[s[0] for s in SEEN])
def test_what_is_scattered_beside_its_dot(target, shape, local, state, goes_to, expected):
    hidden, extra, _, _ = asked(target, shape, local, tuple(state), goes_to, batch=8 if 0 in goes_to else 1)
    assert hidden is expected
    assert (extra > 0) is expected


def test_no_windows_without_a_compiler_that_has_them():
    mesh = dataclasses.replace(mesh_axes({"a": 8}, Target("v5e:2x4")), windows=None)
    assert asked("v5e:2x4", {"a": 8}, BIG, ("k",), (2,), mesh=mesh)[:2] == (False, 0.0)


def test_twice_the_bytes_need_twice_the_flops():
    local = (768, 4096, 4096)
    assert asked("v5e:2x4", {"a": 8}, local, ("k",), (2,))[0]
    assert not asked("v5e:2x4", {"a": 8}, local, ("k",), (2,), dtype=jnp.float32)[0]


def test_the_operand_without_the_dimension_is_read_again_on_each_trip():
    """Scores [k, m] of an attention and queries [k, n]: bound by memory, the scores are read four times where eight devices take part.

    The queries are transposed into on-chip memory, and the pieces of the result stay there.
    """
    k, m, n = 65536, 1024, 64
    hidden, extra, own, chip = asked("v5p:4x4x4", {"a": 8, "b": 8}, (k, m, n), ("k", "g"), (2, 0))
    per_byte = 1 / (chip.bandwidth_efficiency * chip.hbm_bandwidth)
    assert hidden
    assert own == pytest.approx(2 * (k * m + k * n + m * n) * per_byte)
    assert extra == pytest.approx(2 * (3 * k * m - m * n) * per_byte)


def test_a_dot_bound_by_the_matrix_unit_waits_for_the_transposed_operand():
    """128 MiB of operands, all of on-chip memory: the one that is transposed lies there, so do the pieces; the other one does not."""
    _, extra, own, chip = asked("v5e:2x4", {"a": 8}, BIG, ("k",), (2,))
    k, m, n = BIG
    assert own == pytest.approx(2 * k * m * n / (chip.flops_efficiency * chip.peak_flops(jnp.bfloat16)))
    assert extra == pytest.approx(2 * k * m / (chip.bandwidth_efficiency * chip.hbm_bandwidth))


def test_what_a_dot_makes_as_it_reads_is_written_for_a_loop():
    """A view of what is in memory is read as it is; a product is made in the dot, and has to lie somewhere when pieces of it are read."""

    def step(a, b):
        return jnp.einsum("km,kn->mn", (a * jnp.exp(a)).astype(jnp.bfloat16), b.T.astype(jnp.bfloat16), preferred_element_type=jnp.bfloat16)

    k, m, n = BIG
    args = jax.ShapeDtypeStruct((8 * k, m), jnp.float32), jax.ShapeDtypeStruct((n, 8 * k), jnp.float32)
    groups = read(step, args, {}).groups
    (op,) = groups.operations
    inside = made_inside(groups, {*groups.graph.inputs})
    assert [o.value in inside for o in op.operands] == [True, False]
    target = Target("v5e:2x4")
    mesh, (result,) = mesh_axes({"a": 8}, target), op.results
    row = np.array([[reduced_factors(op, result)[0]]], np.int8)
    given = (op, result, groups.graph.values, row, np.array([[1]], np.int8), np.ones((1, 1), bool), mesh, target.chip)
    alone, shared, placed, both = (Inside(0, *how) for how in ((False, False), (True, False), (False, True), (True, True)))
    longer = windowed(*given, (alone,))[1] - windowed(*given)[1]
    assert longer == pytest.approx(2 * 2 * k * m / (target.chip.bandwidth_efficiency * target.chip.hbm_bandwidth))
    for inside in ((), (alone,)):
        assert windowed(*given, inside)[2] == 2 * k * m  # made the way round that the loop wants it
    assert windowed(*given, (shared,))[2] == 2 * 2 * k * m  # another dot wants it as it is
    for inside in (placed, both):  # written beside what it is made of, which makes place for the transposed copy
        assert windowed(*given, (inside,))[2] == 2 * k * m
        assert windowed(*given, (inside._replace(near=True),))[2] == 2 * 2 * k * m  # from on-chip memory nothing makes place
    scoped = dataclasses.replace(target.chip.numbers["scoped_bytes"], value=100 * 2**20)
    small = dataclasses.replace(target.chip, numbers={**target.chip.numbers, "scoped_bytes": scoped})
    assert capacity(small) < 2 * k * m < capacity(target.chip)
    assert windowed(*given[:-1], small, (both._replace(near=True),))[2] == 2 * k * m  # it does not fit there
    assert windowed(*given, (both,))[1] == windowed(*given, (shared,))[1]
    assert [float(bytes_[0, 0]) for bytes_ in windowed(*given, (shared,))[3]] == [2 * k * m, 0]


def test_a_convolution_is_taken_apart_into_few_features():
    """Of the gradient of a weight [3, 3, 64, 64] over eight devices a piece has 8 features, each tile 128: 16 times the elements.

    The pieces are written, and read by the convolutions; the other operand and the result have 64 features: twice their elements.
    """

    def step(x, dy):
        return jax.lax.conv_general_dilated(x, dy, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("CHWN", "IHWO", "HWNC"))

    x = jax.ShapeDtypeStruct((64, 64, 64, 64), jnp.bfloat16)
    groups = read(step, (x, x), {}).groups
    (op,) = groups.operations
    (result,) = op.results
    assert groups.graph.values[result.value].shape == (3, 3, 64, 64)
    target = Target("v5e:2x4")
    mesh, names = mesh_axes({"a": 8}, target), [f for f, _ in op.factors]
    batch = op.operands[0].dims[0][1]  # as the operands lie, "C" is the sequence: what the gradient is summed over
    row, there = np.array([[names.index(batch)]], np.int8), np.array([[2], [3]], np.int8)
    assert names.index(batch) in reduced_factors(op, result)
    hidden, extra, beside, _ = windowed(op, result, groups.graph.values, row, there, np.ones((1, 1), bool), mesh, target.chip)
    per_byte = 1 / (target.chip.bandwidth_efficiency * target.chip.hbm_bandwidth)
    part, added = x.size * 2 / 8, 9 * 64 * 64 * 2
    own = operation_seconds(op, groups.graph.values, row, mesh.sizes, target.chip)[0]
    assert hidden.all()
    assert extra == pytest.approx(np.full((1, 2), (2 * part + 2 * 16 * part + 4 * 2 * part + 2 * added) * per_byte - own))
    assert beside == pytest.approx(np.full((1, 2), 16 * part / 2))  # the pieces of one trip of two


# (tokens, m, n) of one device, devices, dimension the sum is scattered over -> milliseconds of the compiled loop with what is before it and
# the update after it: scripts/results/rings.md
LOOPS = [
    ((8192, 3072, 768), "v5e:2x4", 2, 0.420),
    ((8192, 3072, 768), "v5e:2x4", 1, 0.312),
    ((8192, 768, 3072), "v5e:2x4", 2, 0.311),
    ((8192, 768, 3072), "v5e:2x4", 1, 0.420),
    ((8192, 4096, 1024), "v5e:2x4", 2, 0.514),
    ((8192, 1024, 4096), "v5e:2x4", 2, 0.465),
    ((8192, 1024, 4096), "v5e:2x4", 1, 0.610),
    ((4096, 2048, 8192), "v5e:4x4", 1, 1.195),
    ((8192, 50304, 768), "v5e:2x4", 2, 4.934),
    ((8192, 50304, 768), "v5e:2x4", 1, 6.136),
    ((4096, 128256, 2048), "v5e:4x4", 1, 17.679),
    ((4096, 2048, 128256), "v5e:4x4", 1, 14.707),
]


@pytest.mark.parametrize(("local", "target", "dimension", "milliseconds"), LOOPS)
def test_loops_as_compiled(local, target, dimension, milliseconds):
    """Gradients of weights [m, n], as v5e's compiler schedules them alone: which dimension is better turns on sizes, lanes and memory."""
    hidden, extra, own, _ = asked(target, {"a": Target(target).num_devices}, local, ("k",), (dimension,))
    assert hidden
    assert 1e3 * (own + extra) == pytest.approx(milliseconds, rel=0.06)


def test_of_a_batch_the_pieces_are_copied_first():
    """The weight gradient of eight experts on each device: pieces of [g, k, n] are copied out, the dots themselves are bound by flops."""
    k, m, n = 2560, 1024, 3584
    hidden, extra, _, chip = asked("v5e:2x4", {"a": 8}, (k, m, n), ("k",), (2,), batch=8)
    assert hidden
    assert extra == pytest.approx(2 * 8 * (2 * k * n + 2 * m * n) / (chip.bandwidth_efficiency * chip.hbm_bandwidth))


def test_a_short_dot_waits_for_what_is_sent():
    """A weight of 512 x 512 on eight devices: four pieces each way, and a dot that is through before one of them is there."""
    hidden, extra, own, chip = asked("v5p:2x2x2", {"a": 8}, (6144, 512, 512), ("k",), (2,))
    mesh = mesh_axes({"a": 8}, Target("v5p:2x2x2"))
    sent = collective_seconds("collective-permute", 2.0 * 512 * 512, mesh.sizes, mesh.links)
    assert hidden and own < 4 * sent
    before = 2 * (6144 * 512 + 6144 * 512) / (chip.bandwidth_efficiency * chip.hbm_bandwidth)  # both operands are brought on chip
    assert own + extra == pytest.approx(4 * sent + before)
