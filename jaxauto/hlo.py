"""Reads a compiled module: the scheduled, optimised HLO text of XLA's CPU, GPU and TPU backends, as data. Needs no JAX.

A loop body is listed once: everything here is multiplied by how often its computation runs in one step (``Module.multiplicity``).
All numbers are for one device, which is what an SPMD module is written for. An opcode that is not known here is kept and counts nothing.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from jaxauto import hlo_collectives, hlo_loops, hlo_ops
from jaxauto.hlo_collectives import HloCollective, mesh_axes, parse_groups
from jaxauto.hlo_ops import Shape, parse_shape

__all__ = ["Computation", "HloCollective", "Instruction", "Loop", "Module", "Shape", "mesh_axes", "parse", "parse_groups"]

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=(){},]+) = ")
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(){}]+) .*\{\s*$")
_OPCODE = re.compile(r"\s*([a-zA-Z][\w\-]*)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_PARENS = re.compile(r"[()]")
_REFERENCE = re.compile(r"%([^\s,(){}]+)")
_ROLES = "calls|to_apply|condition|body|branch_computations|true_computation|false_computation|called_computations"
_CALLED = re.compile(rf"\b({_ROLES})=(\{{[^}}]*\}}|%?[^\s,{{}}]+)")
_UNKNOWN_CYCLES = 2**62  # XLA writes values around 2**63 and 2**64 for "not known"


@dataclass(eq=False)
class Instruction:
    """One line of a computation. ``shape`` is a Shape or a nested tuple of them; ``arguments`` and ``attributes`` are as written."""

    name: str
    opcode: str
    shape: Shape | tuple
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    root: bool = False

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result, tuples flattened."""
        return tuple(hlo_ops.leaves(self.shape))

    @cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Computations by role: ``calls``, ``to_apply``, ``condition``, ``body``, ``branch_computations``."""
        text = self.attributes.partition(", backend_config=")[0]
        return {role: tuple(n.strip().lstrip("%") for n in names.strip("{}").split(",")) for role, names in _CALLED.findall(text)}

    def attribute(self, key: str) -> str:
        """The text of one attribute (``dimensions``, ``replica_groups``, ``window``), braces included; empty where it is absent."""
        return hlo_ops.attribute(self.attributes, key)

    @property
    def op_name(self) -> str:
        """The JAX name stack that the instruction comes from."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def backend_config(self) -> str:
        """Its text, JSON as a rule."""
        return self.attributes.partition(", backend_config=")[2]

    @property
    def cycles(self) -> int:
        """The compiler's ``estimated_cycles``; 0 where it says none, or "unknown"."""
        found = re.search(r'"estimated_cycles":"?(\d+)', self.attributes)
        value = int(found.group(1)) if found else 0
        return value if value < _UNKNOWN_CYCLES else 0


