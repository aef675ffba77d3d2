"""Decisions as pins: every array where it was decided, and nowhere else."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxauto.aot import abstract_mesh
from jaxauto.blocks import find_blocks
from jaxauto.core import Decisions, Trips
from jaxauto.graph import build, walk
from jaxauto.rewrite.apply import apply
from jaxauto.trace import trace


def step(weights, x):
    def loss(weights):
        y = x
        for up, down in weights:
            y = y + jnp.tanh(y @ up) @ down
        return jnp.mean(y**2)

    return jax.grad(loss)(weights)


def test_what_is_kept_is_not_resharded_as_the_operand_of_what_made_it():
    """A barrier's result is called as what it lets pass is: what is decided for operand 0 of the dot is not meant for it."""
    shape = jax.ShapeDtypeStruct
    args = [(shape((64, 256), jnp.float32), shape((256, 64), jnp.float32))] * 3, shape((32, 64), jnp.float32)
    graph = build(trace(step, args).jaxpr)
    dots = [n for n in walk(graph) if n.prim == "dot_general" and not n.backward and graph.values[n.outputs[0]].shape == (32, 256)]
    made = {n.outputs[0] for n in dots}
    kept = tuple(frozenset(made & {*b.made}) for b in find_blocks(graph))
    whole, split = (("data",), ()), (("data",), ("model",))
    decisions = Decisions(dict.fromkeys(made, split), {(number, 0): whole for number in made}, kept)
    mesh = abstract_mesh((4, 2), ("data", "model"))
    equations = jax.make_jaxpr(apply(graph, decisions, mesh, "tpu"))(*jax.tree.leaves(args)).eqns
    made_by = {out: eqn for eqn in equations for out in eqn.outvars}
    barriers = [eqn for eqn in equations if eqn.primitive.name == "optimization_barrier"]
    passed = [made_by[x] for eqn in barriers for x in eqn.invars if x in made_by and x.aval.shape == (32, 256)]
    assert passed and all(eqn.params["sharding"].spec == jax.sharding.PartitionSpec("data", "model") for eqn in passed)


def test_what_comes_through_a_barrier_is_not_brought_back_to_where_it_was_made():
    """It is called as what another operation made, and has been brought to where it is kept."""
    shape = jax.ShapeDtypeStruct
    args = [(shape((64, 256), jnp.float32), shape((256, 64), jnp.float32))] * 3, shape((32, 64), jnp.float32)
    graph = build(trace(step, args).jaxpr)
    made = {n.outputs[0] for n in walk(graph) if n.prim == "dot_general" and not n.backward and graph.values[n.outputs[0]].shape[1] == 256}
    kept = tuple(frozenset(made & {*b.made}) for b in find_blocks(graph))
    decisions = Decisions(dict.fromkeys(made, (("data",), ())), {}, kept, made=dict.fromkeys(made, ((), ("data",))))
    equations = jax.make_jaxpr(apply(graph, decisions, abstract_mesh((8,), ("data",)), "tpu"))(*jax.tree.leaves(args)).eqns
    barriers = {out for eqn in equations if eqn.primitive.name == "optimization_barrier" for out in eqn.outvars}
    pins = [(eqn.invars[0] in barriers, eqn.params["sharding"].spec) for eqn in equations if eqn.primitive.name == "sharding_constraint"]
    assert sum(spec == P(None, "data") for _, spec in pins) == len(made)
    assert {spec for passed, spec in pins if passed} == {P("data")}


def test_on_cpu_what_is_made_again_waits_for_all_gradients_before_it():
    """As compiled for eight devices: the head's gradient is summed before a block is made again, or the logits' cotangent lies there."""

    def deep_step(weights, head, x):
        def loss(weights, head):
            y = x
            for up, down in weights:
                y = y + jnp.tanh(y @ up) @ down
            return jnp.mean(jnp.tanh(y @ head) ** 2)

        return jax.grad(loss, argnums=(0, 1))(weights, head)

    shape = jax.ShapeDtypeStruct
    layers = [(shape((64, 512), jnp.float32), shape((512, 64), jnp.float32))] * 3
    args = layers, shape((64, 1024), jnp.float32), shape((4096, 64), jnp.float32)
    graph = build(trace(deep_step, args).jaxpr)
    kept = tuple(frozenset() for _ in find_blocks(graph))
    mesh = jax.make_mesh((8,), ("data",))
    shardings = [*[NamedSharding(mesh, P())] * 7, NamedSharding(mesh, P("data"))]

    def sums_before(in_order):
        run = jax.jit(apply(graph, Decisions({}, {}, kept, in_order=in_order), mesh), in_shardings=shardings)
        text = run.lower(*jax.tree.leaves(args)).compile().as_text()
        assert "is_scheduled=true" in text
        sums = re.findall(r"= (.*) all-reduce\(", text)
        return next(k for k, shape in enumerate(sums) if "f32[1024,64]" in shape)

    assert sums_before(frozenset(graph.outputs)) == 1, "what the backward pass begins with is waited for before it"
    assert sums_before(None) > 2


