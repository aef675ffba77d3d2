"""Does it pay to keep optimizer state in host memory? By the compilers: python scripts/bench_state.py. Writes results/state.md.

AdamW by hand on decoders of remat_cases.py with full ``jax.checkpoint``, on one device. "fetched first": both moments come to the device at
the start of the step and go back at its end, as training recipes do it. "leaf by leaf": the moments of a parameter are fetched when its
gradient and the parameter before it are done (``optimization_barrier``), and sent back at once. Seconds are the referee's: the roofline of
the compiled schedule, where copies over the host's link follow each other. Beside it the least that a plan takes with everything on the
device, which is what else a user can do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import models  # noqa: E402
from bench_budget import least_told, planned  # noqa: E402
from layouts import Layout, use  # noqa: E402
from remat_cases import GPT2_MEDIUM, LLAMA_1B, judged, step_of  # noqa: E402

from jaxauto import aot  # noqa: E402
from jaxauto.targets.compilers import COMPILER_OPTIONS  # noqa: E402
from jaxauto.targets.target import Target  # noqa: E402

CONFIGS = {"Llama 1B": LLAMA_1B, "GPT-2 medium, unrolled": GPT2_MEDIUM.with_(scan=False, layers=4)}
TARGETS = ("h100:1", "v5e:1x1", "v5p:1x1x1")
FORMS = ("on the device", "fetched first", "leaf by leaf")
LEAST = "on the device, least plan"
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
RATE, MEAN, SQUARES, SMALL, DECAY = 3e-4, 0.9, 0.999, 1e-8, 1e-4  # of AdamW (arXiv 1711.05101)
_ROUNDING = 1 + 1e-6


def updated(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A parameter and its two moments after a step of AdamW."""
    m, v = MEAN * m + (1 - MEAN) * g, SQUARES * v + (1 - SQUARES) * g * g
    direction = (m / (1 - MEAN**count)) / (jnp.sqrt(v / (1 - SQUARES**count)) + SMALL)
    return p - RATE * (direction + DECAY * p), m, v


def step_on(form: str, config: models.Decoder) -> Callable:
    """``step(params, first moments, second moments, count, batch)``, moments in host memory unless ``form`` says otherwise."""

    def step(params: Any, first: Any, second: Any, count: jax.Array, batch: tuple) -> tuple:
        count += 1
        if form == "fetched first":
            first, second = jax.device_put((first, second), DEVICE)
        loss, grads = jax.value_and_grad(lambda p: models.loss_fn(config, p, *batch))(params)
        leaves, tree = jax.tree.flatten(params)
        found: list[tuple] = []
        for p, g, m, v in zip(leaves, *map(jax.tree.leaves, (grads, first, second)), strict=True):
            if form == "leaf by leaf":
                before = [found[-1][0]] if found else []
                m, v, g, *before = jax.lax.optimization_barrier((m, v, g, *before))
                found[-1:] = [(*before, *found[-1][1:])] if found else []
                m, v = jax.device_put((m, v), DEVICE)
            p, m, v = updated(p, g, m, v, count.astype(jnp.float32))
            found.append((p, *((m, v) if form == "on the device" else jax.device_put((m, v), HOST))))
        return *(jax.tree.unflatten(tree, part) for part in zip(*found, strict=True)), count, loss

    return step


def measured(name: str, target: str, form: str) -> str:
    """A table row."""
    _, (params, _, batch) = step_of(name, target)
    args = (params, params, params, jax.ShapeDtypeStruct((), jnp.int32), batch)
    leaves, tree = jax.tree.flatten(args)
    step, where = step_on(form, CONFIGS[name].with_(batch=batch[0].shape[0])), Target(target)
    mesh = aot.abstract_mesh((1,), ("data",))
    on = {kind: NamedSharding(mesh, PartitionSpec(), memory_kind=kind) for kind in (None, "pinned_host")}
    count = len(jax.tree.leaves(params))
    state = [on[None]] * count + [on[None if form == "on the device" else "pinned_host"]] * (2 * count) + [on[None]]

    def make(abstract: Any) -> Callable:
        def flat(*leaves: Any) -> list:
            with use(Layout(abstract, {}, "nothing")):
                return jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves)))

        return flat

    known = {"timeout": 900.0, "options": dict(COMPILER_OPTIONS[where.chip.platform])}
    shardings = [*state, *[on[None]] * (len(leaves) - len(state))]
    try:
        result = aot.compile_step(make, leaves, shardings, [*state, on[None]], list(range(len(state))), where, (1,), ("data",), **known)
    except aot.CompilerFailure as error:
        return f"| {name} | {target} | {form} | {error} |"
    row = judged(target, {"data": 1}, result.text, result.device_bytes)
    host = result.memory["host_argument"] + result.memory["host_temp"]
    return f"| {name} | {target} | {form} | {row['bytes'] / 2**30:.2f} | {host / 2**30:.2f} | {1e3 * row['seconds']:.1f} |"


def least(name: str, target: str) -> str:
    """A table row: the plan with the least memory."""
    row = planned(name, target, least_told(name, target, certify=False)["least"] * _ROUNDING, certify=False)
    cells = [row["refused"]] if "refused" in row else [f"{row['bytes'] / 2**30:.2f}", "0.00", f"{1e3 * row['seconds']:.1f}"]
    return f"| {name} | {target} | {LEAST} | {' | '.join(cells)} |"


def main() -> None:
    lines = ["# Optimizer state in host memory", "", f"Made by scripts/bench_state.py; jax {jax.__version__}.", ""]
    lines += ["| step | target | moments | device GiB | host GiB | ms |", "|---|" + "---|" * 5]
    for name in CONFIGS:
        for target in TARGETS:
            for form in (*FORMS, LEAST):
                lines.append(least(name, target) if form == LEAST else measured(name, target, form))
                print(lines[-1], flush=True)
                (HERE / "results" / "state.md").write_text("\n".join(lines) + "\n")
    aot.close_workers()


if __name__ == "__main__":
    main()
