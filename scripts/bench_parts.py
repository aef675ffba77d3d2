"""Gradients told their layout, whole or in parts: python scripts/bench_parts.py. Writes results/parts.md.

The head of a decoder on eight v5e, its weight and two moments in float32, its gradient summed over the devices that split the batch; and
an embedding, split by columns, whose gradient is scattered into. XLA:TPU has arguments so that each device's part pads tiles least; a
gradient in another order has it copy the weight and both moments there and back. Told is the order as written, of the whole array, or of
each device's part the order that its arguments have (``rewrite/apply.py``).
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from jaxauto import aot, compat  # noqa: E402
from jaxauto.rewrite.apply import _compact  # noqa: E402
from jaxauto.targets.compilers import COMPILER_OPTIONS  # noqa: E402
from jaxauto.targets.target import Target  # noqa: E402

TARGET, MESH = "v5e:2x4", {"data": 2, "model": 4}
WIDTH, BATCH, LENGTH, ROWS = 2048, 32, 1024, 32_768
MIB = 2**20
Tell = Callable[[jax.Array, jax.sharding.AbstractMesh, P], jax.Array]


def nothing(gradient: jax.Array, _mesh: jax.sharding.AbstractMesh, _spec: P) -> jax.Array:
    return gradient


def of_the_whole(gradient: jax.Array, _mesh: jax.sharding.AbstractMesh, _spec: P) -> jax.Array:
    return with_layout_constraint(gradient, Layout(major_to_minor=(0, 1)))


def of_parts(gradient: jax.Array, mesh: jax.sharding.AbstractMesh, spec: P) -> jax.Array:
    part = NamedSharding(mesh, spec).shard_shape(gradient.shape)
    return compat.laid_out(gradient, _compact(part), mesh, spec)


TOLD: dict[str, Tell] = {"nothing": nothing, "as written": of_the_whole, "parts": of_parts}


def step_on(spec: P, tell: Tell, mesh: jax.sharding.AbstractMesh) -> Callable:
    """Adam's step of a head alone, written out so that nothing but the gradient's layout is left to tell."""

    def pin(x: jax.Array, *axes: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    def step(weight: jax.Array, first: jax.Array, second: jax.Array, x: jax.Array, labels: jax.Array) -> list[jax.Array]:
        columns = "model" if spec == P(None, "model") else None
        narrow = pin(weight.astype(jnp.bfloat16), *spec)
        x = pin(jnp.tanh(x), "data")
        logits = pin(x @ narrow, "data", None, columns).astype(jnp.float32)
        right = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == labels[..., None]
        cotangent = (jax.nn.softmax(logits) - right).astype(jnp.bfloat16)
        gradient = jax.lax.dot_general(cotangent, x, (((0, 1), (0, 1)), ((), ()))).T
        gradient = tell(pin(gradient, *spec), mesh, spec)
        gradient, passed = jax.lax.optimization_barrier((gradient, jax.lax.dot_general(cotangent, narrow, (((2,), (1,)), ((), ())))))
        first = 0.9 * first + 0.1 * gradient.astype(jnp.float32)
        second = 0.99 * second + 0.01 * gradient.astype(jnp.float32) ** 2
        return [weight - 0.1 * first / (jnp.sqrt(second) + 1e-8), first, second, passed]

    return step


def embedding_on(spec: P, tell: Tell, mesh: jax.sharding.AbstractMesh) -> Callable:
    """The same of an embedding: what the rows that were looked up get is scattered, and summed into the columns of each device."""

    def pin(x: jax.Array, *axes: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    def step(table: jax.Array, first: jax.Array, second: jax.Array, tokens: jax.Array) -> list[jax.Array]:
        narrow = pin(table.astype(jnp.bfloat16), None, None)
        rows = pin(jnp.sin(pin(narrow[tokens], ("data", "model"))), ("data", "model"))
        gradient = pin(jnp.zeros_like(narrow).at[tokens].add(rows), None, None)
        gradient = tell(pin(gradient, *spec), mesh, spec)
        first = 0.9 * first + 0.1 * gradient.astype(jnp.float32)
        second = 0.99 * second + 0.01 * gradient.astype(jnp.float32) ** 2
        return [table - 0.1 * first / (jnp.sqrt(second) + 1e-8), first, second]

    return step


def head(columns: int, spec: P, told: str) -> str:
    """A table row."""
    shape = jax.ShapeDtypeStruct
    args = [shape((WIDTH, columns), jnp.float32)] * 3
    args += [shape((BATCH, LENGTH, WIDTH), jnp.bfloat16), shape((BATCH, LENGTH), jnp.int32)]
    return f"| head, {columns:,} | {measured(partial(step_on, spec, TOLD[told]), args, spec, P('data'), told)}"


def embedding(columns: int, told: str) -> str:
    """A table row."""
    shape, spec = jax.ShapeDtypeStruct, P(None, ("data", "model"))
    args = [shape((ROWS, columns), jnp.float32)] * 3 + [shape((BATCH, LENGTH), jnp.int32)]
    return f"| embedding, {columns:,} | {measured(partial(embedding_on, spec, TOLD[told]), args, spec, P(('data', 'model')), told)}"


def measured(made: Callable, args: list, spec: P, batch: P, told: str) -> str:
    here, target = [spec] * 3 + [batch] * (len(args) - 3), Target(TARGET)
    options = dict(COMPILER_OPTIONS[target.chip.platform])
    out = here[: 3 + (len(args) == 5)]
    compiled = aot.compile_step(made, args, here, out, [0, 1, 2], target, tuple(MESH.values()), tuple(MESH), options=options)
    copies = len(re.findall(r"= f32\[\d+,\d+\]\S* copy\(", compiled.text))
    gathers = len(re.findall(r" (?:all-gather|all-to-all)(?:-start)?\(", compiled.text))
    return f"{spec} | {told} | {copies} | {gathers} | {compiled.memory['temp'] / MIB:,.0f} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    made = f"Made by scripts/bench_parts.py: see there; {TARGET}, jax {jax.__version__}."
    lines = ["# Gradients told their layout, whole or in parts", "", made, ""]
    lines += ["| of, columns | split | told | copies of the state | gathers and exchanges | temporaries MiB |", "|---|---|---|---|---|---|"]
    for columns, spec, told in itertools.product((128_000, 128_256), (P(None, "model"), P("data", "model")), TOLD):
        lines.append(head(columns, spec, told))
        print(lines[-1], flush=True)
    for columns, told in itertools.product((1024, 1536), TOLD):
        lines.append(embedding(columns, told))
        print(lines[-1], flush=True)
    (HERE / "results" / "parts.md").write_text("\n".join(lines) + "\n")
    aot.close_workers()


if __name__ == "__main__":
    main()
