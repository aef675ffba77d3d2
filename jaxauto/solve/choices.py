"""What each block costs under each level of rematerialisation: the options of the chain's dynamic programme (``chain.py``).

Of a straight block, as the buffers of the level's program tell: what compilers make again of themselves inside whatever reads it is not
kept, nor is there room needed for it. Of a block inside a loop as its residuals tell; of a scan too, which has more options than levels:
its trips can differ (``segments.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxauto.blocks import Block, closure, phases
from jaxauto.graph import value_bytes
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
) -> list[list[Option]]:
    """For each block an option for each level.

    Args:
      pieces: value → in how many pieces it lies on the mesh.
      host_bandwidth: bytes per second, if nothing hides what is sent to the host's memory and back.
      splitting: of scans then those that split them.
    """
    turns = _turns(remat)
    owner = {v: b for b in turns for v in _inside(remat.blocks[b])}
    held = [_held(remat, level, pieces, turns, owner) for level in levels]
    scans = {b: ScanOptions(remat, block, pieces) for b, block in enumerate(remat.blocks) if block.scan}

    def option(b: int, number: int) -> Option:
        block, level = remat.blocks[b], levels[number]
        keep, what = level.kept[b], Keep(level.kept[b], level.offloaded & remat.values_of(b), dict(level.splits).get(b))
        size = {v: value_bytes(remat.graph.values[v]) / pieces(v) * block.count for v in {*(keep or ()), *block.residuals, *what.offloaded}}
        if b in scans:
            told = scans[b].option(keep, what.split, level.offloaded)
            kept, again, seconds = told.kept_bytes, told.peak_bytes, told.seconds
        else:
            kept, again = held[number][b] if b in turns else _of_residuals(block, level, keep, size)
            nodes = closure(block, keep)[0] if keep is not None else ()
            seconds = sum(remat.again_seconds(n) / max(pieces(n.outputs[0]), 1.0) for n in nodes)
        if host_bandwidth is not None:
            seconds += 2 * sum(size[v] for v in size if v in level.offloaded) / host_bandwidth
        return Option(kept, again, seconds, what)

    found = [[option(b, number) for number in range(len(levels))] for b in range(len(remat.blocks))]
    ways = [level.kept for level in levels if not level.offloaded]
    for b in remat.splittable if splitting else ():
        found[b] += scans[b].splits([kept[b] for kept in ways])
    return found


def _of_residuals(block: Block, level: Level, keep: frozenset[int] | None, size: dict[int, float]) -> tuple[float, float]:
    held = block.residuals if keep is None else keep
    kept = sum(size[v] for v in held if v not in level.offloaded)
    return kept, sum(size[v] for v in block.residuals if v not in held or v in level.offloaded)


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
