"""What is materialised, when it lives, what shares memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import STEPS

from jaxauto.core import LinkKind
from jaxauto.cost.fusion import find_buffers
from jaxauto.cost.liveness import live_bytes
from jaxauto.graph import build, walk
from jaxauto.profile import aliased_outputs
from jaxauto.rules import rule_for
from jaxauto.trace import trace

N = 4096  # bytes of one float32[32, 32]


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


X = array(32, 32)


def buffers_of(fn, *args, donate=None, platform="gpu", bytes_per_flop=0.0, ops_per_byte=0.0, devices=2):
    traced = trace(fn, args, donate_argnums=donate)
    graph = build(traced.jaxpr)
    rules = {node.id: rule_for(node.eqn) for node in walk(graph) if not node.bodies}
    return graph, find_buffers(graph, rules, aliased_outputs(traced, graph), platform, bytes_per_flop, ops_per_byte, devices=devices)


def peak(fn, *args, donate=()):
    _, buffers = buffers_of(fn, *args, donate=donate)
    return live_bytes(buffers, buffers.bytes_).max()


def made_by(graph, buffers):
    """Primitives whose results got a buffer of their own."""
    found = [graph.values[int(n)].producer for n, s, e in zip(buffers.ids, buffers.start, buffers.end, strict=True) if e >= s]
    return [node.prim for node in found if node is not None]


# ------------------------------------------------------------------------------------------------------------- fusion


def test_elementwise_chains_are_one_pass():
    graph, buffers = buffers_of(lambda x: jnp.tanh(x * 2 + 1).sum(), X)
    assert made_by(graph, buffers) == ["reduce_sum"]
    assert buffers.reads[buffers.is_input] == 1


def test_operands_of_dots_are_materialised():
    graph, buffers = buffers_of(lambda x: (x + 1) @ x, X)
    assert made_by(graph, buffers) == ["add", "dot_general"]


@pytest.mark.parametrize(("activation", "written"), [(jax.nn.relu, False), (jax.nn.gelu, True)])
def test_on_gpu_what_a_residual_relu_compares_is_made_where_it_is_read(activation, written):
    """By the kernel that makes the activation and, for the mask, by its gradient's; what more of them read is kept."""

    def fn(w, x):
        y = x @ w
        return activation(y + x) @ w

    graph, buffers = buffers_of(jax.grad(lambda w, x: fn(w, x).sum()), X, X)
    added = next(n.outputs[0] for n in graph.nodes if n.prim == "add")
    assert (added in buffers.ids) == written


@pytest.mark.parametrize(
    ("activation", "prim", "dtype", "kept"),
    [
        (jax.nn.gelu, "tanh", jnp.bfloat16, True),
        (jax.nn.gelu, "tanh", jnp.float32, False),
        (functools.partial(jax.nn.gelu, approximate=False), "erfc", jnp.float32, True),
        (jax.nn.silu, "logistic", jnp.bfloat16, False),
    ],
)
def test_on_gpu_part_of_a_gelu_is_kept_for_the_backward_pass(activation, prim, dtype, kept):
    """As compiled: scripts/results/activations_h100.md."""
    weight = jax.ShapeDtypeStruct((32, 32), dtype)
    graph, buffers = buffers_of(jax.grad(lambda w, x: (activation(x @ w) @ w).astype(jnp.float32).sum()), weight, weight)
    assert (prim in made_by(graph, buffers)) == kept


