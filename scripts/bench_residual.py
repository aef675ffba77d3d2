"""Plain and residual stacks of products and convolutions against what XLA:TPU makes of them: python scripts/bench_residual.py [--targets …]

No norms, no attention: blocks of one or two products (131,072 rows, 1,024 wide) or of 3 × 3 convolutions (128 images of 64 × 64, 128
features), with biases, under a head of 64 classes and gradient descent; on one device, nothing recomputed. The rules of cost/clusters.py
and of what dots share were corrected by such stacks on v5e, so that column is no test of them. Arrays are larger than on-chip memory.
Writes results/residual.md.
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
sys.path[:0] = [str(HERE.parent)]

import jaxauto  # noqa: E402
from jaxauto.aot import close_workers  # noqa: E402

CLASSES, WIDTH, ROWS = 64, 1024, 131072
IMAGES, SIDE, FEATURES = 128, 64, 128
MIB = 2**20


def stacked(y: jax.Array, layers: list, op: Callable, activation: Callable) -> jax.Array:
    for w, b in layers:
        y = activation(op(y, w.astype(y.dtype)) + b.astype(y.dtype))
    return y


def residual(y: jax.Array, layers: list, op: Callable, activation: Callable) -> jax.Array:
    for layer in layers:
        y = y + stacked(y, [layer], op, activation)
    return y


def two_deep(y: jax.Array, layers: list, op: Callable, activation: Callable) -> jax.Array:
    """y + b(relu(a(y)))"""
    for first, (w, b) in zip(layers[::2], layers[1::2], strict=True):
        y = y + op(stacked(y, [first], op, activation), w.astype(y.dtype)) + b.astype(y.dtype)
    return y


def resnet(y: jax.Array, layers: list, op: Callable, activation: Callable) -> jax.Array:
    """relu(y + b(relu(a(y))))"""
    for k in range(0, len(layers), 2):
        y = activation(two_deep(y, layers[k : k + 2], op, activation))
    return y


def slide(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


NETS: dict[str, tuple[Callable, Callable]] = {
    "relu": (stacked, jax.nn.relu),
    "leaky relu": (stacked, jax.nn.leaky_relu),
    "relu squared": (stacked, lambda x: jax.nn.relu(x) ** 2),
    "gelu": (stacked, jax.nn.gelu),
    "residual": (residual, jax.nn.relu),
    "residual, two deep": (two_deep, jax.nn.relu),
    "residual, two deep, relu after": (resnet, jax.nn.relu),
}


def step_of(net: Callable, dtype: Any) -> Callable:
    """A step of gradient descent."""

    def loss(params: tuple, x: jax.Array, labels: jax.Array) -> jax.Array:
        y = net(x.astype(dtype), params[0]).astype(jnp.float32)
        logits = (y.mean((1, 2)) if y.ndim == 4 else y) @ params[1]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0])

    def step(params: tuple, x: jax.Array, labels: jax.Array) -> tuple:
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def arguments(kernel: tuple[int, ...], images: tuple[int, ...], layers: int) -> tuple:
    f32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    weights = [(f32(kernel), f32(kernel[-1:])) for _ in range(layers)]
    return (weights, f32((kernel[-1], CLASSES))), f32(images), jax.ShapeDtypeStruct(images[:1], jnp.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="v5e:1x1,v5p:1x1x1")
    targets = parser.parse_args().targets.split(",")
    lines = ["# Plain and residual stacks", "", f"Made by scripts/bench_residual.py; jax {jax.__version__}.", ""]
    lines += ["Peak in MiB: told, compiled; error of that; error of the step's time (roofline of the compiled schedule).", ""]
    lines += [f"| of | net | type | layers | {' | '.join(targets)} |", "|---|---|---|---|" + "---|" * len(targets)]
    for kind, op, kernel, images in (
        ("products", jnp.matmul, (WIDTH, WIDTH), (ROWS, WIDTH)),
        ("convolutions", slide, (3, 3, FEATURES, FEATURES), (IMAGES, SIDE, SIDE, FEATURES)),
    ):
        for name, (net, activation) in NETS.items():
            for dtype, layers in ((jnp.bfloat16, 4), (jnp.bfloat16, 8), (jnp.float32, 4)):
                cells = []
                for target in targets:
                    step = step_of(partial(net, op=op, activation=activation), dtype)
                    args = arguments(kernel, images, layers)
                    check = jaxauto.plan(step, *args, target=target, remat="off", certify=False, progress=False).verify()
                    peak, time = check.row("peak memory"), check.row("step time (roofline of the schedule)")
                    cells.append(
                        f"{(peak.estimated or 0) / MIB:,.0f}, {(peak.compiled or 0) / MIB:,.0f}; "
                        f"{(peak.estimated or 0) / (peak.compiled or 1) - 1:+.0%}; {(time.estimated or 0) / (time.compiled or 1) - 1:+.0%}"
                    )
                lines.append(f"| {kind} | {name} | {jnp.dtype(dtype).name} | {layers} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    (HERE / "results" / "residual.md").write_text("\n".join(lines) + "\n")
    close_workers()


if __name__ == "__main__":
    main()
