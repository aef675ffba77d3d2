"""What the MILP says and takes: statuses, candidates, tables. Against enumeration: ``test_optimal.py``."""

from __future__ import annotations

import itertools

import numpy as np
from zoo.programs import random_problem

from jaxauto.solve.milp import Status, solve_milp
from jaxauto.solve.problem import Problem


def every_answer(problem: Problem):
    return (np.array(x) for x in itertools.product(*(range(n) for n in problem.sizes)))


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
    problem = Problem.empty(exposed_share=0.25)
    problem.add_variable(3, "v")
    problem.add_pair("compute", 0, 0, np.arange(9.0).reshape(3, 3))
    np.testing.assert_array_equal(problem.unary["compute"][0], [0.0, 4.0, 8.0])


def test_pairs_added_either_way_round_are_one_table():
    problem = Problem.empty(exposed_share=0.25)
    problem.add_variable(2, "a")
    problem.add_variable(3, "b")
    table = np.arange(6.0).reshape(2, 3)
    problem.add_pair("blocking", 0, 1, table)
    problem.add_pair("blocking", 1, 0, table.T)
    np.testing.assert_array_equal(problem.pairs["blocking"][0, 1], 2 * table)
