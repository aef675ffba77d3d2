"""Passes over attention's scores, estimated and compiled: python scripts/bench_softmax.py [--target h100:1] [--rows 512] [--kinds alone].

→ results/softmax.md; for other chips than v5e: softmax_CHIP.md; of one kind of program: softmax_KIND.md.
What ``jaxauto/cost/patterns.py`` says of a softmax was read off these programs: heads as a batch dimension, grouped queries, one query to
a group; scores in float32 or in bfloat16; short and long heads; rows of 512 to 4,096 keys; alone, with gradients, both ("in both passes"),
and the probabilities alone ("written").
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import jaxauto  # noqa: E402
from jaxauto import hlo  # noqa: E402
from jaxauto.verify import compile_ahead, schedule_of  # noqa: E402

FORMS = {  # queries, keys: groups and heads; the two einsums
    "a head to a batch dimension": (((16,), (16,)), "blhk,bmhk->bhlm", "bhlm,bmhk->blhk"),
    "one query to a group": (((16, 1), (16,)), "blhgk,bmhk->bhglm", "bhglm,bmhk->blhgk"),
    "four queries to a group": (((4, 4), (4,)), "blhgk,bmhk->bhglm", "bhglm,bmhk->blhgk"),
    "all queries in a group": (((16,), ()), "blgk,bmk->bglm", "bglm,bmk->blgk"),
}
ROWS = (512, 1024, 2048, 4096)
KINDS = ("alone", "with gradients", "in both passes", "written")
HEADS, SCORES = (64, 128), 2**27  # elements
MIB = 2**20
FEWEST = 1.0  # bytes for an element of the scores: what moves less is not listed


def sequences(row: int) -> int:
    """How many there are in a batch of 16 heads."""
    return max(2, SCORES // (16 * row * row))


def program(form: str, depth: int, row: int, dtype: str, kind: str) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Causal attention, its gradients, both, or its probabilities, and the arguments."""
    (queries, keys), scores, mixed = FORMS[form]
    batch = sequences(row)

    def written(q: jax.Array, k: jax.Array) -> jax.Array:
        found = jnp.einsum(scores, q, k, preferred_element_type=dtype).astype(jnp.float32) * depth**-0.5
        return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((row, row), bool)), found, -1e9)).astype(q.dtype)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.einsum(mixed, written(q, k), v)

    def backward(q: jax.Array, k: jax.Array, v: jax.Array, d: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(attention, q, k, v)[1](d)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(d + out)

    q, k = (jax.ShapeDtypeStruct((batch, row, *heads, depth), jnp.bfloat16) for heads in (queries, keys))
    programs = {"alone": (attention, [q, k, k]), "with gradients": (backward, [q, k, k, q])}
    return (programs | {"in both passes": (both, [q, k, k, q]), "written": (written, [q, k])})[kind]


def measure(target: str, form: str, depth: int, row: int, dtype: str, kind: str) -> str:
    """A table row: milliseconds estimated and of the schedule, MiB estimated and compiled, bytes that each fusion moves for an element of
    the scores."""
    fn, args = program(form, depth, row, dtype, kind)
    plan = jaxauto.plan(fn, *args, target=target, remat="off", certify=False, progress=False)
    compilation = compile_ahead(plan, 900)
    schedule = schedule_of(plan, hlo.parse(compilation.text))
    elements = sequences(row) * 16 * row * row
    moved = sorted((r.hbm_bytes * r.count / elements for r in schedule.breakdown), reverse=True)
    passes = ", ".join(f"{b:.1f}" for b in moved if b > FEWEST)
    told, found = plan.estimate.compute_time, schedule.compute_seconds
    size, real = plan.estimate.peak_memory, compilation.device_bytes
    time = f"{1e3 * told:.2f} | {1e3 * found:.2f} | {told / found - 1:+.1%}"
    memory = f"{size / MIB:.0f} | {real / MIB:.0f} | {size / real - 1:+.1%}"
    return f"| {form} | {depth} | {row:,} | {dtype} | {kind} | {time} | {memory} | {passes} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="v5e:1")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    target, rows = options.target, [int(n) for n in options.rows.split(",")]
    suffix = "" if target.startswith("v5e") else f"_{target.split(':')[0]}"
    suffix += f"_{kinds[0].replace(' ', '_')}" if len(kinds) == 1 else ""
    head = (
        "| scores | head dimension | keys | made in | program | ms estimated | of the schedule | error "
        "| MiB estimated | compiled | error | bytes of each fusion for a score |"
    )
    lines = ["# Passes over the scores of attention", "", f"Made by scripts/bench_softmax.py on {target}; jax {jax.__version__}.", "", head]
    lines.append("|---|" + "---|" * 11)
    for form, depth, dtype, kind, row in itertools.product(FORMS, HEADS, ("float32", "bfloat16"), kinds, rows):
        lines.append(measure(target, form, depth, row, dtype, kind))
        print(lines[-1], flush=True)
    (HERE / "results" / f"softmax{suffix}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
