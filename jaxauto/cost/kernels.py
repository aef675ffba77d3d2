"""What XLA:GPU makes in one kernel, as its schedules show (scripts/results/softmax_h100.md, and those of whole steps).

- Rows. A softmax or the centring of a norm is one kernel that reads each row once: the maximum, the sums and what is made of
  them stay inside. It takes a seed: an array that is combined with a reduction of its own rows, which nothing else uses. From there
  the kernel takes in what comes after it, further sums over the same rows as well       ``Kernels.is_inside`` (SoftmaxRewriterTriton),
  and what comes before it for it alone                                                  ``Kernels.stays``
- Where it ends it writes: in log_softmax the sum of exp(x) is combined with x, not with the exp; if others read the exp, the kernel ends
  with x, which all of them read                                                         ``Kernels.is_spread``
- Slices. A kernel reads of an array what it slices off                                  ``Kernels.parts``
- Layouts. A dot writes its result's dimensions in their own order, and a transposition after it says how they are called. Where two such
  arrays are combined, the later one is copied to the order of the other (scores and their gradient)                ``Kernels.turn``
  A loop's stack lies as what was put there; a loop that reads it wants its slices in their own order: it is copied whole ``Kernels.enter``
- Siblings. Elementwise work and sums over the same elements that read an array in common are one kernel, which reads it once; one
  that only its siblings read is not written                                             ``Kernels.found``      (MultiOutputFusion)
- Activations. Part of a gelu is kept for the backward pass                              ``Kernels.is_made_once``
  What a residual relu compares is made where it is read                                 ``Kernels.is_compared``
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxauto.core import ELEMENTWISE, Kind, Link, LinkKind, Literal, Node, Value
from jaxauto.cost.clusters import Found
from jaxauto.cost.patterns import window_and_result
from jaxauto.cost.widened import WIDE
from jaxauto.flow import is_widening

LONGEST = 16384  # elements of a row that one kernel holds; 32,768 are read in parts
_ALIGNED = 16  # elements: what a dot that is split contracts is padded to a multiple
_SPLIT = ((66, 8192), (132, 40960))  # dots of up to so many tiles are split where they contract more
TILE = 128  # elements of a side
_MADE_ONCE = frozenset({"erf", "erfc"})
_DERIVATIVE = 3  # equations, of which a tanh's is made
_SLICES = frozenset({"slice", "dynamic_slice"})
Parts = dict[tuple[Any, ...], float]  # (buffer, the slices that are taken of it, one after the other) → share of its elements


def whole(roots: Iterable[int]) -> Parts:
    """Buffers read without being sliced."""
    return {(root,): 1.0 for root in roots}


def pads(tiles: Any, long: Any) -> Any:
    """Whether a dot reads its operands padded, elementwise: one of few tiles is split along what it contracts, for which that is aligned.

    Seen over 8,201 elements in a dot of 64 tiles, over 50,001 in one of 128 and 51,864 in one of 112, on a chip of 132 cores; not over
    32,001 in one of 128, over 51,865 in one of 256, or over a multiple of 16.

    Args:
      tiles: of one device's result, of ``TILE`` × ``TILE`` elements. long: elements that are contracted.
    """
    return (np.mod(long, _ALIGNED) != 0) & functools.reduce(np.logical_or, [(tiles <= most) & (long > least) for most, least in _SPLIT])


@dataclass
class _Kernel:
    """``made``: values of its own elements, which others in it read from registers; ``of``: what each that it makes is made of."""

    elements: int
    at: int
    alone: bool
    made: set[int] = field(default_factory=set)
    reads: Parts = field(default_factory=dict)
    of: dict[int, set[int]] = field(default_factory=dict)
    last: int = 0


class Kernels:
    """Collects fused values of a program as they are met, then tells what they read."""

    def __init__(self, values: Mapping[int, Value], kind: Callable[[Node], Kind], devices: int):
        self.values, self.kind, self.devices = values, kind, devices
        self.seeds: set[int] = set()
        self.rows: set[int] = set()  # made in kernels that hold rows
        self.orders: dict[int, tuple[int, ...]] = {}  # of what is made of dots: its dimensions as they lie in memory, major first
        self.parts: dict[int, Parts] = {}  # of its roots, that it is made of
        self.alone: set[int] = set()
        self.stored: dict[int, tuple[frozenset[int], int, bool]] = {}

    def meet(self, node: Node, number: int, operands: list[int], fused: Mapping[int, Iterable[int]]) -> None:
        """A value in program order; ``fused``: values without a buffer, and the buffers that they are made of."""
        if number in self.seeds or any(x in self.rows and x in fused for x in operands):
            self.rows.add(number)
        if self.kind(node) is Kind.DOT:
            self.orders[number] = tuple(range(len(self.values[number].shape)))
        elif node.prim == "transpose" and operands[0] in self.orders:
            back = {d: k for k, d in enumerate(node.params["permutation"])}
            self.orders[number] = tuple(back[d] for d in self.orders[operands[0]])
        elif self._elementwise(node) and (wide := self._wide(operands, number)):
            self.orders[number] = self.orders[wide[0]]
        parts: Parts = {}
        for x in operands:
            parts.update(self.parts.get(x) or whole(fused[x]) if x in fused else whole((x,)))
        if node.prim in _SLICES:
            share = self.values[number].elements / max(self.values[operands[0]].elements, 1)
            cut = (*map(str, (*node.params.values(), *node.inputs[1:])),)  # those of a dynamic slice begin where its operands say
            parts = {(*part, cut): of * share for part, of in parts.items()}
        self.parts[number] = parts

    def enter(self, links: Sequence[Link]) -> list[Link]:
        """A loop: constants lie as they do outside, slices in their own order; the stacks that are copied to that order before."""
        for link in links:
            if link.kind is LinkKind.CONST and link.source in self.orders:
                self.orders[link.target] = self.orders[link.source]
        stacks = [link for link in links if link.kind is LinkKind.XS and link.source in self.orders]
        for link in stacks:
            self.orders[link.target] = tuple(range(len(self.values[link.target].shape)))
        return [link for link in stacks if (lies := self._lies(link.source)) != sorted(lies)]

    def leave(self, links: Sequence[Link]) -> None:
        """After a loop: its stacks lie as what it put there."""
        for link in links:
            if link.kind is LinkKind.YS and link.source in self.orders:
                self.orders[link.target] = (0, *(d + 1 for d in self.orders[link.source]))

    def turn(self, node: Node, number: int, fused: Container[int]) -> bool:
        """Lets a value lie as an earlier array that it is combined with; whether it has to be copied for that.

        The first that is made of a buffer is; a transposition is made with the conversion after it.
        """
        wide = [x for x in node.inputs if isinstance(x, int) and self.values[x].elements == self.values[number].elements]
        users = self.values[number].users
        moves = node.prim == "transpose"
        if len(wide) != 1 or not (moves or self._elementwise(node)):
            return False
        if moves and len(users) == 1 and is_widening(users[0], self.values):
            return False
        origin = self.values[wide[0]].producer
        if wide[0] in fused and (moves or origin is None or origin.prim != "transpose" or len(self.values[wide[0]].users) > 1):
            return False
        if number not in self.orders or (theirs := self._others(number)) is None:
            return False
        self.orders[number] = theirs
        return True

    def _others(self, number: int) -> tuple[int, ...] | None:
        """The order of an array that a value is combined with, where that is another order."""
        mine, seen, waiting = self._lies(number), {number}, [number]
        while waiting:
            for user in self.values[waiting.pop()].users:
                if not self._elementwise(user):
                    continue
                for x in self._wide([x for x in user.inputs if isinstance(x, int)], number):
                    if x not in seen and self._lies(x) != mine:
                        return self.orders[x]
                new = [out for out in user.outputs if out not in seen and self.values[out].elements == self.values[number].elements]
                seen.update(new)
                waiting += new
        return None

    def _wide(self, operands: list[int], number: int) -> list[int]:
        """Operands of the value's shape that are made of dots."""
        return [x for x in operands if x in self.orders and self.values[x].shape == self.values[number].shape]

    def _lies(self, number: int) -> list[int]:
        """Its dimensions of more than one element as they lie in memory."""
        return [d for d in self.orders[number] if self.values[number].shape[d] > 1]

    def is_inside(self, node: Node, number: int, outputs: Set[int], fused: Container[int]) -> bool:
        """Whether a reduction is made in the kernels that use it."""
        (operand, *_) = node.inputs
        if not self.is_row(node) or not isinstance(operand, int):
            return False
        ends = self._ends(number, self.values[operand].elements, outputs)
        if ends and operand in self.rows and operand in fused and len(self._sinks(ends, outputs)) == 1:
            return True
        if (seed := self._seed(operand, ends)) is None:
            return False
        self.seeds.add(seed)
        return True

    def _seed(self, operand: int, ends: list[int]) -> int | None:
        """What combines an array with a reduction of its rows, where that is all there is of it."""
        same = self._trivial(operand)
        if len(ends) != 1 or not any(isinstance(x, int) and not same.isdisjoint(self._trivial(x)) for x in self._node(ends[0]).inputs):
            return None
        return ends[0]

    def is_row(self, node: Node) -> bool:
        """Whether a node reduces the dimensions that lie together in memory."""
        operand = node.inputs[0]
        axes = node.params.get("axes")
        if axes is None or not isinstance(operand, int) or len(node.inputs) > 1:
            return False
        last = self.orders.get(operand, tuple(range(len(self.values[operand].shape))))[-len(axes) :]
        return set(axes) == set(last) and 1 < math.prod(self.values[operand].shape[a] for a in axes) <= LONGEST

    def writes(self, node: Node, number: int, outputs: Set[int], fused: Container[int]) -> bool:
        """Whether a value is written that nothing but kernels reads."""
        apart = self.leaves(number) or self.is_spread(number, outputs) or self.is_mask(number) or self.turn(node, number, fused)
        return apart or self.is_with_convolution(node)

    def is_with_convolution(self, node: Node) -> bool:
        """Whether cuDNN adds an array to the result of a convolution that nothing else reads: the sum is all that it writes.

        Not to that of one which XLA takes for a gradient (cudnn_fused_conv_rewriter.cc).
        """
        if node.prim not in ("add", "add_any") or len({self.values[x].shape for x in node.inputs if isinstance(x, int)}) > 1:
            return False
        made = (self.values[x].producer for x in node.inputs if isinstance(x, int) and len(self.values[x].users) == 1)
        return len(node.inputs) == 2 and any(n is not None and self._is_forward(n) for n in made)

    def _is_forward(self, node: Node) -> bool:
        """Whether XLA takes a convolution for one of a forward pass: nothing dilated, and no kernel reversed or larger than the result."""
        if node.prim != "conv_general_dilated" or max(node.params["lhs_dilation"], default=1) > 1 or node.params["batch_group_count"] > 1:
            return False
        window, result = window_and_result(node)
        made = self.values[node.inputs[1]].producer
        return window <= result and (window == 1 or made is None or made.prim != "rev")

    def is_mask(self, number: int) -> bool:
        """Whether a value, made of wide arrays, masks one that several kernels read, each of which selects for itself."""
        value = self.values[number]
        wide = any(self.values[root].elements >= value.elements for root, *_ in self.parts[number])
        if value.dtype != np.bool_ or not wide or len(value.users) != 1 or value.users[0].prim != "select_n":
            return False
        selected = self.values[value.users[0].outputs[0]]
        return selected.dtype.itemsize >= WIDE and len(selected.users) > 1 and all(map(self._reads, selected.users))

    def _reads(self, node: Node) -> bool:
        return self._elementwise(node) or self.kind(node) is Kind.REDUCE

    def is_spread(self, number: int, outputs: Set[int]) -> bool:
        """Whether a seed is written: its kernel ends there, and several others read it.

        It goes on where a sum is combined with what it sums, as in softmax and the norms. In log_softmax the sum of exp(x) is combined
        with x; where others use the exp, the kernel ends.
        """
        if number not in self.seeds or len(self._sinks([number], outputs)) < 2:
            return False
        return any(self._breaks(node, number, outputs) for _, node in self._sums(number))

    def _after(self, number: int) -> list[int]:
        """A value and what elementwise equations make of it alone."""
        found = [number]
        for x in found:
            new = (out for user in self.values[x].users if self._elementwise(user) for out in user.outputs)
            found += [out for out in new if out not in found and self._origin(out) == x]
        return found

    def _breaks(self, node: Node, seed: int, outputs: Set[int]) -> bool:
        """Whether a sum is combined with another array made of the seed than it sums; steps on the way that nothing else uses are none.

        What is only summed in turn (the loss, where the label's logit is found by comparison) stays in the kernel.
        """
        (operand, *_) = node.inputs
        assert isinstance(operand, int)
        source = self._source(operand)
        ends = self._ends(node.outputs[0], self.values[operand].elements, outputs)
        read = [end for end in ends if any(self.values[x].elements >= self.values[operand].elements for x in self._sinks([end], outputs))]
        with_it = {x for end in read for x in self._node(end).inputs if isinstance(x, int)}
        return any(seed in self._trivial(x) and self._source(x) != source for x in with_it)

    def _source(self, number: int) -> int:
        """What a value is made of by steps that nothing else uses."""
        while len(self.values[number].users) == 1 and (origin := self._origin(number)) is not None:
            number = origin
        return number

    def _sums(self, number: int) -> Iterator[tuple[int, Node]]:
        """Sums of rows of what is made of a value alone: (what is summed, the sum)."""
        for x in self._after(number):
            yield from ((x, user) for user in self.values[x].users if self.kind(user) is Kind.REDUCE and self.is_row(user))

    def stays(self, number: int, outputs: Set[int]) -> bool:
        """Whether something made in a kernel that holds rows, or for it, is used in that kernel alone."""
        return (number in self.rows or self._begins(number, outputs)) and len(self._sinks([number], outputs)) == 1

    def _begins(self, number: int, outputs: Set[int]) -> bool:
        """Whether rows of a value are summed and combined with the sum."""
        every = ((x, self._ends(node.outputs[0], self.values[x].elements, outputs)) for x, node in self._sums(number))
        return any(self._seed(x, ends) is not None for x, ends in every)

    def is_made_once(self, node: Node) -> bool:
        """Whether what both passes read of an activation is made once, and kept: of a gelu, not of a silu or softplus.

        The tanh of an approximate one where it is narrow, and so widened and rounded; the erfc of an exact one
        (``scripts/bench_activations.py``).
        """
        if node.prim not in _MADE_ONCE and (node.prim != "tanh" or self.values[node.outputs[0]].dtype.itemsize >= WIDE):
            return False
        users = self.values[node.outputs[0]].users
        return any(not user.backward for user in users) and self._is_in_derivative(users)

    def _is_in_derivative(self, users: Iterable[Node]) -> bool:
        """Whether an equation of the backward pass is among these, or reads what the next few make: of a tanh, (1 + y) (1 - y)."""
        near = [*users]
        for _ in range(_DERIVATIVE):
            if any(user.backward for user in near):
                return True
            near = [user for node in near if self._elementwise(node) for out in node.outputs for user in self.values[out].users]
        return False

    def is_compared(self, value: Value) -> bool:
        """Whether two kernels read a value: one makes what it is used for, another compares it, and a mask is made where it is used."""
        made = [out for user in value.users if self._elementwise(user) for out in user.outputs]
        masks = [out for out in made if self.values[out].dtype == np.bool_]
        return len(masks) == 1 and len(made) == len(value.users) == 2

    def leaves(self, number: int) -> bool:
        """Whether something made in a kernel that holds rows is summed over other dimensions, which takes a kernel of its own."""
        users = self.values[number].users
        return number in self.rows and any(self.kind(u) is Kind.REDUCE and not self.is_row(u) for u in users)

    def store(self, number: int, roots: frozenset[int], at: int, *, wanted: bool, stacked: bool) -> None:
        """A fused value that gets a buffer, what it is made of, and when.

        Args:
          wanted: by others than fused equations. stacked: a loop writes it into a stack, in a kernel of its own.
        """
        self.stored[number] = roots, at, wanted
        if stacked:
            self.alone.add(number)

    def writes_beside(self, value: Value) -> bool:
        """Whether what makes a value writes over none of its operands."""
        return value.id in self.rows or self.is_padded(value)

    def is_padded(self, value: Value) -> bool:
        """Whether a dot reads the value padded (``pads``); each device is taken to make its share of the tiles."""
        for user in value.users:
            if user.prim == "dot_general":
                (left, right), _ = user.params["dimension_numbers"]
                long = math.prod(value.shape[d] for d in (left if user.inputs[0] == value.id else right))
                if pads(self._elements(user.outputs[0]) / TILE**2 / self.devices, long):
                    return True
        return False

    def found(self, start: Mapping[int, int]) -> Found:
        """Args: start: position of each value that has a buffer."""
        result = Found()
        kernels: list[_Kernel] = []
        by_root: dict[int, list[int]] = {}
        for number, (roots, at, _) in self.stored.items():
            alone = number in self.rows or number in self.alone
            k = None if alone else self._sibling(number, roots, kernels, by_root, start)
            if k is None:
                k = len(kernels)
                kernels.append(_Kernel(self._elements(number), at, alone))
            kernel = kernels[k]
            kernel.reads |= {part: share for part, share in self._parts(number, roots).items() if part[0] not in kernel.made}
            kernel.of[number] = {*roots}.union(*(kernel.of[r] for r in roots if r in kernel.made))
            kernel.last = max(kernel.last, at)
            if self.kind(self._node(number)) is not Kind.REDUCE:
                kernel.made.add(number)
            for root in (*roots, number):
                by_root.setdefault(root, []).append(k)
        read_elsewhere = {root for k in kernels for root, *_ in k.reads}
        for kernel in kernels:
            read: dict[int, float] = {}
            for (root, *_), share in kernel.reads.items():
                read[root] = min(1.0, read.get(root, 0.0) + share)
            for root, share in read.items():
                result.reads[root] = result.reads.get(root, 0.0) + share
            if len(kernel.of) > 1:
                result.shared.update(self._summed_too(kernel))
                inside = (number for number in kernel.made - read_elsewhere if not self.stored[number][2])
                result.absorbed.update(dict.fromkeys(inside, kernel.last))
        return result

    def _summed_too(self, kernel: _Kernel) -> Iterator[tuple[int, set[int]]]:
        """What a kernel writes narrow, and what it reads for that and for sums that it makes wide: none of it is written over."""
        sums = {x for x in kernel.of if self.kind(self._node(x)) is Kind.REDUCE}
        read = set().union(*(kernel.of[x] for x in sums))
        yield from ((x, kernel.of[x] & read) for x in kernel.made if sums and self.values[x].dtype.itemsize < WIDE)

    def _parts(self, number: int, roots: Iterable[int]) -> Parts:
        known = {part: share for part, share in self.parts.get(number, {}).items() if part[0] in roots}
        return known | whole({*roots} - {root for root, *_ in known})

    def _sibling(
        self, number: int, roots: frozenset[int], kernels: list[_Kernel], by_root: Mapping[int, list[int]], start: Mapping[int, int]
    ) -> int | None:
        """The latest kernel over the same elements that reads or makes a wide array of ``roots``, where all the others are there."""
        elements = self._elements(number)
        wide = [r for r in roots if self.values[r].elements >= elements]
        for k in sorted({k for root in wide for k in by_root.get(root, ())}, reverse=True):
            kernel = kernels[k]
            if kernel.elements != elements or kernel.alone:
                continue
            if all(start.get(r, 0) < kernel.at for r in roots - kernel.made):
                return k
        return None

    def _elements(self, number: int) -> int:
        """Over how many elements a kernel that makes it runs."""
        node = self._node(number)
        operand = node.inputs[0] if node.inputs else None
        summed = self.kind(node) is Kind.REDUCE and isinstance(operand, int)
        return self.values[operand if summed and isinstance(operand, int) else number].elements

    def _ends(self, number: int, elements: int, outputs: Set[int]) -> list[int]:
        """Values of ``elements`` that are made of a reduction's result; none where something else uses it."""
        ends: list[int] = []
        waiting = [number]
        while waiting:
            x = waiting.pop()
            if x in outputs or not self.values[x].users:
                return []
            for user in self.values[x].users:
                if not self._elementwise(user):
                    return []
                for out in user.outputs:
                    (ends if self.values[out].elements >= elements and user.prim != "broadcast_in_dim" else waiting).append(out)
        return list(dict.fromkeys(ends))

    def _sinks(self, ends: list[int], outputs: Set[int]) -> set[int]:
        """What others than kernels over the same rows read first of what is made of ``ends``: it is written, who comes later reads that."""
        found: set[int] = set()
        seen, waiting = set(ends), list(ends)
        while waiting:
            x = waiting.pop()
            users = self.values[x].users
            if x in outputs or any(not self._elementwise(user) and not self.is_row(user) for user in users):
                found.add(x)
                continue
            new = [out for user in users for out in user.outputs if out not in seen]
            seen.update(new)
            waiting += new
        return found

    def _trivial(self, number: int) -> set[int]:
        """The value and what it is made of by way of one operand alone."""
        found = {number}
        while (origin := self._origin(number)) is not None:
            number = origin
            found.add(number)
        return found

    def _origin(self, number: int) -> int | None:
        """The one operand that a value is made of (scalars and squares do not count)."""
        node = self.values[number].producer
        if node is None or not self._elementwise(node) or node.prim == "broadcast_in_dim":
            return None
        wide = {x for x in node.inputs if isinstance(x, int) and not self._is_scalar(x)}
        return wide.pop() if len(wide) == 1 else None

    def _elementwise(self, node: Node) -> bool:
        """Whether a kernel can hold a node; what passes a barrier is read from memory."""
        return self.kind(node) in ELEMENTWISE and node.prim != "optimization_barrier"

    def _is_scalar(self, x: int) -> bool:
        node = self.values[x].producer
        spread = node is not None and node.prim == "broadcast_in_dim"
        source = node.inputs[0] if spread and node is not None else x
        return isinstance(source, Literal) or self.values[source].elements == 1

    def _node(self, number: int) -> Node:
        node = self.values[number].producer
        assert node is not None
        return node
