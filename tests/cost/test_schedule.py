"""The clock against schedules that are added up by hand, on a chip that does one flop/s and one byte/s, so that seconds are counts."""

import dataclasses
import gzip
import pathlib
from dataclasses import dataclass

import pytest

from jaxauto import hlo
from jaxauto.cost.schedule import schedule_seconds
from jaxauto.cost.traffic import hbm_bytes
from jaxauto.targets.chip import Number
from jaxauto.targets.chips import CHIPS

SAVED = pathlib.Path(__file__).parents[1] / "data" / "hlo"


@dataclass(frozen=True)
class Chip:
    flops: float
    hbm_bandwidth: float
    flops_efficiency: float = 0.9
    convolution_efficiency: float = 0.9
    bandwidth_efficiency: float = 0.85
    dot_writes: float = 1.0
    launch_seconds: float = 0.0
    hash_seconds: float = 0.0

    def peak_flops(self, dtype: str, precision: str = "default") -> float:
        assert precision == "default"
        return self.flops * {"bfloat16": 1, "float32": 0.5, "float8_e4m3fn": 2, "int8": 2}[dtype]


CHIP = Chip(1 / 0.9, 1 / 0.85)  # 1 bfloat16 flop/s and 1 byte/s effective


def module(entry: str, *callees: str) -> hlo.Module:
    """``entry``: instruction lines, the last is the root."""
    lines = [line.strip() for line in entry.strip().splitlines()]
    lines[-1] = "ROOT " + lines[-1]
    return hlo.parse(
        "\n".join(["HloModule m, num_partitions=4", *callees, "ENTRY %main () -> f32[] {", *(f"  {line}" for line in lines), "}"])
    )


def computation(name: str, body: str) -> str:
    lines = [line.strip() for line in body.strip().splitlines()]
    lines[-1] = "ROOT " + lines[-1]
    return "\n".join([f"%{name} () -> f32[] {{", *(f"  {line}" for line in lines), "}"])


def timed(parsed: hlo.Module, collective: float = 0.0):
    return schedule_seconds(parsed, CHIP, lambda c: collective)


# Layouts carry tiles where a module is to be read as a TPU's: T(1) pads nothing.
TOP_LEVEL = {  # schedule -> HBM bytes of its root
    "copy": ("%p = f32[100]{0} parameter(0)\n%r = f32[100]{0} copy(%p)", 800),
    "broadcast": ("%p = f32[] parameter(0)\n%r = f32[100]{0} broadcast(%p), dimensions={}", 404),
    "bitcast": ("%p = f32[100]{0} parameter(0)\n%r = f32[10,10]{1,0} bitcast(%p)", 0),
    "on-chip result": ("%p = f32[100]{0:T(1)} parameter(0)\n%r = f32[100]{0:T(1)S(1)} copy(%p)", 400),
    "on-chip both": ("%p = f32[100]{0:T(1)S(1)} parameter(0)\n%r = f32[100]{0:T(1)S(1)} negate(%p)", 0),
    "memory spaces of a GPU are memory": ("%p = f32[100]{0:S(1)} parameter(0)\n%r = f32[100]{0} copy(%p)", 800),
    "padded tiles": ("%p = bf16[3,100]{1,0:T(8,128)(2,1)} parameter(0)\n%r = bf16[3,100]{1,0:T(8,128)(2,1)} negate(%p)", 2 * 8 * 128 * 2),
    "slice": ("%p = f32[100]{0} parameter(0)\n%r = f32[10]{0} slice(%p), slice={[0:10]}", 80),
    "dynamic slice": ("%p = f32[100]{0} parameter(0)\n%i = s32[] parameter(1)\n%r = f32[10]{0} dynamic-slice(%p, %i)", 84),
    "update": (
        """%p = f32[100]{0} parameter(0)
        %u = f32[10]{0} parameter(1)
        %i = s32[] parameter(2)
        %r = f32[100]{0} dynamic-update-slice(%p, %u, %i)""",
        80,
    ),
    "nothing to do": ('%r = f32[100]{0} custom-call(), custom_call_target="AllocateBuffer"', 0),
    "an opcode of the future": ("%p = f32[100]{0} parameter(0)\n%r = f32[50]{0} frobnicate(%p)", 600),
}


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_bytes_of_an_instruction(name):
    text, expected = TOP_LEVEL[name]
    parsed = module(text)
    assert hbm_bytes(parsed, parsed.entry, parsed.entry.root) == expected
    assert timed(parsed).total_seconds == pytest.approx(expected)


