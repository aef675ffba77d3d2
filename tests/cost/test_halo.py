"""What neighbours send each other under a window: by hand, and that the planner charges for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxauto
from jaxauto.core import AxisLink, MeshAxes
from jaxauto.cost.collectives import collective_seconds
from jaxauto.cost.halo import SIDES, halo_collectives
from jaxauto.planner import read

LINK = AxisLink(1e9, 1e-6)
MESH = MeshAxes(("a", "b"), (4, 2), (LINK, LINK))
IMAGES = jax.ShapeDtypeStruct((2, 64, 32, 3), jnp.float32)
BYTES = 2 * 64 * 32 * 3 * 4


def convolve(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def permutes(window, factor_size, axes):
    """Of a convolution whose dimension of ``factor_size`` lies on ``axes``."""
    groups = read(convolve, (IMAGES, jax.ShapeDtypeStruct((window, window, 3, 8), jnp.float32)), {}).groups
    (op,) = (op for op in groups.operations if op.rule.halo or op.node.prim.startswith("conv"))
    state = np.full(2, -1, np.int8)
    state[list(axes)] = next(k for k, (_, size) in enumerate(op.factors) if size == factor_size)
    values = groups.graph.values
    shapes = {o.value: values[o.value].shape for o in op.operands}
    found = list(halo_collectives(op, state, shapes, dict.fromkeys(shapes, float(BYTES)), MESH))
    assert all(o is op.operands[0] for o, *_ in found), "the image's borders"
    return [rest for _, *rest in found]


@pytest.mark.parametrize(
    ("window", "axes", "rows"),
    [(3, (0,), 1), (5, (0,), 2), (3, (1,), 1), (3, (0, 1), 1), (1, (0,), 0)],
    ids=["3 over 4", "5 over 4", "3 over 2", "3 over 8", "1 over 4"],
)
def test_rows_of_the_image_go_to_each_neighbour(window, axes, rows):
    found = permutes(window, 64, axes)
    if not rows:
        assert found == []
        return
    ((amount, group, seconds),) = found
    devices = int(np.prod([MESH.sizes[a] for a in axes]))
    assert group == axes and SIDES == 2
    assert amount == pytest.approx(BYTES / 64 * rows * devices), "rows of the whole image, one for each device of the group"
    assert seconds == collective_seconds("collective-permute", amount, [MESH.sizes[a] for a in axes], [LINK] * len(axes))


def test_nothing_is_sent_where_the_window_slides_along_what_is_whole():
    assert permutes(3, 2, (1,)) == []


def test_a_plan_lists_and_charges_its_halos():
    def loss(kernels, x):
        for kernel in kernels:
            x = jax.nn.relu(convolve(x, kernel))
        return jnp.mean(x)

    def step(kernels, x):
        return jax.tree.map(lambda k, g: k - g, kernels, jax.grad(loss)(kernels, x))

    kernels = [jax.ShapeDtypeStruct((3, 3, c, 16), jnp.float32) for c in (3, 16)]
    options = {"mesh": {"data": 8}, "target": "h100:8", "certify": False}
    one, eight = (jax.ShapeDtypeStruct((n, 4096 // n, 256, 3), jnp.float32) for n in (1, 8))
    cut, batched = jaxauto.plan(step, kernels, one, **options), jaxauto.plan(step, kernels, eight, **options)
    sent = [c for c in cut.estimate.collectives if c.kind == "collective-permute"]
    assert cut.specs["1"] == jax.sharding.PartitionSpec(None, "data") and sent and all(c.seconds > 0 for c in sent)
    assert cut.estimate.exposed_comm_time >= sum(c.seconds * c.count for c in sent), "convolutions wait for them"
    assert batched.specs["1"] == jax.sharding.PartitionSpec("data"), "a batch is cut without halos"
    assert not [c for c in batched.estimate.collectives if c.kind == "collective-permute"]
