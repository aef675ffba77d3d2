"""The estimate beside a real GPU: python scripts/bench_device.py [--plan FOLDER] [--measure FOLDER] [--only …] [--out results/device.json]

``MODELS`` on one device, each as written (``jax.jit`` with its state donated) and under three plans: nothing recomputed ("off"), 5 % over
the least memory that a plan can have ("full"), half way between ("chosen"). --plan makes the plans, anywhere; --measure, on the GPU,
compiles and runs them. Noted: seconds of a step (median of five rounds of queued steps), what the compiler allocates, kernels by the
profiler, and the loss of the first step, which is to be the same under all. Writes results/device.json as it goes and results/device.md.
The numbers of the chip are fitted to other programs (calibrate.py).
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import bench_models  # noqa: E402
import on_device  # noqa: E402
import remat_cases  # noqa: E402
from scipy.stats import spearmanr  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto.verify import Compilation, memory_of  # noqa: E402

RESULTS = HERE / "results"
TARGET = "h200:1"
SETTINGS = ("off", "chosen", "full")
WRITTEN = "as written"
# Model → path of an argument of integers → what they are below: nodes, classes, rows of stacked tables.
INDICES = {"Graph network": {"[2][2]": 65536, "[2][3]": 65536, "[2][4]": 64}, "DLRM": {"[2][1]": 524288}}
Made = tuple[Callable, tuple]
MODELS: dict[str, Callable[[], Made]] = {
    **{name: partial(remat_cases.step_of, name, TARGET) for name in remat_cases.CASES},
    "BERT": partial(bench_models.encoder, bench_models.WIDE.with_(batch=32)),
    "Graph network": partial(bench_models.gnn, 65536, 524288, 256, 1024),
    "DLRM": partial(bench_models.dlrm, 524288, 64, 131072, 4096),
}


# -------------------------------------------------------------------------------------------------------------- planning


def plans_of(model: str) -> dict[str, jaxauto.Plan]:
    """By setting."""
    step, args = MODELS[model]()

    make = partial(jaxauto.plan, step, *args, target=TARGET, mesh={"data": 1}, certify=False, progress=False)
    return {setting: remat_cases.plan_under(make, setting) for setting in SETTINGS}


def file_of(folder: Path, model: str, setting: str) -> Path:
    return folder / f"{model}-{setting}.json".replace(" ", "_").replace(",", "")


# -------------------------------------------------------------------------------------------------------------- measured


class Stepper:
    """Runs a step again and again on the state that it returned."""

    def __init__(self, run: Callable, args: tuple):
        self.run, self.state, self.rest = run, args[:2], args[2:]

    def __call__(self) -> Any:
        *state, metrics = self.run(*self.state, *self.rest)
        self.state = tuple(state)
        return metrics


def measure(model: str, folder: Path, texts: dict[str, str], *, traced: bool) -> dict[str, Any]:
    """Setting → what was seen."""
    step, args = MODELS[model]()
    plans = {setting: jaxauto.Plan.load(str(file_of(folder, model, setting)), step, *args) for setting in SETTINGS}
    written, outputs = jax.jit(step, donate_argnums=(0, 1)), jax.tree.structure(jax.eval_shape(step, *args))
    start = time.perf_counter()
    with ThreadPoolExecutor(len(SETTINGS) + 1) as pool:
        waiting = {setting: pool.submit(plan.lower().compile) for setting, plan in plans.items()}
        waiting[WRITTEN] = pool.submit(written.lower(*args).compile)
        compiled = {setting: future.result() for setting, future in waiting.items()}
    print(f"{model}: compiled in {time.perf_counter() - start:.0f} s", flush=True)
    found = {}
    for setting, program in compiled.items():
        texts[f"{model} | {setting}"] = program.as_text()
        estimate = plans["off" if setting == WRITTEN else setting].estimate
        found[setting] = {"memory": memory_of(program), "told": {"seconds": estimate.step_time, "bytes": estimate.peak_memory}}
        try:
            arrays = on_device.concrete(args, INDICES.get(model, {}))
            found[setting] |= run(program if setting == WRITTEN else flat(program, outputs), arrays, traced=traced)
        except jax.errors.JaxRuntimeError as error:
            found[setting]["failed"] = str(error)[:300]
        seen = found[setting]
        print(f"  {setting}: {seen.get('median', 0) * 1e3:.2f} ms, loss {seen.get('loss')} {seen.get('failed', '')}", flush=True)
    return found


def flat(program: Any, outputs: Any) -> Callable:
    """A compiled plan, which takes and returns leaves, as the step is called."""

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(outputs, program(*jax.tree.leaves(args)))

    return call


def run(program: Callable, args: tuple, *, traced: bool) -> dict[str, Any]:
    stepper = Stepper(program, args)
    loss = float(jax.tree.leaves(stepper())[0])
    seconds = on_device.seconds_of(stepper)
    middle, spread = on_device.spread(seconds)
    seen = {"median": middle, "spread": spread, "seconds": seconds, "loss": loss}
    kernels = on_device.kernels_of(stepper)
    seen |= {"kernels": on_device.runs(kernels), "kernel seconds": on_device.total(kernels)}
    return seen | ({"trace": kernels} if traced else {})


# ---------------------------------------------------------------------------------------------------------------- tables


def needed(row: dict) -> float:
    """Bytes that the compiled step takes on the device."""
    return Compilation("", "", row["memory"], 0.0).device_bytes


def summary(found: dict[str, Any]) -> str:
    """results/device.md"""
    machine, models = found["machine"], [name for name in MODELS if name in found]
    lines = [f"# The estimate beside a real GPU: {machine['kind']}", ""]
    lines += [f"Made by scripts/bench_device.py; jax {machine['jax']}. The chip's numbers: calibration_h200.md.", ""]
    if missing := [name for name in MODELS if name not in found]:
        lines += [f"Not measured, for lack of time on the machine: {', '.join(missing)}.", ""]
    rows = {(m, s): found[m][s] for m in models for s in SETTINGS if "median" in found[m].get(s, {})}
    for title, pairs in (
        ("Step time", [(r["told"]["seconds"], r["median"]) for r in rows.values()]),
        ("Step time as estimated before they were run", [(r.get("told first", r["told"])["seconds"], r["median"]) for r in rows.values()]),
        ("Memory", [(r["told"]["bytes"], needed(r)) for r in rows.values()]),
    ):
        error = np.array([told / seen - 1 for told, seen in pairs])
        size = np.abs(error)
        text = f"median {np.median(size):.1%}, 90th percentile {np.percentile(size, 90):.1%}, {error.min():+.0%} to {error.max():+.0%}"
        lines.append(f"- {title}, {len(pairs)} plans of {len(models)} models: error (estimated / measured - 1) {text}.")
    ranks = [rank for m in models if (rank := _rank([found[m][s] for s in SETTINGS if "median" in found[m].get(s, {})])) is not None]
    lines.append(
        f"- Is the faster plan the faster plan? Rank correlation in a model: median {np.median(ranks):.2f}, least {min(ranks):.2f}."
    )
    apart = [abs(r["loss"] / found[m][WRITTEN]["loss"] - 1) for (m, _), r in rows.items() if "loss" in found[m].get(WRITTEN, {})]
    lines.append(f"- Loss of the first step against the step as written: at most {np.nanmax(apart):.1e} apart{_nowhere(rows)}.")
    quick = [found[m][WRITTEN]["median"] / min(r["median"] for (n, _), r in rows.items() if n == m) for m in models if WRITTEN in found[m]]
    lines += [f"- The fastest plan is {np.median(quick):.2f} times as fast as the step as written (median of models; {min(quick):.2f} to"]
    lines += [f"  {max(quick):.2f}).", ""]
    lines += [*(f"- {text}" for text in found.get("remarks", ())), ""]
    lines += ["| model, plan | ms | estimated | error | spread of rounds | MiB | estimated | error | kernels |", "|---|" + "---|" * 8]
    for m in models:
        for setting in (*SETTINGS, WRITTEN):
            if "median" in (row := found[m].get(setting, {})):
                lines.append(_line(f"{m}, {setting}", row, told=setting != WRITTEN))
    return "\n".join(lines) + "\n"


def _nowhere(rows: dict[tuple[str, str], dict]) -> str:
    """Models whose random labels are no classes: their loss is no number, under any plan."""
    names = dict.fromkeys(model for (model, _), row in rows.items() if np.isnan(row["loss"]))
    return f" (of {', '.join(names)} it is NaN under all: random labels, more than classes)" if names else ""


def _rank(rows: list[dict]) -> float | None:
    if len(rows) < 3:
        return None
    return float(spearmanr([r["told"]["seconds"] for r in rows], [r["median"] for r in rows]).statistic)


def _line(name: str, row: dict, *, told: bool) -> str:
    cells = [f"{row['median'] * 1e3:.2f}"]
    cells += [f"{row['told']['seconds'] * 1e3:.2f}", f"{row['told']['seconds'] / row['median'] - 1:+.1%}"] if told else ["", ""]
    cells += [f"{row['spread']:.1%}", f"{needed(row) / 2**20:,.0f}"]
    cells += [f"{row['told']['bytes'] / 2**20:,.0f}", f"{row['told']['bytes'] / needed(row) - 1:+.1%}"] if told else ["", ""]
    return f"| {name} | {' | '.join(cells)} | {row['kernels'] or ''} |"


def tell_again(model: str, old: Path, new: Path, found: dict[str, Any]) -> None:
    """What today's code estimates of the plans that were run, where it makes them again; the first estimate is kept beside it."""
    for setting in SETTINGS:
        run, made = (json.loads(file_of(folder, model, setting).read_text()) for folder in (old, new))
        if run["decisions"] == made["decisions"]:
            row, estimate = found[model][setting], made["estimate"]
            row.setdefault("told first", row["told"])
            row["told"] = {"seconds": estimate["step_time"], "bytes": estimate["peak_memory"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, help="make the plans and keep them in this folder")
    parser.add_argument("--measure", type=Path, help="run the plans of this folder on the GPU of this machine")
    parser.add_argument("--again", type=Path, nargs=2, help="folders of the plans that were run and of today's: note today's estimates")
    parser.add_argument("--only", default="", help="models whose name holds one of these, parted by commas")
    parser.add_argument("--trace", action="store_true", help="note each kernel, and the compiled programs beside --out")
    parser.add_argument("--out", type=Path, default=RESULTS / "device.json")
    options = parser.parse_args()
    models = [name for name in MODELS if any(part in name for part in options.only.split(",") if part or not options.only)]
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    beside = options.out.with_suffix(".hlo.json.gz")
    texts: dict[str, str] = json.loads(gzip.decompress(beside.read_bytes())) if options.trace and beside.exists() else {}
    for model in models:
        if options.plan:
            options.plan.mkdir(parents=True, exist_ok=True)
            for setting, plan in plans_of(model).items():
                plan.save(str(file_of(options.plan, model, setting)))
                told = plan.estimate
                print(f"{model}, {setting}: {told.step_time * 1e3:.2f} ms, {told.peak_memory / 2**20:.0f} MiB", flush=True)
        if options.again:
            tell_again(model, *options.again, found)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
        if options.measure:
            found["machine"] = on_device.machine()
            found[model] = measure(model, options.measure, texts, traced=options.trace)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            if options.trace:
                beside.write_bytes(gzip.compress(json.dumps(texts).encode()))
    if any(name in found for name in MODELS):
        options.out.with_suffix(".md").write_text(summary(found))


if __name__ == "__main__":
    main()
