"""What collectives bring to products in float32, told and compiled: python scripts/bench_rounded.py. Writes results/rounded.md.

Weights that are cut over all devices (unrolled and scanned layers), images that are cut by rows, and weights that are cut by columns, in
float32, on eight TPUs: bytes of all gathers, exchanges and permutes of a step. In the default precision XLA:TPU sends bfloat16 to
products; where more is asked of them, float32 (jaxauto/solve/facts.py, ``read_rounded``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import jaxauto  # noqa: E402
from jaxauto.aot import close_workers  # noqa: E402

WIDTH, LAYERS, ROWS = 1024, 4, 65536
BROUGHT = ("all-gather", "all-to-all", "collective-permute")
of = jax.ShapeDtypeStruct


def step_of(loss: Callable[..., jax.Array]) -> Callable:
    return lambda w, x: jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w, x))


def _layer(y: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(y @ w)


def unrolled(w: Any, x: jax.Array) -> jax.Array:
    for part in w:
        x = _layer(x, part)
    return jnp.mean(x**2)


def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda y, part: (_layer(y, part), None), x, w)[0] ** 2)


def convolved(w: Any, x: jax.Array) -> jax.Array:
    for part in w:
        x = jnp.tanh(jax.lax.conv_general_dilated(x, part, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return jnp.mean(x**2)


SCANNED = {"0": P(None, "data"), "1": P("data")}
MATRICES, IMAGES = [of((WIDTH, WIDTH), jnp.float32)] * LAYERS, of((1, 4096, 64, 128), jnp.float32)
CASES = {
    "weights": (unrolled, MATRICES, of((ROWS, WIDTH), jnp.float32), {"0.*": P("data"), "1": P("data")}),
    "weights, scanned": (scanned, of((LAYERS, WIDTH, WIDTH), jnp.float32), of((ROWS, WIDTH), jnp.float32), SCANNED),
    "borders of images": (convolved, [of((3, 3, 128, 128), jnp.float32)] * LAYERS, IMAGES, {"0.*": P(), "1": P(None, "data")}),
    "columns": (unrolled, MATRICES, of((512, WIDTH), jnp.float32), {"0.*": P(None, "data"), "1": P()}),
}


def row(name: str, target: str, precision: str | None) -> str:
    loss, weights, x, pins = CASES[name]
    options = {"target": target, "mesh": {"data": 8}, "constraints": pins, "remat": "off", "certify": False, "progress": False}
    with jax.default_matmul_precision(precision):
        found = jaxauto.plan(step_of(loss), weights, x, **options).verify()
    brought = [c for c in found.collectives if c.name.split(" ")[0] in BROUGHT]
    told, compiled = sum(c.estimated for c in brought), sum(c.compiled for c in brought)
    error = f"{told / compiled - 1:+.1%}" if compiled else ""
    return f"| {name} | {target} | {precision or 'default'} | {told / 2**20:,.2f} | {compiled / 2**20:,.2f} | {error} |"


def write(name: str, head: Iterable[str], rows: Iterable[str]) -> None:
    """results/NAME.md, its rows printed as they are there."""
    lines = [*head]
    for line in rows:
        lines.append(line)
        print(line, flush=True)
    (HERE / "results" / f"{name}.md").write_text("\n".join(lines) + "\n")
    close_workers()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="v5e:2x4,v5p:2x2x2,v6e:2x4")
    targets = parser.parse_args().targets.split(",")
    head = ["# What is brought to products in float32", "", f"Made by scripts/bench_rounded.py; jax {jax.__version__}.", ""]
    head += ["| brought | target | precision | MiB told | compiled | error |", "|---|---|---|---|---|---|"]
    write("rounded", head, (row(name, target, p) for target in targets for name in CASES for p in (None, "highest")))


if __name__ == "__main__":
    main()
