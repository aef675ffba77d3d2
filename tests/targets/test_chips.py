"""Every figure of a chip is there, has a unit and a source, and lies where figures of its kind lie."""

import ml_dtypes
import numpy as np
import pytest

from jaxauto.targets import CHIPS, table, targets
from jaxauto.targets.chip import GIB
from jaxauto.targets.chips import cpu_chip, host_memory_bytes

FIGURES = {
    "hbm_bytes": "byte",
    "hbm_bandwidth": "byte/s",
    "vector_flops": "flop/s",
    "link_bandwidth": "byte/s",
    "hop_latency": "s",
    "host_bandwidth": "byte/s",
    "network_bandwidth": "byte/s",
    "clock_ghz": "GHz",
    "flops_efficiency": "1",
    "bandwidth_efficiency": "1",
    "exposed_share": "1",
}


@pytest.mark.parametrize("name", CHIPS)
def test_every_figure_has_unit_source_and_origin(name):
    chip = CHIPS[name]
    own = {"vmem_bytes": "byte", "cores": "1", "hash_seconds": "s"} if chip.platform == "tpu" else {}
    own |= {"convolution_efficiency": "1", "dot_writes": "1", "launch_seconds": "s", "hash_seconds": "s"} if chip.platform == "gpu" else {}
    own |= {"scoped_bytes": "byte"} if chip.platform == "tpu" and name != "v4" else {}  # whose arrays have an on-chip memory of their own
    assert {key: number.unit for key, number in chip.numbers.items()} == FIGURES | own
    for number in (*chip.numbers.values(), *chip.peaks.values()):
        assert number.value > 0 and number.source
        assert number.origin in ("datasheet", "fitted", "assumed")
    assert all(number.unit == "flop/s" for number in chip.peaks.values())


@pytest.mark.parametrize("name", CHIPS)
def test_accessors_return_plain_floats_in_si_units(name):
    chip = CHIPS[name]
    for accessor in FIGURES:
        value = chip.clock_hz if accessor == "clock_ghz" else getattr(chip, accessor)
        assert isinstance(value, float)
    assert 0.5 < chip.flops_efficiency < 1 and 0.5 < chip.bandwidth_efficiency < 1
    assert 1e9 < chip.clock_hz < 3e9
    assert chip.vector_flops <= chip.peak_flops("float32")
    assert chip.hbm_bandwidth >= chip.link_bandwidth


@pytest.mark.parametrize(
    ("name", "dtype", "flops"),
    [
        ("v5p", "bfloat16", 459e12),
        ("v5p", np.float32, 459e12),  # one bfloat16 pass at the default precision
        ("v5e", np.dtype("int8"), 394e12),
        ("v5e", ml_dtypes.float8_e4m3fn, 197e12),  # no fp8 in hardware: bfloat16
        ("v5e", "float8_e5m2", 197e12),
        ("v6e", "float16", 918e12),
        ("v5e", np.int32, 197e12),
        ("h100", "float32", 494.7e12),  # TF32
        ("h100", ml_dtypes.float8_e5m2, 1978.9e12),
        ("h100", "float64", 66.9e12),
        ("a100", "float8_e4m3fn", 312e12),
        ("tpu7x", "bf16", 1153.5e12),  # of one of the chip's two devices
        ("v5p", "float64", 459e12 / 16),
        ("cpu", "complex64", CHIPS["cpu"].peaks["float32"].value),
    ],
)
def test_peak_by_dtype(name, dtype, flops):
    assert CHIPS[name].peak_flops(dtype) == pytest.approx(flops)


@pytest.mark.parametrize(
    ("name", "precision", "flops"),
    [
        ("v5e", "high", 197e12 / 3),
        ("v5e", "highest", 197e12 / 6),
        ("v5e", "f32_f32_f32", 197e12 / 6),
        ("v5e", "bf16_bf16_f32_x9", 197e12 / 9),
        ("v5e", "bf16_bf16_f32", 197e12),
        ("h100", "high", 494.7e12),  # TF32
        ("h100", "highest", 66.9e12),  # without the matrix units
        ("h100", "tf32_tf32_f32", 494.7e12),
        ("h100", "bf16_bf16_f32_x3", 989.4e12 / 3),
    ],
)
def test_peak_of_float32_by_precision(name, precision, flops):
    """What jax.lax.Precision says of each platform; bfloat16 knows no other, a CPU neither."""
    assert CHIPS[name].peak_flops("float32", precision) == pytest.approx(flops, rel=1e-3)
    assert CHIPS[name].peak_flops("bfloat16", precision) == CHIPS[name].peak_flops("bfloat16")
    assert CHIPS["cpu"].peak_flops("float32", precision) == CHIPS["cpu"].peak_flops("float32")


def test_memory_a_program_may_use_is_what_the_compilers_say():
    assert {name: CHIPS[name].hbm_bytes / GIB for name in ("v4", "v5e", "v5p", "v6e", "tpu7x")} == {
        "v4": 30.75,
        "v5e": 15.75,
        "v5p": 95.73,
        "v6e": 31.25,
        "tpu7x": 94.74,
    }


def test_cpu_devices_share_the_memory_of_the_host():
    assert cpu_chip(8).hbm_bytes == host_memory_bytes() / 8
    assert cpu_chip(8).peak_flops("float32") == CHIPS["cpu"].peak_flops("float32")


def test_table_shows_every_chip_in_text_and_html():
    shown = targets()
    text, page = str(shown), shown._repr_html_()
    for name in CHIPS:
        assert name in text and f"<td>{name}</td>" in page
    assert shown["v5e"].hbm_bytes == CHIPS["v5e"].hbm_bytes
    assert [chip.name for chip in shown] == list(CHIPS) and len(shown) == len(CHIPS)
    assert max(map(len, text.splitlines())) <= 200


def test_table_lists_the_source_of_every_number():
    listed = {(chip, figure): number for chip, figure, number in targets().sources()}
    assert "out-of-memory" in listed["v5e", "hbm_bytes"].source
    assert len(listed) == sum(len(chip.peaks) + len(chip.numbers) for chip in CHIPS.values())


def test_table_says_what_to_install(monkeypatch):
    monkeypatch.setattr(table, "compiler_of_platform", lambda platform: None if platform == "tpu" else "x 1")
    rows = {row["chip"]: row for row in targets().rows}
    assert rows["v5e"]["compiler"] == "pip install 'jaxauto[tpu-aot]'"
    assert rows["h100"]["compiler"] == "x 1"
