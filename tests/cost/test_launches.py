"""How many kernels a GPU starts for a program."""

import jax
import jax.numpy as jnp
import pytest

from jaxauto.core import OPERATIONS
from jaxauto.cost.fusion import find_buffers
from jaxauto.cost.launches import kernels
from jaxauto.graph import build, multiplicity, walk
from jaxauto.rules import rule_for

N = 64
X = jax.ShapeDtypeStruct((N, N), jnp.float32)
TRIPS = 5


def count(fun, *args):
    graph = build(jax.make_jaxpr(fun)(*args))
    rules = {node.id: rule_for(node.eqn) for node in walk(graph) if not node.bodies}
    operations = [node.id for node in walk(graph) if not node.bodies and rules[node.id].kind in OPERATIONS]
    runs = multiplicity(graph)
    found = kernels(graph, find_buffers(graph, rules, platform="gpu"), operations)
    return sum(n * runs[i] for i, n in found.items())


def scanned(read):
    """A scan whose body is one product with its carry, and ``read`` of its slice."""
    return lambda x, w: jax.lax.scan(lambda x, w: (read(x, w), None), x, w)[0]


STACK = jax.ShapeDtypeStruct((TRIPS, N, N), jnp.float32)
HALF = jax.ShapeDtypeStruct((TRIPS, N, N), jnp.bfloat16)
PROGRAMS = {
    "elementwise equations are one": (lambda x: jnp.exp(jnp.sin(x) * 2) + x, (X,), 1),
    "a dot is one": (lambda x: x @ x, (X,), 1),
    "what follows it is one more": (lambda x: jnp.tanh(x @ x) + 1, (X,), 2),
    "each result is one": (lambda x: (jnp.tanh(x @ x), jnp.sin((x @ x) @ x)), (X,), 5),
    "a slice that a dot reads is copied": (scanned(lambda x, w: x @ w), (X, STACK), 2 * TRIPS),
    "one that is converted for it too": (scanned(lambda x, w: x @ w.astype(x.dtype).T), (X, HALF), 3 * TRIPS),
    "one that elementwise equations read is not": (scanned(lambda x, w: jnp.sin(x) + w), (X, STACK), TRIPS),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels(name):
    fun, args, expected = PROGRAMS[name]
    assert count(fun, *args) == expected
