"""float32 models on TPU: estimates against the compiler: python scripts/bench_wide.py [--targets v5p:1x1x1,v5e:2x4] [--only NAME].

The steps of remat_cases.py with float32 activations in the default precision, which XLA:TPU multiplies, and in part keeps, in bfloat16
(jaxauto/rewrite/narrow.py): as written and as planned without pressure on memory. Bytes are the most alive at once on one device, seconds
the roofline of the compiled schedule. Writes results/wide.md, row by row.
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

import bench_models  # noqa: E402
import bench_vision  # noqa: E402
from bench_offload import chain  # noqa: E402
from models import step_and_args  # noqa: E402
from remat_cases import CASES, GPT2_MEDIUM, VIT_L, WHISPER, compile_once, mesh_of  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto.aot import close_workers  # noqa: E402
from jaxauto.targets.target import Target  # noqa: E402

WIDE = {"compute": jnp.float32}
STEPS: dict[str, Callable[[int], tuple[Callable, tuple]]] = {
    "chain of layers": chain,
    "GPT-2 medium, unrolled": lambda n: step_and_args(GPT2_MEDIUM.with_(scan=False, layers=4, batch=8 * n, **WIDE)),
    "GPT-2 medium": lambda n: step_and_args(GPT2_MEDIUM.with_(batch=4 * n, **WIDE)),
    "ViT-L": lambda n: bench_vision.vit(VIT_L.with_(batch=16 * n, **WIDE), 256, 16, 1024),
    "Whisper-like": lambda n: bench_models.encoder_decoder(WHISPER.with_(batch=8 * n, **WIDE), 1536),
    "LSTM": lambda n: CASES["LSTM"].make(64 * n),
    "SSM": lambda n: CASES["SSM"].make(4 * n),
    "U-Net": lambda n: CASES["U-Net"].make(8 * n),
}


def rows(name: str, target: str) -> list[str]:
    step, args = STEPS[name](Target(target).num_devices)
    lines = []
    for remat, form in (("off", "as written"), ("auto", "planned")):
        try:
            plan = jaxauto.plan(step, *args, target=target, mesh=mesh_of(target), remat=remat, certify=False, progress=False)
        except jaxauto.InfeasibleError as error:
            lines.append(f"| {name} | {target} | {form} | does not fit: {(error.least_bytes or 0) / 2**20:,.1f} MiB |")
            continue
        found = plan.verify(timeout=900)
        cells = [name, target, form]
        for quantity, unit in (("peak memory", 2**20), ("step time (roofline of the schedule)", 1e-3)):
            row = found.row(quantity)
            cells += [f"{(row.estimated or 0) / unit:,.1f}", f"{(row.compiled or 0) / unit:,.1f}", f"{100 * (row.error or 0):+.1f} %"]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="v5p:1x1x1,v5e:2x4")
    parser.add_argument("--only", default="", help="steps whose name contains this; nothing is written")
    parser.add_argument("--keep", type=Path, help="a folder for compiled programs: the same program is compiled once")
    options = parser.parse_args()
    compile_once(options.keep)
    bench_models.COMPUTE = bench_vision.COMPUTE = jnp.float32
    lines = ["# float32 activations on TPU", "", f"Made by scripts/bench_wide.py; jax {jax.__version__}.", ""]
    lines += ["| step | target | | estimated MiB | compiled MiB | error | estimated ms | ms | error |", "|---|" + "---|" * 8]
    for target in options.targets.split(","):
        for name in STEPS:
            if options.only in name:
                lines += rows(name, target)
                if not options.only:
                    (HERE / "results" / "wide.md").write_text("\n".join(lines) + "\n")
    close_workers()


if __name__ == "__main__":
    main()
