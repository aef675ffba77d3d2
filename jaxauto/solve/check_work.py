"""``cost/compute.py`` for one state, in scalars: how long an operation takes on one device (see ``check.py``); what passes in pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from jaxauto.core import Kind, LinkKind
from jaxauto.cost.compute import bytes_per_flop, groups_together, may_be_minor, operation_flops, precision_of, traffic_seconds
from jaxauto.cost.hashing import passed
from jaxauto.cost.lanes import through_hbm
from jaxauto.cost.launches import PASSED
from jaxauto.cost.onchip import Near, Side, capacity
from jaxauto.cost.transforms import seconds_of_transform
from jaxauto.graph import multiplicity, walk
from jaxauto.groups import WHOLE, Edge, Operand, Operation
from jaxauto.masks import hashes
from jaxauto.rules.convolution import GROUPS
from jaxauto.solve.check_ring import padding

if TYPE_CHECKING:
    from jaxauto.solve.check import Answer


def roofline(answer: Answer, op: Operation, on_chip: Near) -> float:
    """Seconds of one run on one device."""
    chip, values = answer.model.chip, answer.model.values
    bytes_, copied = 0.0, 0.0
    for o, near in (*((o, on_chip.read) for o in op.operands), *((o, on_chip.written) for o in op.results)):
        where = answer.operand(op, o)
        value, pieces = values[o.value], answer.pieces(where)
        padded = padding(value.shape, where, may_be_minor(op, o), answer.sizes, chip.tile_of(value.dtype))
        fits = near.get((op.node.id, o.value), math.inf) / pieces <= capacity(chip)
        times = chip.dot_writes if op.rule.kind is Kind.DOT and near is on_chip.written else 1.0
        times *= on_chip.narrow.get((op.node.id, o.value), 1.0)
        bytes_ += 0.0 if fits else times * value.nbytes / pieces * padded
        twice = on_chip.copied.get((op.node.id, o.value))
        if twice is not None and _differs(answer, op, o, twice.last):
            local = value.nbytes / pieces
            copied += twice.times * (float(through_hbm(local, capacity(chip))) + (0.0 if fits else local * padded))
    split = answer.pieces(answer.operation[op.node.id])
    if op.rule.bytes_ is not None:
        bytes_ = min(bytes_, op.rule.bytes_ / split)
    seconds = bytes_ / (chip.bandwidth_efficiency * chip.hbm_bandwidth)
    if op.rule.kind not in (Kind.DOT, Kind.CONV):
        return seconds
    dtype = values[op.operands[0].value].dtype if op.operands else np.dtype(np.float32)
    reached = chip.flops_efficiency if op.rule.kind is Kind.DOT else chip.convolution_efficiency
    seconds = max(seconds, operation_flops(op) * _together(answer, op) / split / (reached * chip.peak_flops(dtype, precision_of(op.node))))
    seconds += traffic_seconds(copied, chip)
    side = on_chip.beside.get(op.node.id)
    return seconds if side is None else seconds + _beside(answer, op, side, on_chip.narrow, split)


def _together(answer: Answer, op: Operation) -> float:
    """Groups of a convolution's batch that XLA:CPU does not keep apart."""
    where = zip(answer.sizes, answer.operation[op.node.id], strict=True)
    together = groups_together(op, answer.model.chip)
    return together / math.prod(n for n, d in where if d != WHOLE and op.factors[d][0] == GROUPS) if together > 1 else 1.0


def _differs(answer: Answer, op: Operation, o: Operand, last: int | None) -> bool:
    """Whether examples fill whole lanes, neither dimension of a dot's matrices does, and the one that pads least is ``last``."""
    where, shape, tile = answer.operand(op, o), answer.model.values[o.value].shape, answer.model.chip.tile
    parts = [math.prod(n for n, d in zip(answer.sizes, where, strict=True) if d == k) for k in range(len(shape))]
    filled = {k for k, n in enumerate(shape) if tile and n % (parts[k] * tile[1]) == 0}
    minor = may_be_minor(op, o)
    if not filled or filled & set(minor):
        return False
    more = {k: math.ceil(shape[k] / parts[k] / tile[1]) * tile[1] / (shape[k] / parts[k]) for k in minor}
    return last in (None, max(k for k in minor if more[k] == min(more.values())))


