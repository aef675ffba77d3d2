"""What the compiler options of a plan bring: python scripts/bench_overlap.py. Writes results/overlap.md.

An 8B-shaped decoder of four scanned layers under FSDP, compiled ahead of time with and without ``plan.compiler_options``; seconds are of
the compiled schedule, exposed are those of collectives that nothing hides.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from jax.sharding import PartitionSpec

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import models  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto import hlo  # noqa: E402
from jaxauto.verify import compile_plan, schedule_of  # noqa: E402

CASES = (("v5p:4x4x8", {"data": 64, "model": 2}, 128), ("v5p:2x2x4", {"data": 16}, 32), ("v5e:8x8", {"data": 64}, 64))


def rows(target: str, mesh: dict[str, int], batch: int) -> list[str]:
    """Table rows of one case: the compiler's defaults, and the plan's options."""
    step, args = models.step_and_args(models.LLAMA["8b"].with_(layers=4, vocab=8192, batch=batch, length=2048))
    pins = {"0.layers.gate": PartitionSpec(None, "data"), "2.*": PartitionSpec(tuple(mesh))}
    plan = jaxauto.plan(step, *args, target=target, mesh=mesh, certify=False, progress=False, constraints=pins)
    plain = dataclasses.replace(plan)
    plain.compiler_options = {}
    found = []
    for name, one in (("defaults", plain), ("options of the plan", plan)):
        compilation = compile_plan(one)
        clock = schedule_of(one, hlo.parse(compilation.text))
        milliseconds = (clock.total_seconds, clock.compute_seconds, clock.collective_seconds, clock.exposed_collective_seconds)
        found.append(
            f"| {target} {'x'.join(map(str, mesh.values()))} | {name} | {' | '.join(f'{1e3 * s:.1f}' for s in milliseconds)} | "
            f"{compilation.peak_bytes / 2**30:.2f} | {compilation.seconds:.0f} |"
        )
        print(found[-1], flush=True)
    return found


def main() -> None:
    head = "| target and mesh | compiled with | step ms | compute | collectives | exposed | peak GiB | seconds to compile |"
    lines = ["# What the compiler options of a plan bring", "", "Made by scripts/bench_overlap.py.", "", head, "|---|" + "---|" * 7]
    for case in CASES:
        lines += rows(*case)
    (HERE / "results" / "overlap.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
