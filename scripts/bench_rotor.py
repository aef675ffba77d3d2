"""Chains against the optimum of Rotor: python scripts/bench_rotor.py. Writes results/rotor.md.

A chain of equal layers, ``x = tanh(x @ w)``, on one H100. Rotor's optimum (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, Inria
RR-9302, theorem 1) is worked out here by its own recurrence, in forward passes of a layer that are run more than once, for ``m`` stored
activations beside the input: C(s, s, m) = 0; C(s, t, m) is the least of
- layer s runs once and its result stays: C(s + 1, t, m - 1)
- layers s ... k - 1 run, the input of k stays, and they run again later: k - s + C(k, t, m - 1) + C(s, k - 1, m)
jaxauto's plan gets the bytes of ``m`` activations beside what the step takes anyway; its forward passes are read off its matrix flops. It
may need fewer: a layer's result can be made again alone, for the next layer's backward pass, which Rotor's model does not have.
The tightest plans are compiled too, ahead of time: their memory, and the flops of the program as compiled.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import jaxauto  # noqa: E402

ROWS, WIDTH = 16384, 1024
LAYERS = (6, 8, 12, 16, 20)
COMPILED = (("h100:1", 12, (5, 3, 2, 1)), ("v5e:1x1", 12, (5, 4, 3.6)), ("v5p:1x1x1", 12, (5, 4, 3)))  # target, layers, activations
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


@functools.cache
def rotor(first: int, last: int, slots: int) -> float:
    """Forward passes run more than once for layers ``first`` to ``last``."""
    if slots < 0 or first == last:
        return math.inf if slots < 0 else 0
    kept = rotor(first + 1, last, slots - 1)
    return min([kept, *(k - first + rotor(k, last, slots - 1) + rotor(first, k - 1, slots) for k in range(first + 1, last + 1))])


def planned(layers: int, budget: float, target: str = "h100:1") -> jaxauto.Plan:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * layers
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    return jaxauto.plan(step, weights, x, target=target, memory_budget=budget, donate_argnums=(0,), certify=False, progress=False)


def lines(layers: int) -> list[str]:
    full = planned(layers, 60e9)
    found = []
    for slots in range(layers - 1, 0, -1):
        budget = full.estimate.peak_memory - (layers - 1 - slots - HALF) * ACTIVATION
        optimum = rotor(0, layers - 1, slots)
        try:
            plan = planned(layers, budget)
        except jaxauto.InfeasibleError:
            found.append(f"| {layers} | {slots} | {optimum:g} | no plan | | |")
            continue
        again = (plan.estimate.flops - full.estimate.flops) / FORWARD
        ratio = plan.estimate.step_time / full.estimate.step_time
        found.append(f"| {layers} | {slots} | {optimum:g} | {again:.0f} | {'**more**' if again > optimum + HALF else ''} | {ratio:.3f} |")
    return found


def compiled(target: str, layers: int, slots: float) -> str:
    """One row: a plan as told and as compiled."""
    full = planned(layers, 60e9, target)
    budget = full.estimate.peak_memory - (layers - 1 - slots - HALF) * ACTIVATION
    try:
        plan = planned(layers, budget, target)
    except jaxauto.InfeasibleError as error:
        return f"| {target} | {slots} | {budget / 2**20:.0f} | no plan, least {error.least_bytes / 2**20:.0f} | | | | |"
    rows = {row.name: row for row in plan.verify(timeout=600).rows}
    memory, flops = rows["peak memory"], rows["matrix flops"]
    depth = max((depth for _, depth in plan.decisions.remade), default=0)
    told = f"{memory.estimated / 2**20:.0f} | {memory.compiled / 2**20:.0f} | {flops.estimated / 1e12:.2f} | {flops.compiled / 1e12:.2f}"
    return f"| {target} | {slots} | {budget / 2**20:.0f} | {depth} | {told} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [row for layers in LAYERS for row in lines(layers)]
    more, none = sum("more" in row for row in rows), sum("no plan" in row for row in rows)
    head = ["# Chains against the optimum of Rotor", "", f"Made by scripts/bench_rotor.py; jax {jax.__version__}.", ""]
    head += [f"- Of {len(rows)} budgets: more forward passes than Rotor's optimum at {more}, no plan at {none}.", ""]
    head += ["| layers | activations | Rotor's optimum | planned | | time / all kept |", "|---|" + "---|" * 5]
    table = ["", f"## As compiled, {COMPILED[0][1]} layers", ""]
    table += ["| target | activations | budget MiB | depth | told | compiled | Tflop | compiled |", "|---|" + "---|" * 7]
    table += [compiled(target, layers, slots) for target, layers, counts in COMPILED for slots in counts]
    text = "\n".join([*head, *rows, *table]) + "\n"
    (HERE / "results" / "rotor.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