def launched(answer: Answer) -> float:
    """Kernels of a step: of operations, of arrays that fused equations write, of slices that operations read, found from there back."""
    model, graph = answer.model, answer.model.variant.rewritten.graph
    values, runs, b = graph.values, multiplicity(graph), model.buffers
    ids = {node.id for _, node in model.variant.operations}
    makers = [values[int(n)].producer for n, written in zip(b.ids, b.written, strict=True) if written]
    total = sum(runs[i] for i in ids) + sum(runs[m.id] for m in makers if m is not None and not m.bodies and m.id not in ids)
    stacks = {link.target: node for node in walk(graph) for link in node.links if link.kind is LinkKind.XS}
    copied: set[int] = set()
    for node in walk(graph):
        for x in node.inputs if node.id in ids else ():
            while isinstance(x, int):
                copied |= {x} & stacks.keys()
                made = values[x].producer
                through = made is not None and made.prim in PASSED
                x = made.inputs[made.outputs.index(x)] if through and made is not None else None
    return total + sum(stacks[x].trips * runs[stacks[x].id] for x in copied)


def hashed(answer: Answer) -> float:
    """Seconds that random bits take beyond the bytes of what is made of them, found from there back."""
    model, rewritten, chip = answer.model, answer.model.variant.rewritten, answer.model.chip
    values, runs, held = rewritten.graph.values, multiplicity(rewritten.graph), {int(n) for n in model.buffers.ids}
    drawn = {n.outputs[0]: n for n in walk(rewritten.graph) if hashes(n)} if chip.hash_seconds else {}
    kernels: dict[int, list[float]] = {x: [] for x in drawn}
    for number in held if drawn else ():
        behind, found = [number], {number}
        for x in behind:
            made = values[x].producer if x == number or x not in held else None
            for y in (z for out, z in passed(made) if out == x) if made is not None and not made.bodies else ():
                behind += [y] if y not in found else []
                found.add(y)
        for x in found & drawn.keys():
            if x == number or x not in held:
                kernels[x].append(sum(values[y].nbytes for y in found & held))
    total = 0.0
    for number, node in drawn.items():
        group, dims = model.groups.place[rewritten.origin.get(number, number)]
        moved = kernels[number][0] if len(kernels[number]) == 1 else 0.0
        more = hashes(node) * chip.hash_seconds - traffic_seconds(moved, chip)
        total += max(0.0, more) * runs[node.id] / answer.pieces(answer.where(answer.group[group], dims))
    return total


def transformed(answer: Answer) -> float:
    """Seconds that Fourier transforms take a TPU beside what they read and write."""
    model, rewritten, chip = answer.model, answer.model.variant.rewritten, answer.model.chip
    runs, total = multiplicity(rewritten.graph), 0.0
    for node in walk(rewritten.graph) if chip.platform == "tpu" else ():
        if node.prim == "fft":
            (number,) = node.outputs
            group, dims = model.groups.place[rewritten.origin.get(number, number)]
            total += seconds_of_transform(node, chip) * runs[node.id] / answer.pieces(answer.where(answer.group[group], dims))
    return total


def _beside(answer: Answer, op: Operation, side: Side, narrow: Mapping[tuple[int, int], float], split: int) -> float:
    """What the rest of a dot's fusion takes longer than its buffers are charged for."""
    arrays = (*op.operands, *op.results)
    pieces = [answer.pieces(answer.operand(op, o)) for o in arrays]
    own = sum(narrow.get((op.node.id, o.value), 1.0) * answer.model.values[o.value].nbytes / n for o, n in zip(arrays, pieces, strict=True))
    moved = sum(bytes_ / pieces[k] for k, bytes_ in side.bytes_)
    hidden = max(0.0, operation_flops(op) / split * bytes_per_flop(answer.model.chip) / side.lanes - own)
    return traffic_seconds(max(0.0, moved - hidden) - side.exposed * moved, answer.model.chip)


def is_piece(answer: Answer, e: Edge) -> bool:
    """Whether an edge is for one of several pieces of an array that is not split along what is cut."""
    whole, piece = (answer.model.values[x] for x in (e.value, e.result))
    if e.node < 0 or piece.producer is None or piece.producer.id != e.node or whole.shape == piece.shape:
        return False
    split = answer.where(answer.group[e.source], [a for a, _ in e.dims])
    cut = {d for d, (n, m) in enumerate(zip(whole.shape, piece.shape, strict=False)) if n != m}
    several = len(piece.producer.outputs) > 1 and len(whole.shape) == len(piece.shape)
    return several and not cut & {*split} and all(e.dims[d][0] != WHOLE for d in cut)
