"""The plain recomputation agrees with the tables on any answer, and complains of every slip that is planted in them."""

from __future__ import annotations

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import STEPS

import jaxauto
from jaxauto import planner
from jaxauto.options import mesh_axes
from jaxauto.planner import read
from jaxauto.solve import brought
from jaxauto.solve import model as module
from jaxauto.solve.check import check
from jaxauto.solve.fold import fold
from jaxauto.solve.live import timeline
from jaxauto.solve.model import Model, Program
from jaxauto.solve.remat import Remat
from jaxauto.solve.search import Candidate, Search
from jaxauto.targets.target import Target

PLACES = (
    ("v5p:2x2x2", {"a": 2, "b": 2, "c": 2}),  # gathers over the whole closed torus are waited for
    ("v5e:2x4", {"a": 4, "b": 2}),
    ("cpu:8", {"a": 2, "b": 2, "c": 2}),  # no reduce-scatter, nothing is prefetched, 16 bits are widened
    ("h100:8", {"a": 8}),
)


def searched(name: str | tuple, target: str, mesh: dict[str, int]) -> tuple[Search, Remat]:
    """``name``: of a step of the zoo, or (step, arguments)."""
    found = read(*(STEPS[name]() if isinstance(name, str) else name), {})
    chip = Target(target).chip
    remat = Remat(found.graph, found.groups, found.aliased, chip)
    program = Program(found.groups, fold(found.groups, {}), found.known_early, found.late_only)
    return Search(program, remat, mesh_axes(mesh, Target(target)), chip, {}, time.monotonic() + 60, work=1e7), remat


def candidate(model: Model, x: np.ndarray) -> Candidate:
    return Candidate(model, x, model.problem.seconds(x), float(timeline(model, x).max()), 0)


def at_random(model: Model, seed: int) -> Candidate:
    """Any state of each variable: the tables have to be right where no search goes."""
    rng = np.random.default_rng(seed)
    found = candidate(model, np.array([rng.integers(n) for n in model.problem.sizes]))
    model.problem.rows = [model.memory_row(int(p), crowded=k % 2 > 0) for k, p in enumerate(rng.integers(model.buffers.length, size=6))]
    return found


@pytest.fixture(scope="module")
def transformer() -> tuple[Search, Remat]:
    return searched("transformer_scan", *PLACES[1])


def built(transformer, level: int = 1) -> Model:
    search, remat = transformer
    return Model(search.program, remat.variant(remat.levels()[level]), search.mesh, search.chip)


@pytest.mark.parametrize("number", range(len(STEPS)), ids=list(STEPS))
def test_tables_and_graph_agree_on_answers_at_random(number):
    search, remat = searched(list(STEPS)[number], *PLACES[number % len(PLACES)])
    levels = remat.levels()
    model = search.model(remat.variant(levels[-(number % 2)]))  # as written, or with everything recomputed
    for seed in range(3):
        assert check(at_random(model, seed)) == []


@pytest.mark.parametrize("target, mesh", PLACES[::3], ids=[t for t, _ in PLACES[::3]])
def test_what_the_search_returns_is_right(target, mesh):
    search, remat = searched("user_checkpoint", target, mesh)
    free = search.run(math.inf, remat.levels()).best
    assert free is not None and check(free, free.peak_bytes) == []
    tight = searched("user_checkpoint", target, mesh)[0].run(0.8 * free.peak_bytes, remat.levels()).best
    assert tight is not None and check(tight, 0.8 * free.peak_bytes) == []


