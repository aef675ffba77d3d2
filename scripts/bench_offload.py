"""What offloading and padding bring, by the compilers: python scripts/bench_offload.py [--only NAME]. Writes results/offload.md.

For each step the least memory that plans need without the host's (``remat="auto"``, as the planner tells and the compiler was seen to
need), then budgets below that with ``remat="offload"``: compiled memory of the device, estimated and compiled memory of the host, and
seconds by the roofline of the compiled schedule, in which copies over the host's link follow each other; "link free": the same schedule
with a link that takes no time, so that the difference is what the step waits for. And a loss over a vocabulary that no axis divides, beside
the same with the vocabulary padded.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from remat_cases import compile_once, mesh_of, step_of  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto import hlo  # noqa: E402
from jaxauto.aot import CompilerFailure, close_workers  # noqa: E402
from jaxauto.cost.schedule import schedule_seconds  # noqa: E402
from jaxauto.options import mesh_axes  # noqa: E402
from jaxauto.targets.target import Target  # noqa: E402
from jaxauto.verify import compile_plan, hlo_collective_seconds  # noqa: E402

SHARES = (0.95, 0.85, 0.7, 0.55)
CHAIN = "chain"
CASES = (
    (CHAIN, "v5p:1x1x1"),
    (CHAIN, "v5e:2x4"),
    (CHAIN, "h100:1"),
    ("Llama 1B", "h100:1"),
    ("Llama 1B", "h100:8"),
    ("GPT-2 medium, unrolled", "h100:1"),
    ("Llama 1B", "v5p:1x1x1"),
)
PADDED = {"target": "v5e:2x4", "certify": False, "progress": False}


def chain(devices: int) -> tuple[Callable, tuple]:
    """32 scanned layers whose inputs alone are far more than parameters and state."""

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w) @ w.T, None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def step(params: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, x)
        return params - 0.1 * gradient, value

    return step, (jax.ShapeDtypeStruct((32, 1024, 1024), jnp.float32), jax.ShapeDtypeStruct((devices * 32768, 1024), jnp.float32))


def offloading(name: str, target: str) -> Iterator[str]:
    """Rows: budget, memory of device and host, seconds."""
    step, args = chain(Target(target).num_devices) if name == CHAIN else step_of(name, target)
    options = {"target": target, "mesh": mesh_of(target), "certify": True, "progress": False}
    least = told(step, args, options)
    yield row(name, target, "auto", jaxauto.plan(step, *args, **options, memory_budget=least * (1 + 1e-6)))
    for share in SHARES:
        try:
            plan = jaxauto.plan(step, *args, **options, remat="offload", memory_budget=share * least)
            compile_plan(plan)
        except (jaxauto.InfeasibleError, CompilerFailure) as error:
            yield f"| {name} | {target} | {share:.0%} | does not fit: {' '.join(str(error).split())[:160]} |"
            return
        yield row(name, target, f"{share:.0%}", plan)


def told(step: Callable, args: tuple, options: dict[str, Any]) -> float:
    """The least that any plan needs without the host's memory."""
    try:
        jaxauto.plan(step, *args, **options, memory_budget=1e6)
    except jaxauto.InfeasibleError as error:
        assert error.least_bytes is not None
        return error.least_bytes
    raise AssertionError("a megabyte is enough")


def row(name: str, target: str, budget: str, plan: jaxauto.Plan) -> str:
    compilation = compile_plan(plan)
    module = hlo.parse(compilation.text)
    where = Target(target)
    link = replace(where.chip.numbers["host_bandwidth"], value=math.inf)
    free, axes = replace(where.chip, numbers={**where.chip.numbers, "host_bandwidth": link}), mesh_axes(dict(plan.mesh.shape), where)
    seconds = [schedule_seconds(module, c, lambda x: hlo_collective_seconds(x, axes)).total_seconds for c in (where.chip, free)]
    sent = {
        kind: sum(d.bytes_ for d in plan.remat if d.action == "offloaded" and d.name.startswith("state: ") == kind)
        for kind in (False, True)
    }
    cells = [name, target, budget, f"{plan.budget_bytes / 2**30:.2f}", f"{compilation.device_bytes / 2**30:.2f}"]
    cells += [f"{sent[False] / 2**30:.2f}", f"{sent[True] / 2**30:.2f}", f"{compilation.host_bytes / 2**30:.2f}"]
    cells += [f"{1e3 * s:.1f}" for s in (plan.estimate.step_time, *seconds)]
    return f"| {' | '.join(cells)} |"


# --------------------------------------------------------------------------------------------------------------- padding


def loss_step(params: dict, ids: jax.Array, labels: jax.Array) -> tuple:
    """Embedding, a layer, a loss over the vocabulary; plain gradient descent."""

    def loss(p: dict) -> jax.Array:
        logits = jnp.tanh(p["embed"][ids] @ p["inner"]) @ p["head"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


def padding() -> list[str]:
    """Rows: vocabulary, memory, seconds."""
    rows = []
    for vocabulary in (50257, 50304):
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in _shapes(vocabulary).items()}
        ids = jax.ShapeDtypeStruct((8, 256), jnp.int32)
        plan = jaxauto.plan(loss_step, params, ids, ids, mesh={"model": 8}, **PADDED)
        rows.append(f"| {vocabulary:,} | {cells(plan)} |")
        print(rows[-1], flush=True)
    return rows


def _shapes(vocabulary: int) -> dict[str, tuple[int, int]]:
    return {"embed": (vocabulary, 768), "inner": (768, 768), "head": (768, vocabulary)}


def cells(plan: jaxauto.Plan) -> str:
    """Peak memory in MiB and milliseconds, estimated / compiled."""
    found = plan.verify()
    pairs = [(found.row("peak memory"), 2**20), (found.row("step time (roofline of the schedule)"), 1e-3)]
    return " | ".join(f"{(row.estimated or 0) / unit:,.2f} / {(row.compiled or 0) / unit:,.2f}" for row, unit in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name and target contain this; nothing is written")
    parser.add_argument("--keep", type=Path, help="a folder for compiled programs: the same program is compiled once")
    options = parser.parse_args()
    compile_once(options.keep)
    lines = ["# Offloading, and padding a vocabulary", "", f"Made by scripts/bench_offload.py; jax {jax.__version__}.", ""]
    lines += ["Budgets in percent of the least that any plan needs without the host's memory.", ""]
    lines += [
        "| step | target | budget | GiB | compiled GiB | activations sent, GiB | state | compiled host | estimated ms | ms | link free |"
    ]
    lines += ["|---|" + "---|" * 10]
    for name, target in CASES:
        if options.only in f"{name} @ {target}":
            for line in offloading(name, target):
                lines.append(line)
                print(line, flush=True)
    if not options.only:
        lines += ["", "A loss over a vocabulary, width 768, on 8 devices of v5e:2x4:", ""]
        lines += ["| vocabulary | peak MiB: estimated / compiled | ms |", "|---|---|---|", *padding()]
        (HERE / "results" / "offload.md").write_text("\n".join(lines) + "\n")
    close_workers()


if __name__ == "__main__":
    main()
