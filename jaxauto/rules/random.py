"""Random numbers. With ``jax_threefry_partitionable`` (the default) any device can make any part of the result from the key."""

from __future__ import annotations

from functools import partial

from jaxauto.core import Kind, OpRule
from jaxauto.rules.build import Dim, build, names
from jaxauto.rules.elementwise import pointwise
from jaxauto.rules.registry import Eqn, Var, builtin_rule, shape_of


@builtin_rule("random_bits", "random_split")
def from_keys(eqn: Eqn) -> OpRule:
    """Keys of shape K give a result of shape K + shape: the key's dimensions pass, the others are created."""
    factors = names(len(shape_of(eqn.outvars[0])))
    keys = factors[: len(shape_of(eqn.invars[0]))]
    return build(eqn, [keys], [factors], kind=Kind.RANDOM)


@builtin_rule("random_wrap", "random_unwrap", "to_edtype", "from_edtype")
def key_data(eqn: Eqn) -> OpRule:
    """Between keys and the integers they are made of, which are one trailing dimension that stays whole."""
    shared = min(len(shape_of(eqn.invars[0])), len(shape_of(eqn.outvars[0])))
    factors: list[Dim] = [*names(shared)]

    def dims(var: Var) -> list[Dim]:
        return factors + [None] * (len(shape_of(var)) - shared)

    return build(eqn, [dims(eqn.invars[0])], [dims(eqn.outvars[0])], kind=Kind.VIEW, flops=0.0)


for _name in ("random_seed", "random_fold_in", "random_clone", "threefry2x32", "threefry4x32", "philox2x32", "philox4x32"):
    builtin_rule(_name)(partial(pointwise, kind=Kind.RANDOM))
