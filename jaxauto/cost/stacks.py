"""What compilers do with the stacks of a loop beside writing each slice and reading each stack once, as seen in their schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from jaxauto.core import OPERATIONS, Kind, LinkKind, Node, Value

PASSES = {"gpu": 5, "tpu": 2, "cpu": 2}  # over a stack that one loop writes and another reads, about


def share_of(node: Node, stack: Value) -> float:
    """Of the slices of a stack, those that the trips of a loop read or write: not all where it goes over a window (``core.Window``)."""
    return min(1.0, node.trips / max(1, stack.shape[0]))


def is_cut_inside(values: Mapping[int, Value], number: int) -> bool:
    """Whether what a loop is given is read, and written over, in slices alone by loops in its body: no trip passes over all of it."""
    users = values[number].users
    into = [(link.kind, link.target) for user in users for link in user.links if link.source == number]
    cut = all(kind in (LinkKind.XS, LinkKind.OVER) or is_cut_inside(values, target) for kind, target in into)
    return bool(into) and cut and all(user.bodies for user in users)


def stack_passes(node: Node, values: Mapping[int, Value], platform: str, kind: Callable[[Node], Kind]) -> Iterator[tuple[int, float]]:
    """(stack, passes over all of it) of a loop.

    - XLA:GPU fills each stack with zeros first, makes each slice in memory of its own and copies it there (three passes), and copies a
      slice out again for a dot or convolution (two).
    - XLA:TPU fills the stacks of a loop that runs backward with zeros, and reads a slice that only goes from one stack to another.
    - XLA:CPU does neither.

    Of a stack that has more slices than there are trips only those of the trips are passed over, and it is filled by whoever made it.
    """
    over = {link.target for link in node.links if link.kind is LinkKind.OVER}
    share = lambda stack: share_of(node, values[stack])  # noqa: E731
    sliced = {link.target: link.source for link in node.links if link.kind is LinkKind.XS}
    for link in node.links:
        if link.kind is LinkKind.YS and platform == "gpu":
            yield link.target, 2 * share(link.target) if link.target in over else 3
        elif link.kind is LinkKind.YS and platform == "tpu":
            if node.params.get("reverse") and link.target not in over:
                yield link.target, 1
            if link.source in sliced:
                yield sliced[link.source], share(sliced[link.source])
        elif link.kind is LinkKind.XS and platform == "gpu" and any(kind(user) in OPERATIONS for user in values[link.target].users):
            yield link.source, 2 * share(link.source)
