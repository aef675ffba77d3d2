"""What XLA:TPU keeps of plain and residual stacks of dots, on small programs; as seen in its schedules (scripts/results/residual.md)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxauto.cost.compute import ops_per_byte
from jaxauto.targets.chips import CHIPS

from .test_clusters import convolution, on_tpu
from .test_fusion import array, made_by

ROWS, WIDTH = 256, 64
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)


def stored(fn, *args, chip="v5e"):
    """(what makes it, type) of arrays of the shape of X that get a buffer, in program order."""
    graph, buffers = on_tpu(fn, *args, ops_per_byte=ops_per_byte(CHIPS[chip]))
    values = (graph.values[int(n)] for n in buffers.ids)
    return [(v.producer.prim, v.dtype.name) for v in values if v.shape == X.shape and v.producer]


def residual(x, ws):
    for w in ws:
        x = x + jax.nn.relu(x @ w)
    return jnp.sum(x.astype(jnp.float32) ** 2)


def test_every_second_sum_of_a_residual_stack_is_kept():
    """Dots make one sum of two arrays as they read it; what two such sums are made of is more than the sum."""
    made = stored(jax.grad(residual, argnums=1), X, [W] * 5)
    forward = made[: [prim for prim, _ in made].index("select_n") if "select_n" in dict(made) else None]
    assert [prim for prim, _ in forward][:7] == ["dot_general", "dot_general", "add", "dot_general", "dot_general", "add", "dot_general"]


@pytest.mark.parametrize(("users", "kept"), [(2, ("convert_element_type", "bfloat16")), (1, ("dot_general", "float32"))])
def test_a_result_that_is_narrowed_before_several_read_it_is_kept_narrow(users, kept):
    """``users`` of the narrowed result; one that reads it is given the result itself."""

    def fn(x, w):
        y = jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
        later = jnp.maximum(y, 0) @ w
        return later * y if users == 2 else later

    assert stored(fn, X, W)[0] == kept


def test_a_sum_with_the_residual_stream_is_made_with_the_dot():
    """Both are written: the dot's result is not read for the sum, the stream is, if flops do not hide that."""

    def fn(x, w, y):
        h = y @ w
        return h, jnp.maximum(h, 0) + x

    graph, buffers = on_tpu(fn, array(32, 32), array(32, 32), array(32, 32))
    reads = {int(n): r for n, r in zip(buffers.ids, buffers.reads, strict=True)}
    (dot,) = (node for node in graph.nodes if node.prim == "dot_general")
    assert reads[dot.outputs[0]] == 0.0 and reads[graph.inputs[0]] == 1.0
    hidden = on_tpu(fn, array(32, 32), array(32, 32), array(32, 32), bytes_per_flop=1e3)[1]
    assert hidden.reads.sum() == 0.0


@pytest.mark.parametrize(("sums", "over"), [(False, False), (True, True)])
def test_the_fusion_of_a_dot_writes_over_what_it_sums_alone(sums, over):
    """A gradient through an activation is beside what the activation was made of; one that is summed takes the place of the other."""

    def fn(x, y, w):
        kept = jax.lax.optimization_barrier(x * 2)
        made = y @ w
        return kept + made if sums else jnp.where(kept > 0, made, 0)

    graph, buffers = on_tpu(fn, array(32, 32), array(32, 32), array(32, 32))
    ends = {graph.values[int(n)].producer: int(e) for n, e in zip(buffers.ids, buffers.end, strict=True)}
    starts = {graph.values[int(n)].producer: int(s) for n, s in zip(buffers.ids, buffers.start, strict=True)}
    (kept,) = (node for node in ends if node is not None and node.prim == "mul")
    (made,) = (node for node in ends if node is not None and node.prim in ("add", "select_n"))
    assert (ends[kept] < starts[made]) == over


@pytest.mark.parametrize(("chip", "rows", "columns", "quotient"), [("v5e", False, False, False), ("v5p", True, False, True)])
def test_what_two_dots_read_is_kept_if_it_takes_long(chip, rows, columns, quotient):
    """As compiled (scripts/results/shared.md): rows that are centred and scaled, columns that are, a quotient."""
    wide = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)

    def is_kept(make, *args):
        def fn(y, *args):
            t = make(*args).astype(jnp.bfloat16)
            return t @ y, jax.lax.dot_general(t, y[:1, :1] + jnp.zeros_like(t[:, :1]), (((0,), (0,)), ((), ())))

        return any(prim == "convert_element_type" for prim, _ in stored(fn, W, *args, chip=chip))

    centred = lambda x, m, r: (x - m) * r  # noqa: E731
    assert is_kept(centred, wide, array(ROWS, 1), array(ROWS, 1)) == rows
    assert is_kept(centred, wide, array(1, WIDTH), array(1, WIDTH)) == columns
    assert is_kept(jnp.divide, wide, array(ROWS, 1)) == quotient


IMAGES = jax.ShapeDtypeStruct((4, 8, 8, 16), jnp.bfloat16)


@pytest.mark.parametrize(("taps", "kept"), [(3, True), (1, False)])
def test_an_argument_that_is_narrowed_for_a_window_is_copied(taps, kept):
    kernel = jax.ShapeDtypeStruct((taps, taps, 16, 16), jnp.bfloat16)
    graph, buffers = on_tpu(lambda x, k: convolution(x.astype(jnp.bfloat16), k), array(*IMAGES.shape), kernel)
    assert ("convert_element_type" in made_by(graph, buffers)) == kept


@pytest.mark.parametrize(("count", "kept"), [(2, False), (3, False), (4, True)])
def test_windows_do_not_make_what_they_read_of_ever_more_arrays(count, kept):
    """Two of them; as of dots, what would move more bytes than writing it once."""
    kernel = jax.ShapeDtypeStruct((3, 3, 16, 16), jnp.bfloat16)

    def fn(arrays, k, m):
        t = sum(jnp.maximum(x, 0) for x in arrays)
        return convolution(t, k), convolution(t, m)

    graph, buffers = on_tpu(fn, [IMAGES] * count, kernel, kernel, ops_per_byte=ops_per_byte(CHIPS["v5e"]))
    assert ("add" in made_by(graph, buffers)) == kept
