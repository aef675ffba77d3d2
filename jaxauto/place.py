"""Putting and initialising state where the plan wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxauto import compat
from jaxauto.errors import ArgumentError, PlanMismatchError


def put(leaves: Sequence[Any], shardings: Sequence[Any], paths: Sequence[str]) -> list:
    """Each leaf with its sharding; what is there already is not touched.

    Raises:
      ArgumentError: a leaf is a deleted (donated) array.
    """
    moved, typed, placed = [], [], list(leaves)
    for k, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if isinstance(leaf, jax.Array):
            if leaf.is_deleted():
                raise ArgumentError(
                    f"argument {paths[k]} is an array that was deleted: an earlier call took (donated) its buffer. "
                    "Use the state that the step returned, or plan with donate_argnums=()."
                )
            if leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                typed += [k] if compat.is_typed(leaf.sharding) else []
                continue
        moved.append(k)
    if typed:  # the same memory, without a sharding in its type
        arrays = jax.device_put([placed[k] for k in typed], [shardings[k] for k in typed])
        for k, array in zip(typed, arrays, strict=True):
            placed[k] = array
    if moved:  # a copy, never an alias: donating what is placed must not delete what the user holds
        apart = [_apart(placed[k], shardings[k]) for k in moved]
        arrays = jax.device_put(apart, [shardings[k] for k in moved], may_alias=False)
        for k, array in zip(moved, arrays, strict=True):
            placed[k] = array
    return placed


def _apart(leaf: Any, sharding: Any) -> Any:
    """``leaf``, or a copy: what becomes replicated shares its memory on the device where it is, whatever ``may_alias`` says (jax 0.10)."""
    whole = isinstance(leaf, jax.Array) and sharding.shard_shape(leaf.shape) == leaf.shape
    return leaf.copy() if whole and not leaf.sharding.device_set.isdisjoint(sharding.device_set) else leaf


def init(plan: Any, init_fn: Callable, args: tuple) -> Any:
    """See ``Plan.init``."""
    args = compat.untyped(args)
    with compat.propagated():
        shape = jax.eval_shape(init_fn, *args)
        shardings = _shardings_for(plan, shape)
        made, tree = jax.tree_util.tree_flatten(jax.jit(init_fn, out_shardings=shardings)(*args))
    return jax.tree_util.tree_unflatten(tree, compat.typed(made))


def _shardings_for(plan: Any, shape: Any) -> Any:
    """The shardings of the argument, or of the tuple of leading arguments, that looks like ``shape``."""
    wanted = jax.tree_util.tree_structure(shape)
    avals = [(a.shape, a.dtype) for a in jax.tree_util.tree_leaves(shape)]
    args, _ = jax.tree_util.tree_unflatten(plan.program.traced.in_tree, list(range(len(plan.in_avals))))
    candidates = [*args, *(args[:n] for n in range(len(args), 1, -1)), *(list(args[:n]) for n in range(len(args), 1, -1))]
    for candidate in candidates:
        leaves, tree = jax.tree_util.tree_flatten(candidate)
        if tree == wanted and [(plan.in_avals[k].shape, plan.in_avals[k].dtype) for k in leaves] == avals:
            return jax.tree_util.tree_unflatten(tree, [plan.flat_in_shardings[k] for k in leaves])
    raise PlanMismatchError(
        f"init_fn returns {len(avals)} arrays in a structure that is none of the step's arguments:\n  {str(wanted)[:300]}\n"
        "It should return the first argument of the step (the state), or a tuple of the leading arguments."
    )
