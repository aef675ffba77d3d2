"""The MILP against enumeration of the Problem it is a programme of: objective, memory rows, statuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxauto.solve.milp import Status, solve_milp
from jaxauto.solve.problem import RESOURCES, MemoryRow, Problem


def random_problem(seed: int, count: int = 5) -> Problem:
    rng = np.random.default_rng(seed)
    problem = Problem.empty()
    for i in range(count):
        problem.add_variable(int(rng.integers(1, 5)), f"v{i}")
    for resource in RESOURCES:
        for i in range(count):
            problem.add_unary(resource, i, rng.random(problem.sizes[i]) * 1e-3)
        for i, j in itertools.combinations(range(count), 2):
            if rng.random() < 0.5:
                problem.add_pair(resource, i, j, rng.random((problem.sizes[i], problem.sizes[j])) * 1e-3)
    for position in range(2):
        vectors = {i: rng.random(problem.sizes[i]) * 1e9 for i in range(count) if rng.random() < 0.8}
        problem.rows.append(MemoryRow(position, 1e8, vectors))
    return problem


def every_answer(problem: Problem):
    return (np.array(x) for x in itertools.product(*(range(n) for n in problem.sizes)))


@pytest.mark.parametrize("seed", range(30))
def test_equals_the_enumerated_optimum_under_memory(seed):
    problem = random_problem(seed)
    peaks = sorted(problem.bytes_peak(x) for x in every_answer(problem))
    budget = peaks[len(peaks) // 4] * (1 + 1e-9)
    best = min(problem.seconds(x) for x in every_answer(problem) if problem.bytes_peak(x) <= budget)
    answer = solve_milp(problem, budget, relative_gap=0.0)
    assert answer.status is Status.OPTIMAL and answer.x is not None
    assert problem.bytes_peak(answer.x) <= budget * (1 + 1e-6)
    assert answer.seconds == pytest.approx(best, rel=1e-6)
    assert answer.bound <= best * (1 + 1e-6)


def test_says_infeasible():
    problem = random_problem(1)
    least = min(problem.bytes_peak(x) for x in every_answer(problem))
    assert solve_milp(problem, 0.9 * least).status is Status.INFEASIBLE


def test_candidates_restrict_the_answer():
    problem = random_problem(2)
    only = [np.array([n - 1]) for n in problem.sizes]
    answer = solve_milp(problem, 1e12, candidates=only)
    assert answer.x is not None
    np.testing.assert_array_equal(answer.x, [n - 1 for n in problem.sizes])


def test_a_pair_of_a_variable_with_itself_is_its_diagonal():
    problem = Problem.empty()
    problem.add_variable(3, "v")
    problem.add_pair("compute", 0, 0, np.arange(9.0).reshape(3, 3))
    np.testing.assert_array_equal(problem.unary["compute"][0], [0.0, 4.0, 8.0])


def test_pairs_added_either_way_round_are_one_table():
    problem = Problem.empty()
    problem.add_variable(2, "a")
    problem.add_variable(3, "b")
    table = np.arange(6.0).reshape(2, 3)
    problem.add_pair("blocking", 0, 1, table)
    problem.add_pair("blocking", 1, 0, table.T)
    np.testing.assert_array_equal(problem.pairs["blocking"][0, 1], 2 * table)
