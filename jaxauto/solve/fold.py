"""Repeated layers → one decision: which groups and operations look alike from where they stand.

Colour refinement (Weisfeiler–Leman) on the graph of groups, operations and edges: two that have the same shapes and, for ``ROUNDS``
steps around them, the same neighbours get one variable. The folded problem is the unfolded one with variables identified, so its cost
is the true cost of the plan it stands for, and no edge is lost; what is given up is only that alike layers could differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from jaxauto.groups import Groups
from jaxauto.rules.registry import signature

ROUNDS = 3

Key = tuple[str, int]  # ("group", id) or ("operation", node id)


def fold(groups: Groups, marks: Mapping[int, Hashable]) -> dict[Key, Key]:
    """Every group and operation → the first one that looks like it.

    Args:
      marks: group id → something that sets it apart (a constraint).
    """
    labels: dict[Key, Hashable] = {}
    for g in groups.groups.values():
        labels["group", g.id] = ("group", tuple(g.sizes), g.leaf, marks.get(g.id))
    for op in groups.operations:
        labels["operation", op.node.id] = (signature(op.node.eqn) or op.node.id, op.node.backward, op.times)
    links = _links(groups)
    colours = _numbered(labels)
    for _ in range(ROUNDS):
        colours = _numbered({k: (colours[k], tuple(sorted((how, colours[other]) for how, other in links[k]))) for k in colours})
    first: dict[int, Key] = {}
    return {k: first.setdefault(c, k) for k, c in colours.items()}


def _links(groups: Groups) -> dict[Key, list[tuple[str, Key]]]:
    links: dict[Key, list[tuple[str, Key]]] = {("group", g): [] for g in groups.groups}
    links |= {("operation", op.node.id): [] for op in groups.operations}
    for e in groups.edges:
        how = f"{e.dims}{e.reduced}{e.times}{e.backward}"
        a, b = ("group", e.source), ("group", e.target)
        links[a].append((f">{how}", b))
        links[b].append((f"<{how}", a))
    for op in groups.operations:
        me = ("operation", op.node.id)
        for side, operands in (("in", op.operands), ("out", op.results)):
            for k, o in enumerate(operands):
                how = f"{side}{k}{o.dims}"
                links[me].append((how, ("group", o.group)))
                links["group", o.group].append((how, me))
    return links


def _numbered(labels: dict[Key, Hashable]) -> dict[Key, int]:
    numbers: dict[Hashable, int] = {}
    return {k: numbers.setdefault(label, len(numbers)) for k, label in labels.items()}
