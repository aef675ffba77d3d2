"""What a plan says of residuals and of state, by name: kept, recomputed or in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxauto.blocks import Block, closure
from jaxauto.core import Trips
from jaxauto.plan import RematDecision
from jaxauto.solve.candidate import Candidate
from jaxauto.solve.remat import Remat
from jaxauto.strategies import shards


def remat_decisions(remat: Remat, best: Candidate, in_paths: Sequence[str]) -> list[RematDecision]:
    """Every residual of every block, then every argument in the host's memory, with what they take on one device."""
    return [*_of_residuals(remat, best), *_of_state(remat, best, in_paths)]


def _of_residuals(remat: Remat, best: Candidate) -> list[RematDecision]:
    """Where the trips of a scan differ (``rewrite/split.py``) once for each part of it."""
    decisions: list[RematDecision] = []
    rewritten, splits = best.variant.rewritten, dict(best.variant.level.splits)
    offloaded = best.variant.offloaded & {rewritten.origin[n] for n in rewritten.host if n in rewritten.origin}
    for b, (block, kept) in enumerate(zip(remat.blocks, best.variant.kept, strict=True)):
        first = 0
        for part in splits.get(b, (Trips(block.count, kept),)):
            name = f"{block.name}[{first}..{first + part.count - 1}]" if b in splits else block.name
            decisions += _of_part(remat, best, b, replace(block, name=name, count=part.count), part, offloaded)
            first += part.count
    return decisions


def _of_part(remat: Remat, best: Candidate, b: int, block: Block, part: Trips, offloaded: frozenset[int]) -> list[RematDecision]:
    """``block``: with the trips of the part for its own. In segments nothing lies between the passes but the carries they begin with."""
    nested, leaves = bool(part.inside), list(part.leaves())
    made = {kept: closure(block, kept)[0] if kept is not None else () for *_, kept in leaves}
    again = {kept: {out for node in nodes for out in node.outputs} for kept, nodes in made.items()}
    extra = {*(part.kept or ()), *(offloaded & remat.values_of(b) if block.scan else ())} - {*block.residuals}
    found = []
    for number in (*block.residuals, *sorted(extra)):
        value = remat.graph.values[number]
        node = value.producer
        runs = sum(count * (depth + (number in again[kept] and number not in (kept or ()))) for count, depth, kept in leaves)
        dropped, pieces = runs > 0, _pieces(best, number)
        seconds = remat.node_seconds(node) / pieces * (runs or block.count) if node is not None and not node.bodies else 0.0
        found.append(
            RematDecision(
                name=f"{block.name}: {node.scope + '/' if node and node.scope else ''}{node.prim if node else 'input'}",
                action="recomputed" if dropped else "offloaded" if number in offloaded else "kept",
                shape=value.shape if block.count == 1 else (block.count, *value.shape),
                dtype=str(value.dtype),
                bytes_=value.nbytes / pieces * block.count,
                seconds=seconds,
                source=node.source if node else "",
            )
        )
    for number in block.carries if nested else ():
        value, segments = remat.graph.values[number], part.count // part.length
        name, bytes_ = f"{block.name}: carry of every segment", value.nbytes / _pieces(best, number) * segments
        found.append(RematDecision(name, "kept", (segments, *value.shape), str(value.dtype), bytes_, 0.0))
    return found


def _of_state(remat: Remat, best: Candidate, in_paths: Sequence[str]) -> list[RematDecision]:
    there = ((path, n) for path, n in zip(in_paths, remat.graph.inputs, strict=True) if n in best.variant.offloaded)
    values = ((path, remat.graph.values[n], _pieces(best, n)) for path, n in there)
    return [RematDecision(f"state: {path}", "offloaded", v.shape, str(v.dtype), v.nbytes / pieces, 0.0) for path, v, pieces in values]


def _pieces(best: Candidate, number: int) -> float:
    """In how many pieces a value lies on the mesh."""
    return float(shards(best.model.position(best.x, number)[None], best.model.mesh.sizes)[0])
