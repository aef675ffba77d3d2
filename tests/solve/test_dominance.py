"""Taking away dominated states keeps an optimum, with every budget that some answer fits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from zoo.programs import random_problem

from jaxauto.solve.dominance import undominated
from jaxauto.solve.problem import Problem


def answers(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    every = [np.array(x) for x in itertools.product(*map(range, problem.sizes))]
    return np.array([problem.seconds(x) for x in every]), np.array([problem.bytes_peak(x) for x in every])


@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_stays_under_every_budget(seed):
    problem = random_problem(seed, count=4, density=0.3 + 0.1 * (seed % 5), positions=1 + seed % 3)
    for tables in problem.unary.values():  # some states nearly alike, so that there is something to take
        for table in tables.values():
            table[1:] = np.where(np.arange(1, len(table)) % 2, table[1:] * 3, table[1:])
    small = problem.restricted(undominated(problem))
    seconds, peak = answers(problem)
    left, left_peak = answers(small)
    for budget in (np.inf, *np.quantile(peak, [0.1, 0.5]), peak.min()):
        assert left[left_peak <= budget].min() == pytest.approx(seconds[peak <= budget].min(), rel=1e-9)


def test_a_state_that_is_worse_in_everything_goes_and_one_that_needs_less_memory_stays():
    problem = random_problem(0, count=2, density=0.0, positions=1)
    i = next(k for k, n in enumerate(problem.sizes) if n > 2)
    for resource in problem.unary:
        problem.unary[resource][i] = np.arange(problem.sizes[i], dtype=float)
    problem.rows[0].vectors[i] = np.ones(problem.sizes[i])
    assert undominated(problem)[i].tolist() == [0]
    problem.rows[0].vectors[i][2] = 0.5
    assert undominated(problem)[i].tolist() == [0, 2]
