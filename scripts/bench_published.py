"""Predicted against published throughput: python scripts/bench_published.py [--only 8b] [--out scripts/results/published] [--again]

Each run of published_runs.py that can be written is planned with its own parallelism pinned by `constraints=`; nothing is compiled. What is
recomputed is jaxauto's choice, except where the run recomputes all. jaxauto does not move activations to the host: where a run does, their
bytes are added to the memory budget, and the transfer is taken to cost nothing. Attention is one kernel that jaxauto knows by a registered
rule: causal, scores never in memory, at the efficiency of any matrix product.

`--again` writes the table anew from the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import jax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from kernel_decoder import KernelDecoder, step_and_args  # noqa: E402
from published_runs import FINDINGS, RUNS, SOURCES, Run  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto.options import budget_bytes  # noqa: E402

SHARE = 0.95  # of the chip's memory
SECONDS = 30.0  # for the solver


def constraints(run: Run) -> dict[str, P]:
    """The run's parallelism, as ``jaxauto.plan`` takes it: parameters, both moments, batch."""
    sizes = dict(run.mesh)
    whole = tuple(a for a in sizes if a.startswith("fsdp"))
    batch = tuple(a for a in sizes if a != "tensor")
    tensor = "tensor" if "tensor" in sizes else None
    model = run.model
    assert model is not None
    heads = tensor if model.kv_heads % sizes.get("tensor", 1) == 0 else None
    return {
        "*layers.query": P(None, whole, tensor),
        **{f"*layers.{name}": P(None, whole, heads) for name in ("key", "values")},
        "*layers.out": P(None, tensor, None, whole),
        **{f"*layers.{name}": P(None, whole, tensor) for name in (("gate", "up") if model.gated else ("up",))},
        "*layers.down": P(None, tensor, whole),
        "*embed": P(tensor, whole),
        **({} if model.tied else {"*head": P(whole, tensor)}),
        "2.*": P(batch),
    }


def host_bytes(run: Run, model: KernelDecoder) -> float:
    """Bytes that each device of the run keeps in host memory, in bf16."""
    widths = {
        "input": model.width,
        "query": model.heads * model.head_dim,
        "key": model.kv_heads * model.head_dim,
        "values": model.kv_heads * model.head_dim,
        "out": model.width,
        "mlp hidden": model.hidden * (2 if model.gated else 1),
        "mlp out": model.width,
    }
    return 2.0 * model.layers * run.sequences * model.length * sum(widths[name] for name in run.host)


def predict(run: Run) -> dict[str, Any]:
    """The plan of one run, in numbers."""
    target = jaxauto.Target(run.target)
    assert run.model is not None
    devices = target.num_devices
    model = dataclasses.replace(run.model, batch=round(run.sequences * devices), remat=run.full)
    budget = budget_bytes(SHARE, target.chip.hbm_bytes) + host_bytes(run, model)
    step, args = step_and_args(model)
    options: dict[str, Any] = {"mesh": dict(run.mesh), "constraints": constraints(run), "remat": "off" if run.full else "auto"}
    started, note = time.perf_counter(), ""
    try:
        plan = jaxauto.plan(step, *args, target=target, memory_budget=int(budget), certify=False, time_limit=SECONDS, **options)
    except jaxauto.InfeasibleError as error:
        if error.least_bytes is None:
            raise
        note = f"needs {error.least_bytes / 2**30:.0f} GiB, has {budget / 2**30:.0f}: planned as if it fitted"
        options["memory_budget"] = int(1.02 * error.least_bytes)
        plan = jaxauto.plan(step, *args, target=target, certify=False, time_limit=SECONDS, **options)
    e = plan.estimate
    chips = devices // target.chip.devices_per_chip
    tokens = model.batch * model.length
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(args[0])),
        "predicted_rate": tokens / chips / e.step_time,
        "step_s": e.step_time,
        "published_step_s": tokens / chips / run.rate,
        "compute_s": e.compute_time,
        "exposed_s": e.exposed_comm_time,
        "comm_s": e.comm_time,
        "matrix_s": e.flops / target.chip.peak_flops("bfloat16"),
        "mfu": e.mfu,
        "peak_gib": e.peak_memory / 2**30,
        "budget_gib": budget / 2**30,
        "planning_s": time.perf_counter() - started,
        "note": note,
        "collectives": [[c.kind, c.bytes_, c.axes, c.count, c.seconds] for c in e.collectives[:6]],
    }


