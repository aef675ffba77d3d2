"""Dimensions of arguments that no mesh axis divides (a vocabulary of 50,257), and what padding them would gain.

JAX wants the dimensions of arguments to be divisible. Inside a step the partitioner would pad, with copies, so only divisible dimensions
are cut there too. The plan says what padding by the user would gain: the best plan in which large odd dimensions count as divisible. A loss
over 50,304 words instead of 50,257 takes a fifth of the time on 8 chips of v5e (scripts/results/offload.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxauto.core import MeshAxes
from jaxauto.groups import Groups

_WASTE = 0.05  # of a dimension: more padding than this is work that is no longer negligible
_LARGE = 0.01  # of the bytes of all arguments: smaller ones are not worth a word


@dataclass(frozen=True)
class Undivided:
    """Dimension ``dim`` of ``size`` of an argument that no axis of the mesh divides, and the next size that all axes together divide."""

    path: str
    dim: int
    size: int
    padded: int


def undivided(paths: Sequence[str], avals: Sequence[Any], mesh: MeshAxes) -> list[Undivided]:
    """Of the large arguments, the dimensions that no mesh axis divides though they are long enough for all."""
    axes = [n for n in mesh.sizes if n > 1]
    bytes_ = [math.prod(a.shape) * getattr(a.dtype, "itemsize", 4) for a in avals]
    large = [(p, a) for p, a, b in zip(paths, avals, bytes_, strict=True) if b > _LARGE * sum(bytes_)]
    dims = [(path, d, n) for path, aval in large for d, n in enumerate(aval.shape)]
    return [Undivided(path, d, n, padded(n, mesh)) for path, d, n in dims if axes and all(n % k for k in axes) and padded(n, mesh) != n]


def padded(size: int, mesh: MeshAxes) -> int:
    """The next multiple of the number of devices, or ``size`` where that is too far."""
    total = mesh.num_devices
    more = -(-size // total) * total
    return more if more <= (1 + _WASTE) * size else size


def notes(paths: Sequence[str], avals: Sequence[Any], mesh: MeshAxes) -> list[str]:
    """One note for each size that is not divided, with the arguments that have it."""
    by_size: dict[tuple[int, int], list[str]] = {}
    for u in undivided(paths, avals, mesh):
        by_size.setdefault((u.size, u.padded), []).append(f"{u.path} (dimension {u.dim})")
    listed = {key: ", ".join(where[:3]) + (" and others" if len(where) > 3 else "") for key, where in by_size.items()}
    return [
        f"no axis of mesh {mesh.shape} divides {size}: {where} cannot be split there. "
        f"Padded to {more} it could be; plan.explain() says what that would gain."
        for (size, more), where in listed.items()
    ]


def rounded(groups: Groups, mesh: MeshAxes) -> Groups:
    """The same groups and operations with the sizes that axes must divide rounded up."""
    changed = {k: dataclasses.replace(g, sizes=[padded(n, mesh) for n in g.sizes]) for k, g in groups.groups.items()}
    operations = [dataclasses.replace(op, factors=tuple((f, padded(n, mesh)) for f, n in op.factors)) for op in groups.operations]
    return dataclasses.replace(groups, groups=changed, operations=operations)
