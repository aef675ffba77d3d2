"""The search against brute force over all shardings of tiny steps, and its behaviour under memory pressure."""

from __future__ import annotations

import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxauto.options import mesh_axes
from jaxauto.planner import read
from jaxauto.solve.fold import fold
from jaxauto.solve.model import Model, Program
from jaxauto.solve.remat import Remat
from jaxauto.solve.search import Search, timeline
from jaxauto.targets.target import Target


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def linear(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), jnp.float32(0)


def two_layers(params, x):
    def loss(p):
        return jnp.sum(jax.nn.relu(x @ p[0]) @ p[1])

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


STEPS = {
    "linear wide": (linear, (struct(64, 4096), struct(8, 64))),
    "linear tall batch": (linear, (struct(16, 32), struct(4096, 16))),
    "two layers": (two_layers, ((struct(32, 512), struct(512, 32)), struct(64, 32))),
    "attention scores": (lambda q, k: jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)), (struct(8, 64, 16), struct(8, 64, 16))),
    "lookup": (lambda table, ids: table[ids].sum(), (struct(512, 64), struct(128, dtype=jnp.int32))),
}
MESHES = {"4": {"a": 4}, "2x2": {"a": 2, "b": 2}, "2x2x2": {"a": 2, "b": 2, "c": 2}}
TARGETS = ("v5p:2x2x2", "cpu:8", "h100:8")


def prepared(step, args, mesh, target):
    found = read(step, args, {})
    axes = mesh_axes(mesh, Target(target))
    remat = Remat(found.graph, found.groups, found.aliased, Target(target).chip)
    program = Program(found.groups, fold(found.groups, {}), found.known_early, found.late_only)
    return Search(program, remat, axes, Target(target).chip, {}, time.monotonic() + 60), remat


def enumerated(model: Model, budget: float = math.inf) -> float:
    """The least objective over every assignment of states, by exhaustion, vectorised over blocks of answers."""
    problem = model.problem
    best = math.inf
    free = [i for i, n in enumerate(problem.sizes) if n > 1]
    for choice in itertools.product(*(range(problem.sizes[i]) for i in free)):
        x = np.zeros(len(problem.sizes), int)
        x[free] = choice
        if budget < math.inf and timeline(model, x).max() > budget:
            continue
        best = min(best, problem.seconds(x))
    return best


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", STEPS)
def test_the_optimum_of_tiny_steps(name, mesh, target):
    search, remat = prepared(*STEPS[name], MESHES[mesh], target)
    model = search.model(remat.variant(remat.levels()[0].kept))
    found = search.run(math.inf, remat.levels()[:1])
    assert found.best is not None
    assert found.bound <= found.best.seconds * (1 + 1e-9)
    if math.prod(model.problem.sizes) <= 20_000:
        assert found.best.seconds == pytest.approx(enumerated(model), rel=1e-6)
    else:  # too many to enumerate: the bound is the witness
        assert found.best.seconds <= found.bound * 1.01


def test_less_memory_never_makes_it_faster_and_is_kept_to():
    search, remat = prepared(*STEPS["two layers"], {"a": 2, "b": 2}, "v5p:2x2x2")
    free = search.run(math.inf, remat.levels())
    assert free.best is not None
    last = free.best.seconds
    for share in (0.9, 0.7, 0.5):
        budget = share * free.best.peak_bytes
        search, remat = prepared(*STEPS["two layers"], {"a": 2, "b": 2}, "v5p:2x2x2")
        found = search.run(budget, remat.levels())
        if found.best is None:
            assert found.leanest.peak_bytes > budget
            continue
        assert found.best.peak_bytes <= budget
        assert found.best.seconds >= last * (1 - 1e-6)


def test_the_answer_does_not_depend_on_the_run():
    answers = []
    for _ in range(2):
        search, remat = prepared(*STEPS["two layers"], {"a": 2, "b": 2}, "cpu:8")
        answers.append(search.run(math.inf, remat.levels()).best.x)
    np.testing.assert_array_equal(*answers)
