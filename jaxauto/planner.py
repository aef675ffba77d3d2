"""The pipeline, one line for each stage: trace → graph → groups → solve on each mesh → plan → certify."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxauto import compat
from jaxauto.constraints import allowed_states, ignored_pins
from jaxauto.core import Graph, MeshAxes
from jaxauto.errors import InfeasibleError, InternalError, UnknownPrimitiveWarning
from jaxauto.estimate import estimate, memory_by_kind
from jaxauto.flow import data_dependent, read_late
from jaxauto.graph import build, walk
from jaxauto.groups import Groups, find_groups
from jaxauto.options import Options, budget_bytes, device_mesh, is_here, mesh_candidates
from jaxauto.plan import Plan, Program, SolverReport
from jaxauto.progress import Progress
from jaxauto.reserve import with_room
from jaxauto.residuals import remat_decisions
from jaxauto.rewrite.apply import partition_spec
from jaxauto.rewrite.away import movable
from jaxauto.rules import has_rule, unknown_primitive_message
from jaxauto.solve.check import check
from jaxauto.solve.decide import decisions_of, sharding_of_value
from jaxauto.solve.fold import fold
from jaxauto.solve.least import least_memory
from jaxauto.solve.model import Program as Decided
from jaxauto.solve.remat import Level, Remat
from jaxauto.solve.search import BEHIND, Candidate, Found, Search
from jaxauto.solve.tighten import WORK_PER_SECOND
from jaxauto.tables import size
from jaxauto.targets.target import Target, resolve
from jaxauto.trace import Traced, trace
from jaxauto.undivided import notes as undivided_notes

_TIE = 0.005  # relative difference of estimates that means nothing
ABREAST = 1.3  # times the seconds of the best mesh: with levels between, or under less memory, another one of these may be it


@dataclass(frozen=True, eq=False)
class Step:
    """A step read into a graph: what does not depend on mesh, target or budget."""

    fun: Callable
    traced: Traced
    graph: Graph
    groups: Groups
    aliased: frozenset[int]
    known_early: frozenset[int]
    late_only: frozenset[int]
    movable: Mapping[int, int]  # donated arguments that only the optimizer reads → the results that they become
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Solved:
    """What the search knew: for certification and for ``explain``."""

    step: Step
    target: Target
    remat: Remat
    levels: list[Level]
    found: Found
    meshes: Mapping[str, float]
    options: Options
    fitting: tuple[Candidate, ...] = ()  # all candidates of all meshes that fit

    @property
    def best(self) -> Candidate:
        assert self.found.best is not None, "nothing fits"
        return self.found.best


@compat.propagated()
def make_plan(fun: Callable, args: tuple, kwargs: dict, options: Options) -> Plan:
    """Plan ``fun(*args, **kwargs)``; static arguments are bound already. See ``jaxauto.plan``."""
    with Progress(options.progress) as progress, _no_garbage():
        progress("tracing")
        step = read(fun, args, kwargs, options.donate_argnums)
        target = resolve(options.target)
        budget = budget_bytes(options.memory_budget, target.chip.hbm_bytes)
        sure = options.surely
        try:
            solved = searched(step, target, budget, options, progress)
        except InfeasibleError as error:
            if not sure:
                raise
            from jaxauto.certify import least_told

            raise least_told(error, step, target, options, progress) from None
        plan = plan_for(solved, solved.best, budget, options) if sure else with_room(solved, budget, options, progress)
        if options.tune > 1:
            from jaxauto.tune import tuned

            plan = tuned(plan, budget, options, progress)
        if sure:
            from jaxauto.certify import certified

            progress("certifying with the compiler")
            plan = certified(plan, budget, options, progress, must=options.certify is True)
        return plan


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """No search for cycles while a plan is made: it holds millions of objects, all in use, and the search takes a quarter of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read(fun: Callable, args: tuple, kwargs: dict, donate_argnums: Any = None) -> Step:
    """Trace a step and find its decisions."""
    traced = trace(fun, args, kwargs, donate_argnums)
    graph = build(traced.jaxpr)
    groups = find_groups(graph, traced.state)
    notes = _warn_of_unknown(graph)
    becomes = {graph.inputs[i]: graph.outputs[o] for i, o in traced.state if traced.donated[i]}
    state = {i for i, _ in traced.state}
    dependent = data_dependent(graph, [n for k, n in enumerate(graph.inputs) if k not in state])
    late_only = read_late(graph, groups.rules, dependent)
    return Step(
        fun,
        traced,
        graph,
        groups,
        frozenset(x for x in becomes.values() if isinstance(x, int) and x not in graph.inputs),
        frozenset(n for n in graph.values if n not in dependent),
        late_only,
        movable(graph, becomes, late_only),
        notes,
    )