FUSIONS = {  # (body of a fusion of %p0: f32[4,100], %p1: f32[100], %i: s32[]; shape of its result) -> bytes, the index's 4 left out
    "elementwise": ("%a = f32[100]{0} slice(%p0)\n%r = f32[100]{0} add(%a, %p1)", "f32[100]{0}", 400 + 400 + 400),
    "whole operand": ("%n = f32[4,100]{1,0} negate(%p0)\n%r = f32[4,100]{1,0} exponential(%n)", "f32[4,100]{1,0}", 3200),
    "slice through a convert and a bitcast": (
        """%c = bf16[4,100]{1,0} convert(%p0)
        %b = bf16[400]{0} bitcast(%c)
        %s = bf16[100]{0} dynamic-slice(%b, %i)
        %r = bf16[100]{0} exponential(%s)""",
        "bf16[100]{0}",
        400 + 200,
    ),
    "slice of what is computed": (
        "%n = f32[4,100]{1,0} negate(%p0)\n%s = f32[100]{0} slice(%n)\n%r = f32[100]{0} exponential(%s)",
        "f32[100]{0}",
        400 + 400,
    ),
    "slice of what is computed and returned as well": (
        """%n = f32[4,100]{1,0} negate(%p0)
        %s = f32[100]{0} slice(%n)
        %r = (f32[100]{0}, f32[4,100]{1,0}) tuple(%s, %n)""",
        "(f32[100]{0}, f32[4,100]{1,0})",
        1600 + 400 + 1600,
    ),
    "two slices": ("%a = f32[100]{0} slice(%p0)\n%b = f32[100]{0} slice(%p0)\n%r = f32[100]{0} add(%a, %b)", "f32[100]{0}", 800 + 400),
    "update in place": ("%r = f32[4,100]{1,0} dynamic-update-slice(%p0, %p1, %i)", "f32[4,100]{1,0}", 400 + 400),
    "update in place, through a bitcast": (
        "%u = f32[4,100]{1,0} dynamic-update-slice(%p0, %p1, %i)\n%r = f32[400]{0} bitcast(%u)",
        "f32[400]{0}",
        400 + 400,
    ),
    "two results, one handed on": (
        "%n = f32[100]{0} negate(%p1)\n%r = (f32[100]{0}, f32[4,100]{1,0}) tuple(%n, %p0)",
        "(f32[100]{0}, f32[4,100]{1,0})",
        400 + 400,
    ),
    "slices of an operand that is padded, as a ring cuts two pieces of it": (  # 2 x 50 and 1 x 50 of its own elements
        """%z = f32[] constant(-inf)
        %a = f32[5,100]{1,0} pad(%p0, %z), padding=0_1x0_0
        %b = f32[5,100]{1,0} pad(%p0, %z), padding=1_0x0_0
        %s = f32[2,50]{1,0} dynamic-slice(%a, %i)
        %t = f32[1,50]{1,0} dynamic-slice(%b, %i)
        %r = f32[2,50]{1,0} maximum(%s, %t)""",
        "f32[2,50]{1,0}",
        400 + 200 + 400,
    ),
    "a padded operand that is not sliced": (
        """%z = f32[] constant(0)
        %a = f32[5,100]{1,0} pad(%p0, %z), padding=0_1x0_0
        %r = f32[5,100]{1,0} negate(%a)""",
        "f32[5,100]{1,0}",
        1600 + 2000,
    ),
    "a fusion inside that slices": (
        "%f = f32[100]{0} fusion(%p0, %i), calls=%inner\n%r = f32[100]{0} negate(%f)",
        "f32[100]{0}",
        400 + 400,
    ),
}
INNER = computation(
    "inner",
    """%q0 = f32[4,100]{1,0} parameter(0)
    %q1 = s32[] parameter(1)
    %d = f32[1,100]{1,0} dynamic-slice(%q0, %q1)
    %b = f32[100]{0} bitcast(%d)""",
)


