"""Every line of the table: the expected spec, and every factor that the rule lets shard, sharded."""

from __future__ import annotations

import pytest

from jaxauto.rules import factor_sizes, has_rule, rule_for

from .harness import Row, check_row, find_equation
from .table import ROWS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_spec_and_every_free_factor(row: Row):
    equation = find_equation(row)
    assert has_rule(row.primitive)
    rule = rule_for(equation.eqn)
    assert rule.spec == row.spec
    check_row(row, equation, rule, factor_sizes(rule, equation.eqn))
