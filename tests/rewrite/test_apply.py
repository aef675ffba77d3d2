"""Decisions as pins: every array where it was decided, and nowhere else."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxauto.aot import abstract_mesh
from jaxauto.blocks import find_blocks
from jaxauto.core import Decisions
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
