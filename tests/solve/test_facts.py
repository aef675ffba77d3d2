"""What the tables ask of a program: how often a buffer is made."""

from __future__ import annotations

import pytest
from helpers import SCANNED, everything_again, scanned_blocks

from jaxauto.solve.facts import buffer_runs


@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_a_stack_is_made_once_for_all_trips(target):
    remat, _ = scanned_blocks(target)
    variant = everything_again(remat)
    runs = buffer_runs(variant, remat.groups)
    for k, number in enumerate(variant.buffers.ids):
        value = variant.rewritten.graph.values[int(number)]
        if value.shape[:1] == (SCANNED,):
            assert runs[k] == 1
    assert runs.max() == SCANNED, "what is made in the body is made in each trip"
