"""Placing arrays as XLA does: by hand, and whatever they are."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxauto.cost import heap
from jaxauto.cost.heap import large, live, packed, within


def arrays(*rows):
    """(begin, end, bytes) of each."""
    begin, end, bytes_ = np.array(rows, float).reshape(-1, 3).T
    return begin.astype(int), end.astype(int), bytes_


@pytest.mark.parametrize(
    ("rows", "most", "needed"),
    [
        ([], 0, 0),
        ([(0, 1, 8), (2, 3, 8), (4, 5, 8)], 8, 8),  # one after the other
        ([(0, 2, 8), (1, 3, 4)], 12, 12),
        # A wide array is made of a narrow one and made narrow again: what was made first lies on it, so what comes last does not.
        ([(0, 1, 8), (1, 5, 4), (5, 9, 4), (6, 7, 8)], 12, 16),
        # The smallest gap that fits: of 4 and 8 bytes between what is there all the time, that of 4.
        ([(0, 9, 16), (0, 4, 8), (0, 9, 16), (0, 4, 4), (0, 9, 16), (5, 9, 4)], 60, 60),
    ],
)
def test_by_hand(rows, most, needed):
    assert live(*arrays(*rows)) == most
    assert packed(*arrays(*rows)) == needed


@st.composite
def some_arrays(draw):
    rows = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8), st.integers(1, 64)), max_size=24))
    return arrays(*((begin, begin + more, bytes_) for begin, more, bytes_ in rows))


@hypothesis.given(some_arrays())
def test_no_two_arrays_are_in_one_place_at_a_time(found):
    begin, end, bytes_ = found
    order = np.argsort(-bytes_, kind="stable")
    begin, end, bytes_ = begin[order], end[order], bytes_[order]
    offset = heap.offsets(begin, end, bytes_)
    for a in range(len(begin)):
        for b in range(a):
            together = begin[a] <= end[b] and begin[b] <= end[a]
            assert not together or offset[a] + bytes_[a] <= offset[b] or offset[b] + bytes_[b] <= offset[a]
    assert live(*found) <= packed(*found) <= (offset + bytes_).max(initial=0)


@hypothesis.given(some_arrays())
def test_what_is_small_counts_for_little(found):
    begin, end, bytes_ = found
    counts = large(begin, end, bytes_)
    assert bytes_[~counts].max(initial=0) <= live(*found) / 1024


@pytest.mark.parametrize(
    ("rows", "inside"),
    [
        ([(0, 3, 8), (5, 9, 8)], [True, False]),  # before the result, in its place
        ([(0, 5, 8), (5, 9, 8)], [False, False]),  # still there when it is made
        ([(0, 3, 9), (5, 9, 8)], [False, False]),  # larger
        ([(0, 3, 4), (2, 4, 8), (5, 9, 8)], [False, True, False]),  # the largest first
        ([(0, 1, 4), (2, 4, 8), (5, 9, 8)], [True, True, False]),
    ],
)
def test_what_lies_in_the_place_of_a_result(rows, inside):
    """The last array is returned."""
    returned = np.arange(len(rows)) == len(rows) - 1
    assert within(*arrays(*rows), returned).tolist() == inside
    assert not within(*arrays(*rows), ~returned & returned).any()
