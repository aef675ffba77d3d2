"""Plans against shardings written by hand: python scripts/bench_handwritten.py [--only NAME] [--tune 8] [--renew hand,planned,tuned]

Each case is a train step and a target. By hand: the strategies that an expert would try, with their activation constraints (layouts.py),
each with full rematerialisation of every block; the fastest of them, and those within 5 % of it, with the other four policies of
``jax.checkpoint`` (all would be hours of compiling); the fastest of all that fits counts. Against it ``jaxauto.plan`` of the same step
without any hint, and with ``tune``. All are compiled ahead of time with the same compiler options and judged by the same clock, the
roofline of the compiled schedule plus collectives; fits: arguments + outputs - aliases + temporaries within 92 % of the chip's memory.
Writes results/handwritten.json as it goes and results/handwritten.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import bench_models  # noqa: E402
import bench_vision  # noqa: E402
from layouts import POLICIES, Layout, compiled, of_params  # noqa: E402
from models import LLAMA, Decoder, step_and_args  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto import aot, hlo  # noqa: E402
from jaxauto.aot import CompilerFailure, close_workers  # noqa: E402
from jaxauto.options import budget_bytes  # noqa: E402
from jaxauto.targets.compilers import COMPILER_OPTIONS  # noqa: E402
from jaxauto.targets.target import Target  # noqa: E402
from jaxauto.verify import compile_plan, schedule_on  # noqa: E402

RESULTS = HERE / "results"

# ------------------------------------------------------------------------------------------------------------ by hand

# Names of the dimensions of parameters. "p_": split by rules of their own.
DECODER = {
    **dict.fromkeys(("query",), "p_width p_heads ."),
    **dict.fromkeys(("key", "value"), "p_width p_kv ."),
    **dict.fromkeys(("gate", "up"), "p_width p_hidden"),
    "out": "p_heads . p_width",
    "down": "p_hidden p_width",
    "embed": "p_vocab p_width",
    "head": "p_width p_vocab",
}
MOE = {**DECODER, "up": "p_expert p_width p_hidden", "down": "p_expert p_hidden p_width"}
VIT = {**DECODER, "weight": "p_width p_hidden"}
UNET = dict.fromkeys(("conv1", "conv2"), ". . . p_width")

BOTH = ("data", "model")
TENSOR = dict.fromkeys(("heads", "kv_heads", "hidden", "vocab", "p_heads", "p_kv", "p_hidden", "p_vocab"), "model")
# strategy → dimension → mesh axes. All devices are on "data" where a strategy has no use for "model".
STRATEGIES: dict[str, Mapping[str, Any]] = {
    "data parallel": {"batch": BOTH, "groups": BOTH},
    "FSDP": {"batch": BOTH, "groups": BOTH, "p_width": BOTH},
    "tensor parallel": {"batch": "data", **TENSOR},
    "FSDP + TP": {"batch": "data", "p_width": "data", **TENSOR},
    "FSDP + TP + SP": {"batch": "data", "p_width": "data", "sequence": "model", **TENSOR},
    "2-D": {"batch": "data", "p_width": "data", "width": "model", **TENSOR},
    "FSDP + context": {"p_width": BOTH, "sequence": BOTH, "length": BOTH},
    "FSDP + context + TP": {"p_width": "data", "sequence": "data", "length": "data", **TENSOR},
    "FSDP + expert": {"batch": BOTH, "groups": "data", "p_width": "data", "expert": "model", "p_expert": "model"},
    "spatial": {"batch": "data", "rows": "model", "p_width": "data"},
}
FULL = "nothing"  # saved: every block is rematerialised
NEAR = 1.05  # times the fastest: with other policies it may be ahead
ONE_AXIS = ("data parallel", "FSDP", "FSDP + context")


@dataclass(frozen=True)
class Case:
    """A step for a target; the strategies to try by hand, on meshes whose "model" axis has these sizes."""

    make: Callable[[], tuple[Callable, tuple]]
    target: str
    names: Mapping[str, str]
    strategies: tuple[str, ...]
    model_axes: tuple[int, ...]


DENSE = ("FSDP", "FSDP + TP + SP", "2-D")
WIDE = ("tensor parallel", "FSDP + TP", "FSDP + TP + SP", "2-D")
GPT2 = Decoder(12, 768, 12, 12, 3072, 50304, batch=64, length=1024)
LLAMA_1B = Decoder(16, 2048, 32, 8, 8192, 128256)
MIXTURE = Decoder(12, 1024, 16, 16, 3584, 32768, batch=64, length=1024)
VIT_L = Decoder(24, 1024, 16, 16, 4096, 0, batch=256, length=0)

CASES = {
    "GPT-2 scanned": Case(partial(step_and_args, GPT2), "v5e:2x4", DECODER, DENSE, (2,)),
    "GPT-2 unrolled": Case(
        partial(step_and_args, GPT2.with_(scan=False)), "v5e:2x4", DECODER, ("data parallel", "FSDP", "FSDP + TP"), (2,)
    ),
    "1B": Case(partial(step_and_args, LLAMA_1B.with_(batch=32, length=2048)), "v5e:4x4", DECODER, DENSE, (4,)),
    "1B large batch": Case(partial(step_and_args, LLAMA_1B.with_(batch=128, length=2048)), "v5p:2x2x2", DECODER, DENSE, (2,)),
    "7B": Case(partial(step_and_args, LLAMA["7b"].with_(batch=32, length=2048)), "v5p:2x2x4", DECODER, DENSE, (4,)),
    "8B": Case(partial(step_and_args, LLAMA["8b"].with_(batch=64, length=4096)), "v5p:4x4x4", DECODER, DENSE, (4,)),
    "8B small batch": Case(partial(step_and_args, LLAMA["8b"].with_(batch=16, length=4096)), "v5p:4x4x4", DECODER, WIDE, (4,)),
    "8B v5e": Case(partial(step_and_args, LLAMA["8b"].with_(batch=256, length=2048)), "v5e:16x16", DECODER, DENSE, (4,)),
    "70B": Case(partial(step_and_args, LLAMA["70b"].with_(batch=512, length=4096)), "v5p:8x8x8", DECODER, DENSE, (8,)),
    "MoE v5e": Case(partial(bench_models.moe, MIXTURE), "v5e:2x4", MOE, ("FSDP", "FSDP + TP", "FSDP + expert"), (4,)),
    "MoE v5p": Case(
        partial(bench_models.moe, MIXTURE.with_(width=2048, hidden=7168, batch=128)),
        "v5p:4x4x4",
        MOE,
        ("FSDP", "FSDP + TP", "FSDP + expert"),
        (8,),
    ),
    "ViT-L": Case(partial(bench_vision.vit, VIT_L, 224, 16, 1024), "v5e:2x4", VIT, ("data parallel", "FSDP", "FSDP + TP"), (2,)),
    "128k tokens": Case(
        partial(step_and_args, LLAMA_1B.with_(batch=1, length=131072, chunk=1024)),
        "v5p:4x4x4",
        DECODER,
        ("FSDP + TP + SP", "FSDP + context", "FSDP + context + TP"),
        (8,),
    ),
    "U-Net": Case(partial(bench_vision.unet, 4, 64, 256, 64), "v5e:2x4", UNET, ("data parallel", "FSDP", "spatial"), (2,)),
}


def meshes(case: Case, strategy: str) -> list[dict[str, int]]:
    devices = Target(case.target).num_devices
    if strategy in ONE_AXIS:
        return [{"data": devices, "model": 1}]
    return [{"data": devices // n, "model": n} for n in case.model_axes]


def by_hand(case: Case, strategy: str, mesh: dict[str, int], policy: str, keep: Path | None) -> dict[str, Any]:
    """Compile one sharding written by hand and judge it; ``keep``: a folder for the compiled program."""
    step, args = case.make()
    target = Target(case.target)
    layout = Layout(aot.abstract_mesh(tuple(mesh.values()), tuple(mesh)), STRATEGIES[strategy], policy)
    specs = of_params(layout, case.names, args[:2])
    for leaf in jax.tree.leaves(args[2]):
        specs.append(layout.spec(leaf.shape, ["batch", "sequence", *"..."][: len(leaf.shape)]))
    if case.names is UNET:
        specs[-2:] = [layout.spec(leaf.shape, ["batch", "rows", ".", "."]) for leaf in jax.tree.leaves(args[2])]
    result = compiled(step, args, specs, layout, target, options_for(target))
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{strategy}, {policy}.hlo.gz").write_bytes(gzip.compress(result.text.encode()))
    return judged(case, mesh, result.text, result.device_bytes)


def options_for(target: Target) -> dict:
    """The compiler options that plans for this target have; the same for all."""
    return dict(COMPILER_OPTIONS[target.chip.platform])


# ------------------------------------------------------------------------------------------------------------- judging


def judged(case: Case, mesh: Mapping[str, int], text: str, device_bytes: float) -> dict[str, Any]:
    """What the referee says of a compiled module."""
    target = Target(case.target)
    module = hlo.parse(text)
    clock = schedule_on(target, mesh, module)
    return {
        "mesh": dict(mesh),
        "seconds": clock.total_seconds,
        "compute": clock.compute_seconds,
        "exposed": clock.exposed_collective_seconds,
        "cycles": module.cycles / target.chip.clock_hz if module.cycles else None,
        "flops": module.flops,
        "bytes": device_bytes,
        "fits": device_bytes <= budget_bytes(None, target.chip.hbm_bytes),
    }


def planned(case: Case, tune: int, keep: Path | None) -> dict[str, Any]:
    """The planner's answer to the plain step, compiled only to be judged (``tune=0``)."""
    step, args = case.make()
    started = time.monotonic()
    plan = jaxauto.plan(step, *args, target=case.target, certify=False, tune=tune, progress=False)
    seconds = time.monotonic() - started
    compilation = compile_plan(plan, 900)
    if keep is not None:
        from bench_verify import _keep

        _keep(plan, keep)
    return {
        **judged(case, plan.mesh.shape, compilation.text, compilation.device_bytes),
        "estimated": plan.estimate.step_time,
        "estimated bytes": plan.estimate.peak_memory,
        "estimated flops": plan.estimate.flops,
        "recomputed": sum(d.action == "recomputed" for d in plan.remat),
        "planning": seconds,
        "notes": list(plan.notes),
    }


