"""The table of rules: primitive name -> function of an equation, checked and cached.

A rule is ``rule(eqn) -> OpRule``. A primitive without a rule is replicated; those *meant* to be replicated are listed in ``NO_RULE``, for
all others ``unknown_primitive_message`` is what the user should read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jaxauto import compat
from jaxauto.core import Kind, OpRule
from jaxauto.errors import JaxAutoError

Eqn = Any  # a jax.core.JaxprEqn
Var = Any  # an operand (variable or literal) or result of one: it has an aval
Rule = Callable[[Eqn], OpRule]
Dims = tuple[tuple[str, ...], ...]


def words(text: str) -> list[str]:
    """Names separated by blanks."""
    return text.split()


REDUCTIONS = frozenset({"sum", "max", "min", "prod", "and", "or"})

# Primitives that are replicated on purpose: host callbacks, decompositions whose every dimension depends on every other, tokens, and
# generators whose result depends on the device they run on.
NO_RULE = frozenset(
    words("""
    pure_callback io_callback debug_callback debug_print inspect_sharding buffer_callback
    eig schur hessenberg tridiagonal geqp3 ormqr
    random_gamma rng_bit_generator rng_uniform
    create_token after_all dce_sink empty2 platform_index axis_index dimension_size dim_as_value shape_assertion
    """)
)

# Params that do not change what a built-in rule says; jaxprs among them are traced anew for every equation and would defeat the cache.
_IGNORED_PARAMS = frozenset({"update_jaxpr", "update_consts", "sharding", "out_sharding", "name"})
_CACHE_LIMIT = 65536

_rules: dict[str, Rule] = {}
_user_rules: set[str] = set()
_cache: dict[Hashable, OpRule] = {}


def builtin_rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule of this package for each of ``names``."""

    def add(rule: Rule) -> Rule:
        for name in names:
            _rules[name] = rule
        return rule

    return add


def register_rule(name: str, *more_names: str) -> Callable[[Rule], Rule]:
    """Decorator: registers a rule for primitives of one's own; replaces any earlier rule of the same name.

    Args:
      name: the primitive's name, as a jaxpr prints it.
      *more_names: further primitives with the same rule.

    Returns:
      A decorator that returns the rule unchanged.
    """
    names = (name, *more_names)
    for each in names:
        if not isinstance(each, str):
            raise JaxAutoError(f'register_rule takes primitive names, got {each!r}: write @jaxauto.register_rule("my_primitive")')

    def add(rule: Rule) -> Rule:
        builtin_rule(*names)(rule)
        _user_rules.update(names)
        _cache.clear()
        return rule

    return add


def has_rule(name: str) -> bool:
    """Whether the primitive is known: it has a rule, or is replicated on purpose (``NO_RULE``)."""
    return name in _rules or name in NO_RULE


def unknown_primitive_message(name: str, source: str = "") -> str:
    """What to tell the user, once, about a primitive without a rule."""
    where = f" ({source})" if source else ""
    return (
        f"primitive {name!r}{where} has no sharding rule: its operands and results are replicated on every device there. "
        f'To shard it, register a rule: @jaxauto.register_rule("{name}") def rule(eqn): return jaxauto.OpRule("b i, i j -> b j")'
    )


def rule_for(eqn: Eqn) -> OpRule:
    """The rule of one equation, checked against its shapes.

    Args:
      eqn: a ``jax.core.JaxprEqn``.

    Returns:
      Its rule; for a primitive without one, every dimension whole and ``Kind.OPAQUE``.

    Raises:
      JaxAutoError: the registered rule does not fit the equation (names primitive, spec and shapes).
    """
    key = signature(eqn)
    if key is not None and key in _cache:
        return _cache[key]
    rule = _evaluate(eqn)
    if key is not None:
        if len(_cache) >= _CACHE_LIMIT:
            _cache.clear()
        _cache[key] = rule
    return rule


def _evaluate(eqn: Eqn) -> OpRule:
    name = eqn.primitive.name
    function = _rules.get(name)
    if function is None:
        return replicated(eqn)
    try:
        rule = function(eqn)
    except JaxAutoError:
        raise
    except Exception as error:
        raise JaxAutoError(f"the rule of primitive {name!r} failed on {_shapes_text(eqn)}: {type(error).__name__}: {error}") from error
    if not isinstance(rule, OpRule):
        raise JaxAutoError(f"the rule of primitive {name!r} returned {rule!r}; it must return a jaxauto.OpRule")
    factor_sizes(rule, eqn)
    return rule


def signature(eqn: Eqn) -> Hashable | None:
    """A key that equal equations share: primitive, shapes, dtypes, params. None where a param cannot be hashed."""
    name = eqn.primitive.name
    ignored = frozenset() if name in _user_rules else _IGNORED_PARAMS
    params = tuple((k, eqn.params[k]) for k in sorted(eqn.params) if k not in ignored)
    key = (name, tuple(map(_aval_key, eqn.invars)), tuple(map(_aval_key, eqn.outvars)), params)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _aval_key(var: Var) -> tuple:
    return shape_of(var), compat.dtype_name(getattr(var.aval, "dtype", var.aval))


