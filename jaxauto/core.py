"""The types that stages hand on. Everything here is data; no stage's logic lives in this file.

Conventions
- A *value* is an array of the program, known by an integer id that is unique in the whole program, loop bodies included.
- A *sharding* is, for each dimension, a tuple of mesh axis names, major to minor: ``(("data",), (), ("model",))``.
- Numbers carry their unit in the name: ``bytes_``, ``seconds``, ``flops``. GB is 1e9, GiB is 2**30.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxauto import compat

Sharding = tuple[tuple[str, ...], ...]


# --------------------------------------------------------------------------------------------------------------- rules


class Kind(enum.Enum):
    """How a compiler treats an equation; decides what is materialised and which roofline applies."""

    VIEW = "view"  # costs nothing once fused: broadcast, iota, convert, reshape, squeeze
    CHEAP = "cheap"  # elementwise, duplicated freely into its consumers: add, mul, select, compare
    EXPENSIVE = "expensive"  # elementwise with a transcendental: not duplicated: exp, tanh, rsqrt, pow
    RANDOM = "random"  # bits from a key: elementwise without an operand to read
    REDUCE = "reduce"  # reduce_sum, reduce_max, argmax: fuses its producers, materialises its result
    MOVE = "move"  # copies memory: transpose, concatenate, slice, pad, dynamic_update_slice
    DOT = "dot"  # the matrix unit: dot_general
    CONV = "conv"
    GATHER = "gather"
    SCATTER = "scatter"
    SCAN = "scan"  # cumsum, sort, fft: a whole dimension at once
    CONTROL = "control"  # has bodies: scan, while, cond
    OPAQUE = "opaque"  # unknown

    __hash__ = object.__hash__  # of one object for each member; Enum's own is Python code, and kinds are looked up millions of times


MATRIX = frozenset({Kind.DOT, Kind.CONV})  # what the matrix unit does
ELEMENTWISE = frozenset({Kind.VIEW, Kind.CHEAP, Kind.EXPENSIVE})
OPERATIONS = MATRIX | {Kind.GATHER, Kind.SCATTER}  # have a strategy of their own; the others follow


@dataclass(frozen=True)
class OpRule:
    """What a primitive does to dimensions: an einsum-like ``spec`` over *factors*.

    ``spec`` is ``"operands -> results"``, values separated by commas, dimensions by blanks. A dimension is

    - a factor name (``b``): whoever has it in its spec is sharded alike along it,
    - ``_``: must be whole on every device, or has size 1,
    - ``(a b)``: the product of factors, major first (a reshape); their ``sizes`` must be given.

    A factor that operands have and no result has is *reduced* (``reduce`` says how, default ``"sum"``): sharding it leaves partial
    results that a collective must combine. A factor that only results have is created (broadcast, iota) and shards freely.
    The idea is Shardy's op sharding rule (openxla/shardy, op_sharding_rule_registry) and the factors of an einsum.

    Args:
      spec: dimensions to factors, as above. A scalar is the empty string, e.g. ``"b m, -> b m"``.
      reduce: how a reduced factor is combined: ``"sum" | "max" | "min" | "prod" | "and" | "or"``. Default sum.
      whole: factors that must not be sharded (sort, cumsum, fft axis, windows).
      halo: factors (spatial windows) that can be sharded at the price of exchanging ``halo[f]`` elements with each neighbour.
      sizes: sizes of factors that only appear inside parentheses.
      flops: floating-point operations of the whole, unsharded equation; None: one for each element of the largest value.
      bytes_: HBM bytes that the equation touches, unsharded; None: all operands and results once.
      kind: see ``Kind``; decides fusion and roofline.
    """

    spec: str
    reduce: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] | tuple[str, ...] = frozenset()
    halo: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    flops: float | None = None
    bytes_: float | None = None
    kind: Kind = Kind.OPAQUE

    @property
    def operands(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """For each operand, for each dimension, its factors (major first); ``()`` for ``_``."""
        return _parse_spec(self.spec)[0]

    @property
    def results(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """As ``operands``, for the results."""
        return _parse_spec(self.spec)[1]


@functools.lru_cache(maxsize=65536)
def _parse_spec(spec: str):
    left, arrow, right = spec.partition("->")
    if not arrow:
        raise ValueError(f"rule {spec!r} has no '->' between operands and results")
    return _parse_side(left), _parse_side(right)


def _parse_side(side: str):
    return tuple(_parse_value(text) for text in side.split(","))


def _parse_value(text: str):
    dims: list[tuple[str, ...]] = []
    tokens = text.replace("(", " ( ").replace(")", " ) ").split()
    group: list[str] | None = None
    for token in tokens:
        if token == "(":
            group = []
        elif token == ")":
            if group is None:
                raise ValueError(f"unbalanced ')' in rule part {text!r}")
            dims.append(tuple(group))
            group = None
        elif group is not None:
            group.append(token)
        else:
            dims.append(() if token == "_" else (token,))
    if group is not None:
        raise ValueError(f"unbalanced '(' in rule part {text!r}")
    return tuple(dims)


# --------------------------------------------------------------------------------------------------------------- graph


@dataclass(frozen=True, eq=False)
class Literal:
    """A constant written into an equation (always replicated)."""

    value: Any
    aval: Any


@dataclass(eq=False)
class Value:
    """One array of the program."""

    id: int
    aval: Any  # jax.core.ShapedArray
    producer: Node | None = None  # None: an input of its graph
    users: list[Node] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @functools.cached_property
    def elements(self) -> int:
        return math.prod(self.aval.shape)

    @functools.cached_property
    def nbytes(self) -> float:
        """Bytes of the whole array, unsharded; an element of int4 is half a byte."""
        return float(self.elements) * compat.itemsize(self.dtype)

    def copied(self) -> Value:
        """The same array in another program, where nothing makes or reads it yet."""
        copy = object.__new__(Value)  # with what is known of its size; __init__ would be a large part of a rewriting
        copy.__dict__.update(self.__dict__, producer=None, users=[])
        return copy


class LinkKind(enum.Enum):
    """How a value outside a control-flow body is bound to one inside."""

    CONST = "const"  # outer operand == inner input, whole
    INIT = "init"  # outer operand -> first carry
    CARRY = "carry"  # inner carry output -> inner carry input of the next trip
    FINAL = "final"  # inner carry output -> outer result
    XS = "xs"  # outer operand, one leading dimension more -> inner input
    YS = "ys"  # inner output -> outer result, one leading dimension more
    OVER = "over"  # outer operand -> outer result: a stack of which the trips write some slices, see Window


@dataclass(frozen=True)
class Link:
    """``source`` flows into ``target`` (value ids); for XS and YS the outer one has one more leading dimension."""

    kind: LinkKind
    source: int
    target: int


@dataclass(frozen=True)
class Window:
    """Which part of its stacks a scan goes over, where they have more slices than it has trips.

    Attributes:
      whole: slices of these stacks. Other operands and results that are stacked have one for each trip.
      first: the slice of trip 0, counted from the first one of the trip of the scan around it.
      each: slices for each trip: of a scan over segments, the trips of the scans in its body.
      over: how many of its last results are stacks of ``whole`` slices; as many of its last operands are what is written over.
    """

    whole: int
    first: int
    each: int = 1
    over: int = 0


@dataclass(eq=False)
class Node:
    """One equation. ``inputs`` are value ids or Literals."""

    id: int
    eqn: Any  # the JaxprEqn, for its primitive and params
    prim: str
    inputs: tuple[int | Literal, ...]
    outputs: tuple[int, ...]
    scope: str = ""  # name stack, transforms stripped: "decoder/block/attention"
    source: str = ""  # "file.py:12 (function)"
    backward: bool = False  # made by transposition
    again: bool = False  # a user's jax.checkpoint makes in the backward pass what the forward pass made already
    bodies: tuple[Graph, ...] = ()
    links: tuple[Link, ...] = ()
    trips: int = 1  # how often the bodies run (while: 1, unknown)
    num_consts: int = 0  # scan: its inputs are consts, carries, xs; its outputs carries, ys
    num_carry: int = 0
    reverse: bool = False
    window: Window | None = None  # scan: over a part of its stacks
    also: tuple[int, ...] = ()  # in program order among ids of nodes: equal equations that this one stands for

    @property
    def params(self) -> dict:
        return self.eqn.params


@dataclass(eq=False)
class Graph:
    """A jaxpr with calls inlined: nodes in program order. ``values`` is one table for the whole program, bodies included."""

    inputs: tuple[int, ...]
    outputs: tuple[int | Literal, ...]
    nodes: list[Node]
    values: dict[int, Value]
    consts: dict[int, Any] = field(default_factory=dict)  # value id -> array captured by closure


# ------------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class AxisLink:
    """What one mesh axis has to communicate over.

    Attributes:
      bandwidth: bytes/s that one device can send along the axis in one direction, all its links on that axis together.
      latency: seconds for one hop.
      wraps: the axis closes into a ring (torus) or is switched (NVLink): no penalty for the ends.
      kind: "ici" | "nvlink" | "network" (between nodes of GPUs) | "slices" (the network between TPU slices) | "shared memory".
      parts: lengths of the physical axes that the mesh axis covers, major first; (): one, of the mesh axis's own length.
    """

    bandwidth: float
    latency: float
    wraps: bool = True
    kind: str = "ici"
    parts: tuple[int, ...] = ()

    @property
    def both_ways(self) -> float:
        """Bytes/s of a device on a torus axis, in both directions of a ring, in one of a line."""
        return self.bandwidth * (2 if self.wraps else 1)

    @property
    def hops_seconds(self) -> float:
        """Seconds along a torus axis, half of it where it is a ring."""
        return sum(self.parts) * self.latency * (0.5 if self.wraps else 1.0)


# ------------------------------------------------------------------------------------------------------------ estimate


@dataclass(frozen=True)
class Collective:
    """One collective of the step: ``bytes_`` is the full (gathered) array on the group, for each device group, for one call."""

    kind: str  # all-reduce | all-gather | reduce-scatter | all-to-all | collective-permute
    bytes_: float
    axes: tuple[str, ...]
    count: float  # times per step
    seconds: float = 0.0  # for one call
    where: str = ""


@dataclass(frozen=True)
class Estimate:
    """What the planner believes of one step, for each device. Seconds, bytes, flops.

    ``allocated``: arguments, results and the compiler's heap with its gaps, where it is known how that is filled (XLA:CPU).
    """

    step_time: float
    compute_time: float
    comm_time: float
    exposed_comm_time: float
    peak_memory: float
    memory: Mapping[str, float]  # kind -> bytes: "parameters and state", "activations kept", "transients", ...
    flops: float  # of the whole step on one device
    mfu: float  # model flops utilisation: flops without recomputation / step_time / peak
    collectives: tuple[Collective, ...] = ()
    feed_time: float = 0.0  # of comm_time: the batch's way from the host, of which a compiled step shows nothing
    exposed_feed_time: float = 0.0  # how much shorter the step is without
    allocated: float | None = None

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class MeshAxes:
    """A mesh as the cost model sees it: names, sizes, and what each axis communicates over.

    ``scatters``: the compiler has a reduce-scatter; XLA:CPU has none, it reduces whole and cuts.
    ``sums_whole``: gathers and scatters over all devices together are written as all-reduces, and waited for: XLA:TPU on closed 3-D tori.
    ``scatters_whole``: scatters over all devices together are, gathers are not: XLA:TPU on other 3-D topologies and on squares.
    ``windows``: the most devices over which a sum is scattered beside the dot that makes it (``cost/windowed.py``); other sums are waited
    for. None: any sum can be hidden.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[AxisLink, ...]
    scatters: bool = True
    sums_whole: bool = False
    scatters_whole: bool = False
    windows: int | None = None

    @property
    def num_devices(self) -> int:
        total = 1
        for n in self.sizes:
            total *= n
        return total

    @property
    def shape(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes, strict=True))