# --------------------------------------------------------------------------------------------------------------- table


def tried(judge: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return judge()
    except CompilerFailure as error:
        return {"fits": False, "failed": str(error).splitlines()[0][:200]}


def run(name: str, found: dict[str, Any], renew: set[str], tune: int, keep: Path | None, save: Callable[[], None]) -> None:
    """One case, what is not there yet."""
    case = CASES[name]
    rows = found.setdefault(name, {"hand": {}})
    rows["target"] = case.target
    if "planned" in renew or "planned" not in rows:
        rows["planned"] = tried(lambda: planned(case, 0, keep / name.replace(" ", "_") if keep else None))
        told(name, "planned", rows["planned"])
        save()

    def hand(strategy: str, mesh: dict[str, int], policy: str) -> dict[str, Any]:
        key = f"{strategy} {mesh['data']}x{mesh['model']}, {policy}"
        if key not in rows["hand"] or "hand" in renew:
            rows["hand"][key] = tried(lambda: by_hand(case, strategy, mesh, policy, keep and keep / f"{name.replace(' ', '_')}_hand"))
            told(name, key, rows["hand"][key])
            save()
        return rows["hand"][key]

    layouts = [(strategy, mesh) for strategy in case.strategies for mesh in meshes(case, strategy)]
    full = {k: hand(*layout, FULL) for k, layout in enumerate(layouts)}
    fitting = {k: row["seconds"] for k, row in full.items() if row["fits"]}
    for k in sorted(fitting, key=fitting.__getitem__):
        for policy in POLICIES if fitting[k] <= NEAR * min(fitting.values()) else ():
            hand(*layouts[k], policy)
    if tune and ("tuned" in renew or "tuned" not in rows):
        rows["tuned"] = tried(lambda: planned(case, tune, keep / f"{name.replace(' ', '_')}_tuned" if keep else None))
        told(name, "tuned", rows["tuned"])
        save()


def told(name: str, what: str, row: dict[str, Any]) -> None:
    says = row.get("failed") or f"{1e3 * row['seconds']:.1f} ms {row['bytes'] / 2**30:.2f} GiB {'fits' if row['fits'] else 'too large'}"
    print(f"{name} | {what} | {says}", flush=True)


def best_by_hand(rows: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    fitting = [(key, row) for key, row in rows["hand"].items() if row["fits"]]
    return min(fitting, key=lambda r: r[1]["seconds"]) if fitting else None


def table(found: dict[str, Any]) -> str:
    """results/handwritten.md."""
    head = "| case, target | best by hand (of those that fit) | ms | GiB | planned: mesh | ms | GiB |"
    head += " estimate ms | planned / hand | tuned / hand |"
    lines = ["# Plans against shardings written by hand", "", "Made by scripts/bench_handwritten.py: see there for the rules.", ""]
    lines += [f"{head} cycles: planned / hand |", "|---|" + "---|" * 10]
    ratios: dict[str, list[float]] = {"planned": [], "tuned": []}
    fitting: dict[str, list[float]] = {"planned": [], "tuned": []}
    for name, rows in found.items():
        best, plan = best_by_hand(rows), rows.get("planned", {})
        if "seconds" not in plan:
            lines.append(f"| {name}, {rows['target']} | planned: {plan.get('failed', 'not run')} |")
            continue
        cells = [f"{name}, {rows['target']}"]
        cells += [best[0], f"{1e3 * best[1]['seconds']:.1f}", f"{best[1]['bytes'] / 2**30:.2f}"] if best else ["none fits", "", ""]
        cells += ["x".join(map(str, plan["mesh"].values())), f"{1e3 * plan['seconds']:.1f}", f"{plan['bytes'] / 2**30:.2f}"]
        cells[-1] += "" if plan["fits"] else " (too large)"
        cells += [f"{1e3 * plan['estimated']:.1f}"]
        for kind, column in ratios.items():
            row = rows.get(kind, {})
            ratio = row["seconds"] / best[1]["seconds"] if best and "seconds" in row else None
            cells.append(f"{ratio:.3f}" if ratio else "")
            column += [ratio] if ratio else []
            fitting[kind] += [ratio] if ratio and row["fits"] else []
        cells.append(f"{plan['cycles'] / best[1]['cycles']:.3f}" if best and plan["cycles"] and best[1]["cycles"] else "")
        lines.append(f"| {' | '.join(cells)} |")
    tried = "strategies with `nothing` saved, the fastest and those within 5 % with all five policies"
    counts = ", ".join(f"{name} {len(rows['hand'])}" for name, rows in found.items())
    large = [name for name, rows in found.items() if not rows.get("planned", {}).get("fits", True)]
    lines += [
        "",
        f"Written by hand and compiled ({tried}): {counts}.",
    ]
    lines += [f"Plans that do not fit when planned without compiling: {', '.join(large) or 'none'}."]
    for kind, column in ratios.items():
        if column:
            means = [f"{math.exp(sum(map(math.log, c)) / len(c)):.3f} of {len(c)}" for c in (column, fitting[kind]) if c]
            lines += ["", f"{kind} / best by hand, geometric mean: {means[0]} cases, {means[-1]} that fit; worst {max(column):.3f}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this; several parted by commas")
    parser.add_argument("--tune", type=int, default=0, help="also plan with tune=N")
    parser.add_argument("--renew", default="", help="hand, planned, tuned: measure anew what is there already")
    parser.add_argument("--keep", type=Path, help="a folder for plans and compiled programs")
    parser.add_argument("--out", type=Path, default=RESULTS / "handwritten.json")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}

    def save() -> None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(table(found))

    for name in CASES:
        if any(part in name for part in options.only.split(",")):
            run(name, found, {*options.renew.split(",")}, options.tune, options.keep, save)
    close_workers()


if __name__ == "__main__":
    main()
