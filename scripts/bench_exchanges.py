"""From one sharding to another, in one step and with the stops of jaxauto/rewrite/passage.py: python scripts/bench_exchanges.py

An array [128, 256, 256, 64] in bfloat16 (1 GiB) on eight devices, in a mesh of two axes and in one of three. What does the partitioner make
of a passage, and what does the cost model count (jaxauto/cost/reshard.py)? Writes results/exchanges.md.
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
TWO, THREE = {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}
PASSAGES: list[tuple[dict[str, int], Sharding, Sharding]] = [
    (TWO, ((), ("a",), ("b",), ()), (("a", "b"), (), (), ())),
    (TWO, (("a", "b"), (), (), ()), ((), ("a",), ("b",), ())),
    (TWO, (("a", "b"), (), (), ()), ((), ("a", "b"), (), ())),
    (TWO, (("a",), ("b",), (), ()), ((), ("a",), ("b",), ())),
    (TWO, (("a", "b"), (), (), ()), ((), ("b",), (), ())),
    (THREE, ((), ("a",), ("b",), ("c",)), (("a", "b", "c"), (), (), ())),
]


def passage_on(mesh: jax.sharding.AbstractMesh, here: Sharding, there: Sharding, *, stops: bool) -> Callable:
    def pinned(x: jax.Array, sharding: Sharding) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(sharding)))

    def fn(x: jax.Array) -> list[jax.Array]:
        x = pinned(jnp.sin(x), here)
        x = bring(x, here, there, dict(mesh.shape), pinned) if stops else x
        return [jnp.cos(pinned(x, there))]

    return fn


def measure(name: str, sizes: dict[str, int], here: Sharding, there: Sharding) -> str:
    """A table row."""
    target, axes = Target(name), mesh_axes(sizes, Target(name))
    args, options = [jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)], dict(COMPILER_OPTIONS[target.chip.platform])
    cells = [name, f"`{partition_spec(here)}` to `{partition_spec(there)}`"]
    for stops in (False, True):
        make = partial(passage_on, here=here, there=there, stops=stops)
        specs = [partition_spec(here)], [partition_spec(there)]
        compiled = aot.compile_step(make, args, *specs, [], target, tuple(sizes.values()), tuple(sizes), options=options)
        module = hlo.parse(compiled.text)
        kinds = Counter(c.kind for c in module.collectives)
        seconds = schedule_on(target, sizes, module).collective_seconds
        cells += [
            ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())),
            f"{compiled.memory['temp'] / MIB:.0f}",
            f"{seconds * 1e3:.2f}",
        ]
    told = passage_collectives(*(state_of(s, axes) for s in (here, there)), bytes_=2.0 * math.prod(SHAPE), mesh=axes)
    cells += [", ".join(kind for kind, *_ in told), f"{sum(seconds for *_, seconds in told) * 1e3:.2f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    lines = ["# From one sharding to another, in one step and with stops", "", "Made by scripts/bench_exchanges.py: see there.", ""]
    lines += [
        "| target | passage | in one step | temporaries MiB | ms | with stops | temporaries MiB | ms | counted | ms |",
        "|---" * 10 + "|",
    ]
    for name in ("v5e:2x4", "v5p:2x2x2", "h100:8"):
        for passage in PASSAGES:
            lines.append(measure(name, *passage))
            print(lines[-1], flush=True)
    (HERE / "results" / "exchanges.md").write_text("\n".join(lines) + "\n")
    aot.close_workers()


if __name__ == "__main__":
    main()
