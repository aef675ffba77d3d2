"""The HLO reader against programs whose flops and collectives are counted by hand, compiled here for CPU and, saved, for TPU and GPU.

The saved texts (data/hlo) are one train step: 4 scanned layers of two bfloat16 matmuls with a gelu between, width 1024, inner width 4096,
16 x 256 tokens, value_and_grad and SGD, on a 4 x 2 mesh (dp, tp) with the batch along dp; attributes that nothing reads are cut out.
"""

import functools
import gzip
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxauto import hlo

SAVED = pathlib.Path(__file__).parent / "data" / "hlo"
MESH = {"dp": 4, "tp": 2}
LAYERS, TOKENS, WIDTH, INNER = 4, 16 * 256, 1024, 4096
STEP_FLOPS = LAYERS * 6 * 2 * TOKENS * WIDTH * INNER  # two matmuls, each once forward and twice backward
WEIGHT = WIDTH * INNER * 2  # bytes of one layer's matrix
ACTIVATION = TOKENS // 4 * WIDTH * 2  # bytes of the residual stream on one data-parallel group


def saved(name: str) -> hlo.Module:
    return hlo.parse(gzip.decompress((SAVED / f"{name}.txt.gz").read_bytes()).decode())


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("dp", "tp"))


def array(shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), P(*spec)))


def compiled(step, *args, **options) -> hlo.Module:
    return hlo.parse(jax.jit(step, **options).lower(*args).compile().as_text())


def manual(step, in_spec, out_spec):
    return jax.shard_map(step, mesh=mesh(), in_specs=in_spec, out_specs=out_spec, check_vma=False)


def table(module: hlo.Module) -> list[tuple]:
    return sorted((c.kind, c.bytes_, hlo.mesh_axes(c, MESH), c.count) for c in module.collectives)


# ------------------------------------------------------------------------------------------------------------ compiled here


def in_a_scan(x):
    return lax.scan(lambda c, _: (c * 0.5 + lax.psum(c, "dp"), None), x, None, length=7)[0]


def ring(x):
    return lax.ppermute(x, "dp", [(k, (k + 1) % 4) for k in range(4)])


SMALL = {  # function of shards, specs in and out -> kind, full bytes on a group, axes, times; every array is f32[64, 32], 8192 bytes
    "psum": (lambda x: lax.psum(x, "dp"), P(None, "tp"), P(None, "tp"), ("all-reduce", 4096.0, ("dp",), 1.0)),
    "psum over both": (lambda x: lax.psum(x, ("dp", "tp")), P("dp", "tp"), P(), ("all-reduce", 1024.0, ("dp", "tp"), 1.0)),
    "psum in a scan": (in_a_scan, P(None, "tp"), P(None, "tp"), ("all-reduce", 4096.0, ("dp",), 7.0)),
    "all_gather": (lambda x: lax.all_gather(x, "tp", tiled=True), P("tp"), P(), ("all-gather", 8192.0, ("tp",), 1.0)),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "dp", tiled=True), P(), P("dp"), ("reduce-scatter", 8192.0, ("dp",), 1.0)),
    "all_to_all": (lambda x: lax.all_to_all(x, "dp", 1, 0, tiled=True), P("dp"), P("dp"), ("all-to-all", 8192.0, ("dp",), 1.0)),
    "ppermute": (ring, P("dp"), P("dp"), ("collective-permute", 8192.0, ("dp",), 1.0)),
}


@pytest.mark.parametrize("name", SMALL)
def test_collective_of_a_small_program(name):
    step, in_spec, out_spec, expected = SMALL[name]
    module = compiled(manual(step, in_spec, out_spec), array((64, 32), *in_spec))
    assert table(module) == [expected]
    (collective,) = module.collectives
    assert len({d for g in collective.groups for d in g}) == module.devices == 8
    assert collective.op_name
    assert pathlib.Path(collective.source.split(":")[0]).name == "test_hlo.py"