def test_tables_and_graph_agree_on_sums_scattered_beside_their_dots():
    """Dots large enough for windowed einsums, which the steps above have not."""

    def step(w, x):
        return jax.value_and_grad(lambda w: jnp.einsum("bld,bdh,bmh->blm", x, w, w).astype(jnp.float32).sum())(w)

    args = jax.ShapeDtypeStruct((2, 1024, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((2, 65536, 1024), jnp.bfloat16)
    search, remat = searched((step, args), "v5e:2x4", {"a": 4, "b": 2})
    model = search.model(remat.variant(remat.levels()[0]))
    assert model.problem.pairs["compute"], "some dots are cut into pieces"
    longer = 0.0
    for seed in range(40):
        found = at_random(model, seed)
        longer += sum(table[found.x[i], found.x[j]] for (i, j), table in model.problem.pairs["compute"].items())
        assert check(found) == []
    assert longer > 0


# --------------------------------------------------------------------------------------------------------- planted slips


@pytest.mark.parametrize("resource", ["compute", "prefetch", "blocking"])
@pytest.mark.parametrize("kind", ["unary", "pairs"])
def test_complains_of_a_wrong_entry(transformer, resource, kind):
    model = built(transformer)
    found = at_random(model, 0)
    tables = getattr(model.problem, kind)[resource]
    if not tables:
        assert (kind, resource) in {("pairs", "compute"), ("unary", "blocking")}, "these tables are empty by their nature"
        tables[0 if kind == "unary" else (0, 1)] = np.zeros(model.problem.sizes[0] if kind == "unary" else model.problem.sizes[:2])
    of = next(iter(tables))
    at = tuple(int(found.x[i]) for i in (of if kind == "pairs" else (of,)))
    tables[of][at] += 1e-6
    complaints = check(candidate(model, found.x))
    assert any(c.startswith(f"{resource} seconds: the tables say") for c in complaints), complaints


def test_complains_of_a_transposed_table(transformer):
    model = built(transformer)
    square = next(k for k, t in model.problem.pairs["blocking"].items() if t.shape[0] == t.shape[1] and not np.allclose(t, t.T))
    table = model.problem.pairs["blocking"][square]
    model.problem.pairs["blocking"][square] = table.T
    x = np.zeros(len(model.problem.sizes), int)
    x[list(square)] = np.argwhere(~np.isclose(table, table.T))[0]
    assert any("blocking seconds" in c for c in check(candidate(model, x)))


def test_complains_of_a_lost_recomputation(transformer, monkeypatch):
    runs = Model.runs
    monkeypatch.setattr(Model, "runs", lambda self, op: runs(self, op)[:1])
    model = built(transformer, level=-1)
    assert any("compute seconds" in c for c in check(at_random(model, 0)))


def test_complains_where_what_is_not_alike_shares_a_variable(transformer):
    """Folding that goes too far: an operation that follows another's choice, with other factors."""
    model = built(transformer)
    found = at_random(model, 1)
    model.variable = dict(model.variable)
    first, second = [k for k in model.variable if k[0] == "operation"][:2]
    model.variable[second] = model.variable[first]
    assert check(dataclasses.replace(found))


def test_complains_of_a_wrong_peak_and_row(transformer):
    model = built(transformer)
    found = at_random(model, 2)
    wrong = dataclasses.replace(found, peak_bytes=found.peak_bytes * 1.001)
    assert [c.split(":")[0] for c in check(wrong)] == ["peak bytes"]
    row = model.problem.rows[0]
    row.base += 1e-3 * found.peak_bytes
    assert [c.split(":")[0] for c in check(found)] == [f"bytes at position {row.position}"]


def test_complains_of_lost_padding_and_resharded_copies(transformer, monkeypatch):
    monkeypatch.setattr(brought, "_bytes", lambda whole, written, source, result: 0.0 * result)
    model = built(transformer)
    found = at_random(model, 3)
    model.problem.rows = [model.memory_row(p) for p in range(model.buffers.length)]
    assert any(c.startswith("bytes at position") for c in check(found))
    monkeypatch.undo()
    monkeypatch.setattr(module, "padding", lambda positions, *_: np.ones(len(positions)))
    assert any(c.startswith("peak bytes") for c in check(at_random(built(transformer), 3)))


def test_complains_of_wrong_seconds(transformer):
    found = at_random(built(transformer), 4)
    assert [c.split(":")[0] for c in check(dataclasses.replace(found, seconds=0.9 * found.seconds))] == ["seconds"]


def test_complains_of_a_budget_that_is_not_kept(transformer):
    found = at_random(built(transformer), 5)
    (complaint,) = check(found, 0.9 * found.peak_bytes)
    assert "the budget is" in complaint


def test_complains_of_a_state_that_does_not_divide(transformer):
    model = built(transformer)
    g, group = next(
        (g, group) for g, group in model.groups.groups.items() if group.sizes and model.problem.sizes[model.var("group", g)] > 1
    )
    v = model.var("group", g)
    found = at_random(model, 6)
    saved = group.sizes
    group.sizes = [3] * len(saved)
    model.states[v] = np.zeros_like(model.states[v])  # all axes on the first dimension
    try:
        assert any("is split 8 ways" in c for c in check(found))
    finally:
        group.sizes = saved


def test_complains_of_a_forbidden_state(transformer):
    model = built(transformer)
    g = next(g for g in model.groups.groups if model.problem.sizes[model.var("group", g)] > 1)
    x = np.zeros(len(model.problem.sizes), int)
    mask = np.ones(model.problem.sizes[model.var("group", g)], bool)
    assert check(candidate(model, x), allowed={g: mask}) == []
    mask[0] = False
    (complaint,) = check(candidate(model, x), allowed={g: mask})
    assert complaint == f"group {g} is in state (-1, -1), which a constraint forbids"


def test_a_plan_that_does_not_hold_up_is_not_given_out(monkeypatch):
    monkeypatch.setattr(planner, "check", lambda *_: ["seconds: the tables say 1, the graph says 2"])
    step, args = STEPS["mlp_sgd"]()
    with pytest.raises(jaxauto.errors.InternalError, match=r"recomputed from the graph: seconds: .* This is a bug in jaxauto"):
        jaxauto.plan(step, *args, mesh={"data": 8})
