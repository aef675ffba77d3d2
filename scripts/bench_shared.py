"""What two dots read: is it written once, or made in each of them? python scripts/bench_shared.py [--targets …]

``t`` is made of arrays in HBM by equations that a compiler can fuse, and read by two dots, once along its rows and once along its columns.
Compiled ahead of time for one device; ``t`` is written where the temporaries hold it. (The planner also writes cheap products of two: in a
step one of the two is often what a dot makes, and the product is made with that.) Moved: bytes that making it in each dot reads, as a
share of those of writing it once (``cost/patterns.py``, ``is_shared``). Writes results/shared.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import jaxauto  # noqa: E402
from jaxauto.aot import close_workers  # noqa: E402
from jaxauto.verify import compile_ahead  # noqa: E402

ROWS, COLUMNS, WIDTH = 16384, 8192, 128
MIB = 2**20


def softmax(scores: jax.Array) -> jax.Array:
    """Over the last dimension."""
    exp = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return exp / exp.sum(-1, keepdims=True)


# name → how it is made (in float32), the types of what it is made of
CASES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "a product of one, bfloat16": (lambda a: a * a, ("bfloat16",)),
    "a product of two, bfloat16": (lambda a, b: a * b, ("bfloat16", "bfloat16")),
    "twice a float32": (lambda a: 2 * a + 1, ("float32",)),
    "a product of float32 and bfloat16": (lambda a, b: a * b, ("float32", "bfloat16")),
    "of three, bfloat16": (lambda a, b, c: a * b + c, ("bfloat16",) * 3),
    "a product of two, float32": (lambda a, b: a * b, ("float32", "float32")),
    "a gated product, bfloat16": (lambda a, b: jax.nn.silu(a) * b, ("bfloat16", "bfloat16")),
    "a softmax of bfloat16": (softmax, ("bfloat16",)),
    "a softmax of float32": (softmax, ("float32",)),
}


def step_of(make: Callable, types: tuple[str, ...]) -> tuple[Callable, tuple]:
    def step(roots, left, right):
        t = make(*(x.astype(jnp.float32) for x in roots)).astype(jnp.bfloat16)
        return t @ left, jax.lax.dot_general(t, right, (((0,), (0,)), ((), ())))

    roots = tuple(jax.ShapeDtypeStruct((ROWS, COLUMNS), t) for t in types)
    return step, (roots, *(jax.ShapeDtypeStruct((n, WIDTH), "bfloat16") for n in (COLUMNS, ROWS)))


def share(types: tuple[str, ...]) -> float:
    wide, own = sum(jnp.dtype(t).itemsize for t in types), jnp.dtype("bfloat16").itemsize
    return 2 * wide / (wide + 3 * own)


def temporaries(name: str, target: str) -> tuple[float, float]:
    """Bytes of temporaries, estimated and compiled."""
    step, args = step_of(*CASES[name])
    plan = jaxauto.plan(step, *args, target=target, mesh={"data": 1}, remat="off", donate_argnums=(), certify=False, progress=False)
    plan.__dict__["compilation"] = compile_ahead(plan, 600)
    row = plan.verify().row("temporaries")
    return row.estimated or 0.0, row.compiled or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="v5e:1x1,v5p:1x1x1,v6e:1x1")
    targets = parser.parse_args().targets.split(",")
    chips = [jaxauto.Target(t).chip for t in targets]
    lines = ["# What two dots read", "", f"Made by scripts/bench_shared.py; jax {jax.__version__}."]
    lines += ["MiB of temporaries: estimated, compiled.", ""]
    lines += [f"- {c.name}: the vector unit does {c.vector_flops / c.hbm_bandwidth:.1f} operations while HBM moves a byte." for c in chips]
    lines += ["", f"| made of | moved | {' | '.join(targets)} |", "|---|---|" + "---|" * len(targets)]
    for name, (_, types) in CASES.items():
        found = [temporaries(name, target) for target in targets]
        cells = [f"{a / MIB:.0f}, {b / MIB:.0f}" + ("" if abs(a - b) < 0.1 * ROWS * COLUMNS else " **!**") for a, b in found]
        lines.append(f"| {name} | {share(types):.2f} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    close_workers()
    (HERE / "results" / "shared.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