def test_matmul_sharded_along_the_contraction():
    arrays = array((64, 128), None, "tp"), array((128, 32), "tp", None)
    module = compiled(lambda a, b: a @ b, *arrays, out_shardings=NamedSharding(mesh(), P()))
    assert table(module) == [("all-reduce", 64 * 32 * 4.0, ("tp",), 1.0)]
    assert module.flops == 2 * 64 * 32 * 128 / 2


def square(x):
    return x @ x


def scan(step, x, length):
    return lax.scan(lambda c, _: (step(c), None), x, None, length=length)[0]


def count(condition, step, start, x):
    return lax.while_loop(lambda s: condition(s[0]), lambda s: (step(s[0]), square(s[1])), (start, x))


N = 16
ONE = 2 * N**3
LOOPS = {  # loop -> how many N x N matmuls it does
    "scan": (lambda x: scan(square, x, 6), 6),
    "scan in scan": (lambda x: scan(lambda c: scan(lambda d: jnp.tanh(square(d)), c, 3), x, 5), 15),
    "from 3 to 20": (lambda x: lax.fori_loop(3, 20, lambda i, c: square(c), x), 17),
    "u32 in steps of 2": (lambda x: count(lambda i: i < 21, lambda i: i + 2, jnp.uint32(4), x), 9),
    "down in steps of 3": (lambda x: count(lambda i: i >= 3, lambda i: i - 3, jnp.int32(30), x), 10),
    "bound first": (lambda x: count(lambda i: lax.gt(jnp.int32(12), i), lambda i: i + 1, jnp.int32(0), x), 12),
    "bound included": (lambda x: count(lambda i: i <= 5, lambda i: i + 2, jnp.int32(0), x), 3),
    "bound carried along": (lambda x: lax.while_loop(lambda s: s[0] < s[1], lambda s: (s[0] + 1, s[1], square(s[2])), (1, 8, x)), 7),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("source", ["written by XLA", "read off the condition"])
def test_trip_counts(name, source):
    step, times = LOOPS[name]
    text = jax.jit(step).lower(jax.ShapeDtypeStruct((N, N), jnp.float32)).compile().as_text()
    if source != "written by XLA":
        text = re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"cut":{}', text)
    module = hlo.parse(text)
    assert module.loops
    assert all(loop.known for loop in module.loops.values())
    assert module.flops == times * ONE


def test_a_loop_whose_bound_is_data_counts_once():
    module = compiled(lambda x: lax.while_loop(lambda s: jnp.sum(s) < 3, square, x), jax.ShapeDtypeStruct((N, N), jnp.float32))
    (loop,) = module.loops.values()
    assert (loop.trips, loop.known) == (1, False)
    assert module.flops == ONE


def test_a_conditional_counts_its_largest_branch():
    arrays = jax.ShapeDtypeStruct((), jnp.bool_), jax.ShapeDtypeStruct((N, N), jnp.float32)
    module = compiled(lambda p, x: lax.cond(p, lambda y: square(square(y)), square, x), *arrays)
    assert module.flops == 2 * ONE


def test_convolution_counts_taps_on_real_input_only():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 9, 9, 4), (3, 3, 4, 6))]
    layout = ("NHWC", "HWIO", "NHWC")
    module = compiled(lambda x, k: lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=layout), *shapes)
    taps = 2 + 3 + 3 + 3 + 2  # windows at 0, 2, 4, 6, 8 less one, of 9 columns: the first and last hang over the edge by one
    assert module.flops == 2 * 2 * 4 * 6 * taps**2


def test_flops_of_a_batched_matmul_and_elementwise():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((5, 16, 24), (5, 24, 8))]
    module = compiled(lambda a, b: jnp.exp(jnp.einsum("bij,bjk->bik", a, b)), *shapes)
    assert module.flops == 2 * 5 * 16 * 24 * 8
    assert module.elementwise_flops >= 5 * 16 * 8


# ------------------------------------------------------------------------------------------------------------ saved, from other compilers

REDUCED_LOSS = ("all-reduce", 4.0, ("dp",), 1.0)


def per_layer(kind, bytes_, axis, calls=1):
    return [(kind, float(bytes_), (axis,), float(LAYERS))] * calls


