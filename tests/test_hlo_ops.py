"""Single lines of HLO text: shapes, device groups, the flops of every spelling of a matmul, the bytes of every collective."""

import pytest

from jaxauto import hlo, hlo_ops

MESH = {"dp": 4, "tp": 2}


GROUPS = {
    "{{0,2},{1,3}}": ((0, 2), (1, 3)),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[2,4]<=[4,2]T(1,0)": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh['dp'=4,'tp'=2] {'dp'}": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh['dp'=4,'tp'=2] {'tp'}": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "mesh['dp'=4,'tp'=2] {'dp','tp'}": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'b'}": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}": ((0, 2), (1, 3)),
    "mesh['a'=4,'b'=2] {'a':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['a'=4,'b'=2] {'a':(1)2}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "{}": ((0, 1, 2, 3),),
    "": ((0, 1, 2, 3),),
}


@pytest.mark.parametrize("text", GROUPS)
def test_replica_groups(text):
    assert sorted(hlo.parse_groups(text, 4)) == sorted(GROUPS[text])


SHAPES = {  # -> dims, bytes, bytes with padding, memory space
    "f32[4,256]{1,0}": ((4, 256), 4096, 4096, 0),
    "bf16[4,256,1000]{2,1,0:T(8,128)(2,1)S(1)}": ((4, 256, 1000), 2048000, 4 * 256 * 1024 * 2, 1),
    "bf16[3,100]{0,1:T(8,128)(2,1)}": ((3, 100), 600, 104 * 128 * 2, 0),
    "f32[]{:T(128)}": ((), 4, 512, 0),
    "s4[3]{0}": ((3,), 1.5, 1.5, 0),
    "pred[16]{0:S(5)}": ((16,), 16, 16, 5),
    "f8e4m3fn[7]{0}": ((7,), 7, 7, 0),
    "c64[2]{0}": ((2,), 16, 16, 0),
    "token[]": ((), 0, 0, 0),
    "f32[<=8]{0}": ((8,), 32, 32, 0),
}


@pytest.mark.parametrize("text", SHAPES)
def test_shapes(text):
    shape = hlo_ops.parse_shape(text)
    assert (shape.dims, shape.bytes_, shape.padded_bytes, shape.memory_space) == SHAPES[text]


def test_nested_tuple_shape():
    shape = hlo_ops.parse_shape("((bf16[2]{0:T(8,128)(2,1)}, f32[]), (s32[3]{0}, token[]), ())")
    assert [len(part) for part in shape] == [2, 2, 0]
    assert [s.dtype for s in hlo_ops.leaves(shape)] == ["bf16", "f32", "s32", "token"]


def call_line(instruction: str, *operands: str) -> hlo.Module:
    lines = [*(f"  %p{k} = {shape} parameter({k})" for k, shape in enumerate(operands)), f"  ROOT %r = {instruction}"]
    return hlo.parse("\n".join(["HloModule m, num_partitions=8", "ENTRY %main () -> f32[] {", *lines, "}"]))


BATCH, HEADS, QUERY, KEY, HEAD = 16, 4, 256, 192, 128
DOTS_AS_CONVOLUTIONS = {  # TPU attention: batch and heads are windows, dilated so that one tap meets data
    "bqhk,bthk->bhqt": (
        "bf16[16,4,256,192]",
        "bf16[16,256,4,128]",
        "bf16[16,192,4,128]",
        "window={size=16x4 stride=15x3 lhs_dilate=16x4}, dim_labels=0b1f_0o1i->01bf",
    ),
    "reversed and padded": (
        "bf16[16,4,192,128]",
        "bf16[16,256,4,128]",
        "bf16[16,4,192,256]",
        "window={size=16x4 stride=16x4 pad=15_15x3_3 lhs_dilate=15x3 rhs_reversal=1x1}, dim_labels=0f1b_01oi->01fb",
    ),
}


@pytest.mark.parametrize("name", DOTS_AS_CONVOLUTIONS)
def test_batched_dot_written_as_a_dilated_convolution(name):
    result, lhs, rhs, attributes = DOTS_AS_CONVOLUTIONS[name]
    assert call_line(f"{result} convolution(%p0, %p1), {attributes}", lhs, rhs).flops == 2 * BATCH * HEADS * QUERY * KEY * HEAD


