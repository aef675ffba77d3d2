"""The referee's clock: seconds of one step read off a compiled module's schedule (jaxauto.hlo), instruction by instruction.

An instruction or fusion takes ``max(flops / (e × peak of its dtype), HBM bytes / (b × bandwidth))``, loop bodies × trips, with the chip's
efficiencies e and b (0.9 and 0.85 of every TPU), on a GPU what starting a kernel takes more. Random bits are work too (``hashing.py``).
Collectives take what the caller's ``collective_seconds`` says. Four resources run side by side within one computation:

- compute, in schedule order;
- the network: a collective begins when it is issued and the one before on the same device groups is through; ``done`` waits for it,
  and only the wait counts as exposed;
- copies between HBM and on-chip memory (``copy-start``, ``slice-start``) use the memory time that compute-bound instructions leave over;
- copies to and from the host's memory follow each other over its link.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from jaxauto.cost.hashing import XORS
from jaxauto.cost.traffic import COLLECTIVES, call_target, hbm_bytes, host_bytes, is_copy, results
from jaxauto.hlo import Computation, HloCollective, Instruction, Module
from jaxauto.hlo_collectives import Groups, background, continues
from jaxauto.hlo_ops import is_convolution, matmul_flops
from jaxauto.targets.chip import most_exact

# of a dot, or in what a library is told
_PRECISION = re.compile(r'(?:operand_precision=\{|"operand_precision":\[|algorithm=dot_)([\w",]+)')

_NUMPY = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


class Chip(Protocol):
    """What the clock asks of a chip."""

    @property
    def hbm_bandwidth(self) -> float:
        """Bytes/s."""
        ...

    @property
    def flops_efficiency(self) -> float:
        """Share of the peak that large matmuls reach."""
        ...

    @property
    def bandwidth_efficiency(self) -> float:
        """Share of the bandwidth that large copies reach."""
        ...

    @property
    def convolution_efficiency(self) -> float:
        """Share of the peak that convolutions reach."""
        ...

    @property
    def dot_writes(self) -> float:
        """What a byte of a dot's result counts as."""
        ...

    @property
    def launch_seconds(self) -> float:
        """Seconds of a kernel beside its roofline."""
        ...

    @property
    def hash_seconds(self) -> float:
        """Seconds of one of Threefry's hashes."""
        ...

    def peak_flops(self, dtype: str, precision: str, /) -> float:
        """Flop/s of the matrix unit for operands of a numpy dtype name, in a precision."""
        ...


@dataclass(frozen=True)
class OpTime:
    """One instruction of the schedule: seconds of one run, and how often it runs in a step. ``seconds`` is what the step waits for it."""

    name: str
    computation: str
    op_name: str
    seconds: float
    count: float
    flops: float = 0.0
    hbm_bytes: float = 0.0
    collective_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        return self.seconds * self.count


@dataclass(frozen=True)
class ScheduleTime:
    """Seconds of one step on one device. ``collective_seconds`` is all of it, hidden or not; total = compute + exposed collectives.

    ``breakdown``: dearest first; its total_seconds sum to ``total_seconds``.
    """

    compute_seconds: float
    collective_seconds: float
    exposed_collective_seconds: float
    total_seconds: float
    breakdown: tuple[OpTime, ...] = ()


def schedule_seconds(module: Module, chip: Chip, collective_seconds: Callable[[HloCollective], float]) -> ScheduleTime:
    """Times one step of a compiled module.

    Args:
      module: from ``jaxauto.hlo.parse``.
      chip: its peaks and bandwidth.
      collective_seconds: seconds of one call of a collective, alone on its network.
    """
    clock = _Clock(module, chip, collective_seconds)
    spent = clock.run(module.entry.name)
    rows = [replace(row, count=module.scheduled.get(row.computation, 0.0)) for row in clock.rows]
    rows.sort(key=lambda row: -row.total_seconds)
    breakdown = tuple(row for row in rows if row.total_seconds > 0)
    return ScheduleTime(spent.compute, spent.collective, spent.exposed, spent.now, breakdown)


# --------------------------------------------------------------------------------------------------------------------- flops


