"""What the fusions of XLA:CPU's library (YNNPACK) take and save: python scripts/bench_cpu_library.py

The small models of bench_models.py, each step as written, compiled with the options of ``targets/compilers.py`` but for the library's
fusions: as XLA has them by default, of dots alone, none. Temporaries as the compiler allocates them; seconds of steps run in turn on this
machine, medians, as ratios to the default's. Writes results/cpu_library.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import bench_models  # noqa: E402

from jaxauto.targets.compilers import COMPILER_OPTIONS  # noqa: E402

FLAG = "xla_cpu_experimental_ynn_fusion_type"
FUSED = {"by default": None, "dots": "LIBRARY_FUSION_TYPE_DOT", "none": ""}


def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array for an abstract one: small numbers, or zeros that index anything."""
    return jnp.full(leaf.shape, 0.01 if jnp.issubdtype(leaf.dtype, jnp.floating) else 0, leaf.dtype)


def measure(make: Callable, runs: int) -> list[tuple[float, float]]:
    """(MiB of temporaries, seconds) of each way to compile a model's step."""
    step, args = make()
    args = jax.tree.map(filled, args)
    options = {k: v for k, v in COMPILER_OPTIONS["cpu"].items() if k != FLAG}
    lowered = jax.jit(step).lower(*args)
    compiled = [lowered.compile(options | ({} if fused is None else {FLAG: fused})) for fused in FUSED.values()]
    spent: list[list[float]] = [[] for _ in compiled]
    for run in range(runs + 1):
        for k, program in enumerate(compiled):
            begin = time.perf_counter()
            jax.block_until_ready(program(*args))
            if run:  # the first one warms caches
                spent[k].append(time.perf_counter() - begin)
    return [(p.memory_analysis().temp_size_in_bytes / 2**20, statistics.median(s)) for p, s in zip(compiled, spent, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu_library.md")
    options = parser.parse_args()
    lines = [
        "# The fusions of XLA:CPU's library",
        "",
        f"Made by scripts/bench_cpu_library.py; jax {jax.__version__}, {options.runs} runs each.",
    ]
    lines += ["Temporaries in MiB, and seconds as a ratio to those by default. jaxauto compiles with none.", ""]
    lines += [f"| model | {' | '.join(f'{name}: MiB | time' for name in FUSED)} |", "|---|" + "---|" * 2 * len(FUSED)]
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in FUSED}
    for model, sizes in bench_models.MODELS.items():
        found = measure(sizes["small"], options.runs)
        (memory, seconds), cells = found[0], []
        for name, (mib, spent) in zip(FUSED, found, strict=True):
            ratios[name].append((mib / memory, spent / seconds))
            cells.append(f"{mib:,.2f} | {spent / seconds:.2f}")
        lines.append(f"| {model} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    means = [" | ".join(f"{statistics.geometric_mean(column):.3f}" for column in zip(*ratios[name], strict=True)) for name in FUSED]
    lines.append(f"| geometric mean, to default | {' | '.join(means)} |")
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