@dataclass(eq=False)
class Computation:
    """Instructions in schedule order."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """By parameter number."""
        return {int(i.arguments): i for i in self.instructions if i.opcode == "parameter" and i.arguments.isdigit()}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = defaultdict(list)
        for i in self.instructions:
            for name in dict.fromkeys(i.operands):
                users[name].append(i)
        return users

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        """The arrays that an instruction reads, tuples flattened."""
        return [s for o in instruction.operands if o in self.by_name for s in self.by_name[o].shapes]


@dataclass(frozen=True)
class Loop:
    """A while loop. ``trips`` is 1 where the bound could not be read (``known`` is then False)."""

    name: str
    computation: str
    condition: str
    body: str
    trips: int
    known: bool


@dataclass(eq=False)
class Module:
    """A parsed module; ``computations`` in textual order, callees before callers."""

    computations: dict[str, Computation]
    entry: Computation
    header: str = ""
    locations: dict[str, str] = field(default_factory=dict)  # stack frame id -> "file.py:12"
    _weights: dict[str, tuple[float, int]] = field(default_factory=dict, repr=False)

    @cached_property
    def devices(self) -> int:
        """Devices of the program: partitions × replicas."""
        found = {k: int(n) for k, n in re.findall(r"\b(num_partitions|replica_count)=(\d+)", self.header)}
        return math.prod(found.values())

    @cached_property
    def tiled(self) -> bool:
        """Layouts have tiles and memory spaces: a TPU module."""
        return any(s.tiles for c in self.computations.values() for i in c.instructions for s in i.shapes)

    def source(self, instruction: Instruction) -> str:
        """``file.py:12`` of the user's line, or empty."""
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        line = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        return f"{line.group(1)}:{line.group(2)}" if line else self.locations.get(frame.group(1), "") if frame else ""

    @cached_property
    def loops(self) -> dict[str, Loop]:
        """Every while loop by the name of its instruction."""
        found = {}
        for computation in self.computations.values():
            for i in computation.instructions:
                if i.opcode == "while" and {"condition", "body"} <= i.called.keys():
                    trips = hlo_loops.trip_count(self, computation, i)
                    condition, body = i.called["condition"][0], i.called["body"][0]
                    found[i.name] = Loop(i.name, computation.name, condition, body, 1 if trips is None else trips, trips is not None)
        return found

    def calls(self, computation: Computation) -> Iterator[tuple[Instruction, str, str, float]]:
        """(instruction, role, computation called, times for one run of the caller).

        Of a conditional only the branch with most dot flops counts (equal: most instructions), once: the longest way through.
        """
        for i in computation.instructions:
            if not i.called:
                continue
            if i.opcode == "conditional":
                names = [n for names in i.called.values() for n in names if n in self.computations]
                yield from ((i, "branch", n, 1.0) for n in sorted(names, key=self._weight)[-1:])
                continue
            trips = self.loops[i.name].trips if i.name in self.loops else 1
            for role, names in i.called.items():
                times = {"body": trips, "condition": trips + 1}.get(role, 1)
                yield from ((i, role, n, float(times)) for n in names if n in self.computations)

    def _weight(self, name: str) -> tuple[float, int]:
        if name not in self._weights:
            computation = self.computations[name]
            inner = [(self._weight(n), times) for _, _, n, times in self.calls(computation)]
            flops = sum(hlo_ops.matmul_flops(computation, i) for i in computation.instructions) + sum(w[0] * times for w, times in inner)
            self._weights[name] = flops, len(computation.instructions) + sum(w[1] for w, _ in inner)
        return self._weights[name]

    def _multiply(self, roles: Callable[[Instruction, str], bool]) -> dict[str, float]:
        times: dict[str, float] = defaultdict(float, {self.entry.name: 1.0})
        for computation in reversed(self.computations.values()):
            if times.get(computation.name):
                for i, role, name, factor in self.calls(computation):
                    if roles(i, role):
                        times[name] += times[computation.name] * factor
        return dict(times)

    @cached_property
    def multiplicity(self) -> dict[str, float]:
        """How often each computation runs in one step: loops × trips, branches as in ``calls``; a reducer once for each use."""
        return self._multiply(lambda _, role: bool(role))

    @cached_property
    def scheduled(self) -> dict[str, float]:
        """The part of ``multiplicity`` that is a schedule of its own: entry, loops, branches, calls; no fusions or async wrappers."""
        return self._multiply(lambda i, role: role in ("body", "condition", "branch") or i.opcode == "call")

    def total(self, measure: Callable[[Computation, Instruction], float]) -> float:
        """The sum of a number for each instruction, times how often it runs."""
        return sum(n * measure(self.computations[c], i) for c, n in self.multiplicity.items() for i in self.computations[c].instructions)

    @cached_property
    def flops(self) -> float:
        """Floating-point operations (2 for each multiply-add) of dots, convolutions and matmul calls in one step on one device."""
        return self.total(hlo_ops.matmul_flops)

    @cached_property
    def elementwise_flops(self) -> float:
        """One for each element of arithmetic results, and for each element that a reduction reads. Rough."""
        return self.total(hlo_ops.elementwise_flops)

    @cached_property
    def cycles(self) -> float:
        """The compiler's own estimate of one step in clock cycles: ``estimated_cycles`` × times run, where it gives one."""
        return sum(n * i.cycles for c, n in self.scheduled.items() for i in self.computations[c].instructions)

    @cached_property
    def collectives(self) -> list[HloCollective]:
        """Every collective of the step, async ones once (at their start), in textual order; count includes trips."""
        return hlo_collectives.collectives(self)


def parse(text: str) -> Module:
    """Parses ``compiled.as_text()``.

    Raises:
      ValueError: the text holds no computation.
    """
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry: Computation | None = None
    header = ""
    preamble: list[str] = []
    for line in text.splitlines():
        if line.startswith((" ", "\t")):
            if current is not None and (instruction := _parse_instruction(line)):
                current.instructions.append(instruction)
        elif line.startswith("HloModule"):
            header = line
        elif line.startswith("}"):
            current = None
        elif found := _HEADER.match(line):
            current = computations.setdefault(found.group(2), Computation(found.group(2)))
            entry = current if found.group(1) else entry
        elif current is None and line[:1].isalnum():
            preamble.append(line)
    computations = {n: c for n, c in computations.items() if c.instructions}
    if not computations:
        raise ValueError(f"no HLO computation in a text of {len(text)} characters that begins {text[:60]!r}: give compiled.as_text()")
    return Module(computations, entry or list(computations.values())[-1], header, _locations(preamble))


def _parse_instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    rest = line[found.end() :]
    if "/*" in rest:
        rest = _COMMENT.sub("", rest)
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if end < 0 or not opcode:
        return None
    close = _closing(rest, opcode.end() - 1)
    arguments = rest[opcode.end() : close - 1]
    operands = _REFERENCE.findall(arguments)
    if not operands and arguments and opcode.group(1) not in ("parameter", "constant"):
        operands = [a.split()[-1] for a in re.split(r",\s+", arguments) if a.split()]  # printed without '%'
    return Instruction(
        found.group(2), opcode.group(1), parse_shape(rest[:end]), tuple(operands), arguments, rest[close:], bool(found.group(1))
    )


def _closing(text: str, start: int) -> int:
    """One past the parenthesis that closes the one at ``start``."""
    depth = 0
    for found in _PARENS.finditer(text, start):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def _locations(preamble: list[str]) -> dict[str, str]:
    """The tables FileNames, FileLocations and StackFrames before the first computation, joined."""
    tables: dict[str, dict[str, str]] = defaultdict(dict)
    title = ""
    for line in preamble:
        number, _, value = line.partition(" ")
        if number.isdigit():
            tables[title][number] = value
        else:
            title = line.strip()
    files = tables["FileNames"]
    places = {}
    for key, value in tables["FileLocations"].items():
        found = re.search(r"file_name_id=(\d+).*?\bline=(\d+)", value)
        places[key] = f"{files.get(found.group(1), '').strip(chr(34))}:{found.group(2)}" if found else ""
    frames = {key: re.search(r"file_location_id=(\d+)", value) for key, value in tables["StackFrames"].items()}
    return {key: places.get(found.group(1), "") for key, found in frames.items() if found}