@pytest.mark.parametrize("name", FUSIONS)
def test_bytes_of_a_fusion(name):
    body, result, expected = FUSIONS[name]
    parameters = "%p0 = f32[4,100]{1,0} parameter(0)\n%p1 = f32[100]{0} parameter(1)\n%i = s32[] parameter(2)\n"
    parsed = module(f"{parameters}%r = {result} fusion(%p0, %p1, %i), calls=%f", INNER, computation("f", parameters + body))
    unindexed = 4 if "%i" in body else 0
    assert hbm_bytes(parsed, parsed.entry, parsed.entry.root) - unindexed == expected


DOT = "%a = bf16[10,20]{1,0} parameter(0)\n%b = bf16[20,30]{1,0} parameter(1)\n%r = bf16[10,30]{1,0} dot(%a, %b), lhs_contracting_dims={1}"
FLOPS = 2 * 10 * 20 * 30


@pytest.mark.parametrize(("dtype", "slower"), [("bf16", 1), ("f32", 2), ("f8e4m3fn", 0.5), ("s8", 0.5)])
def test_a_matmul_runs_at_the_rate_of_its_dtype(dtype, slower):
    assert timed(module(DOT.replace("bf16", dtype))).total_seconds == pytest.approx(FLOPS * slower)


@pytest.mark.parametrize(
    ("asked", "precision"),
    [
        ("", "default"),
        (", operand_precision={high,high}", "high"),
        (", operand_precision={highest,highest}", "highest"),
        (", operand_precision={default,highest}", "highest"),
        (", algorithm=dot_bf16_bf16_f32_x3", "bf16_bf16_f32_x3"),
        (', backend_config={"precision_config":{"operand_precision":["HIGHEST","HIGHEST"]}}', "highest"),
    ],
)
@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_a_matmul_runs_in_the_precision_that_is_asked_for(asked, precision, name):
    chip = dataclasses.replace(CHIPS[name], numbers={**CHIPS[name].numbers, "hbm_bandwidth": Number(1e30, "byte/s", "none")})
    spent = schedule_seconds(module(DOT.replace("bf16", "f32") + asked), chip, lambda c: 0.0).total_seconds - chip.launch_seconds
    assert spent == pytest.approx(FLOPS / chip.flops_efficiency / chip.peak_flops("float32", precision))


REDUCE = "%start = f32[25]{0} all-reduce-start(%p), replica_groups={}"


@pytest.mark.parametrize(("work", "exposed"), [(5, 60), (12, 4), (20, 0)])
def test_an_async_collective_hides_behind_what_stands_between(work, exposed):
    text = f"%p = f32[{work}]{{0}} parameter(0)\n{REDUCE}\n%x = f32[{work}]{{0}} copy(%p)\n%r = f32[25]{{0}} all-reduce-done(%start)"
    spent = timed(module(text), collective=100.0)
    assert (spent.compute_seconds, spent.collective_seconds, spent.exposed_collective_seconds) == pytest.approx((8 * work, 100, exposed))
    assert spent.total_seconds == pytest.approx(8 * work + exposed)
    assert sum(row.total_seconds for row in spent.breakdown) == pytest.approx(spent.total_seconds)


def test_a_synchronous_collective_hides_behind_nothing():
    text = "%p = f32[25]{0} parameter(0)\n%s = f32[25]{0} all-reduce(%p), replica_groups={}\n%r = f32[25]{0} copy(%s)"
    spent = timed(module(text), collective=100.0)
    assert (spent.compute_seconds, spent.exposed_collective_seconds, spent.total_seconds) == pytest.approx((200, 100, 300))


