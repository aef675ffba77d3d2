"""What experts do by hand, and models in which it is the best: one table, for the tests and for scripts/discovery.py.

A case is a plain step, a target with a mesh, and a memory budget where memory is the reason: what a user gives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import jaxauto
from discovery.models import Decoder, convnet, decoder, dlrm, ensemble, mlp_tower
from jaxauto import hlo, verify

Mi = 2**20
DATA, MODEL = ("data",), ("model",)
SPLIT = "split"  # over all devices, along whichever dimension

Dims = tuple[int, ...]
Key = tuple[str, tuple[str, ...] | None, bool]


@dataclasses.dataclass
class Moved:
    """Traffic of one kind in one step.

    Attributes:
      elements: of the whole array on one group of devices, summed over all calls; other than bytes they do not depend on the type that a
        compiler sends them in. calls: in one step.
      arrays: (operand, result) on one device → calls.
    """

    elements: float = 0.0
    calls: float = 0.0
    bytes_: float = 0.0
    arrays: dict[tuple[Dims, Dims], float] = dataclasses.field(default_factory=lambda: defaultdict(float))


@dataclasses.dataclass(frozen=True)
class Expected:
    """``elements`` of one kind, along ``axes``, in loops or outside, within 2 %; ``calls``: exactly so many, None: any number."""

    kind: str
    axes: tuple[str, ...]
    inside: bool
    elements: float
    calls: int | None = None

    @property
    def key(self) -> Key:
        return self.kind, self.axes, self.inside


@dataclasses.dataclass(frozen=True)
class Case:
    """See the module's head.

    Attributes:
      specs: globs over argument paths → the sharding that tells, or SPLIT.
      moves: the traffic that the strategy is. rest: elements that all other collectives of the compiled program may move together.
      compiled_for: another target with as many devices, whose compiler is faster.
    """

    name: str
    model: str
    made: Callable[[], tuple[Callable, tuple]]
    target: str
    mesh: Mapping[str, int]
    specs: Mapping[str, P | str]
    moves: tuple[Expected, ...]
    rest: float
    memory_budget: str | None = None
    compiled_for: str = ""


# ------------------------------------------------------------------------------------------------------ plan and compile


@functools.cache
def planned(name: str) -> Any:
    """The plan of a case, made once."""
    case = CASES[name]
    step, args = case.made()
    options = {"target": case.target, "mesh": dict(case.mesh), "memory_budget": case.memory_budget}
    return jaxauto.plan(step, *args, certify=False, progress=False, **options)


@functools.cache
def compiled(name: str) -> hlo.Module:
    """The compiled program of a case."""
    plan, other = planned(name), CASES[name].compiled_for
    return hlo.parse(verify.compile_plan(dataclasses.replace(plan, target=other) if other else plan).text)


@functools.cache
def traffic(name: str) -> dict[Key, Moved]:
    """All collectives of the compiled program by (what they are for, mesh axes, whether in a loop)."""
    module, mesh = compiled(name), dict(CASES[name].mesh)
    looped = in_loops(module)
    found: dict[Key, Moved] = defaultdict(Moved)
    for c in module.collectives:
        axes = hlo.mesh_axes(c, mesh)
        if axes == ():
            continue
        computation = module.computations[c.computation]
        instruction = computation.by_name[c.name]
        operands = computation.operand_shapes(instruction)
        moved = found[c.role, axes, c.computation in looped]
        moved.elements += c.role_bytes / c.operand_bytes * sum(s.elements for s in operands) * c.count
        moved.bytes_ += c.role_bytes * c.count
        moved.calls += c.count
        for before, after in zip(operands, instruction.shapes[-len(operands) :], strict=True):  # the first half of a -start is the operands
            moved.arrays[before.dims, after.dims] += c.count
    return dict(found)


def in_loops(module: hlo.Module) -> set[str]:
    """Computations that run inside a loop."""
    looped: set[str] = set()
    todo = [loop.body for loop in module.loops.values()]
    while todo:
        name = todo.pop()
        if name not in looped:
            looped.add(name)
            todo += [called for _, _, called, _ in module.calls(module.computations[name])]
    return looped


# ------------------------------------------------------------------------------------------------------------- the cases

TOWER = functools.partial(mlp_tower, 1024, 4096, 16, 12288, stored=jnp.bfloat16, optimizer=optax.sgd(0.1, momentum=0.9))
WEIGHTS = 2 * 16 * 1024 * 4096  # of the tower: 128 M
LADDER = ("data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3")  # one model, less and less memory


def rung(name: str, budget: str | None, specs: Mapping[str, P | str], *moves: Expected) -> Case:
    """A case of the tower on two nodes."""
    model = "16 pairs of 1024 × 4096, momentum, bfloat16; 768 rows a device"
    return Case(name, model, TOWER, "h100:2x8", {"data": 16}, {"2.*": P("data"), **specs}, moves, rest=100, memory_budget=budget)


GPT = Decoder(layers=2, width=2048, heads=16, kv_heads=16, hidden=8192, vocab=32768, batch=64, length=1024)
WIDE = Decoder(layers=2, width=8192, heads=64, kv_heads=64, hidden=28672, vocab=128256, batch=1, length=256)
LONGER = dataclasses.replace(WIDE, kv_heads=8, vocab=32768, length=8192)
LONG = Decoder(layers=2, width=4096, heads=32, kv_heads=8, hidden=14336, vocab=32768, batch=1, length=131072, chunk=2048, remat=True)
MIXTURE = dataclasses.replace(GPT, batch=8, experts=8)

DLRM_DENSE = 1024 * (16 + 16 + (36 + 16) + 1024 + 1)  # weights of the layers, which every device has
GPT_WEIGHTS = 2 * (4 * 2048 * 2048 + 3 * 2048 * 8192)  # of the layers
COLUMN, ROW = P(None, None, "model"), P(None, "model")  # behind the dimension of the layers
PAIR = {"0.layers.gate": COLUMN, "0.layers.up": COLUMN, "0.layers.down": ROW}
HEADS = {"0.layers.query": COLUMN, "0.layers.key": COLUMN, "0.layers.value": COLUMN, "0.layers.out": ROW}
EVERYWHERE = P(("data", "model"))

_CASES = [
    rung("data parallelism", None, {"0.*": P(), "1.*": P()}, Expected("all-reduce", DATA, inside=True, elements=WEIGHTS)),
    rung(
        "ZeRO-1",
        "800MiB",
        {"0.*": P()},
        Expected("all-reduce", DATA, inside=True, elements=WEIGHTS),
        Expected("all-gather", DATA, inside=False, elements=WEIGHTS / 2, calls=1),
    ),
    rung(
        "ZeRO-2",
        "600MiB",
        {"0.*": P(), "1.*": SPLIT},
        Expected("reduce-scatter", DATA, inside=True, elements=WEIGHTS),
        Expected("all-gather", DATA, inside=False, elements=WEIGHTS, calls=2),
    ),
    rung(
        "ZeRO-3",
        "205MiB",
        {"0.*": SPLIT, "1.*": SPLIT},
        Expected("reduce-scatter", DATA, inside=True, elements=WEIGHTS),
        Expected("all-gather", DATA, inside=True, elements=2 * WEIGHTS),
    ),
    Case(
        "FSDP",
        "decoder of 1.3B's width, 8 sequences of 1024 a device",
        functools.partial(decoder, GPT),
        "h100:8",
        {"data": 8},
        specs={f"0.layers.{name}": SPLIT for name in ("query", "key", "value", "out", "gate", "up", "down")} | {"2.1": P("data")},
        moves=(
            Expected("all-gather", DATA, inside=True, elements=2 * GPT_WEIGHTS),
            Expected("reduce-scatter", DATA, inside=True, elements=GPT_WEIGHTS),
        ),
        rest=7 * 32768 * 2048,
    ),
    Case(
        "Megatron",
        "decoder of 70B's width, 1 sequence of 256",
        functools.partial(decoder, WIDE),
        "h100:8",
        {"model": 8},
        specs={**HEADS, **PAIR, "0.layers.*norm": P(), "0.head": P(None, "model")},
        moves=(Expected("all-reduce", MODEL, inside=True, elements=2 * 4 * 256 * 8192, calls=2 * 4),),
        rest=2 * 4 * 256 * 8192,
    ),
    Case(
        "sequence parallelism",
        "decoder of 70B's width, 1 sequence of 8192",
        functools.partial(decoder, LONGER),
        "h100:8",
        {"model": 8},
        specs={**PAIR, "0.layers.*norm": P(), "2.1": P(None, "model")},
        moves=(),
        rest=3.5e9,
    ),
    Case(
        "context parallelism by heads",
        "decoder of 8B's width, 1 sequence of 131,072",
        functools.partial(decoder, LONG),
        "h100:8",
        {"data": 8},
        specs={"2.*": P(None, "data"), "0.layers.*norm": P()},
        moves=(Expected("all-to-all", DATA, inside=True, elements=2 * 3 * 131072 * 128 * 2 * (32 + 8), calls=2 * 3 * 4),),
        rest=2.2e9,
    ),
    Case(
        "context parallelism by keys",
        "decoder of 8B's width, 1 sequence of 131,072",
        functools.partial(decoder, LONG),
        "h100:8x8",
        {"data": 64},
        specs={"2.*": P(None, "data"), "0.layers.*norm": P()},
        moves=(),
        rest=4e9,
    ),
    Case(
        "2-D (SUMMA)",
        "2 pairs of 16,384 × 65,536, 16,384 rows",
        functools.partial(mlp_tower, 16384, 65536, 2, 16384),
        "v5p:4x4x4",
        {"data": 8, "model": 8},
        specs={"0.*": SPLIT},
        moves=(),
        rest=2e9,
        compiled_for="h100:8x8",
    ),
    Case(
        "expert parallelism",
        "decoder, 8 experts of 2048 × 8192, two for each token; 1 sequence of 1024 a device",
        functools.partial(decoder, MIXTURE),
        "h100:8",
        {"data": 8},
        specs={"0.layers.up": P(None, "data"), "0.layers.down": P(None, "data"), "2.1": P("data")},
        moves=(Expected("all-to-all", DATA, inside=True, elements=2 * 4 * 8 * 8 * 320 * 2048, calls=2 * 4),),
        rest=8 * 32768 * 2048,
    ),
    Case(
        "spatial partitioning",
        "4 residual 3 × 3 convolutions of 64 channels, 1 image of 2048 × 2048",
        functools.partial(convnet, 2048, 1, 64, 4),
        "h100:8",
        {"data": 8},
        specs={"0.*": P(), "2.*": P(None, "data")},
        moves=(Expected("all-reduce", DATA, inside=False, elements=9 * 64 * (4 * 64 + 2 * 4)),),
        rest=30 * Mi,
    ),
    Case(
        "vocabulary-sharded tables",
        "DLRM: 8 tables of 16M × 16, 2048 rows a device",
        functools.partial(dlrm, 1 << 24, 16, 65536, 1024, 8),
        "h100:4x8",
        {"data": 32},
        specs={"0.tables.*": P("data"), "1.0.sum_of_squares.tables.*": P("data"), "2.0": P("data"), "2.2": P("data")},
        moves=(Expected("all-reduce", DATA, inside=False, elements=8 * 65536 * 16 + DLRM_DENSE),),
        rest=8 * Mi,
    ),
    Case(
        "ensemble axis",
        "a vmapped step of 16 networks, each with a batch of its own",
        functools.partial(ensemble, 16, 256, 3, 128),
        "cpu:8",
        {"data": 4, "model": 2},
        specs={"0.*": EVERYWHERE, "1.0.mu.*": EVERYWHERE, "1.0.nu.*": EVERYWHERE, "2.*": EVERYWHERE},
        moves=(),
        rest=0,
    ),
]
CASES = {case.name: case for case in _CASES}
