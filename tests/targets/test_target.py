"""Parsing, detection, and the layout of meshes on topologies."""

import itertools
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxauto.errors import TargetError
from jaxauto.targets import Target, detect, resolve

NAMES = [
    "v5e:2x4",
    "v5e:4x4",
    "v5e:8x16",
    "v5e:16x16",
    "v5p:2x2x1",
    "v5p:4x4x4",
    "v5p:4x4x8",
    "v6e:8x8",
    "tpu7x:2x2x2",
    "h100:8",
    "h100:2x8",
]
NAMES += ["a100:4", "cpu:8", "cpu:12", "v6e:1x1", "v5p:2*2x2x4", "v5e:4*4x8"]


def fake_devices(target, device_kind="", extra=0):
    """Stand-ins with the coordinates of a torus, in an order that is not the row-major one."""
    chip = target.chip
    devices = []
    kind = device_kind or chip.device_kind[0]
    for number, *coords in itertools.product(range(target.slices), *map(range, target.topology)):
        for core in range(chip.devices_per_chip):
            full = (*coords, 0, 0)[:3]
            devices.append(SimpleNamespace(platform=chip.platform, device_kind=kind, coords=full, core_on_chip=core, slice_index=number))
    return devices[::-1] + devices[:extra]


@pytest.mark.parametrize(
    ("text", "name", "topology", "count"),
    [
        ("v5p:4x4x4", "v5p:4x4x4", (4, 4, 4), 64),
        ("v5e:16x16", "v5e:16x16", (16, 16), 256),
        (" V6E : 8x8 ", "v6e:8x8", (8, 8), 64),
        ("tpu7x:2x2x2", "tpu7x:2x2x2", (2, 2, 2), 16),
        ("h100:8", "h100:8", (8,), 8),
        ("h100:1x8", "h100:8", (8,), 8),
        ("a100:16", "a100:2x8", (2, 8), 16),
        ("h200:4x4", "h200:4x4", (4, 4), 16),
        ("cpu:8", "cpu:8", (8,), 8),
        ("v5e:1", "v5e:1x1", (1, 1), 1),
        ("v5p:1", "v5p:1x1x1", (1, 1, 1), 1),
        ("v5p: 2 * 4x4x4", "v5p:2*4x4x4", (4, 4, 4), 128),
        ("v5e:1*2x4", "v5e:2x4", (2, 4), 8),
    ],
)
def test_parsing(text, name, topology, count):
    target = Target(text)
    assert (target.name, str(target), target.topology, target.num_devices) == (name, name, topology, count)
    assert target == Target(name) and hash(target) == hash(Target(name)) and target != Target("cpu:2")
    assert repr(target) == f"Target({name!r})"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5x:4x4", "unknown chip 'v5x' in target 'v5x:4x4': did you mean 'v5p'? Known are v4, v5e, v5p, v6e, tpu7x, a100"),
        ("tpu", "unknown chip 'tpu' in target 'tpu'"),
        ("v5e", "target 'v5e' has no topology: write chip:topology, for example 'v5e:2x4'"),
        ("v5e:abc", "target 'v5e:abc' has no topology"),
        ("v5e:32x16", "target 'v5e:32x16' is larger than a v5e slice can be: at most 16x16"),
        ("v5e:2x2x2", "target 'v5e:2x2x2' has 3 sides, but v5e is a 2-D torus: write for example 'v5e:2x4'"),
        ("v5p:8", "target 'v5p:8' has 1 side, but v5p is a 3-D torus: write for example 'v5p:4x4x4'"),
        ("v5e:3x4", "the sides of a v5e slice are 1, 2, 4, 8 or 16"),
        ("v5p:3x4x4", "the sides of a v5p slice are 1, 2 or a multiple of 4, at most 16x16x24"),
        ("v5e:0x2", "every side of a topology is at least 1"),
        ("h100:12", "12 GPUs are no whole number of nodes of 8; write nodes x GPUs, for example 'h100:2x8'"),
        ("h100:2x16", "an NVLink domain of h100 has at most 8 GPUs, not 16"),
        ("h100:2*8", "only TPUs come in slices; of GPUs write nodes x GPUs, for example 'h100:2x8'"),
        ("v5e:0*2x4", "every side of a topology is at least 1"),
        ("h100:2x2x2", "h100 targets are GPUs, or nodes x GPUs of each, for example 'h100:2x8'"),
        ("cpu:2x4", "cpu targets are a number of emulated devices, at most 4096, for example 'cpu:8'"),
    ],
)
def test_what_cannot_be_is_refused(text, message):
    with pytest.raises(TargetError) as caught:
        Target(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_axes", [1, 2, 3])
def test_mesh_shapes_use_all_devices_once(name, max_axes):
    target = Target(name)
    shapes = target.mesh_shapes(max_axes)
    assert shapes == target.mesh_shapes(max_axes) and len(set(shapes)) == len(shapes)
    assert shapes[0] == (target.num_devices,)
    for shape in shapes:
        assert math.prod(shape) == target.num_devices and len(shape) <= max_axes
        assert min(shape) > 1 or shape == (1,)
        assert len(target.axis_links(shape)) == len(shape)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("cpu:8", [(8,), (4, 2)]),
        ("v5e:2x4", [(8,), (4, 2)]),
        ("v5p:4x4x4", [(64,), (8, 8), (16, 4), (32, 2)]),
        ("v5e:16x16", [(256,), (16, 16), (32, 8), (64, 4), (128, 2)]),
        ("h100:8", [(8,), (4, 2)]),
        ("h100:2x8", [(16,), (2, 8), (4, 4), (8, 2)]),  # which axis stays in the node matters
        ("v5p:2*2x2x2", [(16,), (2, 8), (4, 4), (8, 2)]),  # or in the slice
        ("cpu:1", [(1,)]),
    ],
)
def test_mesh_shapes(name, shapes):
    assert Target(name).mesh_shapes() == shapes