def shape_of(var: Var) -> tuple[int, ...]:
    """The shape of an equation's operand or result; ``()`` for tokens and other things without one."""
    return tuple(getattr(var.aval, "shape", ()))


def replicated(eqn: Eqn) -> OpRule:
    """Every dimension of every operand and result whole."""
    sides = [", ".join(" ".join("_" * len(shape_of(v))) for v in side) for side in (eqn.invars, eqn.outvars)]
    return OpRule(" -> ".join(sides), kind=Kind.OPAQUE)


# ------------------------------------------------------------------------------------------------------------ checking


def factor_sizes(rule: OpRule, eqn: Eqn) -> dict[str, int]:
    """The size of each factor of ``rule`` on this equation.

    A halo factor can have different sizes in operand and result (stride, valid padding): its size is their greatest common divisor, so that
    what divides it divides both.

    Raises:
      JaxAutoError: the rule does not fit the equation.
    """
    sizes: dict[str, int] = dict(rule.sizes)
    grouped: list[tuple[tuple[str, ...], int]] = []
    for dims, var in _checked_values(rule, eqn):
        named = [f for dim in dims for f in dim]
        if len(set(named)) != len(named):
            raise _misfit(rule, eqn, f"a factor occurs twice in one value: {' '.join(named)}")
        for dim, size in zip(dims, shape_of(var), strict=True):
            if len(dim) == 1:
                _agree(rule, eqn, sizes, dim[0], size)
            elif dim:
                grouped.append((dim, size))
    for dim, size in grouped:
        unknown = [f for f in dim if f not in sizes]
        if unknown:
            raise _misfit(rule, eqn, f"the sizes of {unknown} in ({' '.join(dim)}) are not given: add sizes={{{unknown[0]!r}: …}}")
        if math.prod(sizes[f] for f in dim) != size:
            raise _misfit(rule, eqn, f"({' '.join(dim)}) is {' × '.join(str(sizes[f]) for f in dim)}, but the dimension has size {size}")
    _check_annotations(rule, eqn, sizes)
    return sizes


def _checked_values(rule: OpRule, eqn: Eqn):
    try:
        operands, results = rule.operands, rule.results
    except ValueError as error:
        raise JaxAutoError(f"the rule of primitive {eqn.primitive.name!r} cannot be read: {error}") from error
    return [*_paired(rule, eqn, "operand", operands, eqn.invars), *_paired(rule, eqn, "result", results, eqn.outvars)]


def _paired(rule: OpRule, eqn: Eqn, what: str, values: tuple[Dims, ...], variables: Sequence[Var]) -> list[tuple[Dims, Any]]:
    if not variables and values == ((),):  # an empty side reads as one scalar
        return []
    if len(values) != len(variables):
        raise _misfit(rule, eqn, f"it has {len(values)} {what}s, the equation has {len(variables)}")
    for index, (dims, var) in enumerate(zip(values, variables, strict=True)):
        if len(dims) != len(shape_of(var)):
            raise _misfit(rule, eqn, f"{what} {index} has {len(dims)} dimensions in the rule and {len(shape_of(var))} in the equation")
    return list(zip(values, variables, strict=True))


def _agree(rule: OpRule, eqn: Eqn, sizes: dict[str, int], factor: str, size: int) -> None:
    known = sizes.setdefault(factor, size)
    if known == size:
        return
    if factor not in rule.halo:
        raise _misfit(rule, eqn, f"factor {factor!r} has size {known} in one place and {size} in another")
    sizes[factor] = math.gcd(known, size)


def _check_annotations(rule: OpRule, eqn: Eqn, sizes: dict[str, int]) -> None:
    for what, names in (("whole", rule.whole), ("halo", rule.halo), ("reduce", rule.reduce), ("sizes", rule.sizes)):
        for name in names:
            if name not in sizes or (what == "sizes" and not _occurs(rule, name)):
                raise _misfit(rule, eqn, f"{what} names factor {name!r}, which the spec does not have")
    for factor, how in rule.reduce.items():
        if how not in REDUCTIONS:
            raise _misfit(rule, eqn, f"factor {factor!r} is reduced by {how!r}; it can be one of {', '.join(sorted(REDUCTIONS))}")
        if any(factor in dim for value in rule.results for dim in value):
            raise _misfit(rule, eqn, f"factor {factor!r} is said to be reduced but a result has it")


def _occurs(rule: OpRule, factor: str) -> bool:
    return any(factor in dim for value in (*rule.operands, *rule.results) for dim in value)


def _misfit(rule: OpRule, eqn: Eqn, reason: str) -> JaxAutoError:
    return JaxAutoError(f"the rule {rule.spec!r} of primitive {eqn.primitive.name!r} does not fit {_shapes_text(eqn)}: {reason}")


def _shapes_text(eqn: Eqn) -> str:
    sides = [", ".join(str(v.aval) for v in side) for side in (eqn.invars, eqn.outvars)]
    return " -> ".join(sides)
