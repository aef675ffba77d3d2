"""``cost/windowed.py`` for one state, in scalars: what a dot takes longer where its sum is scattered beside it (see ``check.py``)."""

from __future__ import annotations

import math
from collections.abc import Collection

from jaxauto.core import Kind
from jaxauto.cost.compute import operation_flops, traffic_seconds
from jaxauto.cost.onchip import SHARE
from jaxauto.cost.windowed import ADDED_UP, COPIED, FEWEST, LANES, PIECES, STREAMED, stored_order
from jaxauto.graph import value_bytes
from jaxauto.groups import Operand, Operation
from jaxauto.solve.model import Model
from jaxauto.strategies import WHOLE


def ring_seconds(
    model: Model, op: Operation, result: Operand, state: tuple[int, ...], partial: Collection[int], there: tuple[int, ...]
) -> float | None:
    """Seconds that one run of a dot takes longer; None: its sum is waited for.

    Args:
      state: for each mesh axis the factor of ``op`` that it splits. partial: axes over which ``result`` is summed.
      there: for each mesh axis the dimension of ``result`` that it splits in the end.
    """
    chip, sizes = model.chip, model.mesh.sizes
    names = [f for f, _ in op.factors]
    of = [{f for _, f in o.dims if f} for o in op.operands]

    def pieces(factors: Collection[str]) -> int:
        return math.prod(n for n, s in zip(sizes, state, strict=True) if s != WHOLE and names[s] in factors)

    def held(o: Operand) -> float:
        return value_bytes(model.values[o.value]) / pieces([f for _, f in o.dims])

    count = math.prod(sizes[a] for a in partial)
    places = {there[a] for a in partial}
    if not model.mesh.windows or op.rule.kind is not Kind.DOT or not FEWEST <= count <= model.mesh.windows or len(places) != 1:
        return None
    (d,) = places
    factor = result.dims[d][1] if d != WHOLE else ""
    cut = [k for k, found in enumerate(of) if factor in found]
    flops = operation_flops(op) / pieces(names) / (chip.flops_efficiency * chip.peak_flops(model.values[op.operands[0].value].dtype))
    if len(cut) != 1 or factor in {names[s] for s in state if s != WHOLE} or count * flops < held(result) / chip.link_bandwidth:
        return None
    made = {f for _, f in result.dims if f}
    shared = made.intersection(*of)
    own = [(found & made) - shared for found in of]
    batch = math.prod(n for f, n in op.factors if f in shared) / pieces(shared)
    moved = [held(o) for o in op.operands]
    once, whole = sum(moved) + held(result), sum(moved) - moved[cut[0]]
    apart = max(flops, traffic_seconds(once, chip))
    longer = max(flops, traffic_seconds(once + (count / PIECES - 1) * whole, chip))
    small = batch <= 1 and whole <= SHARE * chip.vmem_bytes
    if batch <= 1 and whole < chip.vmem_bytes:
        longer = apart if small else max(longer, STREAMED * flops + traffic_seconds(count / PIECES * whole, chip))
    copied = COPIED * moved[cut[0]] if batch > 1 else 0.0
    if batch <= 1 and len(own) == 2 and all(own):
        wide = int(len(own[1]) > len(own[0]))
        if len(own[0]) == len(own[1]):
            last = stored_order(result, model.values)[-1]
            split = pieces([result.dims[last][1]]) * (count if last == d else 1)
            lanes = model.values[result.value].shape[last] / split % LANES == 0
            wide = int((result.dims[last][1] in own[1]) != lanes)
        copied = moved[wide] * (1 if moved[wide] <= SHARE * chip.vmem_bytes else COPIED)
    return longer - apart + traffic_seconds(ADDED_UP * held(result) + copied, chip)
