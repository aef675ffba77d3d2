"""jaxpr → Graph: calls inlined, loops as nodes with bodies, one table of values for the whole program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jaxauto import compat
from jaxauto.alike import Alike, repeated
from jaxauto.core import Graph, Link, LinkKind, Literal, Node, Value
from jaxauto.dilated import undilated
from jaxauto.one_hot import as_comparison
from jaxauto.swapped import swapped, swaps


def build(closed_jaxpr: Any) -> Graph:
    """The Graph of a closed jaxpr. Node and value ids follow program order, so they are the same on every process."""
    return _Builder().graph(closed_jaxpr, "")


def walk(graph: Graph) -> Iterator[Node]:
    """All nodes in program order, those of a body right after the node that has it."""
    for node in graph.nodes:
        yield node
        for body in node.bodies:
            yield from walk(body)


def multiplicity(graph: Graph) -> dict[int, int]:
    """How often each node runs in a step: node id → product of the trips of the loops around it."""
    times: dict[int, int] = {}

    def visit(g: Graph, factor: int):
        for node in g.nodes:
            times[node.id] = factor
            for body in node.bodies:
                visit(body, factor * node.trips)

    visit(graph, 1)
    return times


def given(graph: Graph) -> dict[int, int]:
    """How often a step gives a loop's body each of its inputs: value id → its trips, those of the loops around it included."""
    times = multiplicity(graph)
    return {x: node.trips * times[node.id] for node in walk(graph) for body in node.bodies for x in body.inputs}


_NONE: Mapping[int, int] = MappingProxyType({})


