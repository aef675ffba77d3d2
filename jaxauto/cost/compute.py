"""Seconds of computation on one device: rooflines of operations and of fused, memory-bound equations.

roofline(flops, bytes) = max(flops / (efficiency · peak), bytes / (efficiency · bandwidth))     (Williams et al., 2009)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxauto.core import MATRIX, Kind, Node, Value
from jaxauto.cost.lanes import differs, through_hbm
from jaxauto.cost.layout import Laid, local_shape, padding
from jaxauto.cost.onchip import Near, Side, capacity
from jaxauto.groups import WHOLE, Operand, Operation
from jaxauto.rules.convolution import GROUPS
from jaxauto.strategies import project, shards
from jaxauto.targets.chip import most_exact

_FAR = Near()
_UNGROUPED = ("cpu",)  # platforms whose compiler convolves every group of the batch with every other one, and takes the diagonal


def traffic_seconds(bytes_: Any, chip: Any) -> Any:
    """Seconds to move ``bytes_`` between HBM and the cores."""
    return bytes_ / (chip.bandwidth_efficiency * chip.hbm_bandwidth)


def bytes_per_flop(chip: Any) -> float:
    """Bytes that HBM moves while the matrix unit does one flop in bfloat16."""
    return chip.bandwidth_efficiency * chip.hbm_bandwidth / (chip.flops_efficiency * chip.peak_flops("bfloat16"))


def ops_per_byte(chip: Any) -> float:
    """float32 operations that the vector unit does while HBM moves a byte."""
    return chip.vector_flops / chip.hbm_bandwidth


def operation_seconds(
    op: Operation, values: dict, state: np.ndarray, axis_sizes: tuple[int, ...], chip: Any, near: Near = _FAR
) -> np.ndarray:
    """Seconds of one run of an operation for each of its states.

    Args:
      state: ``[states, axes]`` positions in ``op.factors``.
      near: what is not in HBM where it fits on-chip memory, and what else a dot's fusion moves.

    Returns:
      ``float [states]``.
    """
    bytes_, copied, writes = np.zeros(len(state)), np.zeros(len(state)), written_as(op, chip)
    for o, known, times in (*((o, near.read, 1.0) for o in op.operands), *((o, near.written, writes) for o in op.results)):
        pieces = shards(project(state, factor_dims(op, o)), axis_sizes)
        far = known[op.node.id, o.value] / pieces > capacity(chip) if (op.node.id, o.value) in known else True
        moved, filled = times * near.narrow.get((op.node.id, o.value), 1.0), operand_bytes(o, op, values, state, axis_sizes, chip) * far
        bytes_ += moved * filled
        if twice := near.copied.get((op.node.id, o.value)):
            differ = _differs(twice.last, o, op, values, state, axis_sizes, chip)
            copied += twice.times * differ * (through_hbm(values[o.value].nbytes / pieces, capacity(chip)) + filled)
    if op.rule.bytes_ is not None:  # a gather touches the rows it reads, not the table
        bytes_ = np.minimum(bytes_, op.rule.bytes_ / shards(state, axis_sizes))
    seconds = traffic_seconds(bytes_, chip)
    if op.rule.kind not in MATRIX:
        return seconds
    seconds = np.maximum(seconds, matrix_seconds(op, values, state, axis_sizes, chip)) + traffic_seconds(copied, chip)
    side = near.beside.get(op.node.id)
    return seconds if side is None else seconds + _beside_seconds(side, near, op, values, state, axis_sizes, chip)


def _differs(last: int | None, operand: Operand, op: Operation, values: dict, state: np.ndarray, axis_sizes: Any, chip: Any) -> np.ndarray:
    """Whether dots by weights lay an operand or result of a dot over a batch otherwise than that does: ``bool [states]``."""
    local = local_shape(project(state, factor_dims(op, operand)), values[operand.value].shape, axis_sizes)
    batch = np.isin(np.arange(local.shape[1]), may_be_minor(op, operand), invert=True)
    return differs(local, batch, last, chip.tile[1])


def _beside_seconds(
    side: Side, near: Near, op: Operation, values: dict, state: np.ndarray, axis_sizes: tuple[int, ...], chip: Any
) -> np.ndarray:
    """What the rest of a dot's fusion takes longer than its buffers are charged for, which is as if nothing were split: ``float [states]``.

    A weight's gradient has fewer flops on each of several devices, and is as large as on one. Less than nothing where more is hidden.
    """
    arrays = (*op.operands, *op.results)
    pieces = [shards(project(state, factor_dims(op, o)), axis_sizes) for o in arrays]
    bytes_ = (near.narrow.get((op.node.id, o.value), 1.0) * values[o.value].nbytes for o in arrays)
    own = sum(b / p for b, p in zip(bytes_, pieces, strict=True))
    moved = sum(bytes_ / pieces[k] for k, bytes_ in side.bytes_)
    hidden = np.maximum(0.0, operation_flops(op) * bytes_per_flop(chip) / side.lanes / shards(state, axis_sizes) - own)
    return traffic_seconds(np.maximum(moved - hidden, 0.0) - side.exposed * moved, chip)


def unsplit_seconds(node: Node, op: Operation | None, values: Mapping[int, Value], chip: Any) -> float:
    """Seconds of one run of a whole node, ``op`` if it is an operation: a roofline."""
    moved = sum(values[x].nbytes for x in {*node.inputs, *node.outputs} if isinstance(x, int))
    if op is not None:
        moved += (written_as(op, chip) - 1) * sum(values[x].nbytes for x in node.outputs)
    seconds = float(traffic_seconds(moved, chip))
    if op is None or op.rule.kind not in MATRIX:
        return seconds
    return max(seconds, operation_flops(op) * groups_together(op, chip) / flops_per_second(node, op.rule.kind, _dtype(op, values), chip))


def written_as(op: Operation, chip: Any) -> float:
    """How many bytes one byte of a result counts as."""
    return chip.dot_writes if op.rule.kind is Kind.DOT else 1.0


def batch_factors(op: Operation) -> frozenset[str]:
    """What a dot goes over as a batch: factors of both operands and of the result."""
    if op.rule.kind is not Kind.DOT or len(op.operands) < 2:
        return frozenset()
    named = ({factor for _, factor in o.dims if factor} for o in (*op.operands, *op.results))
    return frozenset(set.intersection(*named))


def may_be_minor(op: Operation, operand: Operand) -> tuple[int, ...]:
    """The dimensions of an operand or result that a TPU may lay out last: not what a convolution slides over, nor a dot's batch."""
    slides, batch = op.rule.kind is Kind.CONV, batch_factors(op)
    return tuple(i for i, (_, factor) in enumerate(operand.dims) if not (slides and factor.startswith("s")) and factor not in batch)


