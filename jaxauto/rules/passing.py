"""Primitives that hand their operands on: operand i is result i, whatever its shape."""

from __future__ import annotations

from functools import partial

from jaxauto.core import Kind, OpRule
from jaxauto.rules.build import build, names
from jaxauto.rules.registry import Eqn, builtin_rule, shape_of, words

VIEWS = words("""
    stage optimization_barrier sharding_constraint layout_constraint reshard relayout with_memory_space_constraint device_put stop_gradient
    name pvary xla_metadata_value
""")


def identity(eqn: Eqn, kind: Kind) -> OpRule:
    """Each operand is the result of the same position; the operands have nothing to do with each other."""
    values = [names(len(shape_of(v)), prefix=f"a{i}_") for i, v in enumerate(eqn.outvars)]
    return build(eqn, values, values, kind=kind, flops=0.0, bytes_=0.0 if kind is Kind.VIEW else None)


for _name in VIEWS:
    builtin_rule(_name)(partial(identity, kind=Kind.VIEW))
builtin_rule("copy")(partial(identity, kind=Kind.MOVE))


@builtin_rule("tie")
def tie(eqn: Eqn) -> OpRule:
    """The second operand, once the first is there."""
    first, second = (names(len(shape_of(v)), prefix=p) for v, p in zip(eqn.invars, "ab", strict=True))
    return build(eqn, [[None] * len(first), second], [second], kind=Kind.VIEW, flops=0.0, bytes_=0.0)


@builtin_rule("shard_alike")
def shard_alike(eqn: Eqn) -> OpRule:
    """Two operands handed on, which must be sharded the same way."""
    factors = names(len(shape_of(eqn.invars[0])))
    return build(eqn, [factors] * 2, [factors] * 2, kind=Kind.VIEW, flops=0.0, bytes_=0.0)