def _work(module: Module, chip: Chip, computation: Computation, i: Instruction) -> tuple[float, float, float]:
    """(flops, those of convolutions, seconds) of an instruction: of its dots, at the rate of their operands' dtype, and of hashes.

    Of Threefry's instructions only the exclusive ors are its own; what else is taken so for one is small.
    """
    flops, convolved, seconds = 0.0, 0.0, 0.0
    for where, inner in within(module, computation, i):
        if inner.opcode == "xor":
            seconds += inner.shape.elements / XORS * chip.hash_seconds
        if count := matmul_flops(where, inner):
            dtype, asked = _numpy_name(where.operand_shapes(inner)[0].dtype), _PRECISION.search(inner.attributes)
            precision = most_exact(re.findall(r"\w+", asked.group(1)) if asked else ())
            flops += count
            convolved += count * (convolves := is_convolution(inner))
            reached = chip.convolution_efficiency if convolves else chip.flops_efficiency
            seconds += count / (reached * chip.peak_flops(dtype, precision))
    return flops, convolved, seconds


def within(module: Module, computation: Computation, i: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """The instruction, or, of a fusion or async wrapper, those it is made of."""
    names = i.called.get("calls", ()) if i.opcode == "fusion" else background(i)
    if not names:
        yield computation, i
    for name in names:
        if callee := module.computations.get(name):
            for inner in callee.instructions:
                yield from within(module, callee, inner)


def _numpy_name(dtype: str) -> str:
    """``bf16`` to ``bfloat16``, ``f8e4m3fn`` to ``float8_e4m3fn``, ``pred`` to ``bool``."""
    found = re.fullmatch(r"(bf|f|s|u|c)(\d+)(e\w+)?", dtype)
    if not found:
        return "bool" if dtype == "pred" else dtype
    kind, bits, rest = found.groups()
    return f"{_NUMPY[kind]}{bits}{'_' + rest if rest else ''}"


# --------------------------------------------------------------------------------------------------------------------- clock


@dataclass
class _Spent:
    """Seconds of one run of a computation. ``slack``: memory time left over while it ran."""

    compute: float = 0.0
    collective: float = 0.0
    exposed: float = 0.0
    slack: float = 0.0

    def add(self, other: _Spent, times: float) -> None:
        self.compute += other.compute * times
        self.collective += other.collective * times
        self.exposed += other.exposed * times
        self.slack += other.slack * times

    @property
    def now(self) -> float:
        return self.compute + self.exposed


@dataclass
class _Clock:
    module: Module
    chip: Chip
    collective_seconds: Callable[[HloCollective], float]
    rows: list[OpTime] = field(default_factory=list)
    done: dict[str, _Spent] = field(default_factory=dict)
    inside: dict[str, list[HloCollective]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for collective in self.module.collectives:
            self.inside[collective.computation].append(collective)

    def run(self, name: str, *, is_condition: bool = False) -> _Spent:
        """One run of a scheduled computation."""
        if name not in self.done:
            self.done[name] = _Timeline(self, self.module.computations[name], is_condition).run()
        return self.done[name]

    def collectives_of(self, computation: Computation, i: Instruction) -> list[HloCollective]:
        """Those an instruction performs: itself, or inside the fusion or async wrapper that it calls."""
        if i.opcode == "fusion" or background(i):
            names = {where.name: None for where, _ in within(self.module, computation, i)}
            return [c for n in names for c in self.inside.get(n, ())]
        return [c for c in self.inside.get(computation.name, ()) if c.name == i.name] if i.opcode in COLLECTIVES else []


@dataclass
class _Timeline:
    clock: _Clock
    computation: Computation
    is_condition: bool = False
    spent: _Spent = field(default_factory=_Spent)
    network_free: dict[Groups, float] = field(default_factory=dict)
    copies_free: float = 0.0  # in seconds of slack
    host_free: float = 0.0
    # By instruction, of TPU's async fusions by channel: when the collective is through, and what began it.
    arrivals: dict[str, tuple[float, Instruction]] = field(default_factory=dict)
    # By instruction: when the copy is through in seconds of slack, when it is through the host's link, and what began it.
    copies: dict[str, tuple[float, float, Instruction]] = field(default_factory=dict)

    def run(self) -> _Spent:
        module = self.clock.module
        calls: dict[str, list[tuple[str, float, bool]]] = defaultdict(list)
        for i, role, name, times in module.calls(self.computation):
            if role in ("body", "condition", "branch") or i.opcode == "call":
                calls[i.name].append((name, times, role == "condition"))
        for i in self.computation.instructions:
            if i.name in calls:
                for name, times, is_condition in calls[i.name]:
                    self.spent.add(self.clock.run(name, is_condition=is_condition), times)
            elif is_copy(i):
                self._copy(i)
            elif not self._await(i):
                self._issue(i)
        for end, start in self.arrivals.values():
            self._wait(start, end)
        for name in list(self.copies):
            self._await_copy(name)
        return self.spent

    def _copy(self, i: Instruction) -> None:
        module = self.clock.module
        seconds = self._memory_seconds(hbm_bytes(module, self.computation, i))
        self.copies_free = max(self.spent.slack, self.copies_free) + seconds
        transfer = host_bytes(i) / getattr(self.clock.chip, "host_bandwidth", math.inf)
        if transfer:
            self.host_free = max(self.spent.now, self.host_free) + transfer
        self.copies[i.name] = self.copies_free, self.host_free if transfer else 0.0, i

    def _await_copy(self, name: str) -> None:
        """What is not there when it is needed adds to compute."""
        slack_end, host_end, start = self.copies.pop(name)
        wait = max(0.0, slack_end - self.spent.slack, host_end - self.spent.now)
        self.spent.compute += wait
        self.spent.slack += wait
        if wait:
            self._row(start, wait, 0.0, 0.0, 0.0)

    def _issue(self, i: Instruction) -> None:
        """Compute and collectives of one instruction; they overlap if it holds both."""
        flops, convolved, work_seconds = _work(self.clock.module, self.clock.chip, self.computation, i)
        bytes_ = hbm_bytes(self.clock.module, self.computation, i)
        more = self.clock.chip.dot_writes - 1 if flops and not convolved else 0.0
        memory_seconds = self._memory_seconds(bytes_ + more * sum(s.padded_bytes for s in results(i)))
        seconds = max(work_seconds, memory_seconds)
        if seconds and not self.is_condition:  # of a loop whose trips are known the condition is not run
            seconds += self.clock.chip.launch_seconds
        collectives = self.clock.collectives_of(self.computation, i)
        transfer = sum(self.clock.collective_seconds(c) for c in collectives)
        began = self.spent.now
        self.spent.compute += seconds
        self.spent.slack += seconds - memory_seconds
        self.spent.collective += transfer
        if seconds or transfer:
            self._row(i, seconds, flops, bytes_, transfer)
        if not collectives:
            return
        groups = collectives[0].groups
        end = self.network_free[groups] = max(began, self.network_free.get(groups, 0.0)) + transfer
        if all(c.asynchronous for c in collectives):
            self.arrivals[self._key(i)] = end, i
        else:
            self._wait(i, end)

    def _await(self, i: Instruction) -> bool:
        """Waits at the ``done`` of something that was started; False if the instruction is no such thing."""
        started = i.operands[0] if i.operands else ""
        if i.opcode == "async-update":
            if started in self.arrivals:
                self.arrivals[i.name] = self.arrivals.pop(started)
            return True
        if started in self.copies and i.opcode.endswith("-done"):
            self._await_copy(started)
            return True
        key = started if i.opcode.endswith("-done") else self._key(i) if i.opcode == "fusion" and self._finishes(i) else ""
        if key not in self.arrivals:
            return i.opcode.endswith("-done")
        end, start = self.arrivals.pop(key)
        self._wait(start, end)
        return True

    def _key(self, i: Instruction) -> str:
        """TPU start and done fusions share only their collective's channel."""
        if i.opcode == "fusion":
            for _, inner in within(self.clock.module, self.computation, i):
                if inner.opcode in COLLECTIVES and (channel := inner.attribute("channel_id")):
                    return f"channel {channel}"
        return i.name

    def _finishes(self, i: Instruction) -> bool:
        inner = [one for _, one in within(self.clock.module, self.computation, i)]
        return any(call_target(one) == "AsyncCollectiveDone" for one in inner) and any(continues(one) for one in inner)

    def _wait(self, start: Instruction, end: float) -> None:
        wait = max(0.0, end - self.spent.now)
        self.spent.exposed += wait
        self.spent.slack += wait  # HBM idles meanwhile
        if wait:
            self._row(start, wait, 0.0, 0.0, 0.0)

    def _row(self, i: Instruction, seconds: float, flops: float, bytes_: float, transfer: float) -> None:
        """Notes an instruction's time; a later wait for the same instruction is added to it."""
        rows = self.clock.rows
        for k in range(len(rows) - 1, -1, -1):
            if rows[k].name == i.name and rows[k].computation == self.computation.name:
                rows[k] = replace(rows[k], seconds=rows[k].seconds + seconds)
                return
            if rows[k].computation != self.computation.name:
                break
        rows.append(OpTime(i.name, self.computation.name, i.op_name, seconds, 0.0, flops, bytes_, transfer))

    def _memory_seconds(self, bytes_: float) -> float:
        return bytes_ / (self.clock.chip.bandwidth_efficiency * self.clock.chip.hbm_bandwidth)