SAVED_STEPS = {  # -> devices that do the same work (a tp axis that shards nothing), collectives
    "v5e_replicated": (2, [*per_layer("all-reduce", 2 * WEIGHT, "dp"), REDUCED_LOSS]),
    "v5e_tensor": (1, [*per_layer("all-reduce", ACTIVATION, "tp", 2), *per_layer("all-reduce", WEIGHT, "dp"), REDUCED_LOSS]),
    # One gradient's reduce-scatter works on 4 x 264 rows in place of 4 x 256; a permute brings the 24 rows that are then the neighbour's.
    "v5e_fsdp": (
        2,
        [
            *per_layer("all-gather", WEIGHT, "dp", 4),
            *per_layer("reduce-scatter", WEIGHT, "dp"),
            *per_layer("reduce-scatter", 4 * 264 * INNER * 2, "dp"),
            *per_layer("collective-permute", 4 * 24 * INNER * 2, "dp"),
            REDUCED_LOSS,
        ],
    ),
    "v5p_fsdp_tensor": (
        1,
        [
            *per_layer("all-gather", WEIGHT / 2, "dp", 4),
            *per_layer("reduce-scatter", WEIGHT / 2, "dp", 2),
            *per_layer("all-reduce", ACTIVATION, "tp", 2),
            REDUCED_LOSS,
        ],
    ),
    # The GPU compiler combines a layer's two matrices in one call.
    "h100_fsdp": (2, [*per_layer("all-gather", 2 * WEIGHT, "dp", 2), *per_layer("reduce-scatter", 2 * WEIGHT, "dp"), REDUCED_LOSS]),
    "h100_tensor": (1, [*per_layer("all-reduce", ACTIVATION, "tp", 2), *per_layer("all-reduce", WEIGHT, "dp"), REDUCED_LOSS]),
}


@pytest.mark.parametrize("name", SAVED_STEPS)
def test_saved_step_to_the_digit(name):
    repeats, collectives = SAVED_STEPS[name]
    module = saved(name)
    assert [(loop.trips, loop.known) for loop in module.loops.values()] == [(LAYERS, True)] * 2
    assert module.flops * module.devices == repeats * STEP_FLOPS
    assert table(module) == sorted(collectives)


def test_an_async_collective_fusion_counts_once():
    gathers = [c for c in saved("v5e_fsdp").collectives if c.kind == "all-gather"]
    text = gzip.decompress((SAVED / "v5e_fsdp.txt.gz").read_bytes()).decode()
    assert len(re.findall(r" all-gather\(", text)) > len(gathers)  # start, what runs beside it, and done each hold a copy
    assert sorted(c.asynchronous for c in gathers) == [False, True, True, True]


