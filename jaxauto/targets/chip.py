"""What a chip is: named numbers, each with its unit, its source, and whether it was published, fitted to measurements, or assumed.

All numbers are for one *device* as JAX counts them. On most chips that is the chip; a tpu7x chip shows up as two devices, so its
figures are half of the chip's. GB is 1e9 bytes, GiB is 2**30; peaks are dense (no structured sparsity).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

GIB = 2**30


@dataclass(frozen=True)
class Number:
    """One figure and where it comes from."""

    value: float
    unit: str
    source: str
    origin: Literal["datasheet", "fitted", "assumed"] = "datasheet"


class Tile(NamedTuple):
    """What the two minor dimensions of an array are padded to multiples of; ``packed``: rows of the first that share one register row."""

    sublanes: int
    lanes: int
    packed: int = 1


@dataclass(frozen=True)
class Chip:
    """What the cost model knows of one kind of device.

    Attributes:
      name: as written in a target, ``"v5p"``.
      platform: ``"tpu" | "gpu" | "cpu"``, as ``jax.Device.platform``.
      device_kind: how ``jax.Device.device_kind`` begins, in lower case; several spellings.
      dims: dimensions of a topology: 2 or 3 for a torus, 1 or 2 for GPUs (nodes, GPUs of a node).
      max_topology: the largest slice that can be asked for (GPUs: GPUs in one NVLink domain).
      devices_per_chip: how many JAX devices one chip is.
      wrap: when an axis closes into a ring: ``"16"`` (its length is 16), ``"cubes"`` (all sides multiples of 4), ``"switch"`` (always).
      tile: the two minor dimensions of an array are padded to multiples of this; None: no padding.
      peaks: matrix-unit peak by dtype name, flop/s.
      numbers: the rest, by the names of the properties below.
    """

    name: str
    platform: Literal["tpu", "gpu", "cpu"]
    device_kind: tuple[str, ...]
    dims: int
    max_topology: tuple[int, ...]
    wrap: Literal["16", "cubes", "switch"]
    peaks: Mapping[str, Number] = field(compare=False, repr=False)
    numbers: Mapping[str, Number] = field(compare=False, repr=False)
    devices_per_chip: int = 1
    tile: tuple[int, int] | None = None

    def tile_of(self, dtype: Any) -> Tile | None:
        """The tiles of an array of this dtype: two rows of bfloat16 are one of 32 bits, so one row alone takes as much as two."""
        bytes_ = getattr(dtype, "itemsize", None) or np.dtype(dtype).itemsize  # keys of random numbers have a type that is not numpy's
        return Tile(*self.tile, packed=max(1, 4 // bytes_)) if self.tile else None

    def peak_flops(self, dtype: Any, precision: str = "default") -> float:
        """Peak of the matrix unit, flop/s, for operands of this dtype (numpy dtype or name).

        A dtype without a figure of its own runs at the rate of the next one that the hardware has: fp8 and float16 as bfloat16,
        bfloat16 as float32, any integer as int8 or bfloat16, float64 at a fraction of float32.

        Args:
          precision: of float32, what is asked of a product: ``"default" | "high" | "highest"`` (``jax.lax.Precision``: a TPU adds passes
            over bfloat16, a GPU leaves TF32), or the name of a ``jax.lax.DotAlgorithmPreset`` in lower case.
        """
        name = _dtype_name(dtype)
        if name in ("float32", "complex64") and (asked := _ASKED.get(self.platform, {}).get(precision)):
            own, passes = asked
            return (self.vector_flops if own == _VECTOR else self.peak_flops(own)) / passes
        for candidate in _FALLBACK.get(name, (name, "bfloat16", "float32")):
            if candidate in self.peaks:
                scale = 1 / 16 if name in ("float64", "complex128") and candidate != name else 1.0
                return self.peaks[candidate].value * scale
        raise KeyError(f"chip {self.name} has no peak for {name}")

    def _value(self, name: str) -> float:
        return self.numbers[name].value

    @property
    def hbm_bytes(self) -> float:
        """Bytes a program may use on one device: what the compiler allows, not what is soldered on."""
        return self._value("hbm_bytes")

    @property
    def hbm_bandwidth(self) -> float:
        """Bytes/s between memory and compute units, one device."""
        return self._value("hbm_bandwidth")

    @property
    def vector_flops(self) -> float:
        """float32 flop/s outside the matrix unit (TPU: VPU; GPU: CUDA cores)."""
        return self._value("vector_flops")

    @property
    def link_bandwidth(self) -> float:
        """Bytes/s one-way that can be reached: one torus link, or all NVLinks of a GPU."""
        return self._value("link_bandwidth")

    @property
    def hop_latency(self) -> float:
        """Seconds for one hop (torus) or one step of a ring (NVLink, shared memory)."""
        return self._value("hop_latency")

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s one-way between one device and host memory (PCIe)."""
        return self._value("host_bandwidth")

    @property
    def network_bandwidth(self) -> float:
        """Bytes/s one-way for each device over the data-centre network."""
        return self._value("network_bandwidth")

    @property
    def flops_efficiency(self) -> float:
        """Fraction of the peak that a big matmul reaches."""
        return self._value("flops_efficiency")

    @property
    def convolution_efficiency(self) -> float:
        """Fraction of the peak that a convolution reaches; where it has no figure of its own that of a matmul."""
        return self._value("convolution_efficiency" if "convolution_efficiency" in self.numbers else "flops_efficiency")

    @property
    def dot_writes(self) -> float:
        """What a byte of a dot's result takes, against a byte that is copied: a tile is written when its flops are through."""
        return self._value("dot_writes") if "dot_writes" in self.numbers else 1.0

    @property
    def launch_seconds(self) -> float:
        """Seconds that a kernel takes beside its roofline; 0 where a step is one program."""
        return self._value("launch_seconds") if "launch_seconds" in self.numbers else 0.0

    @property
    def hash_seconds(self) -> float:
        """Seconds of one of Threefry's hashes, one for each random number, all cores together; 0 where that is not known."""
        return self._value("hash_seconds") if "hash_seconds" in self.numbers else 0.0

    @property
    def bandwidth_efficiency(self) -> float:
        """Fraction of the HBM bandwidth that a big copy reaches."""
        return self._value("bandwidth_efficiency")

    @property
    def vmem_bytes(self) -> float:
        """On-chip memory that the compiler keeps short-lived arrays in; 0 where it manages none."""
        return float(self.numbers["vmem_bytes"].value) if "vmem_bytes" in self.numbers else 0.0

    @property
    def scoped_bytes(self) -> float:
        """Of ``vmem_bytes``, what is left to whatever runs; no array is kept there."""
        return float(self.numbers["scoped_bytes"].value) if "scoped_bytes" in self.numbers else 0.0

    @property
    def cores(self) -> int:
        """Cores that share a device's work, each with on-chip memory of its own."""
        return int(self.numbers["cores"].value) if "cores" in self.numbers else 1

    @property
    def exposed_share(self) -> float:
        """Share of the communication that could hide behind compute and is waited for all the same."""
        return self._value("exposed_share")

    @property
    def clock_hz(self) -> float:
        """Cycles/s, to turn the compiler's estimated cycles into seconds."""
        return self._value("clock_ghz") * 1e9


