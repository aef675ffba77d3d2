"""Shardings as an expert writes them: a model names its dimensions, a table says which mesh axes each name is split over.

The way of MaxText and ``flax.linen.logical_axis_rules``. Without a layout (``use`` not entered) ``put`` and ``checkpointed`` do nothing and
leave no trace in the program: the same source is the plain model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxauto import aot
from jaxauto.targets.target import Target

POLICIES = {
    "everything": None,  # no jax.checkpoint
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots, no batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "block outputs": jax.checkpoint_policies.save_only_these_names("attention", "mlp"),
}
# To host memory between the passes, to and from ``pinned_host``; the rest is made again.
OFFLOADING = {
    "block outputs to host": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["attention", "mlp"], offload_src="device", offload_dst="pinned_host"
    ),
    "dots, no batch, to host": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}

COMPILE_SECONDS = 900.0


@dataclass(frozen=True)
class Layout:
    """``rules``: name of a dimension → mesh axes; ``policy``: of ``jax.checkpoint`` around each block, a key of these."""

    mesh: AbstractMesh
    rules: Mapping[str, str | Sequence[str]]
    policy: str = "everything"

    def spec(self, shape: Sequence[int], names: Sequence[str]) -> PartitionSpec:
        """Of an array whose dimensions have these names; an axis that is taken, or does not divide, is left out."""
        entries, taken = [], set()
        for size, name in zip(shape, names, strict=True):
            given = self.rules.get(name, ())
            axes: list[str] = []
            for axis in (given,) if isinstance(given, str) else given:
                pieces = math.prod(self.mesh.shape[a] for a in [*axes, axis])
                if axis not in taken and size % pieces == 0:
                    axes.append(axis)
                    taken.add(axis)
            entries.append(tuple(axes) or None)
        return PartitionSpec(*entries)


_ACTIVE: ContextVar[Layout | None] = ContextVar("layout", default=None)


@contextlib.contextmanager
def use(layout: Layout) -> Iterator[None]:
    """Models traced inside follow ``layout``."""
    token = _ACTIVE.set(layout)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def put(x: jax.Array, names: str, saved_as: str = "") -> jax.Array:
    """``x`` constrained as the active layout says; ``names``: one for each dimension, parted by spaces. ``saved_as``: for policies."""
    layout = _ACTIVE.get()
    if layout is None:
        return x
    x = jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, layout.spec(x.shape, names.split())))
    return checkpoint_name(x, saved_as) if saved_as else x


def checkpointed(block: Callable) -> Callable:
    """``block`` under the active layout's ``jax.checkpoint`` policy."""
    layout = _ACTIVE.get()
    if layout is None or layout.policy == "everything":
        return block
    return jax.checkpoint(block, policy=(POLICIES | OFFLOADING)[layout.policy])


def compiled(
    step: Callable, args: tuple, specs: Sequence[PartitionSpec], layout: Layout, target: Target, options: Mapping[str, str]
) -> aot.Compiled:
    """A train step ``step(params, moments, batch) -> (params, moments, loss)`` compiled under a layout, its state donated.

    Args:
      args: of the step, abstract.
      specs: of all leaves of ``args``; the state comes back as it went in.
      layout: on an abstract mesh of all devices of ``target``.
      options: of the compiler.

    Raises:
      aot.CompilerFailure: the compiler refused, or it does not fit the chip.
    """
    leaves, tree = jax.tree.flatten(args)
    kept = len(leaves) - len(jax.tree.leaves(args[2]))
    out_specs = [*specs[:kept], PartitionSpec()]
    assert jax.tree.structure(jax.eval_shape(step, *args)).num_leaves == len(out_specs)
    mesh = layout.mesh.shape

    def make_fun(abstract: AbstractMesh) -> Callable:
        def flat(*leaves: Any) -> list:
            with use(replace(layout, mesh=abstract)):
                return jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves)))

        return flat

    known = {"timeout": COMPILE_SECONDS, "options": dict(options)}
    return aot.compile_step(make_fun, leaves, list(specs), out_specs, list(range(kept)), target, tuple(mesh.values()), tuple(mesh), **known)


def of_params(layout: Layout, table: Mapping[str, str], tree: Any) -> list[PartitionSpec]:
    """A spec for each leaf, by the last name in its path that ``table`` has; names of a stacked leaf begin with that of the stack."""
    specs = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        known = [str(getattr(k, "key", getattr(k, "name", ""))) for k in path]
        names = next((table[k].split() for k in reversed(known) if k in table), [])
        names = ["layers"] * (len(leaf.shape) - len(names)) + names if len(names) <= len(leaf.shape) else []
        specs.append(layout.spec(leaf.shape, names) if names else PartitionSpec())
    return specs
