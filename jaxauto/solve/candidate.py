"""Answers of the search on one mesh."""

from __future__ import annotations

from dataclasses import dataclass, field

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