class _Builder:
    def __init__(self):
        self.values: dict[int, Value] = {}
        self.value_ids, self.node_ids = itertools.count(), itertools.count()
        self.alike = Alike(set())  # the equations of the graph being built
        self.spared: set[int] = set()  # values that a comparison does without

    def value(self, aval) -> int:
        number = next(self.value_ids)
        self.values[number] = Value(number, aval)
        return number

    def graph(self, closed, stack: str, *, same: Mapping[int, int] = _NONE, late: int | None = None) -> Graph:
        """``same``: positions of inputs → of those that they are the same as. ``late``: from this input on, none is a constant."""
        jaxpr, consts = compat.open_jaxpr(closed)
        env: dict[Any, int | Literal] = {}
        captured = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.value(var.aval)
            captured[env[var]] = const
        inputs = []
        for k, var in enumerate(jaxpr.invars):
            env[var] = env[jaxpr.invars[same[k]]] if k in same else self.value(var.aval)
            if k not in same:
                inputs.append(env[var])
        nodes: list[Node] = []
        outer, self.alike = self.alike, Alike(set() if late is None else {env[var] for var in jaxpr.invars[late:]})
        self.inline(jaxpr, env, stack, nodes, captured)
        self.alike = outer
        outputs = tuple(_read(env, v) for v in jaxpr.outvars)
        dead = {x for x in self.spared.difference(outputs) if not self.values[x].users}
        nodes = [node for node in nodes if dead.isdisjoint(node.outputs)]
        return Graph(tuple(inputs), outputs, nodes, self.values, captured)

    def inline(self, jaxpr, env, stack: str, nodes: list[Node], captured: dict) -> None:
        exchanged = swaps(jaxpr)
        skipped = {id(eqn) for eqn in exchanged.values()}
        for eqn in jaxpr.eqns:
            if id(eqn) in skipped:
                continue
            inner_stack = f"{stack}/{compat.name_stack(eqn)}"
            if id(eqn) in exchanged:
                operands = [_read(env, v) for v in eqn.invars]
                self.instead(swapped(eqn), operands, exchanged[id(eqn)].outvars[0], env, inner_stack, nodes, captured)
                continue
            if (call := compat.inlined(eqn)) is None:
                if (written := undilated(eqn)) is not None or (written := compat.lowered(eqn)) is not None:
                    self.instead(written, [_read(env, v) for v in eqn.invars], eqn.outvars[0], env, inner_stack, nodes, captured)
                elif not self.comparison(eqn, env, inner_stack, nodes, captured):
                    nodes += self.node(eqn, env, inner_stack)
                continue
            body, consts = compat.open_jaxpr(call)
            operands = [_read(env, v) for v in eqn.invars]
            inner: dict[Any, int | Literal] = {}
            for var, const in zip(body.constvars, consts, strict=True):
                inner[var] = self.value(var.aval)
                captured[inner[var]] = const
            if eqn.primitive.name in compat.CHECKPOINT_CALLS and eqn.params.get("differentiated") and eqn.params.get("prevent_cse", True):
                operands = self.barrier(eqn, operands, inner_stack, nodes)
            inner.update(zip(body.invars, operands[len(operands) - len(body.invars) :], strict=True))
            self.inline(body, inner, inner_stack, nodes, captured)
            for outer, result in zip(eqn.outvars, body.outvars, strict=True):
                env[outer] = _read(inner, result)

    def comparison(self, eqn, env, stack: str, nodes: list[Node], captured: dict) -> bool:
        """Whether a gather or scatter could be written as a comparison, and was."""
        operands = [_read(env, v) for v in eqn.invars]
        written = as_comparison(eqn, operands, self.values, captured)
        if written is None:
            return False
        self.instead(compat.dead_code_eliminated(written), operands, eqn.outvars[0], env, stack, nodes, captured)
        self.spared.add(operands[0])
        return True

    def instead(self, written, operands: list, result, env, stack: str, nodes: list[Node], captured: dict) -> None:
        """The equations of another jaxpr in place of those that make ``result``."""
        jaxpr, _ = compat.open_jaxpr(written)
        inner: dict[Any, int | Literal] = dict(zip(jaxpr.invars, operands, strict=True))
        self.inline(jaxpr, inner, stack, nodes, captured)
        env[result] = _read(inner, jaxpr.outvars[0])

    def barrier(self, eqn, operands: list, stack: str, nodes: list[Node]) -> list:
        """A user's checkpoint region recomputes behind a barrier, as jax.checkpoint lowers it."""
        arrays = [x for x in operands if not isinstance(x, Literal)]
        if not arrays:
            return operands
        fresh = [self.value(self.values[x].aval) for x in arrays]
        node = self.make(BarrierEqn(eqn, [self.values[x].aval for x in arrays]), tuple(arrays), tuple(fresh), stack)
        nodes.append(node)
        renamed = iter(fresh)
        return [x if isinstance(x, Literal) else next(renamed) for x in operands]

    def node(self, eqn, env, stack: str) -> list[Node]:
        """The node of an equation; none where another makes the same."""
        inputs = tuple(_read(env, v) for v in eqn.invars)
        key = self.alike.key(eqn, inputs, (compat.is_transposed(stack), compat.is_made_again(stack)))
        twin = self.alike.made.get(key)
        if twin is not None:
            twin.also = (*twin.also, next(self.node_ids))
            outputs = twin.outputs
        else:
            outputs = tuple(self.value(v.aval) for v in eqn.outvars)
            node = self.make(eqn, inputs, outputs, stack)
            control = _CONTROL.get(node.prim)
            outputs = outputs if control is None else control(self, node, stack) or outputs
            self.alike.add(node, key)
        for var, out in zip(eqn.outvars, outputs, strict=True):
            if not isinstance(var, compat.DropVar):
                env[var] = out
        return [] if twin is not None else [node]

    def make(self, eqn, inputs, outputs, stack: str) -> Node:
        node = Node(
            id=next(self.node_ids),
            eqn=eqn,
            prim=eqn.primitive.name,
            inputs=inputs,
            outputs=outputs,
            scope=compat.plain_scope(stack),
            source=compat.source_line(eqn),
            backward=compat.is_transposed(stack),
            again=compat.is_made_again(stack),
        )
        for x in inputs:
            if not isinstance(x, Literal):
                self.values[x].users.append(node)
        for out in outputs:
            self.values[out].producer = node
        return node


class BarrierEqn:
    """Stands where an ``optimization_barrier`` equation would; ``eqn`` lends its source line."""

    def __init__(self, eqn, avals):
        from jax.lax import optimization_barrier_p

        self.primitive = optimization_barrier_p
        self.params: dict = {}
        self.source_info = eqn.source_info
        self.effects = frozenset()
        self.invars = self.outvars = [_Aval(a) for a in avals]


HOST, DEVICE = "pinned_host", "device"  # memory kinds


class TransferEqn:
    """Stands where a ``device_put`` to a memory kind would; ``eqn`` lends its source line."""

    def __init__(self, eqn, aval, space: str):
        self.primitive = _Named("device_put")
        self.params: dict = {"space": space}
        self.source_info = eqn.source_info
        self.effects = frozenset()
        self.invars, self.outvars = [_Aval(aval)], [_Aval(aval)]


class ConvertEqn:
    """Stands where a ``convert_element_type`` from one aval to another would; ``eqn`` lends its source line."""

    def __init__(self, eqn, aval, converted):
        self.primitive = _Named("convert_element_type")
        self.params: dict = {"new_dtype": converted.dtype, "weak_type": False, "sharding": None}
        self.source_info = eqn.source_info
        self.effects = frozenset()
        self.invars, self.outvars = [_Aval(aval)], [_Aval(converted)]


