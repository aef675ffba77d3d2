"""Which dimensions of operands and results are the same, by the factors of a rule."""

from __future__ import annotations

from jaxauto.core import OpRule
from jaxauto.rules.registry import Dims, Eqn, factor_sizes


def positions(spec: Dims) -> list[tuple[int, str]]:
    """(dimension, its major factor): only the major factor of a product can be split into contiguous blocks."""
    return [(d, factors[0]) for d, factors in enumerate(spec) if factors]


def majors(spec: Dims) -> set[str]:
    """The major factors of all dimensions."""
    return {factor for _, factor in positions(spec)}


def aligned(rule: OpRule, operand: Dims, result: Dims) -> list[tuple[int, int]]:
    """(dimension of the operand, dimension of the result) that pass, those of whole factors excepted."""
    there = {f: d for d, f in positions(result)}
    return [(d, there[f]) for d, f in positions(operand) if f in there and f not in rule.whole]


def shardable_factors(rule: OpRule, eqn: Eqn) -> dict[str, int]:
    """Factors that may be split, with the size that mesh axes must divide: only majors of products, nothing that is whole."""
    closed = {f for spec in (*rule.operands, *rule.results) for factors in spec for f in factors[1:]} | set(rule.whole)
    return {f: n for f, n in factor_sizes(rule, eqn).items() if f not in closed and n > 1}
