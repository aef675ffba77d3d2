"""The estimate against compilers, over models × shardings × rematerialisation × targets: python scripts/bench_accuracy.py [--targets …]

Models: the published ones of remat_cases.py and two more, train steps drawn at random (generated.py; "unseen": of seeds that nobody had
looked at when they were measured), steps as users of flax write them (flax_models.py), and those of bench_models.py and tests/zoo that are
so small (KiB to MiB) that a chip's figures for them say little; these for CPU. Shardings: one device, data-parallel,
FSDP and tensor-parallel (arguments pinned through ``constraints``), and the solver's own. Rematerialisation: off, full (5 % over the
least memory that a plan can have), chosen (half way between). Each plan is compiled ahead of time, certified by nothing, and compared:
memory, flops, collectives, seconds by the roofline of the compiled schedule. To stay within hours each sharding is compiled under one of
the three settings, in turn from model to model, one device under all; with --every each sharding under all three. Writes
results/accuracy.json as it goes and results/accuracy.md. With --estimates nothing is compiled or written: of the plans of one device that
recompute nothing, which are as the program is written whatever the estimate says, today's estimate is told beside what was compiled then.
With another version of JAX and its compilers the tables are kept apart: --out results/accuracy_newest.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from scipy.stats import spearmanr

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

import bench_models  # noqa: E402
import bench_vision  # noqa: E402
import flax_models  # noqa: E402
import generated  # noqa: E402
import remat_cases  # noqa: E402
from zoo import programs  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto import frontend  # noqa: E402
from jaxauto.aot import CompilerFailure, close_workers  # noqa: E402
from jaxauto.targets import CHIPS  # noqa: E402
from jaxauto.trace import trace  # noqa: E402
from jaxauto.verify import compile_ahead, planned_collectives  # noqa: E402

RESULTS = HERE / "results"
MESHES = {"data": {"data": 8}, "FSDP": {"data": 8}, "tensor": {"data": 2, "model": 4}, "solver": None}
SETTINGS = ("off", "full", "chosen")
# chip → topology of one device and of eight
TARGETS = {
    "cpu": ("cpu:1", "cpu:8"),
    "h100": ("h100:1", "h100:8"),
    "v5e": ("v5e:1x1", "v5e:2x4"),
    "v5p": ("v5p:1x1x1", "v5p:2x2x2"),
    "v6e": ("v6e:1x1", "v6e:2x4"),
}
# Names of parameters whose inputs are split in Megatron's way (arXiv 1909.08053, section 3); of the others the outputs are.
ROWS = ("out", "down", "project")
SHARES = (0.05, 0.15, 0.25, 0.35, 0.5)  # of communication that can hide, tried
MORE = {
    "ResNet-50": remat_cases.Case(lambda n: bench_vision.resnet((3, 4, 6, 3), 64, 224, n, 1000), 64, "224 × 224"),
    "Graph network": remat_cases.Case(
        lambda n: bench_models.gnn(2048 * n, 16384 * n, 256, 1024), 8, "4 rounds of 16,384 nodes and 131,072 edges, 256 wide"
    ),
}
DRAWN = 4  # random programs of each kind
SEEDS = {"generated": range(8), "unseen": range(8, 16)}  # of train steps; the second ones were measured before anybody saw what they are
APART = (0.0, 0.02, 0.05, 0.1)  # of the faster one's time


def models(group: str, devices: int) -> dict[str, Callable[[], tuple[Callable, tuple]]]:
    """Name → factory of (step, arguments) of a group: "published", "generated", "unseen", "flax", "small", "random"."""
    if group == "small":
        return {name: sizes["small"] for name, sizes in bench_models.MODELS.items()}
    if group == "published":
        return {name: partial(case.make, case.batch * devices) for name, case in {**remat_cases.CASES, **MORE}.items()}
    if group == "flax":
        return {name: partial(make, batch * devices) for name, (make, batch) in flax_models.MODELS.items()}
    if group in SEEDS:
        recipes = {f"{seed}": generated.draw(seed) for seed in SEEDS[group]}
        return {name: partial(generated.make, recipe, recipe.batch * devices) for name, recipe in recipes.items()}
    drawn = {f"{kind} {seed}": programs.draw(kind, seed) for kind in programs.KINDS for seed in range(DRAWN)}
    return {name: lambda d=d: (d.step, d.args) for name, d in drawn.items()}


def rows_of(group: str, *, every: bool) -> Iterator[tuple[str, str, str]]:
    """(model, sharding, setting) of a group; each sharding under every setting, or under one of them."""
    for k, model in enumerate(models(group, 1)):
        if group == "random":
            yield model, "solver", "off"
            continue
        yield from ((model, "one device", setting) for setting in SETTINGS)
        for j, sharding in enumerate(MESHES):
            yield from ((model, sharding, setting) for setting in (SETTINGS if every else [SETTINGS[(k + j) % 3]]))


# ---------------------------------------------------------------------------------------------------------- hand-written


def constraints(step: Callable, args: tuple, sharding: str) -> dict[str, PartitionSpec]:
    """A spec for each argument's path: the batch over "data", the state as the sharding says."""
    form = frontend.functional(step, args)
    traced = trace(form.step, form.arguments(args))
    state = {k for k, _ in traced.state}
    return {
        path: _state_spec(path, aval.shape, sharding) if k in state else _spec(aval.shape, 0, "data", MESHES[sharding] or {})
        for k, (path, aval) in enumerate(zip(traced.in_paths, traced.in_avals, strict=True))
    }


