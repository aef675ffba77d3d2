"""Send residuals to the host's memory and fetch them for the backward pass: Graph → Graph, after ``recompute``. State too: ``away.py``.

A residual of a straight program goes out where it is made and comes back at its first use in the backward pass, through a barrier with a
cotangent: else a compiler may fetch it at once. In a pair of scans the forward body sends what it stacks, the stack lies in host memory,
and the backward body fetches its slice. This is what ``jax.checkpoint_policies.offload_dot_with_no_batch_dims`` does to a block.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from jaxauto.blocks import phases
from jaxauto.core import Graph, Node
from jaxauto.graph import DEVICE, HOST
from jaxauto.rewrite.away import away, transfer
from jaxauto.rewrite.program import Program, Rewritten, cotangent_at, read_as, readers_of, renamed, ripeness


def offload(rewritten: Rewritten, chosen: Set[int]) -> Rewritten:
    """The same program with the values ``chosen`` (ids as written) in host memory between the passes.

    Of a scan's body: what it stacks for the backward pass, its own values or its carries. What nothing reads later stays as it is.
    Arguments and results of the program, state, are in host memory before and after it.
    """
    if not chosen:
        return rewritten
    program = Program.after(rewritten)
    host: set[int] = set()
    for original in _all_graphs(rewritten.graph):
        graph = program.graphs[id(original)]
        host |= _stacks(program, graph, chosen)
        host |= _straight(program, graph, chosen, phases(original))
    host |= away(program, chosen)
    return program.rewritten(host)


def _all_graphs(graph: Graph) -> list[Graph]:
    return [graph, *(inner for node in graph.nodes for body in node.bodies for inner in _all_graphs(body))]


# ---------------------------------------------------------------------------------------------------------------- loops


def _stacks(program: Program, graph: Graph, chosen: Set[int]) -> set[int]:
    """Stacked results of the scans of one graph, where all that reads them is scans, trip by trip."""
    host: set[int] = set()
    scans = [node for node in graph.nodes if node.prim == "scan"]
    for forward in scans:
        (body,) = forward.bodies
        carry = forward.num_carry
        for place, stack in enumerate(forward.outputs[carry:], carry):
            inner = body.outputs[place]
            if not isinstance(inner, int) or inner not in chosen or stack in graph.outputs:
                continue
            eaters = [node for node in graph.nodes if stack in node.inputs]
            if not eaters or any(not _eats(node, stack) for node in eaters):
                continue
            node, copy = transfer(program, inner, body.nodes[-1], HOST)
            body.nodes.append(node)
            body.outputs = (*body.outputs[:place], copy, *body.outputs[place + 1 :])
            host |= {copy, stack}
            for eater in eaters:
                host |= _fetch_slices(program, eater, stack)
    return host


def _eats(node: Node, stack: int) -> bool:
    return node.prim == "scan" and stack not in node.inputs[: node.num_consts + node.num_carry]


def _fetch_slices(program: Program, scan: Node, stack: int) -> set[int]:
    (body,) = scan.bodies
    slices = {inner for outer, inner in zip(scan.inputs, body.inputs, strict=True) if outer == stack}
    for inner in slices:
        node, copy = transfer(program, inner, body.nodes[0], DEVICE, backward=True)
        for reader in body.nodes:
            read_as(reader, {inner: copy})
        body.outputs = renamed(body.outputs, {inner: copy})
        body.nodes.insert(0, node)
    return slices


# ----------------------------------------------------------------------------------------------------- straight programs


def _straight(program: Program, graph: Graph, chosen: Set[int], phase: dict[int, int]) -> set[int]:
    """Values of one graph that its own backward pass reads."""
    readers = readers_of(graph)
    position = {node.id: k for k, node in enumerate(graph.nodes)}
    phase = {**{node.id: 0 for node in graph.nodes}, **phase}  # what _stacks has added is of the forward pass
    ripe = ripeness(graph, phase)
    made = {out: node for node in graph.nodes for out in node.outputs if out in chosen and not node.bodies}
    after: dict[int, list[Node]] = {}  # position → nodes to put behind it
    before: dict[int, list[Node]] = {}
    names: dict[int, tuple[int, int]] = {}  # value → (its copy, position from which it is read)
    host: set[int] = set()
    for value, node in made.items():
        later = [k for k in readers.get(value, ()) if phase[graph.nodes[k].id] > phase[node.id] and graph.nodes[k].backward]
        if not later or value in graph.outputs:
            continue
        first, near = min(later), graph.nodes[min(later)]
        out, sent = transfer(program, value, node, HOST)
        tie = cotangent_at(program, graph, first, phase, readers, position, ripe)
        barrier, passed = program.barrier([sent, *([] if tie is None else [tie])], near)
        back, copy = transfer(program, passed[sent], near, DEVICE, backward=True)
        after.setdefault(position[node.id], []).append(out)
        before.setdefault(first, []).extend([barrier, back])
        names[value] = (copy, first)
        if tie is not None and tie not in names:
            names[tie] = (passed[tie], first)
        host |= {sent, passed[sent]}
    nodes: list[Node] = []
    for k, node in enumerate(graph.nodes):
        for extra in before.get(k, ()):
            known = {x: names[x][0] for x in extra.inputs if isinstance(x, int) and names.get(x, (0, k))[1] < k}
            nodes += [replace(extra, inputs=renamed(extra.inputs, known))]
        if node.backward:
            read_as(node, {x: names[x][0] for x in node.inputs if isinstance(x, int) and names.get(x, (0, k + 1))[1] <= k})
        nodes += [node, *after.get(k, ())]
    graph.nodes = nodes
    return host
