"""What two dots read: is it written once, or made in each of them? python scripts/bench_shared.py [--targets …]

``t`` is made of arrays in HBM by equations that a compiler can fuse, and read by two dots, once along its rows and once along its columns.
Compiled ahead of time for one device; ``t`` is written where the temporaries hold it. Moved: bytes that making it in each dot reads, as a
share of those of writing it once (``cost/patterns.py``, ``is_shared``).

Then the same of what is made of a dot's result and more, as gradients through activations are: where that is written, the fusion of the dot
makes it and the result itself is not (``cost/clusters.py``, ``made_with``). The matrices are narrow, so that a step takes as long as the
bytes it moves: told as passes over one array of 256 MiB. Writes results/shared.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
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


def normed(x: jax.Array, axis: int) -> jax.Array:
    """Over rows (``axis`` 1) or features (0)."""
    centred = x - x.mean(axis, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(axis, keepdims=True) + 1e-6)


def norm_gradient(x: jax.Array, g: jax.Array, axis: int) -> jax.Array:
    """Of what is normed already."""
    return g - g.mean(axis, keepdims=True) - x * (g * x).mean(axis, keepdims=True)


# name → how it is made (in float32), the types of what it is made of ("rows", "columns": of one number for each)
CASES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "a product of one, bfloat16": (lambda a: a * a, ("bfloat16",)),
    "a product of two, bfloat16": (lambda a, b: a * b, ("bfloat16", "bfloat16")),
    "twice a float32": (lambda a: 2 * a + 1, ("float32",)),
    "a product of float32 and bfloat16": (lambda a, b: a * b, ("float32", "bfloat16")),
    "of three, bfloat16": (lambda a, b, c: a * b + c, ("bfloat16",) * 3),
    "a product of two, float32": (lambda a, b: a * b, ("float32", "float32")),
    "a gated product, bfloat16": (lambda a, b: jax.nn.silu(a) * b, ("bfloat16", "bfloat16")),
    "a tanh of bfloat16": (jnp.tanh, ("bfloat16",)),
    "a tanh of float32": (jnp.tanh, ("float32",)),
    "a gelu of bfloat16": (jax.nn.gelu, ("bfloat16",)),
    "a gelu of float32": (jax.nn.gelu, ("float32",)),
    "a silu of bfloat16": (jax.nn.silu, ("bfloat16",)),
    "a softmax of bfloat16": (softmax, ("bfloat16",)),
    "a softmax of float32": (softmax, ("float32",)),
    "a gradient through a softmax": (lambda p, g: p * (g - (p * g).sum(-1, keepdims=True)), ("bfloat16", "bfloat16")),
    "rows centred and scaled": (lambda a, m, r: (a - m) * r, ("float32", "rows", "rows")),
    "columns centred and scaled": (lambda a, m, r: (a - m) * r, ("float32", "columns", "columns")),
    "a norm of rows": (partial(normed, axis=1), ("float32",)),
    "a norm of columns": (partial(normed, axis=0), ("float32",)),
    "a gradient through a norm of rows": (partial(norm_gradient, axis=1), ("bfloat16", "bfloat16")),
    "a gradient through a norm of columns": (partial(norm_gradient, axis=0), ("bfloat16", "bfloat16")),
    "rows divided": (lambda a, m: a / m, ("float32", "rows")),
    "a quotient of two, bfloat16": (lambda a, b: a / b, ("bfloat16", "bfloat16")),
    "a square root": (jnp.sqrt, ("float32",)),
    "one where the other is positive": (lambda a, b: jnp.where(a > 0, b, 0), ("bfloat16", "bfloat16")),
}


def step_of(make: Callable, types: tuple[str, ...]) -> tuple[Callable, tuple]:
    def step(roots, left, right):
        t = make(*(x.astype(jnp.float32) for x in roots)).astype(jnp.bfloat16)
        return t @ left, jax.lax.dot_general(t, right, (((0,), (0,)), ((), ())))

    return step, (tuple(map(array, types)), *(jax.ShapeDtypeStruct((n, WIDTH), "bfloat16") for n in (COLUMNS, ROWS)))


def array(of: str) -> jax.ShapeDtypeStruct:
    """Of a type; "rows", "columns": of one number for each."""
    shape = {"rows": (ROWS, 1), "columns": (1, COLUMNS)}.get(of, (ROWS, COLUMNS))
    return jax.ShapeDtypeStruct(shape, of if shape == (ROWS, COLUMNS) else "float32")


def share(types: tuple[str, ...]) -> float:
    wide, own = sum(array(t).size * array(t).dtype.itemsize for t in types), ROWS * COLUMNS * jnp.dtype("bfloat16").itemsize
    return 2 * wide / (wide + 3 * own)


def gradient_of(activation: Callable) -> Callable:
    """The gradients in all that an activation is made of, by the gradient in its result."""
    return lambda g, *made_of: jax.vjp(activation, *made_of)[1](g)


# name → what is made (in float32) of a dot's result and of arrays, their types ("rows": of one number for each row)
GRADIENTS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "through a relu": (gradient_of(jax.nn.relu), ("bfloat16",)),
    "through a gelu": (gradient_of(jax.nn.gelu), ("bfloat16",)),
    "through a gelu, and its bias's": (gradient_of(jax.nn.gelu), ("bfloat16",)),
    "through a gate": (gradient_of(lambda a, b: a * jax.nn.silu(b)), ("bfloat16", "bfloat16")),
    "through a softmax": (lambda g, p: (p * (g - (g * p).sum(-1, keepdims=True)),), ("bfloat16",)),
    "times a float32": (lambda g, a: (g * a,), ("float32",)),
    "times two": (lambda g, a, b: (g * a * b,), ("bfloat16", "bfloat16")),
    "times a number for each row": (lambda g, a: (g * a,), ("rows",)),
}


def gradient_step(name: str) -> tuple[Callable, tuple]:
    make, types = GRADIENTS[name]

    def step(dy, matrix, roots, left, right):
        made = make((dy @ matrix).astype(jnp.float32), *(x.astype(jnp.float32) for x in roots))
        ts = [t.astype(jnp.bfloat16) for t in made]
        read = [(t @ left, jax.lax.dot_general(t, right, (((0,), (0,)), ((), ())))) for t in ts]
        return read, [t.sum(0, dtype=jnp.float32) for t in ts if "bias" in name]

    rows, columns = (jax.ShapeDtypeStruct((n, WIDTH), "bfloat16") for n in (ROWS, COLUMNS))
    return step, (rows, jax.ShapeDtypeStruct((WIDTH, COLUMNS), "bfloat16"), tuple(map(array, types)), columns, rows)


def compiled(step: Callable, args: tuple, target: str) -> jaxauto.verify.Verification:
    """The step beside its estimate."""
    plan = jaxauto.plan(step, *args, target=target, mesh={"data": 1}, remat="off", donate_argnums=(), certify=False, progress=False)
    plan.__dict__["compilation"] = compile_ahead(plan, 600)
    return plan.verify()


def cell(a: float, b: float, digits: int) -> str:
    """Estimated, compiled."""
    return f"{a:.{digits}f}, {b:.{digits}f}" + ("" if abs(a - b) < 0.1 * b + 1e-9 else " **!**")


def temporaries(name: str, target: str) -> str:
    row = compiled(*step_of(*CASES[name]), target).row("temporaries")
    a, b = (row.estimated or 0.0) / MIB, (row.compiled or 0.0) / MIB
    return cell(a, b, 0) if max(a, b) > 0.1 * ROWS * COLUMNS * 2 / MIB else "0, 0"


def passes(step: Callable, args: tuple, target: str) -> str:
    """How often HBM moves 256 MiB in the time that a step takes."""
    row = compiled(step, args, target).row("step time (roofline of the schedule)")
    rate = jaxauto.Target(target).chip.hbm_bandwidth / (ROWS * COLUMNS * 2)
    return cell((row.estimated or 0.0) * rate, (row.compiled or 0.0) * rate, 1)


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
        lines.append(f"| {name} | {share(types):.2f} | {' | '.join(temporaries(name, target) for target in targets)} |")
        print(lines[-1], flush=True)
    lines += ["", "Made of a dot's result, and more; passes over 256 MiB: estimated, by the compiled schedule.", ""]
    lines += [f"| a gradient | {' | '.join(targets)} |", "|---|" + "---|" * len(targets)]
    for name in GRADIENTS:
        lines.append(f"| {name} | {' | '.join(passes(*gradient_step(name), target) for target in targets)} |")
        print(lines[-1], flush=True)
    close_workers()
    (HERE / "results" / "shared.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