def _state_spec(path: str, shape: tuple[int, ...], sharding: str) -> PartitionSpec:
    mesh = MESHES[sharding] or {}
    if sharding == "data" or not shape:
        return PartitionSpec()
    if sharding == "FSDP":
        fits = [k for k, n in enumerate(shape) if n % mesh["data"] == 0]
        return _spec(shape, max(fits, key=lambda k: shape[k]), "data", mesh) if fits else PartitionSpec()
    matrix = len(shape) - 2 if any(name in path for name in ROWS) else len(shape) - 1
    return _spec(shape, matrix, "model", mesh) if len(shape) > 1 else PartitionSpec()


def _spec(shape: tuple[int, ...], dim: int, axis: str, mesh: Mapping[str, int]) -> PartitionSpec:
    if len(shape) <= dim or shape[dim] % mesh[axis]:
        return PartitionSpec()
    return PartitionSpec(*[None] * dim, axis)


# -------------------------------------------------------------------------------------------------------------- measured


def plan_of(group: str, model: str, sharding: str, setting: str, chip: str) -> jaxauto.Plan:
    """The plan of a row.

    Raises:
      jaxauto.InfeasibleError: no such plan.
    """
    target = TARGETS[chip][sharding != "one device"]
    step, args = models(group, 1 if sharding == "one device" else 8)[model]()
    mesh = {"data": 1} if sharding == "one device" else MESHES[sharding]
    pinned = constraints(step, args, sharding) if sharding in ("data", "FSDP", "tensor") else None
    donated = () if group == "random" else None
    make = partial(jaxauto.plan, step, *args, target=target, mesh=mesh, constraints=pinned, certify=False, progress=False)
    make = partial(make, donate_argnums=donated) if donated is not None else make
    return remat_cases.plan_under(make, setting)


def measure(group: str, model: str, sharding: str, setting: str, chip: str) -> dict[str, Any]:
    """Estimated beside compiled."""
    try:
        plan = plan_of(group, model, sharding, setting, chip)
        plan.__dict__["compilation"] = compile_ahead(plan, 900)
    except (jaxauto.InfeasibleError, CompilerFailure) as error:
        return {"outcome": f"{type(error).__name__}: {error}"[:300]}
    found = plan.verify()
    return {
        "outcome": "compiled",
        "on": _when(),
        "rows": {row.name: [row.estimated, row.compiled] for row in found.rows},
        "collectives": {row.name: [row.estimated, row.compiled, row.estimated_count, row.compiled_count] for row in found.collectives},
        "blocking": blocking_seconds(plan),
        "planned kinds": len(planned_collectives(plan.estimate)),
        "recomputed": sum(d.action == "recomputed" for d in plan.remat),
        "notes": found.notes,
    }


def blocking_seconds(plan: jaxauto.Plan) -> float:
    """Seconds of communication that can hide behind nothing, by the estimate."""
    best = plan._bound().solved.best
    return float(best.model.problem.resource("blocking", best.x))


def error(row: dict, name: str) -> float | None:
    """(estimated − compiled) / compiled; None where the compiled program has none of it."""
    estimated, compiled = row["rows"].get(name, (None, None))
    return None if estimated is None or not compiled else estimated / compiled - 1


# ---------------------------------------------------------------------------------------------------------------- tables

QUANTITIES = {
    "memory": "peak memory",
    "flops": "matrix flops",
    "collectives": "collective bytes",
    "time": "step time (roofline of the schedule)",
}
CYCLES = "step time (compiler's cycles)"


def spread(errors: list[float]) -> str:
    """Median and 95th (90th) percentile of the size, the extremes with their signs."""
    if not errors:
        return "| | | "
    size = np.abs(errors)
    tail = f"{np.percentile(size, 90):.1%}, {np.percentile(size, 95):.1%}"
    return f"| {np.median(size):.1%} | {tail} | {min(errors):+.0%} to {max(errors):+.0%} "


