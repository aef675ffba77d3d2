"""Convolutions of images that are split by rows, told and compiled: python scripts/bench_borders.py. Writes results/borders.md.

Three layers of each kind, images of many rows over eight devices, bytes of all gathers, exchanges and permutes of a step. What the
partitioner cannot do by sending borders it gathers: groups that are not of one feature each were gathered silently, 384 MiB on v5e
and 640 on h100 where 1.25 and 4 of borders had been told; they are not split so any more (``rules/convolution.py``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench_rounded import BROUGHT, of, step_of, write  # noqa: E402

import jaxauto  # noqa: E402

FEATURES, LAYERS, ROWS, COLUMNS = 128, 3, 4096, 64
NUMBERS = ("NHWC", "HWIO", "NHWC")


def conv(x: jax.Array, w: jax.Array, stride: int = 1, groups: int = 1, dilation: int = 1) -> jax.Array:
    options = {"rhs_dilation": (dilation, dilation), "dimension_numbers": NUMBERS, "feature_group_count": groups}
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", **options)


def transposed(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NUMBERS)


def twice(x: jax.Array, w: jax.Array) -> jax.Array:
    return conv(x, w, groups=FEATURES).reshape(*x.shape[:-1], FEATURES, 2).sum(-1)


# kind → (layer, taps, input features of a group, output features, rows of the image)
KINDS: dict[str, tuple[Callable, int, int, int, int]] = {
    "3 taps": (conv, 3, FEATURES, FEATURES, ROWS),
    "depthwise, 7 taps": (partial(conv, groups=FEATURES), 7, 1, FEATURES, ROWS),
    "depthwise, two of each": (twice, 3, 1, 2 * FEATURES, ROWS),
    "4 groups": (partial(conv, groups=4), 3, FEATURES // 4, FEATURES, ROWS),
    "stride 2, 3 taps": (partial(conv, stride=2), 3, FEATURES, FEATURES, ROWS),
    "stride 2, 4 taps": (partial(conv, stride=2), 4, FEATURES, FEATURES, ROWS),
    "transposed, 3 taps": (transposed, 3, FEATURES, FEATURES, ROWS // 8),
    "transposed, 4 taps": (transposed, 4, FEATURES, FEATURES, ROWS // 8),
    "dilated": (partial(conv, dilation=2), 3, FEATURES, FEATURES, ROWS),
}


def row(kind: str, target: str) -> str:
    layer, taps, inputs, outputs, rows = KINDS[kind]

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(layer(x, w))
        return jnp.mean(x**2)

    weights, x = [of((taps, taps, inputs, outputs), jnp.float32)] * LAYERS, of((1, rows, COLUMNS, FEATURES), jnp.float32)
    pins = {"0.*": P(), "1": P(None, "data")}
    options = {"target": target, "mesh": {"data": 8}, "constraints": pins, "remat": "off", "certify": False, "progress": False}
    found = jaxauto.plan(step_of(loss), weights, x, **options).verify()
    cells = [kind, target]
    for name in BROUGHT:
        told = sum(c.estimated for c in found.collectives if c.name.startswith(name)) / 2**20
        compiled = sum(c.compiled for c in found.collectives if c.name.startswith(name)) / 2**20
        cells.append(f"{told:,.2f}, {compiled:,.2f}" if told or compiled else "")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="v5e:2x4,h100:8")
    targets = parser.parse_args().targets.split(",")
    head = ["# Convolutions of images that are split by rows", "", f"Made by scripts/bench_borders.py; jax {jax.__version__}.", ""]
    head += ["MiB of all devices in a step: told, compiled.", ""]
    head += ["| layers | target | all-gather | all-to-all | collective-permute |", "|---|---|---|---|---|"]
    write("borders", head, (row(kind, target) for target in targets for kind in KINDS))


if __name__ == "__main__":
    main()
