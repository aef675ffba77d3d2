"""Options as users write them → numbers: budgets, meshes, static arguments."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxauto import compat
from jaxauto.core import AxisLink, MeshAxes
from jaxauto.errors import ArgumentError, TargetError
from jaxauto.targets.target import Target, resolve

AXIS_NAMES = ("data", "model", "expert", "stage")
DEFAULT_SHARE = 0.92  # of what the chip has: room for fragmentation and the runtime
_WINDOWS = {"tpu": 32}  # seen in schedules: gradients scattered over more devices are waited for
_NO_WINDOWS = 4  # and so are those of a mesh of this many

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Options:
    """The options of ``jaxauto.plan``, see there."""

    mesh: Any = None
    target: Any = None
    memory_budget: Any = None
    remat: str = "auto"
    constraints: Mapping[str, Any] | None = None
    donate_argnums: Any = None
    time_limit: float = 60.0
    tune: int = 0
    certify: Any = "auto"
    progress: bool | None = None

    @property
    def surely(self) -> bool:
        """Whether to certify. ``"auto"``: where a budget was given; what the chip has leaves room for the estimate's error."""
        return self.certify is True or (self.certify == "auto" and self.memory_budget is not None)


def budget_bytes(budget: int | float | str | None, hbm_bytes: float) -> float:
    """``14 * 2**30``, ``"14GiB"``, ``0.9`` or ``"90%"`` of the chip's memory; None: 92 % of it.

    Raises:
      ArgumentError: none of these.
    """
    if budget is None:
        return DEFAULT_SHARE * hbm_bytes
    if isinstance(budget, str):
        text = budget.strip()
        match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*|%)", text)
        if match and match[2] == "%":
            return float(match[1]) / 100 * hbm_bytes
        if match and match[2].upper() in _UNITS:
            return float(match[1]) * _UNITS[match[2].upper()]
    elif isinstance(budget, (int, float)) and budget > 0:
        return budget * hbm_bytes if budget <= 1 else float(budget)
    raise ArgumentError(f'memory_budget={budget!r}: give bytes (15_000_000_000), text ("14GiB", "90%") or a fraction of the chip (0.9).')


def mesh_candidates(mesh: Any, target: Target, found_in_step: Mapping[str, int] | None) -> list[MeshAxes]:
    """The meshes to plan for: the user's, the one that the step's own constraints name, or all that the target supports.

    Raises:
      ArgumentError: a mesh of more devices than there are.
    """
    if mesh is None and found_in_step and math.prod(found_in_step.values()) == target.num_devices:
        mesh = found_in_step
    if mesh is None:
        shapes = target.mesh_shapes(max_axes=2) if target.num_devices > 1 else [(1,)]
        return [mesh_axes(dict(zip(AXIS_NAMES, shape, strict=False)), target) for shape in shapes]
    shape = dict(mesh.shape) if isinstance(mesh, (Mesh, AbstractMesh)) else {str(k): int(v) for k, v in dict(mesh).items()}
    total = math.prod(shape.values())
    if total > target.num_devices:
        raise ArgumentError(
            f"mesh {shape} needs {total} devices; {target} has {target.num_devices}. Use a smaller mesh"
            + (
                ", or emulate devices on CPU with XLA_FLAGS=--xla_force_host_platform_device_count=N."
                if target.chip.platform == "cpu"
                else "."
            )
        )
    return [mesh_axes(shape, target)]


def mesh_axes(shape: Mapping[str, int], target: Target) -> MeshAxes:
    """A mesh with its links; a part of the target's devices is taken as a target of its own."""
    sizes = tuple(shape.values())
    total = math.prod(sizes)
    try:
        part = target if total == target.num_devices else Target(f"{target.chip.name}:{total}")
        links = part.axis_links(sizes)
    except TargetError:  # a shape that the topology does not know: neighbours over one link each
        links = tuple(AxisLink(target.chip.link_bandwidth, target.chip.hop_latency, wraps=False) for _ in sizes)
    whole = target.chip.platform == "tpu" and target.slices == 1 and total == target.num_devices
    sides = [n for n in target.topology if n > 1]
    most = _WINDOWS.get(target.chip.platform)
    return MeshAxes(
        tuple(shape),
        sizes,
        links,
        scatters=target.chip.platform != "cpu",
        sums_whole=whole and len(target.topology) == 3 and all(target.wraps),
        scatters_whole=whole and (len(sides) == 3 or (len(sides) == 2 and sides[0] == sides[1] > 2)),
        windows=None if most is None else most if total > _NO_WINDOWS else 1,
    )


def device_mesh(axes: MeshAxes, mesh: Any, target: Target, *, here: bool) -> Any:
    """jax.sharding.Mesh of the devices here, or an AbstractMesh when the target is elsewhere; the compiler propagates along all axes.

    Those of ``jax.make_mesh`` are ``Explicit`` unless it is told otherwise: along such axes types have shardings, and no pin is allowed.
    """
    if not isinstance(mesh, Mesh) and not here:
        return compat.abstract_mesh(axes.sizes, axes.names)
    if isinstance(mesh, Mesh):
        devices = mesh.devices
    elif axes.num_devices == target.num_devices:
        devices = target.device_array(axes.sizes, jax.devices()[: axes.num_devices])
    else:
        devices = np.array(jax.devices()[: axes.num_devices]).reshape(axes.sizes)
    return compat.device_mesh(devices, axes.names)


def is_here(target: Target, num_devices: int) -> bool:
    """Whether this process has ``num_devices`` devices of the target's chip."""
    try:
        return resolve(None).chip.name == target.chip.name and len(jax.devices()) >= num_devices
    except TargetError:  # devices that no chip describes: not this target
        return False


def bind_static(
    step: Callable, args: tuple, kwargs: dict, static_argnums: int | Sequence[int], static_argnames: str | Sequence[str]
) -> tuple[Callable, tuple, dict, tuple]:
    """The step with its static arguments bound: (step, dynamic args, dynamic kwargs, hashable key of the static ones)."""
    nums = {
        n % len(args) for n in ((static_argnums,) if isinstance(static_argnums, int) else static_argnums) if -len(args) <= n < len(args)
    }
    names = {static_argnames} if isinstance(static_argnames, str) else set(static_argnames)
    fixed = {k: v for k, v in kwargs.items() if k in names}
    if not nums and not fixed:
        return step, args, kwargs, ()
    positions = [k for k in range(len(args)) if k not in nums]

    @functools.wraps(step)
    def dynamic(*rest: Any, **more: Any) -> Any:
        full = list(args)
        for k, value in zip(positions, rest, strict=True):
            full[k] = value
        return step(*full, **more, **fixed)

    key = (tuple((n, args[n]) for n in sorted(nums)), tuple(sorted(fixed.items())))
    return dynamic, tuple(args[k] for k in positions), {k: v for k, v in kwargs.items() if k not in names}, key
