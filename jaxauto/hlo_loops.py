"""Trip counts of while loops, read off the counter: its start in the caller, its step in the body, its bound in the condition."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxauto.hlo import Computation, Instruction, Module

# direction of comparison -> direction of counting (0: either), trips more where the counter meets the bound
_BOUNDS = {"LT": (1, 0), "LE": (1, 1), "GT": (-1, 0), "GE": (-1, 1), "NE": (0, 0)}
_FORWARD = frozenset(
    {"copy", "bitcast", "convert", "reshape", "broadcast", "copy-start", "copy-done", "opt-barrier", "optimization-barrier"}
)
_CALLS = frozenset({"fusion", "call", "async-start"})
_DEPTH = 200  # of operands followed

Linear = tuple[int | None, int]  # (index, offset): carry[index] + offset; index None: the constant


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Trips of a while instruction of ``computation``: what XLA wrote, else ``ceil((bound - start) / step)``; None: cannot be read."""
    known = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.attributes)
    if known:
        return int(known.group(1))
    condition, body = (module.computations.get(loop.called[role][0]) for role in ("condition", "body"))
    if condition is None or body is None:
        return None
    counter = _Counter(module)
    compared = counter.compare(_Scope(condition), condition.root)
    if compared is None:
        return None
    left, right, (direction, at_bound) = compared
    starts, steps = [], []
    for side in (left, right):
        start = 0 if side[0] is None else counter.start(computation, loop, side[0])
        step = counter.step(body, side[0])
        if start is None or step is None:
            return None
        starts.append(start + side[1])
        steps.append(step)
    return _trips(starts[1] - starts[0], steps[0] - steps[1], direction, at_bound)


def _trips(span: int, step: int, direction: int, at_bound: int) -> int | None:
    """Trips of a counter that moves by ``step`` to something ``span`` away."""
    if step == 0 or step * direction < 0:
        return None
    if span * step < 0:
        return 0 if direction else None
    return math.ceil((abs(span) + at_bound) / abs(step))


@dataclass
class _Scope:
    """Where a value is looked up: a computation, and, in a callee, the call that binds its parameters."""

    computation: Computation
    call: Instruction | None = None
    caller: _Scope | None = None


@dataclass
class _Counter:
    """Follows scalars through copies, tuples and fusions, as ``carry[index] + offset``."""

    module: Module

    def compare(self, scope: _Scope, i: Instruction) -> tuple[Linear, Linear, tuple[int, int]] | None:
        """Both sides of the comparison that decides, and its row of ``_BOUNDS``."""
        direction = i.attribute("direction") if i.opcode == "compare" else ""
        if direction in _BOUNDS:
            left, right = (self.linear(scope, scope.computation.by_name.get(o)) for o in i.operands[:2])
            return None if left is None or right is None else (left, right, _BOUNDS[direction])
        if callee := self._callee(i):
            return self.compare(_Scope(callee, i, scope), callee.root)
        followed = [scope.computation.by_name.get(o) for o in i.operands] if i.opcode in _FORWARD | {"and"} else []
        return next((c for o in followed if o and (c := self.compare(scope, o))), None)

    def _callee(self, i: Instruction) -> Computation | None:
        names = i.called.get("calls") or i.called.get("to_apply") or ("",)
        return self.module.computations.get(names[0]) if i.opcode in _CALLS else None

    def linear(self, scope: _Scope, i: Instruction | None, element: int | None = None, depth: int = 0) -> Linear | None:
        """The value of an instruction (of one element of it, where it is a tuple); None if it is not of this form."""
        if i is None or depth > _DEPTH:
            return None
        if i.opcode == "constant":
            return (None, int(i.arguments)) if re.fullmatch(r"-?\d+", i.arguments) else None
        if i.opcode == "parameter":
            return self._parameter(scope, i, element, depth)
        if callee := self._callee(i):
            return self.linear(_Scope(callee, i, scope), callee.root, element, depth + 1)
        operands = [scope.computation.by_name.get(o) for o in i.operands]
        if i.opcode == "get-tuple-element":
            return self.linear(scope, operands[0], int(i.attribute("index")), depth + 1)
        if i.opcode == "tuple":
            return None if element is None or element >= len(operands) else self.linear(scope, operands[element], None, depth + 1)
        if i.opcode in _FORWARD and operands:
            return self.linear(scope, operands[0], element, depth + 1)
        if i.opcode in ("add", "subtract") and len(operands) == 2:
            left, right = (self.linear(scope, o, None, depth + 1) for o in operands)
            return _combine(left, right, 1 if i.opcode == "add" else -1)
        return None

    def _parameter(self, scope: _Scope, i: Instruction, element: int | None, depth: int) -> Linear | None:
        if scope.call is None or scope.caller is None:
            return None if element is None else (element, 0)
        number = int(i.arguments)
        operand = scope.call.operands[number] if number < len(scope.call.operands) else ""
        return self.linear(scope.caller, scope.caller.computation.by_name.get(operand), element, depth + 1)

    def step(self, body: Computation, index: int | None) -> int | None:
        """What one trip adds to a carry; 0 for constants."""
        if index is None:
            return 0
        after = self.linear(_Scope(body), body.root, index)
        return after[1] if after and after[0] == index else None

    def start(self, computation: Computation, loop: Instruction, index: int) -> int | None:
        """The first value of a carry, through enclosing loops that leave it as it is."""
        value = self.linear(_Scope(computation), computation.by_name.get(loop.operands[0]), index)
        if value is None or value[0] is None:
            return value[1] if value else None
        for outer in self.module.computations.values():
            for i in outer.instructions:
                if computation.name in i.called.get("body", ()) and self.step(computation, value[0]) == 0:
                    first = self.start(outer, i, value[0])
                    return None if first is None else first + value[1]
        return None


def _combine(left: Linear | None, right: Linear | None, sign: int) -> Linear | None:
    """``left + sign * right``, at most one of them a carry, and that with a plus."""
    if left is None or right is None or (right[0] is not None and (left[0] is not None or sign < 0)):
        return None
    return (left[0] if left[0] is not None else right[0]), left[1] + sign * right[1]