def test_wraps_follow_the_rule_of_the_generation():
    assert Target("v5e:8x8").wraps == (False, False)
    assert Target("v5e:8x16").wraps == (False, True)
    assert Target("v6e:16x16").wraps == (True, True)
    assert Target("v5p:4x4x8").wraps == (True, True, True)
    assert Target("v5p:2x2x4").wraps == (False, False, False)


def test_links_of_a_torus_add_up_over_the_physical_axes():
    whole, one = Target("v5p:4x4x4").axis_links((16, 4))
    assert (whole.bandwidth, whole.wraps, whole.parts) == (180e9, True, (4, 4))
    assert (one.bandwidth, one.wraps, one.parts) == (90e9, True, (4,))
    assert whole.latency == one.latency == 1e-6


def test_a_whole_ring_goes_to_the_axis_that_fits_it():
    long, short = Target("v5e:8x16").axis_links((16, 8))
    assert (long.wraps, long.parts, short.wraps, short.parts) == (True, (16,), False, (8,))


def test_a_part_of_a_ring_loses_its_wrap_or_its_bandwidth():
    strided, near = Target("v5e:16x16").axis_links((64, 4))
    assert (near.bandwidth, near.wraps, near.latency) == (45e9, False, 1e-6)
    # one whole ring of 16, and every fourth chip of the other ring, whose links four groups share
    assert strided.bandwidth == pytest.approx(45e9 + 45e9 / 4) and strided.wraps
    assert sum(strided.parts) * strided.latency == pytest.approx(16e-6 + 4 * 4e-6)


def test_unwrapped_parts_of_a_ring_count_half():
    (link,) = Target("v5e:8x16").axis_links((128,))
    assert (link.bandwidth, link.wraps, link.parts) == (45e9 * 1.5, True, (8, 16))


def test_the_two_dies_of_a_chip_are_the_closest():
    outer, dies = Target("tpu7x:2x2x2").axis_links((8, 2))
    assert dies.bandwidth == 6 * 90e9
    assert outer.bandwidth == 3 * 45e9  # both dies use the chip's links at once
    (whole,) = Target("tpu7x:2x2x2").axis_links((16,))
    assert whole.bandwidth == 3 * 90e9


def test_links_of_gpus():
    (node,) = Target("h100:8").axis_links((8,))
    assert (node.kind, node.bandwidth, node.parts) == ("nvlink", pytest.approx(369e9), (8,))
    across, inside = Target("h100:2x8").axis_links((2, 8))
    assert (across.kind, across.bandwidth, inside.kind, inside.bandwidth) == ("network", 50e9, "nvlink", pytest.approx(369e9))
    both, inside = Target("h100:2x8").axis_links((4, 4))
    assert (both.kind, both.parts, inside.kind) == ("network", (2, 2), "nvlink")
    assert 50e9 < both.bandwidth < 369e9
    assert {link.kind for link in Target("cpu:8").axis_links((4, 2))} == {"shared memory"}


def test_links_of_slices():
    target = Target("v5p:2*4x4x4")
    across, inside = target.axis_links((2, 64))
    assert (across.kind, across.bandwidth, across.parts) == ("slices", 6.25e9, (2,))
    assert (inside,) == Target("v5p:4x4x4").axis_links((64,))
    both, rest = target.axis_links((8, 16))
    assert (both.kind, both.parts) == ("slices", (2, 4)) and rest.kind == "ici" and rest.parts == (4, 4)
    # half of the array comes over four cards while each device takes in seven eighths of it
    assert both.bandwidth == pytest.approx(7 * 6.25e9)


def test_a_mesh_that_does_not_fit_is_refused_with_those_that_do():
    with pytest.raises(TargetError) as caught:
        Target("v5e:2x4").axis_links((4, 4))
    assert "a mesh of 4x4 = 16 devices does not fit target v5e:2x4 with its 8 devices; shapes that do: 8, 4x2" in str(caught.value)
    with pytest.raises(TargetError, match="a mesh of 3x8 = 24 devices does not fit target h100:4x6"):
        Target("h100:4x6").axis_links((3, 8))


