"""Looking rules up: defaults, rules of the user's own, the text of every error, the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxauto.core import Kind, OpRule
from jaxauto.errors import JaxAutoError
from jaxauto.rules import NO_RULE, factor_sizes, has_rule, register_rule, registry, rule_for, signature, unknown_primitive_message

# Bodies of control flow belong to the graph; the rest only occurs inside shard_map.
ELSEWHERE = frozenset(
    registry.words("""
    scan while cond custom_linear_solve
    all_gather all_to_all axis_index pbroadcast pmax pmin ppermute psum psum_scatter ragged_all_to_all reduce_scatter pvary preduced
    """)
)


@pytest.fixture
def restored_rules(monkeypatch):
    """Rules registered in a test are gone after it."""
    for table in ("_rules", "_cache"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    monkeypatch.setattr(registry, "_user_rules", set(registry._user_rules))


def equation(function, *args):
    """The first equation of the function's jaxpr."""
    return jax.make_jaxpr(function)(*args).eqns[0]


def add_equation():
    return equation(jnp.add, np.ones((4, 8), np.float32), np.ones((4, 8), np.float32))


class Unknown:
    """An equation of a primitive that nobody knows, with the shapes of another."""

    def __init__(self, eqn):
        self.invars, self.outvars, self.params = eqn.invars, eqn.outvars, eqn.params
        self.primitive = type("Primitive", (), {"name": "mystery"})


def test_every_primitive_of_lax_is_known():
    names = {p.name for p in vars(lax).values() if hasattr(p, "bind") and hasattr(p, "name")}
    assert len(names) > 100
    assert sorted(n for n in names if not has_rule(n) and n not in ELSEWHERE) == []


def test_unknown_primitive_is_replicated():
    eqn = Unknown(add_equation())
    assert not has_rule("mystery")
    rule = rule_for(eqn)
    assert rule.spec == "_ _, _ _ -> _ _"
    assert rule.kind is Kind.OPAQUE
    assert factor_sizes(rule, eqn) == {}


def test_unknown_primitive_message():
    assert unknown_primitive_message("mystery", "model.py:12 (layer)") == (
        "primitive 'mystery' (model.py:12 (layer)) has no sharding rule: its operands and results are replicated on every device there. "
        'To shard it, register a rule: @jaxauto.register_rule("mystery") def rule(eqn): return jaxauto.OpRule("b i, i j -> b j")'
    )


def test_replicated_on_purpose_is_known():
    assert "pure_callback" in NO_RULE
    assert has_rule("pure_callback")
    eqn = equation(lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((4,), np.float32), x), np.ones(4, np.float32))
    assert rule_for(eqn).spec == "_ -> _"


def test_rule_of_the_user(restored_rules):
    eqn = Unknown(add_equation())
    rule_for(eqn)

    @register_rule("mystery", "riddle")
    def rule(eqn):
        return OpRule("i k, i k -> i k", kind=Kind.CHEAP, flops=7.0)

    assert has_rule("mystery")
    assert has_rule("riddle")
    assert rule_for(eqn).flops == 7.0
    register_rule("mystery")(lambda eqn: OpRule("i _, i _ -> i _"))
    assert rule_for(eqn).spec == "i _, i _ -> i _"


def test_register_rule_wants_a_name():
    with pytest.raises(JaxAutoError, match=r'takes primitive names, got <function.*write @jaxauto.register_rule\("my_primitive"\)'):
        register_rule(lambda eqn: None)


