"""The dynamic programme over blocks against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxauto.solve.chain import Option, least_budget, solve_chain

number = st.integers(0, 20).map(float)
option = st.builds(Option, kept_bytes=number, peak_bytes=number, seconds=number)
chain = st.lists(st.lists(option, min_size=1, max_size=4), min_size=1, max_size=5)


def peaks_of(options, choice):
    picked = [block[o] for block, o in zip(options, choice, strict=True)]
    return np.cumsum([o.kept_bytes for o in picked]) + np.array([o.peak_bytes for o in picked])


def brute_force(options, budgets):
    best = None
    for choice in itertools.product(*(range(len(b)) for b in options)):
        if (peaks_of(options, choice) <= np.array(budgets)).all():
            seconds = sum(b[o].seconds for b, o in zip(options, choice, strict=True))
            best = seconds if best is None else min(best, seconds)
    return best


@settings(max_examples=200, deadline=None)
@given(chain, st.integers(0, 100).map(float))
def test_as_fast_as_brute_force(options, budget):
    solution = solve_chain(options, budget)
    expected = brute_force(options, [budget] * len(options))
    assert (solution is None) == (expected is None)
    if solution is not None:
        assert solution.exact
        assert solution.seconds == expected
        assert solution.peak_bytes == tuple(peaks_of(options, solution.choice))
        assert max(solution.peak_bytes) <= budget


@settings(max_examples=100, deadline=None)
@given(chain, st.data())
def test_a_budget_for_each_block(options, data):
    budgets = data.draw(st.lists(st.integers(0, 100).map(float), min_size=len(options), max_size=len(options)))
    solution = solve_chain(options, budgets)
    expected = brute_force(options, budgets)
    assert (None if solution is None else solution.seconds) == expected


@settings(max_examples=100, deadline=None)
@given(chain, st.integers(0, 100).map(float), st.integers(1, 6))
def test_thinned_fronts_stay_feasible_and_bounded(options, budget, bins):
    """With few bins: feasible whenever anything is, never over budget, and no worse than n slots less of budget."""
    solution = solve_chain(options, budget, bins=bins)
    assert (solution is None) == (brute_force(options, [budget] * len(options)) is None)
    if solution is None:
        return
    assert max(solution.peak_bytes) <= budget
    tighter = brute_force(options, [budget - len(options) * budget / bins] * len(options))
    assert tighter is None or solution.seconds <= tighter


@settings(max_examples=200, deadline=None)
@given(chain)
def test_least_budget(options):
    every_choice = itertools.product(*(range(len(b)) for b in options))
    expected = min(peaks_of(options, choice).max() for choice in every_choice)
    assert least_budget(options) == expected
    assert solve_chain(options, least_budget(options)) is not None


def test_one_block_of_four_recomputes():
    keep, drop = Option(10, 5, 1.0, "keep"), Option(1, 14, 2.0, "drop")
    assert solve_chain([[keep, drop]] * 4, 45).seconds == 4.0  # 4 · 10 + 5
    solution = solve_chain([[keep, drop]] * 4, 44)
    assert solution is not None
    assert solution.seconds == 5.0
    assert solution.kept_bytes == 31.0


def test_a_large_chain_is_solved_with_thinned_fronts():
    rng = np.random.default_rng(0)
    options = [[Option(*rng.uniform(0, 1e9, 2), rng.uniform(0, 1)) for _ in range(16)] for _ in range(128)]
    solution = solve_chain(options, 3 * least_budget(options))
    assert solution is not None
    assert not solution.exact


def test_messages():
    with pytest.raises(ValueError, match=r"block 1 of 2 has no options: give it at least the one that keeps everything"):
        solve_chain([[Option(0, 0, 0)], []], 1.0)
    with pytest.raises(ValueError, match=r"1 budgets for 2 blocks: give one for each block, or one number"):
        solve_chain([[Option(0, 0, 0)]] * 2, [1.0])


def test_empty_chain():
    solution = solve_chain([], 0.0)
    assert solution is not None
    assert solution.choice == ()
    assert least_budget([]) == 0.0
