"""Recomputation inside recomputation: values between blocks that are made again too, so that less lies between the passes.

A block is recomputed from what enters it. Where that was made by the block before, it need not be kept either: one *rerun* makes it again,
from what is kept, before the first block that reads it goes backward, and the block is then recomputed from it. So a stretch of blocks
costs its ends between the passes, its insides while it goes backward, and one more forward pass. And so on: what the rerun of a stretch
passes through need not be kept by it either (Rotor: Beaumont et al., Inria RR-9302). The *depth* of a value says how often it is made
again: a rerun of depth d makes the values of depth d, through deeper ones, from those of less depth; 0 is kept between the passes.
A scan is run again as it stands for the stacks that only its backward scan reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from jaxauto.blocks import Block, runs_once
from jaxauto.core import Graph, Node
from jaxauto.graph import walk

Remade = frozenset[tuple[int, int]]  # (value, depth ≥ 1)


@dataclass(frozen=True, eq=False)
class Rerun:
    """What is run again together.

    Attributes:
      graph: the graph (or body) that holds it. phase: of its nodes.
      nodes: in program order; of a scan, all that only the backward pass reads of it is made again.
      reads: values that it starts from. made: those it is for.
    """

    graph: Graph
    phase: int
    nodes: tuple[Node, ...]
    reads: tuple[int, ...]
    made: frozenset[int]


def find_reruns(blocks: Iterable[Block], kept: Mapping[int, Collection[int]], remade: Collection[tuple[int, int]]) -> list[Rerun]:
    """The reruns that make ``remade``, the deepest first; values of one depth that hang on each other, or on the same nodes, come of one.

    Args:
      blocks: of ``find_blocks``.
      kept: index of a block → what it keeps; those that are not there are as written.
      remade: outputs of straight blocks, or of scans with a backward scan any stack; each with its depth.
    """
    if not remade:
        return []
    blocks = list(blocks)
    inner = inside(blocks, kept)
    found: list[Rerun] = []
    for depth in sorted({d for _, d in remade}, reverse=True):
        gone = inner | {v for v, d in remade if d >= depth}
        found += _of_one_depth(blocks, gone, {v for v, d in remade if d == depth})
    return found


def _of_one_depth(blocks: list[Block], gone: set[int], wanted: set[int]) -> list[Rerun]:
    found: list[Rerun] = []
    for graph, phase, value in reversed(_places(blocks, wanted)):
        nodes, reads = behind(graph, value, gone)
        part = Rerun(graph, phase, tuple(nodes), tuple(reads), frozenset({value}))
        ids = {n.id for n in nodes}
        shared = [r for r in found if ids & {n.id for n in r.nodes}]
        found = [r for r in found if r not in shared] + [_joined(part, shared)]
    return found


def inside(blocks: Iterable[Block], kept: Mapping[int, Collection[int]]) -> set[int]:
    """Values made in straight blocks that are not there after the forward pass."""
    gone: set[int] = set()
    for number, block in enumerate(blocks):
        if not block.scan:
            held = {*kept.get(number, block.residuals), *block.outputs}
            gone |= {*block.made} - held
    return gone


def behind(graph: Graph, value: int, gone: Collection[int]) -> tuple[list[Node], list[int]]:
    """The nodes that make ``value`` from what is not ``gone``, in program order, and what they read."""
    nodes: dict[int, Node] = {}
    reads: set[int] = set()
    stack, seen = [value], {value}
    while stack:
        number = stack.pop()
        node = graph.values[number].producer
        if node is None or number not in gone or runs_once(node, graph):
            reads.add(number)
            continue
        nodes[node.id] = node
        fresh = {x for x in node.inputs if isinstance(x, int)} - seen
        seen |= fresh
        stack += fresh
    return [nodes[n] for n in sorted(nodes)], sorted(reads)


def everything_in(rerun: Rerun) -> list[Node]:
    """Its nodes, and those of their bodies."""
    return [inner for node in rerun.nodes for inner in with_bodies(node)]


def with_bodies(node: Node) -> list[Node]:
    """A node and those of its bodies."""
    return [node, *(n for body in node.bodies for n in walk(body))]


def _places(blocks: list[Block], wanted: set[int]) -> list[tuple[Graph, int, int]]:
    """(graph, phase, value) of what is to be made again, in program order."""
    found = []
    for block in blocks:
        nodes = block.forward if block.scan is None else block.scan[:1]
        found += [(node.id, block.graph, block.phase, out) for node in nodes for out in node.outputs if out in wanted]
    return [place[1:] for place in sorted(found, key=lambda p: (p[0], p[3]))]


def _joined(part: Rerun, others: list[Rerun]) -> Rerun:
    every = [part, *others]
    nodes = {n.id: n for r in every for n in r.nodes}
    made = {out for n in nodes.values() for out in n.outputs}
    reads = tuple(sorted({x for r in every for x in r.reads} - made))
    return Rerun(part.graph, part.phase, tuple(nodes[n] for n in sorted(nodes)), reads, frozenset().union(*(r.made for r in every)))
