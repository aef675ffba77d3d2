"""Ahead-of-time compilers: which is installed for a target, and the devices one can compile for without owning them."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from jaxauto.errors import TargetError

if TYPE_CHECKING:
    from jaxauto.targets.target import Target

# libtpu asks a metadata server and takes a lock unless told not to; the accelerator type is only there to silence look-ups.
TPU_ENVIRONMENT = MappingProxyType(
    {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
)
# What a plan is compiled with, beside the compiler's defaults. TPU: all-gathers of weights run beside matmuls; by default v5p waits for
# them (scripts/results/overlap.md). The flags are those of public training recipes (MaxText). CPU: in the default order, made for many
# threads, what is recomputed is made as early as what was kept, so that nothing is saved outside of loops; and the fusions of its library
# want what they read in memory, in float32: time for memory (scripts/results/cpu_library.md). GPU: of dots that read one array only small
# ones become one; otherwise a plan that keeps one of them keeps all (scripts/results/merged_dots.md).
COMPILER_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "tpu": MappingProxyType(
            {
                "xla_tpu_enable_async_collective_fusion": "true",
                "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
                "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
                "xla_tpu_overlap_compute_collective_tc": "true",
                "xla_enable_async_all_gather": "true",
            }
        ),
        "gpu": MappingProxyType({"xla_gpu_dot_merger_threshold_mb": "8"}),
        "cpu": MappingProxyType(
            {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", "xla_cpu_experimental_ynn_fusion_type": ""}
        ),
    }
)
# Beside those, for programs with convolutions. TPU: of fewer than eight images it would make a batch of pieces of images. With four that
# takes up to several times the memory and the time; with one more memory and traffic, though by the compiler's own cycles some nets gain
# (scripts/results/small_batches.md). The second name is for v5e and later.
CONVOLUTION_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "tpu": MappingProxyType({"xla_tpu_run_space_to_batch": "false", "xla_tpu_run_space_to_batch_on_new_platforms": "false"}),
        "gpu": MappingProxyType({}),
        "cpu": MappingProxyType({}),
    }
)
# The CUDA plugin otherwise refuses to register without a driver and the CUDA libraries.
GPU_ENVIRONMENT = MappingProxyType({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"})

_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "tpu": ("libtpu", "libtpu-nightly"),
    "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt"),
    "cpu": ("jaxlib",),
}
INSTALL: Mapping[str, str] = {
    "tpu": "pip install 'jaxauto[tpu-aot]'",
    "gpu": "pip install 'jaxauto[gpu-aot]'",
    "cpu": "pip install jaxlib",
}

# XLA's GpuTargetConfigProto for each GPU, from openxla/xla, xla/backends/gpu/target_config/specs/*.txtpb.
_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_core} shared_memory_per_block_optin: {shared_optin}
  core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {dnn[0]} minor: {dnn[1]} patch: {dnn[2]} }}
device_description_str: "{kind}"
"""
_GPU_FIELDS: Mapping[str, dict] = {
    "a100": {
        "shared_core": 167936, "shared_optin": 166912, "cores": 108, "fpus": 64, "bandwidth": 2039040000000, "l2": 41943040, "clock": 1.41,
        "memory": 85100068864, "major": 8, "dnn": (8, 9, 4), "kind": "NVIDIA A100-SXM4-80GB",
    },
    "h100": {
        "shared_core": 233472, "shared_optin": 232448, "cores": 132, "fpus": 128, "bandwidth": 3352320000000, "l2": 52428800, "clock": 1.98,
        "memory": 84942979072, "major": 9, "dnn": (9, 8, 0), "kind": "NVIDIA H100 80GB HBM3",
    },
    "h200": {
        "shared_core": 233472, "shared_optin": 232448, "cores": 132, "fpus": 128, "bandwidth": 4800000000000, "l2": 52428800, "clock": 1.98,
        "memory": 151397597184, "major": 9, "dnn": (9, 10, 0), "kind": "NVIDIA H200 141GB HBM3e",
    },
    "b200": {
        "shared_core": 233472, "shared_optin": 232448, "cores": 148, "fpus": 128, "bandwidth": 7672320000000, "l2": 132644864,
        "clock": 1.965, "memory": 191514411008, "major": 10, "dnn": (9, 7, 0), "kind": "NVIDIA B200",
    },
}  # fmt: skip


