"""``cost/windowed.py`` for one state, in scalars: what a dot takes longer where its sum is scattered beside it (see ``check.py``)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from jaxauto.core import Kind
from jaxauto.cost.collectives import collective_seconds
from jaxauto.cost.compute import may_be_minor, operation_flops, precision_of, traffic_seconds
from jaxauto.cost.onchip import capacity
from jaxauto.cost.windowed import (
    ADDED_UP,
    ADDED_UP_IN_BATCH,
    AT_ONCE,
    COPIED,
    FEWEST,
    LANES,
    PIECES,
    ROOM,
    SMALL,
    TURNS_CUT,
    WRITTEN,
    last_dim,
    least_flops,
)
from jaxauto.groups import Operand, Operation
from jaxauto.solve.model import Model
from jaxauto.strategies import WHOLE
from jaxauto.targets.chip import Chip, Tile


def ring(
    model: Model, op: Operation, result: Operand, state: tuple[int, ...], partial: Collection[int], there: tuple[int, ...]
) -> tuple[float, float, dict[int, float]] | None:
    """Seconds that one run of a dot takes longer, bytes that it has copied, bytes of operands (by number) that have to be in memory for it,
    themselves or as a copy.

    None: its sum is waited for.

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
        factors = [f for _, f in o.dims]
        where = [factors.index(names[s]) if s != WHOLE and names[s] in factors else WHOLE for s in state]
        value = model.values[o.value]
        return value.nbytes / pieces(factors) * padding(value.shape, where, may_be_minor(op, o), sizes, chip.tile_of(value.dtype))

    count = math.prod(sizes[a] for a in partial)
    places = {there[a] for a in partial}
    if not model.mesh.windows or op.rule.kind not in (Kind.DOT, Kind.CONV) or len(of) != 2:
        return None
    if not FEWEST <= count <= model.mesh.windows or len(places) != 1:
        return None
    (d,) = places
    factor = result.dims[d][1] if d != WHOLE else ""
    cut = [k for k, found in enumerate(of) if factor in found]
    done = operation_flops(op) / pieces(names)
    flops = done / (chip.flops_efficiency * chip.peak_flops(model.values[op.operands[0].value].dtype, precision_of(op.node)))
    if len(cut) != 1 or factor in {names[s] for s in state if s != WHOLE} or count * done < least_flops(chip) * held(result):
        return None
    made = {f for _, f in result.dims if f}
    shared = made.intersection(*of)
    moved, added = [held(o) for o in op.operands], held(result)
    apart = max(flops, traffic_seconds(sum(moved) + added, chip))
    sent = collective_seconds("collective-permute", added, [sizes[a] for a in partial], [model.mesh.links[a] for a in partial])
    least = max(flops, count / PIECES * sent)
    batch = math.prod(n for f, n in op.factors if f in shared) / pieces(shared) > 1
    inside = {x.operand: x for x in model.inside(op)}
    whole_ones = {k: moved[k] for k in inside if not (batch and k == cut[0])}
    written = [k for k in whole_ones if moved[k] > SMALL * chip.vmem_bytes]
    beside = sum(moved[k] for k in written)
    first = traffic_seconds(WRITTEN * beside, chip)
    part, whole = moved[cut[0]], moved[1 - cut[0]]
    if op.rule.kind is Kind.CONV:
        features = model.values[result.value].shape[d]
        more = count * math.ceil(features / count / LANES) / math.ceil(features / LANES)
        longer = max(least, traffic_seconds(more * part + count / PIECES * whole + added, chip)) + traffic_seconds((1 + more) * part, chip)
        return max(longer - apart, 0.0) + first, beside + AT_ONCE / count * more * part, whole_ones
    if batch:
        longer = max(least, traffic_seconds(part + count / PIECES * whole + added, chip))
        longer += traffic_seconds(ADDED_UP_IN_BATCH * added + COPIED * part, chip)
        return max(longer - apart, 0.0) + first, beside, whole_ones
    turned, copied = cut[0], False
    own = [(found & made) - shared for found in of]
    if all(own):
        copied = True
        if chip.name not in TURNS_CUT:
            turned = int(len(own[1]) > len(own[0]))
        if chip.name not in TURNS_CUT and len(own[0]) == len(own[1]):
            last = last_dim(result)
            split = pieces([result.dims[last][1]]) * (count if last == d else 1)
            lanes = model.values[result.value].shape[last] / split % LANES == 0
            turned = int((result.dims[last][1] in own[1]) != lanes)
    longer = _loop(moved, turned, cut[0], added, least, count, chip, copied=copied)
    if copied and moved[turned] > SMALL * chip.vmem_bytes and (turned not in written or inside[turned].shared or inside[turned].placed):
        beside += moved[turned]
        if turned in written and inside[turned].placed and not (inside[turned].near and moved[turned] <= capacity(chip)):
            beside -= moved[turned]
        whole_ones.setdefault(turned, moved[turned])
    return max(longer - apart, 0.0) + first, beside, whole_ones


def padding(shape: tuple[int, ...], where: Sequence[int], minor: Sequence[int], sizes: Sequence[int], tile: Tile | None) -> float:
    """By how much tiles enlarge one device's part: the pair of minor dimensions that pads least."""
    if len(shape) < 2 or not all(shape) or not tile:
        return 1.0
    local = [n / math.prod(sizes[a] for a, d in enumerate(where) if d == i) for i, n in enumerate(shape)]
    alone = list(minor) == list(range(len(local) - len(minor), len(local)))
    while not alone and 2 < len(minor) < len(local) and list(minor[-2:]) == [len(local) - 2, len(local) - 1]:  # groups of features
        local[-2:], minor = [local[-2] * local[-1]], minor[:-1]
    chosen = minor if len(minor) > 1 else range(len(local))

    def filled(n: float, edge: float) -> float:
        return math.ceil(n / edge) * edge / n

    return min(
        filled(local[i], min(tile.sublanes, max(tile.packed, 2.0 ** math.ceil(math.log2(local[i]))))) * filled(local[j], tile.lanes)
        for i in chosen
        for j in chosen
        if i != j
    )


def _loop(moved: list[float], turned: int, cut: int, added: float, least: float, count: int, chip: Chip, *, copied: bool) -> float:
    """Seconds of a ring of ``count`` devices with what is brought before it; ``turned``, ``copied``: as in ``cost/windowed.py``.

    ``least``: seconds of its dots, or in which its pieces are sent.
    """
    first, other, dots = moved[turned], moved[1 - turned], count / PIECES
    once = traffic_seconds(first / (dots if turned == cut else 1), chip), traffic_seconds(other / (dots if turned != cut else 1), chip)
    odd = even = 0.0
    before = held = 0.0
    if copied and first < chip.vmem_bytes:
        before, held = first, first
    else:
        odd, even = once[0], once[0]
        before = COPIED * first if copied else 0.0
    if other <= SMALL * chip.vmem_bytes:
        before, held = before + other, held + other
    elif held <= SMALL * chip.vmem_bytes and held + other <= chip.vmem_bytes:
        odd, held = odd + once[1] + traffic_seconds(other, chip), held + other
    else:
        odd, even = odd + once[1], even + once[1]
    if held + AT_ONCE * added / count > ROOM * chip.vmem_bytes:
        before += ADDED_UP * added
    return dots / 2 * (max(least / dots, odd) + max(least / dots, even)) + traffic_seconds(before, chip)
