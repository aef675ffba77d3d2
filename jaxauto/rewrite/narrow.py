"""float32 operands of matrix products, as XLA:TPU has them: in bfloat16 where the precision asked for is the default.

The matrix unit multiplies bfloat16. The compiler converts what it is given, in the fusion that makes it if only products read it, and moves
conversions into and out of loops: the slices of weights are converted before the loop, whole, and a stack that the backward pass reads so
is written in half the bytes (seen in the schedules of models with float32 activations: scripts/bench_wide.py). The cost model sees loops
so; what is applied is left as it is. What is written narrow outside of loops: ``only_multiplied``; what collectives bring narrow:
``solve/facts.py``, ``read_rounded``.
"""

from __future__ import annotations

from collections import defaultdict

import jax
import jax.numpy as jnp

from jaxauto.core import Graph, Node, Value
from jaxauto.graph import ConvertEqn, walk
from jaxauto.rewrite.program import Program, Rewritten, read_as

_PRODUCTS = ("dot_general", "conv_general_dilated")
_WIDE, _NARROW = jnp.dtype("float32"), jnp.dtype("bfloat16")


def only_multiplied(graph: Graph) -> frozenset[int]:
    """Values in float32, of all graphs, that products in the default precision read and nothing else but sums, which are made in the fusion
    that writes them (a bias's gradient). What goes through a barrier is multiplied behind it."""
    nodes = list(walk(graph))
    read = {x for node in nodes if multiplies_rounded(node) for x in node.inputs if isinstance(x, int) and graph.values[x].dtype == _WIDE}
    if not read:
        return frozenset()
    bodies = [graph, *(body for node in nodes for body in node.bodies)]
    others = {x for node in nodes if not multiplies_rounded(node) and not _passes(node) and node.prim != "reduce_sum" for x in node.inputs}
    others.update(*(body.outputs for body in bodies))
    for node in reversed([node for node in nodes if _passes(node)]):
        for x, passed in zip(node.inputs, node.outputs, strict=True):
            (read if passed in read and passed not in others else others).add(x)
    return frozenset(x for x in read - others if isinstance(x, int))


def _passes(node: Node) -> bool:
    """Whether what is read comes out as it is, as narrow as its readers have it."""
    return node.prim == "optimization_barrier"


def narrow(rewritten: Rewritten) -> Rewritten:
    """The same program with a conversion of what scans give their bodies to multiply in the default precision."""
    nodes = list(walk(rewritten.graph))
    if not any(node.prim == "scan" for node in nodes) or not any(multiplies_rounded(node) for node in nodes):
        return rewritten
    program = Program.after(rewritten)
    bodies = [body for node in walk(program.top) if node.prim == "scan" for body in node.bodies]
    for body in bodies:
        _convert(program, body)
    for graph in (program.top, *bodies):
        _stacks(program, graph)
    return program.rewritten(rewritten.host)


def multiplies_rounded(node: Node) -> bool:
    """Whether a node multiplies float32 in the default precision: XLA:TPU rounds what it reads to bfloat16."""
    if node.prim not in _PRODUCTS or all(v.aval.dtype != _WIDE for v in node.eqn.invars[:2]):
        return False
    asked = node.params.get("precision")
    return all(p in (None, jax.lax.Precision.DEFAULT) for p in (asked if isinstance(asked, tuple) else (asked,)))


def _narrower(program: Program, number: int) -> int:
    """A new value like ``number``, in bfloat16."""
    narrowed = program.fresh(number)
    program.values[narrowed] = Value(narrowed, program.values[number].aval.update(dtype=_NARROW))
    return narrowed


def _convert(program: Program, graph: Graph) -> None:
    """Products read conversions of the body's inputs that nothing else reads, made right before the first of them."""
    known: dict[int, int] = {}
    nodes: list[Node] = []
    others = {x for node in graph.nodes if not multiplies_rounded(node) for x in node.inputs}.union(graph.outputs)
    given = {x for x in graph.inputs if program.values[x].dtype == _WIDE} - others
    for node in graph.nodes:
        for x in node.inputs if multiplies_rounded(node) else ():
            if x in given and x not in known:
                known[x] = _narrower(program, x)
                eqn = ConvertEqn(node.eqn, program.values[x].aval, program.values[known[x]].aval)
                nodes.append(
                    Node(program.new_id(), eqn, "convert_element_type", (x,), (known[x],), node.scope, node.source, backward=node.backward)
                )
        if multiplies_rounded(node):
            read_as(node, known)
        nodes.append(node)
    graph.nodes = nodes


# ------------------------------------------------------------------------------------------------------------------ stacks


def _stacks(program: Program, graph: Graph) -> None:
    """What a scan stacks and other scans only narrow, slice by slice, is stacked narrow."""
    users: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for x in node.inputs:
            if isinstance(x, int):
                users[x].append(node)
    for scan in [node for node in graph.nodes if node.prim == "scan"]:
        for place, stack in enumerate(scan.outputs[scan.num_carry :], scan.num_carry):
            if program.values[stack].dtype != _WIDE or stack in graph.outputs or not users[stack]:
                continue
            slices = [_slices(reader, stack) for reader in users[stack]]
            if all(slices):
                _stack_narrow(program, scan, place, [s for found in slices for s in found])


def _slices(reader: Node, stack: int) -> list[tuple[Node, int, Node]]:
    """(the scan, place of its operand, the conversion that alone reads its slice) of every use of ``stack``; none if there are others."""
    found: list[tuple[Node, int, Node]] = []
    if reader.prim != "scan":
        return found
    (body,) = reader.bodies
    for place, x in enumerate(reader.inputs):
        if x != stack:
            continue
        if place >= len(body.inputs):
            return []  # written over
        inner = body.inputs[place]
        readers = [node for node in body.nodes if inner in node.inputs]
        if place < reader.num_consts + reader.num_carry or inner in body.outputs or [n.prim for n in readers] != ["convert_element_type"]:
            return []
        if readers[0].params["new_dtype"] != _NARROW:
            return []
        found.append((reader, place, readers[0]))
    return found


def _stack_narrow(program: Program, scan: Node, place: int, slices: list[tuple[Node, int, Node]]) -> None:
    """Let ``scan`` stack the result at ``place`` narrow, and its readers read that."""
    (body,) = scan.bodies
    wide = body.outputs[place]
    if not isinstance(wide, int):
        return
    narrow_, stack = _narrower(program, wide), _narrower(program, scan.outputs[place])
    eqn = ConvertEqn(body.nodes[-1].eqn, program.values[wide].aval, program.values[narrow_].aval)
    near = body.nodes[-1]
    body.nodes.append(Node(program.new_id(), eqn, "convert_element_type", (wide,), (narrow_,), near.scope, near.source))
    body.outputs = (*body.outputs[:place], narrow_, *body.outputs[place + 1 :])
    scan.outputs = (*scan.outputs[:place], stack, *scan.outputs[place + 1 :])
    for reader, at, conversion in slices:
        (inner,) = reader.bodies
        reader.inputs = (*reader.inputs[:at], stack, *reader.inputs[at + 1 :])
        inner.inputs = (*inner.inputs[:at], conversion.outputs[0], *inner.inputs[at + 1 :])
        inner.nodes.remove(conversion)