def _warn_of_unknown(graph: Graph) -> tuple[str, ...]:
    unknown: dict[str, str] = {}
    for node in walk(graph):
        if not node.bodies and not has_rule(node.prim):
            unknown.setdefault(node.prim, node.source)
    messages = tuple(unknown_primitive_message(name, source) for name, source in unknown.items())
    for message in messages:
        warnings.warn(message, UnknownPrimitiveWarning, stacklevel=5)
    return messages


# ------------------------------------------------------------------------------------------------------------------- solve


def solve(step: Step, target: Target, budget: float, options: Options, progress: Callable[[str], None]) -> Plan:
    """The best plan over the meshes, under ``budget`` bytes. Raises: see ``searched``."""
    solved = searched(step, target, budget, options, progress)
    return plan_for(solved, solved.best, budget, options)


def searched(
    step: Step, target: Target, budget: float, options: Options, progress: Callable[[str], None], before: Solved | None = None
) -> Solved:
    """The best answer over the meshes, under ``budget`` bytes.

    Args:
      before: what a search under a larger budget came to: meshes that were far behind there are left out.

    Raises:
      InfeasibleError: no plan on any mesh fits.
    """
    started = time.monotonic()
    meshes = mesh_candidates(options.mesh, target, _mesh_in_step(step))
    if before is not None:
        meshes = [mesh for mesh in meshes if before.meshes.get(_name(mesh), math.inf) <= before.best.seconds * ABREAST]
    remat = _remat(step, meshes, target, options) if before is None else before.remat
    levels = {"off": lambda: remat.levels()[:1], "auto": remat.levels, "offload": remat.levels_with_host}[options.remat]()
    deadline = started + options.time_limit
    results: list[tuple[Search, Found]] = []
    for number, mesh in enumerate(meshes):
        progress(f"solving mesh {_name(mesh)} ({number + 1} of {len(meshes)})")
        tried = prepared(step, remat, mesh, target, options, deadline)
        results.append((tried, tried.look(budget, levels)))
        if time.monotonic() > deadline:
            break
    _refine(results, budget, progress)
    if all(found.best is None for _, found in results):
        progress("looking for the least memory")
        for tried, found in sorted(results, key=lambda r: r[1].leanest.peak_bytes):
            least_memory(tried, levels, found, budget)
            if found.best is not None:
                tried.take_up(found, budget)
        _refine([r for r in results if r[1].best is not None], budget, progress)
    fitting = [(tried, found) for tried, found in results if found.best is not None]
    if not fitting:
        least = min(found.leanest.peak_bytes for _, found in results)
        raise InfeasibleError(_infeasible_message(results, budget, target), least)
    found = _simplest(fitting)
    seconds = {_name(s.mesh): (f.best.seconds if f.best else math.inf) for s, f in results}
    found.seconds_spent["all meshes"] = time.monotonic() - started
    everything = tuple(dict.fromkeys(c for _, f in fitting for c in (*f.fitting, f.best) if c is not None))
    return Solved(step, target, remat, levels, found, seconds, options, everything)


def _remat(step: Step, meshes: Sequence[MeshAxes], target: Target, options: Options) -> Remat:
    devices, movable = max(mesh.num_devices for mesh in meshes), step.movable if options.remat == "offload" else None
    return Remat(step.graph, step.groups, step.aliased, target.chip, devices=devices, movable=movable, late_only=step.late_only)


def _name(mesh: MeshAxes) -> str:
    return "x".join(map(str, mesh.sizes))


