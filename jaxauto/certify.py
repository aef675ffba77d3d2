"""A certified plan fits: compile, and where the compiler needs more than the budget, tighten by the measured excess and solve again.

The estimate e and the compiled c of one round give the next one, under a budget of M: the estimate may be M e / c.
Where no plan has so little, the leanest plan is compiled: compilers stray from the estimate most where there is room to waste. The least
that users are told of is what the compiler was seen to fit it into: asked for that much, the planner plans.
Where the next one fits with room to spare, or the leanest plan does, a faster plan between the two is tried, and one below that if it does
not fit.
Where none fits, the leanest answer that splits no scan where these did, or the other way round, is compiled too: estimates of the two stray
apart. Of the search for the budget, then of that for little more than the least: users may have been told of what that needs. Where those
do not fit either, a compiler that takes a limit is told of it: with memory to spare XLA:TPU leaves gaps in its heap. Where the gaps alone
are too much, it is told at once: it closes them, and the step takes no longer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxauto import aot, hlo
from jaxauto.errors import InfeasibleError, TargetError
from jaxauto.plan import Certificate, Plan
from jaxauto.reserve import between
from jaxauto.tables import size
from jaxauto.targets.compilers import memory_limit
from jaxauto.targets.target import Target
from jaxauto.verify import Compilation, compile_plan, schedule_of

MAX_ROUNDS = 3
_SLACK = 0.02  # the next plan's excess differs a little
_LEANEST = 0.0  # share of a plan's memory that no plan has
_ROUNDING = 1e-6
_APART = 0.05  # of the least memory: answers of the other kind that are looked at
_SAME = 1e-3  # plans nearer to each other are one
_BETWEEN = 24  # answers between the levels that are looked at
_TRIES = 2  # of plans between one that fits and one that does not
_WORTH = 0.01  # of a step's time: what a plan between has to bring


def certified(plan: Plan, budget: float, options: Any, progress: Callable[[str], None], *, must: bool) -> Plan:
    """``plan``, or one with less memory, that the target's compiler fits into ``budget`` bytes.

    Args:
      must: raise where there is no compiler, instead of a note on the plan.

    Raises:
      InfeasibleError: after ``MAX_ROUNDS`` compilations, that of the leanest plan, and on TPU up to two under a limit, it still does not
        fit; with the compiler's numbers.
    """
    tried: list[str] = []
    over: list[tuple[Plan, float]] = []  # what did not fit, and what it needed
    told: dict[Plan, Plan | None] = {}  # what came of telling the compiler
    for number in range(1, MAX_ROUNDS + 2):
        try:
            needed, compiler = _needs(plan)
        except (TargetError, aot.CompilerFailure) as error:
            if must:
                raise
            return _with(plan, notes=(*plan.notes, f"not certified: {error}"))
        if needed <= budget:
            fitting = _with(plan, certificate=Certificate(compiler, needed, budget, number), budget_bytes=budget)
            return _richer(fitting, over[-1], options, progress) if over and number != MAX_ROUNDS else fitting
        if not over and _fits_without_gaps(plan, budget):
            packed = told[plan] = _limited(plan, budget, number + 1, progress)
            if packed is not None and _seconds(packed) <= _seconds(plan) * (1 + _WORTH):
                return packed
        over.append((plan, needed))
        tried.append(f"{_mib(needed)} for a plan estimated at {_mib(plan.estimate.peak_memory)}")
        if number > MAX_ROUNDS:
            break
        progress(f"the compiler needs {_mib(needed)} of {_mib(budget)}: planning again")
        leaner = _leaner(plan, budget / needed * (1 - _SLACK) if number < MAX_ROUNDS else _LEANEST, options, progress)
        if leaner is None:
            break
        plan = leaner
    leanest, most = min(over, key=lambda o: o[0].estimate.peak_memory)
    for make in (lambda: _otherwise(over[0][0], over[0][0], budget), lambda: _otherwise_near(leanest, most, options, progress)):
        other = make()
        if other is None or any(_same(other, plan) for plan, _ in over):
            continue  # nothing is compiled twice
        fitting, needed = _fitted(other, budget, len(tried) + 1)
        if fitting is not None:
            return fitting
        over.append((other, needed))
        tried.append(f"{_mib(needed)} for a plan estimated at {_mib(other.estimate.peak_memory)}")
    nearest, needed = min(over, key=lambda o: o[1])
    limited = told[nearest] if nearest in told else _limited(nearest, budget, len(tried) + 1, progress)
    if limited is not None:
        return limited
    least = _room(nearest, needed, len(tried) + 2, progress)
    raise InfeasibleError(
        f"no plan was found that the compiler fits into {_mib(budget)} of {plan.target}: in {len(tried)} rounds "
        f"it needed {', then '.join(tried)}. "
        f"Raise memory_budget: to {size(least, up=True)} at least; or plan with certify=False to get the plan all the same.",
        least,
    )


def least_told(error: InfeasibleError, step: Any, target: Target, options: Any, progress: Callable[[str], None]) -> InfeasibleError:
    """``error``, raised by the search, with what the compiler needs for the leanest plan, if that is more than the estimate."""
    from jaxauto.planner import solve

    if error.least_bytes is None:
        return error
    progress("compiling the leanest plan")
    try:
        leanest = solve(step, target, error.least_bytes * (1 + _ROUNDING), options, progress)
        needed, _ = _needs(leanest)
        room = _room(leanest, needed, 2, progress)
    except (InfeasibleError, TargetError, aot.CompilerFailure):
        return error
    with contextlib.suppress(InfeasibleError, TargetError, aot.CompilerFailure):  # what was seen to fit stays so
        other = _otherwise_near(leanest, needed, options, progress)
        if other is not None:
            room = min(room, max(_needs(other)[0], other.estimate.peak_memory))
    if room <= error.least_bytes:
        return error
    return InfeasibleError(f"{error} For that plan the compiler needs {size(room, up=True)}.", room)


def _otherwise(searched: Plan, plan: Plan, budget: float) -> Plan | None:
    """The leanest answer of the search that ``searched`` came of with scans split where ``plan`` splits none, or none where it does."""
    from jaxauto.planner import plan_for

    solved, splits = searched._bound().solved, bool(plan.decisions.splits)
    found = [c for c in solved.fitting if bool(c.variant.level.splits) != splits and c.peak_bytes <= budget]
    leanest = min(found, key=lambda c: (c.peak_bytes, c.seconds), default=None)
    return plan_for(solved, leanest, budget, solved.options) if leanest is not None else None


def _otherwise_near(leanest: Plan, needed: float, options: Any, progress: Callable[[str], None]) -> Plan | None:
    """``_otherwise`` of the search for little more than ``leanest`` takes: the least that users are told of may be what that needs."""
    from jaxauto.planner import solve

    solved, least = leanest._bound().solved, leanest.estimate.peak_memory
    most = min(needed, least * (1 + _APART))
    try:
        near = solve(solved.step, solved.target, most, options, progress) if most > least * (1 + _SAME) else leanest
    except InfeasibleError:
        return None
    return _otherwise(near, leanest, most)


def _same(one: Plan, other: Plan) -> bool:
    """Whether the compiler would be asked for the same program."""
    return all(getattr(one, what) == getattr(other, what) for what in ("decisions", "specs", "estimate", "mesh"))


def _room(plan: Plan, needed: float, number: int, progress: Callable[[str], None]) -> float:
    """Bytes that the compiler is seen to fit ``plan`` into, which takes ``needed`` if not told: fewer, where it can close gaps."""
    compilation = plan.__dict__.get("compilation")
    tight = compilation.peak_bytes / (1 - _SLACK) if compilation is not None else needed
    return tight if tight < needed and _limited(plan, tight, number, progress) is not None else needed


def _fits_without_gaps(plan: Plan, budget: float) -> bool:
    """Whether what lives at the peak of the compiled plan fits, without the gaps in the compiler's heap."""
    compilation = plan.__dict__.get("compilation")
    return compilation is not None and compilation.peak_bytes <= budget * (1 - _SLACK)


