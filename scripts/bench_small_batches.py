"""Convolutions of few images on a TPU, with XLA's space-to-batch and without: python scripts/bench_small_batches.py [--targets …]

With fewer than eight images on a device XLA:TPU cuts their last spatial dimension in eight and makes a batch of the pieces, each with the
borders that it needs (xla/service/space_to_batch_converter.cc). Nets of bench_vision.py and flax_models.py and plain stacks, by images, on
one device, nothing recomputed: memory, the roofline of the compiled schedule and the compiler's own cycles, with the pass and without.
Plans are compiled without it. Writes results/small_batches.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import bench_vision  # noqa: E402
import flax_models  # noqa: E402

import jaxauto  # noqa: E402
from jaxauto import hlo  # noqa: E402
from jaxauto.aot import close_workers  # noqa: E402
from jaxauto.errors import JaxAutoError  # noqa: E402
from jaxauto.targets import Target  # noqa: E402
from jaxauto.targets.compilers import CONVOLUTION_OPTIONS  # noqa: E402
from jaxauto.verify import compile_ahead, schedule_of  # noqa: E402

MIB = 2**20


def stack(features: int, side: int, layers: int, n: int) -> tuple[Callable, tuple]:
    """3 × 3 convolutions with a relu."""

    def loss(kernels: list, x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.relu(bench_vision.conv(x, kernel))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(kernels: list, x: jax.Array) -> list:
        return jax.tree.map(lambda w, g: w - 0.1 * g, kernels, jax.grad(loss)(kernels, x))

    of = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    return step, ([of((3, 3, features, features))] * layers, of((n, side, side, features)))


NETS: Mapping[str, Callable[[int], tuple[Callable, tuple]]] = {
    "3 × 3, 32 features of 512 × 512": partial(stack, 32, 512, 4),
    "3 × 3, 128 features of 256 × 256": partial(stack, 128, 256, 4),
    "3 × 3, 256 features of 64 × 64": partial(stack, 256, 64, 8),
    "3 × 3, 512 features of 16 × 16": partial(stack, 512, 16, 8),
    "ResNet-50, 224 × 224": lambda n: bench_vision.resnet((3, 4, 6, 3), 64, 224, n, 1000),
    "ResNet-50, 512 × 512": lambda n: bench_vision.resnet((3, 4, 6, 3), 64, 512, n, 1000),
    "U-Net, 256 × 256": lambda n: bench_vision.unet(4, 64, 256, n),
    "ConvNeXt, 224 × 224": flax_models.convnext,
    "autoencoder, 128 × 128": flax_models.vae,
    "diffusion, 64 × 64": flax_models.diffusion,
    "WaveNet": flax_models.wavenet,
}


def measure(target: str, net: str, n: int) -> str:
    """A table row."""
    step, args = NETS[net](n)
    plan = jaxauto.plan(step, *args, target=target, mesh={"data": 1}, remat="off", certify=False, progress=False)
    cells = []
    for on in ("true", "false"):
        plan.compiler_options.update(dict.fromkeys(CONVOLUTION_OPTIONS["tpu"], on))
        compiled = compile_ahead(plan, 900)
        module = hlo.parse(compiled.text)
        seconds = module.cycles / Target(target).chip.clock_hz
        cells += [f"{compiled.memory['peak'] / MIB:,.0f}", f"{schedule_of(plan, module).total_seconds * 1e3:.2f}", f"{seconds * 1e3:.2f}"]
    told = plan.estimate
    return f"| {target} | {net} | {n} | {' | '.join(cells)} | {told.peak_memory / MIB:,.0f} | {told.step_time * 1e3:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["v5e:1x1", "v5p:1x1x1", "v6e:1x1"])
    parser.add_argument("--images", nargs="+", type=int, default=[1, 4])
    options = parser.parse_args()
    lines = ["# Few images, with and without space-to-batch", "", f"Made by scripts/bench_small_batches.py; jax {jax.__version__}.", ""]
    lines += ["Peak in MiB; milliseconds by the roofline of the compiled schedule and by the compiler's own cycles.", ""]
    lines += ["| target | net | images | with: peak | roofline | cycles | without: peak | roofline | cycles | told: peak | time |"]
    lines += ["|---" * 11 + "|"]
    for target in options.targets:
        for net in NETS:
            for n in options.images:
                try:
                    lines.append(measure(target, net, n))
                except JaxAutoError as problem:
                    lines.append(f"| {target} | {net} | {n} | {type(problem).__name__}: {str(problem).splitlines()[0][:80]}" + " |" * 8)
                print(lines[-1], flush=True)
                (HERE / "results" / "small_batches.md").write_text("\n".join(lines) + "\n")
    close_workers()


if __name__ == "__main__":
    main()
