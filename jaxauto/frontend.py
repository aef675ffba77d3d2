"""Arguments that are mutable objects (flax nnx modules and optimizers) → pytrees and back. The only file that knows a framework.

An nnx step changes its arguments in place. Traced, it becomes: merge the state, run, split again, return the new state beside the result.
flax is looked at only if the user has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax


class Functional:
    """A step without side effects, and how to call it as the user wrote it. This one's arguments are pytrees already."""

    def __init__(self, step: Callable):
        self.step = step

    def arguments(self, args: tuple) -> tuple:
        """The user's arguments as pytrees, in the same positions."""
        return args

    def absorb(self, args: tuple, out: Any) -> Any:  # noqa: ARG002  subclasses need args
        """Write new state into the user's objects; returns what the user's step would have returned."""
        return out


class _Returned:
    """Stands for a mutable argument that the step returned."""

    def __init__(self, position: int):
        self.position = position


class NnxFunctional(Functional):
    """A step that changes some of its arguments in place: ``step`` returns (result, new states of those arguments)."""

    def __init__(self, user_step: Callable, args: tuple):
        self.positions = tuple(k for k, a in enumerate(args) if is_mutable(a))
        self.graphdef, _ = _split([args[k] for k in self.positions])
        self.user_step = user_step
        self.marked: Any = None
        super().__init__(self.pure)

    def pure(self, *args: Any, **kwargs: Any) -> Any:
        from flax import nnx

        parts = {i: args[k] for i, k in enumerate(self.positions) if args[k] is not None}
        held = nnx.merge(self.graphdef, nnx.State(parts))
        full = [held[self.positions.index(k)] if k in self.positions else a for k, a in enumerate(args)]
        out = self.user_step(*full, **kwargs)
        self.marked = jax.tree_util.tree_map(lambda x: self._mark(x, held), out, is_leaf=is_mutable)
        result = [x for x in jax.tree_util.tree_leaves(self.marked) if not isinstance(x, _Returned)]
        return result, _parts(_split(held)[1], len(held))

    def _mark(self, x: Any, held: list) -> Any:
        return next((_Returned(k) for k, own in zip(self.positions, held, strict=True) if x is own), x)

    def arguments(self, args: tuple) -> tuple:
        parts = _parts(_split([args[k] for k in self.positions])[1], len(self.positions))
        return tuple(parts[self.positions.index(k)] if k in self.positions else a for k, a in enumerate(args))

    def absorb(self, args: tuple, out: Any) -> Any:
        from flax import nnx

        result, states = out
        held = [args[k] for k in self.positions]
        nnx.update(held, nnx.State({i: s for i, s in enumerate(states) if s is not None}))
        fresh = iter(result)
        return jax.tree_util.tree_map(lambda m: args[m.position] if isinstance(m, _Returned) else next(fresh), self.marked)


def functional(step: Callable, args: tuple) -> Functional:
    """``step`` as a function of pytrees."""
    return NnxFunctional(step, args) if any(map(is_mutable, args)) else Functional(step)


def is_mutable(x: Any) -> bool:
    """Whether ``x`` is an nnx graph node (a Module, an Optimizer, Rngs) that a step may change in place."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, (nnx.Module, nnx.Optimizer, nnx.Rngs))


def _split(objects: list) -> tuple[Any, Mapping]:
    from flax import nnx

    return nnx.split(objects)


def _parts(state: Mapping, count: int) -> list:
    """The state of each object; None for one whose state all belongs to an earlier one."""
    return [state.get(i, None) for i in range(count)]
