"""Precisions and Fourier transforms, told and compiled: python scripts/bench_products.py [--targets …]. Writes results/products.md.

Three dense layers in float32 and bfloat16 under each precision of ``jax.lax.Precision``; transforms of one, two and three dimensions. On
TPU also into which factors a length is cut, for ``cost/transforms.py``, which was read off such lengths on v5e: those rows show that it
is what they do. For GPUs the "roofline of what was compiled" takes the rate of the precision from the same chip table as the estimate.
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

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench_tables import compared  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto.aot import close_workers  # noqa: E402
from jaxauto.cost.transforms import factors  # noqa: E402

ROWS = 128  # of the transforms whose lengths are cut
LENGTHS = (
    *(2, 8, 30, 48, 64, 80, 96, 100, 120, 128, 144, 160, 192, 224, 240, 256, 288, 320, 384, 400, 480, 500, 512, 640, 768, 1008, 1024),
    *(1280, 1536, 4096, 4800, 6144, 8192, 16384, 32768, 65536, 131072, 262144),
)


def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def dense(dtype: Any, precision: str) -> tuple[Callable, tuple]:
    width, rows = 4096, 16384

    def loss(weights: list, x: jax.Array, y: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(jnp.dot(x, w, precision=precision))
        return jnp.mean((x.astype(jnp.float32) - y) ** 2)

    def step(weights: list, x: jax.Array, y: jax.Array) -> list:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x, y))

    return step, ([of(width, width, dtype=dtype)] * 3, of(rows, width, dtype=dtype), of(rows, width))


def forward(transform: Callable, *shape: int) -> tuple[Callable, tuple]:
    return lambda x, y: jnp.abs(transform(jax.lax.complex(x, y))), (of(*shape), of(*shape))


def real(transform: Callable, *shape: int) -> tuple[Callable, tuple]:
    return lambda x: jnp.abs(transform(x)), (of(*shape),)


def back(transform: Callable, *shape: int) -> tuple[Callable, tuple]:
    return lambda x, y: transform(jax.lax.complex(x, y)), (of(*shape), of(*shape))


CASES: dict[str, Callable[[], tuple[Callable, tuple]]] = {
    **{f"dense, {dtype}, {p}": partial(dense, dtype, p) for dtype in ("float32", "bfloat16") for p in ("default", "high", "highest")},
    "dense, float32, BF16_BF16_F32_X3": partial(dense, "float32", "BF16_BF16_F32_X3"),
    **{f"fft of {n}": partial(forward, jnp.fft.fft, 2**24 // n, n) for n in (100, 256, 512, 1024, 4096)},
    **{f"rfft of {n}": partial(real, jnp.fft.rfft, 2**24 // n, n) for n in (256, 1024)},
    **{f"irfft to {n}": partial(back, jnp.fft.irfft, 2**24 // n, n // 2 + 1) for n in (256, 1024)},
    "fft2 of 256 x 256": partial(forward, jnp.fft.fft2, 256, 256, 256),
    "rfft2 of 256 x 256": partial(real, jnp.fft.rfft2, 256, 256, 256),
    "irfft2 to 256 x 256": partial(back, jnp.fft.irfft2, 256, 256, 129),
    "rfftn of 64 x 64 x 64": partial(real, partial(jnp.fft.rfftn, axes=(1, 2, 3)), 64, 64, 64, 64),
}


def cut(target: str, length: int) -> str:
    """Products of each element of a complex transform: told, and flops of the compiled one / (6 x elements)."""
    step, args = forward(jnp.fft.fft, ROWS, length)
    plan = jaxauto.plan(step, *args, target=target, mesh={"data": 1}, remat="off", donate_argnums=(), certify=False, progress=False)
    compiled = plan.verify().row("matrix flops").compiled or 0.0
    return f"| {target} | {length:,} | {factors(length)} | {compiled / (6 * ROWS * length):g} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["v5e:1x1", "v5p:1x1x1", "h100:1"])
    options = parser.parse_args()
    lines = [
        "# Precisions and Fourier transforms",
        "",
        f"Made by scripts/bench_products.py; jax {jax.__version__}. MiB and milliseconds.",
        "",
    ]
    lines += ["| target | step | told: peak | compiled | | told: time | roofline of what was compiled | |", "|---" * 8 + "|"]

    def add(*more: str) -> None:
        lines.extend(more)
        print(more[-1], flush=True)
        (HERE / "results" / "products.md").write_text("\n".join(lines) + "\n")

    for target in options.targets:
        for name, make in CASES.items():
            add(f"| {target} | {name} | {compared(target, *make())} |")
    lines += [
        "",
        "Products of each element of a complex transform, by its length:",
        "",
        "| target | length | told | compiled |",
        "|---" * 4 + "|",
    ]
    for target in (t for t in options.targets if jaxauto.Target(t).chip.platform == "tpu"):
        for length in LENGTHS:
            add(cut(target, length))
    close_workers()


if __name__ == "__main__":
    main()