@pytest.mark.parametrize(("dtype", "kept"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_on_gpu_the_mask_of_a_wide_activation_is_kept(dtype, kept):
    """A norm's gradient sums what the mask leaves and uses it once more: each kernel selects for itself."""

    def loss(w, scale, x):
        y = x @ w
        return (jax.nn.relu(y * scale) @ w).astype(jnp.float32).sum()

    weight, scale = jax.ShapeDtypeStruct((32, 32), dtype), jax.ShapeDtypeStruct((32,), dtype)
    graph, buffers = buffers_of(jax.grad(loss, argnums=(0, 1, 2)), weight, scale, weight)
    assert ("gt" in made_by(graph, buffers)) == kept


def test_on_gpu_a_mask_that_is_made_of_little_is_made_where_it_is_used():
    def fn(x, labels):
        hit = jnp.where(labels[:, None] == jnp.arange(32), x @ x, 0.0)
        return hit.sum(0), hit * 2

    graph, buffers = buffers_of(fn, X, jax.ShapeDtypeStruct((32,), jnp.int32))
    assert "eq" not in made_by(graph, buffers)


@pytest.mark.parametrize(("platform", "narrow"), [("gpu", True), ("cpu", False)])
def test_what_is_widened_is_kept_as_narrow_as_it_was(platform, narrow):
    """Made of two arrays, and read by two kernels."""

    def fn(a, b):
        wide = (a @ b + b @ a).astype(jnp.float32)
        return wide.sum(0), jnp.sin(wide).sum(1)

    half = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)
    graph, buffers = buffers_of(fn, half, half, platform=platform)
    widened = next(n for n in graph.nodes if n.prim == "convert_element_type")
    assert (widened.inputs[0] in buffers.ids, widened.outputs[0] in buffers.ids) == (narrow, not narrow)


@pytest.mark.parametrize(("dtype", "over"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_on_gpu_what_is_summed_wide_in_the_kernel_that_writes_it_is_beside_what_it_is_made_of(dtype, over):
    def fn(x):
        y = x @ x
        z = y * 2 + 1
        return z.astype(jnp.float32).sum(0), z @ x

    graph, buffers = buffers_of(fn, jax.ShapeDtypeStruct((32, 32), dtype))
    ids = buffers.ids.tolist()
    y, z = (next(n.outputs[0] for n in graph.nodes if n.prim == prim) for prim in ("dot_general", "add"))
    assert (buffers.end[ids.index(y)] < buffers.start[ids.index(z)]) == over


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_what_is_made_of_an_array_of_its_size_writes_over_it(platform):
    """A product, and what is made of it for another."""

    def fn(x, y):
        made = x @ y
        return jnp.tanh(made) @ y

    graph, buffers = buffers_of(fn, X, X, platform=platform)
    at = buffers.position[next(n.id for n in graph.nodes if n.prim == "tanh")]
    live = live_bytes(buffers, np.where(buffers.is_input, 0, buffers.bytes_))
    assert live[at] == N


CHAINS = {
    "tanh": lambda h: jnp.tanh(h),
    "mask": lambda h: jnp.where(h > 0, 1.0, 0.0),
    "turned": lambda h: (2 * h + 1).T.reshape(h.shape),
    "softmax": lambda h: jax.nn.softmax(h),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_cpu_holds_what_its_compiler_says(name):
    """Between a product to many columns and one to few: as compiled, the wide array is there once, or twice where it is turned."""

    def fn(x, wide, narrow):
        return CHAINS[name](x @ wide) @ narrow

    args = array(64, 16), array(16, 512), array(512, 2)
    compiled = jax.jit(fn).lower(*args).compile().memory_analysis()
    _, buffers = buffers_of(fn, *args, platform="cpu")
    live = live_bytes(buffers, np.where(buffers.is_input | buffers.is_output, 0, buffers.bytes_))
    wide = 64 * 512 * 4
    assert round(live.max() / wide) == round(compiled.temp_size_in_bytes / wide)


def test_a_result_that_is_turned_is_beside_what_it_is_made_of_on_a_cpu():
    def fn(x, wide):
        return (2 * (x @ wide) + 1).T

    args = array(64, 16), array(16, 512)
    compiled = jax.jit(fn).lower(*args).compile().memory_analysis()
    _, buffers = buffers_of(fn, *args, platform="cpu")
    live = live_bytes(buffers, np.where(buffers.is_input, 0, buffers.bytes_))
    assert live.max() == compiled.temp_size_in_bytes + compiled.output_size_in_bytes == 2 * 64 * 512 * 4


@pytest.mark.parametrize(("passed", "bytes_"), [(True, 2), (False, 4)])
def test_a_barrier_keeps_the_type_that_a_cpu_widens(passed, bytes_):
    def fn(x):
        made = jnp.tanh(x @ x)
        return (jax.lax.optimization_barrier(made) if passed else made) @ x

    graph, buffers = buffers_of(fn, jax.ShapeDtypeStruct((32, 32), jnp.bfloat16), platform="cpu")
    made = next(n.outputs[0] for n in graph.nodes if n.prim == "tanh")
    assert buffers.bytes_[buffers.ids == made].tolist() == [bytes_ * 32 * 32]


@pytest.mark.parametrize(("columns", "convolved", "written"), [(56, True, True), (28, True, False), (56, False, False)])
def test_what_a_dot_reads_of_images_is_written_where_a_convolution_lays_them_otherwise(columns, convolved, written):
    """As compiled for v5e: beside a convolution's result its normalised rows are kept, unless columns make no whole tiles."""

    def fn(x, kernel, w):
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) if convolved else x @ w
        return jnp.tanh(y - y.mean(-1, keepdims=True)) @ w

    args = array(8, columns, columns, 32), array(3, 3, 32, 32), array(32, 32)
    graph, buffers = buffers_of(fn, *args, platform="tpu")
    assert ("tanh" in made_by(graph, buffers)) is written


def test_what_is_made_from_one_array_is_made_again_for_each_user():
    def fn(x):
        e = jnp.exp(x @ x)
        return e / e.sum()

    graph, buffers = buffers_of(fn, X)
    assert "exp" not in made_by(graph, buffers)


def test_what_is_made_from_two_arrays_and_used_twice_is_kept():
    def fn(x, y):
        z = (x @ x) * (y @ y)
        return z.sum(), z.max()

    graph, buffers = buffers_of(fn, X, X, platform="cpu")
    assert "mul" in made_by(graph, buffers)


# ------------------------------------------------------------------------------------------------------ shared memory


def test_an_elementwise_result_takes_the_memory_of_what_dies_there():
    assert peak(lambda x: jnp.tanh(x @ x), X) == 2 * N
    assert peak(lambda x: (x @ x).T @ x, X) == 3 * N  # a dot and a transpose need room beside their operands


def test_a_scatter_writes_in_place():
    def fn(rows, updates):
        return jnp.zeros((64, 32)).at[rows].add(updates)

    assert peak(fn, jax.ShapeDtypeStruct((8,), jnp.int32), array(8, 32)) < 1.4 * 64 * 32 * 4


def test_a_donated_input_is_written_in_place():
    def fn(state):
        return [state[0] - 0.1]

    _, buffers = buffers_of(fn, [X], donate=0)
    assert live_bytes(buffers, buffers.bytes_).max() == N
    assert buffers.written.sum() == 1  # it is written all the same
    assert peak(fn, [X]) == 2 * N


def test_gradients_are_used_up_as_they_come():
    def step(params, x):
        def loss(p):
            h = x
            for w in p:
                h = jnp.tanh(h @ w)
            return h.sum()

        grads = jax.grad(loss)(params)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)]

    params = [array(256, 256) for _ in range(8)]
    size = 256 * 256 * 4
    assert peak(step, params, array(2, 256), donate=0) < 8 * size + 2.5 * size


# -------------------------------------------------------------------------------------------------------------- loops


def test_a_carry_is_updated_in_place():
    def fn(x):
        return jax.lax.fori_loop(0, 10, lambda i, c: c * 2 + 1, x @ x)

    assert peak(fn, X) == pytest.approx(2 * N, abs=64)


def test_a_carry_that_a_dot_replaces_is_there_twice():
    def fn(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x @ x, length=10)[0]

    assert peak(fn, X) == pytest.approx(3 * N, abs=64)


def test_slices_of_stacked_results_are_written_into_the_stack():
    def fn(x):
        return jax.lax.scan(lambda c, _: (c, jnp.tanh(c @ x)), x, length=10)[1]

    _, buffers = buffers_of(fn, X)
    assert peak(fn, X) <= (10 + 3) * N
    stack = buffers.bytes_ == 10 * N
    assert stack.sum() == 1 and buffers.written[stack] == 0  # each trip writes its own slice


def test_accumulated_gradients_are_there_once():
    def step(w, batches):
        def body(total, x):
            return total + jax.grad(lambda w: jnp.tanh(x @ w).sum())(w), None

        total, _ = jax.lax.scan(body, jnp.zeros_like(w), batches)
        return w - total

    size = 256 * 256 * 4
    assert peak(step, array(256, 256), array(4, 2, 256), donate=0) < 3.1 * size  # parameters, sum, one gradient


def test_branches_that_become_donated_state_take_nothing():
    def step(state, take):
        return jax.lax.cond(take, lambda s: [s[0] * 0.9], lambda s: [s[0] * 1.1], state)

    assert peak(step, [X], jax.ShapeDtypeStruct((), bool), donate=0) < 1.1 * N


# ---------------------------------------------------------------------------------------------------------- every step


@pytest.mark.parametrize("name", sorted(STEPS))
def test_buffers_are_sound(name):
    step, args = STEPS[name]()
    graph, buffers = buffers_of(step, *args)
    live = live_bytes(buffers, buffers.bytes_)
    assert len(live) == buffers.length and (live >= -1e-6).all()
    assert live[0] >= buffers.bytes_[buffers.is_input].sum()
    assert len(set(buffers.ids.tolist())) == len(buffers.ids)
    assert (buffers.end < buffers.length).all() and (buffers.end >= buffers.start - 1).all()
    assert set(buffers.position) == {node.id for node in walk(graph)}
    brute = [buffers.bytes_[(buffers.start <= t) & (buffers.end >= t)].sum() for t in range(buffers.length)]
    np.testing.assert_allclose(live, brute)
    for node in walk(graph):
        for x in node.inputs:
            producer = graph.values[x].producer if isinstance(x, int) else None
            if producer is not None:  # it is scheduled before what reads it
                assert buffers.position[producer.id] < buffers.loop_start.get(node.id, buffers.position[node.id])


@pytest.mark.parametrize("name", ["transformer_loop", "linen_unet", "linen_residual_net"])
def test_nothing_of_the_backward_pass_is_there_in_the_forward_pass(name):
    """But for the loss's gradient, which may be made beside the loss."""
    step, args = STEPS[name]()
    graph, buffers = buffers_of(step, *args, platform="tpu")
    backward = {out for node in graph.nodes if node.backward for out in node.outputs}
    turn = max(buffers.position[n.id] for n in graph.nodes if not n.backward and n.prim in ("dot_general", "conv_general_dilated"))
    starts = [int(s) for n, s in zip(buffers.ids, buffers.start, strict=True) if int(n) in backward]
    assert len(starts) > 10 and min(starts) >= turn


# -------------------------------------------------------------------------------------------------------------- stacks


def traffic(platform, body):
    """Bytes that fused equations move in a scan over 8 slices of X."""
    _, b = buffers_of(lambda xs: jax.lax.scan(body, jnp.zeros((32, 32)), xs), array(8, 32, 32), platform=platform)
    return float((b.bytes_ * (b.reads + b.written)).sum())


def test_a_gpu_fills_stacks_copies_into_them_and_copies_slices_out_for_dots():
    stacked, plain = (lambda c, x: (c, jnp.tanh(x) + c)), (lambda c, x: (c + jnp.tanh(x), None))
    into = traffic("gpu", stacked) - traffic("gpu", plain)
    assert into - (traffic("cpu", stacked) - traffic("cpu", plain)) == 3 * 8 * N, "zeros, and a copy that is read and written"
    with_dot, without = (lambda c, x: (c @ x, None)), (lambda c, x: (c + x, None))
    out = traffic("gpu", with_dot) - traffic("cpu", with_dot)
    assert out - (traffic("gpu", without) - traffic("cpu", without)) == 2 * 8 * N


@pytest.mark.parametrize(("platform", "dtype", "copies"), [("cpu", jnp.bfloat16, 1), ("cpu", jnp.float32, 0), ("tpu", jnp.bfloat16, 0)])
def test_a_stack_of_16_bits_is_widened_whole_before_a_loop_reads_it(platform, dtype, copies):
    """As compiled for CPU: the stacks of the backward loop are converted to float32 before it, and lie there while it runs."""

    def fn(x):
        return jax.lax.scan(lambda c, row: (c + row.astype(jnp.float32), None), jnp.zeros((32, 32)), jnp.exp(x))[0]

    graph, buffers = buffers_of(fn, jax.ShapeDtypeStruct((8, 32, 32), dtype), platform=platform, devices=1)
    loop = next(node for node in graph.nodes if node.bodies)
    (row,) = (link.target for link in loop.links if link.kind is LinkKind.XS)
    found = [(bytes_, start, end) for n, bytes_, start, end in zip(buffers.ids, buffers.bytes_, buffers.start, buffers.end) if n == row]
    assert [bytes_ for bytes_, _, _ in found] == [4.0 * 8 * 32 * 32] * copies
    assert all(start < end == buffers.position[loop.id] for _, start, end in found)
