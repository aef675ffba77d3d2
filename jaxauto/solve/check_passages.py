"""``cost/reshard.py`` for one array, in scalars: the collectives that bring it from one place to another (see ``check.py``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set

from jaxauto.core import MeshAxes
from jaxauto.cost.collectives import collective_seconds
from jaxauto.strategies import WHOLE

_SUMS = ("all-reduce", "reduce-scatter")

Where = tuple[int, ...]  # for each mesh axis the dimension that it splits, or WHOLE


class Passages:
    """On one mesh."""

    def __init__(self, mesh: MeshAxes):
        self.mesh, self.sizes = mesh, mesh.sizes
        self.seen: dict[tuple, tuple[float, float]] = {}  # what was met before

    def pieces(self, where: Where) -> int:
        """Into how many parts an array is cut."""
        return self.count(a for a, d in enumerate(where) if d != WHOLE)

    def seconds(
        self,
        here: Where,
        there: Where,
        bytes_: float,
        partial: frozenset[int] = frozenset(),
        *,
        beside: bool = False,
        together: int = 1,
    ) -> tuple[float, float]:
        """Seconds of the collectives of one passage: (that may hide, that are waited for); the table in ``reshard.py``."""
        if here == there and not partial:
            return 0.0, 0.0
        key = (here, there, bytes_, partial, beside, together)
        if key not in self.seen:
            hidden = waited = 0.0
            for kind, amount, axes in self.collectives(here, there, bytes_, partial):
                merged = self.merged(kind, axes, here, there)
                waits = merged or (kind == "all-to-all" and self.mesh.windows is not None)
                if self.mesh.windows and kind in _SUMS:
                    waits = not beside
                sizes, links = [self.sizes[a] for a in axes], [self.mesh.links[a] for a in axes]
                if beside and self.mesh.windows and kind in _SUMS:
                    amount *= (self.count(axes) + 1) / (self.count(axes) - 1)
                written = "all-reduce" if merged and waits else kind
                count = together if waits and written == "all-reduce" else 1
                seconds = float(collective_seconds(written, count * amount, sizes, links)) / count
                hidden, waited = hidden + seconds * (not waits), waited + seconds * waits
            self.seen[key] = hidden, waited
        return self.seen[key]

    def merged(self, kind: str, axes: Sequence[int], here: Where, there: Where) -> bool:
        """Whether the compiler writes it as an all-reduce."""
        mesh = self.mesh
        if kind == "reduce-scatter" and not self.under(axes, here, there) and mesh.windows and len({there[a] for a in axes}) > 1:
            return True
        whole = {"all-gather": mesh.sums_whole, "reduce-scatter": mesh.sums_whole or mesh.scatters_whole}
        return whole.get(kind, False) and self.over_all(axes)

    def over_all(self, axes: Sequence[int]) -> bool:
        return all(n == 1 or a in axes for a, n in enumerate(self.sizes))

    def collectives(self, here: Where, there: Where, bytes_: float, partial: frozenset[int]) -> Iterator[tuple[str, float, list[int]]]:
        """(kind, bytes of the full array on the group, axes) in the order that they run."""
        axes = range(len(self.sizes))
        local = bytes_ / self.pieces(here)
        scattered = [a for a in axes if a in partial and there[a] != WHOLE]
        under = self.under(scattered, here, there)
        summed, cut = sorted(partial), [a for a in axes if a not in partial and here[a] == WHOLE and there[a] != WHOLE]
        if under:
            once = self.mesh.scatters and self.cut_once(summed, here, there)
            yield "reduce-scatter" if once else "all-reduce", local, summed
            moved = sorted({*scattered, *under, *(a for a in axes if a not in partial and here[a] != there[a])})
            yield "collective-permute", bytes_ / max(self.pieces(here), self.pieces(there)) * self.count(moved), moved
            if self.pieces(there) < self.pieces(here):
                yield from self.gathers(here, there, local / self.count([*scattered, *cut]))
            return
        if scattered:
            yield "reduce-scatter" if self.mesh.scatters else "all-reduce", local, scattered
        local /= self.count([*scattered, *cut])
        summed = [a for a in summed if there[a] == WHOLE]
        if summed:
            yield "all-reduce", local, summed
        swaps = [(a, b) for a in axes for b in cut if here[a] not in (WHOLE, there[a]) and here[a] == there[b]]
        old, new = ({pair[k] for pair in swaps} for k in (0, 1))
        joined = self.count(old) / self.count(new)  # old pieces in a new one
        exchanged = [a for a in axes if WHOLE not in (here[a], there[a]) and here[a] != there[a] and (a not in old or joined > 1)]
        for pair in sorted({(here[a], there[a]) for a in exchanged}):
            together = [a for a in exchanged if (here[a], there[a]) == pair]
            yield "all-to-all", local * self.count(together) / (self.count(new) if old & {*together} else 1), together
        turned = sorted({a for pair in self.turned(here, there) if not {*pair} & partial for a in pair} | old | new)
        grown = self.count(a for a in old if there[a] == WHOLE)
        if turned:
            yield "collective-permute", local * grown * self.count(turned), turned
        sent = joined <= 1  # what goes where others cut is there
        yield from self.gathers(here, there, local * (grown if sent else 1), old, 0.0 if sent else joined)

    def gathers(
        self, here: Where, there: Where, local: float, old: Set[int] = frozenset(), joined: float = 0.0
    ) -> Iterator[tuple[str, float, list[int]]]:
        """Of the axes that leave. ``old``: where others cut: they go on their own, or so many pieces of theirs are ``joined``."""
        leave = [a for a in range(len(self.sizes)) if here[a] != WHOLE and there[a] == WHOLE]
        gathers = [a for a in leave if a not in old or joined]
        together = self.mesh.sums_whole and self.over_all(gathers)
        for gathered in [gathers] if together else [[a for a in gathers if here[a] == d] for d in range(max(here) + 1)]:
            if gathered:
                local *= self.count(gathered)
                yield "all-gather", local * ((joined - 1) / (self.count(old) - 1) if old & {*gathered} else 1), gathered

    def under(self, scattered: Sequence[int], here: Where, there: Where) -> list[int]:
        """Axes on the minor side of one that joins their dimension as a sum is scattered over it."""
        return [b for b in range(len(here)) if any(a < b and there[a] == here[b] for a in scattered)]

    def cut_once(self, summed: Sequence[int], here: Where, there: Where) -> bool:
        """Whether the pieces of one dimension become as many more as a sum is over, and those of no other change."""
        change = {d: self.split(there, d) / self.split(here, d) for d in {*here, *there} - {WHOLE}}
        return [n for n in change.values() if n != 1] == [self.count(summed)]

    def split(self, where: Where, dim: int) -> int:
        return self.count(a for a, d in enumerate(where) if d == dim)

    def turned(self, here: Where, there: Where) -> Iterator[tuple[int, int]]:
        """(axis that comes or goes, minor axis that stays, or is cut where it comes) on one dimension: its pieces change places."""
        for minor in range(len(self.sizes)):
            for major in range(minor):
                stays = here[minor] == there[minor] != WHOLE
                if here[minor] == WHOLE != there[minor] == there[major] and here[major] not in (WHOLE, there[major]):
                    yield major, minor
                if stays and here[major] != there[major] and here[minor] in (here[major], there[major]):
                    yield major, minor

    def count(self, axes: Iterable[int]) -> int:
        return math.prod(self.sizes[a] for a in axes)
