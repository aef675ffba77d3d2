"""XLA:CPU's order: what it runs, dot by dot, is what was told."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jaxauto.cost.fusion import find_buffers
from jaxauto.graph import build, walk
from jaxauto.rules import rule_for
from jaxauto.targets.compilers import COMPILER_OPTIONS
from jaxauto.trace import trace

ROWS = 4


def as_told(fn, *args):
    """Shapes of what dots make, in the order of the positions of a program on one CPU."""
    traced = trace(fn, args)
    graph = build(traced.jaxpr)
    rules = {node.id: rule_for(node.eqn) for node in walk(graph) if not node.bodies}
    buffers = find_buffers(graph, rules, frozenset(), "cpu", held=graph)
    dots = sorted((n for n in graph.nodes if n.prim == "dot_general"), key=lambda n: buffers.position[n.id])
    return [sorted(graph.values[n.outputs[0]].shape) for n in dots], buffers


def as_compiled(fn, *args):
    """The same of the program compiled as plans are."""
    text = jax.jit(fn).lower(*args).compile(dict(COMPILER_OPTIONS["cpu"])).as_text()
    entry = text[text.index("\nENTRY") :]
    found = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", entry)
    return [sorted(int(n) for n in shape.split(",")) for shape in found]


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def more_readers_first(x, y):
    """The second operand has more that read it behind it; the first comes first in the program."""
    few = x @ jnp.ones((x.shape[1], 9))
    many = y @ jnp.ones((y.shape[1], 9))
    many = many @ jnp.ones((9, 9)) + many @ jnp.zeros((9, 9))
    return jnp.tanh(few).sum() + jnp.tanh(many @ jnp.ones((9, 11))).sum()


def network(params, x):
    h = x
    for w in params:
        h = jnp.sin(h @ w)
    return jnp.sum(h)


def towers(params, x):
    """Three of one input, of which the third is the deepest."""
    deep = x
    for w in params[2:]:
        deep = jnp.sin(deep @ w)
    return jnp.sum(jnp.sin(x @ params[0])) * jnp.sum(jnp.sin(x @ params[1])) + jnp.sum(deep)


WIDTHS = [floats(10, 11), floats(11, 12), floats(12, 13), floats(13, 14)]
TOWERS = [floats(10, 21), floats(10, 22), floats(10, 11), floats(11, 12)]


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (more_readers_first, (floats(ROWS, 7), floats(ROWS, 8))),
        (jax.value_and_grad(network), (WIDTHS, floats(ROWS, 10))),
        (towers, (TOWERS, floats(ROWS, 10))),
    ],
)
def test_dots_run_in_the_order_that_was_told(fn, args):
    told, _ = as_told(fn, *args)
    assert told == as_compiled(fn, *args)


def test_what_is_not_written_stands_before_its_first_reader():
    def fn(x, w):
        early = 2 * x
        return jnp.tanh(w @ w).sum() + (early @ w).sum()

    graph = build(trace(fn, (floats(8, 8), floats(8, 8))).jaxpr)
    _, buffers = as_told(fn, floats(8, 8), floats(8, 8))
    made = {out: node.id for node in graph.nodes for out in node.outputs}
    read = [(made[x], node.id) for node in graph.nodes for x in node.inputs if x in made]
    assert read and all(buffers.position[first] < buffers.position[then] for first, then in read)