_FP8 = ("float8_e4m3fn", "bfloat16", "float32")
_PRECISIONS = ("default", "high", "highest")
_VECTOR = "vector"
_ALGORITHMS = {
    "bf16_bf16_f32": ("bfloat16", 1),
    "bf16_bf16_f32_x3": ("bfloat16", 3),
    "bf16_bf16_f32_x6": ("bfloat16", 6),
    "bf16_bf16_f32_x9": ("bfloat16", 9),
    "tf32_tf32_f32_x3": ("float32", 3),
}
# platform → precision asked of float32 → (dtype, passes): docs of jax.lax.Precision. What is not named runs as by default.
_ASKED = {
    "tpu": {**_ALGORITHMS, "high": ("bfloat16", 3), "highest": ("bfloat16", 6), "f32_f32_f32": ("bfloat16", 6)},
    "gpu": {**_ALGORITHMS, "highest": (_VECTOR, 1), "f32_f32_f32": (_VECTOR, 1)},
}
_FALLBACK = {
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "bfloat16", "float32"),
    "float32": ("float32", "bfloat16"),
    "float64": ("float64", "float32", "bfloat16"),
    "complex64": ("float32", "bfloat16"),
    "complex128": ("float64", "float32", "bfloat16"),
    "int4": ("int4", "int8", "bfloat16", "float32"),
    "uint4": ("int4", "int8", "bfloat16", "float32"),
    "int8": ("int8", "bfloat16", "float32"),
    "uint8": ("int8", "bfloat16", "float32"),
    "float4_e2m1fn": ("float4_e2m1fn", *_FP8),
    **{f"float8_{kind}": _FP8 for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
}
_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "fp8": "float8_e4m3fn", "s8": "int8"}


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return _SHORT.get(dtype, dtype)
    try:
        return np.dtype(dtype).name
    except TypeError:  # extended dtypes such as keys
        return str(dtype)


def most_exact(asked: Iterable[str]) -> str:
    """Of what is asked for each operand of a product, what holds for it: as ``Chip.peak_flops`` knows it, in any case."""
    names = [name.lower() for name in asked]
    algorithms = [name for name in names if name not in _PRECISIONS]
    return algorithms[0] if algorithms else max(names, key=_PRECISIONS.index, default="default")