def _seconds(plan: Plan) -> float:
    """Of a compiled plan, by the roofline of its schedule."""
    return schedule_of(plan, hlo.parse(compile_plan(plan).text)).total_seconds


def _limited(plan: Plan, budget: float, number: int, progress: Callable[[str], None]) -> Plan | None:
    """``plan`` by a compiler that is told of the budget and makes the rest of the room by itself; None if it cannot, or takes no limit."""
    if not memory_limit(Target(plan.target).chip.platform, budget):
        return None
    progress(f"telling the compiler that it has {_mib(budget)}")
    note = "the compiler is told of the memory budget, and makes room by itself: the step may take longer than estimated"
    told = replace(plan, certificate=Certificate("", 0.0, budget, number, limit_bytes=budget), notes=(*plan.notes, note))
    return _fitted(told, budget, number)[0]


def _fitted(plan: Plan, budget: float, number: int) -> tuple[Plan | None, float]:
    """(``plan`` with the certificate of round ``number``, None if the compiler does not fit it into ``budget`` bytes; what it needs)"""
    try:
        needed, compiler = _needs(plan)
    except aot.CompilerFailure:
        return None, math.inf
    limit = plan.certificate.limit_bytes if plan.certificate is not None else 0.0
    certificate = Certificate(compiler, needed, budget, number, limit)
    return (_with(plan, certificate=certificate, budget_bytes=budget) if needed <= budget else None), needed


