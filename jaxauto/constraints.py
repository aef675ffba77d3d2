"""What users pin: ``constraints={"0.params.*.kernel": P(None, "model")}`` and with_sharding_constraint in the model → allowed states."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from jaxauto.core import MeshAxes, Sharding
from jaxauto.errors import ConstraintError
from jaxauto.groups import WHOLE, Groups
from jaxauto.strategies import project, state_of, states
from jaxauto.trace import Traced


def allowed_states(constraints: Mapping[str, Any] | None, traced: Traced, groups: Groups, mesh: MeshAxes) -> dict[int, np.ndarray]:
    """Group id → which of its states the constraints leave.

    Args:
      constraints: globs over argument paths → PartitionSpec.

    Raises:
      ConstraintError: a glob matches no argument, an axis is not of the mesh, or its size does not divide the dimension.
    """
    allowed: dict[int, np.ndarray] = {}
    for pattern, spec in (constraints or {}).items():
        matches = [k for k, path in enumerate(traced.in_paths) if path == pattern or fnmatch.fnmatchcase(path, pattern)]
        if not matches:
            close = difflib.get_close_matches(pattern, traced.in_paths, n=3, cutoff=0.3)
            known = ", ".join(close or traced.in_paths[:3])
            raise ConstraintError(f"constraint {pattern!r} matches no argument; paths look like {known}.")
        for k in matches:
            sharding = checked(spec, traced.in_paths[k], traced.in_avals[k].shape, mesh)
            _restrict(allowed, groups, groups.graph.inputs[k], sharding, mesh, f"constraint {pattern!r} on {traced.in_paths[k]}")
    for nodes in groups.pinned.values():
        for number, node in nodes:
            spec = getattr(node.params.get("sharding"), "spec", None)
            if spec is None or not set(_names(spec)) <= set(mesh.names):
                continue
            shape = groups.graph.values[number].shape
            sharding = checked(spec, f"with_sharding_constraint at {node.source}", shape, mesh)
            _restrict(allowed, groups, number, sharding, mesh, f"with_sharding_constraint at {node.source}")
    return allowed


def ignored_pins(groups: Groups, mesh: MeshAxes) -> list[str]:
    """Notes on the user's own with_sharding_constraint calls whose mesh axes are not those of the plan's mesh."""
    notes = []
    for nodes in groups.pinned.values():
        for _, node in nodes:
            spec = getattr(node.params.get("sharding"), "spec", None)
            strange = sorted(set(_names(spec)) - set(mesh.names)) if spec is not None else ["?"]
            if strange:
                notes.append(
                    f"with_sharding_constraint at {node.source} names mesh axes {strange} that are not of the plan's mesh {mesh.shape}; "
                    "it is left out. Plan with mesh= of the same axis names to keep it."
                )
    return sorted(set(notes))


def checked(spec: Any, path: str, shape: tuple[int, ...], mesh: MeshAxes) -> Sharding:
    """A PartitionSpec as a Sharding of ``shape``, or a ConstraintError that names path, dimension and axis."""
    if not isinstance(spec, PartitionSpec):
        raise ConstraintError(f"{path}: constraints are jax.sharding.PartitionSpec objects, not {type(spec).__name__}.")
    if len(spec) > len(shape):
        raise ConstraintError(f"{path} has shape {shape}: {spec} names {len(spec)} dimensions, it has {len(shape)}.")
    sharding = []
    for d, n in enumerate(shape):
        part = spec[d] if d < len(spec) else None
        axes = () if part is None or part is PartitionSpec.UNCONSTRAINED else (part,) if isinstance(part, str) else tuple(part)
        total = 1
        for axis in axes:
            if axis not in mesh.names:
                raise ConstraintError(f"{path}: {spec} names mesh axis {axis!r}; the mesh has {mesh.shape}.")
            total *= mesh.shape[axis]
        if n % total:
            raise ConstraintError(
                f"{path} has shape {shape}: dimension {d} of size {n} cannot be split {total} ways over mesh axes {axes} of {mesh.shape}. "
                f"Pad it to {-(-n // total) * total}, or constrain it to fewer devices."
            )
        sharding.append(tuple(sorted(axes, key=mesh.names.index)))
    return tuple(sharding)


def _names(spec: Any) -> list[str]:
    parts = [p for p in spec if p is not None and p is not PartitionSpec.UNCONSTRAINED]
    return [a for p in parts for a in ((p,) if isinstance(p, str) else p)]


def _restrict(allowed, groups: Groups, number: int, sharding: Sharding, mesh: MeshAxes, what: str) -> None:
    group, dims = groups.place[number]
    table = states(tuple(groups.groups[group].sizes), mesh.sizes)
    fits = (project(table, dims) == state_of(sharding, mesh)).all(-1)
    closed = [d for d, axes in enumerate(sharding) if axes and dims[d] == WHOLE]
    if closed or not fits.any():
        d = closed[0] if closed else next(i for i, axes in enumerate(sharding) if axes)
        raise ConstraintError(
            f"{what}: dimension {d} of shape {groups.graph.values[number].shape} cannot be split over {sharding[d]} of {mesh.shape} "
            "in this step; the values that it is tied to (loop slices, the same array elsewhere) do not divide."
        )
    allowed[group] = allowed[group] & fits if group in allowed else fits
    if not allowed[group].any():
        raise ConstraintError(f"{what} contradicts another constraint on an array that must be sharded alike.")
