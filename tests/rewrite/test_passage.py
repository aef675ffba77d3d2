"""Between two shardings: where an array stops so that each device exchanges its share before anything is gathered."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxauto.rewrite.apply import partition_spec
from jaxauto.rewrite.passage import bring, halfway


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


def brought(x, here, there):
    """Brings an array from one sharding to another, which changes no number. Returns the collectives."""
    sizes = {"a": 2, "b": 2, "c": 2} if any("c" in axes for axes in (*here, *there)) else {"a": 2, "b": 4}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(*sizes.values()), tuple(sizes))

    def pinned(array, sharding):
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, partition_spec(sharding)))

    @jax.jit
    def passage(x):
        return pinned(bring(pinned(x, here), here, there, sizes, pinned), there) + 1

    np.testing.assert_array_equal(passage(x), x + 1)
    return re.findall(r" (all-gather|all-to-all|collective-permute|all-reduce)\(", passage.lower(x).compile().as_text())


@pytest.mark.parametrize(
    ("shape", "here", "there", "collectives"),
    [
        ((16, 8), (("a", "b"), ()), ((), ("a",)), ["all-to-all", "all-gather"]),
        ((16, 4, 8), (("a", "b"), (), ("c",)), ((), ("a",), ("c",)), ["all-to-all", "all-gather"]),
        ((16, 4, 8), (("a", "b", "c"), (), ()), (("c",), ("a",), ()), None),
        ((12, 8), (("a", "b"), ()), ((), ("a",)), None),
    ],
    ids=["the major axis leaves", "beside an axis that stays", "one stays in its dimension", "pieces of unequal size"],
)
def test_no_pieces_change_places_where_the_major_axis_leaves(shape, here, there, collectives):
    """The axis that is left would gather pieces in another order than the mesh's: XLA would permute them all before."""
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    kinds = brought(x, here, there)
    assert collectives is None or kinds == collectives


@pytest.mark.parametrize(
    ("here", "there", "exchanged"),
    [
        (((), ("a",), ("b",)), (("a", "b"), (), ()), 2),
        ((("a", "b"), (), ()), ((), ("a",), ("b",)), 2),
        (((), ("a", "b"), ()), (("a", "b"), (), ()), 1),
        ((("a",), ("b",), ()), ((), ("a",), ("b",)), 2),
        ((("a",), ("b",), ("c",)), (("b", "c"), (), ("a",)), None),
        (((), ("a",), ("b",)), (("c", "a"), ("b",), ()), None),
    ],
    ids=["two to one", "one to two", "together", "by itself", "three", "and a cut"],
)
def test_axes_that_do_not_go_together_go_one_after_the_other(here, there, exchanged):
    """The partitioner would gather the whole array where axes of two dimensions join in one, or those of one part."""
    x = np.arange(16**3, dtype=np.float32).reshape(16, 16, 16)
    kinds = brought(x, here, there)
    assert "all-gather" not in kinds
    assert exchanged is None or kinds == ["all-to-all"] * exchanged
