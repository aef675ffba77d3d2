"""A dot that is only read turned around, made the other way round: ``transpose(dot(a, b))`` is ``dot(b, a)``.

Differentiation writes a weight's gradient as the transpose of a dot of the cotangent with what the weight was multiplied with. Compilers
fold the transpose into the layout of the result: XLA:TPU then keeps parameters and moments in that layout for the update, and copies
them there and back (scripts/results/swapped.md). Not so where the cotangent is much wider than the other operand, that of a loss over a
vocabulary: exchanged, it is written to memory that as written is made where it is read. Such a gradient is told its layout (``turned``;
scripts/results/turned.md); what is scattered beside the dot has it anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jaxauto import compat
from jaxauto.core import Graph, Node

_WIDE = 8  # cotangent's elements for each of the other operand


def swaps(jaxpr: Any) -> dict[int, Any]:
    """The equations of a jaxpr that are dots read by one transpose alone which the dot of the exchanged operands would not need.

    But not where what reads that turns it back: weights that are read turned around (tied to an embedding) have such gradients.

    Returns:
      id of the dot's equation → the transpose's.
    """
    reads = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, compat.JaxLiteral))
    reads.update(v for v in jaxpr.outvars if not isinstance(v, compat.JaxLiteral))
    dots = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"}
    transposes = [e for e in jaxpr.eqns if e.primitive.name == "transpose" and not isinstance(e.invars[0], compat.JaxLiteral)]
    order = {e.outvars[0]: e.params["permutation"] for e in transposes}
    back = Counter(e.invars[0] for e in transposes if e.invars[0] in order and _turns_back(order[e.invars[0]], e.params["permutation"]))
    found = {}
    for eqn in transposes:
        dot, (made,) = dots.get(eqn.invars[0]), eqn.outvars
        alone = reads[eqn.invars[0]] == 1 and (not reads[made] or reads[made] > back[made])
        if dot is not None and alone and _exchangeable(dot, eqn):
            found[id(dot)] = eqn
    return found


def _turns_back(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether dimensions are in their order again after two transpositions."""
    return all(first[d] == k for k, d in enumerate(second))


def _exchangeable(dot: Any, transpose: Any) -> bool:
    left, right = (v.aval.size for v in dot.invars)
    return left < _WIDE * right and tuple(transpose.params["permutation"]) == _exchanged(dot)


def _exchanged(dot: Any) -> tuple[int, ...]:
    """Dimensions of a dot's result in the order in which the dot of the exchanged operands has them."""
    (contracted, _), (batch, _) = dot.params["dimension_numbers"]
    left, shared = dot.invars[0].aval.ndim - len(contracted), len(batch)
    last = dot.outvars[0].aval.ndim
    return (*range(shared), *range(left, last), *range(shared, left))


def swapped(dot: Any) -> Any:
    """The closed jaxpr, of the operands of a dot, of the dot of the exchanged operands."""
    params = dict(dot.params)
    (left, right), (batch_left, batch_right) = params.pop("dimension_numbers")
    if isinstance(precision := params.get("precision"), tuple) and len(precision) == 2:
        params["precision"] = precision[::-1]
    numbers = ((right, left), (batch_right, batch_left))
    with compat.source_of(dot):
        return jax.make_jaxpr(lambda a, b: lax.dot_general_p.bind(b, a, dimension_numbers=numbers, **params))(*(v.aval for v in dot.invars))


def turned(graph: Graph) -> set[int]:
    """Transposes, of the straight program, of dots that could be exchanged and were not, unless what reads them turns them back."""
    made = {x: node for node in graph.nodes if node.prim == "dot_general" for x in node.outputs}
    found = ((node, made[x]) for node in graph.nodes if node.prim == "transpose" and isinstance(x := node.inputs[0], int) and x in made)
    told = {node.outputs[0]: node for node, dot in found if tuple(node.params["permutation"]) == _exchanged(dot.eqn)}

    def is_back(user: Node, node: Node) -> bool:
        return user.prim == "transpose" and _turns_back(node.params["permutation"], user.params["permutation"])

    return {x for x, node in told.items() if x in graph.outputs or not all(is_back(user, node) for user in graph.values[x].users)}
