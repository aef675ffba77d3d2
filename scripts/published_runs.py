"""Published runs of JAX training, one row each: what was run, where, and the throughput as its authors give it. Facts only.

``mesh``: axes and what they cut: "data" the batch alone, "tensor" heads and the hidden width, all others batch and parameters (FSDP).
``host``: activations of a layer that the run keeps in host memory. ``full``: each layer is recomputed whole.
``unable``: why jaxauto or this script cannot make such a plan.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from kernel_decoder import KernelDecoder

SOURCES = {
    "TR": "github AI-Hypercomputer/tpu-recipes @c8cfe2f, training/",
    "MT": "github AI-Hypercomputer/maxtext @e591f30; the generic models at 76bd53b0f (2023-12-15)",
    "AX": "github apple/axlearn @34aed43, axlearn/experiments/text/gpt/fuji.py",
    "DGXC": "github NVIDIA/dgxc-benchmarking, MaxText and Paxml READMEs at releases v25.04.01, v25.01.1, v24.11.1",
    "JT": "github NVIDIA/JAX-Toolbox @bcbbfa5, docs/frameworks/maxtext",
    "GR": "github AI-Hypercomputer/gpu-recipes @2e1fd5e",
}
LLAMA2_7B = KernelDecoder(32, 4096, 32, 32, 11008, 32000, length=4096)
LLAMA2_70B = KernelDecoder(80, 8192, 64, 8, 28672, 32000, length=4096)
LLAMA3_8B = KernelDecoder(32, 4096, 32, 8, 14336, 128256, length=8192)
LLAMA3_70B = KernelDecoder(80, 8192, 64, 8, 28672, 128256, length=8192)
LLAMA3_405B = KernelDecoder(126, 16384, 128, 8, 53248, 128256, length=8192)
MISTRAL_7B = KernelDecoder(32, 4096, 32, 8, 14336, 32000, length=8192)
GPT3_175B = KernelDecoder(96, 12288, 96, 96, 49152, 50304, length=2048, gated=False, tied=True)


def generic(layers: int, width: int, heads: int, hidden: int) -> KernelDecoder:
    """MaxText's GPT-style models of 2023."""
    return KernelDecoder(layers, width, heads, heads, hidden, 32768, length=2048, head_width=256, gated=False, tied=True)


@dataclasses.dataclass(frozen=True)
class Run:
    """One published run; ``sequences`` for each device, ``rate``: tokens/s for each chip, as published or from the published step time."""

    name: str
    target: str
    rate: float
    mfu: str
    source: str
    model: KernelDecoder | None = None
    mesh: tuple[tuple[str, int], ...] = ()
    sequences: float = 1
    host: tuple[str, ...] = ()
    full: bool = False
    kept: str = ""  # how the run says it rematerialises, where neither host nor full
    unable: str = ""


O4 = ("input", "query", "key", "values")
O5 = (*O4, "out")
DOTS = ("query", "key", "values", "out", "mlp hidden", "mlp out")
MOE = "mixture of experts: this script's decoder has none"
WINDOWS = "attention over sliding windows: this script's decoder has none"
QUANTIZED = "the rate is of fp8 or int8 products: jaxauto counts the types in the step, and this decoder computes in bf16"


def fsdp(size: int) -> tuple[tuple[str, int], ...]:
    """Parameters and batch over all devices."""
    return (("fsdp", size),)


def both(batch: int, tensor: int) -> tuple[tuple[str, int], ...]:
    """FSDP and tensor parallelism."""
    return (("fsdp", batch), ("tensor", tensor))


def slices(count: int, *within: tuple[str, int]) -> tuple[tuple[str, int], ...]:
    """Replicas over slices, joined by a data-centre network, of what lies within one."""
    return (("data", count), *within)


def nodes(count: int, data: int = 1) -> tuple[tuple[str, int], ...]:
    """FSDP over ``count`` nodes of 8 GPUs, replicas of that along ``data``."""
    return (*((("data", data),) if data > 1 else ()), *((("fsdp_nodes", count),) if count > 1 else ()), ("fsdp", 8))


