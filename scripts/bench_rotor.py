"""Chains against the optimum of Rotor: python scripts/bench_rotor.py. Writes results/rotor.md.

A chain of equal layers, ``x = tanh(x @ w)``, on one H100. Rotor's optimum (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, Inria
RR-9302, theorem 1) is worked out here by its own recurrence, in forward passes of a layer that are run more than once, for ``m`` stored
activations beside the input: C(s, s, m) = 0; C(s, t, m) is the least of
- layer s runs once and its result stays: C(s + 1, t, m - 1)
- layers s ... k - 1 run, the input of k stays, and they run again later: k - s + C(k, t, m - 1) + C(s, k - 1, m)
jaxauto's plan gets the bytes of ``m`` activations beside what the step takes anyway; its forward passes are read off its matrix flops. It
may need fewer: a layer's result can be made again alone, for the next layer's backward pass, which Rotor's model does not have.
The same chain as a scan: counted from the plan that keeps the input of every layer and makes the rest again, as Rotor's model does.
The tightest plans are compiled too, ahead of time: their memory, and the flops of the program as compiled.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import jaxauto  # noqa: E402
from jaxauto.core import Trips  # noqa: E402

ROWS, WIDTH = 16384, 1024
LAYERS = (6, 8, 12, 16, 20)
SCANNED = {16: range(15, 1, -1), 24: range(23, 2, -1), 64: (60, 50, 40, 32, 24, 20, 16, 14, *range(12, 3, -1))}  # layers, activations
COMPILED = (("h100:1", 12, (5, 3, 2, 1)), ("v5e:1x1", 12, (5, 4, 3.6)), ("v5p:1x1x1", 12, (5, 4, 3)))  # target, layers, activations
COMPILED_SCANS = (("h100:1", 24, (18, 12, 9, 7)), ("v5e:1x1", 24, (12, 9, 7, 5)), ("v5p:1x1x1", 24, (12, 9, 7, 5)))
ACTIVATION = 2.0 * ROWS * WIDTH  # bytes
FORWARD = 2.0 * ROWS * WIDTH * WIDTH  # flops
HALF = 0.5  # of an activation: a budget lies between two counts of them


def step(weights: list, x: jax.Array) -> list:
    def loss(weights: list) -> jax.Array:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.sum(h.astype(jnp.float32) ** 2)

    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    def loss(weights: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return jnp.sum(h.astype(jnp.float32) ** 2)

    return weights - 0.1 * jax.grad(loss)(weights)


@functools.cache
def rotor(first: int, last: int, slots: int) -> float:
    """Forward passes run more than once for layers ``first`` to ``last``."""
    if slots < 0 or first == last:
        return math.inf if slots < 0 else 0
    kept = rotor(first + 1, last, slots - 1)
    return min([kept, *(k - first + rotor(k, last, slots - 1) + rotor(first, k - 1, slots) for k in range(first + 1, last + 1))])


def planned(layers: int, budget: float, target: str = "h100:1", *, scan: bool = False) -> jaxauto.Plan:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * layers
    if scan:
        weights = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    fun, options = scanned if scan else step, {"donate_argnums": (0,), "certify": False, "progress": False}
    return jaxauto.plan(fun, weights, x, target=target, memory_budget=budget, **options)


def everything(layers: int, target: str = "h100:1", *, scan: bool = False) -> jaxauto.Plan:
    """The plan that Rotor's forward passes are counted from: in a scan a layer's result and the next one's input are two stacks."""
    full = planned(layers, 60e9, target, scan=scan)
    return planned(layers, full.estimate.peak_memory - (layers - 1 - HALF) * ACTIVATION, target, scan=True) if scan else full


def lines(layers: int, counts: Iterable[int], *, scan: bool = False) -> list[str]:
    full = everything(layers, scan=scan)
    found = []
    for slots in counts:
        budget = full.estimate.peak_memory - (layers - 1 - slots - HALF) * ACTIVATION
        optimum = rotor(0, layers - 1, slots)
        try:
            plan = planned(layers, budget, scan=scan)
        except jaxauto.InfeasibleError:
            found.append(f"| {layers} | {slots} | {optimum:g} | no plan | | |")
            continue
        again = (plan.estimate.flops - full.estimate.flops) / FORWARD
        ratio = plan.estimate.step_time / full.estimate.step_time
        found.append(f"| {layers} | {slots} | {optimum:g} | {again:.0f} | {'**more**' if again > optimum + HALF else ''} | {ratio:.3f} |")
    return found


def compiled(target: str, layers: int, slots: float, *, scan: bool = False) -> str:
    """One row: a plan as told and as compiled."""
    full = everything(layers, target, scan=scan)
    budget = full.estimate.peak_memory - (layers - 1 - slots - HALF) * ACTIVATION
    try:
        plan = planned(layers, budget, target, scan=scan)
    except jaxauto.InfeasibleError as error:
        return f"| {target} | {slots} | {budget / 2**20:.0f} | no plan, least {error.least_bytes / 2**20:.0f} | | | | |"
    rows = {row.name: row for row in plan.verify(timeout=600).rows}
    memory, flops = rows["peak memory"], rows["matrix flops"]
    depth = max((depth for _, depth in plan.decisions.remade), default=0) if not scan else _parts(plan)
    told = f"{memory.estimated / 2**20:.0f} | {memory.compiled / 2**20:.0f} | {flops.estimated / 1e12:.2f} | {flops.compiled / 1e12:.2f}"
    return f"| {target} | {slots} | {budget / 2**20:.0f} | {depth} | {told} |"


def _parts(plan: jaxauto.Plan) -> str:
    """``"9(4(4) 5) 2"``: 9 layers that run again, first 4 of them once more, and 2 that do not."""

    def told(part: Trips) -> str:
        return f"{part.count}({' '.join(map(told, part.inside))})" if part.inside else str(part.count)

    return " ".join(told(part) for parts in plan.decisions.splits.values() for part in parts) or "none"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [row for layers in LAYERS for row in lines(layers, range(layers - 1, 0, -1))]
    scans = [row for layers, counts in SCANNED.items() for row in lines(layers, counts, scan=True)]
    head = ["# Chains against the optimum of Rotor", "", f"Made by scripts/bench_rotor.py; jax {jax.__version__}.", ""]
    head += [_told("unrolled", rows), _told("scanned", scans), ""]
    columns = ["| layers | activations | Rotor's optimum | planned | | time / all kept |", "|---|" + "---|" * 5]
    table = ["", f"## As compiled, unrolled, {COMPILED[0][1]} layers", ""]
    table += ["| target | activations | budget MiB | depth | told | compiled | Tflop | compiled |", "|---|" + "---|" * 7]
    table += [compiled(target, layers, slots) for target, layers, counts in COMPILED for slots in counts]
    table += ["", f"## As compiled, scanned, {COMPILED_SCANS[0][1]} layers", ""]
    table += ["| target | activations | budget MiB | parts, as they run again | told | compiled | Tflop | compiled |", "|---|" + "---|" * 7]
    table += [compiled(target, layers, slots, scan=True) for target, layers, counts in COMPILED_SCANS for slots in counts]
    text = "\n".join([*head, "## Unrolled", "", *columns, *rows, "", "## Scanned", "", *columns, *scans, *table]) + "\n"
    (HERE / "results" / "rotor.md").write_text(text)
    print(text)


def _told(name: str, rows: list[str]) -> str:
    more, none = sum("more" in row for row in rows), sum("no plan" in row for row in rows)
    return f"- {name}, of {len(rows)} budgets: more forward passes than Rotor's optimum at {more}, no plan at {none}"


if __name__ == "__main__":
    main()
