"""Fits a GPU's efficiencies to programs timed on it: python scripts/calibrate.py [--measure] [--only …] [--out FILE]

With --measure, on the GPU: each of calibration_programs.py (matrix products, convolutions, attention, memory-bound operations, loops of
small ones; none of a benchmark's models) is compiled, timed and noted. Without, anywhere: the five numbers of the chip that no datasheet
tells (``TOLD_BY``) are fitted so that the planner's estimate of the programs that tell of them is nearest to what was timed (least mean of
absolute logarithms). They stand in jaxauto/targets/chips.py, marked "fitted".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.optimize import minimize_scalar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import on_device  # noqa: E402
from calibration_programs import PROGRAMS  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto.targets.target import chip_of_kind  # noqa: E402

RESULTS = HERE / "results"
# A number of the chip, and how the names of the programs begin that it is fitted to; the others (prefixes, loops of kernels) check it.
TOLD_BY = {
    "launch_seconds": ("scanned", "counted", "small"),
    "flops_efficiency": ("products", "weight gradients"),
    "convolution_efficiency": ("convolution",),
    "dot_writes": ("attention", "products 65536"),
    "hash_seconds": ("dropout",),
    "bandwidth_efficiency": ("elementwise", "gelu", "layer norm", "cross entropy", "adam", "turned", "summed", "embedding"),
}


# -------------------------------------------------------------------------------------------------------------- measured


def planned(name: str, target: Any = None) -> jaxauto.Plan:
    """The program as a user would plan it for one device, nothing recomputed, nothing donated."""
    step, args = PROGRAMS[name]()
    return jaxauto.plan(step, *args, target=target, mesh={"data": 1}, remat="off", donate_argnums=(), certify=False, progress=False)


def measure(names: list[str], out: Path, threads: int) -> None:
    """Compiles all, then times one after the other; writes after each."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    found["machine"] = on_device.machine()
    with ThreadPoolExecutor(threads) as pool:
        plans = {name: planned(name) for name in names}
        lowered = {name: plan.lower() for name, plan in plans.items()}
        waiting = {name: pool.submit(low.compile) for name, low in lowered.items()}
        compiled = {name: future.result() for name, future in waiting.items()}
    for name in names:
        args = jax.tree.leaves(on_device.concrete(PROGRAMS[name]()[1]))
        call = lambda run=compiled[name], args=args: run(*args)  # noqa: E731
        seconds = on_device.seconds_of(call)
        kernels = on_device.kernels_of(call)
        row = {"seconds": seconds, "kernels": on_device.runs(kernels), "kernel seconds": on_device.total(kernels)}
        found.setdefault("programs", {})[name] = row
        estimated = plans[name].estimate.compute_time * 1e3
        print(f"{name}: {np.median(seconds) * 1e3:.3f} ms, {row['kernels']} kernels, estimated {estimated:.3f}", flush=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
        del args, call


# ---------------------------------------------------------------------------------------------------------------- fitted


def told(name: str, target: jaxauto.Target) -> float:
    """Seconds on the device; that the arguments of such a program come from the host, as a batch does, is left out."""
    return planned(name, target).estimate.compute_time


def with_numbers(target: str, values: Mapping[str, float]) -> jaxauto.Target:
    """The target, its chip with other numbers."""
    changed = jaxauto.Target(target)
    numbers = {name: dataclasses.replace(changed.chip.numbers[name], value=x) for name, x in values.items()}
    changed.chip = dataclasses.replace(changed.chip, numbers={**changed.chip.numbers, **numbers})
    return changed


def errors(measured: Mapping[str, float], target: jaxauto.Target) -> dict[str, float]:
    """Program → logarithm of estimated over timed."""
    return {name: float(np.log(told(name, target) / seconds)) for name, seconds in measured.items()}


def fit(found: Mapping[str, Any], target: str) -> dict[str, float]:
    """Each number by the programs that tell of it, ``TOLD_BY``: the least mean of the errors' sizes, the others held; to two digits.

    A kernel's start is charged to the kernels that were seen, so that what the planner miscounts of them is not made up for.
    """
    measured = timed(found)
    values = {name: jaxauto.Target(target).chip.numbers[name].value for name in TOLD_BY}
    for _ in range(2):
        for number, kinds in TOLD_BY.items():
            own = {name: seconds for name, seconds in measured.items() if name.startswith(kinds)}

            def cost(scale: float, number: str = number, own: Mapping[str, float] = own) -> float:
                tried = {**values, number: values[number] * scale}
                on = with_numbers(target, {**tried, "launch_seconds": 0.0})
                starts = [tried["launch_seconds"] * found["programs"][name]["kernels"] for name in own]
                seconds = [told(name, on) + start for name, start in zip(own, starts, strict=True)]
                return float(np.mean(np.abs(np.log(np.array(seconds) / list(own.values())))))

            best = minimize_scalar(cost, bounds=(0.5, 2.0), method="bounded", options={"maxiter": 20, "xatol": 5e-3})
            values[number] = float(f"{values[number] * best.x:.2g}")
    return values


def report(found: Mapping[str, Any], target: str, values: Mapping[str, float]) -> str:
    """results/calibration.md"""
    measured = timed(found)
    machine = found["machine"]
    lines = [f"# What a GPU reaches: {machine['kind']}", "", f"Made by scripts/calibrate.py; jax {machine['jax']}.", ""]
    lines += ["| number | fitted here | in chips.py |", "|---|---|---|"]
    chip = jaxauto.Target(target).chip
    lines += [f"| {name} | {x:.3g} | {chip.numbers[name].value:.3g} |" for name, x in values.items()]
    now, fitted = errors(measured, jaxauto.Target(target)), errors(measured, with_numbers(target, values))
    for text, of in (("with the numbers of chips.py", now), ("with those fitted here", fitted)):
        size = np.abs(np.expm1(list(of.values())))
        lines += ["", f"Error {text}: median {np.median(size):.1%}, 90th percentile {np.percentile(size, 90):.1%}."]
    lines += ["", "| program | ms | kernels | estimated by chips.py | error |", "|---|---|---|---|---|"]
    for name, seconds in measured.items():
        runs = found["programs"][name]["kernels"]
        lines.append(f"| {name} | {seconds * 1e3:.3f} | {runs} | {seconds * np.exp(now[name]) * 1e3:.3f} | {np.expm1(now[name]):+.0%} |")
    return "\n".join(lines) + "\n"


def timed(found: Mapping[str, Any]) -> dict[str, float]:
    """Program → seconds: the median round."""
    return {name: float(np.median(row["seconds"])) for name, row in found["programs"].items() if name in PROGRAMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="time the programs on the GPU of this machine")
    parser.add_argument("--only", default="", help="programs whose name holds one of these, parted by commas")
    parser.add_argument("--threads", type=int, default=4, help="that compile")
    parser.add_argument("--out", type=Path, default=RESULTS / "calibration_h200.json")
    options = parser.parse_args()
    names = [name for name in PROGRAMS if any(part in name for part in options.only.split(","))]
    if options.measure:
        measure(names, options.out, options.threads)
        return
    found = json.loads(options.out.read_text())
    chip = chip_of_kind(found["machine"]["kind"])
    assert chip is not None
    target = f"{chip.name}:1"
    values = fit(found, target)
    text = report(found, target, values)
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
