"""The gradient of max pooling, estimated and compiled: python scripts/bench_pooling.py. Writes results/pooling.md.

What ``jaxauto/cost/pooling.py`` says was read off such programs, so the table shows that it is what they do, not that it holds elsewhere.
Temporaries of one device, in MiB: of an array [64, 64, 64, 64], pooled by two each way, and its gradient alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import linen as nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import jaxauto  # noqa: E402
from jaxauto import aot  # noqa: E402

WINDOWS = {"2 x 2": ((2, 2), "VALID"), "3 x 3, padded": ((3, 3), "SAME")}


def measure(target: str, window: str, dtype: str) -> str:
    """A table row."""
    size, padding = WINDOWS[window]

    def gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: nn.max_pool(x, size, (2, 2), padding), x)[1](cotangent)[0]

    args = [jax.ShapeDtypeStruct((64, n, n, 64), dtype) for n in (64, 32)]
    plan = jaxauto.plan(gradient, *args, target=target, mesh={"data": 1}, donate_argnums=(), certify=False, progress=False)
    row = plan.verify().row("temporaries")
    assert row.estimated is not None and row.compiled is not None
    return f"| {target} | {window} | {dtype} | {row.estimated / 2**20:.0f} | {row.compiled / 2**20:.0f} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    lines = ["# The gradient of max pooling", "", f"Made by scripts/bench_pooling.py; jax {jax.__version__}. MiB.", ""]
    lines += ["| target | window | type | told | compiled |", "|---|---|---|---|---|"]
    for of in itertools.product(("cpu:1", "h100:1", "v5e:1x1"), WINDOWS, (jnp.dtype(t).name for t in ("float32", "bfloat16"))):
        lines.append(measure(*of))
        print(lines[-1], flush=True)
    (HERE / "results" / "pooling.md").write_text("\n".join(lines) + "\n")
    aot.close_workers()


if __name__ == "__main__":
    main()
