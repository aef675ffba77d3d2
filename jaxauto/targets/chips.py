"""The table of chips. A new chip is one more entry; see ``chip.py`` for what each number means."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Literal

from jaxauto.targets.chip import GIB, Chip, Number

# Sources, cited by key in the table below.
BOOK = "How to Scale Your Model (jax-ml.github.io/scaling-book)"
BOOK_GPU = "How to Scale Your Model, GPUs (jax-ml.github.io/scaling-book/gpus)"
GOOGLE = "docs.cloud.google.com/tpu/docs/{}"
PALLAS = "jax, pallas/mosaic/tpu_info.py"
_SCOPED = "XLA's default of xla_tpu_scoped_vmem_limit_kib: programs with this value of it are those without"
NVIDIA = "NVIDIA {} datasheet"
XLA_SPEC = "openxla/xla, gpu/target_config/specs/{}.txtpb"
RECIPES = "AI-Hypercomputer/tpu-recipes, microbenchmarks"
OWN = "jaxauto"


def _tpu(
    name: str,
    device_kind: tuple[str, ...],
    max_topology: tuple[int, ...],
    wrap: Literal["16", "cubes"],
    *,
    bf16: float,
    others: Mapping[str, float],
    hbm: Number,
    hbm_bandwidth: Number,
    vector: Number,
    link: Number,
    host: Number,
    network: Number,
    clock: Number,
    vmem_mib: int,  # of one core: where a device has two (v5p), XLA keeps no array on chip that is larger (v5p: 36 MiB in 50 programs)
    scoped_mib: int = 16,
    cores: int = 1,
    devices_per_chip: int = 1,
) -> Chip:
    source = GOOGLE.format(name)
    peaks = {
        "bfloat16": Number(bf16, "flop/s", source),
        # The default matmul precision of float32 on TPU is one pass of bfloat16 multiplications.
        "float32": Number(bf16, "flop/s", "jax default_matmul_precision: float32 in one bfloat16 pass", "assumed"),
        **{dtype: Number(value, "flop/s", PALLAS if dtype == "int4" else source) for dtype, value in others.items()},
    }
    numbers = {
        "hbm_bytes": hbm,
        "hbm_bandwidth": hbm_bandwidth,
        "vector_flops": vector,
        "link_bandwidth": link,
        "hop_latency": Number(1e-6, "s", BOOK),
        "host_bandwidth": host,
        "network_bandwidth": network,
        "clock_ghz": clock,
        "vmem_bytes": Number(vmem_mib * 2**20, "byte", PALLAS),
        **({"scoped_bytes": Number(scoped_mib * 2**20, "byte", _SCOPED, "fitted")} if scoped_mib else {}),
        "cores": Number(cores, "1", BOOK),
        "flops_efficiency": Number(0.9, "1", f"{RECIPES}: v6e bf16 matmul 8192^3 at 827 of 918 Tflop/s", "fitted"),
        "bandwidth_efficiency": Number(0.85, "1", f"{RECIPES}: HBM copies at 83 % (v6e) and 87 % (tpu7x)", "fitted"),
        "hash_seconds": Number(_HASH / vector.value, "s", f"{OWN}: cycles of compiled programs, scripts/results/hashing.md", "fitted"),
        "exposed_share": _exposed(0.35),
    }
    return Chip(name, "tpu", device_kind, len(max_topology), max_topology, wrap, peaks, numbers, devices_per_chip, (8, 128))


_HASH = 128  # operations of the vector unit: the cycles that XLA expects of a kernel that makes random bits, times what it does in one


def _exposed(share: float) -> Number:
    return Number(share, "1", f"{OWN}: compiled schedules on eight devices, scripts/results/accuracy.md", "fitted")


def _vector(cores: int, clock_ghz: float) -> Number:
    """8 x 128 lanes of 4 ALUs in each core (How to Scale Your Model, TPUs)."""
    return Number(cores * 8 * 128 * 4 * clock_ghz * 1e9, "flop/s", f"{BOOK}: 8 x 128 lanes x 4 ALUs x clock", "assumed")


def _clock(ghz: float, origin: Literal["fitted", "assumed"] = "fitted") -> Number:
    return Number(ghz, "GHz", "peak flop/s over the flops of the matrix units in a cycle", origin)


_ICI = "{}; 0.9 of nominal"
_LEAST = "XLA's out-of-memory message, libtpu 0.0.50; older ones say 0.01 GiB more"
_TPUS = (
    _tpu(
        "v4",
        ("tpu v4",),
        (16, 16, 16),
        "cubes",
        bf16=275e12,
        others={"int8": 275e12},
        hbm=Number(30.75 * GIB, "byte", "XLA's out-of-memory message", "fitted"),
        hbm_bandwidth=Number(1200e9, "byte/s", GOOGLE.format("v4")),
        vector=_vector(2, 1.05),
        link=Number(45e9, "byte/s", _ICI.format(BOOK)),
        host=Number(16e9, "byte/s", BOOK),
        network=Number(25e9 / 4, "byte/s", f"{BOOK}: 25 GB/s for each host of 4 chips"),
        clock=_clock(1.05),
        vmem_mib=128,  # CMEM, which both cores share: arrays are kept there, not in the 16 MiB of VMEM
        scoped_mib=0,
    ),
    _tpu(
        "v5e",
        ("tpu v5 lite", "tpu v5e"),
        (16, 16),
        "16",
        bf16=197e12,
        others={"int8": 394e12, "int4": 788e12},
        hbm=Number(15.75 * GIB, "byte", "XLA's out-of-memory message", "fitted"),
        hbm_bandwidth=Number(819e9, "byte/s", GOOGLE.format("v5e")),
        vector=_vector(1, 1.5),
        link=Number(45e9, "byte/s", _ICI.format(BOOK)),
        host=Number(15e9, "byte/s", BOOK),
        network=Number(3.1e9, "byte/s", GOOGLE.format("v5e") + ": 6.4 Tb/s for a pod of 256"),
        clock=_clock(1.5),
        vmem_mib=128,
    ),
    _tpu(
        "v5p",
        ("tpu v5p", "tpu v5"),
        (16, 16, 24),
        "cubes",
        bf16=459e12,
        others={"int8": 918e12, "int4": 1840e12, "float8_e4m3fn": 459e12},
        hbm=Number(95.73 * GIB, "byte", _LEAST, "fitted"),
        hbm_bandwidth=Number(2765e9, "byte/s", GOOGLE.format("v5p")),
        vector=_vector(2, 1.75),
        link=Number(90e9, "byte/s", _ICI.format(BOOK)),
        host=Number(15e9, "byte/s", BOOK),
        network=Number(6.25e9, "byte/s", GOOGLE.format("v5p")),
        clock=_clock(1.75),
        vmem_mib=64,
        cores=2,
    ),
    _tpu(
        "v6e",
        ("tpu v6 lite", "tpu v6e"),
        (16, 16),
        "16",
        bf16=918e12,
        others={"int8": 1836e12, "int4": 3680e12, "float8_e4m3fn": 918e12},
        hbm=Number(31.25 * GIB, "byte", "XLA's out-of-memory message", "fitted"),
        hbm_bandwidth=Number(1640e9, "byte/s", GOOGLE.format("v6e")),
        vector=_vector(1, 1.75),
        link=Number(90e9, "byte/s", _ICI.format(BOOK)),
        host=Number(32e9, "byte/s", BOOK),
        network=Number(12.5e9, "byte/s", GOOGLE.format("v6e")),
        clock=_clock(1.75),
        vmem_mib=128,
        scoped_mib=32,
    ),
    _tpu(
        "tpu7x",
        ("tpu7x", "tpu v7", "tpu 7x"),
        (16, 24, 24),
        "cubes",
        devices_per_chip=2,
        bf16=2307e12 / 2,
        others={"float8_e4m3fn": 4614e12 / 2},
        hbm=Number(94.74 * GIB, "byte", _LEAST, "fitted"),
        hbm_bandwidth=Number(7380e9 / 2, "byte/s", GOOGLE.format("tpu7x")),
        vector=_vector(1, 1.75),
        link=Number(90e9, "byte/s", f"{RECIPES}: all-gather plateau of 179 GB/s over two links", "fitted"),
        host=Number(32e9, "byte/s", "as v6e", "assumed"),
        network=Number(12.5e9 / 2, "byte/s", GOOGLE.format("tpu7x")),
        clock=_clock(1.75, "assumed"),
        vmem_mib=64,
        scoped_mib=32,
    ),
)


_TIMED = f"{OWN}: programs timed on one, scripts/results/calibration_{{}}.md"
# Of a kernel in a graph of kernels, as loops and blocks of a step are run; alone it takes twice that.
_LAUNCH = Number(1.7e-6, "s", _TIMED.format("h200"), "fitted")
_HASHED = Number(3.2e-12, "s", _TIMED.format("h200"), "fitted")  # the H100 takes as long


def _reached(
    flops: float, convolution: float, bandwidth: float, writes: float, source: str, origin: Literal["fitted", "assumed"] = "fitted"
) -> dict[str, Number]:
    """What a GPU reaches of its peaks, and what starting a kernel and a hash take."""
    names = ("flops_efficiency", "convolution_efficiency", "bandwidth_efficiency", "dot_writes")
    figures = dict(zip(names, (flops, convolution, bandwidth, writes), strict=True))
    shares = {name: Number(value, "1", source, origin) for name, value in figures.items()}
    return shares | {
        name: dataclasses.replace(number, origin=origin) for name, number in (("launch_seconds", _LAUNCH), ("hash_seconds", _HASHED))
    }


_REACHED = _reached(0.7, 0.65, 0.86, 1.5, "as h200; dots between it and h100", "assumed")


def _gpu(
    name: str,
    device_kind: tuple[str, ...],
    *,
    bf16: float,
    others: Mapping[str, float],
    hbm: Number,
    hbm_bandwidth: float,
    vector: float,
    nvlink: Number,
    host: Number,
    network: Number,
    clock_ghz: float,
    spec: str,
    reached: Mapping[str, Number] = _REACHED,
) -> Chip:
    source = NVIDIA.format(name.upper())
    peaks = {dtype: Number(value, "flop/s", source) for dtype, value in {"bfloat16": bf16, "float16": bf16, **others}.items()}
    # JAX's default precision lets XLA:GPU multiply float32 in TF32.
    peaks["float32"] = Number(bf16 / 2, "flop/s", f"{source}: TF32, the default precision of float32 matmuls")
    numbers = {
        "hbm_bytes": hbm,
        "hbm_bandwidth": Number(hbm_bandwidth, "byte/s", source),
        "vector_flops": Number(vector, "flop/s", source),
        "link_bandwidth": nvlink,
        "hop_latency": Number(3.4e-6, "s", "NVIDIA/nccl, tuning.cc: ring, Simple protocol, NVLink"),
        "host_bandwidth": host,
        "network_bandwidth": network,
        "clock_ghz": Number(clock_ghz, "GHz", XLA_SPEC.format(spec)),
        **reached,
        "exposed_share": _exposed(0.25),
    }
    return Chip(name, "gpu", device_kind, 2, (8,), "switch", peaks, numbers)


# The driver, the runtime and NCCL's buffers take their part, and JAX preallocates three quarters unless told otherwise
# (XLA_PYTHON_CLIENT_MEM_FRACTION); 0.9 is what a program gets at most in practice.
def _usable(bytes_: float, spec: str) -> Number:
    return Number(0.9 * bytes_, "byte", XLA_SPEC.format(spec) + ": device_memory_size; 0.9 of it", "assumed")


def _nvlink(nominal: float) -> Number:
    return Number(0.82 * nominal, "byte/s", f"{BOOK_GPU}: 370 of 450 GB/s reached on H100", "fitted")


_GPUS = (
    _gpu(
        "a100",
        ("nvidia a100",),
        bf16=312e12,
        others={"int8": 624e12, "float64": 19.5e12},
        hbm=_usable(85100068864, "a100_sxm_80"),
        hbm_bandwidth=2039e9,
        vector=19.5e12,
        nvlink=_nvlink(300e9),
        host=Number(32e9, "byte/s", "PCIe Gen4 x16"),
        network=Number(25e9, "byte/s", "meta-pytorch/autoparallel: 200 Gb/s for each GPU"),
        clock_ghz=1.41,
        spec="a100_sxm_80",
    ),
    _gpu(
        "h100",
        ("nvidia h100",),
        bf16=989.4e12,
        others={"int8": 1978.9e12, "float8_e4m3fn": 1978.9e12, "float64": 66.9e12},
        hbm=_usable(84942979072, "h100_sxm"),
        hbm_bandwidth=3350e9,
        vector=66.9e12,
        nvlink=_nvlink(450e9),
        host=Number(64e9, "byte/s", "PCIe Gen5 x16"),
        network=Number(50e9, "byte/s", f"{BOOK_GPU}: 400 Gb/s for each GPU"),
        clock_ghz=1.98,
        spec="h100_sxm",
        reached=_reached(0.7, 0.68, 0.9, 1.2, _TIMED.format("h100")),
    ),
    _gpu(
        "h200",
        ("nvidia h200",),
        bf16=989.4e12,
        others={"int8": 1978.9e12, "float8_e4m3fn": 1978.9e12, "float64": 66.9e12},
        hbm=_usable(151397597184, "h200"),
        hbm_bandwidth=4800e9,
        vector=66.9e12,
        nvlink=_nvlink(450e9),
        host=Number(63e9, "byte/s", "MLPerf Training system description: 504 GB/s for 8 GPUs"),
        network=Number(50e9, "byte/s", f"{BOOK_GPU}: 400 Gb/s for each GPU"),
        clock_ghz=1.98,
        spec="h200",
        reached=_reached(0.7, 0.65, 0.86, 1.9, _TIMED.format("h200")),
    ),
    _gpu(
        "b200",
        ("nvidia b200",),
        bf16=2250e12,
        others={"int8": 4500e12, "float8_e4m3fn": 4500e12, "float4_e2m1fn": 9000e12, "float64": 40e12},
        hbm=_usable(191514411008, "b200"),
        hbm_bandwidth=7672e9,
        vector=80e12,
        nvlink=_nvlink(900e9),
        host=Number(64e9, "byte/s", "PCIe Gen5 x16, the hosts' limit", "assumed"),
        network=Number(50e9, "byte/s", f"{BOOK_GPU}: 400 Gb/s for each GPU"),
        clock_ghz=1.965,
        spec="b200",
    ),
)


def _assumed(value: float, unit: str) -> Number:
    return Number(value, unit, f"{OWN}: an emulated device on a small host", "assumed")


CPU = Chip(
    "cpu",
    "cpu",
    ("cpu",),
    1,
    (4096,),
    "switch",
    peaks={"float32": _assumed(10e9, "flop/s"), "bfloat16": _assumed(10e9, "flop/s"), "float64": _assumed(5e9, "flop/s")},
    numbers={
        "hbm_bytes": _assumed(4.0 * GIB, "byte"),
        "hbm_bandwidth": _assumed(2e9, "byte/s"),
        "vector_flops": _assumed(2e9, "flop/s"),
        "link_bandwidth": _assumed(1e9, "byte/s"),
        "hop_latency": _assumed(2e-6, "s"),
        "host_bandwidth": _assumed(10e9, "byte/s"),
        "network_bandwidth": _assumed(1e9, "byte/s"),
        "clock_ghz": _assumed(2.0, "GHz"),
        "flops_efficiency": _assumed(0.8, "1"),
        "bandwidth_efficiency": _assumed(0.8, "1"),
        "exposed_share": _assumed(0.25, "1"),
    },
)

CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in (*_TPUS, *_GPUS, CPU)}


def host_memory_bytes() -> float:
    """Physical memory of this host; 16 GiB where the system does not tell."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return 16.0 * GIB


def cpu_chip(num_devices: int) -> Chip:
    """The CPU as ``num_devices`` emulated devices that share the memory of this host."""
    hbm = Number(host_memory_bytes() / num_devices, "byte", f"memory of this host over {num_devices} devices", "assumed")
    return dataclasses.replace(CPU, numbers={**CPU.numbers, "hbm_bytes": hbm})
