import numpy as np
import pytest

from jaxauto.cost.turning import turned
from jaxauto.strategies import WHOLE

FIRST, MIDDLE, LAST = 0, 1, 2


def test_gathers_that_change_a_layout():
    source = np.array([[FIRST], [MIDDLE], [LAST], [WHOLE]])
    whole, same = np.array([[WHOLE]]), source
    assert turned(source, whole, 3, "gpu")[:, 0].tolist() == [False, True, True, False]
    assert turned(source, whole, 3, "tpu")[:, 0].tolist() == [True, True, True, False]
    assert not turned(source, whole, 3, "cpu").any()
    assert not np.diagonal(turned(source, same, 3, "gpu")).any()  # nothing moves


def test_scatters_that_change_a_layout():
    source, target = np.array([[WHOLE]]), np.array([[FIRST], [MIDDLE], [LAST]])
    assert turned(source, target, 3, "gpu", np.array([[True]]))[0].tolist() == [False, True, True]
    assert not turned(source, target, 3, "gpu", np.array([[False]])).any()  # each device cuts its piece


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_one_dimension_has_one_layout(platform):
    assert not turned(np.array([[0]]), np.array([[WHOLE]]), 1, platform).any()
