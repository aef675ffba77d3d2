"""Answers of the search on one mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxauto.solve.model import Model
from jaxauto.solve.remat import Variant


@dataclass(eq=False)
class Candidate:
    """One way to run the step on one mesh. ``seconds``: T(x); ``peak_bytes``: the largest live bytes of the program on one device."""

    model: Model
    x: np.ndarray
    seconds: float
    peak_bytes: float
    level: int

    @property
    def variant(self) -> Variant:
        return self.model.variant


@dataclass(eq=False)
class Found:
    """The result of a search: the best candidate that fits (or None), the leanest seen, what it took, all that fit.

    ``bound``: on T for every sharding of this mesh with a level of rematerialisation that was searched (not for those never tried).
    """

    best: Candidate | None
    leanest: Candidate
    bound: float
    seconds_spent: dict[str, float] = field(default_factory=dict)
    variables: int = 0
    constraints: int = 0
    status: str = "optimal"
    fitting: list[Candidate] = field(default_factory=list)


def least_of_each(candidates: Sequence[Candidate], key: Callable[[Candidate], Any]) -> list[Candidate]:
    """The fastest candidate for each value of ``key``, fastest first."""
    found: dict[Any, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.seconds):
        found.setdefault(key(candidate), candidate)
    return list(found.values())


def fastest_of_first(candidates: Iterable[Candidate], patience: int) -> Candidate | None:
    """The fastest of the first ones, up to where ``patience`` of them in a row were no better; None: there are none."""
    best, waited = None, 0
    for candidate in candidates:
        if best is None or candidate.seconds < best.seconds:
            best, waited = candidate, 0
        elif (waited := waited + 1) == patience:
            break
    return best
