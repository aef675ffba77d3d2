"""Tables whose rows are gathered, told and compiled for one TPU: python scripts/bench_tables.py [--targets …]. Writes results/tables.md.

A table ``[V, D]``, of which 65,536 rows are gathered, under one dot with a loss, and its update by gradient descent or Adam; and a net of
16 tables as recommenders have them. What ``jaxauto/cost/tables.py`` says was read off such programs on one v5e, so those rows
show that it is what they do, not that it holds elsewhere. Copies of small tables lie on chip in steps as short as these.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import jaxauto  # noqa: E402
from jaxauto.aot import close_workers  # noqa: E402

ROWS, WIDTH, MIB = 65536, 256, 2**20


def trained(loss: Callable, params: Any, batch: tuple, optimizer: optax.GradientTransformation) -> tuple[Callable, tuple]:
    def step(params: Any, state: Any, *batch: Any) -> tuple:
        updates, state = optimizer.update(jax.grad(loss)(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, jax.eval_shape(optimizer.init, params), *batch)


def one_table(size: int, features: int, dtype: str, optimizer: optax.GradientTransformation) -> tuple[Callable, tuple]:
    def loss(params: tuple, index: jax.Array, y: jax.Array) -> jax.Array:
        table, w = params
        return jnp.mean((jnp.tanh(table[index].astype(jnp.float32) @ w) - y) ** 2)

    of = jax.ShapeDtypeStruct
    params = of((size, features), dtype), of((features, WIDTH), "float32")
    return trained(loss, params, (of((ROWS,), "int32"), of((ROWS, WIDTH), "float32")), optimizer)


def recommender(size: int, features: int, optimizer: optax.GradientTransformation) -> tuple[Callable, tuple]:
    """16 tables, their rows side by side, three dense layers."""
    fields, widths = 16, (1024, 512, 256, 1)

    def loss(params: tuple, index: jax.Array, y: jax.Array) -> jax.Array:
        tables, layers = params
        x = jnp.concatenate([table[index[:, k]] for k, table in enumerate(tables)], -1)
        for k, (w, b) in enumerate(layers):
            x = x @ w + b if k + 1 == len(layers) else jax.nn.relu(x @ w + b)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(x[:, 0], y))

    of = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    layers = [(of((a, b)), of((b,))) for a, b in zip((fields * features, *widths), widths, strict=False)]
    batch = jax.ShapeDtypeStruct((ROWS, fields), jnp.int32), of((ROWS,))
    return trained(loss, ([of((size, features))] * fields, layers), batch, optimizer)


CASES: dict[str, Callable[[], tuple[Callable, tuple]]] = {
    **{
        f"[{v:,}, {d}] float32, gradient descent": partial(one_table, v, d, "float32", optax.sgd(0.1))
        for v, d in (
            (200000, 16), (290000, 16), (310000, 16), (1000000, 16), (500000, 64), (1000000, 64), (1600000, 64), (1650000, 64),
            (2000000, 64), (2000000, 96), (500000, 128), (200000, 192), (50257, 768), (50257, 1600),
        )
    },
    **{f"[{v:,}, {d}] float32, Adam": partial(one_table, v, d, "float32", optax.adam(1e-3)) for v, d in ((500000, 64), (50257, 1600))},
    "[500,000, 64] bfloat16, gradient descent": partial(one_table, 500000, 64, "bfloat16", optax.sgd(0.1)),
    "[1,000,000, 96] bfloat16, gradient descent": partial(one_table, 1000000, 96, "bfloat16", optax.sgd(0.1)),
    "16 of [100,000, 16], Adagrad": partial(recommender, 100000, 16, optax.adagrad(0.1)),
    "16 of [250,000, 32], Adam": partial(recommender, 250000, 32, optax.adam(1e-3)),
    "16 of [200,000, 64], Adam": partial(recommender, 200000, 64, optax.adam(1e-3)),
}  # fmt: skip


def compared(target: str, step: Callable, args: tuple) -> str:
    """Cells of a table: peak memory and time as told, as compiled, and how far they are apart; of one device, nothing recomputed."""
    plan = jaxauto.plan(step, *args, target=target, mesh={"data": 1}, remat="off", certify=False, progress=False)
    found = plan.verify()
    cells = []
    for row, unit in ((found.row("peak memory"), MIB), (found.row("step time (roofline of the schedule)"), 1e-3)):
        assert row.estimated is not None and row.compiled is not None
        cells.append(f"{row.estimated / unit:,.{0 if unit == MIB else 2}f} | {row.compiled / unit:,.{0 if unit == MIB else 2}f}")
        cells.append(f"{100 * row.estimated / row.compiled - 100:+.0f} %")
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["v5e:1x1", "v5p:1x1x1", "v6e:1x1"])
    options = parser.parse_args()
    lines = ["# Tables whose rows are gathered", "", f"Made by scripts/bench_tables.py; jax {jax.__version__}. MiB and milliseconds.", ""]
    lines += ["| target | table | told: peak | compiled | | told: time | roofline of what was compiled | |", "|---" * 8 + "|"]
    for target in options.targets:
        for name in CASES:
            lines.append(f"| {target} | {name} | {compared(target, *CASES[name]())} |")
            print(lines[-1], flush=True)
            (HERE / "results" / "tables.md").write_text("\n".join(lines) + "\n")
    close_workers()


if __name__ == "__main__":
    main()
