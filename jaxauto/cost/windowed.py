"""Windowed einsums: XLA:TPU scatters the sum of a dot's partial results over ``n`` devices beside the dot, as a loop.

A dot makes two pieces of the result, one each way round the ring, while two others are sent: where it takes less time than that, it waits,
and a small weight's gradient is better summed whole. It reads the pieces' part of the operand that has the scattered
dimension, the other operand whole. One operand is transposed before the loop (``_turned``), into on-chip memory if it fits there; unless it
is small, that may be full, and memory is set aside for it. The other one stays on chip if it is small; else, if the first leaves room, it
is brought there, whole, for every second dot, while the dot before it leaves time for that. The pieces are added up on chip as long as
there is room. Of a batch the pieces' part is copied out of its operand instead, nothing stays on chip, and the pieces pass through HBM.
What another dot would make of its operands as it reads them (``made_inside``) is written before the loop, unless it stays on chip. For the
gradient of a weight it is written where it is first made, in the forward pass, and takes memory from there on.
Convolutions, whose weights' gradients are scattered, are taken apart too (seen in a U-Net): the pieces' part has few features, so tiles
are mostly empty. It is copied out in a pass of its own in each trip, while no convolution runs, and lies beside its operand.

Seen in schedules of single dots for v5e, v5p and v6e, on meshes of one and two axes: n is 4 to 32; the sum goes to one dimension, of one
operand alone (no batch), that is not split already; and for each byte of one's result the n devices do ``least_flops``, about as many as
while it is sent over one link. All other sums are waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from jaxauto.core import Kind, MeshAxes
from jaxauto.cost.collectives import collective_seconds
from jaxauto.cost.compute import done_flops, factor_dims, matrix_seconds, operand_bytes, traffic_seconds
from jaxauto.cost.onchip import capacity
from jaxauto.cost.patterns import makes_view
from jaxauto.groups import Groups, Operand, Operation
from jaxauto.strategies import project

FEWEST = 4  # devices
PIECES = 2  # of the result in a trip
ADDED_UP = 3  # times that the result passes through HBM where there is no room for its pieces
ADDED_UP_IN_BATCH = 2
COPIED = 2  # times that an operand (its pieces, of a batch) does as it is copied from HBM to HBM
WRITTEN = 2  # times that what is made for the loop does: as it is written, and read once more
AT_ONCE = 4  # pieces that are alive
SMALL = 0.25  # of on-chip memory: an operand that stays there for all of a loop
ROOM = 0.7  # of on-chip memory, for operands and pieces
FLOPS_PER_BYTE = {"v5e": 4192, "v5p": 4192, "v6e": 9824}  # k: bfloat16 dots of k - 32 are waited for, of k + 32 not; float32 of twice that
OF_LINK = 0.96  # of the flops while one link sends a byte, on other chips (v5e, v6e)
LANES = 128  # what XLA wants the last dimension of a piece to be a multiple of
TURNS_CUT = ("v6e",)  # chips whose compiler transposes the operand with the scattered dimension, whatever the lanes


class Inside(NamedTuple):
    """An operand of a dot that is made as it is read, so written before a loop.

    ``shared``: other dots read it too. ``placed``: what it is made of is read for it alone from there on (``facts.take_places``), and makes
    place for its transposed copy; but not if that is ``near``, on chip where it fits.
    """

    operand: int
    shared: bool
    placed: bool = False
    near: bool = False


def windowed(
    op: Operation,
    result: Operand,
    values: dict,
    state: np.ndarray,
    target: np.ndarray,
    partial: np.ndarray,
    mesh: MeshAxes,
    chip: Any,
    inside: Sequence[Inside] = (),
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Which sums are scattered beside their dot, what the dot takes longer for that, and memory beside its operands.

    Args:
      state: ``[a, axes]`` positions in ``op.factors``. target: ``[b, axes]`` in the result's dimensions.
      partial: ``bool [a, axes]``, axes along which the result is a term of a sum.
      inside: the operands that are not in memory without a loop.

    Returns:
      ``bool [a, b]``, the seconds of one run and bytes of HBM, ``float [a, b]``; for each operand
      the bytes that have to be in memory for it, the same: all of one of ``inside``, of others its transposed copy.
    """
    shape = len(state), len(target)
    hidden, extra, beside, whole = np.zeros(shape, bool), np.zeros(shape), np.zeros(shape), [np.zeros(shape) for _ in op.operands]
    if op.rule.kind not in (Kind.DOT, Kind.CONV) or len(op.operands) != 2 or mesh.windows is None:
        return hidden, extra, beside, whole
    count = np.where(partial, np.asarray(mesh.sizes, float), 1.0).prod(-1)
    flops = matrix_seconds(op, values, state, mesh.sizes, chip)
    *sizes, added = (operand_bytes(o, op, values, state, mesh.sizes, chip) for o in (*op.operands, result))
    fits = (count >= FEWEST) & (count <= mesh.windows) & (count * done_flops(op, state, mesh.sizes, chip) >= least_flops(chip) * added)
    here = project(state, factor_dims(op, result))
    apart = np.maximum(flops, traffic_seconds(sum(sizes) + added, chip))
    sent = _sent(added, partial, mesh)
    batch = _batch(op, state, mesh) > 1
    several, placed = {x.operand: x.shared for x in inside}, {x.operand: x.near for x in inside if x.placed}
    made = [s * ((k in several) & (s > SMALL * chip.vmem_bytes)) for k, s in enumerate(sizes)]
    once = [0.0 if several.get(k) or k in placed else m for k, m in enumerate(made)]
    for d, (_, factor) in enumerate(result.dims):
        has = [k for k, o in enumerate(op.operands) if any(f == factor for _, f in o.dims)]
        if len(has) != 1:
            continue
        rows = np.nonzero(fits & ~(here == d).any(-1))[0]
        pairs = (~partial[rows][:, None] | (target == d)[None]).all(-1)
        (cut,) = has
        needed = [~(batch & (k == cut)) for k in range(2)]  # of a batch it is made as its pieces are copied out
        held = written = sum(n * m for n, m in zip(needed, made, strict=True))
        if op.rule.kind is Kind.CONV:
            cut_out = _filled(values[result.value].shape[d], count) * sizes[cut]
            loop = _loop_of_convolution(sizes[cut], cut_out, sizes[1 - cut], added, flops, sent, count, chip)
            held = held + AT_ONCE / count * cut_out
        else:
            turned = _turned(op, result, values, d, here, count, mesh, cut if chip.name in TURNS_CUT else None)
            one = _loop(cut, np.where(turned < 0, cut, turned), turned >= 0, sizes, added, flops, sent, count, chip)
            loop = np.where(batch, _loop_of_batch(sizes[cut], sizes[1 - cut], added, flops, sent, count, chip), one)
            copy, anyway = (np.choose(np.maximum(turned, 0), of) * ((turned >= 0) & ~batch) for of in (sizes, once))
            far = copy * (copy > SMALL * chip.vmem_bytes)
            held = held - anyway + far  # what is turned is made so, unless another dot reads it
            for k, near in placed.items():
                held = held - needed[k] * made[k] * ((turned == k) & ~batch & ~(near & (sizes[k] <= capacity(chip))))
            for k in {0, 1} - {*several}:
                whole[k][rows] += pairs * np.broadcast_to(far * (turned == k), len(state))[rows][:, None]
        longer = np.maximum(loop - apart, 0.0) + traffic_seconds(WRITTEN * written, chip)
        hidden[rows] |= pairs
        beside[rows] += pairs * np.broadcast_to(held, len(state))[rows][:, None]
        extra[rows] += pairs * longer[rows][:, None]
        for k in several:
            whole[k][rows] += pairs * (needed[k] * sizes[k])[rows][:, None]
    return hidden, extra, beside, whole