@pytest.mark.parametrize(("groups", "exposed"), [("{{0,1,2,3}}", 160), ("{{0,1},{2,3}}", 60)])
def test_two_collectives_on_the_same_devices_follow_each_other(groups, exposed):
    text = f"""%p = f32[5]{{0}} parameter(0)
    %one = f32[5]{{0}} all-reduce-start(%p), replica_groups={{{{0,1,2,3}}}}
    %two = f32[5]{{0}} all-reduce-start(%p), replica_groups={groups}
    %x = f32[5]{{0}} copy(%p)
    %done = f32[5]{{0}} all-reduce-done(%one)
    %r = f32[5]{{0}} all-reduce-done(%two)"""
    spent = timed(module(text), collective=100.0)
    assert (spent.collective_seconds, spent.exposed_collective_seconds) == pytest.approx((200, exposed))


@pytest.mark.parametrize(("opcode", "role"), [("async-start", "calls"), ("call-start", "to_apply")])  # the second: a TPU's sparse cores
def test_a_wrapped_async_collective(opcode, role):
    wrapper = computation("wrapped", "%q = f32[5]{0} parameter(0)\n%s = f32[5]{0} reduce-scatter(%q), replica_groups={}")
    text = f"""%p = f32[5]{{0}} parameter(0)
    %start = ((f32[5]{{0}}), f32[5]{{0}}) {opcode}(%p), {role}=%wrapped
    %x = f32[5]{{0}} copy(%p)
    %r = f32[5]{{0}} {opcode.removesuffix("start")}done(%start)"""
    parsed = module(text, wrapper)
    assert [(c.kind, c.asynchronous) for c in parsed.collectives] == [("reduce-scatter", True)]
    spent = timed(parsed, collective=100.0)
    assert (spent.compute_seconds, spent.exposed_collective_seconds) == pytest.approx((40, 60))


def test_a_fusion_that_holds_a_collective_and_the_dot_that_hides_it():
    body = (
        DOT.replace("%r =", "%d =")
        + "\n%s = bf16[10,30]{1,0} all-reduce(%a), replica_groups={}\n%t = (bf16[10,30], bf16[10,20]) tuple(%d, %s)"
    )
    text = (
        "%a = bf16[10,20]{1,0} parameter(0)\n%b = bf16[20,30]{1,0} parameter(1)\n%r = (bf16[10,30], bf16[10,20]) fusion(%a, %b), calls=%f"
    )
    spent = timed(module(text, computation("f", body)), collective=FLOPS + 7.0)
    assert (spent.compute_seconds, spent.exposed_collective_seconds) == pytest.approx((FLOPS, 7))


@pytest.mark.parametrize(("between", "total"), [(f"{DOT.replace('%r', '%d')}", FLOPS), ("%d = f32[50]{0:T(1)} copy(%p)", 400 + 200)])
def test_a_prefetch_uses_the_memory_time_that_compute_leaves(between, total):
    """50 float32 to on-chip memory take 200 s: free beside a matmul, not beside another copy."""
    operands = "\n".join(line for line in between.splitlines()[:-1])
    text = f"""{operands}
    %p = f32[50]{{0:T(1)}} parameter(2)
    %start = (f32[50]{{0:T(1)S(1)}}, f32[50]{{0:T(1)}}, u32[]{{:S(2)}}) copy-start(%p)
    {between.splitlines()[-1]}
    %r = f32[50]{{0:T(1)S(1)}} copy-done(%start)"""
    assert timed(module(text)).total_seconds == pytest.approx(total)


@pytest.mark.parametrize(("host_bandwidth", "total"), [(10.0, 400), (0.4, 500)])
def test_offloading_runs_beside_compute_over_the_hosts_link(host_bandwidth, total):
    """200 bytes: read from HBM in 200 s, which nothing leaves time for; over the link in 20 or 500 s, beside 200 s of other work."""

    @dataclass(frozen=True)
    class WithHost(Chip):
        host_bandwidth: float = 0.0

    text = """%p = f32[50]{0:T(1)} parameter(0)
    %q = f32[25]{0:T(1)} parameter(1)
    %start = (f32[50]{0:T(1)S(5)}, f32[50]{0:T(1)}, u32[]{:S(2)}) copy-start(%p)
    %x = f32[25]{0:T(1)} copy(%q)
    %r = f32[50]{0:T(1)S(5)} copy-done(%start)"""
    chip = WithHost(CHIP.flops, CHIP.hbm_bandwidth, host_bandwidth=host_bandwidth)
    assert schedule_seconds(module(text), chip, lambda c: 0.0).total_seconds == pytest.approx(total)


