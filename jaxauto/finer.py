"""Answers between the levels of rematerialisation, sharded as one that was found.

The search tries a few levels (``solve/remat.py``), far apart in memory. Between and around them are the thresholds at which some one
residual goes: with the shardings of the best answer, each is one more answer, at the cost of its tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jaxauto.solve.live import timeline
from jaxauto.solve.model import Model
from jaxauto.solve.search import QUICK, Candidate

_LARGE = 0.01  # of all residual bytes: what goes between two answers that differ


def finer(solved: Any, base: Candidate, allowed: Any, count: int) -> list[Candidate]:
    """Up to ``count`` answers that keep a little more or less than ``base``, nearest first; of a large program a sixth of that or fewer.

    Args:
      solved: what the search knew (``planner.Solved``). allowed: what users' constraints leave, as ``base`` was searched with.
    """
    remade = base.variant.remade
    known = {c.variant.kept for c in solved.fitting if (c.model.mesh, c.variant.remade) == (base.model.mesh, remade)} | {base.variant.kept}
    found: list[Candidate] = []
    size = len(solved.remat.graph.values)
    if size > QUICK:
        count = min(math.ceil(count / 6), math.ceil(count * QUICK / size))
    for kept in _around(solved.remat, base.variant.kept):
        if len(found) == count:
            break
        if kept in known:
            continue
        known.add(kept)
        old = base.model
        model = Model(old.program, solved.remat.variant(kept, base.variant.offloaded, remade), old.mesh, old.chip, allowed, old.cache)
        peak = float(timeline(model, base.x).max())
        found.append(Candidate(model, base.x, model.problem.seconds(base.x), peak, base.level))
    return found


def _around(remat: Any, kept: tuple) -> Iterator[tuple]:
    """What all blocks keep at thresholds below and above those of ``kept``, nearest first."""
    steps = _steps(remat)
    bytes_ = [_kept_bytes(remat, k) for k in steps]
    here = _kept_bytes(remat, kept)
    yield from (steps[k] for k in sorted(range(len(steps)), key=lambda k: abs(bytes_[k] - here)))


def _steps(remat: Any) -> list[tuple]:
    """What blocks keep at each threshold, from all to nothing; steps of few bytes are taken together."""
    prices = sorted({d.price for drops in remat.drops for d in drops})
    enough = _LARGE * sum(d.bytes_ for drops in remat.drops for d in drops)
    found: list[tuple] = []
    dropped = 0.0
    for price in prices:
        dropped += sum(d.bytes_ for drops in remat.drops for d in drops if d.price == price)
        if dropped >= enough:
            found.append(remat.kept_at(price))
            dropped = 0.0
    return found


def _kept_bytes(remat: Any, kept: tuple) -> float:
    """Of residuals that can be dropped, unsharded."""
    return sum(d.bytes_ for drops, keep in zip(remat.drops, kept, strict=True) for d in drops if keep is None or d.value in keep)
