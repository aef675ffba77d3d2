"""Cuts of a chain: they fit, take as long as told, and no other cut is faster."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxauto.solve import rotor

MEMORY = 24


def pairs(trips, kept, made, seconds):
    """L of chains whose trips keep ``kept`` units each, and need ``made`` more while one goes backward."""
    count, memory = np.arange(trips + 1)[:, None], np.arange(MEMORY)
    return np.where(count * kept + made <= memory, seconds * count, math.inf)


def measured(parts, forward, each, carry, kept, made, made_again, seconds, *, begun=True, again=False):
    """(units of memory, seconds) of a cut, as the schedule runs; ``begun``: what a first part begins with is there anyway."""
    held = most = total = 0
    for k, part in enumerate(parts):
        if part.inside:
            held += 0 if k == 0 and begun else carry
            need, more = measured(part.inside, forward, each, carry, kept, made, made_again, seconds, again=True)
            total += part.trips * forward + each + more
        else:
            held += part.trips * kept
            need, total = made_again if again else made, total + seconds * part.trips
        most = max(most, held + need)
    return most, total


costs = st.fixed_dictionaries(
    {
        "forward": st.integers(1, 5),
        "each": st.sampled_from([0.0, 0.25]),
        "carry": st.integers(0, 3),
        "kept": st.integers(1, 3),
        "made": st.integers(0, 3),
        "made_again": st.integers(0, 4),
        "seconds": st.integers(0, 4),
    }
)


@st.composite
def any_cut(draw, trips, depth=0):
    """Parts of ``trips``, the last of them a pair of loops."""
    parts = []
    while trips > 1 and depth < 3 and draw(st.booleans()):
        first = draw(st.integers(1, trips - 1))
        parts.append(rotor.Part(first, 0, draw(any_cut(first, depth + 1))))
        trips -= first
    return (*parts, rotor.Part(trips, 0))


def cut(trips, c, least=1):
    whole, again = (pairs(trips, c["kept"], made, c["seconds"]) for made in (c["made"], c["made_again"]))
    return rotor.cut(whole, again, c["forward"], c["each"], c["carry"], least)


@settings(max_examples=60, deadline=None)
@given(trips=st.integers(1, 14), memory=st.integers(1, MEMORY - 1), c=costs, least=st.integers(1, 2))
def test_a_cut_fits_and_takes_as_long_as_told(trips, memory, c, least):
    cuts = cut(trips, c, least)
    if math.isinf(cuts.seconds[memory]):
        return
    parts = cuts.parts(memory)
    need, seconds = measured(parts, **c)
    assert sum(part.trips for part in parts) == trips and need <= memory and seconds == pytest.approx(cuts.seconds[memory])

    def check(parts):
        assert len(parts) == 1 or all(part.trips >= least for part in parts)
        assert all(sum(p.trips for p in part.inside) == part.trips for part in parts if part.inside)
        for part in parts:
            check(part.inside)

    check(parts)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), trips=st.integers(1, 14), c=costs)
def test_no_cut_is_faster(data, trips, c):
    need, seconds = measured(data.draw(any_cut(trips)), **c)
    if need < MEMORY:
        assert cut(trips, c).seconds[need] <= seconds + 1e-9


@pytest.mark.parametrize("trips", [5, 9, 16])
def test_rotor_in_its_own_terms(trips):
    """Where pairs of loops are one trip, a carry is one slot and none is for what the last trip begins with: theorem 1 without results
    that stay (in a scan those are trips that keep all)."""

    @functools.cache
    def optimum(first, last, slots):
        if first == last or slots < 1:
            return 0 if first == last and slots >= 0 else math.inf
        return min(k - first + optimum(k, last, slots - 1) + optimum(first, k - 1, slots) for k in range(first + 1, last + 1))

    once = np.full((trips + 1, trips), math.inf)
    once[1] = 0
    seconds = rotor.cut(once, once, 1.0, 0.0, 1).seconds
    assert seconds.tolist() == [optimum(0, trips - 1, slots) for slots in range(1, trips + 1)]