SHAPES = "float32[4,8], float32[4,8] -> float32[4,8]"
MISFITS = [
    (OpRule("a b -> a b"), "it has 1 operands, the equation has 2"),
    (OpRule("a b, a b -> a b, a"), "it has 2 results, the equation has 1"),
    (OpRule("a b, a -> a b"), "operand 1 has 1 dimensions in the rule and 2 in the equation"),
    (OpRule("a b, b a -> a b"), "factor 'b' has size 8 in one place and 4 in another"),
    (OpRule("a a, a b -> a b"), "a factor occurs twice in one value: a a"),
    (OpRule("a (b c), a _ -> a _"), "the sizes of ['b', 'c'] in (b c) are not given: add sizes={'b': …}"),
    (OpRule("a (b c), a _ -> a _", sizes={"b": 2, "c": 3}), "(b c) is 2 × 3, but the dimension has size 8"),
    (OpRule("a b, a b -> a b", sizes={"z": 3}), "sizes names factor 'z', which the spec does not have"),
    (OpRule("a b, a b -> a b", whole=("z",)), "whole names factor 'z', which the spec does not have"),
    (OpRule("a b, a b -> a b", halo={"z": 1}), "halo names factor 'z', which the spec does not have"),
    (OpRule("a b, a b -> a _", reduce={"b": "mean"}), "factor 'b' is reduced by 'mean'; it can be one of and, max, min, or, prod, sum"),
    (OpRule("a b, a b -> a b", reduce={"b": "sum"}), "factor 'b' is said to be reduced but a result has it"),
]


@pytest.mark.parametrize(("rule", "reason"), MISFITS, ids=lambda value: value.spec if isinstance(value, OpRule) else "")
def test_rules_that_do_not_fit(restored_rules, rule, reason):
    register_rule("mystery")(lambda eqn: rule)
    with pytest.raises(JaxAutoError) as error:
        rule_for(Unknown(add_equation()))
    assert str(error.value) == f"the rule {rule.spec!r} of primitive 'mystery' does not fit {SHAPES}: {reason}"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("a b, a b", "rule 'a b, a b' has no '->' between operands and results"),
        ("a (b, a b -> a b", "unbalanced '(' in rule part 'a (b'"),
        ("a b), a b -> a b", "unbalanced ')' in rule part 'a b)'"),
    ],
)
def test_specs_that_cannot_be_read(restored_rules, spec, reason):
    register_rule("mystery")(lambda eqn: OpRule(spec))
    with pytest.raises(JaxAutoError) as error:
        rule_for(Unknown(add_equation()))
    assert str(error.value) == f"the rule of primitive 'mystery' cannot be read: {reason}"


def test_rules_that_fail(restored_rules):
    register_rule("mystery")(lambda eqn: eqn.params["axis"])
    with pytest.raises(JaxAutoError, match=r"the rule of primitive 'mystery' failed on float32\[4,8\].*: KeyError: 'axis'"):
        rule_for(Unknown(add_equation()))
    register_rule("mystery")(lambda eqn: "a b -> a b")
    with pytest.raises(JaxAutoError, match=r"returned 'a b -> a b'; it must return a jaxauto.OpRule"):
        rule_for(Unknown(add_equation()))


def test_factor_sizes():
    eqn = equation(lambda x: x.reshape(2, 16), np.ones((4, 8), np.float32))
    assert factor_sizes(rule_for(eqn), eqn) == {"a": 2, "b": 2, "c": 8}
    pool = equation(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (4,), (4,), "VALID"), np.ones(48, np.float32))
    assert factor_sizes(rule_for(pool), pool) == {"a": 12}  # 48 before, 12 after


def test_equal_equations_share_one_rule(restored_rules):
    calls = []
    register_rule("mystery")(lambda eqn: calls.append(eqn) or OpRule("a b, a b -> a b"))
    first, second = Unknown(add_equation()), Unknown(add_equation())
    assert signature(first) == signature(second)
    assert rule_for(first) is rule_for(second)
    assert len(calls) == 1
    second.params = {"axis": 1}
    assert signature(first) != signature(second)
    second.params = {"axis": [1]}  # cannot be hashed: no cache, but a rule
    assert signature(second) is None
    assert rule_for(second).spec == "a b, a b -> a b"


def test_scatters_share_one_rule():
    """Their params hold a jaxpr that is traced anew for each of them."""

    def scatter():
        return jax.make_jaxpr(lambda x: x.at[jnp.arange(2)].add(1.0))(np.ones((4, 8), np.float32)).eqns[-1]

    assert scatter().primitive.name == "scatter-add"
    assert rule_for(scatter()) is rule_for(scatter())
