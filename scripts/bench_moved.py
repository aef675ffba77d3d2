"""What moves elements of what a dot makes or reads: python scripts/bench_moved.py [--targets …]

Programs of a dot and of one array of 256 MiB (bfloat16, 32 x 512 x 8,192) that is moved: shifted, rolled, reversed, its halves swapped as
rotary positions do, cut into windows. Out of a dot: what a dot makes is moved and added to an array. Into one dot, into two: an array is
moved and read, once along its rows and once along its columns. The matrices are narrow, so that a program takes as long as the bytes it
moves: told as passes over 256 MiB, by the estimate and by the compiled schedule. Writes results/moved.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench_shared import passes  # noqa: E402

from jaxauto.aot import close_workers  # noqa: E402

BATCH, ROWS, COLUMNS, WIDTH = 32, 512, 8192, 128


def shift(x: jax.Array, k: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (k, 0), (0, 0)))[:, :ROWS]


def shifts(n: int) -> Callable[[jax.Array], jax.Array]:
    """A convolution over time, a tap at a time."""
    return lambda x: sum(shift(x, k) * jnp.bfloat16(k + 1) for k in range(n + 1))


def rotary(x: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, -1)
    return x * 0.5 + jnp.concatenate([-b, a], -1) * 0.25


def windows(x: jax.Array) -> jax.Array:
    """Of 8 x 8, of images of 16 x 32."""
    return x.reshape(BATCH, 2, 8, 4, 8, COLUMNS).swapaxes(2, 3).reshape(x.shape)


def images(x: jax.Array) -> jax.Array:
    return x.reshape(BATCH, 2, 4, 8, 8, COLUMNS).swapaxes(2, 3).reshape(x.shape)


MOVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "nothing": lambda x: 2 * x,
    "heads, turned and back": lambda x: jnp.abs(x.reshape(BATCH, ROWS, 64, 128).swapaxes(1, 2)).swapaxes(1, 2).reshape(x.shape),
    "a shift": lambda x: 2 * shift(x, 1),
    "a shift and itself": shifts(1),
    "four taps": shifts(3),
    "a roll": lambda x: 2 * jnp.roll(x, 3, 1),
    "a roll of lanes": lambda x: 2 * jnp.roll(x, 3, 2),
    "reversed": lambda x: 2 * x[:, ::-1],
    "halves swapped": rotary,
    "windows of images": lambda x: 2 * windows(x),
    "images of windows": lambda x: 2 * images(x),
}


def programs(moves: Callable) -> dict[str, tuple[Callable, tuple]]:
    """Column → (step, arguments)."""
    wide, into, rows, out = (
        jax.ShapeDtypeStruct(shape, "bfloat16")
        for shape in ((BATCH, ROWS, COLUMNS), (COLUMNS, WIDTH), (BATCH, ROWS, WIDTH), (WIDTH, COLUMNS))
    )

    def columns(t: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.dot_general(t, right, (((0, 1), (0, 1)), ((), ())))

    return {
        "out of a dot": (lambda x, w, z: moves(x @ w) + z, (rows, out, wide)),
        "into one": (lambda x, w: jax.nn.silu(moves(x)) @ w, (wide, into)),
        "into two": (lambda x, w, r: (lambda t: (jax.nn.silu(t) @ w, columns(t, r)))(moves(x)), (wide, into, rows)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="v5e:1x1,v5p:1x1x1")
    targets = parser.parse_args().targets.split(",")
    lines = ["# What moves elements", "", f"Made by scripts/bench_moved.py; jax {jax.__version__}."]
    lines += ["Passes over 256 MiB: estimated, by the compiled schedule."]
    for target in targets:
        names = list(programs(MOVES["nothing"]))
        lines += ["", f"## {target}", "", f"| moved | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
        for name, moves in MOVES.items():
            lines.append(f"| {name} | {' | '.join(passes(*program, target) for program in programs(moves).values())} |")
            print(lines[-1], flush=True)
    close_workers()
    (HERE / "results" / "moved.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
