"""A descent ends where no single change is faster, and keeps to the budget."""

import numpy as np
import pytest
from zoo.programs import random_problem

from jaxauto.solve.descend import descend


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tight", [False, True])
def test_no_single_change_is_faster(seed, tight):
    problem = random_problem(seed, count=8)
    x = np.array([seed % n for n in problem.sizes])
    budget = problem.bytes_peak(x) if tight else np.inf
    y = descend(problem, x, budget)
    assert problem.seconds(y) <= problem.seconds(x)
    assert problem.bytes_peak(y) <= budget * (1 + 1e-9)
    for i, n in enumerate(problem.sizes):
        for state in range(n):
            z = y.copy()
            z[i] = state
            assert problem.seconds(z) >= problem.seconds(y) * (1 - 1e-8) or problem.bytes_peak(z) > budget * (1 - 1e-9)
