"""``turns.py`` for one state, in scalars: what is copied because its layout is at odds with a collective (see ``check.py``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from jaxauto.solve.turns import fetching, made_beside
from jaxauto.strategies import WHOLE

if TYPE_CHECKING:
    from jaxauto.groups import Edge
    from jaxauto.solve.check import Answer, Where


def copies(answer: Answer) -> Iterator[tuple[float, float]]:
    """(bytes of one device, times in a step) of weights before they are gathered, gradients after they are scattered, and results."""
    groups = answer.model.groups
    for op in groups.operations if answer.model.chip.platform == "gpu" else ():
        again = groups.times[op.node.id] + answer.model.variant.extra.get(op.node.id, 0)
        for o in op.operands:
            here = answer.holder(o)
            if answer.resource(o.value, -1) == "prefetch" and is_turned(answer, here, answer.operand(op, o), len(o.dims)):
                together = answer.together.get((op.node.id, o.value), 0)
                yield answer.bytes_of(o.value) / answer.pieces(here), again - together
        for o in op.results:
            here, there = answer.operand(op, o), answer.holder(o)
            if answer.resource(-1, o.value) == "prefetch" and is_turned(answer, here, there, len(o.dims), answer.partial(op, o)):
                yield answer.bytes_of(o.value) / answer.pieces(there), again
    for e in fetching(answer.model) if answer.model.chip.platform == "gpu" else ():
        here, there = _ends(answer, e)
        if is_turned(answer, here, there, len(e.dims)):
            yield answer.bytes_of(e.value) / answer.pieces(here), e.times + answer.model.variant.extra.get(e.node, 0)
    yield from copies_of_results(answer)


def copies_of_results(answer: Answer) -> Iterator[tuple[float, float]]:
    """(bytes of one device, times) of results that leave the step gathered."""
    outputs = {x for x in answer.model.groups.graph.outputs if isinstance(x, int)}
    for e in answer.model.groups.edges:
        here, there = _ends(answer, e)
        if e.node < 0 and e.value in outputs and is_turned(answer, here, there, len(e.dims)):
            yield answer.model.edge_bytes(e) / answer.pieces(there), e.times


def made_whole(answer: Answer) -> Iterator[float]:
    """Bytes of one device of results that it makes whole beside the memory of the part that it returns."""
    for e in made_beside(answer.model):
        here, there = _ends(answer, e)
        if any(h == WHOLE != t for h, t in zip(here, there, strict=True)):
            yield answer.model.edge_bytes(e) / answer.pieces(here)


def _ends(answer: Answer, e: Edge) -> tuple[Where, Where]:
    here, there = zip(*e.dims, strict=True) if e.dims else ((), ())
    return answer.where(answer.group[e.source], here), answer.where(answer.group[e.target], there)


def is_turned(answer: Answer, here: Where, there: Where, rank: int, partial: Collection[int] = ()) -> bool:
    """Whether some axis leaves a dimension, or a sum, where the layout does not have it."""
    wrong = {"gpu": range(1, rank), "tpu": range(rank)}.get(answer.model.chip.platform, range(0))
    if rank < 2:
        return False
    gathered = any(h in wrong and t == WHOLE for h, t in zip(here, there, strict=True))
    return gathered or any(there[a] in wrong for a in partial)
