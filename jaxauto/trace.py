"""Step + abstract arguments → jaxpr, with the argument paths of its inputs and outputs. Allocates nothing, runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxauto import compat
from jaxauto.errors import TraceError


@dataclass(frozen=True)
class Traced:
    """A traced step: everything later stages know about the user's function.

    Attributes:
      jaxpr: closed jaxpr of the whole step, dead code eliminated; one input for each array leaf of the arguments.
      in_paths, out_paths: a name for each input and output leaf, e.g. ``"0.params.block.kernel"``.
      in_avals, out_avals: ShapeDtypeStructs.
      in_tree, out_tree: structures of (args, kwargs) and of the result.
      state: pairs (input leaf, output leaf) that become each other from step to step and so share one sharding.
      donated: input leaves whose buffers the step may reuse.
    """

    jaxpr: Any
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    out_avals: tuple[jax.ShapeDtypeStruct, ...]
    in_tree: Any
    out_tree: Any
    state: tuple[tuple[int, int], ...]
    donated: tuple[bool, ...]


def trace(fun: Callable, args: tuple, kwargs: dict | None = None, donate_argnums: Sequence[int] | int | None = None) -> Traced:
    """Trace ``fun(*args, **kwargs)``; leaves may be arrays, numpy arrays, scalars or ShapeDtypeStructs.

    Args:
      fun: the step; static arguments are already bound.
      donate_argnums: positions in ``args`` whose arrays may be reused; None: every argument that comes back as an output.

    Raises:
      TraceError: JAX could not trace the step.
    """
    kwargs = kwargs or {}
    leaves, in_tree = jax.tree_util.tree_flatten((args, kwargs))
    in_paths = tuple(_in_path(path) for path, _ in jax.tree_util.tree_flatten_with_path((args, kwargs))[0])
    in_avals = tuple(abstract(leaf, path) for leaf, path in zip(leaves, in_paths, strict=True))
    out_trees = []

    def flat(*flat_args):
        a, k = jax.tree_util.tree_unflatten(in_tree, flat_args)
        out = fun(*a, **k)
        flat_out, tree = jax.tree_util.tree_flatten(out)
        out_trees.append((tree, tuple(key_path(p) or "out" for p, _ in jax.tree_util.tree_flatten_with_path(out)[0])))
        return flat_out

    try:
        traced = jax.make_jaxpr(flat)(*in_avals)
    except Exception as error:
        raise TraceError(_trace_message(fun, error, in_paths, in_avals)) from error
    out_tree, out_paths = out_trees[-1]
    closed = compat.dead_code_eliminated(traced)
    opened, _ = compat.open_jaxpr(closed)
    out_avals = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in opened.outvars)
    pairs = _pair_state(args, out_tree, in_avals, out_avals, in_paths, out_paths)
    donated = _donation(args, kwargs, pairs, donate_argnums)
    return Traced(closed, in_paths, out_paths, in_avals, out_avals, in_tree, out_tree, pairs, donated)


def abstract(leaf: Any, path: str = "") -> jax.ShapeDtypeStruct:
    """The ShapeDtypeStruct of an argument leaf."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    try:
        aval = jax.api_util.shaped_abstractify(leaf)
    except (TypeError, AttributeError) as error:
        raise TraceError(
            f"argument leaf {path or '?'} is a {type(leaf).__name__}, not an array: pass an array, a number or a jax.ShapeDtypeStruct, "
            "or name the argument in static_argnums / static_argnames."
        ) from error
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def key_path(path: Any) -> str:
    """``(DictKey('params'), SequenceKey(0))`` → ``"params.0"``."""
    parts = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    # The box around an nnx variable says nothing; a dict may have a "value" beside its "query" and "key".
    if len(parts) > 1 and parts[-1] in ("value", "raw_value") and isinstance(path[-1], jax.tree_util.GetAttrKey):
        parts.pop()
    return ".".join(parts)


def _in_path(path: Any) -> str:
    return key_path(path[1:])  # path[0] tells args from kwargs


