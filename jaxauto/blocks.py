"""Blocks: stretches of the forward pass whose residuals can be kept, or recomputed from what enters the block.

A step's graph holds forward and backward pass. A node's *phase* counts how often its history changed sides: 0 is the forward pass, 1 its
backward pass, 2 the optimizer (or a second forward pass that depends on the first gradients), and so on. A value of an even phase that a
transposed node of a later phase reads is a *residual*. The forward nodes of a phase are cut at narrow waists: see ``segments``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from jaxauto.alike import SOURCES
from jaxauto.core import Graph, Literal, Node, Value
from jaxauto.segments import Stretch, cut

_RETYPES = frozenset(["convert_element_type", "copy", "reshape", "transpose"])
# With these, the operations that alone make no block worth having.
_LIGHT = frozenset(["reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin", "tanh", "logistic", "erf"])


@dataclass(frozen=True, eq=False)
class Block:
    """A stretch of the forward pass. Values are ids of ``graph``, or of the forward scan's body when ``scan`` is set.

    Attributes:
      name: for people: the scope that its nodes share.
      forward: its nodes in program order.
      inputs: values made outside that it reads: arguments, constants, outputs of earlier blocks. They are alive anyway, but for the
        carries of a scan: one that recomputation reads is stacked for it.
      residuals: values it makes that only the backward pass needs later: the candidates to keep or to recompute.
      outputs: values it makes that others need too (later blocks, results of the step, stacked results of a scan): alive anyway.
      count: trips of the scan, else 1. Bytes of a scan's values count this many times.
      scan: the forward scan and the backward scan that eats its residuals.
      graph: the graph that holds the nodes, or the two scans.
      phase: the phase of its nodes.
    """

    name: str
    forward: tuple[Node, ...]
    inputs: tuple[int, ...]
    residuals: tuple[int, ...]
    outputs: tuple[int, ...]
    count: int
    scan: tuple[Node, Node] | None
    graph: Graph
    phase: int = 0

    @cached_property
    def made(self) -> tuple[int, ...]:
        """All values that it makes, in program order. Blocks of equal structure have their counterparts at equal places."""
        return tuple(out for node in self.forward for out in node.outputs)

    @property
    def carries(self) -> tuple[int, ...]:
        """What the body of its scan is given by the trip before; () without a scan."""
        return tuple(x for node in (self.scan or ())[:1] for x in node.bodies[0].inputs[node.num_consts :][: node.num_carry])


def find_blocks(graph: Graph) -> tuple[Block, ...]:
    """The blocks of a step that have residuals, in forward order; those inside a loop body stand where the loop does."""
    blocks = _blocks(graph)
    seen = Counter(b.name for b in blocks)
    number: Counter = Counter()
    named = []
    for block in blocks:
        name = block.name
        if seen[name] > 1:
            name = f"{name}[{number[name]}]"
            number[block.name] += 1
        named.append(replace(block, name=name))
    return tuple(named)


def closure(block: Block, kept: Collection[int]) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """What it takes to have all residuals that are not in ``kept`` again.

    Args:
      block: from ``find_blocks``.
      kept: ids of values made in the block that stay saved; residuals or any others.

    Returns:
      The nodes to recompute in program order, and the values they read: kept ones, block inputs and outputs, results of what runs once.
    """
    producer = {out: node for node in block.forward for out in node.outputs}
    saved = {*kept, *block.outputs}
    nodes: dict[int, Node] = {}
    reads: set[int] = set()
    wanted = [v for v in block.residuals if v not in saved]
    seen = set(wanted)
    while wanted:
        value = wanted.pop()
        node = producer.get(value)
        if node is None or value in saved or runs_once(node, block.graph):
            reads.add(value)
            continue
        if node.id in nodes:
            continue
        nodes[node.id] = node
        for x in node.inputs:
            if isinstance(x, int) and x not in seen:
                seen.add(x)
                wanted.append(x)
    order = tuple(node for node in block.forward if node.id in nodes)
    return order, tuple(sorted(reads)) if order else ()


def runs_once(node: Node, graph: Graph) -> bool:
    """Whether a node must not, or had better not, run twice: what it does shows (callbacks, prints), or it looks up in an argument.

    A table that is read late cannot be updated in place: the compiler copies all of it to save the few rows.
    """
    return bool(node.eqn.effects) or (node.prim == "gather" and _is_argument(node.inputs[0], graph))


def _is_argument(x: int | Literal, graph: Graph) -> bool:
    while isinstance(x, int) and (node := graph.values[x].producer) is not None and node.prim in _RETYPES:
        x = node.inputs[0]
    return x in graph.inputs


def phases(graph: Graph) -> dict[int, int]:
    """Node id → phase, for the nodes of this graph (not of bodies): even is forward, odd is backward."""
    phase: dict[int, int] = {}
    values = graph.values
    for node in graph.nodes:
        latest = 0
        for x in node.inputs:
            producer = None if isinstance(x, Literal) else values[x].producer
            if producer is not None:
                latest = max(latest, phase.get(producer.id, 0))
        phase[node.id] = latest + ((latest % 2 == 1) != node.backward)
    return phase


# ------------------------------------------------------------------------------------------------------------- one graph


def _blocks(graph: Graph) -> list[Block]:
    phase = phases(graph)
    position = {node.id: k for k, node in enumerate(graph.nodes)}
    pairs = [p for p in (_pair(graph, node, phase) for node in graph.nodes if node.prim == "scan") if p is not None]
    members = {node.id for pair in pairs for node in pair.scan or ()}
    placed = [(position[pair.scan[0].id], pair) for pair in pairs if pair.scan and pair.residuals]
    for p in sorted({phase[n] for n in phase if phase[n] % 2 == 0}):
        placed += [(position[block.forward[0].id], block) for block in _unrolled(graph, phase, p, members)]
    for node in graph.nodes:
        if node.id not in members:
            placed += [(position[node.id], block) for body in node.bodies for block in _blocks(body)]
    return [block for _, block in sorted(placed, key=lambda item: item[0])]


def _read_later(value: Value, phase: dict[int, int], p: int) -> bool:
    return any(user.backward and phase[user.id] > p for user in value.users if user.id in phase)


def _unrolled(graph: Graph, phase: dict[int, int], p: int, pairs: set[int]) -> list[Block]:
    """The blocks of phase ``p`` of one graph, scan pairs left out."""
    values = graph.values
    nodes = [n for n in graph.nodes if phase[n.id] == p]
    residual = {out for n in nodes if n.id not in pairs for out in n.outputs if _read_later(values[out], phase, p)}
    if not residual:
        return []
    sources = _source_nodes(graph, nodes)
    core = [n for n in nodes if n.id not in sources]
    segment_of = _segments(graph, core, residual, pairs)
    _sink(values, nodes, sources, segment_of)
    groups: dict[int, list[Node]] = {}
    for n in nodes:
        groups.setdefault(segment_of[n.id], []).append(n)
    left = {x for x in graph.outputs if isinstance(x, int)}
    straight = (groups[s] for s in sorted(groups) if not any(n.id in pairs for n in groups[s]))
    made = (_block(graph, group, segment_of, residual, left, p) for group in straight)
    return [block for block in made if block.residuals]


def _source_nodes(graph: Graph, nodes: list[Node]) -> set[int]:
    """Nodes whose results hang only on arguments and constants, by operations that cost next to nothing."""
    found: set[int] = set()
    own = {n.id for n in nodes}
    for node in nodes:
        producers = [graph.values[x].producer for x in node.inputs if isinstance(x, int)]
        if node.prim in SOURCES and all(p is None or (p.id in found and p.id in own) for p in producers):
            found.add(node.id)
    return found


def _segments(graph: Graph, core: list[Node], residual: set[int], pairs: set[int]) -> dict[int, int]:
    """Core node id → number of its segment; a scan pair is a segment of its own."""
    values = graph.values
    index = {n.id: k for k, n in enumerate(core)}
    spans, weights, saved = [], [], [0.0] * len(core)
    for k, node in enumerate(core):
        for out in node.outputs:
            value = values[out]
            last = max((index[u.id] for u in value.users if u.id in index), default=k)
            weight = value.nbytes
            if last > k:
                spans.append((k, last))
                weights.append(weight)
            if out in residual:
                saved[k] += weight
    words: dict = {}
    tokens = [words.setdefault(_word(values, n), len(words)) for n in core]
    heavy = [float(n.prim not in SOURCES | _LIGHT) for n in core]
    stretch = Stretch.of(tokens, spans, weights, (saved, heavy))
    walls = [k for k, n in enumerate(core) if n.id in pairs]
    bounds = sorted({0, len(core), *walls, *(k + 1 for k in walls)})
    cuts = set(bounds)
    for lo, hi in pairwise(bounds):
        if lo not in walls:
            cuts |= set(cut(stretch, lo, hi))
    starts = sorted(cuts - {len(core)})
    segment_of: dict[int, int] = {}
    number = -1
    for k, n in enumerate(core):
        if number + 1 < len(starts) and starts[number + 1] == k:
            number += 1
        segment_of[n.id] = number
    return segment_of


def _word(values: dict[int, Value], node: Node) -> tuple:
    return (node.prim, *((values[o].shape, str(values[o].dtype)) for o in node.outputs))


def _sink(values: dict[int, Value], nodes: list[Node], sources: set[int], segment_of: dict[int, int]) -> None:
    """Give each source node to the one segment that uses it; shared ones stay where they stand in the program."""
    here = []
    current = 0
    for node in nodes:
        current = segment_of.get(node.id, current)
        here.append(current)
    for node, place in zip(reversed(nodes), reversed(here), strict=True):
        if node.id in sources:
            used_in = {segment_of[u.id] for out in node.outputs for u in values[out].users if u.id in segment_of}
            segment_of[node.id] = used_in.pop() if len(used_in) == 1 else min({place, *used_in})


def _block(graph: Graph, nodes: list[Node], segment_of: dict[int, int], residual: set[int], left: set, p: int) -> Block:
    values = graph.values
    made = [out for n in nodes for out in n.outputs]
    own = {n.id for n in nodes}
    inputs = {x for n in nodes for x in n.inputs if isinstance(x, int)} - set(made)
    outputs = [v for v in made if v in left or any(u.id in segment_of and u.id not in own for u in values[v].users)]
    residuals = tuple(v for v in made if v in residual and v not in set(outputs))
    return Block(_name(nodes), tuple(nodes), tuple(sorted(inputs)), residuals, tuple(outputs), 1, None, graph, p)


def _name(nodes: Sequence[Node]) -> str:
    """The longest scope that all nodes with a scope share, else the function that most of them come from."""
    paths = [n.scope.split("/") for n in nodes if n.scope]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    functions = Counter(n.source.rpartition("(")[2].rstrip(")").rpartition(".")[2] for n in nodes)
    names = [f for f, _ in functions.most_common() if f.isidentifier()]
    return "/".join(shared) or (names[0] if names else "block")


# ------------------------------------------------------------------------------------------------------------ scan pairs


def _pair(graph: Graph, forward: Node, phase: dict[int, int]) -> Block | None:
    """The block of a forward scan and the later scan that eats most of its stacked results, if there is one."""
    if phase[forward.id] % 2 or not forward.trips:
        return None
    values = graph.values
    stacked = forward.outputs[forward.num_carry :]
    eaten: dict[int, float] = {}
    scans: dict[int, Node] = {}
    for y in stacked:
        for user in {u.id: u for u in values[y].users}.values():
            if _is_backward_of(forward, user, phase):
                eaten[user.id] = eaten.get(user.id, 0.0) + values[y].nbytes
                scans[user.id] = user
    if not eaten:
        return None
    backward = scans[min(eaten, key=lambda n: (-eaten[n], n))]
    (body,) = forward.bodies
    elsewhere = {*graph.outputs, *backward.inputs[: backward.num_consts + backward.num_carry]}
    free = {y for y in stacked if y not in elsewhere and all(u is backward for u in values[y].users)}
    inner = list(zip(body.outputs[forward.num_carry :], stacked, strict=True))
    fixed = {v for v, y in inner if y not in free}
    own = {out for n in body.nodes for out in n.outputs}
    residuals = tuple(dict.fromkeys(v for v, _ in inner if isinstance(v, int) and v in own and v not in fixed))
    outputs = tuple(dict.fromkeys(v for v, _ in inner if isinstance(v, int) and v not in residuals))
    inputs = (*body.inputs, *body.consts)
    name = _name(body.nodes)
    return Block(name, tuple(body.nodes), inputs, residuals, outputs, forward.trips, (forward, backward), graph, phase[forward.id])


def _is_backward_of(forward: Node, user: Node, phase: dict[int, int]) -> bool:
    """Whether ``user`` is a scan of the backward pass, trip for trip with ``forward``."""
    return user.prim == "scan" and user.backward and phase.get(user.id, 0) > phase[forward.id] and user.trips == forward.trips
