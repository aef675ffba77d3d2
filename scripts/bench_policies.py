"""Plans against the policies of ``jax.checkpoint`` at their own memory: python scripts/bench_policies.py [--targets h100:1] [--only NAME]

Every block of a step (remat_cases.py) gets a policy: ``everything_saveable`` (no jax.checkpoint), ``nothing_saveable``, ``dots_saveable``,
``dots_with_no_batch_dims_saveable``, ``save_only_these_names`` of the outputs of attention and MLP; and two that offload to host memory.
What the compiler allocates on the device for it is the budget of ``jaxauto.plan(..., certify=True)`` of the step without policies, with
``remat="offload"`` where the policy offloads. Both are compiled ahead of time and judged by the same referee, the roofline of the compiled
schedule; ratio: seconds planned / seconds of the policy. A refused budget is a case lost.
Writes results/policies.json as it goes, keeps what is there, and writes results/policies.md.
"""

from __future__ import annotations

import datetime
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench_budget import planned, told, tried  # noqa: E402
from layouts import OFFLOADING, POLICIES  # noqa: E402
from remat_cases import CASES, as_written, sweep  # noqa: E402

_LEAST_GAIN = 0.05  # the goal, of the geometric mean


def run(name: str, target: str, found: dict[str, Any], save: Callable[[], None]) -> None:
    """One step on one target: what is not there yet."""
    rows = found.setdefault(f"{name} @ {target}", {"case": name, "target": target, "policies": {}})
    for policy in (*POLICIES, *OFFLOADING):
        row = rows["policies"].setdefault(policy, {})
        if "policy" not in row:
            row["policy"] = tried(lambda p=policy: as_written(name, target, p))
            print(f"{name} @ {target} | {policy} | {told(row['policy'])}", flush=True)
        if "planned" not in row and "bytes" in row["policy"]:
            remat = "offload" if policy in OFFLOADING else "auto"
            row["planned"] = planned(name, target, row["policy"]["bytes"], certify=True, remat=remat)
            row["planned"]["on"] = datetime.date.today().isoformat()
            print(f"{name} @ {target} | {policy}, planned | {told(row['planned'])}", flush=True)
        save()


def ratio_of(row: dict[str, Any]) -> float | None:
    """Seconds planned / seconds of the policy; None where one of them is not there."""
    there = "seconds" in row.get("policy", {}) and "seconds" in row.get("planned", {})
    return row["planned"]["seconds"] / row["policy"]["seconds"] if there else None


def mean_of(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def head(found: dict[str, Any]) -> list[str]:
    """The means, and where it is lost."""
    lines = ["# Plans against the policies of jax.checkpoint, at the memory of each", "", "Made by scripts/bench_policies.py.", ""]
    every = [(rows, policy, row, ratio_of(row)) for rows in found.values() for policy, row in rows["policies"].items()]
    ratios = [r for _, policy, _, r in every if r is not None and policy in POLICIES]
    if not ratios:
        return lines
    mean, goal = mean_of(ratios), 1 - _LEAST_GAIN
    refused = [f"{rows['case']} @ {rows['target']}, {p}" for rows, p, row, _ in every if "refused" in row.get("planned", {})]
    verdict = "met" if mean <= goal else "missed"
    count = f"{len(ratios)}, offloading ones apart"
    lines += [
        f"- Planned / policy, geometric mean of {count}: **{mean:.3f}** (goal: {goal}, {verdict}); {len(refused)} lost are not in it."
    ]
    for policy in (*POLICIES, *OFFLOADING):
        own = [r for _, p, _, r in every if p == policy and r is not None]
        lines += [f"  - {policy}: {mean_of(own):.3f}, worst {max(own):.3f}, of {len(own)}." if own else f"  - {policy}: not run."]
    lost = [f"{rows['case']} @ {rows['target']}, {p}: {r:.3f}" for rows, p, _, r in every if r is not None and r > 1]
    unfit = [f"{rows['case']} @ {rows['target']}, {p}" for rows, p, row, _ in every if "refused" in row.get("policy", {})]
    lines += ["- Slower than the policy: " + ("; ".join(lost) or "none") + "."]
    lines += ["- No plan within the policy's memory: " + ("; ".join(refused) or "none") + "."]
    lines += ["- Policy refused by the compiler (nothing to compare): " + ("; ".join(unfit) or "none") + "."]
    targets = sorted({rows["target"] for rows in found.values()})
    for target in targets:
        own = [r for rows, p, _, r in every if rows["target"] == target and p in POLICIES and r is not None]
        lines += [f"  - {target}: {mean_of(own):.3f}, worst {max(own):.3f}, of {len(own)}."] if own else []
    complete = {key for key, rows in found.items() if all("planned" in rows["policies"].get(p, {}) for p in POLICIES)}
    absent = [f"{name} @ {target}" for target in targets for name in CASES if f"{name} @ {target}" not in complete]
    lines += ["- Not run, or not all of it: " + ("; ".join(absent) or "nothing") + "."]
    dates = Counter(row["planned"].get("on", "earlier") for _, _, row, _ in every if "planned" in row)
    lines += ["- Planned: " + "; ".join(f"{on} {count}" for on, count in sorted(dates.items())) + "."]
    lines += ["- SSM and LSTM name no block outputs: there that policy is `nothing_saveable`. Sizes of the models: budget.md.", ""]
    return lines


def table(found: dict[str, Any]) -> str:
    """results/policies.md."""
    lines = head(found)
    lines += ["| step | policy | GiB | ms | planned GiB | ms | estimated ms | recomputed | rounds | flops | ratio |", "|---|" + "---|" * 10]
    for rows in found.values():
        for policy, row in rows["policies"].items():
            cells = [f"{rows['case']} @ {rows['target']}", policy]
            by, plan, ratio = row.get("policy", {}), row.get("planned", {}), ratio_of(row)
            if "seconds" in by:
                cells += [f"{by['bytes'] / 2**30:.2f}", f"{1e3 * by['seconds']:.2f}"]
            if ratio is None:
                lines.append(f"| {' | '.join(cells)} | {plan.get('refused') or by.get('refused') or 'not run'} |")
                continue
            cells += [f"{plan['bytes'] / 2**30:.2f}", f"{1e3 * plan['seconds']:.2f}", f"{1e3 * plan['estimated seconds']:.2f}"]
            cells += [f"{plan['recomputed']} of {plan['residuals']}", str(plan["rounds"]), f"{plan['flops'] / by['flops']:.3f}"]
            lines.append(f"| {' | '.join(cells)} | {'**' if ratio > 1 else ''}{ratio:.3f}{'**' if ratio > 1 else ''} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    assert __doc__
    sweep(__doc__, "policies", run, table)
