"""A target: a chip and how many of them in what topology, parsed from text such as ``"v5p:4x4x4"`` or found in ``jax.devices()``."""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxauto.core import AxisLink
from jaxauto.errors import TargetError
from jaxauto.targets.chip import Chip
from jaxauto.targets.chips import CHIPS, cpu_chip
from jaxauto.targets.topology import (
    Factors,
    PhysicalAxis,
    best_layout,
    divisors,
    mesh_array,
    row_major_layout,
    sliced_links,
    switched_links,
    torus_links,
)

_LARGEST_CPU = 4096
_NODE = 8
# The two dies of a tpu7x chip: "six times faster than one ICI link" (docs.cloud.google.com/tpu/docs/tpu7x).
_DIE_LINKS = 6
_NETWORK_STEP_SECONDS = 14e-6  # NVIDIA/nccl, tuning.cc: ring, Simple protocol, network


class Target:
    """A chip and a topology.

    Args:
      text: ``chip:topology``: ``"v5e:4x8"``, ``"v5p:4x4x4"``, ``"h100:8"`` (one node), ``"h100:4x8"`` (nodes x GPUs), ``"cpu:8"``;
        ``"v5e:1"`` is one chip, ``"v5p:2*4x4x4"`` two slices with the data-centre network between them.

    Attributes:
      chip: the chip, with its numbers.
      topology: the physical sides, in chips (GPUs: ``(gpus,)`` or ``(nodes, gpus)``; TPUs: of one slice).
      slices: how many of that topology; 1 but for TPUs.
      name: the canonical text.

    Raises:
      TargetError: unknown chip, or a topology this chip does not come in.
    """

    def __init__(self, text: str):
        chip, slices, sides = _parse(text)
        self.topology: tuple[int, ...] = sides
        self.slices: int = slices
        self.chip: Chip = chip if chip.platform != "cpu" else cpu_chip(math.prod(sides))
        self.slice_name = f"{chip.name}:{'x'.join(map(str, sides))}"
        self.name = self.slice_name if slices == 1 else self.slice_name.replace(":", f":{slices}*")

    @property
    def num_devices(self) -> int:
        """Devices as JAX counts them."""
        return math.prod(self.topology) * self.chip.devices_per_chip * self.slices

    @property
    def num_nodes(self) -> int:
        """NVLink domains; 1 for a torus."""
        return self.topology[0] if self.chip.platform == "gpu" and len(self.topology) == 2 else 1

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Target({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Target) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    # ------------------------------------------------------------------------------------------------------- the mesh

    @property
    def physical_axes(self) -> tuple[PhysicalAxis, ...]:
        """The axes of the machine, major first; devices in row-major order over them."""
        chip = self.chip
        if chip.platform == "tpu":
            rings = self.wraps
            bandwidth = chip.link_bandwidth / chip.devices_per_chip
            axes = [PhysicalAxis(side, bandwidth, chip.hop_latency, ring, "ici") for side, ring in zip(self.topology, rings)]
            if chip.devices_per_chip > 1:
                between = chip.link_bandwidth * _DIE_LINKS
                axes.append(PhysicalAxis(chip.devices_per_chip, between, chip.hop_latency, False, "die"))
            return (self._network(self.slices, "slices"), *axes) if self.slices > 1 else tuple(axes)
        kind = "nvlink" if chip.platform == "gpu" else "shared memory"
        return (
            self._network(self.num_nodes, "network"),
            PhysicalAxis(self.num_devices // self.num_nodes, chip.link_bandwidth, chip.hop_latency, True, kind),
        )

    def _network(self, length: int, kind: str) -> PhysicalAxis:
        return PhysicalAxis(length, self.chip.network_bandwidth, _NETWORK_STEP_SECONDS, True, kind)

    @property
    def wraps(self) -> tuple[bool, ...]:
        """For each side of the topology, whether it closes into a ring."""
        if self.chip.wrap == "16":  # v5e, v6e: only a full side of the pod closes
            return tuple(side == 16 for side in self.topology)
        if self.chip.wrap == "cubes":  # v4, v5p: optical switches close whole 4x4x4 cubes
            return tuple(all(side % 4 == 0 for side in self.topology) for _ in self.topology)
        return tuple(True for _ in self.topology)

    def mesh_shapes(self, max_axes: int = 2) -> list[tuple[int, ...]]:
        """Factorizations of the device count that the topology supports, with at most ``max_axes`` axes, all longer than 1.

        On a torus larger axes come first, so that the small axis is the one whose devices are neighbours. On GPUs and on several slices the
        order says which axis stays inside the node or slice (the last), so both orders are listed where they differ.
        """
        shapes: dict[tuple, tuple[int, ...]] = {}
        for shape in _shapes(self.num_devices, max_axes):
            descending = tuple(sorted(shape, reverse=True))
            if self.chip.platform == "tpu" and self.slices == 1 and shape != descending:
                continue
            factors = self._layout(shape)
            if factors is not None:
                key = tuple(sorted(zip(shape, map(repr, self._links(factors)))))
                shapes[key] = max(shapes.get(key, shape), shape)
        return sorted(shapes.values(), key=lambda shape: (len(shape), shape))

    def axis_links(self, mesh_shape: Sequence[int]) -> tuple[AxisLink, ...]:
        """What each axis of a mesh of this shape communicates over, laid out as by ``device_array``.

        Raises:
          TargetError: the shape has not as many devices as the target, or does not fit its topology.
        """
        return self._links(self._checked_layout(tuple(mesh_shape)))

    def device_array(self, mesh_shape: Sequence[int], devices: Sequence | None = None) -> np.ndarray:
        """The devices as an array of shape ``mesh_shape``, for ``jax.sharding.Mesh``; the layout ``axis_links`` describes.

        Args:
          mesh_shape: sizes of the mesh axes.
          devices: this target's devices; None: ``self.devices()``.
        """
        factors = self._checked_layout(tuple(mesh_shape))
        found = list(self.devices() if devices is None else devices)
        if len(found) != self.num_devices:
            raise TargetError(f"target {self} has {self.num_devices} devices, {len(found)} were given")
        ordered = np.empty(len(found), dtype=object)
        ordered[:] = sorted(found, key=_position) if self.chip.platform == "tpu" else found
        return mesh_array(ordered.reshape([axis.length for axis in self.physical_axes]), factors)

    def devices(self) -> list:
        """Ahead-of-time devices of this target: jit can lower and compile for them, not run on them.

        Raises:
          TargetError: no compiler for the chip is installed; the message says what to install.
        """
        from jaxauto.targets.compilers import ahead_of_time_devices

        return ahead_of_time_devices(self)

    def _layout(self, mesh_shape: tuple[int, ...]) -> Factors | None:
        axes = self.physical_axes
        if self.chip.platform == "tpu" and self.slices == 1:
            return best_layout(axes, mesh_shape)
        if self.chip.platform == "tpu":
            rows = row_major_layout((self.slices, self.num_devices // self.slices), mesh_shape)
            inside = best_layout(axes[1:], rows[1]) if rows else None
            return (rows[0], *inside) if rows and inside else None
        return row_major_layout(tuple(axis.length for axis in axes), mesh_shape)

    def _checked_layout(self, mesh_shape: tuple[int, ...]) -> Factors:
        factors = self._layout(mesh_shape)
        if factors is None:
            fitting = ", ".join("x".join(map(str, shape)) for shape in self.mesh_shapes())
            raise TargetError(
                f"a mesh of {'x'.join(map(str, mesh_shape))} = {math.prod(mesh_shape)} devices does not fit target {self} with its "
                f"{self.num_devices} devices; shapes that do: {fitting}"
            )
        return factors

    def _links(self, factors: Factors) -> tuple[AxisLink, ...]:
        axes = self.physical_axes
        if self.chip.platform == "tpu":
            return torus_links(axes, factors) if self.slices == 1 else sliced_links(axes[0], axes[1:], factors)
        return switched_links(axes[0], axes[1], factors)


def _shapes(count: int, max_axes: int) -> Iterator[tuple[int, ...]]:
    yield (count,)
    if max_axes > 1:
        for first in divisors(count)[1:-1]:
            for rest in _shapes(count // first, max_axes - 1):
                yield (first, *rest)


def _position(device: Any) -> tuple:
    return (_slice_of(device), *device.coords, getattr(device, "core_on_chip", 0))


def _slice_of(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


# ------------------------------------------------------------------------------------------------------------- parsing


def _parse(text: str) -> tuple[Chip, int, tuple[int, ...]]:
    match = re.fullmatch(r"\s*([a-z0-9_-]+)\s*:\s*(?:(\d+)\s*\*\s*)?(\d+(?:\s*x\s*\d+)*)\s*", str(text).lower())
    name = match.group(1) if match else str(text).partition(":")[0].strip().lower()
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise TargetError(f"unknown chip {name!r} in target {text!r}: {hint}Known are {', '.join(CHIPS)}")
    chip = CHIPS[name]
    if match is None:
        raise TargetError(f"target {text!r} has no topology: write chip:topology, for example {_example(chip)!r}")
    slices, sides = int(match.group(2) or 1), tuple(int(side) for side in match.group(3).split("x"))
    if min(slices, *sides) < 1:
        raise TargetError(f"target {text!r}: every side of a topology is at least 1")
    if slices > 1 and chip.platform != "tpu":
        raise TargetError(f"target {text!r}: only TPUs come in slices; of GPUs write nodes x GPUs, for example 'h100:2x8'")
    return chip, slices, _CHECKS[chip.platform](chip, sides, str(text))


def _example(chip: Chip) -> str:
    return f"{chip.name}:{ {'tpu': '2x4' if chip.dims == 2 else '4x4x4', 'gpu': '8', 'cpu': '8'}[chip.platform] }"


def _torus_sides(chip: Chip, sides: tuple[int, ...], text: str) -> tuple[int, ...]:
    largest = "x".join(map(str, chip.max_topology))
    if sides == (1,):  # one chip has one shape
        return (1,) * chip.dims
    if len(sides) != chip.dims:
        raise TargetError(
            f"target {text!r} has {len(sides)} side{'s' * (len(sides) > 1)}, but {chip.name} is a {chip.dims}-D torus: "
            f"write for example {_example(chip)!r}"
        )
    if any(side > most for side, most in zip(sorted(sides), sorted(chip.max_topology))):
        raise TargetError(f"target {text!r} is larger than a {chip.name} slice can be: at most {largest}")
    allowed = (1, 2, 4, 8, 16) if chip.dims == 2 else None
    if allowed and any(side not in allowed for side in sides):
        raise TargetError(f"target {text!r}: the sides of a {chip.name} slice are 1, 2, 4, 8 or 16")
    if chip.dims == 3 and any(side not in (1, 2) and side % 4 for side in sides):
        raise TargetError(f"target {text!r}: the sides of a {chip.name} slice are 1, 2 or a multiple of 4, at most {largest}")
    return sides


def _gpu_sides(chip: Chip, sides: tuple[int, ...], text: str) -> tuple[int, ...]:
    most = max(chip.max_topology)
    if len(sides) > 2:
        raise TargetError(f"target {text!r}: {chip.name} targets are GPUs, or nodes x GPUs of each, for example '{chip.name}:2x{most}'")
    nodes, gpus = (1, *sides)[-2:]
    if len(sides) == 1 and gpus > most:
        if gpus % most:
            raise TargetError(
                f"target {text!r}: {gpus} GPUs are no whole number of nodes of {most}; "
                f"write nodes x GPUs, for example '{chip.name}:2x{most}'"
            )
        nodes, gpus = gpus // most, most
    if gpus > most:
        raise TargetError(f"target {text!r}: an NVLink domain of {chip.name} has at most {most} GPUs, not {gpus}")
    return (nodes, gpus) if nodes > 1 else (gpus,)


def _cpu_sides(chip: Chip, sides: tuple[int, ...], text: str) -> tuple[int, ...]:
    if len(sides) > 1 or max(sides) > _LARGEST_CPU:
        raise TargetError(
            f"target {text!r}: {chip.name} targets are a number of emulated devices, at most {_LARGEST_CPU}, for example 'cpu:8'"
        )
    return sides


_CHECKS = {"tpu": _torus_sides, "gpu": _gpu_sides, "cpu": _cpu_sides}


# ----------------------------------------------------------------------------------------------------------- detection


def resolve(target: str | Target | None, devices: Sequence | None = None) -> Target:
    """A target from text, from itself, or (None) from devices, by default ``jax.devices()``."""
    if isinstance(target, Target):
        return target
    if target is not None:
        return Target(target)
    if devices is None:
        import jax

        devices = jax.devices()
    return detect(devices)


def detect(devices: Sequence) -> Target:
    """The target that these JAX devices are.

    Raises:
      TargetError: a chip without an entry in ``jaxauto.targets.chips``, or TPU devices that do not fill a box of their torus.
    """
    devices = list(devices)
    if not devices:
        raise TargetError("no devices to detect a target from")
    kind = devices[0].device_kind.lower()
    if devices[0].platform == "cpu":
        return Target(f"cpu:{len(devices)}")
    chip = chip_of_kind(kind)
    if chip is None:
        raise TargetError(
            f"no numbers for device kind {devices[0].device_kind!r}; known chips: {', '.join(CHIPS)}. "
            f"Say which is nearest, for example target='h100:{len(devices)}'"
        )
    if chip.platform != "tpu":
        return Target(f"{chip.name}:{'x'.join(map(str, _nodes(devices)))}")
    slices: dict[int, list] = defaultdict(list)
    for device in devices:
        slices[_slice_of(device)].append(device)
    boxes = {_torus_box(chip, part) for part in slices.values()}
    if len(boxes) > 1:
        shapes = ", ".join("x".join(map(str, box)) for box in sorted(boxes))
        raise TargetError(f"{len(slices)} slices of {chip.name} of different shapes: {shapes}; give a mesh and target= explicitly")
    return Target(f"{chip.name}:{len(slices)}*{'x'.join(map(str, boxes.pop()))}")


def chip_of_kind(kind: str) -> Chip | None:
    """The chip whose devices JAX calls so; None if there is no entry for it."""
    matches = [(len(prefix), chip) for chip in CHIPS.values() for prefix in chip.device_kind if kind.lower().startswith(prefix)]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def _torus_box(chip: Chip, devices: list) -> tuple[int, ...]:
    coords = np.array([tuple(device.coords)[: chip.dims] for device in devices])
    sides = tuple(int(side) for side in coords.max(axis=0) - coords.min(axis=0) + 1)
    if math.prod(sides) * chip.devices_per_chip != len(devices):
        raise TargetError(
            f"{len(devices)} {chip.name} devices do not fill the box {'x'.join(map(str, sides))} of their coordinates; "
            "give a mesh and target= explicitly"
        )
    return sides


def _nodes(devices: list) -> tuple[int, ...]:
    """(nodes, GPUs of each); a node is a slice (NVLink domain) where JAX tells, else a process with several GPUs, else eight GPUs."""
    for attribute in ("slice_index", "process_index"):
        groups = [getattr(device, attribute, None) for device in devices]
        nodes = len(set(groups))
        per_node = len(devices) // nodes
        if None not in groups and per_node * nodes == len(devices) and 1 < per_node <= _NODE:
            return nodes, per_node
    return (len(devices),)