CONTRACTS_FIRST = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}}'
ESTIMATE = 'backend_config={"custom_call_config":{"cost_estimate":{"flops":8192,"transcendentals":0}}}'
CALLS = {
    "cublas": f'f32[8,32]{{1,0}} custom-call(%p0, %p1), custom_call_target="__cublas$gemm", {CONTRACTS_FIRST}',
    "with workspace": f'(f32[8,32]{{1,0}}, s8[64]{{0}}) custom-call(%p0, %p1), custom_call_target="__cublas$lt$matmul", {CONTRACTS_FIRST}',
    "a kernel that says so": f'f32[8,32]{{1,0}} custom-call(%p0, %p1), custom_call_target="tpu_custom_call", {ESTIMATE}',
}


@pytest.mark.parametrize("name", CALLS)
def test_matmul_calls(name):
    assert call_line(CALLS[name], "f32[16,8]{1,0}", "f32[16,32]{1,0}").flops == 2 * 8 * 32 * 16


IMAGE, KERNEL, RESULT = "f32[2,9,9,16]{3,2,1,0}", "f32[24,3,3,16]{3,2,1,0}", "f32[2,4,4,24]{3,2,1,0}"
CONVOLUTIONS = {"Forward": (IMAGE, KERNEL, RESULT), "BackwardInput": (RESULT, KERNEL, IMAGE), "BackwardFilter": (IMAGE, RESULT, KERNEL)}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_a_convolution_take_what_it_takes(name):
    """Window and labels of a cuDNN call are those of the convolution, whichever of the three arrays it makes."""
    *operands, result = CONVOLUTIONS[name]
    call = f'custom-call(%p0, %p1), window={{size=3x3 stride=2x2}}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{name}"'
    module = call_line(f"({result}, u8[0]{{0}}) {call}", *operands)
    assert module.flops == 2 * 2 * 4 * 4 * 24 * 3 * 3 * 16


def test_onednn_call_contracts_the_last_dimension():
    line = 'f32[8,32]{1,0} custom-call(%p0, %p1), custom_call_target="__onednn$matmul"'
    assert call_line(line, "f32[8,16]{1,0}", "f32[16,32]{1,0}").flops == 2 * 8 * 32 * 16


F8, B4 = "f32[8]{0}", "bf16[4]{0}"
COLLECTIVES = {  # line, operands -> kind, full bytes, group size, async
    "combined, started": (
        f"(({F8}, {B4}), (f32[32]{{0}}, bf16[16]{{0}})) all-gather-start(%p0, %p1), replica_groups=[2,4]<=[8], dimensions={{0}}",
        (F8, B4),
        ("all-gather", 4 * (32 + 8), 4, True),
    ),
    "started, but sync": (
        f'{F8} all-reduce-start(%p0), replica_groups={{}}, backend_config={{"collective_backend_config":{{"is_sync":true}}}}',
        (F8,),
        ("all-reduce", 32, 8, False),
    ),
    "tuple all-to-all": (
        f"({F8}, {F8}) all-to-all(%p0, %p1), replica_groups={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}",
        (F8, F8),
        ("all-to-all", 2 * 64, 2, False),
    ),
    "chains": (
        f"{F8} collective-permute(%p0), source_target_pairs={{{{0,2}},{{2,4}},{{4,6}},{{1,3}}}}",
        (F8,),
        ("collective-permute", 4 * 32, 4, False),
    ),
    "broadcast": (f"{F8} collective-broadcast(%p0), replica_groups={{{{0,1}},{{2,3}}}}", (F8,), ("collective-broadcast", 32, 2, False)),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_lines(name):
    line, operands, expected = COLLECTIVES[name]
    (c,) = call_line(line, *operands).collectives
    assert (c.kind, c.bytes_, c.group_size, c.asynchronous) == expected


def test_mesh_axes_of_groups_that_follow_no_axis():
    (c,) = call_line("f32[8]{0} all-reduce(%p0), replica_groups={{0,3},{1,2},{4,7},{5,6}}", "f32[8]{0}").collectives
    assert hlo.mesh_axes(c, MESH) is None
    assert hlo.mesh_axes(c, {"a": 2, "b": 2, "c": 2}) is None