def least_flops(chip: Any) -> float:
    """Flops of all devices for each byte of a device's result from which on XLA:TPU takes a dot apart (compiled for v5e, v5p and v6e)."""
    return FLOPS_PER_BYTE.get(chip.name, OF_LINK * chip.peak_flops("bfloat16") / chip.link_bandwidth)


def _sent(added: np.ndarray, partial: np.ndarray, mesh: MeshAxes) -> np.ndarray:
    """Seconds in which a piece each way is sent on to the next device, for each state."""
    seconds = np.zeros(len(added))
    for axes in np.unique(partial, axis=0):
        rows, used = (partial == axes).all(-1), np.nonzero(axes)[0]
        sizes, links = [mesh.sizes[a] for a in used], [mesh.links[a] for a in used]
        seconds[rows] = collective_seconds("collective-permute", added[rows], sizes, links)
    return seconds


def _loop(cut: int, turned: np.ndarray, copied: np.ndarray, sizes: list, added, flops, sent, count, chip: Any) -> np.ndarray:
    """Seconds of a loop and of what is brought before it, for each state.

    Args:
      cut: the operand that has the scattered dimension. turned: the one that is transposed, if ``copied``; else the one left in HBM.
      sizes: bytes of each operand; added: of the result; sent: seconds of one piece; count: devices.
    """
    vmem, dots = chip.vmem_bytes, count / PIECES
    first, other = np.where(turned == 0, sizes, sizes[::-1])
    read = [traffic_seconds(np.where(is_cut, o / dots, o), chip) for o, is_cut in ((first, turned == cut), (other, turned != cut))]
    near, small = copied & (first < vmem), other <= SMALL * vmem
    streamed = small | (first * near <= SMALL * vmem) & (first * near + other <= vmem)
    far = np.where(near, 0.0, read[0])
    odd = far + np.where(small, 0.0, read[1] + np.where(streamed, traffic_seconds(other, chip), 0.0))
    even = far + np.where(streamed, 0.0, read[1])
    before = np.where(near, 1, COPIED) * first * copied + other * small
    held = first * near + other * streamed + AT_ONCE * added / count
    through = np.where(held > ROOM * vmem, ADDED_UP, 0) * added
    least = np.maximum(flops / dots, sent)
    return dots / 2 * (np.maximum(least, odd) + np.maximum(least, even)) + traffic_seconds(before + through, chip)