def operand_bytes(operand: Operand, op: Operation, values: dict, state: np.ndarray, axis_sizes: tuple[int, ...], chip: Any) -> np.ndarray:
    """Bytes that one device has of an operand or result, tiles filled, for each state: ``float [states]``."""
    value, place = values[operand.value], project(state, factor_dims(op, operand))
    padded = padding(place, Laid(value.shape, may_be_minor(op, operand), tile), axis_sizes) if (tile := chip.tile_of(value.dtype)) else 1.0
    return value.nbytes / shards(place, axis_sizes) * padded


def matrix_seconds(op: Operation, values: dict, state: np.ndarray, axis_sizes: tuple[int, ...], chip: Any) -> np.ndarray:
    """Seconds of the matrix unit alone, for each state: ``float [states]``."""
    return done_flops(op, state, axis_sizes, chip) / flops_per_second(op.node, op.rule.kind, _dtype(op, values), chip)


def flops_per_second(node: Node, kind: Kind, dtype: Any, chip: Any) -> float:
    """What the matrix unit reaches in a node of a kind, on operands of a dtype."""
    return (chip.convolution_efficiency if kind is Kind.CONV else chip.flops_efficiency) * chip.peak_flops(dtype, precision_of(node))


def precision_of(node: Node) -> str:
    """What is asked of a product, as ``Chip.peak_flops`` knows it."""
    asked = node.params.get("precision")
    return most_exact(getattr(p, "name", str(p)) for p in (asked if isinstance(asked, tuple) else (asked,)) if p is not None)


def _dtype(op: Operation, values: Mapping[int, Value]) -> Any:
    return values[op.operands[0].value].dtype if op.operands else np.dtype(np.float32)


def operation_flops(op: Operation) -> float:
    """Flops of one run of the whole, unsharded operation."""
    return float(op.rule.flops or 0.0) if op.rule.kind in MATRIX else 0.0


def done_flops(op: Operation, state: np.ndarray, axis_sizes: tuple[int, ...], chip: Any) -> np.ndarray:
    """Flops of one run on one device, for each state, those included that the compiler adds: ``float [states]``."""
    flops, together = operation_flops(op) / shards(state, axis_sizes), groups_together(op, chip)
    if together == 1:
        return flops
    grouped = [k for k, (factor, _) in enumerate(op.factors) if factor == GROUPS]
    return flops * together / np.where(np.isin(state, grouped), axis_sizes, 1).prod(-1)


def groups_together(op: Operation, chip: Any) -> int:
    """How many groups of a batch one convolution goes over, and multiplies its flops by. Seen on CPU: weights of depthwise convolutions."""
    return op.node.params.get("batch_group_count", 1) if op.rule.kind is Kind.CONV and chip.platform in _UNGROUPED else 1


def factor_dims(op: Operation, operand: Any) -> tuple[int, ...]:
    """For each dimension of an operand or result, the index of its factor in ``op.factors``, or WHOLE."""
    index = {f: i for i, (f, _) in enumerate(op.factors)}
    return tuple(index.get(f, WHOLE) if d != WHOLE or f else WHOLE for d, f in operand.dims)
