"""MILP and search against the enumeration of every sharding: generated programs, train steps and Problems, with and without pressure.

Every instance is small enough to enumerate: those that are drawn larger are drawn again, and the tests assert what they got.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from zoo.programs import KINDS, MESHES, TARGETS, Drawn, draw, random_problem

from jaxauto.options import mesh_axes
from jaxauto.planner import read
from jaxauto.solve.fold import fold
from jaxauto.solve.live import timeline
from jaxauto.solve.milp import Status, solve_milp
from jaxauto.solve.model import Model, Program
from jaxauto.solve.problem import Problem
from jaxauto.solve.remat import Remat
from jaxauto.solve.search import Search
from jaxauto.strategies import states
from jaxauto.targets.target import Target

PER_CASE = 8  # programs of one kind on one mesh: 6 kinds x 5 meshes x 8 = 240
LEAST, MOST = 12, 60_000  # ways to shard a program
CASES = list(itertools.product(KINDS, range(len(MESHES))))


@dataclass(frozen=True, eq=False)
class Instance:
    """A program on a mesh of a target, with all its rows of memory."""

    drawn: Drawn
    program: Program
    remat: Remat
    mesh: dict[str, int]
    target: str

    def search(self) -> Search:
        axes, chip = mesh_axes(self.mesh, Target(self.target)), Target(self.target).chip
        return Search(self.program, self.remat, axes, chip, {}, time.monotonic() + 60)

    def model(self, level: int = 0) -> Model:
        """With the rows of every position that no other position's row equals."""
        model = self.search().model(self.remat.variant(self.remat.levels()[level]))
        rows = {repr((r.base, sorted((i, v.tobytes()) for i, v in r.vectors.items()), sorted(r.pairs))): r for r in every_row(model)}
        model.problem.rows = list(rows.values())
        return model


def every_row(model: Model):
    return (model.memory_row(position, crowded=crowded) for position in range(model.buffers.length) for crowded in (False, True))


def ways(program: Program, axis_sizes: tuple[int, ...]) -> int:
    """To shard a program: the product of the states of what has a choice."""
    shapes: dict = {("group", g.id): tuple(g.sizes) for g in program.groups.groups.values()}
    shapes |= {("operation", op.node.id): tuple(n for _, n in op.factors) for op in program.groups.operations}
    return math.prod(len(states(shapes[key], axis_sizes)) for key in set(program.alike.values()))


@functools.cache
def instances(kind: str, mesh: int) -> list[Instance]:
    """``PER_CASE`` different programs of a kind that have between ``LEAST`` and ``MOST`` shardings on a mesh."""
    found: dict[str, Instance] = {}
    for seed in range(1000 * mesh, 1000 * mesh + 400):
        drawn, target = draw(kind, seed), TARGETS[seed % len(TARGETS)]
        text = str(jax.make_jaxpr(drawn.step)(*drawn.args))
        if text in found:
            continue
        read_ = read(drawn.step, drawn.args, {})
        remat = Remat(read_.graph, read_.groups, read_.aliased, Target(target).chip)
        program = Program(read_.groups, fold(read_.groups, {}), read_.known_early, read_.late_only)
        if LEAST <= ways(program, tuple(MESHES[mesh].values())) <= MOST:
            found[text] = Instance(drawn, program, remat, MESHES[mesh], target)
        if len(found) == PER_CASE:
            return list(found.values())
    raise AssertionError(f"{kind} on {MESHES[mesh]}: only {len(found)} programs are small enough")


# ------------------------------------------------------------------------------------------------------------- enumeration


def summed(problem: Problem, unary, pairs) -> np.ndarray:
    """The sum of tables at every assignment: one axis for each variable that has a choice."""
    free = [i for i, n in enumerate(problem.sizes) if n > 1]
    assert len(free) <= 32, "numpy has no more axes"
    total = np.zeros([problem.sizes[i] for i in free])
    for of, table in [((i,), t) for i, t in unary.items()] + list(pairs.items()):
        shape = [problem.sizes[i] if i in of else 1 for i in free]
        total += table.reshape([n for n in table.shape if n > 1] or [1]).reshape(shape)
    return total