def _richer(plan: Plan, over: tuple[Plan, float], options: Any, progress: Callable[[str], None]) -> Plan:
    """A faster plan between the certified ``plan`` and one that was over, if the compiler fits it into the budget; else ``plan``."""
    certificate = plan.certificate
    assert certificate is not None
    budget, least = certificate.budget_bytes, plan.estimate.peak_memory
    for number in range(1, _TRIES + 1):
        large, needed = over
        most = large.estimate.peak_memory
        slack = 0.0 if number == 1 else _SLACK  # what lies between two that were seen needs none, until one there was over
        share = (budget * (1 - slack) - certificate.bytes_) / (needed - certificate.bytes_)
        if share <= 0 or plan.estimate.step_time * (1 - _WORTH) <= large.estimate.step_time:
            return plan
        found = _leaner(large, (least + share * (most - least)) / most, options, progress)
        if found is None or found.estimate.step_time > plan.estimate.step_time * (1 - _WORTH):
            return plan
        progress(f"the compiler needs {_mib(certificate.bytes_)} of {_mib(budget)}: trying a faster plan")
        faster, needed = _fitted(found, budget, certificate.rounds + number)
        if faster is not None:
            return faster
        over = found, needed
    return plan


def _leaner(plan: Plan, share: float, options: Any, progress: Callable[[str], None]) -> Plan | None:
    """A plan with at most ``share`` of this one's memory, or the leanest there is; None if this is it."""
    from jaxauto.planner import plan_of, solve  # the planner certifies, and certifying plans again

    solved = plan._bound().solved
    before = plan.estimate.peak_memory
    known = [c for c in (*solved.fitting, *between(solved, options, _BETWEEN)) if c.peak_bytes <= before * share]
    near = min(known, key=lambda c: (c.seconds, c.peak_bytes), default=None)
    try:
        leaner = solve(solved.step, solved.target, before * share, options, progress)
    except InfeasibleError as error:
        if near is not None:
            return plan_of(plan, near, before * share, options)
        least = math.inf if error.least_bytes is None else error.least_bytes
        most = min(least * (1 + _SLACK), before * (1 - _SAME))
        if share <= _LEANEST or least > most:
            most = least * (1 + _ROUNDING)
        if most >= before:
            return None
        try:
            return solve(solved.step, solved.target, most, options, progress)
        except InfeasibleError:
            return None
    if near is not None and near.seconds < leaner.estimate.step_time:
        return plan_of(plan, near, before * share, options)
    return leaner


def _needs(plan: Plan) -> tuple[float, str]:
    """(bytes on one device, compiler); a program that the compiler refuses for its size counts with what it asked for."""
    try:
        compilation: Compilation = compile_plan(plan)
    except aot.CompilerOutOfMemory as error:
        return float(error.needed_bytes), plan.target
    return compilation.device_bytes, compilation.compiler


def _with(plan: Plan, **changes: Any) -> Plan:
    changed = replace(plan, **changes)
    made = ("compilation", "_compiled", "_flat_jit")  # compiled once is enough
    changed.__dict__.update({k: plan.__dict__[k] for k in made if k in plan.__dict__})
    return changed


def _mib(bytes_: float) -> str:
    return f"{bytes_ / 2**20:,.1f} MiB"