@pytest.mark.parametrize(("host_bandwidth", "total"), [(10.0, 300), (0.4, 500)])
def test_slices_of_stacks_in_the_hosts_memory_are_fusions_on_gpu(host_bandwidth, total):
    """One row of 50 float32: written to HBM in 200 s, beside 100 s of other work; over the link in 20 or 500 s."""

    @dataclass(frozen=True)
    class WithHost(Chip):
        host_bandwidth: float = 0.0

    inner = "%s = f32[4,50]{1,0:S(5)} parameter(0)\n%k = s32[] parameter(1)\n%y = f32[1,50]{1,0} dynamic-slice(%s, %k)"
    text = """%p = f32[4,50]{1,0:S(5)} parameter(0)
    %q = f32[12]{0} parameter(1)
    %i = s32[] parameter(2)
    %start = ((f32[4,50]{1,0:S(5)}, s32[]), f32[1,50]{1,0}, u32[]) fusion-start(%p, %i), calls=%slice
    %x = f32[13]{0} custom-call(%q), custom_call_target="something"
    %r = f32[1,50]{1,0} fusion-done(%start)"""
    chip = WithHost(CHIP.flops, CHIP.hbm_bandwidth, host_bandwidth=host_bandwidth)
    found = schedule_seconds(module(text, computation("slice", inner)), chip, lambda c: 0.0)
    assert found.total_seconds == pytest.approx(total)


def test_loops_multiply_and_nothing_in_a_fusion_counts_twice():
    body = computation(
        "body",
        """%s = (s32[], f32[25]{0}) parameter(0)
        %i = s32[] get-tuple-element(%s), index=0
        %x = f32[25]{0} get-tuple-element(%s), index=1
        %y = f32[25]{0} fusion(%x), calls=%twice
        %z = f32[25]{0} all-reduce(%y), replica_groups={}
        %t = (s32[], f32[25]{0}) tuple(%i, %z)""",
    )
    twice = computation("twice", "%q = f32[25]{0} parameter(0)\n%n = f32[25]{0} negate(%q)\n%m = f32[25]{0} negate(%n)")
    condition = computation("cond", "%s.1 = (s32[], f32[25]{0}) parameter(0)\n%lt = pred[] constant(true)")
    text = """%p = (s32[], f32[25]{0}) parameter(0)
    %r = (s32[], f32[25]{0}) while(%p), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}"""
    spent = timed(module(text, twice, body, condition), collective=3.0)
    assert (spent.compute_seconds, spent.exposed_collective_seconds) == pytest.approx((5 * 200, 5 * 3))
    assert [(row.name, row.seconds, row.count) for row in spent.breakdown] == [("y", pytest.approx(200), 5), ("z", pytest.approx(3), 5)]


@pytest.mark.parametrize("name", ["v5e_replicated", "v5e_fsdp", "v5e_tensor", "v5p_fsdp_tensor", "h100_fsdp", "h100_tensor"])
def test_a_real_step_adds_up(name):
    parsed = hlo.parse(gzip.decompress((SAVED / f"{name}.txt.gz").read_bytes()).decode())
    chip = Chip(197e12, 819e9)
    spent = schedule_seconds(parsed, chip, lambda c: 1e-6)
    assert spent.collective_seconds == pytest.approx(1e-6 * sum(c.count for c in parsed.collectives))
    assert spent.compute_seconds >= parsed.flops / (chip.flops_efficiency * chip.flops)
    assert spent.exposed_collective_seconds <= spent.collective_seconds
    assert spent.total_seconds == pytest.approx(spent.compute_seconds + spent.exposed_collective_seconds)
    assert sum(row.total_seconds for row in spent.breakdown) == pytest.approx(spent.total_seconds)
    assert sum(row.flops * row.count for row in spent.breakdown) == parsed.flops


