"""The checkpoint policy, on the user's own blocks: what JAX then saves is what the plan keeps."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jaxauto import planner
from jaxauto.core import Decisions
from jaxauto.policy import checkpoint_policy, policy_table, signature
from jaxauto.rewrite.recompute import recompute
from jaxauto.solve.remat import Remat
from jaxauto.targets.target import Target

LAYERS, BATCH, LENGTH, HEADS, DEPTH = 3, 8, 512, 8, 128  # nothing is allocated
WIDTH, HIDDEN = HEADS * DEPTH, 4096


def norm(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def block(x, p):
    y = norm(x, p["scale1"])
    q, k, v = ((y @ p[n]).reshape(*x.shape[:2], HEADS, DEPTH) for n in ("q", "k", "v"))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ p["o"]
    return x + jax.nn.gelu(norm(x, p["scale2"]) @ p["up"]) @ p["down"]


def layer_shapes(*leading):
    square, vector = (WIDTH, WIDTH), (WIDTH,)
    shapes = {"q": square, "k": square, "v": square, "o": square, "scale1": vector, "scale2": vector, "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {name: jax.ShapeDtypeStruct((*leading, *shape), jnp.float32) for name, shape in shapes.items()}


def unrolled(layer):
    def loss(params, x):
        for p in params:
            x = layer(x, p)
        return (x * x).mean()

    return loss, [layer_shapes() for _ in range(LAYERS)]


def scanned(layer):
    def loss(params, x):
        x, _ = jax.lax.scan(lambda c, p: (layer(c, p), None), x, params)
        return (x * x).mean()

    return loss, layer_shapes(LAYERS)


MODELS = {"unrolled": unrolled, "scanned": scanned}
BATCH_SHAPE = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)


def read(model):
    loss, params = model(block)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return planner.read(step, (params, BATCH_SHAPE), {})


def levels_of(step):
    return Remat(step.graph, step.groups, step.aliased, Target("v5p:2x2x1").chip).levels()


def saved_by_plan(graph, kept):
    """Types of the values that cross from the forward to the backward pass, arguments and scalars left out."""
    rewritten = recompute(graph, {b: k for b, k in enumerate(kept) if k is not None}).graph
    nodes = rewritten.nodes
    turn = next(k for k, node in enumerate(nodes) if node.backward or node.prim == "optimization_barrier")
    made = {out for node in nodes[:turn] for out in node.outputs}
    read_later = {x for node in nodes[turn:] for x in node.inputs if isinstance(x, int)}
    return Counter(_type(rewritten.values[n].aval) for n in made & read_later if rewritten.values[n].aval.size > 1)


def saved_by_jax(model, policy):
    """Types of the arrays that the backward function of JAX holds, arguments and scalars left out."""
    loss, params = model(jax.checkpoint(block, policy=policy))
    held = jax.tree.leaves(jax.eval_shape(lambda p, x: jax.vjp(loss, p, x)[1], params, BATCH_SHAPE))
    arguments = {_type(a) for a in jax.tree.leaves(params)}
    return Counter(_type(a) for a in held if a.size > 1 and _type(a) not in arguments)


def _type(aval):
    return f"{aval.dtype}{list(aval.shape)}"


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_jax_saves_what_the_plan_keeps(model):
    step = read(model)
    levels = levels_of(step)
    assert len(levels) >= 3
    for level in levels[1:]:
        expected = saved_by_plan(step.graph, level.kept)
        got = saved_by_jax(model, checkpoint_policy(step.graph, Decisions(kept=level.kept)))
        print(level.threshold, expected, got)
        assert got == expected, level.threshold
