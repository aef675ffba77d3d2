r"""Seconds of one collective on a group of mesh axes: latency plus bytes over bandwidth, by kind of interconnect.

``V`` bytes of the full (gathered) array on the group, ``n`` devices in the group, ``w`` bytes/s one-way of a device's links.

Torus axes (How to Scale Your Model, "Sharded matrices"; several axes work at once, each on its part of the data)::

    B           = sum over axes of w * (2 if the axis wraps else 1)           both directions of a ring, one of a line
    hops        = sum over axes of length * T_hop * (1/2 if it wraps else 1)
    all-gather  = T_base + max(hops, V (n-1)/n / B)                           = reduce-scatter
    all-reduce  = T_base + 2 max(hops, V (n-1)/n / B)
    all-to-all  = T_base + max(hops, max over axes of V/4 * length / (n c w)) c = 2 links cross the middle of a ring, 1 of a line
    permute     = T_base + T_hop + V/n / w

Switched domain: NVLink, shared memory (the GPU chapter of the same book; steps and protocols: NVIDIA/nccl, tuning.cc)::

    all-gather  = T_base + (n-1) T_step + V (n-1)/(n w)                       = reduce-scatter
    all-reduce  = T_base + (n-1) T_step + 2 V (n-1)/(n w)
    all-to-all  = T_base + (n-1) T_step + V (n-1)/(n^2 w)
    permute     = T_base + T_step + V/n / w

Nodes of ``g`` switched GPUs, ``m`` of them, each GPU with a network card of ``w_net``: the slower level counts, steps add up::

    all-gather  = T_base + (n-m) T_step + (m-1) T_net + max(V (g-1)/(g w), V (m-1)/(m g w_net))
    all-reduce  = T_base + (g-1) T_step + 2 log2(m) T_net + 2 max(...)        tree over the nodes
    all-to-all  = T_base + (n-m) T_step + (m-1) T_net + max(V (g-1)/(g n w), V (m-1)/(m n w_net))

Slices of a torus with a network between them: the same, with w = B and T_step = hops / (g - 1) of the torus inside.

Switched and network collectives of small arrays use NCCL's LL protocol, with a fraction of the latency and of the bandwidth.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxauto.core import AxisLink
from jaxauto.targets.topology import node_rates

# Fixed seconds of one call. ici: a 4-long v5e axis takes 8 us where hops explain 3 (How to Scale Your Model). nvlink, network: NCCL's
# base latency, ring, Simple protocol. Shared memory: assumed. Slices: assumed, two copies between device and host.
BASE_SECONDS = {"ici": 5e-6, "nvlink": 8.4e-6, "network": 8.4e-6, "slices": 20e-6, "shared memory": 20e-6}
_ACROSS = ("network", "slices")
_NCCL = ("nvlink", "network")

# NCCL's LL protocol against Simple. tuning.cc: 0.6 against 3.4 us a step on NVLink, 2.7 against 14 us on the network; LL's bandwidth is
# halved there and then capped, together about a quarter.
_LL_LATENCY = 0.2
_LL_BANDWIDTH = 0.25

Seconds = float | np.ndarray


@dataclass(frozen=True)
class _Torus:
    size: int
    links: tuple[AxisLink, ...]

    @property
    def hops_seconds(self) -> float:
        return sum(link.hops_seconds for link in self.links)

    def gather_seconds(self, full_bytes: Seconds) -> Seconds:
        both_ways = sum(link.both_ways for link in self.links)
        return np.maximum(self.hops_seconds, full_bytes * (self.size - 1) / self.size / both_ways)

    def all_gather(self, full_bytes: Seconds) -> Seconds:
        return BASE_SECONDS["ici"] + self.gather_seconds(full_bytes)

    def all_reduce(self, full_bytes: Seconds) -> Seconds:
        return BASE_SECONDS["ici"] + 2 * self.gather_seconds(full_bytes)

    def all_to_all(self, full_bytes: Seconds) -> Seconds:
        per_byte = max(
            max(link.parts) / (4 * self.size * (2 if link.wraps else 1) * link.bandwidth / len(link.parts)) for link in self.links
        )
        return BASE_SECONDS["ici"] + np.maximum(self.hops_seconds, full_bytes * per_byte)

    def permute(self, full_bytes: Seconds) -> Seconds:
        slowest = min(link.bandwidth / len(link.parts) for link in self.links)
        return BASE_SECONDS["ici"] + max(link.latency for link in self.links) + full_bytes / self.size / slowest


@dataclass(frozen=True)
class _Switched:
    """``nodes`` with ``gpus`` devices of the group each. Latencies count ``inner`` steps on the switch and ``outer`` on the network."""

    kind: str
    gpus: int
    node_bandwidth: float
    nodes: int
    card_bandwidth: float  # of one device's network card
    inner: int
    inner_latency: float
    outer: int
    outer_latency: float

    @property
    def size(self) -> int:
        return self.inner * self.outer

    @property
    def ring_seconds(self) -> float:
        return (self.size - self.outer) * self.inner_latency + (self.outer - 1) * self.outer_latency

    @property
    def tree_seconds(self) -> float:
        return (self.inner - 1) * self.inner_latency + 2 * math.log2(self.outer) * self.outer_latency

    @property
    def gather_per_byte(self) -> float:
        inside = (self.gpus - 1) / (self.gpus * self.node_bandwidth)
        return max(inside, (self.nodes - 1) / (self.nodes * self.gpus * self.card_bandwidth))

    def protocol(self, latency: float, seconds: Seconds) -> Seconds:
        latency = BASE_SECONDS[self.kind] + latency
        if self.kind not in _NCCL:
            return latency + seconds
        return np.minimum(latency + seconds, latency * _LL_LATENCY + seconds / _LL_BANDWIDTH)

    def all_gather(self, full_bytes: Seconds) -> Seconds:
        return self.protocol(self.ring_seconds, full_bytes * self.gather_per_byte)

    def all_reduce(self, full_bytes: Seconds) -> Seconds:
        return self.protocol(self.tree_seconds, 2 * full_bytes * self.gather_per_byte)

    def all_to_all(self, full_bytes: Seconds) -> Seconds:
        inside = (self.gpus - 1) / (self.gpus * self.size * self.node_bandwidth)
        across = (self.nodes - 1) / (self.nodes * self.size * self.card_bandwidth)
        return self.protocol(self.ring_seconds, full_bytes * max(inside, across))

    def permute(self, full_bytes: Seconds) -> Seconds:
        slowest = min(self.node_bandwidth, self.card_bandwidth)
        return self.protocol(max(self.inner_latency, self.outer_latency), full_bytes / self.size / slowest)


def _group(sizes: Sequence[int], links: Sequence[AxisLink]) -> _Torus | _Switched:
    if {link.kind for link in links} == {"ici"}:
        return _Torus(math.prod(sizes), tuple(dataclasses.replace(link, parts=link.parts or (size,)) for size, link in zip(sizes, links)))
    inside = [(size, link) for size, link in zip(sizes, links) if link.kind not in _ACROSS]
    across = [(size, link) for size, link in zip(sizes, links) if link.kind in _ACROSS]
    if torus := [link for _, link in inside if link.kind == "ici"]:
        rate, step = node_rates(torus)
        inside = [(size, dataclasses.replace(link, bandwidth=rate, latency=step)) for size, link in inside]
    inner = math.prod(size for size, _ in inside)
    outer = math.prod(size for size, _ in across)
    # A network axis that also covers GPUs of a node (parts: nodes, GPUs) sends over that many cards at once.
    cards = [math.prod(link.parts[1:]) for _, link in across]
    # Its bandwidth is that of the slower level, so it stands for the switch only where no axis inside the node does.
    switch = [link.bandwidth for _, link in inside] or [
        max((link.bandwidth for (_, link), n in zip(across, cards) if n > 1), default=math.inf)
    ]
    return _Switched(
        kind=(across or inside)[0][1].kind,
        gpus=inner * math.prod(cards),
        node_bandwidth=min(switch),
        nodes=outer // math.prod(cards),
        card_bandwidth=min((link.bandwidth / count for (_, link), count in zip(across, cards)), default=math.inf),
        inner=inner,
        inner_latency=max((link.latency for _, link in inside), default=0.0),
        outer=outer,
        outer_latency=max((link.latency for _, link in across), default=0.0),
    )


_FORMULAS: dict[str, Callable[[_Torus | _Switched, Seconds], Seconds]] = {
    "all-reduce": lambda group, full_bytes: group.all_reduce(full_bytes),
    "all-gather": lambda group, full_bytes: group.all_gather(full_bytes),
    "reduce-scatter": lambda group, full_bytes: group.all_gather(full_bytes),
    "all-to-all": lambda group, full_bytes: group.all_to_all(full_bytes),
    "collective-permute": lambda group, full_bytes: group.permute(full_bytes),
}


def collective_seconds(kind: str, full_bytes: Seconds, sizes: Sequence[int], links: Sequence[AxisLink]) -> Seconds:
    """Seconds of one collective; formulas and sources at the head of this file.

    Args:
      kind: ``all-reduce | all-gather | reduce-scatter | all-to-all | collective-permute``.
      full_bytes: bytes of the full (gathered) array on one group, that is, already divided by its sharding over other axes. For an
        all-reduce: of the array that each device holds. A number or an array of numbers.
      sizes: devices along each mesh axis of the group.
      links: what each of those axes communicates over, from ``Target.axis_links``.

    Returns:
      Seconds, a float for a number, an array of the same shape for an array; 0 where the group or the array is empty.

    Raises:
      ValueError: an unknown kind.
    """
    if kind not in _FORMULAS:
        raise ValueError(f"unknown collective {kind!r}; known: {', '.join(sorted(_FORMULAS))}")
    used = [(int(size), link) for size, link in zip(sizes, links, strict=True) if size > 1]
    amount = np.asarray(full_bytes, dtype=float)
    if not used:
        seconds = np.zeros_like(amount)
    else:
        group = _group([size for size, _ in used], [link for _, link in used])
        seconds = np.where(amount > 0, _FORMULAS[kind](group, amount), 0.0)
    return seconds if isinstance(full_bytes, np.ndarray) else float(seconds)
