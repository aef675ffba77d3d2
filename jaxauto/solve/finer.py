"""Answers between the levels of rematerialisation, sharded as one that was found.

The search tries a few levels (``remat.py``), far apart in memory. Between and around them are the thresholds at which some one residual
goes: with the shardings of the best answer, each is one more answer, at the cost of its tables. And of state all or none is in the host's
memory; between are shares of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jaxauto.solve.candidate import Candidate
from jaxauto.solve.live import timeline
from jaxauto.solve.model import Model
from jaxauto.solve.remat import Kept, Level, Remat, Variant, kept_at

SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # of the state, in the host's memory
_LARGE = 0.01  # of all residual bytes: what goes between two answers that differ


def finer(remat: Remat, base: Candidate, model_of: Callable[[Variant], Model], known: set[Level], count: int) -> list[Candidate]:
    """Up to ``count`` answers that keep a little more or less than ``base``, nearest first.

    Args:
      known: levels of answers that need not be made again; what is made is added.
    """
    found: list[Candidate] = []
    for kept in _around(remat, base.variant.kept):
        if len(found) == count:
            break
        level = replace(base.variant.level, kept=kept)
        if level in known:
            continue
        known.add(level)
        model = model_of(remat.variant(level))
        found.append(Candidate(model, base.x, model.problem.seconds(base.x), float(timeline(model, base.x).max()), base.level))
    return found


def nearer(remat: Remat, found: Sequence[Candidate], keeping: Callable[[Candidate, Kept, frozenset[int]], Candidate]) -> list[Candidate]:
    """Answers like the fastest and the leanest of ``found`` that have state in the host's memory, with less of it there.

    Args:
      keeping: (answer, what blocks keep, what is in the host's memory) → the answer sharded alike.
    """
    state = remat.state(1.0)
    away = [c for c in found if c.variant.offloaded & state]
    bases = dict.fromkeys(min(away, key=key) for key in (lambda c: c.seconds, lambda c: c.peak_bytes)) if away else ()
    shares = dict.fromkeys(remat.state(share) for share in SHARES)
    return [keeping(c, c.variant.kept, c.variant.offloaded - state | part) for c in bases for part in shares]


def _around(remat: Remat, kept: tuple) -> Iterator[tuple]:
    """What all blocks keep at thresholds below and above those of ``kept``, nearest first."""
    steps = _steps(remat)
    bytes_ = [_kept_bytes(remat, k) for k in steps]
    here = _kept_bytes(remat, kept)
    yield from (steps[k] for k in sorted(range(len(steps)), key=lambda k: abs(bytes_[k] - here)))


def _steps(remat: Remat) -> list[tuple]:
    """What blocks keep at each threshold, from all to nothing; steps of few bytes are taken together."""
    found: list[tuple] = []
    for drops in (remat.drops, *remat.other_drops):
        prices = sorted({d.price for block in drops for d in block})
        enough = _LARGE * sum(d.bytes_ for block in drops for d in block)
        dropped = 0.0
        for price in prices:
            dropped += sum(d.bytes_ for block in drops for d in block if d.price == price)
            if dropped >= enough:
                found.append(kept_at(drops, price))
                dropped = 0.0
    return list(dict.fromkeys(found))


def _kept_bytes(remat: Remat, kept: tuple) -> float:
    """Of what can be dropped, unsharded."""
    total = 0.0
    for block, drops, keep in zip(remat.blocks, remat.drops, kept, strict=True):
        values = block.graph.values
        total += sum(d.bytes_ for d in drops) if keep is None else sum(values[v].nbytes * block.count for v in keep)
    return total
