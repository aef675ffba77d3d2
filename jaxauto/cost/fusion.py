"""What a compiler materialises: buffers, when they live, and the bytes that move between them and HBM.

The rules are those of XLA's instruction fusion, in outline (instruction_fusion.cc, ComputeGloballyUnfusible): an elementwise equation is
made again inside each of its consumers, unless that would read more arrays than its result is: what is made of two wide arrays gets a
buffer where it fans out. So do random bits, and on CPU transcendentals, which take long to make (``MADE_ONCE``). Dots, convolutions,
gathers, loops and reductions write buffers and, reductions excepted, read them; a loop makes a broadcast constant inside its body.
On TPU dots and convolutions fuse too, see ``clusters.py``; XLA:GPU's kernels, sums of rows in them: ``kernels.py``; XLA:CPU's types:
``widened.py``; stacks: ``stacks.py``.

What shares memory (buffer assignment, in outline; each line names the function that does it):
- an output that reuses a donated input, and the loop carry or branch result that becomes it, takes no memory of its own     ``order.py``
- a fused equation, an update slice or a scatter writes over the operand of its size that dies there        ``liveness.take_over``
- a loop writes over its initial carry if nothing else reads that, and a trip over the carry of the trip before             ``loop``
- a trip's slice of a stacked result is written where the stack has it                                                      ``loop``
What only the optimizer does is scheduled as soon as its gradient is there, as schedulers that count memory do              ``order.py``
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from jaxauto.core import OPERATIONS, Graph, Kind, Link, LinkKind, Node, OpRule, Value
from jaxauto.cost.clusters import FUSING, Clusters
from jaxauto.cost.depth_first import Written, depth_first
from jaxauto.cost.kernels import Kernels
from jaxauto.cost.liveness import Beside, Buffers, fill_early, fill_together, take_over
from jaxauto.cost.order import in_donated, schedule, short_sums
from jaxauto.cost.patterns import (
    is_bound,
    is_given,
    is_narrowed_image,
    is_of_images,
    is_only_narrowed,
    is_shared,
    is_shifted,
    is_softmax,
    is_spread_twice,
    is_strided,
    is_written_wide,
    keeps_exp,
    pads_for_dots,
    slides,
)
from jaxauto.cost.stacks import is_cut_inside, share_of, stack_passes
from jaxauto.cost.widened import WIDE, Rounded, is_in_steps, is_merged, is_narrow
from jaxauto.flow import is_widening
from jaxauto.graph import walk
from jaxauto.masks import hashes, kept_masks
from jaxauto.rewrite.away import fetched
from jaxauto.rewrite.narrow import only_multiplied

_WRITES = frozenset({Kind.DOT, Kind.CONV, Kind.GATHER, Kind.SCATTER, Kind.SCAN, Kind.OPAQUE, Kind.CONTROL, Kind.REDUCE})
_READS = _WRITES - {Kind.REDUCE}
_MAX_ROOTS = 32
# What a compiler does not make again for each reader. Seen in schedules: TPU keeps scores and makes exp(scores) twice, CPU keeps the exp.
MADE_ONCE = {
    "cpu": frozenset({Kind.EXPENSIVE}),
    "gpu": frozenset({Kind.RANDOM}),
    "tpu": frozenset({Kind.RANDOM}),
}


def find_buffers(
    graph: Graph,
    rules: dict[int, OpRule],
    aliased: frozenset[int] = frozenset(),
    platform: str = "tpu",
    bytes_per_flop: float = 0.0,
    ops_per_byte: float = 0.0,
    *,
    devices: int = 1,
    held: Graph | None = None,
) -> Buffers:
    """The buffers of a program.

    Args:
      graph: the program.
      rules: node id → rule, control flow excepted.
      aliased: output values that reuse the buffer of a donated input.
      platform: whose compiler: ``"tpu" | "gpu" | "cpu"``.
      bytes_per_flop: what HBM moves while the matrix unit does one flop.
      ops_per_byte: what the vector unit does while HBM moves a byte.
      devices: that the program is spread over; on one, no gradient is summed before the optimizer has it.
      held: on CPU, ``graph`` as the compiler is given it, with the barriers that hold it to an order, if any: it is told as that runs it,
        depth first. None: in the order of ``graph``.
    """
    make = partial(_Fusion, graph, rules, aliased, platform, bytes_per_flop, ops_per_byte, devices)
    first = make()
    buffers = first.run()
    if held is None or first.rounded is None:
        return buffers
    written = frozenset(first.start)
    again = written & first.virtual.keys()
    order = depth_first(held, Written(written, again, first.reads_array, first.rounded.made_of))
    return make(order).run()


class _Fusion:
    def __init__(
        self,
        graph: Graph,
        rules: dict[int, OpRule],
        aliased: frozenset[int],
        platform: str,
        rate: float,
        vector_rate: float,
        devices: int,
        order: Mapping[int, int] | None = None,
    ):
        """``order``: node → place among those of its graph; None: see ``schedule``."""
        self.graph, self.rules, self.aliased = graph, rules, aliased
        self.made_once = MADE_ONCE[platform]
        self.platform, self.ops_per_byte, self.alone = platform, vector_rate, devices == 1
        self.values = graph.values
        self.narrowed = {*only_multiplied(graph)} if platform == "tpu" else set()
        self.drawn = kept_masks(graph) if platform == "tpu" else frozenset()
        self.virtual: dict[int, frozenset[int]] = {}  # value → roots it is recomputed from
        self.made_twice: dict[int, frozenset[int]] = {}  # stored for a stack; a dot makes it once more, from these
        self.costly: set[int] = set()
        self.heavy: set[int] = set()  # virtual, and a transcendental is part of it
        self.dear: set[int] = set()  # those of a softmax that is made again too, and quotients
        self.moved: dict[int, bool] = {}  # virtual, and its elements lie elsewhere in its roots; whether in another order of dimensions
        self.clusters = Clusters(graph.values, rules, self.narrowed, rate, alone=self.alone) if platform == "tpu" else None
        self.rounded = Rounded(self.kind, self.values) if platform == "cpu" else None
        self.kernels = Kernels(graph.values, self.kind, devices) if platform == "gpu" else None
        self.hides = platform != "cpu" and (devices > 1 or bool(fetched(graph)))  # collectives, copies from the host
        short = short_sums(graph, devices) if self.kernels and devices > 1 else set()
        self.delayed = (lambda node: self.kind(node) in FUSING and node.id not in short) if self.hides else None
        self.reads: dict[int, float] = {}
        self.start: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.position: dict[int, int] = {}
        self.loop_start: dict[int, int] = {}
        self.read_at: dict[int, list[int]] = {}
        self.writers: list[tuple[int, int, frozenset[int]]] = []  # position, value, operands whose memory it may take over
        self.bound: set[int] = set()  # results of loop bodies
        self.summed: set[int] = set()  # on TPU: the exp of a softmax
        self.copied: dict[int, int] = {}  # slices of stacks that are copied as a whole before the loop, and the stacks
        self.beside: dict[int, Beside] = {}
        self.shared: dict[int, set[int]] = {}  # value → what its kernel reads for others too
        self.in_place: set[int] = set()  # shares another buffer's memory from the start
        self.order = order
        self.clock = 0
        self.kinds = {node.id: self._kind(node) for node in walk(graph)}
        self.unwritten = {*graph.inputs, *graph.consts}
        self.partly: dict[int, float] = {}  # stack → which part of it the loop that makes it writes
        self.carried: set[int] = set()  # what a loop's trips hand on
        self.through: set[int] = set()  # results of loops that a loop in them made: what goes round both is in one place

    def kind(self, node: Node) -> Kind:
        return self.kinds[node.id]

    def _kind(self, node: Node) -> Kind:
        known = node.id in self.rules and "space" not in node.params and not (self.clusters and is_strided(node))
        kind = self.rules[node.id].kind if known else Kind.CONTROL
        if kind is Kind.REDUCE and node.eqn.invars[0].aval.size == node.eqn.outvars[0].aval.size:
            return Kind.VIEW
        return kind

    def run(self) -> Buffers:
        outputs = {x for x in self.graph.outputs if isinstance(x, int)}
        inputs = {*self.graph.inputs, *self.graph.consts}
        fixed = inputs | outputs
        self.in_place |= in_donated(self.graph, self.aliased)
        for number in inputs:
            self.start[number] = 0
        self.visit(self.graph, outputs, outputs)
        end = self.clock
        for root in (final := {root for number in outputs for root in self.roots(number)}):
            self.touch(root, end)
        self.last.update(dict.fromkeys(inputs, end))
        written = self.merge(inputs)
        in_tuple = frozenset(self.clusters.in_tuple if self.clusters else ())
        kept = inputs | self.in_place | in_tuple  # none of one fusion's several results
        if self.kernels:
            fill_together(self.graph, self.start, self.in_place)
        if self.hides:
            fill_early(self.graph, self.start, self.position, self.in_place, backward=self.platform == "gpu")
        writers = [(at, n, roots - self.shared.get(n, set())) for at, n, roots in self.writers if n not in self.in_place]
        take_over(writers, partial(self.bytes_of, fixed), self.start, self.last, kept)
        ids, nowhere = np.array(sorted(self.start), int), self.unwritten | self.through
        last = [self.start[n] - 1 if n in self.in_place else self.last.get(n, self.start[n]) for n in ids]
        return Buffers(
            ids=ids,
            bytes_=np.array([self.bytes_of(fixed, n) for n in ids], float),
            start=np.array([self.start[n] for n in ids], int),
            end=np.array(last, int),
            reads=np.array([self.reads.get(n, 0) for n in ids], float),
            written=np.array([0.0 if n in nowhere else written.get(n, self.partly.get(n, 1.0)) for n in ids], float),
            is_input=np.array([n in inputs for n in ids], bool),
            is_output=np.array([n in final for n in ids], bool),
            length=end + 1,
            position=self.position,
            loop_start=self.loop_start,
            read_at=self.read_at,
            stored=frozenset(n for n in self.start if n not in self.unwritten),
            held=self.clusters.held if self.clusters else {},
            beside=self.beside,
            in_tuple=in_tuple,
            copies=frozenset(n for n in self.start if self.rounded and n not in fixed and self.rounded.is_copy(self.values[n])),
        )

    def bytes_of(self, fixed: set[int], number: int) -> float:
        """Bytes of a buffer; arguments and results, also those of loops, have the type they are said to have; on CPU those of barriers."""
        value = self.values[self.copied.get(number, number)]
        if number in self.narrowed and number not in fixed and not is_given(value):
            return value.nbytes / 2
        keeps = number in fixed or (is_bound(value) and not (self.rounded and self.rounded.is_wide_alone(value)))
        if self.rounded and number in self.copied:
            return float(WIDE * value.elements)
        return self.rounded.bytes_of(value, self.reads.get(number, 0)) if self.rounded and not keeps else value.nbytes

    def visit(self, graph: Graph, outputs: set[int], loose: set[int]) -> None:
        for node in self.ordered(graph, loose):
            if node.bodies:
                self.loop(node)
                continue
            if node.prim == "optimization_barrier":
                self.pass_barrier(node)
                continue
            self.clock += 1
            self.position[node.id] = self.clock
            kind = self.kind(node)
            if self.clusters and kind in FUSING:
                self.clusters.dots.append(self.clock)
            if kind in _READS:  # operations are charged for their operands where their strategy is known
                for x in node.inputs:
                    if not isinstance(x, int):
                        continue
                    if self.clusters:
                        self.clusters.use(self.roots(x) | ({x} & self.start.keys()))
                    if kind in OPERATIONS:
                        self.read_array(node, x)
                        if self.rounded:
                            self.rounded.passed |= self.roots(x)
                        if self.clusters and (made_of := self.virtual.get(x, self.made_twice.get(x))) is not None:
                            self.clusters.feed(node, x, made_of)
                            for root in made_of:
                                self.touch(root, self.clock)
                    else:
                        self.read(x, self.clock)
                        self.read_at.setdefault(node.id, []).extend(self.roots(x))
            for number in node.outputs:
                self.define(node, number, kind, outputs)

    def ordered(self, graph: Graph, loose: set[int]) -> list[Node]:
        """The nodes of a graph as they run."""
        if (order := self.order) is not None:
            return sorted(graph.nodes, key=lambda node: order[node.id])
        reads = (lambda node: self.kind(node) in _READS) if self.clusters else None
        delayed = self.delayed if self.kernels or graph is not self.graph else None
        return schedule(graph, reads, delayed, loose, alone=self.alone)

    def pass_barrier(self, node: Node) -> None:
        """What passes is in memory, and stays where it is."""
        self.clock += 1
        self.position[node.id] = self.clock
        for x, out in zip(node.inputs, node.outputs, strict=True):
            if isinstance(x, int):
                self.keep_alive(x, self.clock)
                self.virtual[out] = self.roots(x)
                if self.clusters:
                    self.clusters.use(self.roots(x))

    def define(self, node: Node, number: int, kind: Kind, outputs: set[int]) -> None:
        value = self.values[number]
        operands = [x for x in node.inputs if isinstance(x, int)]
        roots = self.roots(operands[0]) if len(operands) == 1 else frozenset().union(*map(self.roots, operands))
        inside = self.kernels is not None and kind is Kind.REDUCE and self.kernels.is_inside(node, number, outputs, self.virtual)
        fused = [] if (writes := kind in _WRITES and not inside) else [x for x in operands if x in self.virtual]
        once = self.kernels.is_made_once(node) if self.kernels else self.rounded is not None and self.rounded.is_made_once(node, value)
        dear = kind in self.made_once or once
        if dear or not self.costly.isdisjoint(fused):
            self.costly.add(number)
        below = self.heavy.intersection(fused)
        if any(2 * self.values[x].elements >= value.elements for x in below):  # that of a row is made apart
            self.heavy.add(number)
        divides = node.prim == "div" and isinstance(node.inputs[1], int)
        if divides or any(2 * self.values[x].elements >= value.elements for x in self.dear.intersection(fused)):
            self.dear.add(number)
        if kind is Kind.EXPENSIVE:
            self.meet_expensive(value, roots)
        carried = [x for x in operands if x in self.moved]
        turned = any(self.moved[x] for x in carried)  # orders everything that it is part of
        moved = turned or (kind is Kind.MOVE and not self.is_layout(node))
        moved = moved or any(2 * self.values[x].elements >= value.elements for x in carried)
        if self.kernels:
            self.kernels.meet(node, number, operands, self.virtual)
        apart = self.clusters is not None and self.clusters.moving.meet(node, number, self.virtual, roots)
        if self.rounded and kind is Kind.REDUCE and is_in_steps(node):
            self.write_for_one(operands)
        drawn = number in self.drawn or (self.rounded and hashes(node))
        joined = self.clusters is not None and self.clusters.moving.is_joined(value)
        wanted = writes or drawn or apart or joined or any(self.is_read(value, u, roots) for u in value.users)
        if not wanted and (wanted := number in outputs) and number not in self.heavy:
            self.made_twice[number] = roots
        if self.kernels:
            wanted = wanted or self.kernels.writes(node, number, outputs, self.virtual)
        fans_out = not (wanted or inside) and self.fans_out(value, roots)
        fans_out = fans_out and not (self.kernels and self.kernels.stays(number, outputs))
        if fans_out and (narrow := self.narrow(node)) is not None:
            made_of = self.virtual.pop(narrow)
            self.keep(node, narrow, made_of)
            self.virtual[number] = frozenset((narrow,))
        elif wanted or fans_out:
            self.keep(node, number, roots if kind not in _READS else None, wanted=wanted, returned=number in outputs)
            if kind in OPERATIONS:
                self.unwritten.add(number)
            if kind is Kind.SCATTER or node.prim == "dynamic_update_slice":
                self.writers.append((self.clock, number, self.roots(operands[0]) if operands else roots))
            elif not (writes or moved or apart or (self.kernels and self.kernels.writes_beside(value))):
                over = frozenset(x for x in roots if not is_merged(self.values[x])) if self.rounded else roots
                self.writers.append((self.clock, number, over))
        else:
            self.virtual[number] = roots
            if moved:
                self.moved[number] = turned or node.prim == "transpose"

    def meet_expensive(self, value: Value, roots: frozenset[int]) -> None:
        """A transcendental, which may be a softmax's exp."""
        sums = [u for u in value.users if self.kind(u) is Kind.REDUCE] if self.clusters else []
        softmax = is_softmax(value, sums)
        shifted = not softmax and is_shifted(value, self.values)
        self.dear.add(value.id)
        if not softmax and not shifted:
            self.heavy.add(value.id)
        elif self.clusters:
            self.meet_softmax(value, roots, sums if softmax else [])

    def meet_softmax(self, value: Value, roots: frozenset[int], sums: list[Node]) -> None:
        """An exp that ``sums`` sum, or that is made again where those are kept: is it written?"""
        written = keeps_exp(value, roots, sums, self.values) if sums else is_written_wide(value, roots, self.values)
        if written:
            self.summed.add(value.id)
        elif sums and self.clusters:
            self.clusters.apart.add(value.id)

    def narrow(self, node: Node) -> int | None:
        """What is kept of a fused result, where that is not the result itself: what is widened."""
        for x in node.inputs:
            if isinstance(x, int) and x in self.virtual and not self.rounded and is_widening(node, self.values):
                return x
        return None

    def keep(self, node: Node, number: int, roots: frozenset[int] | None, *, wanted: bool = True, returned: bool = False) -> None:
        """Give a value a buffer.

        ``roots``: what a fused one is made of; ``wanted``: by others than fused equations; ``returned``: from its graph.
        """
        if roots is not None:
            for root in roots:
                self.touch(root, self.clock) if self.clusters or self.kernels else self.read_root(root, self.clock)
            if self.clusters:
                self.clusters.store(number, roots, self.clock)
                self.keep_both(self.values[number], roots)
            if self.kernels:
                self.kernels.store(number, roots, self.clock, wanted=wanted, stacked=number in self.in_place)
            self.read_at.setdefault(node.id, []).extend(roots)
            value = self.values[number]
            if self.rounded and not returned and not self.fans_out(value, roots) and self.rounded.makes_again(value):
                self.virtual[number] = roots
        self.start[number] = self.clock
        self.last[number] = self.clock

    def keep_both(self, value: Value, roots: frozenset[int]) -> None:
        """What XLA:TPU keeps wide or narrow for one reader, and has all others make."""
        if self.is_gathered_wide(value, roots):
            self.virtual[value.id] = roots
        padded = (pads_for_dots(u, self.values) and is_only_narrowed(self.values[u.outputs[0]], self.values) for u in value.users)
        moved = self.clusters is not None and value.id in self.clusters.moving.passes and is_only_narrowed(value, self.values)
        if moved or (value.users and all(padded)):
            self.narrowed.add(value.id)

    def write_for_one(self, operands: list[int]) -> None:
        """What one kernel reads has memory while it runs; all others make it again."""
        for x in operands:
            if x in self.virtual and x not in self.start:
                self.start[x] = self.last[x] = self.clock

    def is_layout(self, node: Node) -> bool:
        """Whether a transposition moves nothing: that of a dot's result, which is written so; on CPU into a dot too, on TPU any."""
        if node.prim != "transpose":
            return False
        made = self.values[x].producer if isinstance(x := node.inputs[0], int) else None
        if made is not None and self.kind(made) is Kind.DOT:
            return True
        users = self.values[node.outputs[0]].users
        return self.kernels is None and (not self.rounded or (bool(users) and all(self.kind(u) is Kind.DOT for u in users)))

    def is_read(self, value: Value, user: Node, roots: frozenset[int]) -> bool:
        """Whether ``user`` wants the value in memory: a loop makes a constant again that is much smaller before it is broadcast."""
        if user.prim == "optimization_barrier":
            return not (self.rounded and user.backward)  # what is read to be made again goes through a select there, which fuses
        if self.clusters and pads_for_dots(user, self.values):
            return True
        if self.kind(user) not in _READS:
            return False
        if self.kernels and self.kind(user) is Kind.GATHER and user.inputs[0] == value.id:
            return value.id in self.kernels.rows  # of anything else the elements are made that are gathered
        if self.clusters and self.kind(user) in FUSING:
            if slides(user) and any(self.kind(u) is Kind.REDUCE for u in value.users):
                return True  # a bias's gradient: written beside the sum
            if is_of_images(value, user, roots, self.values) or is_narrowed_image(value, user, self.values):
                return True
            readers = [u for u in value.users if self.kind(u) in FUSING]
            dots = [u for u in readers if not slides(u)]
            wide = {r for r in roots if 2 * self.values[r].elements >= value.elements}
            if len(readers) < 2 or (wide and wide <= self.summed):  # of exps that are kept each dot makes its probabilities
                return False
            slow = len(dots) > 1  # windows make what they read however long that takes
            dear = slow and (value.id in self.dear or is_spread_twice(value, roots, self.values))
            unread, unwritten = self.clusters.made_with(value, roots)
            known = partial(is_shared, narrowed=self.narrowed, unread=unread, unwritten=unwritten, ops_per_byte=self.ops_per_byte)
            return known(value, roots, self.values, len(dots if slow else readers), dear=dear)
        if not user.bodies or any(link.source == value.id and link.kind is not LinkKind.CONST for link in user.links):
            return True
        return 2 * sum(self.values[r].nbytes for r in roots) > value.nbytes

    def is_gathered_wide(self, value: Value, roots: frozenset[int]) -> bool:
        """Whether gathers alone need a value that is but widened: XLA:TPU writes it for them, and all others read what it is made of."""
        if len(roots) != 1 or any(value.id in known for known in (self.costly, self.dear)):
            return False
        (root,) = roots
        if 2 * self.values[root].dtype.itemsize != value.dtype.itemsize:
            return False
        wanted = [user for user in value.users if self.is_read(value, user, roots)]
        gathers = all(self.kind(user) is Kind.GATHER for user in wanted)
        return gathers and 0 < len(wanted) < len(value.users)

    def fans_out(self, value: Value, roots: frozenset[int]) -> bool:
        if self.clusters and self.clusters.narrows(value, roots):
            return True
        if value.id in self.summed or (self.rounded and self.rounded.is_part_of_a_power(value)):
            return True
        if len(value.users) < 2 or sum(self.clusters is None or self.kind(u) not in FUSING for u in value.users) < 2:
            return False
        slices = self.clusters.slices if self.clusters else ()  # made where they are read
        least = value.nbytes / 2 if self.kernels else 0  # what a mask takes beside float32 is little
        wide = [r for r in roots if 2 * self.values[r].elements >= value.elements and r not in slices]
        wide = [n for r in wide if (n := self.values[r].nbytes) >= least]
        moves_more = len(wide) > 1 and (self.clusters is None or sum(wide) > value.nbytes)
        if self.kernels and self.kernels.is_compared(value):
            moves_more = sum(wide) > 3 * value.nbytes  # read by two kernels; or read, written and read by both
        return value.id in self.costly or moves_more or len(roots) > _MAX_ROOTS

    def roots(self, number: int) -> frozenset[int]:
        made_of = self.virtual.get(number)
        return frozenset((number,)) if made_of is None else made_of

    def read_array(self, node: Node, number: int) -> None:
        """An operation reads a value, of which there is more than one array where fusions make it again."""
        if self.rounded and number in self.virtual and number in self.start and self.rounded.reads(node, self.values[number]):
            self.touch(number, self.clock)
        else:
            self.keep_alive(number, self.clock)

    def reads_array(self, node: Node, number: int) -> bool:
        """Whether an operation reads the array that is written of a value which fused readers make for themselves."""
        if self.kind(node) not in OPERATIONS:
            return is_in_steps(node)
        return self.rounded is not None and self.rounded.reads(node, self.values[number])

    def touch(self, number: int, at: int) -> None:
        if number in self.start:
            self.last[number] = max(self.last.get(number, 0), at)

    def read_root(self, root: int, at: int, share: float = 1.0) -> None:
        self.reads[root] = self.reads.get(root, 0) + share
        self.touch(root, at)

    def read(self, number: int, at: int, share: float = 1.0) -> None:
        for root in self.roots(number):
            self.read_root(root, at, share)

    def keep_alive(self, number: int, at: int) -> None:
        for root in self.roots(number):
            self.touch(root, at)
        if self.clusters:  # a gather's own, see ``is_gathered_wide``
            self.touch(number, at)

    def merge(self, inputs: set[int]) -> dict[int, float]:
        """What goes straight into a fusion takes no buffer, and on TPU flops hide traffic; how much of each buffer is written."""
        kept = {r for x in {*inputs, *self.bound, *(o for o in self.graph.outputs if isinstance(o, int))} for r in self.roots(x)}
        if self.kernels:
            found = self.kernels.found(self.start)
        elif self.clusters:
            found = self.clusters.found(self.start, kept)
        else:
            return {}
        self.beside, self.shared = found.beside, found.shared
        for number, at in found.absorbed.items():
            producer = self.values[number].producer
            for x in producer.inputs if producer else ():
                if isinstance(x, int):
                    self.keep_alive(x, at)
            self.start.pop(number, None)
        self.start.update(self.clusters.together(self.start) if self.clusters else {})
        for root, amount in found.reads.items():
            if root not in self.copied:
                self.reads[root] = self.reads.get(root, 0.0) + amount
        return found.written

    def copy_summed(self) -> None:
        """A fusion with a sum in it does not write into a stack: that is one more pass."""
        for x in self.in_place & self.summed:
            self.in_place.discard(x)
            self.reads[x] = self.reads.get(x, 0) + 1

    def enter(self, node: Node, begin: int, inside: list[Link]) -> None:
        """A loop reads its operands; slices that operations alone read are theirs to charge. ``inside``: what loops in its body go over."""
        charged = {link.source for link in node.links if link.kind is LinkKind.XS and (self.clusters or self.is_operand(link.target))}
        charged |= {link.source for link in node.links if link.kind is LinkKind.OVER}
        charged |= {link.source for link in node.links if link.kind is LinkKind.INIT} & self.carried
        charged |= {link.source for link in inside}
        share = {link.source: share_of(node, self.values[link.source]) for link in node.links if link.kind is LinkKind.XS}
        for x in (x for x in node.inputs if isinstance(x, int)):
            self.keep_alive(x, begin) if x in charged else self.read(x, begin, share.get(x, 1.0))
            if self.clusters:
                self.clusters.use(self.roots(x))
        if self.clusters:
            for link in (e for e in node.links if e.kind is LinkKind.XS):
                self.clusters.cut(link.target, self.roots(link.source), float(link.source not in charged), share[link.source])
            for link in inside:
                self.clusters.cut(link.target, self.roots(link.source), 0.0, node.trips)
        for number, passes in stack_passes(node, self.values, self.platform, self.kind):
            for root in self.roots(number):
                self.reads[root] = self.reads.get(root, 0) + passes

    def cut_inside(self, node: Node) -> list[Link]:
        """Stacks that loops in the body go over."""
        given = (link for link in node.links if link.kind in (LinkKind.CONST, LinkKind.INIT))
        return [link for link in given if is_cut_inside(self.values, link.target)]

    def turn_stacks(self, node: Node) -> dict[int, int]:
        """Stacks that a loop wants in another order, or wider, are copied before it, one by one: its slice of each, and when."""
        turned: dict[int, int] = {}
        wider = [e for e in node.links if e.kind is LinkKind.XS and self.rounded and is_narrow(self.values[e.source])]
        for link in self.kernels.enter(node.links) if self.kernels else wider:
            self.clock += 1
            self.keep_alive(link.source, self.clock)
            self.reads[link.source] = self.reads.get(link.source, 0) + 2  # read and written
            turned[link.target], self.copied[link.target] = self.clock, link.source
        return turned

    def copy_out(self, number: int, sliced: set[int]) -> None:
        """XLA:GPU copies a slice of a stack out for the operations that read it, and it is there from the first of them to the last."""
        readers = [self.position.get(user.id) for user in self.values[number].users if self.kind(user) in OPERATIONS]
        if self.kernels and number in sliced and (at := [p for p in readers if p is not None]):
            self.start[number], self.last[number] = min(at), max(at)
            self.reads.pop(number, None)

    def is_operand(self, number: int) -> bool:
        """Whether operations, and nothing else, read a value."""
        users = self.values[number].users
        return bool(users) and all(self.kind(user) in OPERATIONS for user in users)

    def loop(self, node: Node) -> None:
        """A body's positions come before its node's own; what it reads from outside is alive until then, initial carries excepted."""
        self.clock += 1
        begin = self.loop_start[node.id] = self.clock
        stacked = {link.target: link.source for link in node.links if link.kind is LinkKind.YS}
        shared = {link.target for link in node.links if link.kind in (LinkKind.CONST, LinkKind.XS)}
        sliced = {link.target for link in node.links if link.kind is LinkKind.XS}
        inside = self.cut_inside(node)
        self.enter(node, begin, inside)
        turned = self.turn_stacks(node)
        made = {link.target for link in node.links if link.kind is LinkKind.CONST and link.source in self.virtual}  # in each trip
        for body in node.bodies:
            outputs = {x for x in body.outputs if isinstance(x, int)}
            self.bound |= outputs
            for number in body.inputs:
                self.start[number] = begin + 1
                self.unwritten.add(number)
            self.carried |= {link.target for link in node.links if link.kind is LinkKind.INIT}
            looped = {out for inner in body.nodes if inner.bodies for out in inner.outputs}
            self.through |= {link.target for link in node.links if link.kind is LinkKind.FINAL and link.source in looped}
            self.virtual.update({link.target: frozenset() for link in node.links if link.target in made})
            self.in_place |= {x for x in outputs & {*stacked.values()} if body.outputs.count(x) == 1 and x not in body.inputs}
            self.visit(body, outputs, {*stacked.values()})
            self.copy_summed()
            for x in outputs:
                if x not in self.in_place:
                    self.touch(x, self.clock)
            for number in body.inputs:  # a constant is the outer buffer; a slice of xs is read in place
                if number in turned:
                    self.start[number], self.last[number] = turned[number], self.clock + 1
                    self.reads.pop(number, None)
                elif number in shared:
                    self.start.pop(number, None)
                    self.copy_out(number, sliced)
                else:
                    self.last.setdefault(number, begin + 1)
        for link in inside:
            for root in self.roots(link.source):
                self.reads[root] = self.reads.get(root, 0) + node.trips * self.reads.get(link.target, 0)
        if self.kernels:
            self.kernels.leave(node.links)
        self.clock += 1
        self.position[node.id] = self.clock
        gone = {link.source for link in node.links if link.kind in (LinkKind.INIT, LinkKind.OVER) or link.target in turned}
        over = {link.target for link in node.links if link.kind is LinkKind.OVER}
        self.partly.update({x: share_of(node, self.values[x]) for x in over})
        held = {link.source for link in node.links if link.target in shared - turned.keys()}
        for x in node.inputs:
            if isinstance(x, int) and (x not in gone or x in held):
                self.keep_alive(x, self.clock)
        for number in node.outputs:
            self.start[number] = begin + (number in over) if number in stacked else self.clock
            self.last[number] = self.clock
            if stacked.get(number) in self.in_place:  # each trip has written its slice
                self.unwritten.add(number)