def _refine(results: Sequence[tuple[Search, Found]], budget: float, progress: Callable[[str], None]) -> None:
    """Of each mesh that may have the best answer, the fastest first, and as many as there is time for."""
    fastest = _fastest(results)
    near = [r for r in sorted(results, key=lambda r: _fastest([r])) if _may_win(r[1], fastest, ABREAST)]
    for number, (tried, found) in enumerate(near):
        if number and tried.out_of_time():
            return
        tried.closer(found, budget)
    for number, (tried, found) in enumerate(sorted(near, key=lambda r: _fastest([r]))):
        if number and tried.out_of_time():
            return
        tried.rival = _fastest([r for r in results if r[0] is not tried])
        if _may_win(found, tried.rival, BEHIND):
            progress(f"refining mesh {_name(tried.mesh)}")
            tried.refine(found, budget)


def _may_win(found: Found, rival: float, behind: float) -> bool:
    """Whether more work on a mesh may make it faster than ``rival``: it is not far behind, or its bound says that much is open."""
    return found.best is None or found.best.seconds <= rival * behind or found.bound * behind < rival


def _fastest(results: Sequence[tuple[Search, Found]]) -> float:
    """Seconds."""
    return min((found.best.seconds for _, found in results if found.best is not None), default=math.inf)


def _simplest(fitting: list[tuple[Search, Found]]) -> Found:
    """The fastest, or one with fewer axes that is as good as that: the partitioner has less to get wrong."""
    fastest = _fastest(fitting)
    near = [r for r in fitting if r[1].best is not None and r[1].best.seconds <= fastest * (1 + _TIE)]
    return min(near, key=lambda r: (len(r[0].mesh.sizes), r[1].best.seconds))[1]  # type: ignore[union-attr]


def _checked(best: Candidate, step: Step, budget: float, options: Options) -> None:
    """Every answer is recomputed from the graph before it is given out.

    Raises:
      InternalError: it is not what the solver took it for.
    """
    wrong = check(best, budget, allowed_states(options.constraints, step.traced, step.groups, best.model.mesh))
    if wrong:
        raise InternalError(
            f"the plan found on mesh {best.model.mesh.shape} does not hold up when it is recomputed from the graph: {'; '.join(wrong)}. "
            "This is a bug in jaxauto: please report it with the step that shows it."
        )


def search(
    step: Step,
    remat: Remat,
    levels: list[Level],
    mesh: MeshAxes,
    target: Target,
    budget: float,
    options: Options,
    deadline: float,
) -> Found:
    """Search one mesh."""
    return prepared(step, remat, mesh, target, options, deadline).run(budget, levels)


def prepared(step: Step, remat: Remat, mesh: MeshAxes, target: Target, options: Options, deadline: float) -> Search:
    """The search on one mesh, before it is run."""
    allowed = allowed_states(options.constraints, step.traced, step.groups, mesh)
    alike = fold(step.groups, {g: mask.tobytes() for g, mask in allowed.items()})
    program = Decided(step.groups, alike, step.known_early, step.late_only)
    work = options.time_limit * WORK_PER_SECOND
    return Search(program, remat, mesh, target.chip, allowed, deadline, work)


def _mesh_in_step(step: Step) -> dict[str, int] | None:
    for nodes in step.groups.pinned.values():
        for _, node in nodes:
            mesh = getattr(node.params.get("sharding"), "mesh", None)
            if mesh is not None and not getattr(mesh, "empty", True):
                return dict(mesh.shape)
    return None


def _infeasible_message(results: list[tuple[Search, Found]], budget: float, target: Target) -> str:
    search, found = min(results, key=lambda r: r[1].leanest.peak_bytes)
    mesh, least = search.mesh, found.leanest
    parts = sorted(memory_by_kind(least.model, least.x).items(), key=lambda kv: -kv[1])
    made_of = ", ".join(f"{name} {size(b)}" for name, b in parts if b > 0.005 * least.peak_bytes)
    return (
        f"no plan fits {size(budget)} on each of {mesh.num_devices} x {target.chip.name}: "
        f"the least that any plan needs is {size(least.peak_bytes, up=True)} "
        f"(mesh {mesh.shape}, {_recomputed(least)}), made of {made_of}. "
        "Use more devices, a larger memory_budget, a smaller batch, or a leaner optimizer state."
    )