def test_the_fusion_that_keeps_residuals_writes_five_slices():
    """On v5e the first matmul's fusion updates six stacked residuals in place, one of them on chip: five slices of 4 x 256 x 4096."""
    parsed = hlo.parse(gzip.decompress((SAVED / "v5e_fsdp.txt.gz").read_bytes()).decode())
    (row,) = (r for r in schedule_seconds(parsed, Chip(197e12, 819e9), lambda c: 0.0).breakdown if r.name == "fusion.94")
    assert row.hbm_bytes == 5 * 4 * 256 * 4096 * 2
    assert row.flops == 2 * 4 * 256 * 1024 * 4096


def test_async_collective_fusions_of_a_tpu_hide_behind_the_fusions_between():
    parsed = hlo.parse(gzip.decompress((SAVED / "v5e_fsdp.txt.gz").read_bytes()).decode())
    gathers = [c for c in parsed.collectives if c.kind == "all-gather"]
    spent = schedule_seconds(parsed, Chip(197e12, 819e9), lambda c: 40e-6 if c.kind == "all-gather" else 0.0)
    assert spent.collective_seconds == pytest.approx(sum(c.count for c in gathers) * 40e-6)
    synchronous = sum(c.count for c in gathers if not c.asynchronous) * 40e-6
    assert spent.exposed_collective_seconds == pytest.approx(synchronous)  # each matmul between takes at least 48 us


def test_the_done_fusion_of_a_tpu_waits_for_its_start():
    parsed = hlo.parse(gzip.decompress((SAVED / "v5e_fsdp.txt.gz").read_bytes()).decode())
    body = parsed.computations["wide.region_0.1_spmd.sunk"]
    names = [i.name for i in body.instructions]
    between = names[names.index("async-collective-start") + 1 : names.index("async-collective-done")]
    spent = schedule_seconds(parsed, Chip(197e12, 819e9), lambda c: 100e-6 if c.asynchronous else 0.0)
    rows = {row.name: row.seconds for row in spent.breakdown if row.computation == body.name}
    assert rows["fusion.94"] > 48e-6
    assert rows["async-collective-start"] == pytest.approx(100e-6 - sum(rows.get(name, 0.0) for name in between))


GPU = Chip(1 / 0.9, 1 / 0.85, dot_writes=3.0, launch_seconds=1000.0)
STARTED = {  # schedule -> seconds on a chip where a kernel takes 1,000 s beside its roofline, and a byte that a dot writes as long as three
    "a kernel": ("%p = f32[100]{0} parameter(0)\n%r = f32[100]{0} copy(%p)", 800 + 1000),
    "a view is none": ("%p = f32[100]{0} parameter(0)\n%r = f32[10,10]{1,0} bitcast(%p)", 0),
    "a dot": (
        "%p = f32[10,1]{1,0} parameter(0)\n%r = f32[10,10]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        2 * 40 + 3 * 400 + 1000,
    ),
    "a library's, with room to work in": (
        (
            "%p = f32[10,1]{1,0} parameter(0)\n"
            '%c = (f32[10,10]{1,0}, s8[4096]{0}) custom-call(%p, %p), custom_call_target="__cublas$gemm", '
            'backend_config={"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}\n'
            "%r = f32[10,10]{1,0} get-tuple-element(%c), index=0"
        ),
        2 * 40 + 3 * 400 + 1000,
    ),
}


@pytest.mark.parametrize("name", STARTED)
def test_kernels_take_time_to_start_and_dots_to_write(name):
    text, expected = STARTED[name]
    assert schedule_seconds(module(text), GPU, lambda c: 0.0).total_seconds == pytest.approx(expected)


def test_the_condition_of_a_loop_starts_nothing():
    counted = computation("body", "%n = f32[100]{0} parameter(0)\n%r = f32[100]{0} negate(%n)")
    asked = computation("condition", "%n = f32[100]{0} parameter(0)\n%r = pred[] compare(%n, %n), direction=LT")
    loop = "%p = f32[100]{0} parameter(0)\n%r = f32[100]{0} while(%p), condition=%condition, body=%body, "
    parsed = module(loop + 'backend_config={"known_trip_count":{"n":"5"}}', counted, asked)
    starts = [schedule_seconds(parsed, chip, lambda c: 0.0).total_seconds for chip in (GPU, CHIP)]
    assert starts[0] - starts[1] == pytest.approx(5 * 1000)
