"""What the tables of ``model.py`` ask of the groups, before a mesh is."""

from __future__ import annotations

from collections.abc import Mapping

from jaxauto.core import Kind, Value
from jaxauto.graph import value_bytes, walk
from jaxauto.groups import WHOLE, Groups


def narrowing(groups: Groups) -> frozenset[int]:
    """Nodes that convert to a narrower type."""
    values, converts = groups.graph.values, (n for n in walk(groups.graph) if n.prim == "convert_element_type")
    return frozenset(n.id for n in converts if isinstance(n.inputs[0], int) and _narrower(values, n.outputs[0], n.inputs[0]))


def spatial_dims(groups: Groups) -> frozenset[tuple[int, int]]:
    """(group, dimension) of what convolutions slide over."""
    convolutions = (op for op in groups.operations if op.rule.kind is Kind.CONV)
    places = ((o, d) for op in convolutions for o in (*op.operands, *op.results) for d in enumerate(o.dims))
    named = ((groups.place[o.value], i, f) for o, (i, (_, f)) in places)
    return frozenset((group, dims[i]) for (group, dims), i, f in named if f.startswith("s") and dims[i] != WHOLE)


def _narrower(values: Mapping[int, Value], result: int, operand: int) -> bool:
    return value_bytes(values[result]) < value_bytes(values[operand])
