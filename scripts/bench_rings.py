"""Weight gradients whose sum is scattered beside the dot, estimated and compiled: python scripts/bench_rings.py. Writes results/rings.md.

A weight of a transformer's size, the batch over all devices, the weight (so its gradient) split in one of its two dimensions.
``jaxauto/cost/windowed.py`` was read off these schedules, so the table shows that it is what they do, not that it holds elsewhere. Seconds:
of computation, with what the ring waits for: a small weight's dots are through before its pieces are sent. Sent: bytes of a reduce-scatter;
a ring sends n + 1 pieces instead of n - 1. Four devices in all make none: their sum is waited for, and not in the seconds.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import jaxauto  # noqa: E402
from jaxauto import hlo  # noqa: E402
from jaxauto.verify import compile_ahead, schedule_of  # noqa: E402

SIZES = (  # width, wide dimension, sequences of one device, their length, target, devices
    (768, 3072, 8, 1024, "v5e:2x4", 8),
    (1024, 4096, 8, 1024, "v5e:2x4", 8),
    (2048, 8192, 2, 2048, "v5e:4x4", 16),
    (768, 50304, 8, 1024, "v5e:2x4", 8),
    (2048, 128256, 2, 2048, "v5e:4x4", 16),
    (1024, 6144, 8, 1024, "v5e:2x4", 8),
    (2560, 3584, 8, 1024, "v5e:2x4", 8),
    (4096, 4096, 8, 1024, "v5e:2x4", 8),
    (4096, 14336, 1, 4096, "v5e:4x4", 16),
    (4096, 14336, 1, 4096, "v5p:4x4x2", 32),
    (1280, 5120, 16, 512, "v6e:2x4", 8),
    (512, 512, 8, 768, "v5p:2x2x2", 8),
    (512, 2048, 8, 768, "v5p:2x2x2", 8),
    (512, 512, 8, 768, "v5e:2x4", 8),
    (512, 2048, 4, 448, "v5e:2x4", 8),
    (256, 1024, 8, 512, "v6e:2x4", 8),
    (2048, 8192, 4, 2048, "v5e:4x8", 32),
    (2048, 8192, 4, 2048, "v5e:2x2", 4),
    (2048, 8192, 4, 2048, "v5p:2x2x1", 4),
)


def step(weight: jax.Array, given: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    """A step down the gradient of ``given @ weight``, which is written as the transpose rule of a dot writes it."""
    return (weight - 0.1 * jnp.einsum("blx,bly->xy", gradient, given).T.astype(jnp.float32),)


def measure(size: tuple, split: int, *, transposed: bool) -> str:
    """A table row; ``transposed``: the wide dimension comes first; ``split``: which dimension of the weight."""
    width, wide, batch, length, target, devices = size
    shape = (wide, width) if transposed else (width, wide)
    activations = [jax.ShapeDtypeStruct((batch * devices, length, n), jnp.bfloat16) for n in shape]
    pins = {"0": PartitionSpec(*("a" if d == split else None for d in range(2))), "1": PartitionSpec("a"), "2": PartitionSpec("a")}
    plan = jaxauto.plan(
        step,
        *(jax.ShapeDtypeStruct(shape, jnp.float32), *activations),
        target=target,
        mesh={"a": devices},
        constraints=pins,
        donate_argnums=(0,),
        certify=False,
        progress=False,
    )
    module = hlo.parse(compile_ahead(plan, 900).text)
    schedule = schedule_of(plan, module)
    results = {(c.name, i.name): i for c in module.computations.values() for i in c.instructions}
    copied = [list(results[r.computation, r.name].shapes[0].dims) for r in schedule.breakdown if r.name.startswith("copy") and r.hbm_bytes]
    waits = sum(r.total_seconds for r in schedule.breakdown if r.name.startswith("collective-permute"))
    told, found = plan.estimate.compute_time, schedule.compute_seconds + waits
    sent = [sum(c.bytes_ * c.count for c in plan.estimate.collectives), sum(c.role_bytes * c.count for c in module.collectives)]
    cells = [f"{shape}", shape[split], shape[split] // devices, target, ", ".join(map(str, copied[:1])), f"{1e3 * told:.3f}"]
    cells += [f"{1e3 * found:.3f}", f"{told / found - 1:+.1%}", *(f"{b / 2**20:.2f}" for b in sent)]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    lines = ["# Weight gradients scattered beside their dots", "", f"Made by scripts/bench_rings.py; jax {jax.__version__}.", ""]
    head = "| weight | split | a device's part | target | copied before | ms estimated | of the schedule | error |"
    lines += [f"{head} MiB sent estimated | compiled |", "|---|" + "---|" * 9]
    for size, transposed, split in itertools.product(SIZES, (False, True), (0, 1)):
        lines.append(measure(size, split, transposed=transposed))
        print(lines[-1], flush=True)
    (HERE / "results" / "rings.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
