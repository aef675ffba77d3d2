"""How a logical mesh is laid over a physical topology, and what each mesh axis then communicates over.

A layout says, for each physical axis, how its length is divided among the mesh axes: ``factors[physical][mesh]``, the product of a row
being the physical length, of a column the mesh axis's size. Of the possible ones the best is the one that splits the fewest physical
axes (a split ring loses its wrap), rings before lines. Within a physical axis later mesh axes are minor: their devices are neighbours.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxauto.core import AxisLink

Factors = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PhysicalAxis:
    """One axis of the machine: ``length`` devices; ``bandwidth`` bytes/s one-way of a device's links along it; ``latency`` s a hop."""

    length: int
    bandwidth: float
    latency: float
    wraps: bool
    kind: str


def factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write ``number`` as a product of ``count`` positive integers."""
    if count == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in factorizations(number // first, count - 1):
            yield (first, *rest)


def divisors(number: int) -> list[int]:
    """Divisors in increasing order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@lru_cache(maxsize=4096)
def best_layout(axes: tuple[PhysicalAxis, ...], mesh_shape: tuple[int, ...]) -> Factors | None:
    """The layout of a mesh on a torus with the fewest split axes; None when the sizes do not multiply up.

    Args:
      axes: the physical axes, major first.
      mesh_shape: sizes of the mesh axes; their product must be the number of devices.
    """
    if math.prod(axis.length for axis in axes) != math.prod(mesh_shape):
        return None
    layouts = _layouts(tuple(axis.length for axis in axes), mesh_shape)
    return min(layouts, key=lambda factors: _badness(axes, factors), default=None)


