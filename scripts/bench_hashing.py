"""What random bits take: python scripts/bench_hashing.py. Writes results/hashing.md.

TPUs: dropout compiled ahead of time beside the same arrays only copied; cycles are what XLA expects of the dearest kernel, all cores
together. Operations: cycles times what the vector units do in one (``Chip.vector_flops``). The planner charges ``Chip.hash_seconds``.
GPUs: dropout as it was timed by scripts/calibrate.py. Steps: generated programs with dropout, on one device, nothing recomputed, compiled
with the masks written once (``masks.kept_masks``), as plans have it, and without that; hashes are counted in the compiled programs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import bench_accuracy  # noqa: E402
import calibration_programs  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto import hlo  # noqa: E402
from jaxauto.cost.hashing import XORS  # noqa: E402
from jaxauto.cost.schedule import within  # noqa: E402
from jaxauto.masks import kept_masks  # noqa: E402
from jaxauto.verify import compile_ahead, schedule_of  # noqa: E402

RESULTS = HERE / "results"
TPUS = ("v5e:1x1", "v5p:1x1x1", "v6e:1x1")
SIZES = (2**24, 2**26, 2**28)
TIMEOUT = 600.0
CARDS, TIMED = ("h100", "h200"), "dropout 256M"
STEPS = ("2", "4", "5")


def copied(size: int) -> tuple:
    """Reads and writes what dropout does."""
    _, args = calibration_programs.dropout(size)
    return lambda x, seed: x * 2 + seed.astype(x.dtype), args


def planned(made: tuple, target: str) -> jaxauto.Plan:
    step, args = made
    return jaxauto.plan(step, *args, target=target, remat="off", donate_argnums=(), certify=False, progress=False)


def of_tpu(target: str, size: int) -> str:
    """A row: expected cycles with and without the hashes, and what follows."""
    chip = jaxauto.Target(target).chip
    cycles, told, clocked = {}, {}, {}
    for name, made in (("dropout", calibration_programs.dropout(size)), ("copy", copied(size))):
        plan = planned(made, target)
        module = hlo.parse(compile_ahead(plan, TIMEOUT).text)
        cycles[name] = max(i.cycles for i in module.entry.instructions)
        told[name], clocked[name] = plan.estimate.compute_time, schedule_of(plan, module).compute_seconds
    seconds = cycles["dropout"] / chip.clock_hz
    operations = seconds * chip.vector_flops / size
    cells = (
        cycles["copy"],
        cycles["dropout"],
        f"{operations:.0f}",
        *(_ms(x) for x in (seconds, told["dropout"], clocked["dropout"], told["copy"])),
    )
    return f"| {target} | {size / 2**20:.0f} Mi | {' | '.join(map(str, cells))} |"


def of_gpu(card: str) -> str:
    """A row: dropout timed, and its bytes alone."""
    row: dict[str, Any] = json.loads((RESULTS / f"calibration_{card}.json").read_text())["programs"][TIMED]
    plan = planned(calibration_programs.PROGRAMS[TIMED](), f"{card}:1")
    size, chip = 2**28, jaxauto.Target(f"{card}:1").chip
    seconds = float(np.median(row["seconds"]))
    moved = 2 * size * jnp.dtype(jnp.bfloat16).itemsize / (chip.bandwidth_efficiency * chip.hbm_bandwidth)
    return f"| {card} | {_ms(seconds)} | {1e12 * seconds / size:.1f} | {_ms(moved)} | {_ms(plan.estimate.compute_time)} |"


def of_step(target: str, number: str) -> list[str]:
    """Two rows: told, schedule and cycles with the masks written once, and as XLA makes them."""
    chip, rows = jaxauto.Target(target).chip, []
    for masks, found in (("written once", kept_masks), ("made anew", lambda _: set())):
        with mock.patch("jaxauto.rewrite.apply.kept_masks", found):
            plan = bench_accuracy.plan_of("generated", number, "one device", "off", chip.name)
            compiled = compile_ahead(plan, TIMEOUT)
        module = hlo.parse(compiled.text)
        counted = sum(n * _hashes(module, module.computations[name]) for name, n in module.scheduled.items())
        seconds = schedule_of(plan, module).total_seconds, module.cycles / chip.clock_hz
        cells = f"{counted / 2**20:.0f}", _ms(plan.estimate.step_time), *map(_ms, seconds), f"{compiled.peak_bytes / 2**20:.0f}"
        rows.append(f"| {number} | {target} | {masks} | {' | '.join(cells)} |")
    return rows


def _hashes(module: hlo.Module, computation: hlo.Computation) -> float:
    """Of one run of a computation."""
    inner = (one for i in computation.instructions for _, one in within(module, computation, i))
    return sum(one.shape.elements for one in inner if one.opcode == "xor") / XORS


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def main() -> None:
    head = "| target | numbers | cycles of the copy | of dropout | operations a number | ms at the clock | told | schedule | copy, told |"
    lines = ["# What random bits take", "", f"Made by scripts/bench_hashing.py; jax {jax.__version__}.", "", head, "|---" * 9 + "|"]
    for target in TPUS:
        for size in SIZES:
            lines.append(of_tpu(target, size))
            print(lines[-1], flush=True)
    lines += ["", "| card | ms timed | ps a number | ms of its bytes | told |", "|---" * 5 + "|"]
    lines += [of_gpu(card) for card in CARDS if TIMED in json.loads((RESULTS / f"calibration_{card}.json").read_text())["programs"]]
    lines += ["", "| program | target | masks | Mi hashes | told ms | schedule | cycles | peak MiB |", "|---" * 8 + "|"]
    for number in STEPS:
        for target in TPUS:
            lines += of_step(target, number)
            print(*lines[-2:], sep="\n", flush=True)
    (RESULTS / "hashing.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