def test_what_one_trip_makes_again_is_made_again_as_compiled():
    """A loop of one trip is unrolled, and what is equal in a straight program is merged."""

    def scanned(weights, x):
        one = lambda y, w: (jnp.tanh(jnp.tanh(y @ w) @ w.T), None)  # noqa: E731
        return jax.grad(lambda weights: jnp.mean(jax.lax.scan(one, x, weights)[0] ** 2))(weights)

    args = jax.ShapeDtypeStruct((1, 64, 256), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    graph = build(trace(scanned, args).jaxpr)

    def dots(kept):
        text = jax.jit(apply(graph, Decisions({}, {}, kept), jax.make_mesh((1,), ("data",)))).lower(*args).compile().as_text()
        assert " while(" not in text
        return len(re.findall(r" dot\(", text))

    blocks = find_blocks(graph)
    assert dots(tuple(frozenset() for _ in blocks)) == dots(tuple(frozenset(b.residuals) for b in blocks)) + 2


def test_stacks_of_a_loop_are_of_what_was_brought_where_it_is_kept():
    """A weight is narrowed as it lies and cut further to be kept: pinned as it lay, the stack would be sent back in every trip."""

    def scanned(weights, x):
        def loss(weights):
            return jnp.mean(jax.lax.scan(lambda y, w: (jnp.tanh(y @ w.astype(jnp.bfloat16)), None), x, weights)[0] ** 2)

        return jax.grad(loss)(weights)

    args = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    graph = build(trace(scanned, args).jaxpr)
    narrowed = {n.outputs[0] for n in walk(graph) if n.prim == "convert_element_type" and graph.values[n.outputs[0]].shape == (64, 64)}
    splits = {0: (Trips(3, kept=frozenset(narrowed & {*find_blocks(graph)[0].made})), Trips(1))}
    before, after = ((), ("model",)), ((), ("data", "model"))
    decisions = Decisions(dict.fromkeys(narrowed, after), made=dict.fromkeys(narrowed, before), splits=splits)
    applied = jax.make_jaxpr(apply(graph, decisions, abstract_mesh((4, 2), ("data", "model")), "tpu"))(*args)
    pins = [eqn for eqn in applied.eqns if eqn.primitive.name == "sharding_constraint" and eqn.outvars[0].aval.dtype == jnp.bfloat16]
    stacks = [eqn.params["sharding"].spec for eqn in pins if eqn.outvars[0].aval.ndim == 3]
    assert stacks and all(spec == P(None, None, ("data", "model")) for spec in stacks)


@pytest.mark.parametrize(
    ("columns", "sharding", "part", "order"),
    [
        (4096, ((), ("model",)), (256, 2048), (0, 1)),
        (4096, (("data",), ("model",)), (64, 2048), (0, 1)),
        (4096 + 64, ((), ("model",)), (256, 2080), (1, 0)),  # a part's columns do not fill tiles, its rows do
        (4096 + 64, ((), ()), (256, 4160), (1, 0)),
        (4096 + 64, ((), None), (256, 4160), (1, 0)),  # not decided
    ],
)
def test_a_vocabularys_gradient_is_laid_out_as_its_parameter_is(columns, sharding, part, order):
    """XLA:TPU has arguments so that each device's part pads tiles least; in another order it copies the whole optimizer's state."""

    def head(w, x):
        return jax.grad(lambda w: jnp.sum(jax.nn.logsumexp(x @ w, axis=-1)))(w)

    args = jax.ShapeDtypeStruct((256, columns), jnp.float32), jax.ShapeDtypeStruct((64, 256), jnp.float32)
    graph = build(trace(head, args).jaxpr)
    (gradient,) = graph.outputs
    assert graph.values[gradient].producer.prim == "transpose"
    decisions = Decisions({} if None in sharding else {gradient: sharding}, {}, ())
    jaxpr = jax.make_jaxpr(apply(graph, decisions, abstract_mesh((4, 2), ("data", "model")), "tpu"))(*args)
    (mapped,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    (told,) = [eqn for eqn in mapped.params["jaxpr"].eqns if eqn.primitive.name == "layout_constraint"]
    assert told.outvars[0].aval.shape == part and told.params["layout"].major_to_minor == order
    assert "layout_constraint" not in str(jax.make_jaxpr(apply(graph, decisions, abstract_mesh((4, 2), ("data", "model")), "gpu"))(*args))


@pytest.mark.parametrize(("columns", "told"), [(192 * 8, (1, 0)), (128 * 8, None)])
def test_an_embeddings_gradient_is_laid_out_as_its_table_is(columns, told):
    """It is scattered into row by row; where a part's rows do not fill tiles the table lies the other way."""

    def looked_up(table, tokens):
        return jax.grad(lambda table: jnp.sum(jnp.sin(table[tokens])))(table)

    args = jax.ShapeDtypeStruct((1024, columns), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    graph = build(trace(looked_up, args).jaxpr)
    (gradient,) = graph.outputs
    decisions = Decisions({gradient: ((), ("data", "model"))}, {}, ())
    jaxpr = jax.make_jaxpr(apply(graph, decisions, abstract_mesh((4, 2), ("data", "model")), "tpu"))(*args)
    mapped = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    layouts = [
        e.params["layout"].major_to_minor for eqn in mapped for e in eqn.params["jaxpr"].eqns if e.primitive.name == "layout_constraint"
    ]
    assert layouts == [told] * (told is not None)
