"""Broadcasts go into the loops that read them: Graph → Graph.

A mask that all layers share is broadcast to the shape of the logits in each layer, where a compiler fuses it for nothing. Differentiating a
scan takes what does not depend on the layer out of the loop, the broadcast with it: an array as large as the logits' mask is written, lies
there through both loops, and is read in each trip. XLA:TPU fuses it again, XLA:GPU and XLA:CPU do not.
"""

from __future__ import annotations

from dataclasses import replace

from jaxauto.core import Graph, Node
from jaxauto.graph import walk
from jaxauto.rewrite.program import Program, Rewritten, read_as, renamed


def sink(rewritten: Rewritten) -> Rewritten:
    """The same program, with what a scan reads whole in every trip broadcast inside it."""
    found = {node.outputs[0] for node in walk(rewritten.graph) if _enlarges(node, rewritten.graph)}
    if not any(found.intersection(node.inputs[: node.num_consts]) for node in walk(rewritten.graph) if node.prim == "scan"):
        return rewritten
    program = Program.after(rewritten)
    _into_loops(program, program.top)
    return program.rewritten(rewritten.host)


def _enlarges(node: Node, graph: Graph) -> bool:
    """Whether a node makes a large array of a small one."""
    if node.prim != "broadcast_in_dim":
        return False
    (source, *_), (result,) = node.inputs, node.outputs
    return not isinstance(source, int) or graph.values[source].nbytes < graph.values[result].nbytes


def _into_loops(program: Program, graph: Graph) -> None:
    """From the outermost loop inwards."""
    broadcasts = {node.outputs[0]: node for node in graph.nodes if _enlarges(node, graph)}
    sunk: set[int] = set()
    for node in graph.nodes:
        if node.prim == "scan":
            for number in broadcasts.keys() & node.inputs[: node.num_consts]:
                _into(program, node, broadcasts[number])
                sunk.add(number)
        for body in node.bodies:
            _into_loops(program, body)
    left = sunk.difference(graph.outputs, *(node.inputs for node in graph.nodes))
    graph.nodes = [node for node in graph.nodes if left.isdisjoint(node.outputs)]


def _into(program: Program, scan: Node, broadcast: Node) -> None:
    """Let the trips of ``scan`` make what ``broadcast`` makes."""
    (body,), (source, *_), (result,) = scan.bodies, broadcast.inputs, broadcast.outputs
    read = [source] if isinstance(source, int) else []
    operands = [program.fresh(x) for x in read]
    inner = program.fresh(result)
    copy = replace(broadcast, id=program.new_id(), inputs=tuple(operands or [source]), outputs=(inner,))
    kept = [k for k, x in enumerate(scan.inputs) if k >= scan.num_consts or x != result]
    names = {number: inner for k, number in enumerate(body.inputs) if k not in kept}
    for node in body.nodes:
        read_as(node, names)
    body.outputs = renamed(body.outputs, names)
    body.nodes.insert(0, copy)
    scan.num_consts += len(read) - (len(scan.inputs) - len(kept))
    scan.inputs = (*read, *(scan.inputs[k] for k in kept))
    body.inputs = (*operands, *(body.inputs[k] for k in kept if k < len(body.inputs)))