def distances(line, target):
    """Hops along each physical axis between neighbours on one line of a mesh."""
    coords = [np.array(device.coords) for device in line]
    return [tuple(np.abs(b - a)) for a, b in itertools.pairwise(coords)]


@pytest.mark.parametrize("name", ["v5e:16x16", "v5p:4x4x4", "v5e:8x16", "tpu7x:2x2x2"])
def test_device_array_has_every_device_once_whatever_their_order(name):
    target = Target(name)
    devices = fake_devices(target)
    for shape in target.mesh_shapes(3):
        array = target.device_array(shape, devices)
        assert array.shape == shape
        assert len({(device.coords, device.core_on_chip) for device in array.ravel()}) == target.num_devices
        again = target.device_array(shape, devices[::-1])
        assert (again == array).all()


def test_device_array_is_laid_out_as_axis_links_says():
    target = Target("v5e:16x16")
    array = target.device_array((64, 4), fake_devices(target))
    for line in array:  # the small axis: four neighbours on one physical axis
        assert all(sum(step) == 1 for step in distances(line, target))
    target = Target("v5p:4x4x8")
    array = target.device_array((16, 8), fake_devices(target))
    for line in array:  # eight in a row: the one axis that long
        assert distances(line, target) == [(0, 0, 1)] * 7
    target = Target("tpu7x:2x2x2")
    array = target.device_array((8, 2), fake_devices(target))
    for first, second in array:
        assert first.coords == second.coords and {first.core_on_chip, second.core_on_chip} == {0, 1}


def test_the_first_axes_of_a_mesh_lie_across_slices():
    target = Target("v5p:2*4x4x4")
    for shape in ((2, 16, 4), (8, 16), (128,)):
        array = target.device_array(shape, fake_devices(target)).reshape(2, 64)
        assert [{d.slice_index for d in half} for half in array] == [{0}, {1}]
    for line in target.device_array((2, 16, 4), fake_devices(target)).reshape(32, 4):
        assert all(sum(step) == 1 for step in distances(line, target))


def test_device_array_of_switched_devices_is_a_reshape():
    array = Target("h100:2x8").device_array((4, 4), list(range(16)))
    assert array.tolist() == np.arange(16).reshape(4, 4).tolist()
    assert Target("cpu:8").device_array((4, 2)).ravel().tolist() == jax.devices()


def test_device_array_wants_all_devices():
    with pytest.raises(TargetError, match="target v5e:2x4 has 8 devices, 9 were given"):
        Target("v5e:2x4").device_array((8,), fake_devices(Target("v5e:2x4"), extra=1))


@pytest.mark.parametrize("name", ["v5e:2x4", "v5e:1x1", "v6e:16x16", "v5p:4x4x4", "v4:2x2x1", "tpu7x:2x2x2", "v5e:2*4x4", "tpu7x:4*2x2x1"])
def test_detect_finds_the_torus_by_coordinates(name):
    assert detect(fake_devices(Target(name))) == Target(name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v5 lite", "v5e:2x4"), ("TPU v5e", "v5e:2x4"), ("TPU v5p", "v5p:2x4x1"), ("TPU v5", "v5p:2x4x1"), ("TPU v6 lite", "v6e:2x4")],
)
def test_detect_tells_kinds_apart_that_begin_alike(kind, name):
    assert detect(fake_devices(Target("v5e:2x4"), device_kind=kind)) == Target(name)


def gpu(kind, process, **more):
    return SimpleNamespace(platform="gpu", device_kind=kind, process_index=process, **more)


def test_detect_gpus():
    assert detect([gpu("NVIDIA H100 80GB HBM3", 0) for _ in range(8)]) == Target("h100:8")
    assert detect([gpu("NVIDIA H200", i // 8) for i in range(16)]) == Target("h200:2x8")
    assert detect([gpu("NVIDIA A100-SXM4-80GB", i, slice_index=i // 4) for i in range(8)]) == Target("a100:2x4")


def test_detect_says_what_it_does_not_know():
    with pytest.raises(TargetError, match=r"no numbers for device kind 'NVIDIA GeForce RTX 4090'; known chips: v4.*target='h100:2'"):
        detect([gpu("NVIDIA GeForce RTX 4090", 0)] * 2)
    with pytest.raises(TargetError, match="3 v5e devices do not fill the box 2x2"):
        detect(fake_devices(Target("v5e:2x2"))[:3])
    with pytest.raises(TargetError, match="no devices"):
        detect([])
    unlike = [*fake_devices(Target("v5e:2x2")), *(d for d in fake_devices(Target("v5e:2*2x4")) if d.slice_index == 1)]
    with pytest.raises(TargetError, match="2 slices of v5e of different shapes: 2x2, 2x4; give a mesh and target= explicitly"):
        detect(unlike)


def test_resolve():
    target = Target("v5e:2x4")
    assert resolve(target) is target
    assert resolve("v5e:2x4") == target
    assert resolve(None) == Target("cpu:8") == detect(jax.devices())
    assert resolve(None, jax.devices()[:2]) == Target("cpu:2")