def _loop_of_batch(cut, whole, added, flops, sent, count, chip: Any) -> np.ndarray:
    """Seconds of a loop over a batch of dots, for each state: of operands of ``cut`` and ``whole`` bytes and a result of ``added``."""
    least = np.maximum(flops, count / PIECES * sent)
    through = np.maximum(least, traffic_seconds(cut + count / PIECES * whole + added, chip))
    return through + traffic_seconds(ADDED_UP_IN_BATCH * added + COPIED * cut, chip)


def _filled(features: int, count: np.ndarray) -> np.ndarray:
    """Lanes that the pieces of so many features take, for each that the whole takes."""
    pieces = np.maximum(count, 1.0)
    return pieces * np.ceil(features / pieces / LANES) / np.ceil(features / LANES)


def _loop_of_convolution(cut, pieces, whole, added, flops, sent, count, chip: Any) -> np.ndarray:
    """Seconds of a loop of convolutions, for each state; ``pieces``: bytes of those that are copied out of the operand of ``cut`` bytes."""
    least = np.maximum(flops, count / PIECES * sent)
    through = np.maximum(least, traffic_seconds(pieces + count / PIECES * whole + added, chip))
    return through + traffic_seconds(cut + pieces, chip)


def _turned(op: Operation, result: Operand, values: dict, d: int, here, count, mesh: MeshAxes, always: int | None) -> np.ndarray:
    """Which operand is transposed before the loop, for each state; -1: none. ``always``: this one, if any.

    The result's last dimension is the last in memory where its piece fills whole lanes, else the other one; transposed is the operand that
    lacks it. Of a result with several dimensions of one operand it is that one.
    """
    named = [{f for _, f in o.dims if f} for o in (*op.operands, result)]
    own = [(found & named[-1]) - set.intersection(*named) for found in named[:-1]]
    if len(own) != 2 or not all(own):
        return np.full(len(here), -1)
    if always is not None:
        return np.full(len(here), always)
    if len(own[0]) != len(own[1]):
        return np.full(len(here), int(len(own[1]) > len(own[0])))
    last = last_dim(result)
    split = np.where(here == last, np.asarray(mesh.sizes, float), 1.0).prod(-1) * np.where(last == d, count, 1.0)
    has = int(result.dims[last][1] in own[1])
    return np.where(values[result.value].shape[last] / split % LANES == 0, 1 - has, has)


def last_dim(result: Operand) -> int:
    """The last dimension of a result that is not of one element."""
    return max(d for d, (_, factor) in enumerate(result.dims) if factor)


def made_inside(groups: Groups, held: Set[int]) -> dict[int, bool]:
    """Operands of dots that are made as they are read, neither in memory (``held``) nor a view of what is; whether several read them."""
    readers = Counter(number for op in groups.operations for number in {o.value for o in op.operands})
    found = {}
    for x in {o.value for op in groups.operations if op.rule.kind is Kind.DOT for o in op.operands}:
        at: Any = x
        while at not in held and is_view(groups, at):
            at = groups.graph.values[at].producer.inputs[0]
        if at not in held:
            found[x] = readers[x] > 1
    return found


def is_view(groups: Groups, number: Any) -> bool:
    """Whether a value is a view of another one, or that transposed."""
    node = groups.graph.values[number].producer if isinstance(number, int) else None
    return node is not None and makes_view(node, groups.rules)


def _batch(op: Operation, state: np.ndarray, mesh: MeshAxes) -> np.ndarray:
    """How many dots of a batch one device does, for each state."""
    count = np.ones(len(state))
    for k, (factor, size) in enumerate(op.factors):
        if all(any(f == factor for _, f in o.dims) for o in (*op.operands, *op.results)):
            count *= size / np.where(state == k, np.asarray(mesh.sizes, float), 1.0).prod(-1)
    return count
