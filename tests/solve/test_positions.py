"""Where results are pinned as they are made: what the partitioner makes of a sum that goes to a dimension which another axis splits."""

from __future__ import annotations

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxauto
from jaxauto.hlo import parse
from jaxauto.solve import decide
from jaxauto.solve.positions import made_in

W = -1
MADE = [
    ("summed where it goes", (W, W), (0, W), (True, False), (0, W)),
    ("on the minor side of an axis", (0, W), (0, 0), (False, True), (0, 0)),
    ("on the major side", (W, 0), (0, 0), (True, False), (W, 0)),
    ("of one that goes to another dimension", (W, 0), (0, 1), (True, False), (W, 0)),
    ("of one in another dimension", (W, 1), (0, 0), (True, False), (0, 1)),
    ("whole", (W, 0), (W, 0), (True, False), (W, 0)),
]


@pytest.mark.parametrize(("here", "there", "partial", "expected"), [m[1:] for m in MADE], ids=[m[0] for m in MADE])
def test_where_a_sum_is_made(here, there, partial, expected):
    assert made_in(np.array(here), np.array(there), np.array(partial)).tolist() == list(expected)


def update(weight, rows, gradient):
    """A weight's gradient is a sum over rows."""
    return weight - 0.1 * (gradient.T @ rows)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_sum_on_the_major_side_gathers_nothing(pinned, monkeypatch):
    """Not pinned where it is made, the partitioner gathers the gradient that the sum is made of, which is larger than the sum."""
    if not pinned:
        monkeypatch.setattr(decide, "made_in", lambda here, there, partial: np.where(partial, there, here))
    weight, rows, gradient = (
        np.random.default_rng(k).normal(size=s).astype(np.float32) for k, s in enumerate([(256, 64), (2048, 64), (2048, 256)])
    )
    where = {"0": P(("data", "model")), "1": P("data"), "2": P("data", "model")}
    plan = jaxauto.plan(update, weight, rows, gradient, mesh={"data": 4, "model": 2}, constraints=where, certify=False, progress=False)
    kinds = {c.kind for c in parse(plan.compile().as_text()).collectives}
    assert ("all-gather" not in kinds) == pinned
    np.testing.assert_allclose(plan.jit()(weight, rows, gradient), update(weight, rows, gradient), rtol=1e-4, atol=1e-3)