def _trace_message(fun: Callable, error: Exception, in_paths, in_avals) -> str:
    name = getattr(fun, "__name__", type(fun).__name__)
    text = str(error)
    named = [
        f"{p} ({a.dtype}{list(a.shape)})" for p, a in zip(in_paths, in_avals, strict=True) if f"flat_args[{in_paths.index(p)}]" in text
    ]
    abstract_args = ", ".join(named[:3] or [f"{p} ({a.dtype}{list(a.shape)})" for p, a in list(zip(in_paths, in_avals, strict=True))[:6]])
    more = "" if named or len(in_paths) <= 6 else f" and {len(in_paths) - 6} more"
    if "context mesh" in text and "Explicit" in text:
        return (
            f"{name} cannot be traced: it reads an array that lies on a mesh whose axes are Explicit and is no argument. "
            f"Make it an argument, or the mesh with axis_types=(jax.sharding.AxisType.Auto, …). {type(error).__name__}: {text}"
        )
    return (
        f"{name} cannot be traced: {type(error).__name__}: {text}\n"
        f"Abstract while tracing were the arguments {abstract_args}{more}; "
        "a value that Python itself must know (a flag, a size) belongs in static_argnums or static_argnames."
    )


# ---------------------------------------------------------------------------------------------- state in ↔ state out


def _pair_state(args, out_tree, in_avals, out_avals, in_paths, out_paths) -> tuple[tuple[int, int], ...]:
    """Pair whole arguments with subtrees of the result that have the same structure and avals; each is used once, by name first.

    A lone array is matched only with the result at its own position (labels and predictions, a learning rate and a loss, look alike).
    """
    results = _subtrees(out_tree, depth=2)
    lone = {k: (o, p) for k, (_, o, p) in enumerate(_children(out_tree)) if p - o == 1}
    used: set[int] = set()
    pairs: list[tuple[int, int]] = []
    start = 0
    for number, argument in enumerate(args):
        tree = jax.tree_util.tree_structure(argument)
        stop = start + tree.num_leaves
        if tree.num_leaves == 1 and jax.tree_util.treedef_is_leaf(tree):
            matches = [lone[number]] if number in lone and in_avals[start].shape else []
        else:
            matches = [(o, p) for other, o, p in results if other == tree and p > o]
        avals = _shapes(in_avals[start:stop])
        matches = [(o, p) for o, p in matches if not used & set(range(o, p)) and _shapes(out_avals[o:p]) == avals]
        if matches:
            named = [m for m in matches if _tail(out_paths[m[0]]) == _tail(in_paths[start])]
            o, p = (named or matches)[0]
            pairs += zip(range(start, stop), range(o, p), strict=True)
            used |= set(range(o, p))
        start = stop
    return tuple(pairs)


def _shapes(avals) -> list:
    return [(a.shape, a.dtype) for a in avals]


def _tail(path: str) -> str:
    return path.rpartition(".")[2]


def _children(tree, start: int = 0) -> list[tuple[Any, int, int]]:
    """(structure, first leaf, one past the last leaf) of each child."""
    found = []
    for child in tree.children():
        found.append((child, start, start + child.num_leaves))
        start += child.num_leaves
    return found


def _subtrees(tree, depth: int) -> list[tuple[Any, int, int]]:
    """As ``_children``, of the tree itself and all below it down to ``depth``, larger first."""
    level = [(tree, 0, tree.num_leaves)]
    found = list(level)
    for _ in range(depth):
        level = [child for node, start, _ in level for child in _children(node, start)]
        found += level
    return found


def _donation(args, kwargs, pairs, donate_argnums) -> tuple[bool, ...]:
    counts = [len(jax.tree_util.tree_leaves(a)) for a in args]
    total = sum(counts) + len(jax.tree_util.tree_leaves(kwargs))
    donated = np.zeros(total, bool)
    if donate_argnums is None:
        donated[[i for i, _ in pairs]] = True
    else:
        starts = np.cumsum([0, *counts])
        for n in (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums:
            donated[starts[n] : starts[n + 1]] = True
    return tuple(bool(d) for d in donated)
