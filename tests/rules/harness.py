"""Runs one equation of a small function under the sharding that its rule promises to be free, and reads what the compiler made of it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxauto.core import Kind, OpRule

AXES = {"x": 4, "y": 2}
COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\(")


def ints(*shape: int, low: int = -3, high: int = 4, dtype=np.float32) -> np.ndarray:
    """Whole numbers that depend on the shape only."""
    return np.random.default_rng(sum(shape) + len(shape)).integers(low, high, shape).astype(dtype)


def unit(*shape: int) -> np.ndarray:
    """Numbers strictly between 0 and 1."""
    return np.random.default_rng(sum(shape)).uniform(0.1, 0.9, shape).astype(np.float32)


def distinct(*shape: int) -> np.ndarray:
    """Every number once, shuffled."""
    return np.random.default_rng(len(shape)).permutation(int(np.prod(shape))).reshape(shape).astype(np.float32)


@dataclass(frozen=True)
class Row:
    """One line of the table: a function in whose jaxpr ``primitive`` occurs (the ``index``-th time), and the rule's expected spec."""

    primitive: str
    function: Callable
    args: tuple
    spec: str
    index: int = 0
    label: str = ""
    cpu_adds: frozenset[str] = frozenset()  # collectives that a CPU compiler may add of its own, depending on its version
    rtol: float = 2e-6  # of transcendentals only

    @property
    def id(self) -> str:
        return f"{self.primitive}-{self.label}" if self.label else self.primitive


@dataclass(frozen=True)
class Equation:
    """An equation with the values that its operands have in the row's function."""

    eqn: object
    values: tuple

    def evaluate(self, *values):
        """The equation as a function of its operands; always a list of results."""
        primitive = self.eqn.primitive
        out = primitive.bind(*values, **self.eqn.params)
        return list(out) if primitive.multiple_results else [out]


def find_equation(row: Row) -> Equation:
    """Evaluates the row's function up to the equation that the row is about."""
    closed = jax.make_jaxpr(row.function)(*row.args)
    found = (e for e in _equations(closed, jax.tree.leaves(row.args), []) if e.eqn.primitive.name == row.primitive)
    equation = next(itertools.islice(found, row.index, None), None)
    assert equation is not None, f"{row.primitive} occurs less than {row.index + 1} times in\n{closed}"
    return equation


def _equations(closed, args, results: list) -> Iterator[Equation]:
    jaxpr = closed.jaxpr
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(atom):
        return atom.val if hasattr(atom, "val") else env[atom]

    for eqn in jaxpr.eqns:
        equation = Equation(eqn, tuple(map(read, eqn.invars)))
        inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        if eqn.primitive.name in {"jit", "pjit", "custom_jvp_call", "custom_vjp_call"}:
            out: list = []
            yield from _equations(inner, equation.values, out)
        else:
            yield equation
            out = equation.evaluate(*equation.values)
        env.update(zip(eqn.outvars, out, strict=True))
    results.extend(map(read, jaxpr.outvars))


def assignments(rule: OpRule, sizes: dict[str, int]) -> list[dict[str, str]]:
    """Which factors to put on which mesh axis, one run each.

    Reduced and halo factors alone; free ones two at a time; the minor factor of a dimension together with a major one that fills its axis.
    """
    dims = [dim for value in (*rule.operands, *rule.results) for dim in value if dim]
    factors = sorted({f for dim in dims for f in dim} - set(rule.whole))
    minor = {f: dim[:-1] for dim in dims for i, f in enumerate(dim) if i for dim in [dim[: i + 1]]}
    leading = [f for f in factors if f not in minor and sizes[f] % AXES["x"] == 0]
    runs = [{f: "x"} for f in leading if role(rule, f) != "free"]
    free = [f for f in leading if role(rule, f) == "free"]
    runs += [dict(zip(free[i : i + 2], AXES, strict=False)) for i in range(0, len(free), 2)]
    for factor, majors in minor.items():
        if factor in factors and len(majors) == 1 and sizes[majors[0]] == AXES["x"] and sizes[factor] % AXES["y"] == 0:
            runs.append({majors[0]: "x", factor: "y"})
    return runs


def role(rule: OpRule, factor: str) -> str:
    """``"free"``, ``"halo"``, ``"reduced"`` or ``"reduced halo"``: which collectives may occur."""
    passing = any(factor in dim for value in rule.results for dim in value)
    if factor in rule.halo:
        return "halo" if passing else "reduced halo"
    return "free" if passing else "reduced"


ALLOWED = {
    "free": [set()],
    "halo": [set(), {"collective-permute"}],
    "reduced": [{"all-reduce"}, {"reduce-scatter"}],
    "reduced halo": [{"all-reduce"}, {"all-reduce", "collective-permute"}],
}


def check_row(row: Row, equation: Equation, rule: OpRule, sizes: dict[str, int]) -> None:
    """Compiles the equation under each assignment: results must be those of one device, collectives those of the factors' roles."""
    runs = assignments(rule, sizes)
    if not runs:
        return
    expected = [_plain(value) for value in equation.evaluate(*equation.values)]
    for axes in runs:
        got, collectives = _sharded_run(equation, rule, axes)
        roles = sorted(role(rule, f) for f in axes)
        what = f"{row.id}: {rule.spec!r} with {axes} ({roles[-1]})"
        assert collectives - row.cpu_adds in ALLOWED[roles[-1]], f"{what}: the compiler needs {sorted(collectives)}"
        for value, want in zip(got, expected, strict=True):
            if rule.kind is Kind.EXPENSIVE:  # vectorised and scalar remainder code of one transcendental differ in the last bits
                np.testing.assert_allclose(value, want, rtol=row.rtol, err_msg=what)
            else:
                np.testing.assert_array_equal(value, want, err_msg=what)


def _sharded_run(equation: Equation, rule: OpRule, axes: dict[str, str]) -> tuple[list[np.ndarray], set[str]]:
    used = {axis: size for axis, size in AXES.items() if axis in axes.values()}
    mesh = Mesh(np.array(jax.devices()[: math.prod(used.values())]).reshape(tuple(used.values())), tuple(used))

    def sharding(dims):
        return NamedSharding(mesh, PartitionSpec(*(tuple(axes[f] for f in dim if f in axes) or None for dim in dims)))

    operands = tuple(map(sharding, rule.operands if equation.eqn.invars else ()))
    step = jax.jit(equation.evaluate, in_shardings=operands, out_shardings=list(map(sharding, rule.results)))
    values = [jax.device_put(v, s) for v, s in zip(equation.values, operands, strict=True)]
    compiled = step.lower(*values).compile()
    return [_plain(value) for value in compiled(*values)], set(COLLECTIVE.findall(compiled.as_text()))


def _plain(value) -> np.ndarray:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)