def enumerated(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(T, peak bytes) of every assignment."""
    c, p, k = (summed(problem, problem.unary[r], problem.pairs[r]) for r in ("compute", "prefetch", "blocking"))
    seconds = np.maximum(c, p) + k + problem.exposed_share * np.minimum(c, p)
    peak = np.zeros_like(seconds)
    for row in problem.rows:
        np.maximum(peak, row.base + summed(problem, row.vectors, row.pairs), out=peak)
    return seconds, peak


def budgets(seconds: np.ndarray, peak: np.ndarray) -> list[float]:
    """No limit, and limits that shut the fastest answer out, well between two peaks that occur."""
    fastest = peak[seconds <= seconds.min() * (1 + 1e-9)].min()
    levels = np.unique(peak[peak < fastest * (1 - 1e-3)])
    found = [math.inf]
    for at in {len(levels) // 3, len(levels) - 1} if len(levels) else ():
        above = np.concatenate([levels, [fastest]])[at + 1 :]
        apart = above[above > levels[at] * (1 + 1e-4)]
        found.append(float((levels[at] + apart[0]) / 2))
    return found


def best_of(seconds: np.ndarray, peak: np.ndarray, budget: float) -> float:
    return float(seconds[peak <= budget].min())


# ------------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_the_milp_finds_the_optimum_of_programs(kind, mesh):
    for instance in instances(kind, mesh):
        problem = instance.model().problem
        seconds, peak = enumerated(problem)
        assert LEAST <= seconds.size == math.prod(problem.sizes) <= MOST
        for budget in budgets(seconds, peak):
            answer = solve_milp(problem, min(budget, 1e15), relative_gap=0.0, node_limit=10_000, time_limit=60.0)
            best = best_of(seconds, peak, budget)
            assert answer.status is Status.OPTIMAL and answer.x is not None
            assert problem.bytes_peak(answer.x) <= budget
            assert answer.seconds == pytest.approx(best, rel=1e-6)
            assert answer.bound <= best * (1 + 1e-6)


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_the_search_finds_the_optimum_of_programs(kind, mesh):
    for instance in instances(kind, mesh):
        seconds, peak = enumerated(instance.model().problem)
        for budget in budgets(seconds, peak):
            found = instance.search().run(budget, instance.remat.levels()[:1])
            best = best_of(seconds, peak, budget)
            assert found.best is not None
            assert timeline(found.best.model, found.best.x).max() <= budget
            assert found.best.seconds == pytest.approx(best, rel=1e-6)
            assert found.bound == pytest.approx(best, rel=1e-5) and found.bound <= best * (1 + 1e-9)


def test_there_are_two_hundred_different_programs_and_a_hundred_have_pressure():
    texts, tight = set(), 0
    for case in CASES:
        for instance in instances(*case):
            texts.add((str(jax.make_jaxpr(instance.drawn.step)(*instance.drawn.args)), str(instance.mesh)))
            tight += len(budgets(*enumerated(instance.model().problem))) > 1
    assert len(texts) == PER_CASE * len(CASES) >= 200
    assert tight >= 100


@pytest.mark.parametrize("seed", range(60))
def test_the_milp_finds_the_optimum_of_random_problems(seed):
    problem = random_problem(seed, count=5 + seed % 4, density=0.3 + 0.1 * (seed % 5), positions=1 + seed % 4)
    seconds, peak = enumerated(problem)
    assert seconds.size == math.prod(problem.sizes) <= 4**8
    for budget in (1e15, *budgets(seconds, peak)[1:]):
        answer = solve_milp(problem, budget, relative_gap=0.0, node_limit=10_000, time_limit=60.0)
        assert answer.status is Status.OPTIMAL and answer.x is not None
        assert problem.bytes_peak(answer.x) <= budget
        assert answer.seconds == pytest.approx(best_of(seconds, peak, budget), rel=1e-6)


def test_enumeration_is_that_of_the_problem():
    """The vectorised sums against ``Problem.seconds`` and ``bytes_peak``, one assignment at a time."""
    problem = random_problem(7, count=4)
    seconds, peak = enumerated(problem)
    for number, x in enumerate(itertools.product(*(range(n) for n in problem.sizes))):
        assert seconds.flat[number] == pytest.approx(problem.seconds(np.array(x)), rel=1e-12)
        assert peak.flat[number] == pytest.approx(problem.bytes_peak(np.array(x)), rel=1e-12)
