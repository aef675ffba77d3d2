"""Collectives of a compiled module: device groups in XLA's notations, bytes, times per step, and the mesh axes they span."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from jaxauto.hlo_roles import role

if TYPE_CHECKING:
    from jaxauto.hlo import Computation, Instruction, Module

# --------------------------------------------------------------------------------------------------------------------- groups

Groups = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4096)
def parse_groups(text: str, devices: int = 1) -> Groups:
    """Device ids of each group, from any of XLA's three notations; the empty one means all ``devices`` together.

    ``{{0,2},{1,3}}``; ``[2,4]<=[4,2]T(1,0)``: 0..7 as 4×2, transposed, then read as 2 groups of 4;
    ``mesh['dp'=4,'tp'=2] {'dp'}``: devices laid out row-major as 4×2 (or as ``device_ids=`` says), a group along dp; ``'dp':(2)2`` is
    the part of dp of size 2 that has 2 before it.
    """
    if text.startswith("mesh"):
        return _mesh_groups(text)
    iota = re.match(r"\[([\d,]+)\](<=\S.*)", text)
    if iota:
        shape = [int(d) for d in iota.group(1).split(",")]
        return _rows(_iota(iota.group(2)[2:]).reshape(shape[0] if len(shape) > 1 else 1, -1))
    groups = tuple(tuple(int(d) for d in g.split(",")) for g in re.findall(r"\{([\d,\s]+)\}", text) if g.strip())
    return groups or (tuple(range(devices)),)


def _iota(text: str) -> np.ndarray:
    """``[4,2]T(1,0)``: 0..7 as 4×2, transposed, flat."""
    dims = [int(d) for d in text[1 : text.index("]")].split(",")]
    order = re.search(r"T\(([\d,]+)\)", text)
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose([int(d) for d in order.group(1).split(",")]) if order else ids).reshape(-1)


def _mesh_groups(text: str) -> Groups:
    mesh, _, named = text.partition("]")
    sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", mesh)}
    order = re.search(r"device_ids=\((.*)\)\s*\{", named)
    count = math.prod(sizes.values())
    listed = order.group(1) if order else f"[{count}]"
    ids = _iota(listed) if listed.startswith("[") else np.array([int(d) for d in listed.split(",")])
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", named)
    wanted = [(name, int(before or 1), int(size) if size else None) for name, before, size in parts]
    pieces: list[tuple[str, int, int]] = []  # every axis cut where a sub-axis begins or ends: (axis, product before it, size)
    for name, size in sizes.items():
        cuts = {1, size} | {c for n, before, part in wanted if n == name for c in (before, before * (part or size // before))}
        ordered = sorted(cuts)
        pieces += [(name, low, high // low) for low, high in itertools.pairwise(ordered)] or [(name, 1, size)]
    inside = [
        k for n, before, part in wanted for k, (name, low, size) in enumerate(pieces)
        if name == n and before <= low and low * size <= before * (part or sizes[n] // before)
    ]  # fmt: skip
    outside = [k for k in range(len(pieces)) if k not in inside]
    grid = ids.reshape([size for _, _, size in pieces]).transpose(outside + inside)
    return _rows(grid.reshape(-1, math.prod(pieces[k][2] for k in inside)))


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())


# --------------------------------------------------------------------------------------------------------------------- collectives

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast", "ragged-all-to-all")
_KIND_OF = {name: kind for kind in KINDS for name in (kind, f"{kind}-start")}


@dataclass(frozen=True)
class HloCollective:
    """One collective instruction.

    Attributes:
      name, computation: where it stands.
      kind: all-reduce | all-gather | reduce-scatter | all-to-all | collective-permute | collective-broadcast | ragged-all-to-all.
      bytes_: the full array on one device group for one call, all arrays of a combined one: all-reduce and broadcast: the array;
        all-gather: its result; reduce-scatter: its operand; all-to-all and permute: what one device holds × group size. As in
        core.Collective; no tile padding.
      operand_bytes: what one device puts in.
      dtype: of the first operand.
      group_size: devices in one group; of a permute: in its longest ring or chain.
      groups: device ids; of a permute: its rings and chains.
      pairs: (source, target) device ids of a permute.
      count: times in one step.
      asynchronous: started and awaited separately, so that other work may hide it.
      promoted: a CPU backend's float32 stand-in for a 16-bit all-reduce; on the chip it would be half the bytes.
      role: the kind it stands for: an all-reduce may be the compiler's way to gather or to scatter (hlo_roles.py), and so is a ring of
        permutes that a matmul hides (windowed einsum).
      op_name, source: where in the user's program.
    """

    name: str
    computation: str
    kind: str
    bytes_: float
    operand_bytes: float
    dtype: str
    group_size: int
    groups: Groups
    pairs: Groups
    count: float
    asynchronous: bool
    promoted: bool = False
    role: str = ""
    op_name: str = ""
    source: str = ""

    @property
    def windowed(self) -> bool:
        """One step of a ring that overlaps a matmul with its all-gather or reduce-scatter (windowed einsum)."""
        return _is_windowed(self.computation)

    @property
    def role_bytes(self) -> float:
        """``bytes_`` in terms of ``role``: the permutes of a ring send an array (n - 1) / n times in all."""
        if self.role == self.kind or self.kind != "collective-permute":
            return self.bytes_
        return self.operand_bytes * self.group_size / max(1, self.group_size - 1)


def collectives(module: Module) -> list[HloCollective]:
    """See ``Module.collectives``."""
    found = []
    wrapped = {name for c in module.computations.values() for i in c.instructions for name in background(i)}
    for computation in module.computations.values():
        times = module.multiplicity.get(computation.name, 0.0)
        calls = {i.attribute("custom_call_target").strip('"') for i in computation.instructions if i.opcode == "custom-call"}
        if not times or "AsyncCollectiveDone" in calls:
            continue
        asynchronous = computation.name in wrapped or "AsyncCollectiveStart" in calls
        here = [i for i in computation.instructions if i.opcode in _KIND_OF and not continues(i)]
        found += [_collective(module, computation, i, times=times, asynchronous=asynchronous) for i in here]
    return _with_last_steps(found)


def _with_last_steps(found: list[HloCollective]) -> list[HloCollective]:
    """The permute behind the loop of a windowed einsum is a step of its ring too: the dot's name is all that says so."""
    rings = {c.op_name: c.role for c in found if c.windowed and c.op_name}
    last = [c.kind == "collective-permute" == c.role and c.op_name in rings for c in found]
    return [replace(c, role=rings[c.op_name]) if step else c for c, step in zip(found, last, strict=True)]


