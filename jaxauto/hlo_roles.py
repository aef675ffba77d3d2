"""What an all-reduce stands for. Compilers write some gathers and scatters as all-reduces:

- all-gather: each device sets its part into zeros and the sum puts the parts together (TPU: where parts are short);
- reduce-scatter: everybody who reads the sum cuts a part out at a device's own offset (CPU, which has no reduce-scatter; TPU inside loops).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxauto.hlo import Computation, Instruction, Module

_VIEWS = frozenset({"bitcast", "copy", "reshape", "transpose", "convert", "tuple", "get-tuple-element", "copy-start", "copy-done"})
_DEPTH = 12  # instructions followed


def role(module: Module, computation: Computation, reduction: Instruction) -> str:
    """``"all-gather"``, ``"reduce-scatter"`` or ``"all-reduce"``: what an all-reduce instruction does for the program."""
    operands = [computation.by_name.get(name) for name in reduction.operands]
    if operands and all(o is not None and _is_part_in_zeros(module, computation, o) for o in operands):
        return "all-gather"
    return "reduce-scatter" if _only_cut(module, computation, reduction) else "all-reduce"


def _is_part_in_zeros(module: Module, computation: Computation, i: Instruction) -> bool:
    """Whether a value is zeros with one slice set."""
    inner, arguments = _opened(module, computation, i)
    root = _behind_views(inner, inner.root if inner is not computation else i)
    if root.opcode != "dynamic-update-slice" or not root.operands:
        return False
    base = inner.by_name.get(root.operands[0])
    if base is not None and base.opcode == "parameter" and inner is not computation:
        base = computation.by_name.get(arguments[int(base.arguments)])
        inner = computation
    return base is not None and _is_zero(module, inner, base)


def _opened(module: Module, computation: Computation, i: Instruction) -> tuple[Computation, tuple[str, ...]]:
    """The computation that makes a value, and what its parameters are bound to."""
    names = i.called.get("calls", ()) if i.opcode == "fusion" else ()
    callee = module.computations.get(names[0]) if names else None
    return (callee, tuple(i.operands)) if callee is not None else (computation, ())


def _behind_views(computation: Computation, i: Instruction) -> Instruction:
    for _ in range(_DEPTH):
        if i.opcode not in _VIEWS or not i.operands or i.operands[0] not in computation.by_name:
            break
        i = computation.by_name[i.operands[0]]
    return i


def _is_zero(module: Module, computation: Computation, i: Instruction) -> bool:
    for _ in range(_DEPTH):
        if i.opcode == "constant":
            return re.fullmatch(r"-?0(\.0*)?", i.arguments.strip("{} ")) is not None
        if i.opcode == "fusion":
            computation, _ = _opened(module, computation, i)
            i = computation.root
        elif i.opcode in _VIEWS | {"broadcast"} and i.operands and i.operands[0] in computation.by_name:
            i = computation.by_name[i.operands[0]]
        else:
            return False
    return False


def _only_cut(module: Module, computation: Computation, reduction: Instruction, depth: int = 0) -> bool:
    """Whether all that reads a value takes a dynamic slice of it."""
    users = computation.users.get(reduction.name, [])
    if not users or reduction.root or depth > _DEPTH:
        return False
    return all(_cuts(module, computation, reduction, user, depth) for user in users)


def _cuts(module: Module, computation: Computation, value: Instruction, user: Instruction, depth: int) -> bool:
    if user.opcode == "dynamic-slice":
        return user.operands[0] == value.name
    if user.opcode == "fusion":
        callee, arguments = _opened(module, computation, user)
        places = [number for number, name in enumerate(arguments) if name == value.name]
        return callee is not computation and all(_only_cut(module, callee, callee.parameters[n], depth + 1) for n in places)
    return user.opcode in _VIEWS and _only_cut(module, computation, user, depth + 1)
