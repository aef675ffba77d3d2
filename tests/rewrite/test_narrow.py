"""float32 that is only multiplied, as XLA:TPU has it: in bfloat16, in memory and in the stacks of loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxauto.cost.fusion import find_buffers
from jaxauto.graph import build, walk
from jaxauto.rewrite.hoist import hoist
from jaxauto.rewrite.narrow import narrow, only_multiplied
from jaxauto.rewrite.program import Rewritten
from jaxauto.rules import rule_for
from jaxauto.trace import trace

LAYERS, WIDTH, ROWS = 3, 16, 4
WEIGHTS, X = jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH, jnp.ones((ROWS, WIDTH))


def layers(precision=None, residual=False):
    """The gradient of scanned layers in float32; ``residual``: what a layer is given is added to what it makes."""

    def layer(x, w):
        made = jnp.tanh(jnp.matmul(x, w, precision=precision))
        return (x + made if residual else made), None

    return jax.value_and_grad(lambda w, x: jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2))


def graph_of(fn, *args):
    return build(trace(fn, args).jaxpr)


def stacks(graph, rows):
    """dtypes of what scans stack, of ``rows`` rows in each trip."""
    made = (graph.values[out] for node in walk(graph) if node.prim == "scan" for out in node.outputs[node.num_carry :])
    return sorted(str(v.dtype) for v in made if v.shape == (LAYERS, rows, WIDTH))


@pytest.mark.parametrize("residual", [False, True])
def test_what_the_backward_pass_only_multiplies_is_stacked_narrow(residual):
    """The inputs of the layers; what the gradient of tanh reads stays wide."""
    graph = graph_of(layers(residual=residual), WEIGHTS, X)
    before, after = stacks(graph, ROWS), stacks(narrow(Rewritten(graph, {})).graph, ROWS)
    assert set(before) == {"float32"} and after == ["bfloat16", *before[1:]]


def test_weights_are_narrowed_before_the_loop():
    graph = hoist(narrow(Rewritten(graph_of(layers(), WEIGHTS, X), {}))).graph
    (before,) = (node for node in graph.nodes if node.prim == "convert_element_type" and node.inputs == (graph.inputs[0],))
    assert graph.values[before.outputs[0]].dtype == jnp.bfloat16
    loops = [node for node in graph.nodes if node.prim == "scan"]
    assert len(loops) == 2 and all(before.outputs[0] in loop.inputs for loop in loops)


@pytest.mark.parametrize("precision", ["highest", "high", jax.lax.Precision.HIGHEST])
def test_who_asks_for_precision_gets_it(precision):
    start = Rewritten(graph_of(layers(precision), WEIGHTS, X), {})
    assert narrow(start) is start and not only_multiplied(start.graph)


def test_other_types_are_left():
    half = jnp.bfloat16
    start = Rewritten(graph_of(layers(), WEIGHTS.astype(half), X.astype(half)), {})
    assert narrow(start) is start


# ------------------------------------------------------------------------------------------------------ outside of loops


def bytes_of(fn, *args, platform="tpu"):
    """Of each value that gets a buffer: bytes over those of its type, by the primitive that makes it."""
    graph = graph_of(fn, *args)
    rules = {node.id: rule_for(node.eqn) for node in walk(graph) if not node.bodies}
    buffers = find_buffers(graph, rules, platform=platform)
    made = ((graph.values[int(n)], b) for n, b in zip(buffers.ids, buffers.bytes_, strict=True))
    return {value.producer.prim: b / value.nbytes for value, b in made if value.producer is not None and b}


def test_what_only_products_read_takes_half():
    square = jnp.ones((64, 64))
    once = lambda x, y: jnp.tanh((x @ y) @ y).sum()  # noqa: E731
    assert bytes_of(once, square, square)["dot_general"] == 0.5
    assert bytes_of(once, square, square, platform="gpu")["dot_general"] == 1.0
    exact = lambda x, y: jnp.tanh(jnp.matmul(x @ y, y, precision="highest")).sum()  # noqa: E731
    assert bytes_of(exact, square, square)["dot_general"] == 1.0


def test_what_is_returned_or_read_otherwise_keeps_its_type():
    square = jnp.ones((64, 64))
    for fn in (lambda x, y: (lambda t: (t @ y, t))(x @ y), lambda x, y: (lambda t: (t @ y).sum() + jnp.sin(t).sum())(x @ y)):
        graph = graph_of(fn, square, square)
        (first, *_) = (node for node in graph.nodes if node.prim == "dot_general")
        assert first.outputs[0] not in only_multiplied(graph)


def test_a_sum_is_made_in_the_fusion_that_writes_narrow():
    """The gradient of a bias, beside a cotangent that dots read."""
    square = jnp.ones((64, 64))
    graph = graph_of(lambda x, y: (lambda t: (t @ y, t.sum(0)))(x @ y), square, square)
    first, last = (node for node in graph.nodes if node.prim == "dot_general")
    assert first.outputs[0] in only_multiplied(graph) and last.outputs[0] not in only_multiplied(graph)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_goes_through_a_barrier_is_narrow_if_all_behind_it_multiply(elsewhere):
    """As what is kept to make something of again: XLA:TPU narrows barriers' operands too, XLA:CPU and XLA:GPU do not."""

    def step(x, y):
        kept = x @ y
        late, y = jax.lax.optimization_barrier((kept, y))
        return (kept @ y).sum() + (jnp.sin(late) if elsewhere else late @ y).sum()

    square = jnp.ones((64, 64))
    graph = graph_of(step, square, square)
    first = next(node.outputs[0] for node in graph.nodes if node.prim == "dot_general")
    rules = {node.id: rule_for(node.eqn) for node in graph.nodes}
    for platform in ("tpu", "cpu", "gpu"):
        buffers = find_buffers(graph, rules, platform=platform)
        (share,) = {b / graph.values[first].nbytes for n, b in zip(buffers.ids, buffers.bytes_, strict=True) if n == first}
        assert share == (0.5 if platform == "tpu" and not elsewhere else 1.0)
