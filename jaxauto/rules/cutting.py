"""Primitives that cut or join dimensions: untouched dimensions pass, the cut one is whole."""

from __future__ import annotations

from collections.abc import Collection

from jaxauto.core import Kind, OpRule
from jaxauto.rules.build import Dim, array_bytes, build, names
from jaxauto.rules.registry import Eqn, builtin_rule, shape_of


def _except(factors: list[str], cut: Collection[int]) -> list[Dim]:
    return [None if i in cut else f for i, f in enumerate(factors)]


@builtin_rule("slice", "dynamic_slice")
def slice_(eqn: Eqn) -> OpRule:
    """Dimensions that come out as long as they went in pass. Touches what it takes out, twice."""
    shape, taken = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    dims = _except(names(len(shape)), [i for i, (n, m) in enumerate(zip(shape, taken, strict=True)) if n != m])
    starts = [()] * (len(eqn.invars) - 1)
    return build(eqn, [dims, *starts], [dims], kind=Kind.MOVE, flops=0.0, bytes_=2 * array_bytes(eqn.outvars[0]))


@builtin_rule("dynamic_update_slice")
def dynamic_update_slice(eqn: Eqn) -> OpRule:
    """Dimensions that the update fills pass, and so do those where it has size 1 (only the owner of that index writes).

    In place: touches the update, twice.
    """
    shape, update = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    factors = names(len(shape))
    into = [f if m in (n, 1) else None for f, n, m in zip(factors, shape, update, strict=True)]
    starts = [()] * (len(eqn.invars) - 2)
    return build(eqn, [into, into, *starts], [into], kind=Kind.MOVE, flops=0.0, bytes_=2 * array_bytes(eqn.invars[1]))


@builtin_rule("pad")
def pad(eqn: Eqn) -> OpRule:
    """Dimensions without padding pass."""
    touched = [i for i, config in enumerate(eqn.params["padding_config"]) if any(config)]
    dims = _except(names(len(shape_of(eqn.invars[0]))), touched)
    return build(eqn, [dims, ()], [dims], kind=Kind.MOVE, flops=0.0)


@builtin_rule("rev")
def rev(eqn: Eqn) -> OpRule:
    """Dimensions that are not reversed pass."""
    dims = _except(names(len(shape_of(eqn.invars[0]))), eqn.params["dimensions"])
    return build(eqn, [dims], [dims], kind=Kind.MOVE, flops=0.0)


@builtin_rule("concatenate")
def concatenate(eqn: Eqn) -> OpRule:
    """All dimensions but the joined one pass."""
    dims = _except(names(len(shape_of(eqn.outvars[0]))), [eqn.params["dimension"]])
    return build(eqn, [dims] * len(eqn.invars), [dims], kind=Kind.MOVE, flops=0.0)


@builtin_rule("split")
def split(eqn: Eqn) -> OpRule:
    """All dimensions but the split one pass."""
    dims = _except(names(len(shape_of(eqn.invars[0]))), [eqn.params["axis"]])
    return build(eqn, [dims], [dims] * len(eqn.outvars), kind=Kind.MOVE, flops=0.0)


@builtin_rule("stack")
def stack(eqn: Eqn) -> OpRule:
    """The new dimension is whole."""
    factors = names(len(shape_of(eqn.invars[0])))
    result: list[Dim] = [*factors]
    result.insert(eqn.params["axis"], None)
    return build(eqn, [factors] * len(eqn.invars), [result], kind=Kind.MOVE, flops=0.0)


@builtin_rule("unstack")
def unstack(eqn: Eqn) -> OpRule:
    """The dimension that is taken apart is whole."""
    factors = names(len(shape_of(eqn.outvars[0])))
    operand: list[Dim] = [*factors]
    operand.insert(eqn.params["axis"], None)
    return build(eqn, [operand], [factors] * len(eqn.outvars), kind=Kind.MOVE, flops=0.0)
