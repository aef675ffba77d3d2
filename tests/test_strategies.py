from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxauto.core import AxisLink, MeshAxes
from jaxauto.strategies import WHOLE, project, sharding_of, shards, state_of, states

MESH = MeshAxes(("a", "b"), (4, 2), (AxisLink(1e9, 1e-6),) * 2)


def test_states_are_all_ways_that_divide():
    assert states((8, 6), (4, 2)).tolist() == [[-1, -1], [-1, 0], [-1, 1], [0, -1], [0, 0], [0, 1]]  # 6 is not split by 4, nor 8 by more


def test_nothing_to_split_has_one_state():
    assert states((), (4, 2)).tolist() == [[-1, -1]]
    assert states((3, 5), (4, 2)).tolist() == [[-1, -1]]


@given(sizes=st.lists(st.sampled_from([1, 2, 6, 8, 16]), max_size=4).map(tuple))
def test_every_state_divides_and_none_is_missed(sizes):
    table = states(sizes, MESH.sizes)
    assert len({tuple(s) for s in table.tolist()}) == len(table)
    count = 0
    for a in range(-1, len(sizes)):
        for b in range(-1, len(sizes)):
            split = [1] * len(sizes)
            for d, k in ((a, 4), (b, 2)):
                if d >= 0:
                    split[d] *= k
            count += all(n % k == 0 for n, k in zip(sizes, split, strict=True))
    assert len(table) == count


def test_projection_onto_a_value_with_fewer_dimensions():
    state = np.array([[0, 2], [1, WHOLE]], np.int8)
    assert project(state, (2, WHOLE, 0)).tolist() == [[2, 0], [WHOLE, WHOLE]]


def test_shards_and_names():
    position = np.array([1, 1], np.int8)
    assert shards(position[None], MESH.sizes).tolist() == [8.0]
    assert sharding_of(position, 2, MESH) == ((), ("a", "b"))
    assert state_of(((), ("a", "b")), MESH).tolist() == [1, 1]