def _layouts(lengths: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Factors]:
    if not lengths:
        if all(size == 1 for size in sizes):
            yield ()
        return
    for row in factorizations(lengths[0], len(sizes)):
        if all(size % factor == 0 for size, factor in zip(sizes, row)):
            rest = tuple(size // factor for size, factor in zip(sizes, row))
            for tail in _layouts(lengths[1:], rest):
                yield (row, *tail)


def _badness(axes: Sequence[PhysicalAxis], factors: Factors) -> tuple:
    splits = [sum(f > 1 for f in row) - 1 if any(f > 1 for f in row) else 0 for row in factors]
    lost_rings = sum(axis.wraps and split > 0 for axis, split in zip(axes, splits))
    # Ties: the last (most talkative) mesh axis gets a whole axis, then one physical axis rather than pieces of several.
    last_split = sum(split > 0 and row[-1] > 1 for row, split in zip(factors, splits))
    pieces = sum(row[-1] > 1 for row in factors)
    return sum(splits), lost_rings, last_split, pieces, tuple(tuple(-f for f in row) for row in factors)


def row_major_layout(lengths: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Factors | None:
    """The layout of a plain reshape of the devices, for switched machines; None when an axis straddles a node unevenly.

    The last mesh axes fill the last physical axis (the node) first.
    """
    if math.prod(lengths) != math.prod(mesh_shape):
        return None
    remaining = list(mesh_shape)
    rows: list[tuple[int, ...]] = []
    for length in reversed(lengths):
        row = [1] * len(mesh_shape)
        for position in reversed(range(len(mesh_shape))):
            common = math.gcd(length, remaining[position])
            if common < remaining[position] and common < length:
                return None
            row[position] = common
            remaining[position] //= common
            length //= common
            if remaining[position] > 1:
                break
        rows.append(tuple(row))
        if length > 1:
            return None
    return tuple(reversed(rows))


def torus_links(axes: Sequence[PhysicalAxis], factors: Factors) -> tuple[AxisLink, ...]:
    """The link of each mesh axis: bandwidths of the physical axes it covers add up.

    A mesh axis that takes only a part of a physical axis has no wrap when its devices are neighbours; when it strides over ``k`` of them it
    keeps the wrap, shares each link with ``k - 1`` other groups, and a hop is ``k`` hops long.
    A mesh axis whose parts wrap only in part counts as a ring with the unwrapped parts at half their bandwidth.
    """
    links = []
    for mesh_axis in range(len(factors[0])):
        pieces = []
        for axis, row in zip(axes, factors):
            length = row[mesh_axis]
            if length == 1:
                continue
            stride = math.prod(row[mesh_axis + 1 :])
            wraps = axis.wraps and length * stride == axis.length
            pieces.append(PhysicalAxis(length, axis.bandwidth / stride, axis.latency * stride, wraps, axis.kind))
        links.append(_torus_link(pieces, axes))
    return tuple(links)


def _torus_link(pieces: list[PhysicalAxis], axes: Sequence[PhysicalAxis]) -> AxisLink:
    if not pieces:
        axis = axes[-1]
        return AxisLink(axis.bandwidth, axis.latency, True, "ici", (1,))
    dies = math.prod(piece.length for piece in pieces if piece.kind == "die")
    if 1 < dies < math.prod(piece.length for piece in pieces):
        # The dies of a chip share its torus links, so an axis over both has the whole chip's links.
        pieces = [dataclasses.replace(piece, bandwidth=piece.bandwidth * dies) for piece in pieces if piece.kind != "die"]
    wraps = any(piece.wraps for piece in pieces)
    bandwidth = sum(piece.bandwidth * (1.0 if piece.wraps == wraps else 0.5) for piece in pieces)
    parts = tuple(piece.length for piece in pieces)
    # One latency for the axis, so that hops = sum(parts) * latency is the sum over its pieces.
    latency = sum(piece.length * piece.latency for piece in pieces) / sum(parts)
    return AxisLink(bandwidth, latency, wraps, "ici", parts)


def switched_links(network: PhysicalAxis, node: PhysicalAxis, factors: Factors) -> tuple[AxisLink, ...]:
    """The link of each mesh axis on nodes x GPUs.

    An axis inside the node has NVLink, an axis across nodes the network card of each GPU; for an axis over both see ``_across``.
    """
    return tuple(
        AxisLink(node.bandwidth, node.latency, True, node.kind, (gpus,))
        if nodes == 1
        else _across(network, nodes, gpus, node.bandwidth, node.latency)
        for nodes, gpus in zip(*factors)
    )


def sliced_links(network: PhysicalAxis, axes: Sequence[PhysicalAxis], factors: Factors) -> tuple[AxisLink, ...]:
    """The link of each mesh axis on several slices of a torus; the first row of ``factors`` is of the slices.

    As on nodes of GPUs, with the links of the torus for the switch.
    """
    return tuple(
        link if slices == 1 else _across(network, slices, math.prod(link.parts), *node_rates([link]))
        for slices, link in zip(factors[0], torus_links(axes, factors[1:]), strict=True)
    )


def node_rates(links: Sequence[AxisLink]) -> tuple[float, float]:
    """Torus axes as if they were a switch: bytes/s of a device in an all-gather over them, and seconds of each of its steps."""
    steps = math.prod(math.prod(link.parts) for link in links) - 1
    return sum(link.both_ways for link in links), sum(link.hops_seconds for link in links) / max(steps, 1)


def _across(network: PhysicalAxis, nodes: int, gpus: int, node_bandwidth: float, node_latency: float) -> AxisLink:
    """An axis over ``nodes`` and ``gpus`` of each: the bandwidth at which the slower level moves an all-gather, the steps' mean latency."""
    if gpus == 1:
        return AxisLink(network.bandwidth, network.latency, True, network.kind, (nodes,))
    size = nodes * gpus
    slower = max((gpus - 1) / (gpus * node_bandwidth), (nodes - 1) / (nodes * gpus * network.bandwidth))
    latency = ((size - nodes) * node_latency + (nodes - 1) * network.latency) / (size - 1)
    return AxisLink((size - 1) / size / slower, latency, True, network.kind, (nodes, gpus))


def mesh_array(devices: np.ndarray, factors: Factors) -> np.ndarray:
    """Devices in physical layout (shape: physical lengths) → in mesh layout (shape: products of the columns)."""
    physical, logical = len(factors), len(factors[0])
    split = devices.reshape(tuple(itertools.chain.from_iterable(factors)))
    order = [p * logical + m for m in range(logical) for p in range(physical)]
    return split.transpose(order).reshape(tuple(math.prod(row[m] for row in factors) for m in range(logical)))
