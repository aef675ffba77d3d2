"""Hold a scheduler to the order of the program: Graph → Graph, the last rewrite before a step is applied.

XLA:GPU starts early what waits for nothing, and puts off what nothing waits for; so does XLA:CPU. A scatter of constants by the labels
(the gradient of a loss that picks one logit) is made before the forward pass and lies there, as large as the logits, until it is read; the
weight gradient of the last projection is made after the loops of the backward pass, and the logits' cotangent lies there until then. The
loss itself is made at the end of the step, on one device at times, and the logits lie there until then. Barriers say when: an operation of
the backward pass that depends on no forward value waits for the loss; a loop of the backward pass, or a recomputation, waits for the
gradients that come before it, on several GPUs for small ones (those of biases and norms among them) and those of the block before: their
sums run beside a block. Those that are short, of much that is read (``cost/order.short_sums``), the next operation waits for. The backward
pass waits for the loss and the metrics too. So does the body of a loop in which something is made again: microbatches.
On one CPU each step of the backward pass waits for the gradients and the steps before it: of a network with batch norms the sums would come
last, and the result and the cotangent of every convolution lie there until then (``bench_models.py``'s medium ResNet-50: 37 GB instead of
22); a cotangent that many layers read would be used for all of them at once.
Where the sums of a softmax's rows are all that is kept of it, XLA:GPU makes them from the scores when the backward pass reads them, and
the scores lie there until then: the next operation of the forward pass waits for them. A cotangent that has passed a barrier is summed as
it was before it (a bias's gradient): what makes it sums it in the same kernel, as it could not after it.
An array that goes through a barrier is read from there on, or the compiler for several devices takes it out.

XLA:TPU puts weight gradients off as well, and makes the update with them unless they are summed over devices first. Of those some are
waited for, that read much more than they are, as the last projection's does, and some on one device that is short of memory
(``solve/awaited.py``); nothing else is held there. Nothing runs beside its sums, and a recomputation waits for all before it: a block
later the logits still lie there (GPT-2, four layers on eight v5p: 3.74 GiB instead of 3.06, in the same time). Where the next
recomputation is too far, an operation waits once the next such gradient is made: its sum runs beside what makes that. Where the update
gathers moments, it may begin beside the logits instead: a generated step near its least memory went from 223 to 269 MiB. Where something
is made again, what XLA:TPU could start long before its place is held to that (``ahead.py``): to be held takes time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from typing import NamedTuple

import jax.numpy as jnp

from jaxauto.core import Graph, Node
from jaxauto.graph import BarrierEqn, walk
from jaxauto.rewrite.ahead import Ahead
from jaxauto.rewrite.program import Program, Rewritten, cotangent_at, read_as, readers_of, renamed, ripeness

SMALL = 1 << 20  # bytes: a larger result is not held back from where the compiler wants to make it, nor is its sum waited for at once
SCATTERS = frozenset(["scatter", "scatter-add", "scatter_add"])  # what writes into an array that is filled first
_WRITTEN = SCATTERS | {"dot_general", "conv_general_dilated"}  # never fused into what reads them


class Habits(NamedTuple):
    """What a scheduler does that it has to be held back from.

    Attributes:
      strays: it starts early what waits for nothing, and puts the loss off.
      beside: sums over devices run beside a block: a recomputation waits for small gradients before it and for those before the last one;
        else for all.
      lags: an operation that waits for a short sum waits for all but the last of them, which runs beside it unless it is small.
      stepwise: every operation of the backward pass that reads a cotangent waits for all gradients and operations before it, also in
        bodies of loops in which something is made again.
      sums: it sums in the kernels that make what is summed, or in some of their own when they are read. What is kept of rows alone, their
        sums, is waited for in the forward pass; cotangents are summed as they are before barriers. Bodies of loops in which something is
        made again are held to their order too.
      hurries: it starts operations of the backward pass as soon as what they read is there, and the memory is short (``ahead.py``).
    """

    strays: bool = True
    beside: bool = False
    lags: bool = False
    stepwise: bool = False
    sums: bool = False
    hurries: bool = False


def habits_of(platform: str, devices: int, *, pressed: bool = False) -> Habits:
    """Of XLA for a platform; see the head of the file. ``pressed``: something is made again for the sake of memory."""
    if platform == "tpu":
        return Habits(strays=False, lags=True, hurries=pressed)
    return Habits(beside=devices > 1, sums=True) if platform == "gpu" else Habits(stepwise=devices == 1)


def in_order(rewritten: Rewritten, finished: Set[int], habits: Habits, *, short: Set[int] = frozenset()) -> Rewritten:
    """The same program, held to its order.

    Args:
      finished: gradients of the straight program that what comes after them in the backward pass waits for.
      short: those of them that the next operation of the backward pass waits for, too.
    """
    program = Program.after(rewritten)
    bodies = [body for node in walk(rewritten.graph) for body in node.bodies if any(isinstance(n.eqn, BarrierEqn) for n in body.nodes)]
    for graph in (rewritten.graph, *(bodies if habits.stepwise or habits.sums else ())):
        _Order(program, graph, finished, short, habits).run()
    return program.rewritten(rewritten.host)


def late_conversions(nodes: Sequence[Node], finished: Set[int]) -> list[Node]:
    """Conversions of gradients come right before what reads them: what is read before a barrier does not wait for it."""
    late: dict[int, Node] = {}  # by result, those that are still to come
    placed: list[Node] = []

    def place(node: Node) -> None:
        for x in node.inputs:
            if isinstance(x, int) and x in late:
                place(late.pop(x))
        placed.append(node)

    for node in nodes:
        (source, *others) = node.inputs or (None,)
        if node.prim == "convert_element_type" and not others and node.backward and source in finished:
            late[node.outputs[0]] = node
        else:
            place(node)
    while late:
        place(late.pop(next(iter(late))))
    return placed


class _Order:
    def __init__(self, program: Program, original: Graph, finished: Set[int], short: Set[int], habits: Habits):
        self.program, self.graph, self.finished, self.short = program, program.graphs[id(original)], finished, short
        self.habits = habits
        self.graph.nodes = late_conversions(self.graph.nodes, finished)
        self.values = original.values
        self.phase = {node.id: int(node.backward) for node in original.nodes}
        self.position = {node.id: k for k, node in enumerate(self.graph.nodes)}
        self.ripe = ripeness(original, self.phase)
        self.readers = readers_of(self.graph)
        self.maker = {x: node for node in self.graph.nodes for x in node.outputs}
        self.names: dict[int, int] = {}
        self.waits: set[int] = set()  # values that some matmul or loop comes before
        self.unread: dict[int, None] = {}  # results of steps, in order
        self.step: int | None = None  # something small that has waited for the steps so far
        self.ahead = Ahead(program, self.graph, _WRITTEN) if habits.hurries else None
        self.results = self._results(original) if habits.strays else set()
        self.sums = self._sums() if habits.sums else set()
        self.summed = self._summed() if habits.sums else set()

    def run(self) -> None:
        nodes: list[Node] = []
        made: list[int] = []  # gradients that nothing has waited for
        before: list[int] = []  # those that were there at the last recomputation
        loss: list[int] = []  # and what else is returned of the forward pass, until the backward pass has waited for it
        kept: list[int] = []  # sums of rows that nothing has waited for
        for place, node in enumerate(self.graph.nodes):
            if kept and node.prim in _WRITTEN and (rows := self._rows(node)):
                nodes.append(self._tie([*rows[-1:], *kept], node))
                kept = []
            tied = self._waiting(node, self._due(node, before, made, loss))
            if tied:
                made, before = ([x for x in numbers if x not in tied] for numbers in (made, before))
            tied = tied or self._early(node, place)
            if self.ahead:
                tied = [*tied, *self.ahead.held_to(node, self.names)]
            if tied:
                nodes.append(self._tie(tied, node))
                loss = [x for x in loss if x not in tied]
            if loss and node.prim in _WRITTEN and (cotangents := self._cotangents(node)):
                nodes.append(self._tie([*cotangents[-1:], *loss], node))
                loss = []
            read_as(node, self._names(node))
            if node.backward and isinstance(node.eqn, BarrierEqn):
                now = [x for x in made if not self.habits.beside or self.program.values[x].nbytes <= SMALL]
                waited, before = [*before, *now], [x for x in made if x not in now]
                self.names.update(self.program.join(node, {x: self.names.get(x, x) for x in (*waited, *loss)}))
                self.program.join(node, {x: x for x in self._steps_before()})
                self._passed(node)
                made, loss = [], []
            made += [x for x in node.outputs if x in self.finished]
            if self.habits.stepwise:
                self._remember(node)
            if self.ahead:
                self.ahead.passed(node)
            if node.bodies or node.prim in _WRITTEN or not self.waits.isdisjoint(x for x in node.inputs if isinstance(x, int)):
                self.waits.update(node.outputs)
            nodes.append(node)
            kept += [x for x in node.outputs if x in self.sums]
            loss += [x for x in node.outputs if x in self.results and x in self.waits]
        self.graph.nodes = nodes
        self.graph.outputs = renamed(self.graph.outputs, self.names)

    def _tie(self, tied: Sequence[int], near: Node) -> Node:
        """A barrier for what ``tied`` is called now, from which it is read."""
        numbers = [*(self.names.get(x, x) for x in tied), *self._steps_before()]
        barrier, passed = self.program.barrier(list(dict.fromkeys(numbers)), near)
        self.names.update({x: passed[self.names.get(x, x)] for x in tied})
        self._passed(barrier)
        if self.ahead:
            self.ahead.passed(barrier)
        return barrier

    def _remember(self, node: Node) -> None:
        """Of a step that is there: what it read, and what it made."""
        for x in self.unread.keys() & {*node.inputs}:
            del self.unread[x]
        if node.backward and node.prim in _WRITTEN:
            self.unread.update(dict.fromkeys(x for x in node.outputs if self._floating(x)))

    def _steps_before(self) -> list[int]:
        """What a step waits for beside gradients: what nothing has read of steps before it, and those before these."""
        return [*self.unread, *([] if self.step is None else [self.step])]

    def _passed(self, barrier: Node) -> None:
        """What steps after a barrier wait for."""
        self.unread.clear()
        small = [x for x in barrier.outputs if self._floating(x) and self.program.values[x].nbytes <= SMALL] if self.habits.stepwise else []
        self.step = min(small, key=lambda x: self.program.values[x].nbytes, default=None)

    def _names(self, node: Node) -> dict[int, int]:
        """What a node reads instead."""
        read = [x for x in node.inputs if isinstance(x, int)]
        before = {x: made for x in read if (made := self._before(x)) is not None} if node.id in self.summed else {}
        return {x: self.names[x] for x in read if x in self.names} | before

    def _before(self, number: int) -> int | None:
        """A cotangent before the barriers that it has passed; None: it is none."""
        while (node := self.maker.get(number)) is not None and isinstance(node.eqn, BarrierEqn):
            number = node.inputs[node.outputs.index(number)]
        return number if node is not None and node.backward and number not in self.program.origin else None

    def _summed(self) -> set[int]:
        """Nodes of the backward pass that sum, or whose results sums alone read."""
        found: set[int] = set()
        for node in reversed(self.graph.nodes):
            users = [self.graph.nodes[k].id for x in node.outputs for k in self.readers.get(x, ())]
            apart = node.prim.startswith("reduce") or (users and found.issuperset(users) and not node.bodies and node.prim not in _WRITTEN)
            if node.backward and apart and not isinstance(node.eqn, BarrierEqn):
                found.add(node.id)
        return found

    def _results(self, original: Graph) -> set[int]:
        """What is returned of the forward pass alone."""
        forward = itertools.takewhile(lambda node: not node.backward, self.graph.nodes)
        returned = {out for node in forward for out in node.outputs}.intersection(original.outputs)
        return {x for x in returned if self._floating(x) and self.values[x].nbytes <= SMALL}

    def _sums(self) -> set[int]:
        """Values of the forward pass that the backward pass reads, and no operation before it, made of the sum of what it does not read."""
        backward = {x for node in self.graph.nodes if node.backward for x in node.inputs}
        written = (node for node in self.graph.nodes if not node.backward and (node.bodies or node.prim in _WRITTEN))
        read = {x for node in written for x in node.inputs if isinstance(x, int)}
        return {x for x in backward if isinstance(x, int) and x not in read and self._is_sum(x, backward)}

    def _is_sum(self, number: int, backward: Set) -> bool:
        """Whether a value is a sum, or made of one elementwise, and what is summed is much larger and not read by the backward pass."""
        node = self.values[number].producer if number in self.values else None
        while node is not None and not node.backward and len(node.inputs) == 1 and isinstance(x := node.inputs[0], int):
            if self.values[x].nbytes > 8 * self.values[number].nbytes:
                return node.prim.startswith("reduce") and x not in backward
            node = self.values[x].producer
        return False

    def _rows(self, node: Node) -> list[int]:
        """Arrays of the forward pass that depend on the batch and that an operation of it reads, the largest last."""
        read = [] if node.backward else [x for x in node.inputs if isinstance(x, int) and x in self.waits and self._floating(x)]
        return sorted(read, key=lambda x: self.values[x].nbytes)

    def _due(self, node: Node, before: list[int], made: list[int], loss: list[int]) -> list[int]:
        """What a node has to wait for, of what is there and nothing has waited for."""
        step = node.prim in _WRITTEN and self.finished.isdisjoint(node.outputs)
        if node.bodies or (step and self.habits.stepwise):
            return [*before, *made, *loss]
        due = [x for x in (*before, *made) if x in self.short] if step and self.short else []
        runs_on = self.habits.lags and due and self.program.values[due[-1]].nbytes > SMALL
        return due[:-1] if runs_on else due

    def _waiting(self, node: Node, made: list[int]) -> list[int]:
        """The largest cotangent that a loop or operation of the backward pass begins with, and the gradients made before it."""
        cotangents = self._cotangents(node) if made and node.backward else []
        return [*cotangents[-1:], *made] if cotangents else []

    def _cotangents(self, node: Node) -> list[int]:
        """Arrays of the backward pass that a node reads, the largest last."""
        waiting = [
            x for x in node.inputs if isinstance(x, int) and self.ripe.get(x, -1) >= 0 and self.values[x].shape and self._floating(x)
        ]
        backward = [x for x in waiting if (p := self.values[x].producer) is not None and p.backward]
        return sorted(backward, key=lambda x: self.values[x].nbytes)

    def _early(self, node: Node, place: int) -> list[int]:
        """The smallest array that an early operation reads, and something no larger than its result that waits for the forward pass."""
        read = [x for x in node.inputs if isinstance(x, int) and self.values[x].shape]
        if not self.habits.strays or not node.backward or node.prim not in _WRITTEN or not self.waits.isdisjoint(read):
            return []
        tie = cotangent_at(self.program, self.graph, place, self.phase, self.readers, self.position, self.ripe)
        if not read or tie is None or self.program.values[tie].nbytes > self.values[node.outputs[0]].nbytes:
            return []  # what passes a barrier is written for it
        return [min(read, key=lambda x: self.values[x].nbytes), tie]

    def _floating(self, number: int) -> bool:
        return jnp.issubdtype(self.program.values[number].dtype, jnp.floating)