def test_cycles_add_up_over_trips_and_skip_unknowns():
    text = gzip.decompress((SAVED / "v5e_tensor.txt.gz").read_bytes()).decode()
    once = sum(int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', text) if int(n) < 2**62)
    module = hlo.parse(text)
    assert once < module.cycles < LAYERS * once
    for unknown in (2**63 - 1, 2**64 - 5):
        assert hlo.parse(re.sub(r'"estimated_cycles":"\d+"', f'"estimated_cycles":"{unknown}"', text)).cycles == 0


# ------------------------------------------------------------------------------------------------------------------------ pieces of text

RING = """HloModule ring, num_partitions=4

%windowed_dot_general_body_ag (s: (u32[], f32[8,8])) -> (u32[], f32[8,8]) {
  %s = (u32[], f32[8,8]) parameter(0)
  %i = u32[] get-tuple-element(%s), index=0
  %x = f32[8,8] get-tuple-element(%s), index=1
  %a = f32[8,8] collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %b = f32[8,8] collective-permute(%a), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %d = f32[8,8] dot(%a, %b), lhs_contracting_dims={1}
  %two = u32[] constant(2)
  %n = u32[] add(%i, %two)
  ROOT %t = (u32[], f32[8,8]) tuple(%n, %d)
}

%cond (s.1: (u32[], f32[8,8])) -> pred[] {
  %s.1 = (u32[], f32[8,8]) parameter(0)
  %i.1 = u32[] get-tuple-element(%s.1), index=0
  %four = u32[] constant(4)
  ROOT %lt = pred[] compare(%i.1, %four), direction=LT
}

ENTRY %main (p: f32[8,8]) -> (u32[], f32[8,8]) {
  %p = f32[8,8] parameter(0)
  %zero = u32[] constant(0)
  %c = u32[] copy(%zero)
  %init = (u32[], f32[8,8]) tuple(%c, %p)
  ROOT %w = (u32[], f32[8,8]) while(%init), condition=%cond, body=%windowed_dot_general_body_ag
}
"""


def test_a_ring_loop_that_counts_by_two():
    """Windowed einsum: a matmul overlapped with permutes, two of them for each trip; the u32 counter starts in the caller's tuple."""
    module = hlo.parse(RING)
    assert module.loops["w"].trips == 2
    assert module.flops == 2 * 2 * 8**3
    assert [(c.kind, c.bytes_, c.count) for c in module.collectives] == [("collective-permute", 4 * 256.0, 2.0)] * 2
    assert all(c.windowed for c in module.collectives)
    assert module.multiplicity == {"main": 1.0, "windowed_dot_general_body_ag": 2.0, "cond": 3.0}


@pytest.mark.parametrize(("name", "role"), [("layer/dot_general", "all-gather"), ("layer/roll", "collective-permute")])
def test_the_last_step_of_a_ring_stands_behind_its_loop(name, role):
    """The permute that brings the pieces of a windowed einsum home has the name of the dot; another's is one of the program's own."""
    ring = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    text = RING.replace(ring, f'{ring}, metadata={{op_name="layer/dot_general"}}').replace("  ROOT %w =", "  %w =")
    home = f"""  %x.1 = f32[8,8] get-tuple-element(%w), index=1
  %home = f32[8,8] collective-permute(%x.1), {ring}, metadata={{op_name="{name}"}}
  ROOT %r = (u32[], f32[8,8]) tuple(%zero, %home)
}}
"""
    found = hlo.parse(text.rstrip().removesuffix("}") + home).collectives
    assert {c.name: c.role for c in found} == {"a": "all-gather", "b": "all-gather", "home": role}
    assert next(c for c in found if c.name == "home").role_bytes == (256 * 4 / 3 if role == "all-gather" else 256 * 4)


def test_a_counter_that_runs_away_from_its_bound_is_unknown():
    assert not hlo.parse(RING.replace("direction=LT", "direction=GT")).loops["w"].known


def test_unknown_opcodes_and_odd_lines_are_kept_or_passed_over():
    line = '  ROOT %r = (f32[8]{0}, weird[3]{0}) frobnicate-start(%p0), flavour={x={1}, "a,b"}, calls=%nowhere'
    module = hlo.parse("HloModule m\n\nENTRY %main () -> f32[] {\n  %p0 = f32[8]{0} parameter(0)\n" + line + "\n}\n")
    assert module.entry.root.opcode == "frobnicate-start"
    assert module.flops == module.elementwise_flops == module.cycles == 0
    assert module.collectives == []
    assert hlo.parse("HloModule m\n\nENTRY %e () -> f32[] {\n  garbage\n  ROOT %c = f32[] constant(1)\n}\n").entry.root.name == "c"


def test_text_without_computations():
    with pytest.raises(ValueError, match=r"no HLO computation in a text of 5 characters that begins 'hello': give compiled.as_text\(\)"):
        hlo.parse("hello")


@functools.cache
def long_text() -> str:
    text = gzip.decompress((SAVED / "v5e_fsdp.txt.gz").read_bytes()).decode()
    head, entry = text.split("\nENTRY ")
    copies = [re.sub(r"%([\w.\-]+)", rf"%\1.copy{k}", head.partition("\n%")[2]) for k in range(54)]
    return "HloModule long, num_partitions=8\n\n%" + "\n%".join([*copies, head.partition("\n%")[2]]) + "\nENTRY " + entry


def test_a_text_of_five_megabytes():
    text = long_text()
    assert len(text) > 5e6
    module = hlo.parse(text)
    assert module.flops * module.devices == 2 * STEP_FLOPS
    assert module.collectives
