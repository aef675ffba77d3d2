"""What each block costs under each level of rematerialisation: the options of the chain's dynamic programme (``chain.py``).

Of a straight block, as the buffers of the level's program tell: what compilers make again of themselves inside whatever reads it is not
kept, nor is there room needed for it. Of a block inside a loop as its residuals tell; of a scan too, which has more options than levels:
its trips can differ (``segments.py``).

What a block takes longer is told by what runs again. But much of that hides in the operations that read it, and what is kept instead is
written and read: level l as a whole differs from level r by more, or less, than its blocks b add up to,

    miss_l = (T_l − T_r) − Σ_b (s[b,l] − s[b,r]) = Σ_b δ[b, what b keeps under l]                         ``_misses``

The δ are those of the least Σ δ²/w, with w the bytes that a block keeps more or less than under r: the programme's sum is right for every
level as a whole, and blocks that keep alike are charged alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxauto.blocks import Block, closure, phases
from jaxauto.graph import walk
from jaxauto.solve.chain import Option
from jaxauto.solve.remat import Level, Remat
from jaxauto.solve.segments import Keep, ScanOptions


def choices(
    remat: Remat,
    levels: Sequence[Level],
    pieces: Callable[[int], float],
    host_bandwidth: float | None = None,
    *,
    splitting: bool = False,
    whole: Mapping[int, float] | None = None,
) -> list[list[Option]]:
    """For each block an option for each level.

    Args:
      pieces: value → in how many pieces it lies on the mesh.
      host_bandwidth: bytes per second, if nothing hides what is sent to the host's memory and back.
      splitting: of scans then those that split them.
      whole: level → seconds of the step with all of its blocks under it; the first is what the others are compared with.
    """
    turns = _turns(remat)
    owner = {v: b for b in turns for v in _inside(remat.blocks[b])}
    held = [_held(remat, level, pieces, turns, owner) for level in levels]
    scanned = [(b, block) for b, block in enumerate(remat.blocks) if block.scan]
    inside = {b: {lv.kept[b]: while_backward(remat, lv, block) for lv in levels if not lv.offloaded} for b, block in scanned}
    scans = {b: ScanOptions(remat, block, pieces, inside[b]) for b, block in scanned}

    def size(b: int, v: int) -> float:
        return remat.graph.values[v].nbytes / pieces(v) * remat.blocks[b].count

    def option(b: int, number: int) -> Option:
        block, level = remat.blocks[b], levels[number]
        keep, what = level.kept[b], Keep(level.kept[b], level.offloaded & remat.values_of(b), dict(level.splits).get(b, ()))
        if b in scans:
            return replace(scans[b].option(keep, what.parts, level.offloaded), what=what)
        kept, again = held[number][b] if b in turns else _of_residuals(block, level, keep, functools.partial(size, b))
        nodes = closure(block, keep)[0] if keep is not None else ()
        seconds = sum(remat.again_seconds(n) / max(pieces(n.outputs[0]), 1.0) for n in nodes)
        return Option(kept, again, seconds, what)

    def waiting(b: int, option: Option, level: Level) -> float:
        sent = level.offloaded & {*(level.kept[b] or ()), *remat.blocks[b].residuals, *option.what.offloaded}
        return 2 * sum(size(b, v) for v in sent) / (host_bandwidth or math.inf)

    found = [[option(b, number) for number in range(len(levels))] for b in range(len(remat.blocks))]
    miss = _misses(found, whole or {})
    for b, block in enumerate(found):
        more = [miss.get((b, o.what), 0.0) + waiting(b, o, level) for o, level in zip(block, levels, strict=True)]
        found[b] = [replace(o, seconds=o.seconds + seconds) for o, seconds in zip(block, more, strict=True)]
    ways = [level.kept for level in levels if not level.offloaded]
    for b in remat.splittable if splitting else ():
        beyond = {kept[b]: miss.get((b, Keep(kept[b])), 0.0) / remat.blocks[b].count for kept in ways}
        found[b] += scans[b].splits([kept[b] for kept in ways], beyond)
    return found


def _of_residuals(block: Block, level: Level, keep: frozenset[int] | None, size: Callable[[int], float]) -> tuple[float, float]:
    held = block.residuals if keep is None else keep
    kept = sum(size(v) for v in held if v not in level.offloaded)
    return kept, sum(size(v) for v in block.residuals if v not in held or v in level.offloaded)


def _misses(options: Sequence[Sequence[Option]], whole: Mapping[int, float]) -> dict[tuple[int, Keep], float]:
    """(block, what it keeps) → δ of the head of this file; none for what it keeps under the first of ``whole``."""
    if not whole:
        return {}
    reference, *others = whole
    weight: dict[tuple[int, Keep], float] = {}
    for b, block in enumerate(options):
        for option in (block[number] for number in others):
            if option.what != block[reference].what:
                weight[b, option.what] = max(1.0, abs(option.kept_bytes - block[reference].kept_bytes))  # what keeps as much shares too
    root = np.sqrt(np.array(list(weight.values()), float))
    place = {key: k for k, key in enumerate(weight)}
    rows, missed = np.zeros((len(others), len(weight))), np.zeros(len(others))
    for row, number in enumerate(others):
        told = sum(block[number].seconds - block[reference].seconds for block in options)
        missed[row] = whole[number] - whole[reference] - told
        mine = [k for b, block in enumerate(options) if (k := place.get((b, block[number].what))) is not None]
        rows[row, mine] = root[mine]
    shares = np.linalg.lstsq(rows, missed, rcond=None)[0] * root
    return dict(zip(weight, shares.tolist(), strict=True))


def _turns(remat: Remat) -> dict[int, int]:
    """Straight block → the node that its backward pass begins with."""
    first: dict[int, int] = {}
    for node, phase in phases(remat.graph).items():
        first.setdefault(phase, node)
    straight = ((b, block) for b, block in enumerate(remat.blocks) if block.graph is remat.graph and not block.scan)
    return {b: first[block.phase + 1] for b, block in straight if block.phase + 1 in first}


def _inside(block: Block) -> set[int]:
    """What a block makes, but its outputs: those are there anyway."""
    return {*block.made} - {*block.outputs}


def while_backward(remat: Remat, level: Level, block: Block) -> list[tuple[int, int, int]]:
    """What is in memory while a trip of a scan goes backward in the level's program, and from where to where."""
    assert block.scan is not None
    variant = remat.variant(level)
    found = (body for node in walk(variant.rewritten.graph) if node.id == block.scan[1].id for body in node.bodies)
    ids = [x for body in found for x in (*body.inputs, *(y for node in walk(body) for y in node.outputs))]
    b = variant.buffers
    there = np.isin(b.ids, ids) & (b.bytes_ > 0) & (b.end >= b.start)
    steps = zip(*(each[there].tolist() for each in (variant.origin, b.start, b.end)), strict=True)
    return [(value, start, end) for value, start, end in steps if value in remat.graph.values]


def _held(
    remat: Remat, level: Level, pieces: Callable[[int], float], turns: Mapping[int, int], owner: Mapping[int, int]
) -> dict[int, tuple[float, float]]:
    """Straight block → (bytes that it keeps for its backward pass, bytes that are made there again); ``owner``: value → its block."""
    variant = remat.variant(level)
    buffers, found = variant.buffers, dict.fromkeys(turns, (0.0, 0.0))
    for k, value in enumerate(variant.origin.tolist()):
        b = owner.get(value)
        if b is None or buffers.end[k] < buffers.start[k]:
            continue
        turn, bytes_ = buffers.position[turns[b]], buffers.bytes_[k] / pieces(value)
        kept, again = found[b]
        if buffers.start[k] >= turn:
            found[b] = kept, again + bytes_
        elif buffers.end[k] >= turn:
            found[b] = kept + bytes_, again
    return found
