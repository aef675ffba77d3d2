"""All-reduces that gather or scatter, in the spelling of the TPU and CPU compilers; excerpts of our own."""

from __future__ import annotations

import pytest

from jaxauto import hlo

HEAD = """HloModule m, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%set (p: f32[2,4], at: s32[]) -> f32[8,4] {
  %p = f32[2,4] parameter(0)
  %at = s32[] parameter(1)
  %zero.1 = f32[] constant(0)
  %zeros.1 = f32[8,4] broadcast(%zero.1), dimensions={}
  %c.1 = s32[] constant(0)
  ROOT %d = f32[8,4] dynamic-update-slice(%zeros.1, %p, %at, %c.1)
}

%cut (w: f32[8,4], at.1: s32[]) -> f32[2,4] {
  %w = f32[8,4] parameter(0)
  %at.1 = s32[] parameter(1)
  %c.2 = s32[] constant(0)
  %part = f32[2,4] dynamic-slice(%w, %at.1, %c.2), dynamic_slice_sizes={2,4}
  ROOT %n = f32[2,4] negate(%part)
}

"""
REDUCE = "all-reduce(%x), replica_groups={}, to_apply=%add"
ZEROS = "%zero = f32[] constant(0)\n  %zeros = f32[8,4] broadcast(%zero), dimensions={}"
PART = "%p0 = f32[2,4] parameter(0)\n  %i = s32[] parameter(1)\n  %c = s32[] constant(0)"
WHOLE = "%x = f32[8,4] parameter(0)\n  %i = s32[] parameter(1)\n  %c = s32[] constant(0)"
CASES = {
    "gather": (
        f"{PART}\n  {ZEROS}\n  %x = f32[8,4] dynamic-update-slice(%zeros, %p0, %i, %c)\n  ROOT %r = f32[8,4] {REDUCE}",
        "all-gather",
    ),
    "gather in a fusion": (
        f"{PART}\n  %x = f32[8,4] fusion(%p0, %i), kind=kLoop, calls=%set\n  ROOT %r = f32[8,4] {REDUCE}",
        "all-gather",
    ),
    "update of what is not zero": (
        f"{PART}\n  %y = f32[8,4] parameter(2)\n  %x = f32[8,4] dynamic-update-slice(%y, %p0, %i, %c)\n  ROOT %r = f32[8,4] {REDUCE}",
        "all-reduce",
    ),
    "scatter": (
        f"{WHOLE}\n  %r = f32[8,4] {REDUCE}\n  ROOT %o = f32[2,4] dynamic-slice(%r, %i, %c), dynamic_slice_sizes={{2,4}}",
        "reduce-scatter",
    ),
    "scatter in a fusion": (
        f"{WHOLE}\n  %r = f32[8,4] {REDUCE}\n  ROOT %o = f32[2,4] fusion(%r, %i), kind=kLoop, calls=%cut",
        "reduce-scatter",
    ),
    "read whole by another": (
        f"{WHOLE}\n  %r = f32[8,4] {REDUCE}\n  %part = f32[2,4] fusion(%r, %i), kind=kLoop, calls=%cut\n  %n.1 = f32[8,4] negate(%r)",
        "all-reduce",
    ),
    "returned": (f"{WHOLE}\n  ROOT %r = f32[8,4] {REDUCE}", "all-reduce"),
}


@pytest.mark.parametrize("name", CASES)
def test_role(name):
    body, expected = CASES[name]
    (found,) = hlo.parse(f"{HEAD}ENTRY %main {{\n  {body}\n}}\n").collectives
    assert found.kind == "all-reduce" and found.role == expected
