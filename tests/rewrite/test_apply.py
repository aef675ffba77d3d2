"""Between two shardings: where an array stops so that each device exchanges its share before anything is gathered."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxauto.rewrite.apply import halfway, partition_spec


@pytest.mark.parametrize(
    ("here", "there", "between"),
    [
        ((("a", "b"), ()), ((), ("b",)), (("a",), ("b",))),
        ((("a", "b"), (), ("c",)), ((), ("c", "b"), ()), (("a",), ("c", "b"), ())),
        ((("a", "b"), ()), (("a",), ("b",)), (("a",), ("b",))),
        ((("a",), ("b",)), ((), ("b",)), ((), ("b",))),
        (((), ("b",)), (("a",), ("b",)), (("a",), ("b",))),
        ((("a",), ("b",)), (("b",), ()), (("b",), ())),
    ],
    ids=["moved and gathered", "to two dimensions' worth", "moved alone", "gathered alone", "cut alone", "both in one dimension"],
)
def test_axes_that_move_go_first(here, there, between):
    assert halfway(here, there) == between


def test_the_partitioner_then_gathers_no_more_than_it_must():
    """Eight pieces of rows become four of columns: without the stop the whole array is gathered on every device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
    here, there = (("a", "b"), ()), ((), ("b",))

    def passage(*stops):
        def fn(x):
            for stop in (here, *stops, there):
                x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(stop)))
            return x + 1

        return jax.jit(fn, in_shardings=NamedSharding(mesh, partition_spec(here)))

    x = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    direct, stopping = passage(), passage(halfway(here, there))
    gathered = [re.findall(r"f32\[(\d+),(\d+)\]\S* all-gather", fn.lower(x).compile().as_text()) for fn in (direct, stopping)]
    assert gathered == [[("16", "8")], [("16", "2")]]
    np.testing.assert_array_equal(stopping(x), x + 1)
