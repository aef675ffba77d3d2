"""Elimination against enumeration: exact where it says so, and bounds that bracket the optimum where it does not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxauto.solve.eliminate import descend, eliminate, improve, least_with, nearest, value_of


def random_tables(seed: int, count: int, density: float):
    """Unary tables of 1 to 4 states and pair tables on a random graph."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, count)
    unary = [rng.random(n) for n in sizes]
    pairs = {(i, j): rng.random((sizes[i], sizes[j])) for i, j in itertools.combinations(range(count), 2) if rng.random() < density}
    return unary, pairs


def enumerated(unary, pairs) -> float:
    return min(value_of(unary, pairs, np.array(x)) for x in itertools.product(*(range(len(u)) for u in unary)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 7), density=st.floats(0, 1))
def test_equals_the_enumerated_optimum(seed, count, density):
    unary, pairs = random_tables(seed, count, density)
    answer = eliminate(unary, pairs)
    assert answer.exact
    assert answer.value == pytest.approx(enumerated(unary, pairs), rel=1e-12)
    assert answer.bound == pytest.approx(answer.value, rel=1e-9)
    assert value_of(unary, pairs, answer.x) == pytest.approx(answer.value, rel=1e-12)


def test_variables_without_a_choice_take_no_dimension():
    """ResNet-50 under FSDP: 65 arrays, cut as they are told to be, meet in one that is free."""
    rng = np.random.default_rng(0)
    unary = [rng.random(2), *(rng.random(1) for _ in range(100))]
    pairs = {(0, i): rng.random((2, 1)) for i in range(1, 101)} | {(i, i + 1): rng.random((1, 1)) for i in range(1, 100)}
    answer = eliminate(unary, pairs)
    values = [value_of(unary, pairs, np.array([k] + [0] * 100)) for k in range(2)]
    assert answer.exact and answer.value == pytest.approx(min(values)) and answer.bound == pytest.approx(min(values))
    least, bound, _ = least_with(unary, pairs, 10_000)
    np.testing.assert_allclose(least[0], values)
    assert bound == pytest.approx(min(values))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), entries=st.sampled_from([4, 8, 16, 40]))
def test_mini_buckets_bound_from_below_and_the_answer_from_above(seed, entries):
    unary, pairs = random_tables(seed, 7, 0.8)
    answer = eliminate(unary, pairs, entries)
    best = enumerated(unary, pairs)
    assert answer.bound <= best + 1e-9
    assert answer.value >= best - 1e-9


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 6), density=st.floats(0, 1), entries=st.sampled_from([6, 12, 40, 10_000]))
def test_the_least_with_each_state_is_a_bound_and_exact_where_nothing_is_split(seed, count, density, entries):
    unary, pairs = random_tables(seed, count, density)
    least, bound, _ = least_with(unary, pairs, entries)
    true = [np.full(len(u), np.inf) for u in unary]
    for x in itertools.product(*(range(len(u)) for u in unary)):
        value = value_of(unary, pairs, np.array(x))
        for i, s in enumerate(x):
            true[i][s] = min(true[i][s], value)
    assert bound <= min(true[0]) + 1e-9
    for mine, best in zip(least, true, strict=True):
        assert (mine <= best + 1e-9).all()
        if entries == 10_000:
            np.testing.assert_allclose(mine, best, rtol=1e-9)


def test_descent_and_neighbourhoods_never_make_it_worse():
    unary, pairs = random_tables(3, 7, 0.9)
    start = np.zeros(7, int)
    down = descend(unary, pairs, start)
    assert value_of(unary, pairs, down) <= value_of(unary, pairs, start)
    assert value_of(unary, pairs, improve(unary, pairs, down, -np.inf)) <= value_of(unary, pairs, down)
    assert all(down[i] in states for i, states in enumerate(nearest(unary, pairs, down, 2)))
