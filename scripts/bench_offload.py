"""What offloading and padding bring, by the TPU compiler: python scripts/bench_offload.py. Writes results/offload.md.

A decoder of 32 scanned layers on v5e:2x4 under budgets that keep less and less of what the step as written takes, with ``remat="auto"``
and ``remat="offload"``; host memory is beside it. And a loss over a vocabulary that no axis divides, beside the same with the vocabulary
padded.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from models import Decoder, step_and_args  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto.aot import close_workers  # noqa: E402

DEEP = Decoder(32, 512, 4, 4, 1024, 512, batch=256, length=256)
SHARES = (0.15, 0.1, 0.06)
OPTIONS = {"target": "v5e:2x4", "mesh": {"data": 8}, "certify": False, "progress": False}


def offloading() -> list[str]:
    """Rows: budget, estimate and compiled memory on the device and on the host, seconds."""
    step, args = step_and_args(DEEP)
    whole = jaxauto.plan(step, *args, **OPTIONS, remat="off").estimate.peak_memory
    rows = []
    for share in SHARES:
        for remat in ("auto", "offload"):
            name = f"| {share:.0%} of {whole / 2**20:,.0f} MiB | {remat} |"
            try:
                plan = jaxauto.plan(step, *args, **OPTIONS, remat=remat, memory_budget=int(share * whole))
            except jaxauto.InfeasibleError:
                rows.append(f"{name} does not fit |")
                continue
            rows.append(f"{name} {cells(plan)} |")
            print(rows[-1], flush=True)
    return rows


def cells(plan: jaxauto.Plan) -> str:
    """Peak and host memory in MiB and milliseconds, estimated / compiled."""
    found = plan.verify()
    pairs = [(found.row(name), unit) for name, unit in (("peak memory", 2**20), ("host memory", 2**20), (CLOCK, 1e-3))]
    told = [f"{(row.estimated or 0) / unit:,.2f} / {(row.compiled or 0) / unit:,.2f}" for row, unit in pairs]
    return " | ".join([*told, f"{(found.row('allocated').compiled or 0) / 2**20:,.1f}"])


CLOCK = "step time (roofline of the schedule)"


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
        plan = jaxauto.plan(loss_step, params, ids, ids, **{**OPTIONS, "mesh": {"model": 8}})
        rows.append(f"| {vocabulary:,} | {cells(plan)} |")
        print(rows[-1], flush=True)
    return rows


def _shapes(vocabulary: int) -> dict[str, tuple[int, int]]:
    return {"embed": (vocabulary, 768), "inner": (768, 768), "head": (768, vocabulary)}


def main() -> None:
    units = "peak MiB: estimated / compiled | host MiB | ms | allocated MiB |"
    lines = ["# Offloading, and padding a vocabulary", "", f"Made by scripts/bench_offload.py; jax {jax.__version__}, v5e:2x4.", ""]
    lines += [f"| budget | remat | {units}", "|---|" + "---|" * 5, *offloading(), ""]
    lines += ["A loss over a vocabulary, width 768, on 8 devices:", "", f"| vocabulary | {units}", "|---|" + "---|" * 4, *padding()]
    (HERE / "results" / "offload.md").write_text("\n".join(lines) + "\n")
    close_workers()


if __name__ == "__main__":
    main()
