"""HBM bytes of the instructions of a compiled schedule (jaxauto.hlo): what they read and write, tile padding included."""

from __future__ import annotations

import math
from dataclasses import replace

from jaxauto.hlo import Computation, Instruction, Module, Shape
from jaxauto.hlo_collectives import KINDS, background

_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "opt-barrier"}
    | {"optimization-barrier", "add-dependency", "domain", "get-dimension-size", "async-update"}
)
FREE_CALLS = frozenset(
    {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "AsyncCollectiveStart", "AsyncCollectiveDone"}
)
_LIBRARIES = ("__cublas$", "__cudnn$")
_VIEWS = frozenset({"bitcast", "reshape", "convert", "copy", "transpose"})
_BINARY = frozenset({"add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "compare", "select"})
_UNARY = frozenset({"negate", "abs", "exponential", "log", "rsqrt", "sqrt", "tanh", "logistic"})
_LAZY = _VIEWS | _BINARY | _UNARY | {"reduce"}  # inside a fusion: computed only where a slice asks
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # in place -> which operand is the update
HOST = 5  # the memory space of pinned host memory
_DEPTH = 50  # of nested fusions and views followed
COLLECTIVES = frozenset(f"{kind}{part}" for kind in KINDS for part in ("", "-start"))
_COPIES = frozenset({"copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"})


def hbm_bytes(module: Module, computation: Computation, i: Instruction) -> float:
    """Bytes between HBM and the compute units for one run of a scheduled instruction.

    On-chip memory (``S(1)`` on TPU) is free. A slice costs what it slices, inside a fusion too; an update in place its update; an
    operand that a fusion only hands on nothing. What a collective moves is the collective's own cost.
    """
    if i.opcode in _FREE or i.opcode in COLLECTIVES or i.opcode.endswith("-done") or call_target(i) in FREE_CALLS:
        return 0.0
    if is_copy(i):
        return _copy_bytes(module, i)
    if names := background(i):
        wrapped = [module.computations[name] for name in names if name in module.computations]
        return sum(hbm_bytes(module, c, inner) for c in wrapped for inner in c.instructions)
    callee = _callee(module, i)
    if callee is not None:
        return 0.0 if callee.name.startswith("all-reduce-scatter") else _fusion_bytes(module, computation, i, callee)
    operands = [computation.by_name[o] for o in i.operands if o in computation.by_name]
    result = sum(_bytes(module, s) for s in results(i))
    read = [sum(_bytes(module, s) for s in o.shapes) for o in operands]
    if i.opcode in _SLICES and operands:
        return result + sum(read[1:]) + (i.shapes[0].padded_bytes if read[0] else 0.0)
    if i.opcode in _UPDATES and len(operands) > 1:
        update = operands[_UPDATES[i.opcode]].shapes[0]
        passes = 2 if i.opcode == "scatter" else 1  # a scatter reads what it adds to
        return _bytes(module, update) + (passes * update.padded_bytes if result else 0.0)
    return result + sum(read)


def results(i: Instruction) -> tuple[Shape, ...]:
    """The arrays that an instruction writes: the last of a library's matrix product or convolution is room to work in."""
    has_room = len(i.shapes) > 1 and i.shapes[-1].bits == 8 and call_target(i).startswith(_LIBRARIES)
    return i.shapes[:-1] if has_room else i.shapes


def is_copy(i: Instruction) -> bool:
    """Whether an instruction starts an async copy: of an array or a slice; on GPU those of the host's memory are fusions."""
    return i.opcode in _COPIES or (i.opcode == "fusion-start" and any(s.memory_space == HOST for s in i.shapes))


def call_target(i: Instruction) -> str:
    """The name of a custom call; empty for anything else."""
    return i.attribute("custom_call_target").strip('"') if i.opcode == "custom-call" else ""


def _bytes(module: Module, shape: Shape) -> float:
    return 0.0 if shape.memory_space == HOST or (module.tiled and shape.memory_space) else shape.padded_bytes


def _callee(module: Module, i: Instruction) -> Computation | None:
    return module.computations.get(i.called.get("calls", ("",))[0]) if i.opcode == "fusion" else None


def _fusion_bytes(module: Module, computation: Computation, i: Instruction, callee: Computation) -> float:
    read = 0.0
    for number, parameter in callee.parameters.items():
        source = computation.by_name.get(i.operands[number]) if number < len(i.operands) else None
        size = sum(_bytes(module, s) for s in (source or parameter).shapes)
        read += size * _touched(module, callee, parameter) if size else 0.0
    return read + _written(module, callee, callee.root, i.shapes)


def host_bytes(i: Instruction) -> float:
    """Bytes that an async copy moves to or from the host's memory (``S(5)``)."""
    ends = _ends(i)
    return min(s.padded_bytes for s in ends) if any(s.memory_space == HOST for s in ends) else 0.0


def _ends(i: Instruction) -> list[Shape]:
    """The two arrays of an async copy: its results are (destination, source, flag), or ((source or destination, part, …), …) of a slice."""
    return [s for s in i.shapes if s.dims and s.dtype not in ("token", "opaque")][:2]


def _copy_bytes(module: Module, i: Instruction) -> float:
    """An async copy moves the smaller array, once for each end in HBM."""
    ends = _ends(i)
    return min((s.padded_bytes for s in ends), default=0.0) * sum(1 for s in ends if _bytes(module, s))


def _touched(module: Module, computation: Computation, value: Instruction, depth: int = 0) -> float:
    """The fraction of a fusion's operand that its uses read."""
    fraction = 0.0
    for user in computation.users.get(value.name, ()):
        for position in (k for k, o in enumerate(user.operands) if o == value.name):
            fraction += _used(module, computation, value, user, position, depth)
            if fraction >= 1.0:
                return 1.0
    return fraction


def _used(module: Module, computation: Computation, value: Instruction, user: Instruction, position: int, depth: int) -> float:
    """The fraction that one operand of one user reads."""
    elements = float(sum(s.elements for s in value.shapes)) or 1.0
    if depth > _DEPTH:
        return 1.0
    if position == 0 and user.opcode in _SLICES:
        return sum(s.elements for s in user.shapes) / elements
    if position == 0 and user.opcode == "scatter":
        return computation.operand_shapes(user)[-1].elements / elements
    handed_on = (position == 0 and user.opcode == "dynamic-update-slice") or (user.root and user.opcode == "tuple")
    if handed_on or user.opcode in COLLECTIVES or call_target(user) in FREE_CALLS:
        return 0.0
    if user.opcode == "pad" and position == 0 and not user.root:
        return _touched_of_padded(computation, value, user)
    if user.opcode in _LAZY and not user.root:
        written = user.opcode != "bitcast" and any(u.root and u.opcode == "tuple" for u in computation.users.get(user.name, ()))
        return 1.0 if written else _touched(module, computation, user, depth + 1)
    callee = _callee(module, user)
    if callee is None or position not in callee.parameters:
        return 1.0
    inner = _touched(module, callee, callee.parameters[position], depth + 1)
    if callee.root.opcode in _VIEWS and not user.root:
        return min(inner, _touched(module, computation, user, depth + 1))
    return inner


def _touched_of_padded(computation: Computation, value: Instruction, pad: Instruction) -> float:
    """The fraction of an operand that slices of it, padded, read: its own elements, not the padding."""
    users = computation.users.get(pad.name, ())
    if any(user.opcode not in ("slice", "dynamic-slice") for user in users):
        return 1.0
    dims = value.shapes[0].dims
    read = sum(math.prod(min(own, of) for own, of in zip(user.shapes[0].dims, dims, strict=True)) for user in users)
    return read / (math.prod(dims) or 1)


def _written(module: Module, computation: Computation, value: Instruction, shapes: tuple[Shape, ...]) -> float:
    """Bytes that a fusion writes for (a part of) its result; ``shapes`` is that part as the caller sees it, memory space included."""
    operands = [computation.by_name[o] for o in value.operands if o in computation.by_name]
    if value.opcode == "tuple" and len(operands) == len(shapes):
        return sum(_written(module, computation, o, (s,)) for o, s in zip(operands, shapes, strict=True))
    handed_on = value.opcode == "parameter" and not value.root
    if handed_on or value.opcode in COLLECTIVES or call_target(value) in FREE_CALLS:
        return 0.0
    callee = _callee(module, value)
    if callee is not None and len(value.shapes) == len(shapes):
        return _written(module, callee, callee.root, shapes)
    if value.opcode == "bitcast" and operands and operands[0].opcode in {"bitcast", *_UPDATES}:
        return _written(module, computation, operands[0], shapes)
    if value.opcode in _UPDATES and len(operands) > 1:
        update = operands[_UPDATES[value.opcode]].shapes[0]
        return replace(update, memory_space=0).padded_bytes if any(_bytes(module, s) for s in shapes) else 0.0
    return sum(_bytes(module, s) for s in shapes)
