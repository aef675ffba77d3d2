"""Sharding and rematerialisation together, on one mesh.

For each level of rematerialisation (``remat.py``) the sharding problem is solved under the memory budget; the best (level, sharding) is
refined block by block by the chain's dynamic programme, and the sharding by a MILP over the states near it.

Under a budget M with multipliers λ_r ≥ 0 on memory rows and μ ∈ [0, 1] on overlap, the dual                        ``_priced``

    D(λ, μ) = min_x [ μ(C(x) + εP(x)) + (1 − μ)(P(x) + εC(x)) + K(x) + Σ_r λ_r (bytes_r(x) − M) ]  ≤  min { T(x) : bytes_r(x) ≤ M ∀ r }

is one elimination (``eliminate.py``); its minimiser is a candidate, its value a lower bound. λ is raised until the candidate fits and
then bisected; the rows are the peaks that candidates show (cutting planes). What gap is left then is closed (``closing.py``). Answers
go down by single changes (``descend.py``); and so does what blocks keep (``swaps.py``), in the end by the bounds of other sets
(``around.py``). Where no level fits, what lies between blocks is
made again too (``nested.py``); and scans are cut into parts that keep unalike (``segments.py``), there and wherever blocks are mixed.

``look`` tries the levels; ``closer`` levels between them and a first mixture of blocks, which tells by a few per cent what a mesh comes to;
``refine`` does the rest.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxauto.core import MeshAxes
from jaxauto.solve.candidate import Candidate, Found, fastest_of_first, least_of_each
from jaxauto.solve.closing import close, finish
from jaxauto.solve.descend import descend
from jaxauto.solve.eliminate import eliminate
from jaxauto.solve.finer import SHARES, finer, nearer
from jaxauto.solve.live import timeline
from jaxauto.solve.mixing import Mixer
from jaxauto.solve.model import Model, Program
from jaxauto.solve.remat import Level, Remat, Variant
from jaxauto.solve.swaps import swapped
from jaxauto.solve.tighten import TOLERANCE, least_bytes, priced_room

_BISECTIONS = 3
_RAISES = 8
_LEAN = 8  # rounds in search of the least memory
_SPARING = 1.5  # times what fits: answers from which less memory is sought by mixing blocks
_FASTER, _MUCH = 0.98, 0.9  # times the seconds of what fits, and of an answer from which it is sought already: no others
_BESIDE = 3  # so many of them
_PRICES = (0.1, 1.0)  # of all memory that the step as written takes, in its seconds: shardings that take less of it
MU = (1.0, 0.5, 0.0)  # weights of compute against prefetching that the dual tries
_BASES = 12  # answers from which blocks are mixed
_MIXED = -1  # the number of the level whose blocks keep unalike
_PATIENCE = 2  # mixtures of blocks that are no better, before less room is given up
_CLOSER, _AROUND = 3, 24  # times that levels between are looked at, and how many of them
_FAR = 1.4  # times the seconds of the best answer: farther behind than what keeping all instead of nothing gains
BEHIND = 1.03  # times the seconds of an answer on another mesh: where more work does not catch up
_DESCENTS = 3  # each with the peak of the one before as a further row


class Search:
    """The search on one mesh; see the head of the file."""

    def __init__(
        self,
        program: Program,
        remat: Remat,
        mesh: MeshAxes,
        chip: Any,
        allowed: Mapping[int, np.ndarray],
        deadline: float,
        work: float = math.inf,
    ):
        """``work``: entries of tables that may be made to close the gap (``tighten.py``)."""
        self.program, self.remat, self.mesh, self.chip = program, remat, mesh, chip
        self.allowed, self.deadline, self.work = allowed, deadline, work
        self.rival = math.inf  # T of the best answer on other meshes
        self.cache: dict = {}
        self.levels: list[Level] = []
        self.bounds: dict[int, float] = {}
        self.models: dict[int, Model] = {}
        self.answers: dict[int, list[np.ndarray]] = defaultdict(list)
        self.fastest = math.inf  # seconds, with memory without end
        self.price: float | None = None  # of memory, seconds per byte: where the level before ended
        self.mixer = Mixer(self)
        self.written: list[np.ndarray] = []  # good shardings of the step as written where that does not fit

    def run(self, budget_bytes: float, levels: Sequence[Level]) -> Found:
        """The best answer under ``budget_bytes`` with ``levels`` of rematerialisation, levels between, and blocks that keep unalike."""
        found = self.look(budget_bytes, levels)
        self.closer(found, budget_bytes)
        self.refine(found, budget_bytes)
        return found

    def look(self, budget_bytes: float, levels: Sequence[Level]) -> Found:
        """Search all ``levels`` under ``budget_bytes``."""
        started = time.monotonic()
        levels = self.levels = list(levels)
        best: Candidate | None = None
        least: dict[bool, Candidate] = {}  # the leanest of those with something in the host's memory, and of the others
        fitting: list[Candidate] = []
        seen: list[Candidate] = []
        room = lambda: budget_bytes / least[False].peak_bytes if False in least else 1.0  # noqa: E731
        for number, level in enumerate(self._offered(fitting, levels, room)):
            if least and number < len(levels) - 1 and self.out_of_time():
                continue  # nothing fits yet: what time is left over for is the level that keeps least
            for candidate in self._offers(number, level, budget_bytes):
                seen.append(candidate)
                away = bool(candidate.variant.offloaded)
                least[away] = min(least.get(away, candidate), candidate, key=lambda c: c.peak_bytes)
                if candidate.peak_bytes <= budget_bytes:
                    fitting.append(candidate)
                    best = candidate if best is None or candidate.seconds < best.seconds else best
            if best is not None and self.out_of_time():
                break
        leanest = min(least.values(), key=lambda c: c.peak_bytes)
        bases = [least[False]] if best is not None else [least[False], leanest]
        for base in dict.fromkeys([*bases, *self._sparing(seen, best, max(budget_bytes, leanest.peak_bytes))]):
            mixed = self.mixer.leaner(base, levels, budget_bytes)
            if mixed is not base:
                self.models[_MIXED] = mixed.model
                leanest = min(leanest, mixed, key=lambda c: c.peak_bytes)
                if mixed.peak_bytes <= budget_bytes:
                    fitting += [mixed, *self.anew(mixed, levels, budget_bytes)]
        best = min(fitting, key=lambda c: c.seconds, default=None)
        found = Found(best, leanest, min(self.bounds.values()), {"search": time.monotonic() - started}, fitting=fitting)
        found.variables = sum(leanest.model.problem.sizes)
        return found

    def _sparing(self, seen: Sequence[Candidate], best: Candidate | None, fits: float) -> list[Candidate]:
        """Answers of somewhat more than ``fits`` bytes, each much faster than those before: the leanest may be slow beyond measure."""
        if self.mesh.num_devices == 1 or (best is not None and not self.remat.quick):
            return []
        front: list[Candidate] = []
        slowest = math.inf if best is None else _FASTER * best.seconds
        for candidate in sorted(seen, key=lambda c: c.peak_bytes):
            if candidate.peak_bytes <= _SPARING * fits and candidate.seconds < slowest:
                front.append(candidate)
                slowest = _MUCH * candidate.seconds
        return front[:_BESIDE]

    def closer(self, found: Found, budget_bytes: float) -> None:
        """Levels between those that ``look`` tried, and a first mixture of blocks, where anything fits."""
        if found.best is None:
            return
        started = time.monotonic()
        starts = least_of_each(found.fitting, lambda c: replace(c.variant.level, kept=()))
        for start in (c for c in starts if c.seconds <= _FAR * found.best.seconds):
            found.fitting += self._between(start, self.levels, budget_bytes)
        found.best = min(found.fitting, key=lambda c: c.seconds)
        self._mix(found, self._bases(found)[:1], 1, budget_bytes)
        found.seconds_spent["closer"] = time.monotonic() - started

    def take_up(self, found: Found, budget_bytes: float) -> None:
        """What its level comes to of an answer that was found for the sake of memory alone (``least.py``): the level is added."""
        assert found.best is not None
        level = found.best.variant.level
        self.levels.append(level)
        found.best = replace(found.best, level=len(self.levels) - 1)
        found.fitting = [c for c in self._offers(found.best.level, level, budget_bytes) if c.peak_bytes <= budget_bytes]
        found.fitting.append(found.best)
        found.best = min(found.fitting, key=lambda c: c.seconds)

    def _between(self, best: Candidate, levels: list[Level], budget_bytes: float) -> Iterator[Candidate]:
        """Candidates of levels between and around ``levels``, which are added to it: where they are faster, sharded as the best is."""
        known = set(levels)
        for _ in range(_CLOSER if len(levels) > 1 and self.remat.quick else 0):
            if self.out_of_time():
                return
            near = [c for c in finer(self.remat, best, self.model, known, _AROUND) if c.peak_bytes <= budget_bytes]
            closer = min(near, key=lambda c: c.seconds, default=best)
            if closer.seconds >= best.seconds * (1 - TOLERANCE):
                return
            found = self.anew(closer, levels, budget_bytes)
            yield from found
            best = min([best, *found], key=lambda c: c.seconds)

    def anew(self, like: Candidate, levels: list[Level], budget_bytes: float) -> list[Candidate]:
        """What fits of the candidates that keep what ``like`` does: a level of its own, which is added to ``levels``."""
        levels.append(replace(like.variant.level, threshold=levels[like.level].threshold))
        return [c for c in self._offers(len(levels) - 1, levels[-1], budget_bytes) if c.peak_bytes <= budget_bytes]

    def _offers(self, number: int, level: Level, budget_bytes: float) -> Iterator[Candidate]:
        """The candidates of a level, what a descent from the best leads to, and shardings as written where that does not fit."""
        found = self.level(number, level, budget_bytes)
        model = self.models[number]
        if number == 0 and found[0].peak_bytes > budget_bytes:
            fastest = min((descend(model.problem, x) for x in self.answers[0]), key=model.problem.seconds)
            dear = found[0].seconds / found[0].peak_bytes
            priced = (self._priced(model, 0, share * dear, budget_bytes).x for share in _PRICES)
            self.written = list({x.tobytes(): x for x in (fastest, *priced)}.values())
        else:
            found += [self.candidate(model, x, number) for x in self.written if len(x) == len(model.problem.sizes)]
        yield from found
        fitting = [c for c in found if c.peak_bytes <= budget_bytes]
        if fitting:
            yield self._descended(min(fitting, key=lambda c: c.seconds), budget_bytes)

    def _descended(self, candidate: Candidate, budget_bytes: float) -> Candidate:
        """As fast as changes of one decision at a time make it within the budget."""
        model = candidate.model
        for _ in range(_DESCENTS):
            x = descend(model.problem, candidate.x, budget_bytes)
            if np.array_equal(x, candidate.x):
                break
            lower = self.candidate(model, x, candidate.level)
            if lower.peak_bytes <= budget_bytes:
                return lower  # else its peak is a row of the problem now
        return candidate

    def _offered(self, fitting: Sequence[Candidate], levels: list[Level], room: Callable[[], float]) -> Iterator[Level]:
        """``levels``, then those with state in the host's memory; where nothing on the device fits, those nested in them. They are added.

        ``room``: the budget for each byte of the leanest answer on the device so far.
        """
        yield from levels
        away = self.away(levels, min((c.seconds for c in fitting), default=math.inf))
        levels += away
        yield from away
        here = lambda: any(not c.variant.offloaded for c in fitting)  # noqa: E731
        for level in self.nested(levels, room()) if not here() else ():
            levels.append(level)
            yield level
            if here():  # what makes more again takes longer
                return

    def nested(self, levels: Sequence[Level], room: float = 1.0) -> Iterator[Level]:
        """With what the leanest of ``levels`` keeps, those that make again what lies between blocks; none without a choice or time."""
        if len(levels) > 1 and not self.out_of_time():
            yield from self.remat.nested(max((level for level in levels if not level.offloaded), key=lambda level: level.threshold), room)

    def away(self, levels: Sequence[Level], best: float = math.inf) -> list[Level]:
        """``levels`` with state in the host's memory; none where the least that can cross the link takes longer than ``best`` allows."""
        least = sum(self.remat.graph.values[x].nbytes for x in self.remat.state(SHARES[1])) / self.mesh.num_devices
        worth = self.fastest + least / self.chip.host_bandwidth < best  # each array counts as what comes and as what goes
        return self.remat.with_state(levels) if worth and not self.out_of_time() else []

    def level(self, number: int, level: Level, budget_bytes: float) -> list[Candidate]:
        """Candidates of one level: without pressure, then under rising and bisected prices of memory."""
        model = self.models[number] = self.model(self.remat.variant(level))
        free = self._unpriced(model, number)
        self.fastest = min(self.fastest, free.seconds)
        if free.peak_bytes <= budget_bytes:
            return [free]
        lean = self.lean(model, number, budget_bytes)
        found = [free, lean]
        if any(row.least_bytes() > budget_bytes for row in model.problem.rows):
            self.bounds[number] = math.inf  # proven: nothing of this level fits
        if lean.peak_bytes > budget_bytes or self.out_of_time():
            return found
        low, high = 0.0, self.price or free.seconds / budget_bytes
        for _ in range(_RAISES):
            found.append(self._priced(model, number, high, budget_bytes))
            if found[-1].peak_bytes <= budget_bytes or self.out_of_time():
                break
            low, high = high, high * 8
        for _ in range(_BISECTIONS):
            if self.out_of_time():
                break
            middle = math.sqrt(low * high) if low else high / 8
            found.append(self._priced(model, number, middle, budget_bytes))
            low, high = (low, middle) if found[-1].peak_bytes <= budget_bytes else (middle, high)
        self.price = high
        return found

    def lean(self, model: Model, level: int, budget_bytes: float) -> Candidate:
        """The least memory of a level: each round the answer with the least bytes at the peaks so far, weighted as they bind."""
        best: Candidate | None = None
        answers: list[np.ndarray] = []
        for _ in range(_LEAN):
            answers.append(least_bytes(model.problem, answers))
            found = self.candidate(model, answers[-1], level)
            if best is not None and found.peak_bytes >= best.peak_bytes and len(answers) > 3:
                break
            best = found if best is None or found.peak_bytes < best.peak_bytes else best
            if best.peak_bytes <= budget_bytes:
                break
        assert best is not None
        return best

    def model(self, variant: Variant) -> Model:
        return Model(self.program, variant, self.mesh, self.chip, self.allowed, self.cache)

    def candidate(self, model: Model, x: np.ndarray, level: int) -> Candidate:
        live = timeline(model, x)
        peak = int(live.argmax())
        crowded = bool(model.crowded_out(x)[peak])
        if all((row.position, row.crowded) != (peak, crowded) for row in model.problem.rows):
            model.problem.rows.append(model.memory_row(peak, crowded=crowded))
        self.answers[level].append(x)
        return Candidate(model, x, model.problem.seconds(x), float(live.max()), level)

    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline

    def _unpriced(self, model: Model, level: int) -> Candidate:
        """No memory pressure. μ = 1 hides all prefetching; where that is too kind, smaller μ charges for it."""
        best: Candidate | None = None
        bound = -math.inf
        for mu in MU:
            answer = eliminate(*model.problem.priced(mu, {}))
            bound = max(bound, answer.bound)
            found = self.candidate(model, answer.x, level)
            if best is None or found.seconds < best.seconds:
                best = found
            hidden = model.problem.resource("prefetch", answer.x) <= model.problem.resource("compute", answer.x)
            if hidden or best.seconds <= bound * (1 + 1e-3):
                break
        assert best is not None
        self.bounds[level] = max(bound, self.bounds.get(level, -math.inf))
        return best

    def _priced(self, model: Model, level: int, price: float, budget_bytes: float) -> Candidate:
        rows = len(model.problem.rows)
        prices = dict.fromkeys(range(rows), price / rows)
        answer = eliminate(*model.problem.priced(MU[0], prices))
        bound = answer.bound + priced_room(model.problem, budget_bytes, prices)
        self.bounds[level] = max(self.bounds.get(level, -math.inf), bound)
        return self.candidate(model, answer.x, level)

    # ------------------------------------------------------------------------------------------------------------- refining

    def refine(self, found: Found, budget_bytes: float) -> None:
        """What ``look`` found made better: blocks that keep unalike, single values kept or not, and the gap to the bound closed."""
        if found.best is None:
            close(self, found, budget_bytes)
            return
        started = time.monotonic()
        self._mix(found, self._bases(found), _PATIENCE, budget_bytes)
        self._change(found, budget_bytes)
        found.seconds_spent["chain"] = time.monotonic() - started
        finish(self, found, budget_bytes)
        if found.best not in found.fitting:
            found.fitting.append(found.best)

    def _mix(self, found: Found, bases: Sequence[Candidate], patience: int, budget_bytes: float) -> None:
        """Blocks that keep unalike, sharded as ``bases``: see ``fastest_of_first``."""
        assert found.best is not None
        away = any(level.offloaded for level in self.levels)
        ways = ((True, False), (False, False), (False, True)) if away else ((False, False),)  # with nothing in the host's memory first
        for base, (here, waiting), splitting in itertools.product(bases, ways, self.mixer.splitting(self.levels)):
            worth = math.inf if self.remat.quick else found.best.seconds
            levels = [self.levels[base.level] if here and level.offloaded else level for level in self.levels]
            mixtures = self.mixer.mixtures(base, levels, budget_bytes, waiting=waiting, splitting=splitting, faster_than=worth)
            mixtures = _noted(mixtures, found.fitting)
            if not self.remat.quick:
                mixtures = itertools.chain([base], mixtures)  # one that is no better than that is one in vain
            mixed = fastest_of_first(mixtures, patience)
            mixed = mixed and self._descended(mixed, budget_bytes)
            if mixed is not None and mixed.seconds < found.best.seconds:
                found.best, self.models[_MIXED] = mixed, mixed.model

    def _change(self, found: Found, budget_bytes: float) -> None:
        """Less state in the host's memory, and single values kept or not."""
        assert found.best is not None
        found.fitting += [c for c in nearer(self.remat, found.fitting, self.mixer.keeping) if c.peak_bytes <= budget_bytes]
        found.best = min([found.best, *found.fitting], key=lambda c: c.seconds)
        starts = [found.best]
        if found.best.variant.level.splits:  # a swap changes what trips keep that are as the first ones, not the rest
            alike = [c for c in found.fitting if not c.variant.level.splits]
            starts += sorted(alike, key=lambda c: c.seconds)[:1]
        for start in starts:
            found.fitting += self._swap(start, self.levels, budget_bytes)
        found.best = min([found.best, *found.fitting], key=lambda c: c.seconds)
        if _MIXED in self.models:  # a program of its own, with a bound of its own
            problem = self.models[_MIXED].problem
            self.bounds[_MIXED] = max(eliminate(*problem.priced(mu, {})).bound for mu in MU)
        found.bound = min(self.bounds.values())  # levels have been added

    def _swap(self, best: Candidate, levels: list[Level], budget_bytes: float) -> list[Candidate]:
        """Candidates that keep what ``best`` does but for some values (``swaps.py``), where that is faster; their level is added."""
        if not self.remat.blocks or len(levels) < 2 or best.seconds > self.rival * BEHIND:
            return []
        make = functools.partial(self.mixer.keeping, best, offloaded=best.variant.offloaded)
        better = swapped(self.remat, best, make, budget_bytes, self.mesh.num_devices, self.out_of_time, self.mixer.pieces(best))
        return [] if better is best else [better, *self.anew(better, levels, budget_bytes)]

    def _bases(self, found: Found) -> list[Candidate]:
        """Answers to let blocks differ in: the best one; where rewriting is quick of other levels too, and sharded as without pressure."""
        written = self.written or self.answers[0][:1]
        which = lambda c: next((k for k, x in enumerate(written) if np.array_equal(c.x, x)), None)  # noqa: E731
        assert found.best is not None
        far = _FAR * found.best.seconds
        whole = [c for c in found.fitting if c.variant.level == self.levels[c.level] and c.seconds <= far]
        best = least_of_each(whole, lambda c: (c.level, which(c)))
        return best[: _BASES if self.remat.quick else 1]


def _noted(candidates: Iterable[Candidate], seen: list[Candidate]) -> Iterator[Candidate]:
    """``candidates``, each put into ``seen`` as it comes."""
    for candidate in candidates:
        seen.append(candidate)
        yield candidate
