"""From one sharding to another, in one step and with the stops of jaxauto/rewrite/passage.py: python scripts/bench_exchanges.py

An array [128, 256, 256, 64] in bfloat16 (1 GiB) on eight devices, in a mesh of two axes and in one of three. What does the partitioner make
of a passage, and what does the cost model count (jaxauto/cost/reshard.py)? And of sums [16384, 1024] of partial results of a dot, of
16384 rows, that go to a dimension which an axis splits on the minor side: pinned where they go, and pinned before where they are made
(jaxauto/solve/positions.py)? Writes results/exchanges.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from jaxauto import aot, hlo  # noqa: E402
from jaxauto.core import Sharding  # noqa: E402
from jaxauto.cost.reshard import passage_collectives  # noqa: E402
from jaxauto.options import mesh_axes  # noqa: E402
from jaxauto.rewrite.apply import partition_spec  # noqa: E402
from jaxauto.rewrite.passage import bring  # noqa: E402
from jaxauto.strategies import state_of  # noqa: E402
from jaxauto.targets.compilers import COMPILER_OPTIONS  # noqa: E402
from jaxauto.targets.target import Target  # noqa: E402
from jaxauto.verify import schedule_on  # noqa: E402

SHAPE = (128, 256, 256, 64)
MIB = 2**20
TWO, OTHER, THREE = {"a": 4, "b": 2}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}
PASSAGES: list[tuple[dict[str, int], Sharding, Sharding]] = [
    (TWO, ((), ("a",), ("b",), ()), (("a", "b"), (), (), ())),
    (TWO, (("a", "b"), (), (), ()), ((), ("a",), ("b",), ())),
    (TWO, (("a", "b"), (), (), ()), ((), ("a", "b"), (), ())),
    (TWO, (("a",), ("b",), (), ()), ((), ("a",), ("b",), ())),
    (TWO, (("a", "b"), (), (), ()), ((), ("b",), (), ())),
    (THREE, ((), ("a",), ("b",), ("c",)), (("a", "b", "c"), (), (), ())),
    # one axis goes where another cuts, into fewer pieces and into more; or comes on the major side of it
    (TWO, (("a",), (), (), ()), (("b",), ("a",), (), ())),
    (OTHER, (("a",), (), (), ()), (("b",), ("a",), (), ())),
    (TWO, (("b",), (), (), ()), (("a",), ("b",), (), ())),
    (TWO, (("a",), (), (), ()), (("b",), (), (), ())),
    (OTHER, (("a",), (), (), ()), (("b",), (), (), ())),
    (TWO, ((), ("a",), (), ()), (("a", "b"), (), (), ())),
    (TWO, ((), ("b",), (), ()), (("a", "b"), (), (), ())),
]
SUMMED = (16384, 16384, 1024)  # what is summed away, and the array
SUMS: list[tuple[dict[str, int], tuple[str, ...], Sharding, Sharding]] = [  # mesh, axes summed over, where made, where it goes
    (TWO, ("a",), (("b",), ()), (("a", "b"), ())),
    (TWO, ("a",), (("b",), ()), (("a",), ("b",))),
    (TWO, ("a",), (("b",), ()), (("a",), ())),
    (THREE, ("a",), (("b", "c"), ()), (("a", "b", "c"), ())),
    (THREE, ("a",), (("b", "c"), ()), (("a", "b"), ("c",))),
    (THREE, ("a",), (("b", "c"), ()), (("a", "b"), ())),
    (THREE, ("a",), (("b", "c"), ()), (("a",), ())),
    (THREE, ("a", "c"), (("b",), ()), (("a", "b", "c"), ())),
    (THREE, ("a", "c"), (("b",), ()), (("a", "b"), ("c",))),
    (THREE, ("a", "c"), (("b",), ()), (("a", "b"), ())),
]


def passage_on(mesh: jax.sharding.AbstractMesh, here: Sharding, there: Sharding, *, stops: bool) -> Callable:
    def pinned(x: jax.Array, sharding: Sharding) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(sharding)))

    def fn(x: jax.Array) -> list[jax.Array]:
        x = pinned(jnp.sin(x), here)
        x = bring(x, here, there, dict(mesh.shape), pinned) if stops else x
        return [jnp.cos(pinned(x, there))]

    return fn


def sum_on(mesh: jax.sharding.AbstractMesh, summed: tuple[str, ...], here: Sharding, there: Sharding, *, stops: bool) -> Callable:
    def pinned(x: jax.Array, sharding: Sharding) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(sharding)))

    def fn(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        product = pinned(jnp.sin(x), (summed, here[0])).T @ pinned(jnp.sin(y), (summed, here[1]))
        return [jnp.cos(pinned(pinned(product, here) if stops else product, there))]

    return fn


def measure(name: str, sizes: dict[str, int], here: Sharding, there: Sharding, summed: tuple[str, ...] = ()) -> str:
    """A table row; of a sum of partial results where axes are ``summed``."""
    target, axes = Target(name), mesh_axes(sizes, Target(name))
    shape = SUMMED[1:] if summed else SHAPE
    shapes = [(SUMMED[0], n) for n in shape] if summed else [shape]
    args, options = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes], dict(COMPILER_OPTIONS[target.chip.platform])
    cells = [name, f"sum over {', '.join(summed)}, " * bool(summed) + f"`{partition_spec(here)}` to `{partition_spec(there)}`"]
    for stops in (False, True):
        of = {"here": here, "there": there, "stops": stops}
        make = partial(sum_on, summed=summed, **of) if summed else partial(passage_on, **of)
        given = [partition_spec((summed, axes)) for axes in here] if summed else [partition_spec(here)]
        mesh = tuple(sizes.values()), tuple(sizes)
        compiled = aot.compile_step(make, args, given, [partition_spec(there)], [], target, *mesh, options=options)
        module = hlo.parse(compiled.text)
        kinds = Counter(c.kind for c in module.collectives)
        seconds = schedule_on(target, sizes, module).collective_seconds
        cells += [
            ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())),
            f"{compiled.memory['temp'] / MIB:.0f}",
            f"{seconds * 1e3:.2f}",
        ]
    terms = np.isin(axes.names, summed)
    told = passage_collectives(*(state_of(s, axes) for s in (here, there)), bytes_=2.0 * math.prod(shape), mesh=axes, partial=terms)
    cells += [", ".join(kind for kind, *_ in told), f"{sum(seconds for *_, seconds in told) * 1e3:.2f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    lines = ["# From one sharding to another, in one step and with stops", "", "Made by scripts/bench_exchanges.py: see there.", ""]
    lines += [
        "| target | passage | in one step | temporaries MiB | ms | with stops | temporaries MiB | ms | counted | ms |",
        "|---" * 10 + "|",
    ]
    for name in ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "h100:8"):
        for row in (*(measure(name, *p) for p in PASSAGES), *(measure(name, sizes, *p, summed) for sizes, summed, *p in SUMS)):
            lines.append(row)
            print(row, flush=True)
    (HERE / "results" / "exchanges.md").write_text("\n".join(lines) + "\n")
    aot.close_workers()


if __name__ == "__main__":
    main()
