"""Small random programs and train steps, few enough in their shardings to enumerate them all; and random Problems."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxauto.solve.problem import RESOURCES, MemoryRow, Problem

MESHES = ({"a": 4}, {"a": 8}, {"a": 2, "b": 2}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2})
TARGETS = ("v5p:2x2x2", "v5e:2x4", "cpu:8", "h100:8", "tpu7x:2x2x1")


@dataclass(frozen=True)
class Drawn:
    """A step with abstract arguments; ``kind``: which of ``KINDS``."""

    kind: str
    step: Callable
    args: tuple


def struct(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _size(rng: np.random.Generator) -> int:
    """Mostly a few powers of two times an odd number: few axes fit, and the arrays are large enough for bytes to count."""
    return int(rng.choice([1, 2, 4, 8], p=[0.2, 0.35, 0.25, 0.2]) * rng.choice([1, 3, 17, 129, 257]) * rng.choice([1, 5]))


def _chain(rng: np.random.Generator) -> tuple[Callable, tuple]:
    """One array after another: dots, elementwise, softmax, transposes, sums."""
    sizes = [_size(rng) for _ in range(5)]
    names = list(rng.choice(["dot", "dot", "tanh", "softmax", "transpose", "scale", "cumsum"], int(rng.integers(2, 6))))
    weights, width = [], sizes[1]
    rows = sizes[0]
    for k, name in enumerate(names):
        if name == "dot":
            weights.append(struct(width, sizes[2 + k % 3]))
            width = sizes[2 + k % 3]
        elif name == "transpose":
            rows, width = width, rows
    total = bool(rng.integers(2))

    def step(x, weights):
        rest = iter(weights)
        for name in names:
            x = STEPS_OF_ONE[name](x, rest)
        return jnp.sum(x, 0) if total else x

    return step, (struct(sizes[0], sizes[1]), weights)


STEPS_OF_ONE: dict[str, Callable] = {
    "dot": lambda x, rest: x @ next(rest),
    "tanh": lambda x, rest: jnp.tanh(x),
    "softmax": lambda x, rest: jax.nn.softmax(x),
    "transpose": lambda x, rest: x.T,
    "scale": lambda x, rest: x * 2.0 + 1.0,
    "cumsum": lambda x, rest: jnp.cumsum(x, 1),
}


def _graph(rng: np.random.Generator) -> tuple[Callable, tuple]:
    """A directed graph over square-ish arrays: sums, products of two, concatenations, reductions that are broadcast back."""
    rows, width = _size(rng), _size(rng)
    plan = [
        (str(rng.choice(["add", "dot", "glue", "norm", "mul"])), *map(int, rng.integers(0, 2 + k, 2))) for k in range(rng.integers(2, 5))
    ]

    def step(x, y, w):
        made = [x, y]
        for name, i, j in plan:
            a, b = made[i], made[j]
            made.append(STEPS_OF_TWO[name](a, b, w))
        return made[-1]

    return step, (struct(rows, width), struct(rows, width), struct(width, width))


STEPS_OF_TWO: dict[str, Callable] = {
    "add": lambda a, b, w: a + b,
    "mul": lambda a, b, w: jnp.sin(a) * b,
    "dot": lambda a, b, w: a @ w + b,
    "glue": lambda a, b, w: jnp.concatenate([a, b], 0)[: a.shape[0]],
    "norm": lambda a, b, w: a / (1.0 + jnp.sum(jnp.abs(b), 1, keepdims=True)),
}


def _linear(rng: np.random.Generator) -> tuple[Callable, tuple]:
    """A train step of one matrix."""
    batch, into, out = (_size(rng) for _ in range(3))
    act = [jnp.tanh, jax.nn.relu, lambda x: x][rng.integers(3)]
    rate = float(rng.choice([0.1, 0.01]))

    def step(w, x):
        return w - rate * jax.grad(lambda w: jnp.sum(act(x @ w)))(w), jnp.float32(0)

    return step, (struct(into, out), struct(batch, into))


def _two_layers(rng: np.random.Generator) -> tuple[Callable, tuple]:
    """A train step of two matrices; only one or two of the four sizes can be cut."""
    odd = [int(n) for n in rng.choice([3, 17, 129, 1025], 4)]
    for k in rng.choice(4, int(rng.integers(1, 3)), replace=False):
        odd[k] *= int(rng.choice([2, 4, 8]))
    batch, into, hidden, out = odd
    act = [jnp.tanh, jax.nn.relu][rng.integers(2)]

    def step(params, x, y):
        def loss(p):
            return jnp.mean((act(x @ p[0]) @ p[1] - y) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    return step, ((struct(into, hidden), struct(hidden, out)), struct(batch, into), struct(batch, out))


def _lookup(rng: np.random.Generator) -> tuple[Callable, tuple]:
    """An embedding table: looked up and projected, or trained."""
    vocab, width, count, out = (_size(rng) for _ in range(4))
    trained = bool(rng.integers(2))

    def forward(table, ids, w):
        return table[ids] @ w

    def train(table, ids, w):
        return table - 0.1 * jax.grad(lambda t: jnp.sum(t[ids] ** 2))(table)

    return (train if trained else forward), (struct(vocab, width), struct(count, dtype=jnp.int32), struct(width, out))


def _attention(rng: np.random.Generator) -> tuple[Callable, tuple]:
    """Scores of queries and keys, softmax, with or without values."""
    batch, queries, keys, width = (_size(rng) for _ in range(4))
    mixed = bool(rng.integers(2))

    def step(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        return jnp.einsum("bqk,bkd->bqd", weights, v) if mixed else weights

    return step, (struct(batch, queries, width), struct(batch, keys, width), struct(batch, keys, width))


KINDS = {f.__name__[1:]: f for f in (_chain, _graph, _linear, _two_layers, _lookup, _attention)}


def draw(kind: str, seed: int) -> Drawn:
    """The program of a kind and seed; another seed, most likely another program."""
    step, args = KINDS[kind](np.random.default_rng([seed, *kind.encode()]))
    return Drawn(kind, step, args)


def random_problem(seed: int, count: int = 5, density: float = 0.5, positions: int = 2) -> Problem:
    """A Problem with no program behind it: up to four states for each variable, pair tables in memory rows too."""
    rng = np.random.default_rng(seed)
    problem = Problem.empty(exposed_share=0.25)
    for i in range(count):
        problem.add_variable(int(rng.integers(1, 5)), f"v{i}")
    links = [pair for pair in itertools.combinations(range(count), 2) if rng.random() < density]
    for resource in RESOURCES:
        for i in range(count):
            problem.add_unary(resource, i, rng.random(problem.sizes[i]) * 1e-3)
        for i, j in links:
            problem.add_pair(resource, i, j, rng.random((problem.sizes[i], problem.sizes[j])) * 1e-3)
    for position in range(positions):
        vectors = {i: rng.random(problem.sizes[i]) * 1e9 for i in range(count) if rng.random() < 0.8}
        moved = {(i, j): rng.random((problem.sizes[i], problem.sizes[j])) * 3e8 for i, j in links if rng.random() < 0.3}
        problem.rows.append(MemoryRow(position, 1e8, vectors, moved))
    return problem