def title(run: Run) -> str:
    """What identifies a run in the results."""
    return f"{run.name}, {run.target}, {run.rate:g}"


# ------------------------------------------------------------------------------------------------------------------ table


def table(results: dict[str, dict]) -> str:
    """The results for people."""
    done = [run for run in RUNS if title(run) in results]
    ratios = sorted(results[title(r)]["predicted_rate"] / r.rate for r in done)
    off = sorted(abs(r - 1) for r in ratios)
    lines = [
        f"Predicted against published throughput, jax {jax.__version__}. {__doc__.split(chr(10) * 2)[1]}".replace("\n", " "),
        "",
        (
            f"{len(done)} of {len(RUNS)} runs could be written. Predicted / published: median {ratios[len(ratios) // 2]:.2f}, "
            f"from {ratios[0]:.2f} to {ratios[-1]:.2f}; error: median {off[len(off) // 2]:.0%}."
        ),
        "",
        (
            "| model | target | mesh | sequences each | published tokens/s/chip | MFU as published | predicted tokens/s/chip | ratio "
            "| step s: published | predicted | compute | exposed communication | GiB predicted, with the host's | remat, remarks | source |"
        ),
        "|" + "---|" * 15,
    ]
    lines += [_line(run, results.get(title(run))) for run in RUNS]
    lines += ["", "Where they differ most, and why:", "", *("- " + text.replace("\n", "\n  ") for text in FINDINGS)]
    lines += ["", "Sources:", "", *(f"- {key}: {text}" for key, text in SOURCES.items())]
    return "\n".join(lines) + "\n"


def _line(run: Run, found: dict | None) -> str:
    mesh = " x ".join(f"{name} {size}" for name, size in run.mesh)
    remat = run.kept or ("all recomputed" if run.full else f"to host: {', '.join(run.host)}" if run.host else "")
    start = f"| {run.name} | {run.target} | {mesh} | {run.sequences if run.model else ''} | {run.rate:g} | {run.mfu} |"
    if found is None:
        return f"{start}  |  |  |  |  |  |  | {run.unable or 'not run'} | {run.source} |"
    remark = "; ".join(x for x in (remat, found["note"]) if x)
    return (
        f"{start} {found['predicted_rate']:.5g} | {found['predicted_rate'] / run.rate:.2f} | {found['published_step_s']:.3g} | "
        f"{found['step_s']:.3g} | {found['compute_s']:.3g} | {found['exposed_s']:.2g} | {found['peak_gib']:.1f} | {remark} | {run.source} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose name or target holds this text")
    parser.add_argument("--out", default=str(HERE / "results" / "published"))
    parser.add_argument("--again", action="store_true")
    chosen = parser.parse_args()
    stored = Path(f"{chosen.out}.json")
    results = json.loads(stored.read_text()) if stored.exists() and (chosen.only or chosen.again) else {}
    for run in () if chosen.again else RUNS:
        if run.unable or chosen.only.lower() not in title(run).lower():
            continue
        try:
            results[title(run)] = found = predict(run)
        except jaxauto.JaxAutoError as error:
            print(f"{title(run)}: {error}", flush=True)
            continue
        print(f"{title(run)}: {found['predicted_rate'] / run.rate:.2f} in {found['planning_s']:.0f} s; {found['note']}", flush=True)
        stored.write_text(json.dumps(results, indent=1) + "\n")
    Path(f"{chosen.out}.md").write_text(table(results))


if __name__ == "__main__":
    main()
