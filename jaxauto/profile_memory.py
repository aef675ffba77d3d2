"""What lives when in a profiled program: by kind, along the program, and at the peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxauto.core import OPERATIONS, Graph, Kind, LinkKind, Node, OpRule
from jaxauto.cost.liveness import Buffers, live_bytes
from jaxauto.estimate import MEMORY_KINDS
from jaxauto.flow import feeding_operations
from jaxauto.graph import walk
from jaxauto.timeline import Live, Timeline
from jaxauto.trace import Traced

KINDS = (*MEMORY_KINDS[:-1], "results", MEMORY_KINDS[-1])  # a function that is no step has results


@dataclass(frozen=True)
class Profiled:
    """A traced program and how much of each array and equation one device holds.

    Attributes:
      pieces: value id → number of pieces the value is cut into. shares: node id → number of devices that share a node's work.
      live: live bytes at each position on one device; sizes: bytes of each buffer in its memory, tile padding included.
      padded: value id → by how much tiles enlarge what one device holds of it. local: value id → shape of that.
      aliased: outputs that reuse the memory of a donated argument.
      placed: what stays in on-chip memory (``onchip.Placed``); None where the compiler manages none.
    """

    traced: Traced
    graph: Graph
    rules: Mapping[int, OpRule]
    buffers: Buffers
    sizes: np.ndarray
    live: np.ndarray
    pieces: Callable[[int], float]
    shares: Callable[[Node], float]
    aliased: frozenset[int] = frozenset()
    padded: Callable[[int], float] = lambda _: 1.0
    local: Callable[[int], tuple[float, ...]] = lambda _: ()
    placed: Any = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    specs: Mapping[str, Any] = field(default_factory=dict)


class Memory:
    """Which buffers of a program are alive where, and what they are.

    Attributes:
      parameters: positions of the inputs that are parameters; see ``Profile.params_bytes``.
      turn: the position where the backward pass begins, or None.
      kept: indices of the buffers that the forward pass made and the backward pass still reads.
    """

    def __init__(self, program: Profiled, phase: Mapping[int, str]):
        self.program, self.phase = program, phase
        self.graph, self.buffers, self.values = program.graph, program.buffers, program.graph.values
        self.nodes = list(walk(self.graph))
        self.feeding = self._feeding()
        self.parameters = self._parameters()
        position, loop_start = self.buffers.position, self.buffers.loop_start
        backward = (node.id for node in self.nodes if phase[node.id] == "backward")
        self.turn: int | None = min((loop_start.get(n, position[n]) for n in backward), default=None)
        self.kept = self._kept()
        self.kinds = self._kinds()

    # ---------------------------------------------------------------------------------------------------------------- kinds

    def _feeding(self) -> set[int]:
        """Values that the model computes with; an optimizer that multiplies matrices (Muon, Shampoo) makes no parameters of its moments."""
        rules = self.program.rules
        aside = {
            n: dataclasses.replace(r, kind=Kind.CHEAP) for n, r in rules.items() if self.phase[n] == "optimizer" and r.kind in OPERATIONS
        }
        return feeding_operations(self.graph, {**rules, **aside})

    def _parameters(self) -> list[int]:
        traced = self.program.traced
        state = [i for i, _ in traced.state]
        floating = {k for k, a in enumerate(traced.in_avals) if jax.numpy.issubdtype(a.dtype, jax.numpy.floating)}
        if state:
            return [k for k in state if k in floating and self.graph.inputs[k] in self.feeding]
        (positional, named) = jax.tree_util.tree_unflatten(traced.in_tree, list(range(len(traced.in_avals))))
        containers = (a for a in (*positional, *named.values()) if not isinstance(a, int) and jax.tree_util.tree_leaves(a))
        return [k for k in jax.tree_util.tree_leaves(next(containers, ())) if k in floating]

    def _kept(self) -> frozenset[int]:
        if self.turn is None:
            return frozenset()
        b, outputs = self.buffers, set(self.graph.outputs)
        crossing = (b.start < self.turn) & (b.end >= self.turn) & ~b.is_input
        read_later = {x for node in self.nodes if self.phase[node.id] != "forward" for x in self._roots_read(node)}
        found = (int(k) for k in np.nonzero(crossing)[0] if int(b.ids[k]) in read_later or int(b.ids[k]) not in outputs)
        return frozenset(k for k in found if int(b.ids[k]) not in self.graph.consts)

    def _roots_read(self, node: Node) -> set[int]:
        return {x for x in node.inputs if isinstance(x, int)} | set(self.buffers.read_at.get(node.id, ()))

    def _kinds(self) -> np.ndarray:
        """For each buffer, the index of its kind in ``KINDS``."""
        traced, inputs, ids = self.program.traced, self.graph.inputs, self.buffers.ids
        arguments = {
            **dict.fromkeys((*inputs, *self.graph.consts), "batch and other inputs"),
            **{inputs[i]: "optimizer state" for i, _ in traced.state},
            **{inputs[k]: "parameters" for k in self.parameters},
        }
        both = {n.id for n in self.nodes if any(self.phase[i.id] == "backward" for body in n.bodies for i in walk(body))}
        outputs = set(self.graph.outputs)
        return np.array([KINDS.index(arguments.get(int(x)) or self._kind_made(k, int(x), both, outputs)) for k, x in enumerate(ids)], int)

    def _kind_made(self, index: int, number: int, both: set[int], outputs: set) -> str:
        """The kind of what the program itself makes; ``both``: loops that hold a backward pass."""
        if index in self.kept:
            return "activations kept"
        producer = self.values[number].producer
        forward = producer is not None and self.phase[producer.id] == "forward" and producer.id not in both
        if forward or self.turn is None:
            return "results" if number in outputs else "transients"
        return "transients" if number in self.feeding else "gradients and updates"

    # ------------------------------------------------------------------------------------------------------------- timeline

    @property
    def activation_bytes(self) -> float:
        """Bytes of what the forward pass made and the backward pass still needs, where the backward pass begins."""
        return float(sum(self.program.sizes[k] for k in self.kept))

    def timeline(self) -> Timeline:
        """Live bytes along the program, by kind, and what lives at the peak."""
        length = self.buffers.length
        names, sources, phases = [""] * length, [""] * length, [""] * length
        for node in self.nodes:
            for at in (self.buffers.position[node.id], self.buffers.loop_start.get(node.id)):
                if at is not None:
                    names[at], sources[at], phases[at] = node_name(node), node.source, self.phase[node.id]
        if length > 1:
            names[0], names[-1] = names[0] or "start", names[-1] or "end"
        live = self.program.live
        by_kind = {name: live_bytes(self.buffers, self.program.sizes * (self.kinds == k)) for k, name in enumerate(KINDS)}
        by_kind["transients"] += live - sum(by_kind.values())  # on a mesh: gathered copies
        by_kind = {name: bytes_ for name, bytes_ in by_kind.items() if bytes_.max(initial=0.0) > 0}
        at = int(live.argmax())
        return Timeline(live, tuple(names), tuple(sources), tuple(phases), self._alive_at(at), self.turn, by_kind)

    def _alive_at(self, position: int) -> tuple[Live, ...]:
        b, names, stacks = self.buffers, self._value_names(), self._stacks()
        found = []
        for k in np.nonzero((b.start <= position) & (b.end >= position))[0]:
            value = self.values[int(b.ids[k])]
            maker = stacks.get(value.id, value.producer)
            source = maker.source if maker else ""
            name, kind = names.get(value.id, "constant"), KINDS[self.kinds[k]]
            found.append(Live(name, value.shape, str(value.dtype), float(self.program.sizes[k]), source, kind))
        return tuple(sorted(found, key=lambda x: (-x.bytes_, x.name)))

    def _value_names(self) -> dict[int, str]:
        names = {n: f"argument {path}" for n, path in zip(self.graph.inputs, self.program.traced.in_paths, strict=True)}
        for node in self.nodes:
            name = node_name(node)
            for k, out in enumerate(node.outputs):
                names[out] = name if len(node.outputs) == 1 else f"{name}[{k}]"
            for body in node.bodies:
                for k, number in enumerate(body.inputs):
                    names[number] = f"{name} carry[{k}]"
            for number, maker in self._stacks_of(node).items():
                names[number] = f"{node_name(maker)} ×{node.trips}"
        return names

    def _stacks(self) -> dict[int, Node]:
        """Results that a loop stacks, one slice a trip → the equation that makes a slice."""
        return {number: maker for node in self.nodes for number, maker in self._stacks_of(node).items()}

    def _stacks_of(self, node: Node) -> dict[int, Node]:
        makers = ((link.target, self.values[link.source].producer) for link in node.links if link.kind is LinkKind.YS)
        return {target: maker for target, maker in makers if maker is not None}


def node_name(node: Node) -> str:
    """Scope and primitive; of a scan also how often it turns: ``"layers/scan ×126"``."""
    loop = f" ×{node.trips}" if node.prim == "scan" else ""
    return f"{node.scope}/{node.prim}{loop}" if node.scope else f"{node.prim}{loop}"
