"""What the tables of ``model.py`` ask of the groups, before a mesh is."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxauto.core import Graph, Kind, Value
from jaxauto.cost.compute import batch_factors
from jaxauto.cost.halo import halos
from jaxauto.cost.layout import Major
from jaxauto.cost.liveness import Buffers
from jaxauto.cost.windowed import is_view
from jaxauto.graph import HOST, given, multiplicity, walk
from jaxauto.groups import WHOLE, Edge, Groups, Operand, Operation
from jaxauto.rewrite.away import fetched
from jaxauto.rewrite.narrow import multiplies_rounded
from jaxauto.rewrite.program import Rewritten
from jaxauto.solve.remat import Variant


def narrowing(groups: Groups) -> frozenset[int]:
    """Nodes that convert to a narrower type."""
    values, converts = groups.graph.values, (n for n in walk(groups.graph) if n.prim == "convert_element_type")
    return frozenset(n.id for n in converts if isinstance(n.inputs[0], int) and _narrower(values, n.outputs[0], n.inputs[0]))


def cut_along(groups: Groups, e: Edge) -> tuple[int, ...]:
    """Dimensions of an edge's source along which its result is one of several pieces of its array; none: it is no such piece."""
    before, after = groups.graph.values[e.value].shape, groups.graph.values[e.result]
    node = after.producer
    if e.result == e.value or node is None or node.id != e.node or len(node.outputs) == 1 or len(before) != len(after.shape):
        return ()
    cut = tuple(a for (a, _), n, m in zip(e.dims, before, after.shape, strict=True) if n != m)
    return cut if WHOLE not in cut else ()


def read_rounded(groups: Groups, platform: str) -> tuple[frozenset[int], frozenset[int]]:
    """Nodes that read float32 rounded to bfloat16, and groups that none but they read (``Groups.share_operands``); none but on TPU.

    What collectives bring them is rounded before: XLA's bfloat16-propagation, which runs after the partitioner, narrows what nobody
    else reads.
    """
    if platform != "tpu":
        return frozenset(), frozenset()
    reads = [(op.node, o) for op in groups.operations for o in op.operands]
    nodes = frozenset(node.id for node in {op.node.id: op.node for op in groups.operations}.values() if multiplies_rounded(node))
    others = {o.group for node, o in reads if node.id not in nodes}
    return nodes, frozenset(o.group for _, o in reads if o.group != groups.place[o.value][0]) - others


def with_borders(variant: Variant) -> dict[int, tuple[Operation, Operand]]:
    """Operations that find the borders of what they read, and the operation that they were exchanged for, if that reads its operand so too.

    A convolution and its weight gradient exchange the same (``scripts/bench_borders.py``), unless the array is made again between.
    XLA:TPU sees it; XLA:GPU and XLA:CPU send them twice.
    """
    seen: dict[tuple, tuple[Operation, Operand]] = {}
    found: dict[int, tuple[Operation, Operand]] = {}
    for op, node in sorted(variant.operations, key=lambda pair: variant.buffers.position.get(pair[1].id, -1)):
        if not (sent := list(halos(op))):
            continue
        _, o, _ = sent[0]  # all are of one operand
        borders = frozenset(([f for _, f in o.dims].index(op.factors[k][0]), width) for k, _, width in sent)
        key = node.inputs[op.node.inputs.index(o.value)], borders
        if key in seen:
            found[op.node.id] = seen[key]
        seen.setdefault(key, (op, o))
    return found


def major_dims(groups: Groups) -> Major:
    """What is never minor, of the arrays' own groups and of those that they are resharded to."""
    spatial: set[tuple[int, int]] = set()
    batches: dict[tuple[int, tuple[int, ...]], frozenset[int]] = {}
    for op in groups.operations:
        arrays = (*op.operands, *op.results)
        shared = batch_factors(op)
        for o in arrays:
            group, dims = groups.place[o.value]
            for key in ((group, dims), (o.group, tuple(dim for dim, _ in o.dims))) if shared else ():
                batches.setdefault(key, frozenset(k for k, (_, factor) in enumerate(o.dims) if factor in shared))
            for own, (dim, factor) in zip(dims, o.dims, strict=True) if op.rule.kind is Kind.CONV else ():
                spatial |= {(group, own), (o.group, dim)} if factor.startswith("s") else set()
    return Major(frozenset((group, dim) for group, dim in spatial if dim != WHOLE), batches)


