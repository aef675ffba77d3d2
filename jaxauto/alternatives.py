"""What if an argument were sharded otherwise: the best plan with that sharding, on the plan's own mesh and budget."""

from __future__ import annotations

import difflib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from jaxauto import planner
from jaxauto.core import Estimate
from jaxauto.errors import ConstraintError
from jaxauto.estimate import estimate
from jaxauto.solve.search import Candidate
from jaxauto.tables import duration, size
from jaxauto.undivided import rounded

if TYPE_CHECKING:
    from jaxauto.plan import Plan

_TRIALS = 10
_TRIAL_SECONDS = 3.0
_ALL_SECONDS = 30.0
_TELLING = 0.1  # of the whole difference: parts smaller than this share are not worth a word


@dataclass(frozen=True)
class Trial:
    """A sharding and what came of it. ``estimate``: None when there is no such plan; ``reason`` says why, or where the difference lies."""

    spec: PartitionSpec
    estimate: Estimate | None
    reason: str


def solved_of(plan: Plan) -> Any:
    """What the search knew of a plan, or None: plans from files do not carry it."""
    return plan.program.solved if plan.program is not None else None


def close_to(pattern: str, paths: Sequence[str]) -> list[str]:
    """Paths that look like ``pattern``, else the first ones."""
    return difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3) or list(paths[:3])


def try_all(plan: Plan, paths: Sequence[str], shape: Sequence[int], chosen: PartitionSpec) -> Iterator[Trial]:
    """Other shardings of arguments that are alike, each solved again.

    Args:
      plan: with what its search knew.
      paths: the arguments; all get the same sharding.
      shape: of each of them.
      chosen: what the plan has; left out.
    """
    sizes = dict(plan.mesh.shape)
    specs = [s for s in candidate_specs(len(shape), sizes) if s != chosen]
    deadline = time.monotonic() + _ALL_SECONDS
    for spec in specs[:_TRIALS]:
        undivided = _undivided(spec, shape, sizes)
        if undivided:
            yield Trial(spec, None, undivided)
        elif time.monotonic() > deadline:
            yield Trial(spec, None, "not tried: out of time")
        else:
            yield _trial(plan, paths, spec)


def candidate_specs(rank: int, sizes: Mapping[str, int]) -> list[PartitionSpec]:
    """Replicated, every axis on every dimension, two axes on two dimensions, all axes on one; the plain ones first."""
    axes = [a for a, n in sizes.items() if n > 1]
    found = [PartitionSpec()]
    found += [PartitionSpec(*[None] * d, a) for d in range(rank) for a in axes]
    for first, second in itertools.permutations(range(rank), 2):
        for a, b in itertools.combinations(axes, 2):
            parts: list[Any] = [None] * (max(first, second) + 1)
            parts[first], parts[second] = a, b
            found.append(PartitionSpec(*parts))
    if len(axes) > 1:
        found += [PartitionSpec(*[None] * d, tuple(axes)) for d in range(rank)]
    return found


def _undivided(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> str:
    for d, part in enumerate(spec):
        ways = math.prod(sizes[a] for a in ((part,) if isinstance(part, str) else part or ()))
        if shape[d] % ways:
            return f"does not divide: dimension {d} of size {shape[d]} into {ways}"
    return ""


def _trial(plan: Plan, paths: Sequence[str], spec: PartitionSpec) -> Trial:
    solved = solved_of(plan)
    best = solved.found.best
    given = solved.options.constraints or {}
    options = replace(solved.options, constraints={**given, **{_literal(p): spec for p in paths}}, time_limit=_TRIAL_SECONDS)
    deadline = time.monotonic() + _TRIAL_SECONDS
    try:
        found = planner.search(
            solved.step, solved.remat, solved.levels, best.model.mesh, solved.target, plan.budget_bytes, options, deadline
        )
    except ConstraintError as error:
        return Trial(spec, None, f"not possible: {error}")
    if found.best is None:
        return Trial(spec, None, f"does not fit: the least it needs is {size(found.leanest.peak_bytes)}")
    other = estimate(found.best)
    reason = difference(plan.estimate, other)
    return Trial(spec, other, f"recomputes activations: {reason}" if recomputes(found.best) and not recomputes(best) else reason)


def recomputes(candidate: Candidate) -> bool:
    """Whether a candidate makes anything again in the backward pass."""
    return any(kept is not None for kept in candidate.variant.kept)


def _literal(path: str) -> str:
    """A path as a glob that matches itself alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in path)


def difference(here: Estimate, there: Estimate) -> str:
    """Where another estimate differs: ``"compute +1.20 ms, all-gather over model +0.30 ms, memory -1.00 GiB"``."""
    parts = {"compute": there.compute_time - here.compute_time}
    for sign, e in ((1, there), (-1, here)):
        for name, seconds in _by_kind(e).items():
            parts[name] = parts.get(name, 0.0) + sign * seconds
    largest = max(map(abs, parts.values()))
    told = sorted((p for p in parts.items() if largest and abs(p[1]) >= _TELLING * largest), key=lambda p: -abs(p[1]))
    texts = [f"{name} {signed(seconds, duration)}" for name, seconds in told[:4]]
    memory = there.peak_memory - here.peak_memory
    if abs(memory) > 0.005 * here.peak_memory:
        texts.append(f"memory {signed(memory, size)}")
    hidden = (there.comm_time - there.exposed_comm_time) - (here.comm_time - here.exposed_comm_time)
    if abs(hidden) > _TELLING * max(largest, 1e-12):
        texts.append(f"hidden behind computation {signed(hidden, duration)}")
    return ", ".join(texts) or "the same"


def _by_kind(e: Estimate) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for c in e.collectives:
        total[f"{c.kind} over {', '.join(c.axes)}"] += c.count * c.seconds
    return total


def signed(amount: float, write: Callable[[float], str]) -> str:
    """``"+1.20 ms"``; nothing has no sign."""
    return ("+" if amount > 0 else "-" if amount < 0 else "") + write(abs(amount))


def if_padded(plan: Plan) -> Estimate | None:
    """The best plan on the same mesh and budget in which odd dimensions count as divisible; None: nothing fits, or a plan from a file."""
    solved = solved_of(plan)
    if solved is None:
        return None
    mesh = solved.found.best.model.mesh
    step = replace(solved.step, groups=rounded(solved.step.groups, mesh))
    options = replace(solved.options, time_limit=_TRIAL_SECONDS)
    deadline = time.monotonic() + _TRIAL_SECONDS
    found = planner.search(step, solved.remat, solved.levels, mesh, solved.target, plan.budget_bytes, options, deadline)
    return estimate(found.best) if found.best is not None else None