class FillEqn:
    """Stands where a ``broadcast_in_dim`` of zero to an aval would; ``eqn`` lends its source line."""

    def __init__(self, eqn, aval):
        self.primitive = _Named("broadcast_in_dim")
        self.zero = Literal(0, aval.update(shape=()))
        self.params: dict = {"shape": tuple(aval.shape), "broadcast_dimensions": (), "sharding": None}
        self.source_info = eqn.source_info
        self.effects = frozenset()
        self.invars, self.outvars = [_Aval(self.zero.aval)], [_Aval(aval)]


class _Named:
    def __init__(self, name: str):
        self.name = name


class _Aval:
    def __init__(self, aval):
        self.aval = aval


def _read(env, var) -> int | Literal:
    if isinstance(var, compat.JaxLiteral):
        return Literal(var.val, var.aval)
    return env[var]


# ---------------------------------------------------------------------------------------------------------- control flow


def _links(kind: LinkKind, sources, targets) -> list[Link]:
    return [Link(kind, s, t) for s, t in zip(sources, targets, strict=True) if isinstance(s, int) and isinstance(t, int)]


def _scan(builder: _Builder, node: Node, stack: str) -> tuple[int, ...]:
    """Its results as they are called, one for each of the equation's: what is stacked twice is one stack."""
    jaxpr, node.num_consts, node.num_carry, node.trips, node.reverse = compat.scan_parts(node.eqn)
    first, last = node.num_consts, node.num_consts + node.num_carry
    same = {**repeated(node.inputs[:first]), **{k + last: n + last for k, n in repeated(node.inputs[last:]).items()}}
    body = builder.graph(jaxpr, stack, same=same, late=first)
    for k in same:
        builder.values[node.inputs[k]].users.remove(node)
    node.inputs = tuple(x for k, x in enumerate(node.inputs) if k not in same)
    node.num_consts -= sum(k < first for k in same)
    over = node.num_carry
    twice = {k + over: n + over for k, n in repeated(body.outputs[over:]).items()}
    called = tuple(node.outputs[twice.get(k, k)] for k in range(len(node.outputs)))
    for k in twice:
        del builder.values[node.outputs[k]]
    node.outputs, body.outputs = (tuple(x for k, x in enumerate(xs) if k not in twice) for xs in (node.outputs, body.outputs))
    node.bodies = (body,)
    node.links = scan_links(node)
    return called


def scan_links(node: Node) -> tuple[Link, ...]:
    """How the operands and results of a scan node are bound to its body; to be renewed when a rewrite changes either."""
    (body,) = node.bodies
    first, num_carry = node.num_consts, node.num_carry
    last, over = first + num_carry, node.window.over if node.window else 0
    return tuple(
        _links(LinkKind.CONST, node.inputs[:first], body.inputs[:first])
        + _links(LinkKind.INIT, node.inputs[first:last], body.inputs[first:last])
        + _links(LinkKind.XS, node.inputs[last : len(body.inputs)], body.inputs[last:])
        + _links(LinkKind.CARRY, body.outputs[:num_carry], body.inputs[first:last])
        + _links(LinkKind.FINAL, body.outputs[:num_carry], node.outputs[:num_carry])
        + _links(LinkKind.YS, body.outputs[num_carry:], node.outputs[num_carry:])
        + (_links(LinkKind.OVER, node.inputs[-over:], node.outputs[-over:]) if over else [])
    )


def _while(builder: _Builder, node: Node, stack: str) -> None:
    params = node.eqn.params
    nc, nb = params["cond_nconsts"], params["body_nconsts"]
    cond, body = builder.graph(params["cond_jaxpr"], stack, late=nc), builder.graph(params["body_jaxpr"], stack, late=nb)
    init = node.inputs[nc + nb :]
    node.bodies = (cond, body)
    node.links = tuple(
        _links(LinkKind.CONST, node.inputs[:nc], cond.inputs[:nc])
        + _links(LinkKind.CONST, node.inputs[nc : nc + nb], body.inputs[:nb])
        + _links(LinkKind.INIT, init, body.inputs[nb:])
        + _links(LinkKind.CARRY, body.outputs, body.inputs[nb:])
        + _links(LinkKind.CARRY, body.outputs, cond.inputs[nc:])
        + _links(LinkKind.FINAL, body.outputs, node.outputs)
    )


def _cond(builder: _Builder, node: Node, stack: str) -> None:
    node.bodies = tuple(builder.graph(branch, stack, late=0) for branch in node.eqn.params["branches"])
    links: list[Link] = []
    for body in node.bodies:
        links += _links(LinkKind.CONST, node.inputs[1:], body.inputs)
        links += _links(LinkKind.FINAL, body.outputs, node.outputs)
    node.links = tuple(links)


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond}