def _recomputed(candidate: Candidate) -> str:
    again = [kept is not None for kept in candidate.variant.kept]
    return "everything recomputed" if again and all(again) else f"{sum(again)} of {len(again)} blocks recomputed"


# -------------------------------------------------------------------------------------------------------------------- plan


def build_plan(solved: Solved, best: Candidate, budget: float, options: Options) -> Plan:
    """A candidate as a Plan."""
    step, traced, model = solved.step, solved.step.traced, best.model
    here = options.target is None or is_here(solved.target, solved.target.num_devices)
    in_specs = tuple(partition_spec(sharding_of_value(model, best.x, n)) for n in step.graph.inputs)
    state_of_output = {o: i for i, o in traced.state}
    out_specs = tuple(
        in_specs[state_of_output[k]]
        if k in state_of_output
        else partition_spec(sharding_of_value(model, best.x, x))
        if isinstance(x, int) and not compat.is_key_dtype(step.graph.values[x].dtype)
        else jax.sharding.PartitionSpec()
        for k, x in enumerate(step.graph.outputs)
    )
    found = solved.found
    return Plan(
        mesh=device_mesh(model.mesh, options.mesh, solved.target, here=here),
        target=str(solved.target),
        budget_bytes=budget,
        in_paths=traced.in_paths,
        out_paths=traced.out_paths,
        in_avals=traced.in_avals,
        out_avals=traced.out_avals,
        in_specs=in_specs,
        out_specs=out_specs,
        donated=traced.donated,
        decisions=decisions_of(best),
        remat=remat_decisions(solved.remat, best, traced.in_paths),
        estimate=estimate(best),
        solver=SolverReport(
            status=found.status,
            objective=best.seconds,
            bound=min(found.bound, best.seconds),
            gap=max(0.0, 1 - found.bound / best.seconds) if best.seconds else 0.0,
            seconds=dict(found.seconds_spent),
            variables=found.variables,
            constraints=found.constraints,
            meshes=solved.meshes,
        ),
        fingerprint=fingerprint(step.graph),
        notes=(*step.notes, *ignored_pins(step.groups, model.mesh), *undivided_notes(traced.in_paths, traced.in_avals, model.mesh)),
        in_host=frozenset(k for k, n in enumerate(step.graph.inputs) if n in best.variant.offloaded),
        out_host=frozenset(k for k, x in enumerate(step.graph.outputs) if x in best.variant.offloaded),
        program=Program(step.fun, traced, step.graph, solved),
    )


def plan_for(solved: Solved, candidate: Candidate, budget: float, options: Options) -> Plan:
    """One of the answers found as a Plan, checked."""
    _checked(candidate, solved.step, budget, options)
    if candidate is not solved.found.best:
        solved = replace(solved, found=replace(solved.found, best=candidate))
    return build_plan(solved, candidate, budget, options)


def plan_of(plan: Plan, candidate: Candidate, budget: float, options: Options) -> Plan:
    """Another answer to ``plan``'s step as a Plan."""
    solved = plan._bound().solved
    return plan if candidate is solved.found.best else plan_for(solved, candidate, budget, options)


def fingerprint(graph: Graph) -> str:
    """A hash of the program: primitives, parameters, shapes and wiring."""
    digest = hashlib.sha256()
    for node in walk(graph):
        wiring = [x if isinstance(x, int) else "literal" for x in node.inputs]
        shapes = [(graph.values[o].shape, str(graph.values[o].dtype)) for o in node.outputs]
        plain = sorted((k, v) for k, v in node.params.items() if isinstance(v, (int, float, str, bool, tuple)) and "0x" not in repr(v))
        digest.update(f"{node.prim}{wiring}{shapes}{plain}".encode())
    digest.update(str([x if isinstance(x, int) else "literal" for x in graph.outputs]).encode())
    digest.update(str([(graph.values[n].shape, str(graph.values[n].dtype)) for n in graph.inputs]).encode())
    return digest.hexdigest()[:16]


# ----------------------------------------------------------------------------------------------------------------- certify