# ----------------------------------------------------------------------------------------------------------- decisions


@dataclass(frozen=True)
class Trips:
    """Some trips of a scan, one after the other, and what they keep for the backward pass.

    Attributes:
      count: how many.
      kept: values of the body as written that each keeps; None: as written. Of trips that run again those of ``inside`` say it.
      inside: how they are cut as they run again, in the order of the forward pass: segments of as many trips as these have together,
        of which the carries that they begin with are kept. (): they do not run again, and keep what they keep.
    """

    count: int
    kept: frozenset[int] | None = None
    inside: tuple[Trips, ...] = ()

    @property
    def length(self) -> int:
        """Trips of a segment."""
        return sum(part.count for part in self.inside) or self.count

    def keeping(self, old: frozenset[int] | None, new: frozenset[int] | None) -> Trips:
        """The same with ``new`` kept where ``old`` is."""
        if self.inside:
            return dataclasses.replace(self, inside=tuple(part.keeping(old, new) for part in self.inside))
        return dataclasses.replace(self, kept=new) if self.kept == old else self

    def leaves(self, times: int = 1, depth: int = 0) -> Iterator[tuple[int, int, frozenset[int] | None]]:
        """What is one pair of scans in the end: trips in all, how often they run again, what they keep."""
        if not self.inside:
            yield times * self.count, depth, self.kept
        for part in self.inside:
            yield from part.leaves(times * self.count // self.length, depth + 1)


@dataclass(frozen=True)
class Decisions:
    """What a plan does to a graph, in ids of the graph as written (they follow program order, so the same step has the same ids).

    Attributes:
      values: value id → sharding to pin it to.
      operands: (first result of a node, operand index) → sharding of that operand for that node alone.
      kept: for each block of ``blocks.find_blocks`` the value ids it keeps for the backward pass, or None for as written.
      gathered_late: (first result, operand index) whose gather waits for the backward pass (else it is merged with the forward one's) →
        the value that it waits for, in memory before the node runs; None: the other operand of the node.
      made: value id → sharding it is made in before it gets the one in ``values``: a conversion that narrows comes before a gather, and
        an array is cut before a piece of it goes elsewhere.
      offloaded: values that are in the host's memory between the passes; arguments and results that are there between steps.
      remade: values between blocks that are made again for the backward pass, and the depth of each, see ``reruns.py``.
      splits: block → its trips, where they differ in what they keep; ``kept`` says what the first of them keep.
      in_order: gradients, those summed over devices too, that loops and recomputations of the backward pass wait for
        where the compiler is held to the order of the program (``rewrite/order.py``): all on GPU and CPU; on TPU those summed
        over devices that are much smaller than what is read for them. None where it is not, on CPU.
      short: those of them, on several devices, that the next operations of the backward pass wait for: on GPU short sums of much that is
        read, on TPU what would raise the peak until a loop or recomputation waits for it.
    """

    values: Mapping[int, Sharding] = field(default_factory=dict)
    operands: Mapping[tuple[int, int], Sharding] = field(default_factory=dict)
    kept: tuple[frozenset[int] | None, ...] = ()
    gathered_late: Mapping[tuple[int, int], int | None] = field(default_factory=dict)
    made: Mapping[int, Sharding] = field(default_factory=dict)
    offloaded: frozenset[int] = frozenset()
    remade: frozenset[tuple[int, int]] = frozenset()
    splits: Mapping[int, tuple[Trips, ...]] = field(default_factory=dict)
    in_order: frozenset[int] | None = None
    short: frozenset[int] = frozenset()
