"""Narrowed weights of a loop, as XLA:TPU has them: converted before the loop, whole, once for all loops that read them.

A scan over layers with float32 parameters and bfloat16 compute narrows one layer's slice in each trip. The TPU compiler moves that out: the
whole stack is narrowed first and lies beside the parameters until the last loop has read it (seen in the schedule of every scanned model).
The cost model sees programs so; what is applied is left as it is.
"""

from __future__ import annotations

from jaxauto.core import Graph, Literal, Node
from jaxauto.graph import walk
from jaxauto.rewrite.program import Program, Rewritten, read_as, renamed


def hoist(rewritten: Rewritten) -> Rewritten:
    """The same program with every narrowing of a slice or constant of a scan before it."""
    if not any(node.prim == "scan" for node in walk(rewritten.graph)):
        return rewritten
    program = Program.after(rewritten)
    found = [_from_loops(program, graph) for graph in _inner_first(program.top)]
    if not any(found):
        return rewritten
    return program.rewritten(rewritten.host)


def _inner_first(graph: Graph) -> list[Graph]:
    return [*(inner for node in graph.nodes for body in node.bodies for inner in _inner_first(body)), graph]


def _from_loops(program: Program, graph: Graph) -> bool:
    """Whether something came out of the scans of one graph into it."""
    nodes: list[Node] = []
    narrowed: dict[tuple[int, str], int] = {}
    for node in graph.nodes:
        for convert in _conversions(program, node) if node.prim == "scan" else ():
            nodes += _moved(program, node, convert, narrowed)
        nodes.append(node)
    graph.nodes = nodes
    return bool(narrowed)


def _conversions(program: Program, scan: Node) -> list[Node]:
    """The nodes of a scan's body that narrow a constant or a slice of it."""
    (body,) = scan.bodies
    carries = range(scan.num_consts, scan.num_consts + scan.num_carry)
    given = {inner for k, inner in enumerate(body.inputs) if k not in carries and isinstance(scan.inputs[k], int)}
    size = lambda n: program.values[n].nbytes  # noqa: E731
    return [
        node
        for node in body.nodes
        if node.prim == "convert_element_type" and node.inputs[0] in given and size(node.outputs[0]) < size(node.inputs[0])
    ]


def _moved(program: Program, scan: Node, convert: Node, narrowed: dict[tuple[int, str], int]) -> list[Node]:
    """Take ``convert`` out of the scan; the node that narrows the whole operand, unless another scan's does."""
    (body,) = scan.bodies
    place = body.inputs.index(convert.inputs[0])  # now: a constant that came out before has moved the others on
    outer, (result,) = scan.inputs[place], convert.outputs
    assert isinstance(outer, int)
    is_slice = place >= scan.num_consts + scan.num_carry
    key = outer, str(program.values[result].dtype)
    made = []
    if key not in narrowed:
        narrowed[key] = stack = program.fresh(result, stacked=program.values[outer].shape[0] if is_slice else None)
        _place_as(program, stack, convert.inputs[0], is_slice=is_slice)
        eqn, scope, source = convert.eqn, convert.scope, convert.source
        made.append(Node(program.new_id(), eqn, convert.prim, (outer,), (narrowed[key],), scope, source))
    inner = program.fresh(result)
    body.nodes.remove(convert)
    names = {result: inner}
    for node in body.nodes:
        read_as(node, names)
    body.outputs = renamed(body.outputs, names)
    at = len(body.inputs) if is_slice else 0
    scan.inputs = (*scan.inputs[:at], narrowed[key], *scan.inputs[at:])
    body.inputs = (*body.inputs[:at], inner, *body.inputs[at:])
    scan.num_consts += not is_slice
    _drop_unread(scan, body, convert.inputs[0])
    return made


def _place_as(program: Program, narrowed: int, given: int | Literal, *, is_slice: bool) -> None:
    """What is narrowed before a loop is sharded as what it is narrowed from; each trip brings its slice to where that is read.

    ``given``: what the loop's body had of it, wide. A slice of a slice is sharded as it is read: there is no value as written that it is.
    """
    if not isinstance(given, int) or (is_slice and given in program.stacked):
        return
    program.origin[narrowed] = program.origin.get(given, given)
    (program.stacked.add if is_slice or given in program.stacked else program.stacked.discard)(narrowed)


def _drop_unread(scan: Node, body: Graph, inner: int | Literal) -> None:
    """What no trip reads any more is not an operand (XLA removes such too, WhileLoopSimplifier): as it was, wide, it may die before."""
    if inner in body.outputs or any(inner in node.inputs for node in body.nodes):
        return
    place = body.inputs.index(inner)
    scan.inputs = scan.inputs[:place] + scan.inputs[place + 1 :]
    body.inputs = body.inputs[:place] + body.inputs[place + 1 :]
    scan.num_consts -= place < scan.num_consts