def host_traffic(variant: Variant, groups: Groups) -> dict[str, np.ndarray]:
    """Bytes that go to host memory and come back in a step, whole arrays, ``[buffers]``, by the resource that they are charged to.

    Residuals are counted at the buffer (of no size) that goes, state at the one that comes.
    """
    moved = {"prefetch": np.zeros(len(variant.buffers.ids)), "blocking": np.zeros(len(variant.buffers.ids))}
    if not variant.offloaded:
        return moved
    entered = given(groups.graph)
    place = {number: k for k, number in enumerate(variant.buffers.ids.tolist())}
    for resource, number in crossings(variant.rewritten.graph):
        value = groups.graph.values[int(variant.origin[place[number]])]
        times = groups.times[value.producer.id] if value.producer else entered.get(value.id, 1)
        moved[resource][place[number]] = 2.0 * value.nbytes * times
    return moved


def crossings(graph: Graph) -> Iterator[tuple[str, int]]:
    """(resource, value) of each array that crosses the host's link in a step, there and back.

    Updates wait for what is fetched: XLA:GPU makes a block's gradients together, and then fetches for one after the other.
    """
    returned = {x for x in graph.outputs if isinstance(x, int)}
    for node in walk(graph):
        if node.params.get("space") == HOST and returned.isdisjoint(node.outputs):
            yield "prefetch", node.outputs[0]
    for leaf in fetched(graph):
        yield from (("blocking", copy.outputs[0]) for copy in leaf.copies)


def buffer_runs(variant: Variant, groups: Groups) -> np.ndarray:
    """How often a step makes each buffer, or a loop hands it on: a stack over the trips of a loop is made once for all of them."""
    runs = np.ones(len(variant.buffers.ids))
    values, times, entered = variant.rewritten.graph.values, multiplicity(variant.rewritten.graph), given(variant.rewritten.graph)
    for k, (number, origin) in enumerate(zip(variant.buffers.ids.tolist(), variant.origin.tolist(), strict=True)):
        node = groups.graph.values[origin].producer
        if (maker := values[number].producer) is not None:
            runs[k] = times[maker.id]
        elif node is not None:
            runs[k] = groups.times[node.id]
        else:
            runs[k] = entered.get(number, 1)
    return runs


def viewed(groups: Groups, rewritten: Rewritten, number: Any, held: Container[int] = ()) -> Any:
    """What a value of the rewritten program is a view of, through views: the first that is ``held``, made by something else, or has come
    through a barrier; or a literal."""
    while number not in held and (source := source_of(groups, rewritten, number)) is not None:
        number = source
    return number


def source_of(groups: Groups, rewritten: Rewritten, number: Any) -> Any:
    """What a value is a view of; None: of nothing, or only called otherwise since a barrier."""
    node = rewritten.graph.values[number].producer if isinstance(number, int) else None
    if node is None or node.prim == "optimization_barrier":
        return None
    return node.inputs[0] if is_view(groups, rewritten.origin.get(number, number)) else None


def take_places(numbers: Iterable[int], graph: Graph, buffers: Buffers, *, apart: Container[str] = ()) -> dict[int, list[int]]:
    """Values without a buffer for which, once written, something as large makes place: it is read for them alone from there on.

    ``apart``: primitives whose result does not lie where what they read did.
    """
    values, position = graph.values, buffers.position
    held = {*buffers.ids.tolist(), *buffers.stored, *graph.outputs}

    def sources(number: int) -> Iterator[int]:
        seen, todo = {number}, [number]
        while todo:
            node = values[todo.pop()].producer
            for x in {x for x in node.inputs if isinstance(x, int)} - seen if node is not None and node.prim not in apart else ():
                seen.add(x)
                if x not in held:
                    todo.append(x)
                elif values[x].producer is not None and values[x].nbytes >= values[number].nbytes:
                    yield x

    def is_read_for_others(source: int, number: int, from_on: int) -> bool:
        reached, ahead = {number, source}, [source]
        while ahead:
            for node in values[ahead.pop()].users:
                if held.issuperset(node.outputs) and position.get(node.id, from_on) > from_on:
                    return True
                passed_on = {*node.outputs} - held - reached
                reached |= passed_on
                ahead += passed_on
        return False

    made = {n: values[n].producer for n in numbers if n in values}
    at = {n: position[node.id] for n, node in made.items() if node is not None and node.id in position}
    found = {n: [x for x in sources(n) if not is_read_for_others(x, n, here)] for n, here in at.items()}
    return {n: places for n, places in found.items() if places}


def _narrower(values: Mapping[int, Value], result: int, operand: int) -> bool:
    return values[result].nbytes < values[operand].nbytes
