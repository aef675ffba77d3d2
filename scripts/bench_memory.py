"""Predicted peak memory against what compilers allocate: python scripts/bench_memory.py [--targets cpu,v5e,h100] [--again]

Steps: the zoo of tests/ and decoders of scripts/models.py, on one device and data-parallel on eight (state replicated, batch cut). Compared
with ``jaxauto.profile(...).peak_memory`` are two numbers of the compiler's ``memory_analysis()``: argument + output - alias + temp (what is
allocated) and the live peak, where it tells. Writes results/memory.json and results/memory.md. ``--again`` predicts anew and takes what the
compilers said from results/memory.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

import models  # noqa: E402

from jaxauto import frontend  # noqa: E402
from jaxauto.aot import CompilerFailure, compile_step  # noqa: E402
from jaxauto.profile import profile  # noqa: E402
from jaxauto.targets.target import Target  # noqa: E402
from jaxauto.trace import trace  # noqa: E402

RESULTS = HERE / "results"
DEVICES = {"cpu": "cpu:{}", "v5e": "v5e:{}", "h100": "h100:{}"}
SHAPES = {"v5e": {1: "1x1", 8: "2x4"}}
_SMALL = ("tiny", "small")


def cases(*, zoo_too: bool) -> dict[str, Callable[[], tuple[Callable, tuple]]]:
    """Name → factory of (step, arguments)."""
    found: dict[str, Callable] = {}
    if zoo_too:
        from zoo import STEPS

        found |= {f"zoo/{name}": factory for name, factory in STEPS.items()}
    for size in _SMALL:
        for scan in (True, False):
            config = models.GPT[size].with_(scan=scan)
            found[f"gpt/{size}/{'scan' if scan else 'unrolled'}"] = lambda c=config: models.step_and_args(c)
            if scan:
                found[f"gpt/{size}/scan+checkpoint"] = lambda c=config: models.step_and_args(c.with_(remat=True))
    config = models.GPT["medium"]
    found["gpt/medium/scan"] = lambda: models.step_and_args(config)
    return found


def measure(step: Callable, args: tuple, chip: str, devices: int) -> dict[str, Any]:
    """What the compiler allocates on one device, by kind of memory."""
    form = frontend.functional(step, args)
    traced = trace(form.step, form.arguments(args))
    state_in = {i for i, _ in traced.state}
    cut = PartitionSpec("data") if devices > 1 else PartitionSpec()
    specs = [PartitionSpec() if k in state_in or not _divides(a.shape, devices) else cut for k, a in enumerate(traced.in_avals)]

    def make(_mesh):
        def flat(*leaves):
            a, k = jax.tree_util.tree_unflatten(traced.in_tree, leaves)
            return jax.tree_util.tree_leaves(form.step(*a, **k))

        return flat

    donate = [k for k, d in enumerate(traced.donated) if d]
    target = target_of(chip, devices)
    outs = [PartitionSpec()] * len(traced.out_avals)
    compiled = compile_step(make, traced.in_avals, specs, outs, donate, target, (devices,), ("data",))
    return {"allocated": compiled.device_bytes, **compiled.memory}


def target_of(chip: str, devices: int) -> Target:
    """``devices`` of a chip."""
    return Target(DEVICES[chip].format(SHAPES.get(chip, {}).get(devices, devices)))


def predict(step: Callable, args: tuple, chip: str, devices: int) -> float:
    """Peak bytes on one device, as jaxauto sees it."""
    if devices == 1:
        return profile(step, *args, target=target_of(chip, 1)).peak_memory
    form = frontend.functional(step, args)
    traced = trace(form.step, form.arguments(args))
    state = {i for i, _ in traced.state}
    specs = {
        path: PartitionSpec() if k in state or not _divides(a.shape, devices) else PartitionSpec("data")
        for k, (path, a) in enumerate(zip(traced.in_paths, traced.in_avals, strict=True))
    }
    return profile(step, *args, mesh={"data": devices}, in_specs=specs, target=target_of(chip, devices)).peak_memory


def _divides(shape: tuple[int, ...], devices: int) -> bool:
    return bool(shape) and shape[0] % devices == 0


def run(targets: Iterable[str], devices: Iterable[int], rows: dict[str, dict], out: Path, *, again: bool, only: str) -> None:
    """Measure and predict; renews ``rows``, by ``"case @ chip:devices"``, and writes them as it goes."""
    for chip in targets:
        for name, factory in cases(zoo_too=chip == "cpu").items():
            for count in devices:
                key = f"{name} @ {chip}:{count}"
                if only and only not in key:
                    continue
                if again and key not in rows:
                    continue
                step, args = factory()
                try:
                    measured = rows[key]["measured"] if again else measure(step, args, chip, count)
                except CompilerFailure as failure:
                    print(f"{key}: {failure}")
                    continue
                started = time.monotonic()
                predicted = predict(step, args, chip, count)
                rows[key] = {"measured": measured, "predicted": predicted, "seconds": time.monotonic() - started}
                print(f"{key:45} {reference(measured) / 1e6:9.3f} MB, predicted {predicted / 1e6:9.3f} {error(rows[key]):+.1%}", flush=True)
                out.write_text(json.dumps(rows, indent=1) + "\n")


def reference(measured: dict) -> float:
    """Bytes that the compiler needs: what it allocates, or its live peak where that is more (small programs live in a TPU's VMEM)."""
    return max(measured["allocated"], measured["peak"])


def error(row: dict) -> float:
    """Relative error of the prediction."""
    return row["predicted"] / reference(row["measured"]) - 1


def summary(rows: dict[str, dict]) -> str:
    """The table of results/memory.md."""
    lines = ["# Predicted peak memory against compilers", ""]
    lines += [f"jax {jax.__version__}. MB of one device; the error is against the larger of allocated and live peak.", ""]
    lines += ["| group | cases | median error | 95th percentile | worst under | worst over |", "|---|---|---|---|---|---|"]
    groups: dict[str, list[float]] = {}
    for key, row in rows.items():
        family, chip = key.split("/")[0], key.split(" @ ")[1]
        groups.setdefault(f"{family} on {chip}", []).append(error(row))
    for group, errors in groups.items():
        absolute = np.abs(errors)
        tail, under, over = np.percentile(absolute, 95), min(0, *errors, 0), max(0, *errors, 0)
        lines.append(f"| {group} | {len(errors)} | {np.median(absolute):.1%} | {tail:.1%} | {under:+.1%} | {over:+.1%} |")
    lines += ["", "| step | allocated | live peak | predicted | error |", "|---|---|---|---|---|"]
    for key, row in rows.items():
        m = row["measured"]
        lines.append(f"| {key} | {m['allocated'] / 1e6:.2f} | {m['peak'] / 1e6:.2f} | {row['predicted'] / 1e6:.2f} | {error(row):+.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="cpu")
    parser.add_argument("--devices", default="1,8")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--again", action="store_true", help="predict anew, compile nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "memory.json")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(options.out.read_text()) if options.out.exists() else {}
    run(options.targets.split(","), [int(n) for n in options.devices.split(",")], rows, options.out, again=options.again, only=options.only)
    options.out.with_suffix(".md").write_text(summary(rows))
    print(summary(rows).split("\n| step")[0])


if __name__ == "__main__":
    main()