def summary(found: dict[str, dict]) -> str:
    """results/accuracy.md"""
    lines = ["# The estimate against compilers", "", f"Made by scripts/bench_accuracy.py; jax {jax.__version__}.", ""]
    lines += ["An error is (estimated - compiled) / compiled; medians and percentiles are of its size.", ""]
    lines += ["Measured, by the code of that day:", *_days(found), ""]
    groups: dict[str, list[dict]] = defaultdict(list)
    for key, row in found.items():
        group, _, sharding, _, chip = key.split(" | ")
        if row["outcome"] == "compiled":
            groups[f"{chip}, {group}, {'one device' if sharding == 'one device' else 'eight devices'}"].append(row)
    for title, name in QUANTITIES.items():
        lines += [f"## {title.capitalize()}", ""]
        lines += ["| programs | plans | median | 90th, 95th percentile | from, to |", "|---|---|---|---|---|"]
        for group, rows in sorted(groups.items()):
            errors = [e for row in rows if (e := error(row, name)) is not None]
            if errors:
                lines.append(f"| {group} | {len(errors)} {spread(errors)}|")
        lines.append("")
    lines += ranks(found)
    lines += shares(groups)
    drawn = [seed for group, seeds in SEEDS.items() if any(key.startswith(group) for key in found) for seed in seeds]
    if drawn:
        lines += ["## Generated programs", "", *(f"- {seed}: {generated.draw(seed)}" for seed in drawn), ""]
    head = "| plan | memory MiB | compiled | collectives MiB | compiled | ms | schedule | cycles | recomputed |"
    lines += ["## Every plan", "", head, "|---|" + "---|" * 8]
    lines += [_line(key, row) for key, row in found.items()]
    return "\n".join(lines) + "\n"


@cache
def _when() -> str:
    """The day, and the commit that is checked out."""
    head = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return ", ".join(filter(None, (datetime.date.today().isoformat(), head.stdout.strip())))


def _days(found: dict[str, dict]) -> Iterator[str]:
    for chip in TARGETS:
        days = Counter(row.get("on", "earlier") for key, row in found.items() if key.endswith(f"| {chip}"))
        if days:
            yield f"- {chip}: " + "; ".join(f"{day} {count}" for day, count in sorted(days.items()))


def ranks(found: dict[str, dict]) -> list[str]:
    """Spearman's correlation of estimated and judged seconds among the plans of one model on eight devices, and that of cycles."""
    lines = ["## Is the cheaper plan the cheaper plan?", ""]
    lines += ["Rank correlation among the plans of one model on one target (three or more).", ""]
    lines += ["| target | models | with the schedule: median, least | with the compiler's cycles: median, least |", "|---|---|---|---|"]
    for chip in TARGETS:
        by_model: dict[str, list[dict]] = defaultdict(list)
        for key, row in found.items():
            group, model, sharding, _, on = key.split(" | ")
            if on == chip and sharding != "one device" and row["outcome"] == "compiled":
                by_model[f"{group} {model}"].append(row)
        pairs = [[_rank(rows, name) for name in (QUANTITIES["time"], CYCLES)] for rows in by_model.values() if len(rows) > 2]
        text = []
        for which in zip(*pairs, strict=True):
            known = [r for r in which if r is not None]
            text.append(f"{np.median(known):.2f}, {min(known):.2f}" if known else "")
        if pairs:
            lines.append(f"| {chip} | {len(pairs)} | {' | '.join(text)} |")
    return [*lines, "", *ordered(found)]