def background(i: Instruction) -> tuple[str, ...]:
    """Computations that an instruction starts and does not wait for: ``async-start``, and ``call-start`` to a TPU's sparse cores."""
    if not i.opcode.endswith("-start") or i.opcode in _KIND_OF:
        return ()
    return tuple(name for role in ("calls", "to_apply", "called_computations") for name in i.called.get(role, ()))


def continues(i: Instruction) -> bool:
    """Is this the repetition of an async collective? On TPU it stands in its start fusion, in each fusion beside it, and in its done."""
    flag = re.search(r'"async_collective_fusion_config":\{"flag_start":"?(-?\d+)', i.attributes)
    return flag is not None and int(flag.group(1)) >= 0


def _collective(module: Module, computation: Computation, i: Instruction, *, times: float, asynchronous: bool) -> HloCollective:
    kind = _KIND_OF[i.opcode]
    operands = computation.operand_shapes(i)
    operand_bytes = sum(s.bytes_ for s in operands)
    pairs = tuple(p for p in parse_groups(i.attribute("source_target_pairs"), 0) if len(p) == 2) if kind == "collective-permute" else ()
    groups = _chains(pairs) if pairs else parse_groups(i.attribute("replica_groups"), module.devices)
    size = max(map(len, groups), default=1)
    if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # the TPU compiler's spelling: the fusion slices its device's part off
    whole = kind in ("all-reduce", "reduce-scatter", "collective-broadcast")
    return HloCollective(
        name=i.name,
        computation=computation.name,
        kind=kind,
        bytes_=operand_bytes * (1 if whole else size),
        operand_bytes=operand_bytes,
        dtype=operands[0].dtype if operands else "",
        group_size=size,
        groups=groups,
        pairs=pairs,
        count=times,
        asynchronous=asynchronous or (i.opcode.endswith("-start") and '"is_sync":true' not in i.attributes),
        promoted=i.attribute("to_apply").endswith("_promoted"),
        role=_role(module, computation, i, kind),
        op_name=i.op_name,
        source=module.source(i),
    )


def _is_windowed(computation: str) -> bool:
    return "windowed_dot_general" in computation  # as XLA names the bodies: windowed_dot_general_body_ag, _rs


def _role(module: Module, computation: Computation, i: Instruction, kind: str) -> str:
    if kind == "all-reduce":
        return role(module, computation, i)
    if kind == "collective-permute" and _is_windowed(computation.name):
        return "reduce-scatter" if "_rs" in computation.name else "all-gather"
    return kind


def _chains(pairs: Groups) -> Groups:
    """Rings and chains of devices that (source, target) pairs link."""
    onward: dict[int, int] = {p[0]: p[1] for p in pairs}
    starts = [s for s in onward if s not in set(onward.values())] + list(onward)
    seen: set[int] = set()
    chains = []
    for start in starts:
        chain = []
        at: int | None = start
        while at is not None and at not in seen:
            seen.add(at)
            chain.append(at)
            at = onward.get(at)
        if chain:
            chains.append(tuple(chain))
    return tuple(chains)


def mesh_axes(collective: HloCollective, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes that a collective's groups span, devices numbered row-major over the mesh.

    Args:
      collective: from ``Module.collectives``.
      mesh_shape: size of each axis, major first.

    Returns:
      axes larger than 1, in mesh order; ``()`` if each group is one device; None if no set of axes gives these groups. Of a permute: the
      axes along which some pair differs.
    """
    axes = [a for a, n in mesh_shape.items() if n > 1]
    ids = np.arange(math.prod(mesh_shape.values())).reshape([mesh_shape[a] for a in axes])
    if collective.pairs:
        if max(map(max, collective.pairs)) >= ids.size:
            return None
        source, target = (np.array(np.unravel_index(list(side), ids.shape or (1,))) for side in zip(*collective.pairs, strict=True))
        return tuple(a for a, moved in zip(axes, (source != target).any(axis=1), strict=False) if moved)
    wanted = {frozenset(g) for g in collective.groups}
    for count in range(len(axes) + 1):
        for chosen in itertools.combinations(range(len(axes)), count):
            rest = [k for k in range(len(axes)) if k not in chosen]
            rows = ids.transpose(rest + list(chosen)).reshape(-1, math.prod(ids.shape[k] for k in chosen))
            if {frozenset(r) for r in rows.tolist()} == wanted:
                return tuple(axes[k] for k in chosen)
    return None
