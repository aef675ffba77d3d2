"""What puts elements elsewhere, as XLA:TPU makes it (scripts/results/moved.md).

- The fusion of a dot or convolution makes nothing that moves elements of its result: that is written, and read by what moves it.
- What is computed is written before it is joined.
- A pass of its own reverses, or regroups: cuts what was one dimension and puts the pieces together in another order (windows, patches).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from jaxauto.core import Kind, Node, OpRule, Value
from jaxauto.rules.shape import reshape_factors

_JOINS = frozenset({"concatenate", "pad", "rev"})
CUTS = frozenset({"slice", "split"})
_COMPUTED = frozenset({Kind.CHEAP, Kind.EXPENSIVE})


class Moving:
    """Follows fused values of a program as they are met."""

    def __init__(self, values: Mapping[int, Value], rules: Mapping[int, OpRule]):
        self.values, self.rules = values, rules
        self.moved: dict[int, frozenset[int]] = {}  # fused value → those it is made of whose elements lie elsewhere in it
        self.passes: set[int] = set()  # values that a pass of their own writes, which nothing that reads them is part of
        self.joined = _joined(values)

    def meet(self, node: Node, number: int, virtual: Collection[int], roots: frozenset[int]) -> bool:
        """Whether a pass of its own writes a value.

        Args:
          virtual: values without a buffer.
          roots: what this one is made of.
        """
        regroups = node.prim == "reshape" and is_regrouping(node, self.values)
        if regroups or node.prim in _JOINS:
            self.moved[number] = roots
        elif below := [self.moved[x] for x in node.inputs if x in self.moved and x in virtual]:
            self.moved[number] = frozenset().union(*below)
        if regroups or self._reverses(node):
            self.passes.add(number)
        return number in self.passes

    def is_joined(self, value: Value) -> bool:
        """Whether a fused value that is computed is joined with others, or part of it."""
        made = value.producer
        return value.id in self.joined and made is not None and made.id in self.rules and self.rules[made.id].kind in _COMPUTED

    def _reverses(self, node: Node) -> bool:
        """A convolution reads its kernel backward as well as forward."""
        return node.prim == "rev" and any(user.prim != "conv_general_dilated" for user in self.values[node.outputs[0]].users)


def _joined(values: Mapping[int, Value]) -> set[int]:
    """What is joined with others, or of which parts are."""
    made = (value.producer for value in values.values())
    found, waiting = set(), [x for node in made if node is not None and node.prim == "concatenate" for x in node.inputs]
    while waiting:
        if isinstance(x := waiting.pop(), int) and x not in found:
            found.add(x)
            made_by = values[x].producer
            waiting += made_by.inputs if made_by is not None and made_by.prim in CUTS else ()
    return found


def is_regrouping(node: Node, values: Mapping[int, Value]) -> bool:
    """Whether a reshape puts pieces of what was one dimension together in another order than they were cut in."""
    turned = _made_by(node, "transpose", values) if node.prim == "reshape" else None
    cut = _made_by(turned, "reshape", values) if turned is not None else None
    if turned is None or cut is None:
        return False
    order = turned.params["permutation"]
    pieces = {d for group in _together(cut.eqn.outvars[0].aval.shape, cut.eqn.invars[0].aval.shape) for d in group}
    merged = ([order[d] for d in group] for group in _together(turned.eqn.outvars[0].aval.shape, node.eqn.outvars[0].aval.shape))
    return any(pieces & set(group) and any(b != a + 1 for a, b in pairwise(group)) for group in merged)


def _together(source: Sequence[int], target: Sequence[int]) -> list[list[int]]:
    """Dimensions of ``source`` longer than one that become one of ``target``, major first."""
    left, right, _, _ = reshape_factors(source, target)
    place = {factor: d for d, factors in enumerate(left) for factor in factors}
    groups = (list(dict.fromkeys(place[f] for f in factors if f in place)) for factors in right)
    return [group for group in groups if len(group) > 1]


def _made_by(node: Node, prim: str, values: Mapping[int, Value]) -> Node | None:
    """The node that makes the operand, conversions aside, if it is of that kind."""
    made = values[node.inputs[0]].producer if isinstance(node.inputs[0], int) else None
    while made is not None and made.prim == "convert_element_type":
        made = values[made.inputs[0]].producer if isinstance(made.inputs[0], int) else None
    return made if made is not None and made.prim == prim else None
