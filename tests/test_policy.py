"""The checkpoint policy, on the user's own blocks: what JAX then saves is what the plan keeps."""

import collections
import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jaxauto import planner
from jaxauto.blocks import closure, find_blocks
from jaxauto.core import Decisions
from jaxauto.export import policy_source
from jaxauto.policy import checkpoint_policy, signature
from jaxauto.rewrite.recompute import recompute

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
    shapes = dict.fromkeys("qkvo", square) | {"scale1": vector, "scale2": vector, "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
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
BATCHES_HELD = {"unrolled": 1, "scanned": 0}  # the first layer's input is the batch; a scan stacks it with the others
BATCH_SHAPE = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)


def read(model):
    loss, params = model(block)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return planner.read(step, (params, BATCH_SHAPE), {})


@dataclasses.dataclass
class Level:
    """Every layer keeps the results of some primitives, as far as its backward pass wants them."""

    threshold: str
    kept: tuple


def levels_of(step):
    """From all to nothing; alike in all layers, which is what one policy can say."""
    blocks = find_blocks(step.graph)
    choices = [("exp", "dot_general"), ("dot_general",), ()]
    return [Level("as written", (None,) * len(blocks)), *(Level(" ".join(c), tuple(kept_of(b, c) for b in blocks)) for c in choices)]


def kept_of(block, prims):
    made = {out for node in block.forward if node.prim in prims for out in node.outputs}
    _, reads = closure(block, made)
    return frozenset(made & ({*block.residuals} | {*reads}))


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
    found = Counter(_type(a) for a in held if a.size > 1 and _type(a) not in arguments)
    found[_type(BATCH_SHAPE)] -= BATCHES_HELD[model.__name__]
    return +found


def _type(aval):
    return f"{aval.dtype}{list(aval.shape)}"


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_jax_saves_what_the_plan_keeps(model):
    step = read(model)
    levels = levels_of(step)
    assert len(levels) >= 3
    sizes = []
    for level in levels[1:]:
        expected = saved_by_plan(step.graph, level.kept)
        assert saved_by_jax(model, checkpoint_policy(step.graph, Decisions(kept=level.kept))) == expected, level.threshold
        sizes.append(sum(expected.values()))
    assert sizes[0] > sizes[-1]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_exported_policy_saves_the_same(model):
    step = read(model)
    for level in levels_of(step)[1:]:
        namespace = {"collections": collections}
        exec(policy_source(step.graph, Decisions(kept=level.kept)), namespace)
        assert saved_by_jax(model, namespace["checkpoint_policy"]()) == saved_by_plan(step.graph, level.kept), level.threshold


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_plan_that_keeps_all_saves_more_than_jax_checkpoint_alone(model):
    step = read(model)
    policy = checkpoint_policy(step.graph, Decisions(kept=(None,) * len(levels_of(step)[0].kept)))
    everything, nothing = saved_by_jax(model, policy), saved_by_jax(model, None)
    assert sum(everything.values()) > 3 * sum(nothing.values())


def gated(x, p):
    return x + jnp.tanh((x @ p["q"]) * (x @ p["k"]))


def gated_step():
    def loss(params, x, layer=gated):
        for p in params:
            x = layer(x, p)
        return (x * x).mean()

    return loss, [{name: layer_shapes()[name] for name in ("q", "k")} for _ in range(LAYERS)]


@pytest.mark.parametrize("which", [0, 1])
def test_equal_operations_are_told_apart_by_their_order(which):
    """Both products of a layer have one signature; only one of them is kept."""
    loss, params = gated_step()
    step = planner.read(lambda params, x: jax.value_and_grad(loss)(params, x), (params, BATCH_SHAPE), {})
    kept = []
    for found in find_blocks(step.graph):
        products = [node.outputs[0] for node in found.forward if node.prim == "dot_general" and node.outputs[0] in found.residuals]
        kept.append(frozenset(products[which : which + 1]))
    assert sum(map(len, kept)) == LAYERS
    policy = checkpoint_policy(step.graph, Decisions(kept=tuple(kept)))
    product, other = jnp.ones((BATCH, LENGTH, WIDTH)), [jnp.ones((WIDTH, WIDTH))] * 2
    dots = [e for e in jax.make_jaxpr(gated)(product, {"q": other[0], "k": other[1]}).eqns if e.primitive.name == "dot_general"]
    asked = [policy(e.primitive, *(v.aval for v in e.invars), **e.params) for _ in range(LAYERS) for e in dots]
    assert asked == [k == which for k in range(2)] * LAYERS


def test_what_the_plan_does_not_know_is_not_saved():
    step = read(unrolled)
    policy = checkpoint_policy(step.graph, Decisions(kept=levels_of(step)[1].kept))
    assert policy(jax.lax.sin_p, jax.ShapeDtypeStruct((3,), jnp.float32)) is False


def test_signature_leaves_out_parameters_that_are_not_plain_data():
    aval = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    assert signature("f", [aval], {"axis": (0,), "body": object()}) == ("f", "bfloat16[2, 3]", "axis=(0,)")
