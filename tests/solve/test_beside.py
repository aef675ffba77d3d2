"""What is held beside buffers is in the rows and in the timeline, with the bytes and for as long as compilers hold it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxauto
from jaxauto.solve.beside import _beyond, _split_bytes, bordered, cut_as_read, held_beside, passed_edges, shared_operands
from jaxauto.solve.check import check
from jaxauto.solve.early import made_early
from jaxauto.solve.live import timeline
from jaxauto.solve.stacked import readings
from jaxauto.solve.turns import beside_loops
from jaxauto.strategies import WHOLE, shards

MIB = 2**20


def best_of(step, args, target, pins):
    plan = jaxauto.plan(step, *args, target=target, mesh={"data": 8}, constraints=pins, remat="off", certify=False, progress=False)
    best = plan.program.solved.best
    assert check(best, best.peak_bytes, {}) == []
    return best


def beside(best):
    return held_beside(best.model).timeline(best.x, best.model.buffers.length)


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_what_is_gathered_for_two_dots_is_held_from_one_to_the_other():
    """A small batch, split, and wide weights whose columns are split: the batch is gathered, once for both."""

    def step(x, a, b):
        y = jnp.tanh(x)
        return y @ a, y @ b

    args = spec(512, 1024), spec(1024, 8192), spec(1024, 8192)
    best = best_of(step, args, "h100:8", {"0": P("data"), "1": P(None, "data"), "2": P(None, "data")})
    ((_, _, _, first, last),) = shared_operands(best.model)
    held = beside(best)
    assert first < last and held[first : last + 1] == pytest.approx(2 * MIB) and held[first - 1] == 0
    row = best.model.memory_row(last)
    assert row.bytes_at(best.x) == pytest.approx(timeline(best.model, best.x)[last])


def scanned(state, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    grads = jax.grad(lambda weights: jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2))(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)


@pytest.mark.parametrize(("dim", "copied"), [(2, True), (1, False)])
def test_a_stack_that_is_gathered_along_a_minor_dimension_is_copied_for_its_loops(dim, copied):
    """XLA:GPU wants the slices of both stacks with the split dimension outermost, from the forward loop to the end of the backward loop."""
    args = (spec(4, 512, 1024), spec(4, 1024, 512)), spec(2048, 512)
    best = best_of(scanned, args, "h100:8", {"0.*": P(*[None] * dim, "data"), "1": P("data")})
    found = readings(best.variant, best.model.groups)
    assert len({r.stack for r in found}) == 2
    begin, end = min(r.begin for r in found), max(r.end for r in found)
    held = beside(best)[begin : end + 1]
    pieces = 2 * 4 * 512 * 1024 * 4 / 8
    assert (held.min() >= pieces) == copied


def test_on_tpu_loops_read_stacks_that_are_narrowed_before_them():
    args = (spec(4, 512, 1024), spec(4, 1024, 512)), spec(2048, 512)
    best = best_of(scanned, args, "v5e:2x4", {"0.*": P(None, None, "data"), "1": P("data")})
    assert not readings(best.variant, best.model.groups) and not [*beside_loops(best.model)]


def test_on_tpu_what_is_narrowed_before_a_loop_is_sharded_as_its_argument_and_each_trip_brings_its_slice():
    """Compiled, a Llama of 16 layers whose narrowed weights are split further than the parameters: their stacks are as those are."""

    def step(w, x):
        def layer(x, w):
            w = w.astype(jnp.bfloat16)
            return jnp.tanh(x @ w) + jnp.sin(x @ w), None

        return w - jax.grad(lambda w: jnp.mean(jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2))(w)

    args = spec(4, 1024, 1024), spec(2048, 1024, dtype=jnp.bfloat16)
    best = best_of(step, args, "v5e:2x4", {"1": P("data")})
    model, graph = best.model, best.variant.rewritten.graph
    convert = next(n for n in graph.nodes if n.prim == "convert_element_type" and graph.values[n.outputs[0]].shape == (4, 1024, 1024))
    k = best.variant.buffers.ids.tolist().index(convert.outputs[0])
    (edge,) = (e for e in model.groups.edges if e.node in model.narrowing and graph.values[e.value].shape == (1024, 1024))
    (forward, _) = (n for n in graph.nodes if n.prim == "scan")
    dots = [model.buffers.position[n.id] for body in forward.bodies for n in body.nodes if n.prim == "dot_general"]
    assert [row[1:] for row in passed_edges(model) if row[0] is edge] == [(min(dots), max(dots))], "a slice, brought for the first dot"
    source, target = (model.var("group", group) for group in (edge.source, edge.target))
    for here, where in enumerate(model.states[source]):
        for there in range(len(model.states[target])):
            x = best.x.copy()
            x[source], x[target] = here, there
            assert model.local_sizes(x)[k] == 8 * MIB / shards(where[None], model.mesh.sizes)[0]


@pytest.mark.parametrize(("target", "cut_by_readers"), [("v5e:2x4", True), ("h100:8", False), ("cpu:8", False)])
def test_what_is_made_whole_is_there_until_the_part_that_is_kept_is_cut(target, cut_by_readers):
    """Compiled, a dot made whole and pinned whole, then split: XLA:TPU has all of it until the last kernel that reads its part."""

    def step(x, w, v):
        y = x @ w
        z = y @ v
        return jnp.sum(y * jnp.sin(z @ v.T))

    best = best_of(step, (spec(1024, 512), spec(512, 2048), spec(2048, 256)), target, {"*": P()})
    nodes = {node.outputs[0]: node for node in best.variant.rewritten.graph.nodes}
    (op, result, begin, end) = next(row for row in cut_as_read(best.model) if best.model.values[row[1].value].shape == (1024, 2048))
    last = max(best.model.buffers.position[user.id] for user in best.variant.rewritten.graph.values[result.value].users)
    assert begin == best.model.buffers.position[nodes[result.value].id]
    assert end >= last if cut_by_readers else end == begin

    states = best.model.states[best.model.var("operation", op.node.id)]
    groups = best.model.states[best.model.var("group", result.group)]
    table = _beyond(best.model, op, result)
    factors = [next(k for k, (f, _) in enumerate(op.factors) if f == name) for _, name in result.dims]
    (inner,) = {*range(len(op.factors))} - {*factors}
    rows, columns = (next(k for k, state in enumerate(states) if list(state) == [f]) for f in factors)
    whole, partial = (next(k for k, state in enumerate(states) if list(state) == [f]) for f in (WHOLE, inner))
    split, unsplit = (next(k for k, state in enumerate(groups) if list(state) == [d]) for d in (result.dims[0][0], WHOLE))
    assert table[whole, split] == 8 * MIB * 7 / 8
    assert table[[whole, rows, rows, columns, partial], [unsplit, split, unsplit, split, split]].tolist() == [0] * 5, "or it is no cut"


def test_a_sum_is_there_whole_before_it_is_scattered():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)

    best = best_of(step, (spec(1024, 2048), spec(4096, 1024)), "h100:8", {"0": P("data"), "1": P("data")})
    assert beside(best).max() == pytest.approx(8 * MIB)


def test_a_cpu_sums_partial_results_into_another_array():
    """As compiled: a product that is summed over devices and the sum of it; the mask made of the sum takes its place."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jax.nn.relu(x @ w)))(w)

    how = {"mesh": {"data": 4, "model": 2}, "donate_argnums": (), "remat": "off", "certify": False, "progress": False}
    plan = jaxauto.plan(step, spec(136, 258), spec(1290, 136), target="cpu:8", **how)
    (summed,) = plan.estimate.collectives
    assert summed.kind == "all-reduce"
    memory = {row.name: row for row in plan.verify().rows}["peak memory"]
    assert memory.estimated == pytest.approx(memory.compiled, rel=0.02) and memory.compiled > 2 * summed.bytes_


