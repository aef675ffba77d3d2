"""Decompositions: matrices are whole, batch dimensions pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxauto.core import Kind, OpRule
from jaxauto.rules.build import Dim, build, elements, names
from jaxauto.rules.registry import Eqn, Var, builtin_rule, shape_of

# Leading terms of Golub & Van Loan, "Matrix Computations" (4th ed.), for one m × n matrix.
FLOPS: dict[str, Callable[[int, int], float]] = {
    "cholesky": lambda _, n: n**3 / 3,
    "cholesky_update": lambda _, n: 2.0 * n * n,
    "lu": lambda m, n: 2.0 * m * n * n / 3,
    "geqrf": lambda m, n: 2.0 * m * n * n,
    "qr": lambda m, n: 4.0 * m * n * n,
    "householder_product": lambda m, n: 2.0 * m * n * n,
    "eigh": lambda _, n: 9.0 * n**3,
    "svd": lambda m, n: 20.0 * m * n * n,
    "triangular_solve": lambda m, n: 1.0 * m * n * n,
    "symmetric_product": lambda m, n: 1.0 * m * n * n,
}


def batched(eqn: Eqn, trailing: int) -> OpRule:
    """Dimensions before the last ``trailing`` of the first operand are batch dimensions of every value; all others are whole."""
    shape = shape_of(eqn.invars[0])
    batch = shape[: len(shape) - trailing]
    factors = names(len(batch))

    def dims(var: Var) -> list[Dim]:
        own = shape_of(var)
        if own[: len(batch)] != batch:
            return [None] * len(own)
        return [*factors, *[None] * (len(own) - len(batch))]

    count = FLOPS.get(eqn.primitive.name)
    matrices = elements(eqn.invars[0]) // max(1, shape[-1] * shape[-2]) if trailing == 2 else 0
    flops = matrices * count(shape[-2], shape[-1]) if count else None
    return build(eqn, [dims(v) for v in eqn.invars], [dims(v) for v in eqn.outvars], kind=Kind.OPAQUE, flops=flops)


builtin_rule(*FLOPS)(partial(batched, trailing=2))
builtin_rule("lu_pivots_to_permutation", "tridiagonal_solve")(partial(batched, trailing=1))
