"""Levels of rematerialisation near the best answer's, by their bounds.

A threshold names few of all sets that blocks can keep (``remat.py``), and ``swaps.py`` judges the others with the sharding as it is: what
is dropped then is seconds lost, and the memory that it frees is worth nothing. But there may be a faster sharding in it. So another set is
judged by D(λ) of its level (``search.py``) at prices around the one where the level that was closed last has its bound: a level whose bound
is not below the best answer holds nothing better, and of the others the lowest are searched as any level is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxauto.solve.candidate import Candidate, Found
from jaxauto.solve.eliminate import eliminate
from jaxauto.solve.remat import Kept, Remat
from jaxauto.solve.swaps import crossings, swaps
from jaxauto.solve.tighten import TOLERANCE, priced_room

if TYPE_CHECKING:
    from jaxauto.solve.search import Search

_MOST = 64  # sets that are looked at
_VALUES = 6_000  # that are rewritten for them in all: fewer sets of a large program
_PRICES = (0.25, 1.0, 4.0)  # times the price at the end
_SEARCHED, _LARGE = 8, 2_000  # levels around one answer, and values in all of them


class Tries:
    """``left``: sets that may still be looked at. ``searched``: levels around one answer, at the most. ``known``: sets that were seen."""

    def __init__(self, remat: Remat):
        values = len(remat.graph.values)
        self.left, self.searched = min(_MOST, _VALUES // values), min(_SEARCHED, _LARGE // values)
        self.known: set[tuple[Kept, frozenset[int]]] = set()


def look_around(search: Search, found: Found, budget_bytes: float, tries: Tries) -> bool:
    """Whether levels were added to the search, and what fits of them to ``found``: around the best answer, and on from what is better."""
    whole = [c for c in found.fitting if not c.variant.level.splits and c.variant.level in search.levels]
    assert found.best is not None
    if not search.remat.quick or len(search.levels) < 2 or not search.price or not whole or found.best.seconds >= search.rival:
        return False
    before = len(search.levels)
    centre: Candidate | None = min(whole, key=lambda c: c.seconds)
    waiting: list[tuple[float, Candidate]] = []  # lowest bound first; those around a centre that was left too, which are not offered again
    while centre is not None:
        waiting = sorted([*waiting, *_promising(search, found, centre, budget_bytes, tries)], key=lambda offer: offer[0])
        centre = None
        for _ in range(tries.searched):
            if not waiting or waiting[0][0] >= found.best.seconds * (1 - TOLERANCE):
                break
            _, like = waiting.pop(0)
            fits = search.anew(like, search.levels, budget_bytes)
            found.fitting += fits
            fastest = min([found.best, *fits], key=lambda c: c.seconds)
            if fastest.seconds < found.best.seconds * (1 - TOLERANCE):
                found.best = centre = fastest
                break
    found.bound = min(search.bounds.values())
    return len(search.levels) > before


def _promising(search: Search, found: Found, centre: Candidate, budget_bytes: float, tries: Tries) -> Iterator[tuple[float, Candidate]]:
    """(bound, an answer) of levels that may hold something better: what other levels keep of some blocks, then one value more or less."""
    assert found.best is not None
    kept, away = centre.variant.kept, centre.variant.offloaded
    tries.known |= {(level.kept, level.offloaded) for level in search.levels}
    for other in (
        *crossings(search.remat, kept, [level.kept for level in search.levels]),
        *(s.kept for s in swaps(search.remat, kept, away)),
    ):
        if not tries.left or (other, away) in tries.known or search.out_of_time():
            continue
        tries.left -= 1
        tries.known.add((other, away))
        like = search.mixer.keeping(centre, other, away)
        bound = _bound(search, like, budget_bytes)
        if bound < found.best.seconds * (1 - TOLERANCE):
            yield bound, like


def _bound(search: Search, like: Candidate, budget_bytes: float) -> float:
    """On T of all answers of its level that fit."""
    problem, bound = like.model.problem, 0.0
    assert search.price is not None
    for times in _PRICES:
        prices = dict.fromkeys(range(len(problem.rows)), times * search.price / len(problem.rows))
        answer = eliminate(*problem.priced(1.0, prices))
        bound = max(bound, answer.bound + priced_room(problem, budget_bytes, prices))
        search.candidate(like.model, answer.x, like.level)  # its peak is a row from here on
    return bound