# fmt: off
RUNS = (
    # v6e, MaxText
    Run("GPT-3 175B", "v6e:16x16", 357.58, "41.9 %", "TR", GPT3_175B, fsdp(256), 3, full=True),
    Run("Llama2-70B", "v6e:16x16", 905.02, "43.8 %", "TR", LLAMA2_70B, fsdp(256), 2, host=("query", "key", "values")),
    Run("Llama3.1-70B", "v6e:16x16", 960.25, "50.4 %", "TR", LLAMA3_70B, fsdp(256), 5, host=O4),
    Run("Llama3.1-70B", "v6e:8x8", 876.74, "46.0 %", "TR", LLAMA3_70B, fsdp(64), 2, host=O4),
    Run("Llama3.1-8B", "v6e:2x4", 7138.9, "45.0 %", "TR", LLAMA3_8B, fsdp(8), 3, host=O5),
    Run("Llama3.1-8B", "v6e:4x8", 7031.7, "44.4 %", "TR", LLAMA3_8B, fsdp(32), 3, host=O5),
    Run("Llama3.1-8B", "v6e:8x16", 7119.6, "44.9 %", "TR", LLAMA3_8B, fsdp(128), 4, host=O5),
    Run("Mistral-7B", "v6e:2x4", 7776.8, "47.1 %", "TR", MISTRAL_7B, fsdp(8), 6, host=O5),
    Run("Mixtral-8x22B", "v6e:16x16", 1326.3, "36.2 %", "TR", unable=MOE),
    Run("Gemma3-12B", "v6e:2*16x16", 4204.8, "35.7 %", "TR", unable=WINDOWS),
    # v5p, v5e, v4, MaxText
    Run("GPT-3 175B, int8", "v5p:8x8x8", 369.06, "86.5 % of bf16", "TR", unable=QUANTIZED),
    Run("Llama2-70B", "v5p:8x8x8", 692, "65.4 %", "MT", LLAMA2_70B, fsdp(512), 4, kept="dots saved, but the MLP's first"),
    Run("DeepSeek3-671B", "v5p, 512 chips", 542.1, "33.2 %", "TR", unable=MOE),
    Run("Llama4-Maverick", "v5p, 128 chips", 1321.7, "34.9 %", "TR", unable=MOE),
    Run("generic 64B", "v5p:4x4x4", 805, "70.31 %", "MT", generic(64, 10240, 32, 32768), both(16, 4), 4, kept="minimal"),
    Run("generic 128B", "v5p:4x8x8", 394, "68.83 %", "MT", generic(64, 10240, 64, 65536), both(32, 8), 2, kept="minimal"),
    Run("generic 512B", "v5p:8x8x8", 93, "63.99 %", "MT", generic(128, 20480, 64, 65536), both(32, 16), 2, full=True),
    Run("generic 1024B", "v5p:8x16x16", 47, "64.80 %", "MT", generic(128, 20480, 128, 131072), both(128, 16), 2, full=True),
    Run("generic 32B", "v5e:16x16", 654, "66.86 %", "MT", generic(32, 10240, 32, 32768), fsdp(256), 4, full=True),
    Run("generic 128B", "v5e:16x16", 137, "56.06 %", "MT", generic(64, 10240, 64, 65536), both(16, 16), 1, full=True),
    Run("generic 52B", "v4:4x4x12", 484, "56.0 %", "MT", generic(32, 12288, 32, 49152), fsdp(192), 10, full=True),
    Run("generic 64B", "v5p:2*4x4x4", 770, "67.26 %", "MT", generic(64, 10240, 32, 32768), slices(2, *both(16, 4)), 4, kept="minimal"),
    Run("generic 128B", "v5p:2*4x8x8", 342, "59.66 %", "MT", generic(64, 10240, 64, 65536), slices(2, *both(32, 8)), 2, kept="minimal"),
    Run("generic 32B", "v5e:32*16x16", 591, "60.40 %", "MT", generic(32, 10240, 32, 32768), slices(32, *fsdp(256)), 4, full=True),
    # AXLearn
    Run("Llama2-70B", "v5e:4*16x16", 285, "59.87 %", "AX", LLAMA2_70B, slices(4, *fsdp(256)), 1, host=DOTS),
    Run("Llama2-70B, 4 accumulated", "v6e:16x16", 840, "37.9 % (6N)", "AX", unable="gradient accumulation: this script's step has none"),
    Run("Llama2-70B", "h100:64x8", 635, "26.6 % (6N)", "AX", LLAMA2_70B, (("data", 4), ("fsdp_nodes", 16), ("fsdp", 8)), 2),
    # tpu7x, MaxText; two devices for each chip
    Run("Llama3.1-405B", "tpu7x:4x8x8", 499.77, "54.7 % c", "TR", dataclasses.replace(LLAMA3_405B, first_moment=jnp.bfloat16), fsdp(512), 3,
        host=("input", "mlp out")),
    Run("Llama3.1-70B", "tpu7x:4x4x4", 2686.98, "52.3 % c", "TR", dataclasses.replace(LLAMA3_70B, first_moment=jnp.bfloat16), fsdp(128), 2,
        kept="layer input, context, q, k, v saved"),
    Run("Llama3.1-70B", "tpu7x:4x8x8", 2670.55, "52.0 % c", "TR", dataclasses.replace(LLAMA3_70B, first_moment=jnp.bfloat16), fsdp(512), 2,
        kept="layer input, context, q, k, v saved"),
    Run("Llama3.1-70B, fp8", "tpu7x:4x8x8", 4121.02, "40.1 % c", "TR", unable=QUANTIZED),
    Run("DeepSeek-V3 671B", "tpu7x:4x4x8", 2425.75, "26.3 % c", "TR", unable=MOE),
    Run("Qwen3-235B-A22B", "tpu7x, 256 chips", 4245.89, "27.3 % c", "TR", unable=MOE),
    # NVIDIA
    Run("Llama3-70B", "h100:16x8", 1052.8, "51.20 %", "DGXC", LLAMA3_70B, nodes(16), 2, kept="q, k, v saved"),
    *(Run("Llama3-70B", f"h100:{16 * data}x8", rate, mfu, "DGXC", LLAMA3_70B, nodes(16, data), 2, kept="q, k, v saved")
      for data, rate, mfu in ((4, 1055.7, "51.34 %"), (8, 1050.1, "51.06 %"), (16, 1030.6, "50.12 %"))),
    *(Run("Llama2-70B", f"h100:{n}x8", rate, "52.1 to 52.6 %", "DGXC", LLAMA2_70B, nodes(min(n, 16), max(1, n // 16)), 2,
          kept="qkv, out, mlpwo saved; FSDP over at most 128, as the Llama3 runs")
      for n, rate in ((8, 1170), (16, 1158), (32, 1145), (64, 1155), (128, 1156), (256, 1159))),
    Run("Llama2-7B", "h100:8", 11362, "52.9 %", "JT", LLAMA2_7B, fsdp(8), 2, kept="minimal, flash"),
    *(Run("Llama2-7B", f"h100:{n}x8" if n > 1 else "h100:8", rate, mfu, "MT", LLAMA2_7B, nodes(1, n), 4, kept="minimal, with context")
      for n, rate, mfu in ((1, 10676, "49.7 %"), (2, 9157, "42.7 %"), (4, 8832, "41.2 %"), (8, 8875, "41.4 %"), (16, 8137, "37.9 %"))),
    Run("GPT-5B (Paxml)", "h100:2x8", 12921, "42.68 %", "DGXC", unable="the model's sizes are not given with the figure"),
    Run("GPT-5B (Pax, TE)", "h100:32x8", 13258, "not given", "DGXC", unable="the model's sizes are not given with the figure"),
    Run("Llama3.1-70B", "h200:32x8", 1055.95, "51.4 %", "GR", LLAMA3_70B, nodes(16, 2), 2, kept="dots and context saved, but the MLP's"),
    Run("Llama3.1-405B, fp8", "b200:32x8", 579.06, "68.0 % of bf16", "GR", unable=QUANTIZED),
)
# fmt: on

# What was looked into where prediction and figure differ most, and what came of it.
FINDINGS = (
    """**Llama2-70B on 512 H100, AXLearn (1.9).** The figure, not the prediction, stands alone: the same model on as many H100 with as many
tokens for each takes 7.09 s in NVIDIA's run (DGXC), 6.8 s are predicted, AXLearn's figure is 12.9 s. Its rematerialisation is not given.
The prediction is what the hardware was shown to do; what this run lost, it lost in software.""",
    """**All runs on v6e (1.3 to 1.7; Llama3.1-8B the worst).** Compute, and there the share of its peak that the matrix unit reaches. All
predicted time is compute, almost (8B on 2x4: 2.14 of 2.23 s; its matrix products alone would take 1.64 s at peak). GPT-3, which recomputes
all and moves nothing to the host, is off too (1.32), and 8 chips as far as 128: so it is neither recomputation nor collectives nor the
host. The cost model takes 0.9 of peak for every product on every TPU, after one measured product of 8192^3 on v6e. Compiled for one
chip (libtpu 0.0.42.1), by the compiler's own cycles, a SwiGLU block of 8B's sizes with its gradients reaches 0.56 of peak on v6e and 0.80
on v5p, its forward pass 0.61 and 0.85, a product whose weights are converted from float32 on the way 0.51 and 0.78. (These cycles are
hard on v6e: they give that 8192^3 product 0.70.) It is not memory: operands and result of the block's first product pass in 0.6 ms, its
cycles are 5.2 ms, at peak it takes 3.1 ms. A step of eight such layers on v6e:2x4 takes 1.85 times the prediction by these cycles, one of
two layers on v5p:2x2x2 1.38 times. One efficiency for all TPUs and shapes is the error.""",
    """**Llama2-7B on several a3 nodes (1.4 to 1.6).** Two causes. On one node the ratio is 1.23 already, and 1.11 for a later run of the
same model there (JT): for GPUs 0.7 of peak is assumed, not fitted, and the runs of early 2024 had older kernels. The rest is the network:
published steps grow from 1.53 s on one node to 2.01 s on sixteen, predicted ones hardly: the gradients' reduction over the nodes (0.2 s
in all at the chip table's 50 GB/s for each GPU) is taken to hide behind compute. With a quarter of that bandwidth, as older a3 machines
have, the same plan communicates for 0.40 s, still hidden in the prediction; 1.53 s and 0.4 s that are waited for make most of the
published 2.01 s. Overlap between nodes is believed too readily.""",
    """**What agrees** (within 10 %: v5p, FSDP on v5e, Llama2-70B on H100) does so better than the model deserves: the compiler's cycles
are above the prediction on v5p too; the published runs tuned their compilers' options and kernels.""",
    """**Over slices** the prediction loses less than the runs: 64B on v5p 1.03 on one slice and 1.05 on two, 128B 1.02 and 1.14, 32B on v5e
1.01 and 1.13 on 32. The gradients' sum over the data-centre network is taken to hide behind compute, as between nodes of GPUs.""",
)
