"""Plans against the compilers of their targets: python scripts/bench_verify.py [--targets v5e:2x4,…] [--only NAME] [--renew]

Every model of bench_models.py × size × target is planned under a share of the device's memory, certified, and compared with what the
compiler made of it: does it fit, memory, matrix flops, collectives, seconds of the compiled schedule. Writes results/verify.json as it goes
(a case that is there already is kept, unless ``--renew``) and results/verify.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import bench_models  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto.aot import CompilerFailure, close_workers  # noqa: E402

RESULTS = HERE / "results"
SMALL = {"small": (0.6,)}
# target → size → shares of the device's memory that are the budget
CASES = {
    "v5e:2x4": {**SMALL, "medium": (0.4,), "tight": (0.95,)},
    "h100:8": {**SMALL, "medium": (0.4,), "tight": (0.5,), "8b": (0.9,)},
    "v5p:2x2x2": {**SMALL, "medium": (0.4,), "8b": (0.5, 0.9)},
    "v5p:4x4x4": {**SMALL, "medium": (0.7,), "8b": (0.4,)},
    "cpu:8": {**SMALL, "medium": (0.95,)},
}
TOTALS = ("peak memory", "matrix flops", "collective bytes", "step time (roofline of the schedule)")


def measure(model: str, size: str, target: str, share: float, keep: Path | None, name: str) -> dict[str, Any]:
    """One case: what was planned, what was compiled."""
    step, args = bench_models.MODELS[model][size]()
    started = time.monotonic()
    try:
        plan = jaxauto.plan(step, *args, target=target, memory_budget=share, certify=True, progress=False)
    except jaxauto.InfeasibleError as error:
        return {"outcome": "infeasible", "says": str(error), "seconds": time.monotonic() - started}
    except CompilerFailure as error:
        return {"outcome": "compiler failed", "says": str(error), "seconds": time.monotonic() - started}
    seconds = time.monotonic() - started
    found = plan.verify()
    assert plan.certificate is not None
    if keep is not None:
        _keep(plan, keep / name)
    return {
        "outcome": "certified",
        "fits": found.fits,
        "rounds": plan.certificate.rounds,
        "compiler": found.compiler,
        "mesh": dict(plan.mesh.shape),
        "budget_bytes": plan.budget_bytes,
        "recomputed": sum(d.action == "recomputed" for d in plan.remat),
        "seconds": seconds,
        "planning_seconds": plan.solver.seconds["all meshes"],
        "compile_seconds": found.compile_seconds,
        "rows": {row.name: [row.estimated, row.compiled] for row in found.rows},
        "collectives": {row.name: [row.estimated, row.compiled, row.estimated_count, row.compiled_count] for row in found.collectives},
        "notes": found.notes,
    }


def _keep(plan: jaxauto.Plan, folder: Path) -> None:
    """The plan, the solution and the compiled program, to look at later."""
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(str(folder / "plan.json"))
    (folder / "hlo.txt.gz").write_bytes(gzip.compress(plan.__dict__["compilation"].text.encode()))
    (folder / "memory.json").write_text(json.dumps(dict(plan.__dict__["compilation"].memory)))
    best = plan._bound().solved.found.best
    (folder / "solution.pickle").write_bytes(pickle.dumps((dict(plan.mesh.shape), best.variant.kept, best.x)))


# --------------------------------------------------------------------------------------------------------------- tables


def summary(rows: dict[str, dict]) -> str:
    """The table of results/verify.md."""
    by_target: dict[str, list[tuple[str, dict]]] = {}
    for key, row in rows.items():
        model, _, target = key.rpartition(" @ ")
        by_target.setdefault(f"{target.split(' ')[0]}, {'small' if model.endswith('small') else 'larger'}", []).append((key, row))
    head = "| target, models | plans | certified | of them fit | infeasible | rounds |"
    head += " memory error: median (5th to 95th) | flops | collectives |"
    lines = ["# Plans against the compilers of their targets", "", f"Made by scripts/bench_verify.py; jax {jax.__version__}.", ""]
    lines += ["An error is (estimated - compiled) / compiled; medians are of its size.", "", f"{head} time |", "|---|" + "---|" * 9]
    for target, cases in by_target.items():
        certified = [row for _, row in cases if row["outcome"] == "certified"]
        fits = sum(row["fits"] for row in certified)
        infeasible = sum(row["outcome"] == "infeasible" for _, row in cases)
        rounds = ", ".join(f"{n}: {sum(r['rounds'] == n for r in certified)}" for n in sorted({r["rounds"] for r in certified}))
        memory = np.array([error(row, "peak memory") or 0.0 for row in certified] or [np.nan])
        rest = [_median(certified, name) for name in TOTALS[1:]]
        spread = f"{np.median(np.abs(memory)):.1%} ({np.percentile(memory, 5):+.0%} to {np.percentile(memory, 95):+.0%})"
        lines.append(f"| {target} | {len(cases)} | {len(certified)} | {fits} | {infeasible} | {rounds} | {spread} | {' | '.join(rest)} |")
    lines += [
        "",
        "| case | mesh | budget MiB | memory estimated | compiled | flops error | collective MiB estimated | compiled | ms estimated |",
    ]
    lines[-1] += " schedule | seconds (planning, compiling) |"
    lines += ["|---|" + "---|" * 10]
    lines += [_line(key, row) for key, row in rows.items()]
    return "\n".join(lines) + "\n"


def _line(key: str, row: dict) -> str:
    if row["outcome"] != "certified":
        return f"| {key} | {row['outcome']}: {row['says'][:160].replace('|', '/')} |" + " |" * 9
    mib = lambda x: f"{x / 2**20:,.1f}"  # noqa: E731
    (m_e, m_c), (t_e, t_c) = row["rows"]["peak memory"], row["rows"][TOTALS[3]]
    flops = error(row, "matrix flops")
    c_e, c_c = row["rows"]["collective bytes"]
    mesh = "x".join(map(str, row["mesh"].values()))
    return (
        f"| {key} | {mesh} | {mib(row['budget_bytes'])} | {mib(m_e)} | {mib(m_c)} | {'' if flops is None else f'{flops:+.2%}'} | "
        f"{mib(c_e)} | {mib(c_c)} | {t_e * 1e3:,.2f} | {t_c * 1e3:,.2f} | "
        f"{row['seconds']:.0f} ({row['planning_seconds']:.1f}, {row['compile_seconds']:.0f}) |"
    )


def error(row: dict, name: str) -> float | None:
    """Relative error of a total; None where the compiled program has none of it."""
    estimated, compiled = row["rows"][name]
    return estimated / compiled - 1 if compiled else None


def _median(rows: list[dict], name: str) -> str:
    errors = [abs(e) for row in rows if (e := error(row, name)) is not None]
    return f"{np.median(errors):.1%}" if errors else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(CASES))
    parser.add_argument("--sizes", default="small,medium,tight,8b")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--renew", action="store_true", help="measure again what is in the results already")
    parser.add_argument("--keep", type=Path, help="folder for plans and compiled programs")
    parser.add_argument("--out", type=Path, default=RESULTS / "verify.json")
    chosen = parser.parse_args()
    rows: dict[str, dict] = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    for size in chosen.sizes.split(","):
        for target in chosen.targets.split(","):
            for model in (m for m in bench_models.MODELS if size in bench_models.MODELS[m]):
                for share in CASES[target].get(size, ()):
                    key = f"{model} {size} @ {target} {share:.0%}"
                    if chosen.only not in key or (key in rows and not chosen.renew):
                        continue
                    rows[key] = measure(model, size, target, share, chosen.keep, key.replace(" ", "_"))
                    print(_line(key, rows[key]), flush=True)
                    chosen.out.write_text(json.dumps(rows, indent=1) + "\n")
            close_workers()
    chosen.out.with_suffix(".md").write_text(summary(rows))


if __name__ == "__main__":
    main()
