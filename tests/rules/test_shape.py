"""Reshapes: the factors of both sides, checked on the elements themselves."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxauto.rules.shape import reshape_factors


@st.composite
def two_shapes(draw):
    """Two shapes of the same number of elements: the same primes, grouped in two ways, with ones in between."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), min_size=1, max_size=6))

    def grouped(order):
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=4)))
        return tuple(math.prod(order[i:j]) for i, j in zip([0, *cuts], [*cuts, len(order)], strict=True))

    return grouped(primes), grouped(draw(st.permutations(primes)))


def _blocks(shape, dims, sizes, factor):
    """The elements, by number, that each value of ``factor`` holds."""
    expanded = [sizes[f] for dim in dims for f in dim]
    position = [f for dim in dims for f in dim].index(factor)
    assert math.prod(expanded) == math.prod(shape)
    numbers = np.moveaxis(np.arange(math.prod(shape)).reshape(expanded), position, 0)
    return np.sort(numbers.reshape(sizes[factor], -1), axis=1)


@given(two_shapes())
def test_factors_of_a_reshape(shapes):
    source, target = shapes
    left, right, sizes, whole = reshape_factors(source, target)
    for shape, dims in ((source, left), (target, right)):
        assert [math.prod(sizes[f] for f in dim) for dim in dims] == list(shape)
    factors_left, factors_right = {f for d in left for f in d}, {f for d in right for f in d}
    assert factors_left ^ factors_right == set(whole)
    assert all(n > 1 for n in sizes.values())
    for factor in factors_left & factors_right:
        np.testing.assert_array_equal(_blocks(source, left, sizes, factor), _blocks(target, right, sizes, factor))


@given(two_shapes())
def test_a_major_factor_is_a_block_of_its_dimension(shapes):
    """Sharding the first factor of a dimension is sharding the dimension: contiguous, on both sides."""
    source, target = shapes
    left, right, sizes, _ = reshape_factors(source, target)
    for shape, dims in ((source, left), (target, right)):
        for axis, dim in enumerate(dims):
            if dim:
                parts = np.split(np.arange(math.prod(shape)).reshape(shape), sizes[dim[0]], axis=axis)
                expected = np.stack([np.sort(part.ravel()) for part in parts])
                np.testing.assert_array_equal(_blocks(shape, dims, sizes, dim[0]), expected)


def test_empty_arrays_have_no_factors():
    assert reshape_factors((0, 4), (4, 0)) == ([(), ()], [(), ()], {}, [])


def test_what_lines_up_after_coprime_dimensions_still_passes():
    left, right, sizes, whole = reshape_factors((3, 2, 8), (2, 3, 8))
    shared = left[2][0]
    assert right[2] == (shared,)
    assert sizes[shared] == 8
    assert shared not in whole
