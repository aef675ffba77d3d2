"""When XLA:TPU makes the gradient of a last projection: python scripts/bench_put_off.py

Eight scanned layers and a projection to a vocabulary, float32 weights, 8192 rows, on eight devices. The projection is split by its
vocabulary, so its gradient is summed over no device; or it is whole and the rows are split, so it is. Told (jaxauto/solve/put_off.py) and
compiled: live bytes at the peak, and what of it is held for the gradient; how many loops run between the cotangent and the last that
reads it. Writes results/put_off.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import jaxauto  # noqa: E402
from jaxauto import aot, hlo  # noqa: E402
from jaxauto.solve.put_off import held_for_gradients  # noqa: E402

LAYERS, WIDTH, ROWS = 8, 1024, 8192
VOCABULARIES = (32768, 65536)
SPLIT = {
    "vocabulary": {"0.1": P(None, "data"), "1": P(), "2": P(), "0.0.0": P(None, None, "data"), "0.0.1": P(None, "data")},
    "rows": {"0.1": P(), "1": P("data"), "2": P("data"), "0.0.*": P()},
}
MIB = 2.0**20


def decoder(vocabulary: int) -> tuple[Callable, tuple]:
    def step(state, x, labels):
        def loss(state):
            layers, head = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state)
            y, _ = jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w[0]) @ w[1], None), x, tuple(layers))
            logits = y @ head
            picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
            return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), -1) - picked.astype(jnp.float32))

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    of = jax.ShapeDtypeStruct
    layers = [of((LAYERS, WIDTH, 4 * WIDTH), jnp.float32), of((LAYERS, 4 * WIDTH, WIDTH), jnp.float32)]
    return step, ((layers, of((WIDTH, vocabulary), jnp.float32)), of((ROWS, WIDTH), jnp.bfloat16), of((ROWS,), jnp.int32))


def outlived(module: hlo.Module, bytes_: float) -> int:
    """Loops that run between an array of ``bytes_`` that a fusion makes, and what reads it last: of the largest such number."""
    order = {i.name: k for k, i in enumerate(module.entry.instructions)}
    loops = [k for k, i in enumerate(module.entry.instructions) if i.opcode == "while"]

    def last(name: str) -> int:
        passes = ("copy-start", "copy-done", "bitcast", "get-tuple-element")
        return max((last(u.name) if u.opcode in passes else order[u.name] for u in module.entry.users[name]), default=order[name])

    made = [i for i in module.entry.instructions if i.opcode == "fusion" and any(s.padded_bytes == bytes_ for s in i.shapes)]
    return max((sum(order[i.name] < k < last(i.name) for k in loops) for i in made), default=0)


def cells(target: str, split: str, vocabulary: int) -> list[str]:
    step, args = decoder(vocabulary)
    options = {"mesh": {"data": 8}, "constraints": SPLIT[split], "remat": "off", "donate_argnums": (0,)}
    plan = jaxauto.plan(step, *args, target=target, certify=False, progress=False, **options)
    best = plan.program.solved.best
    held = np.zeros(best.model.buffers.length)
    for begin, end, i, j, table in held_for_gradients(best.model):
        held[begin : end + 1] += table[best.x[i], best.x[j]]
    memory = plan.verify().row("peak memory")
    loops = outlived(hlo.parse(plan.compilation.text), 2.0 * ROWS * vocabulary / 8)
    return [f"{held.max() / MIB:.0f}", f"{memory.estimated / MIB:.0f}", f"{memory.compiled / MIB:.0f}", str(loops)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="v5e:2x4,v5p:2x2x2,v6e:2x4")
    options = parser.parse_args()
    lines = ["# The gradient of a last projection", "", f"Made by scripts/bench_put_off.py; jax {jax.__version__}. MiB.", ""]
    lines += [
        "| target | split | vocabulary | held, told | peak, told | compiled | loops that the cotangent outlives |",
        "|---|" + "---|" * 6,
    ]
    for target in options.targets.split(","):
        for split in SPLIT:
            for vocabulary in VOCABULARIES:
                lines.append(f"| {target} | {split} | {vocabulary} | {' | '.join(cells(target, split, vocabulary))} |")
                print(lines[-1], flush=True)
    (HERE / "results" / "put_off.md").write_text("\n".join(lines) + "\n")
    aot.close_workers()


if __name__ == "__main__":
    main()