def ordered(found: dict[str, dict]) -> list[str]:
    """Of two plans of one model on the same devices: how often the one that is told to be faster is. Ranks of plans that all but tie are
    noise, so pairs are counted by what lies between them."""
    lines = ["Of pairs of plans of one model on the same devices whose schedules differ by more than this, in the right order:", ""]
    lines += [f"| target | {' | '.join(f'{gap:.0%}' for gap in APART)} |", "|---|" + "---|" * len(APART)]
    for chip in TARGETS:
        alike: dict[tuple, list[list[float]]] = defaultdict(list)
        for key, row in found.items():
            group, model, sharding, _, on = key.split(" | ")
            if on == chip and row["outcome"] == "compiled":
                alike[group, model, sharding == "one device"].append(row["rows"][QUANTITIES["time"]])
        pairs = [pair for plans in alike.values() for pair in combinations(plans, 2)]
        cells = []
        for gap in APART:
            right = [(a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs if max(a[1], b[1]) > (1 + gap) * min(a[1], b[1])]
            cells.append(f"{sum(right)} of {len(right)}")
        if pairs:
            lines.append(f"| {chip} | {' | '.join(cells)} |")
    return [*lines, ""]


def shares(groups: Mapping[str, list[dict]]) -> list[str]:
    """How much is waited for of communication that could hide (``Chip.exposed_share``): the share that explains totals best."""
    lines = ["## What is waited for of communication that can hide", ""]
    chips = [CHIPS[name] for name in TARGETS]
    taken = ", ".join(f"{chip.exposed_share} on {chip.name}" for chip in chips)
    lines += [
        "Compiled seconds of compute, and of the estimated communication all that blocks and a share of the rest, against the compiled"
    ]
    lines += [f"total: median and 90th percentile of the error's size. The planner takes {taken}.", ""]
    lines += [f"| programs | plans | {' | '.join(str(share) for share in SHARES)} |", "|---|---|" + "---|" * len(SHARES)]
    for group, rows in sorted(groups.items()):
        known = [row for row in rows if "blocking" in row and row["rows"].get("communication time", (0, 0))[1]]
        if not known:
            continue
        cells = []
        for share in SHARES:
            errors = [abs(_explained(row, share)) for row in known]
            cells.append(f"{np.median(errors):.1%}, {np.percentile(errors, 90):.1%}")
        lines.append(f"| {group} | {len(known)} | {' | '.join(cells)} |")
    return [*lines, ""]


def _explained(row: dict, share: float) -> float:
    told, compute = row["rows"]["communication time"][0], row["rows"]["compute time"][1]
    return (compute + row["blocking"] + share * (told - row["blocking"])) / row["rows"][QUANTITIES["time"]][1] - 1


def _rank(rows: list[dict], name: str) -> float | None:
    pairs = [row["rows"][name] for row in rows if name in row["rows"]]
    if len(pairs) < 3 or len({p[1] for p in pairs}) < 2 or len({p[0] for p in pairs}) < 2:
        return None
    return float(spearmanr([p[0] for p in pairs], [p[1] for p in pairs]).statistic)


def _line(key: str, row: dict) -> str:
    name = key.replace(" | ", ", ")
    if row["outcome"] != "compiled":
        return f"| {name} | {row['outcome'][:120].replace('|', '/')} |" + " |" * 7
    cells = []
    for quantity, unit in (("memory", 2**20), ("collectives", 2**20), ("time", 1e-3)):
        cells += [f"{x / unit:,.2f}" for x in row["rows"][QUANTITIES[quantity]]]
    cycles = row["rows"].get(CYCLES, (0, 0))[1]
    return f"| {name} | {' | '.join(cells)} | {f'{cycles * 1e3:,.2f}' if cycles else ''} | {row['recomputed']} |"


def estimates(found: dict[str, dict], chips: Collection[str], only: str) -> None:
    """Prints the errors of today's estimates against results, as they were and as they are."""
    print("| plan | memory then | now | time then | now |\n|---|---|---|---|---|", flush=True)
    for key, row in found.items():
        *_, sharding, setting, chip = parts = key.split(" | ")
        if (sharding, setting) != ("one device", "off") or chip not in chips or only not in key or row["outcome"] != "compiled":
            continue
        told = plan_of(*parts).estimate
        now = {"memory": told.peak_memory, "time": told.step_time - told.exposed_feed_time}
        pairs = [(error(row, QUANTITIES[k]), n / row["rows"][QUANTITIES[k]][1] - 1) for k, n in now.items()]
        print(f"| {key.replace(' | ', ', ')} | {' | '.join(f'{e:+.1%}' for pair in pairs for e in pair)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="cpu,h100,v5e,v5p")
    parser.add_argument("--groups", default="published,generated,flax")
    parser.add_argument("--every", action="store_true", help="each sharding under every setting")
    parser.add_argument("--only", default="", help="rows whose key holds this")
    parser.add_argument("--renew", action="store_true", help="measure again what is there already")
    parser.add_argument("--keep", type=Path, help="a folder for compiled programs: the same program is compiled once")
    parser.add_argument("--estimates", action="store_true", help="compile nothing: today's estimates beside what was compiled")
    parser.add_argument("--out", type=Path, default=RESULTS / "accuracy.json")
    options = parser.parse_args()
    remat_cases.compile_once(options.keep)
    found: dict[str, dict] = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.estimates:
        estimates(found, options.targets.split(","), options.only)
        return
    for chip in options.targets.split(","):
        for group in options.groups.split(","):
            for model, sharding, setting in rows_of(group, every=options.every):
                key = " | ".join((group, model, sharding, setting, chip))
                if options.only not in key or (key in found and not options.renew):
                    continue
                found[key] = measure(group, model, sharding, setting, chip)
                print(_line(key, found[key]), flush=True)
                options.out.write_text(json.dumps(found, indent=1) + "\n")
        close_workers()
    options.out.with_suffix(".md").write_text(summary(found))


if __name__ == "__main__":
    main()
