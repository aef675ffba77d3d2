"""Answers whose blocks keep unalike, sharded as one that was found: by the chain's dynamic programme (``chain.py``)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from jaxauto.solve.candidate import Candidate
from jaxauto.solve.chain import Option, least_budget, solve_chain
from jaxauto.solve.choices import choices
from jaxauto.solve.model import Model
from jaxauto.solve.remat import Kept, Level, Splits
from jaxauto.solve.tighten import TOLERANCE
from jaxauto.strategies import shards

if TYPE_CHECKING:
    from jaxauto.solve.search import Search

_ROOMS = (1.02, 1.05)  # times the least memory so far: what blocks may fill where less is sought by unalike ones
_MIXES = 8  # choices of a chain that are tried, each for less room; half as many for a large program


class Mixer:
    """Of one search."""

    def __init__(self, search: Search):
        self.search = search
        self.known: dict[tuple, Candidate] = {}  # bases that are sharded alike lead to the same answers

    def splitting(self, levels: Sequence[Level]) -> tuple[bool, ...]:
        """Whether to mix without splits, and with them."""
        return (False, True) if self.search.remat.splittable and len(levels) > 1 else (False,)

    def mixtures(
        self,
        best: Candidate,
        levels: list[Level],
        budget_bytes: float,
        *,
        waiting: bool = False,
        splitting: bool = False,
        faster_than: float = math.inf,
    ) -> Iterator[Candidate]:
        """Each block keeps as much as some room allows, by the chain's dynamic programme: what fits, for less room each time.

        The programme's seconds are those of blocks one by one: what is best of little room can be faster than what is best of more.

        Args:
          waiting: transfers to the host's memory hide behind nothing.
          splitting: scans can be split (``segments.py``).
          faster_than: seconds; what the programme does not tell to be faster is not tried.
        """
        if best.level == 0 or not self.search.remat.blocks:
            return
        options = self.options(best, levels, waiting=waiting, splitting=splitting)
        held = sum(o[best.level].kept_bytes for o in options) + max(o[best.level].peak_bytes for o in options)
        most = sum(max(o.kept_bytes + o.peak_bytes for o in block) for block in options)
        room, least = min(budget_bytes - best.peak_bytes + held, most), least_budget(options)
        others = best.seconds - sum(o[best.level].seconds for o in options)
        tries = _MIXES if self.search.remat.quick else _MIXES // 2
        for left in range(tries, 0, -1):
            answer = solve_chain(options, room)
            if answer is None or answer.seconds + others >= faster_than * (1 - TOLERANCE):
                return
            mixed = self.mixture(best, options, answer.choice)
            over = mixed.peak_bytes - budget_bytes
            if over <= 0:
                yield mixed
            step = over if over > 0 else (room - least) / left
            room = min(room - step, max(answer.peak_bytes) * (1 - TOLERANCE))  # another choice each time

    def mixture(self, base: Candidate, options: Sequence[Sequence[Option]], choice: Sequence[int]) -> Candidate:
        """The sharding of ``base`` with block ``b`` kept as ``options[b][choice[b]]`` says."""
        chosen = [options[b][c].what for b, c in enumerate(choice)]
        offloaded = frozenset().union(base.variant.offloaded & self.search.remat.state(1.0), *(keep.offloaded for keep in chosen))
        splits = tuple((b, keep.parts) for b, keep in enumerate(chosen) if keep.parts)
        return self.keeping(base, tuple(keep.kept for keep in chosen), offloaded, splits)

    def keeping(self, base: Candidate, kept: Kept, offloaded: frozenset[int], splits: Splits | None = None) -> Candidate:
        """The sharding of ``base`` where blocks keep something else; scans that are split run again in no other way.

        ``splits``: None: as ``base`` has them, of which those trips keep something else that keep what the first ones do.
        """
        level = base.variant.level
        if splits is None:
            splits = tuple((b, tuple(p.keeping(level.kept[b], kept[b]) for p in parts)) for b, parts in level.splits)
        apart = {y for b, _ in splits for node in (self.search.remat.blocks[b].scan or ())[:1] for y in node.outputs}
        remade = frozenset((v, depth) for v, depth in level.remade if v not in apart)
        level = replace(level, kept=kept, offloaded=offloaded, remade=remade, splits=splits)
        key = level, base.level, base.x.tobytes()
        if key not in self.known:
            self.known[key] = self.search.candidate(self.search.model(self.search.remat.variant(level)), base.x, base.level)
        return self.known[key]

    def options(self, base: Candidate, levels: list[Level], *, waiting: bool = False, splitting: bool = False) -> list[list[Option]]:
        """For each block what it costs under each level, with the shardings of ``base``; see ``mixtures``."""
        pieces = self.pieces(base)
        link = self.search.chip.host_bandwidth if waiting else None
        models = ((n, self._model_of(n, levels[n], base.x)) for n in (base.level, *range(len(levels))))
        whole = {n: model.problem.seconds(base.x) for n, model in models if model is not None}
        return choices(self.search.remat, levels, pieces, link, splitting=splitting, whole=whole)

    def pieces(self, base: Candidate) -> Callable[[int], float]:
        """Value → in how many pieces it lies on the mesh, sharded as ``base`` is."""
        return functools.cache(lambda number: float(shards(base.model.position(base.x, number)[None], self.search.mesh.sizes)[0]))

    def _model_of(self, number: int, level: Level, x: np.ndarray) -> Model | None:
        """Of a level that was looked at under this number, if it has the decisions of ``x``."""
        model = self.search.models.get(number)
        return model if model is not None and model.variant.level == level and len(model.problem.sizes) == len(x) else None

    def leaner(self, leanest: Candidate, levels: list[Level], budget_bytes: float) -> Candidate:
        """Blocks mixed for less memory: where one keeps what it can, what makes that again need not live while it goes backward.

        Where scans can be split (``segments.py``), for the budget first. Of those that fit the fastest.
        """
        over = lambda c: c.peak_bytes > budget_bytes  # noqa: E731
        best = start = leanest
        goals = [(budget_bytes, True)] * (True in self.splitting(levels))
        goals += [(room * leanest.peak_bytes, False) for room in _ROOMS if self.search.remat.quick]
        for goal, splitting in goals if over(leanest) else ():
            mixed = next(self.mixtures(start, levels, goal, waiting=splitting, splitting=splitting), None)
            if mixed is not None:
                best = min(best, mixed, key=lambda c: (over(c), c.peak_bytes if over(c) else c.seconds))
                start = best if over(best) else start
        return best