@pytest.mark.parametrize(("target", "there"), [("v5p:2x2x2", True), ("v5e:2x4", False)])
def test_with_two_cores_a_sum_is_in_hbm_before_it_is_scattered(target, there):
    """2 MiB, of a dot that is too short for a windowed einsum."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)

    best = best_of(step, (spec(1024, 512), spec(2048, 1024)), target, {"0": P("data"), "1": P("data")})
    dot = max(best.model.buffers.position[n.id] for n in best.variant.rewritten.graph.nodes if n.prim == "dot_general")
    assert (beside(best)[dot] >= 2 * MIB) == there


def test_a_weight_that_is_narrowed_as_it_is_gathered_is_there_for_its_dot():
    def step(x, w):
        return jnp.tanh(x @ w.astype(jnp.bfloat16))

    best = best_of(step, (spec(8192, 1024, dtype=jnp.bfloat16), spec(1024, 8192)), "v5e:2x4", {"0": P("data"), "1": P("data")})
    position = best.model.buffers.position
    convert, dot, _ = (position[n.id] for n in best.variant.rewritten.graph.nodes)
    assert beside(best)[[convert, dot]] == pytest.approx(16 * MIB)


def test_zeros_that_the_backward_pass_scatters_into_are_there_from_its_begin():
    """The gradient of a table, on several devices."""

    def step(table, w, ids):
        grads = jax.grad(lambda table, w: jnp.mean(jnp.tanh(jnp.tanh(table[ids] @ w) @ w)), (0, 1))(table, w)
        return table - grads[0], w - grads[1]

    pins = {"0": P(), "1": P(), "2": P("data")}
    best = best_of(step, (spec(8192, 512), spec(512, 512), spec(4096, dtype=jnp.int32)), "h100:8", pins)
    held = np.nonzero(beside(best) >= 8192 * 512 * 4)[0]
    nodes = best.model.variant.rewritten.graph.nodes
    begin = min(best.model.buffers.position[n.id] for n in nodes if n.backward)
    scatter = next(best.model.buffers.position[n.id] for n in nodes if n.prim.startswith("scatter"))
    assert held[0] == begin < scatter - 1 == held[-1]


@pytest.mark.parametrize(("devices", "early"), [(1, False), (8, True)])
def test_stacks_are_there_from_the_end_of_the_loop_before_on_several_devices(devices, early):
    args = (spec(4, 512, 1024), spec(4, 1024, 512)), spec(2048, 512)
    plan = jaxauto.plan(scanned, *args, target=f"h100:{devices}", mesh={"data": devices}, remat="off", certify=False, progress=False)
    b, graph = plan.program.solved.best.model.buffers, plan.program.solved.best.variant.rewritten.graph
    first, second = (n for n in graph.nodes if n.bodies)
    start = {int(n): int(s) for n, s in zip(b.ids, b.start, strict=True)}
    starts = [start[out] for out in second.outputs if out in start and graph.values[out].shape[:1] == (4,)]
    assert starts and all((s <= b.position[first.id] + 1) == early for s in starts)


def updated(weight, momentum, x):
    momentum = 0.9 * momentum + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(weight)
    return weight - 0.1 * momentum, momentum


@pytest.mark.parametrize("dim", [0, 1])
def test_momentum_that_is_gathered_for_an_update_takes_memory(dim):
    """A device that updates a whole weight with a whole gradient needs the momentum whole; turned around, it is there twice."""
    args = spec(512, 1024), spec(512, 1024), spec(64, 512)
    best = best_of(updated, args, "h100:8", {"0": P(), "1": P(*[None] * dim, "data"), "2": P()})
    model = best.model
    (into,) = [e for e, _, _ in passed_edges(model) if e.value == 1]  # 0.9 × momentum
    group = model.var("group", into.target)
    x = best.x.copy()
    x[group] = int(np.flatnonzero((model.states[group] == WHOLE).all(1))[0])
    assert held_beside(model).timeline(x, model.buffers.length)[-1] == pytest.approx((2 + 2 * dim) * MIB)


@pytest.mark.parametrize(("target", "at_once"), [("v5p:2x2x2", True), ("h100:8", False)])
def test_what_an_update_gathers_is_there_once_the_gradient_is(target, at_once):
    """As compiled for v5p: one array of a layer is on its way from its gradient on, while much of the backward pass is still to come."""

    def step(state, x):
        weights, means, squares = state

        def loss(ws):
            y = x
            for w in ws:
                y = jnp.tanh(y @ w)
            return jnp.mean(y)

        gradients = jax.grad(loss)(weights)
        means = [0.9 * m + g for m, g in zip(means, gradients, strict=True)]
        squares = [0.9 * s + g * g for s, g in zip(squares, gradients, strict=True)]
        return [w - 0.1 * m * jax.lax.rsqrt(s) for w, m, s in zip(weights, means, squares, strict=True)], means, squares

    square = [spec(1024, 1024)] * 3
    model = best_of(step, ((square, square, square), spec(64, 1024)), target, {"0*": P("data"), "1": P()}).model
    graph, position, last = model.variant.rewritten.graph, model.buffers.position, model.buffers.length - 1
    dots = [n for n in graph.nodes if n.prim == "dot_general" and n.backward and graph.values[n.outputs[0]].shape == (1024, 1024)]
    made = sorted(position[n.id] for n in dots)
    rows = {e.value: begin for e, begin, _ in passed_edges(model) if 3 <= e.value < 9}  # means and squares, decayed
    for k, gradient in enumerate(reversed(made)):
        assert sorted([rows[3 + k], rows[6 + k]]) == [gradient, last] if at_once else min(rows[3 + k], rows[6 + k]) > made[-1]


def gated_step(state, x):
    def loss(ws):
        y = x
        for gate, up, down in ws:
            y = y + (jax.nn.silu(y @ gate) * (y @ up)) @ down
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state))


WIDE, NARROW = spec(1024, 4096, dtype=jnp.bfloat16), spec(4096, 1024, dtype=jnp.bfloat16)
GATED = ((WIDE, WIDE, NARROW),) * 2, spec(32768, 1024, dtype=jnp.bfloat16)
PRODUCT = 32768 // 8 * 4096 * 2  # bytes of one device


def held_early(best):
    """(positions, bytes) of what is in memory for windowed einsums alone."""
    model, x = best.model, best.x
    for op, k, begin, end in made_early(model):
        where = x[model.var("operation", op.node.id)], x[model.var("group", op.results[0].group)]
        yield begin, end, model.result_tables(op, op.results[0])[3][k][where]


@pytest.mark.parametrize(("weights", "held"), [(P(None, "data"), 2), (P(), 0)])
def test_what_a_windowed_gradient_reads_is_held_from_the_forward_pass_on(weights, held):
    """As compiled for v5e: the gated product is made in the dot that reads it, but the gradient of its weight is summed in a loop, which
    reads it from memory. So it is written where it is made. Where that gradient is not scattered, nothing is held."""
    best = best_of(gated_step, GATED, "v5e:2x4", {"0*": weights, "1": P("data")})
    rows = list(held_early(best))
    assert [size for *_, size in rows].count(PRODUCT) == held
    for begin, end, size in rows:
        assert (beside(best)[begin : end + 1] >= size).all()


def test_what_is_made_again_for_a_windowed_gradient_is_held_from_there_on():
    """As compiled for v5p (model 4 of generated.py, fully sharded): a norm that is made again is in memory up to the loops that read it."""

    def step(state, x):
        def loss(ws):
            y = x
            for gate, up, down in ws:
                n = (y * jax.lax.rsqrt(jnp.mean(jnp.square(y.astype(jnp.float32)), -1, keepdims=True))).astype(y.dtype)
                y = y + (jax.nn.silu(n @ gate) * (n @ up)) @ down
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state))

    pins = {"0*": P(None, "data"), "1": P("data")}
    budget = int(0.6 * best_of(step, GATED, "v5e:2x4", pins).peak_bytes)
    how = {"target": "v5e:2x4", "mesh": {"data": 8}, "constraints": pins, "memory_budget": budget}
    best = jaxauto.plan(step, *GATED, **how, certify=False, progress=False).program.solved.best
    again = {best.model.buffers.position[n.id] for n in best.model.variant.rewritten.graph.nodes if n.backward}
    rows = [row for row in held_early(best) if row[0] in again and row[2] == 32768 // 8 * 1024 * 2]
    assert rows
    for begin, end, size in rows:
        assert (beside(best)[begin : end + 1] >= size).all()
    assert check(best, best.peak_bytes, {}) == []


@pytest.mark.parametrize(
    ("split", "batch", "written"), [(P(None, "data"), 4, 2.0), (P("data"), 128, 0.0)], ids=["rows split", "batch split"]
)
def test_what_a_convolution_makes_as_it_reads_is_in_memory_where_borders_are_sent(split, batch, written):
    """As compiled for v5p: a neighbour is sent slices of an array, so the activation before a 3×3 convolution is written to memory, and
    lies there for the gradient of the kernel. 64 features fill half a tile. A cotangent is written anyway, by the convolution that makes
    it."""

    def step(kernels, x):
        def loss(kernels):
            y = x
            for kernel in kernels:
                y = jax.lax.conv_general_dilated(jax.nn.relu(y), kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda p, g: p - g, kernels, jax.grad(loss)(kernels))

    kernels, image = (spec(3, 3, 64, 64, dtype=jnp.bfloat16),) * 3, spec(batch, 256, 256, 64, dtype=jnp.bfloat16)
    best = best_of(step, (kernels, image), "v5p:2x2x2", {"0*": P(), "1": split})
    model, held = best.model, np.zeros(best.model.buffers.length)
    rows = bordered(model)
    for op, o, begin, end in rows:
        i, j = model.var("operation", op.node.id), model.var("group", o.group)
        bytes_ = _split_bytes(model, op, o, len(model.states[j]))[best.x[i], best.x[j]]
        assert bytes_ == pytest.approx(written * batch * 256 * 256 * 64 * 2 / 8)
        held[begin : end + 1] += bytes_
    made = [model.values[o.value].producer for _, o, _, _ in rows]
    assert [node.prim for node in made] == ["max"] * 3 + ["convert_element_type"]  # the last: the loss's cotangent
    assert all(end > 14 for node, (*_, end) in zip(made, rows, strict=True) if node.prim == "max")  # up to the backward pass
    assert (beside(best) >= held).all()


@pytest.mark.parametrize("read_again", [True, False])
def test_a_transposed_copy_is_held_from_the_backward_pass_on_beside_what_else_reads_the_array(read_again):
    """As compiled for v5e: the gradient of a weight is scattered in a loop that reads what the forward pass kept, transposed. The copies of
    all layers are made as the backward pass begins, and take the place of what nothing else reads; the input of the step stays."""

    def step(ws, x):
        def loss(ws):
            y = x
            for w in ws:
                y = (y @ w.astype(jnp.bfloat16)) * (jnp.sin(y) if read_again else 1)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda p, g: p - g, ws, jax.grad(loss)(ws))

    args = (spec(4096, 4096),) * 4, spec(65536, 4096, dtype=jnp.bfloat16)
    best = best_of(step, args, "v5e:2x4", {"0*": P("data"), "1": P("data")})
    model, part = best.model, 65536 // 8 * 4096 * 2
    turns = min(model.buffers.position[n.id] for n in model.groups.graph.nodes if n.backward and n.id in model.buffers.position)
    assert [size for begin, _, size in held_early(best) if begin == turns].count(part) == (4 if read_again else 1)
    assert check(best, best.peak_bytes, {}) == []