def memory_limit(platform: str, bytes_: float) -> dict[str, str]:
    """The option that tells a platform's compiler how much of a device's memory it may use, in whole MiB; none where it has no such option.

    It is for programs that have to be made to fit: XLA:TPU then moves and recomputes by itself, which costs time.
    """
    return {"xla_tpu_max_hbm_size_mib": str(int(bytes_ // 2**20))} if platform == "tpu" and bytes_ else {}


def compiler_for(target: Target) -> str | None:
    """Name and version of the installed compiler for this target; None when there is none. Reads package metadata, loads nothing."""
    return compiler_of_platform(target.chip.platform)


def compiler_of_platform(platform: str) -> str | None:
    """As ``compiler_for``, by ``"tpu" | "gpu" | "cpu"``."""
    for package in _PACKAGES[platform]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    return None


def require_compiler(target: Target) -> str:
    """As ``compiler_for``.

    Raises:
      TargetError: none is installed; says what to install.
    """
    found = compiler_for(target)
    if found is None:
        raise TargetError(f"no compiler for {target} is installed here: {INSTALL[target.chip.platform]}")
    return found


def ahead_of_time_devices(target: Target) -> list:
    """Devices of ``target`` that jit can lower and compile for, in this process; the default platform stays what it is.

    Raises:
      TargetError: no compiler is installed, or JAX cannot offer its devices in this process.
    """
    require_compiler(target)
    try:
        devices = _DEVICES[target.chip.platform](target)
    except TargetError:
        raise
    except Exception as error:  # whatever a plugin raises, the user asked for devices and there are none
        raise TargetError(f"the installed compiler offers no devices for {target}: {_first_line(error)}") from error
    if len(devices) != target.num_devices:
        raise TargetError(f"the installed compiler makes {len(devices)} devices of {target}, {target.num_devices} were expected")
    return devices


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _tpu_devices(target: Target) -> list:
    from jax.experimental import topologies

    arguments: dict = {"platform": "tpu", "topology_name": target.slice_name}
    if target.slices > 1:
        arguments["num_slices"] = target.slices
    sides = (*target.topology, 1)[:3]
    if any(side % host for side, host in zip(sides, (2, 2, 1))):  # smaller than a host
        arguments["chips_per_host_bounds"] = sides
    if target.chip.name == "v4":  # otherwise it lists the two cores of a chip as two devices
        arguments["chip_config_name"] = "megacore"
    attached = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    with _environment({} if attached else TPU_ENVIRONMENT):
        return list(topologies.get_topology_desc(**arguments).devices)


def _gpu_devices(target: Target) -> list:
    from jax.experimental import topologies

    nodes = target.num_nodes
    config = _GPU_CONFIG.format(**_GPU_FIELDS[target.chip.name])
    # Partitions x hosts x GPUs of each host.
    shape = f"1x{nodes}x{target.num_devices // nodes}"
    try:
        with _environment(GPU_ENVIRONMENT):
            topology = topologies.get_topology_desc(platform="cuda", topology_name=target.chip.name, target_config=config, topology=shape)
    except NotImplementedError as error:
        raise TargetError(
            f"JAX has not registered the CUDA compiler in this process, so there are no devices of {target} in it: without a driver that "
            "takes JAX_PLATFORMS=cpu in the environment before jax is imported (jaxauto's own compilations do so in a child process)"
        ) from error
    return list(topology.devices)


def _cpu_devices(target: Target) -> list:
    import jax

    devices = jax.devices("cpu")
    if len(devices) < target.num_devices:
        raise TargetError(
            f"{target} needs {target.num_devices} CPU devices, this process has {len(devices)}: "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={target.num_devices} before importing jax"
        )
    return list(devices[: target.num_devices])


_DEVICES: Mapping[str, Callable[[Target], list]] = {"tpu": _tpu_devices, "gpu": _gpu_devices, "cpu": _cpu_devices}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that are not set yet, and takes them away again: plugins read them once, while they load."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
