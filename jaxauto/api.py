"""The decorator and the function that users call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxauto import frontend
from jaxauto.errors import ArgumentError
from jaxauto.options import Options, bind_static
from jaxauto.plan import Plan, PlannedStep
from jaxauto.planner import make_plan
from jaxauto.trace import abstract, key_path


def plan(
    step: Callable,
    *args: Any,
    mesh: Any = None,
    target: Any = None,
    memory_budget: int | float | str | None = None,
    remat: str = "auto",
    constraints: Mapping[str, Any] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    time_limit: float = 60.0,
    tune: int = 0,
    certify: bool | str = "auto",
    progress: bool | None = None,
    **kwargs: Any,
) -> Plan:
    """Plan ``step(*args, **kwargs)`` for a mesh, without running anything and without allocating device memory.

    Args:
      step: a train step (or any function) written for one device.
      args, kwargs: arrays or ShapeDtypeStructs in any pytrees; flax nnx objects too.
      mesh: jax.sharding.Mesh with axes of any type, or axis sizes such as ``{"data": 4, "model": 2}``; None: shape and axes are searched.
      target: ``"v5p:4x4x4"``, ``"h100:8"``, a ``jaxauto.Target``; None: ``jax.devices()``.
      memory_budget: bytes for each device, ``"14GiB"``, or a fraction such as 0.9; None: what the chip has, less a margin.
      remat: ``"auto"`` | ``"off"`` | ``"offload"`` (activations may wait for the backward pass in the host's
        memory; on GPU, what only the optimizer reads may wait there for its update, and ``plan.place`` and ``plan.init`` put it there).
      constraints: globs over argument paths → PartitionSpec, e.g. ``{"0.params.*.kernel": P(None, "model")}``.
      donate_argnums: as ``jax.jit``; None: every argument that comes back as an output.
      static_argnums, static_argnames: as ``jax.jit``.
      time_limit: seconds for the solver; the best plan found so far is returned, with its gap.
      tune: compile this many of the best, different plans for the target, and keep the one whose compiled schedule is fastest; what each
        took is in ``plan.notes``.
      certify: check the plan with the real compiler and plan again if it would not fit: True, False, or "auto" (when a budget is given
        and a compiler for the target is at hand). A plan that is not checked leaves room for gaps in the compiler's heap (on TPU), as far
        as there is a plan that can; ``plan.notes`` says what that takes.
      progress: show a progress line; None: on a terminal or notebook when planning takes long.

    Returns:
      A Plan.

    Raises:
      InfeasibleError: nothing fits the budget. ConstraintError, TargetError, TraceError, ArgumentError: see their docstrings.
    """
    options = Options(mesh, target, memory_budget, remat, constraints, donate_argnums, time_limit, tune, certify, progress)
    _check_options(options)
    fun, dynamic, more, _ = bind_static(step, args, kwargs, static_argnums, static_argnames)
    form = frontend.functional(fun, dynamic)
    return make_plan(_named(form.step, step), form.arguments(dynamic), more, options)


def _named(fun: Callable, step: Callable) -> Callable:
    return fun if fun is step else functools.wraps(step)(lambda *a, **k: fun(*a, **k))


def _check_options(options: Options) -> None:
    if options.remat not in ("auto", "off", "offload"):
        raise ArgumentError(f'remat={options.remat!r}: give "auto", "off" or "offload".')
    if options.certify not in (True, False, "auto"):
        raise ArgumentError(f'certify={options.certify!r}: give True, False or "auto".')


class AutoSharded:
    """A step with a plan for each signature it is called with. Made by ``auto_shard``."""

    def __init__(self, step: Callable, options: dict[str, Any]):
        self.step = step
        self.static = {k: options.pop(k) for k in ("static_argnums", "static_argnames") if k in options}
        self.given: Plan | None = options.pop("plan", None)
        self.options = options
        self._entries: dict[Any, tuple[Plan, PlannedStep, frontend.Functional]] = {}
        functools.update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on the mesh: the first call of a signature plans and places, later ones reuse."""
        entry, dynamic, more = self._entry(args, kwargs)
        _, run, form = entry
        return form.absorb(dynamic, run(*form.arguments(dynamic), **more))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan of a signature; arguments may be ShapeDtypeStructs. Allocates nothing."""
        return self._entry(args, kwargs)[0][0]

    @property
    def plans(self) -> list[Plan]:
        """The cached plans, newest last."""
        return [entry[0] for entry in self._entries.values()]

    def _entry(self, args: tuple, kwargs: dict):
        fun, dynamic, more, static_key = bind_static(
            self.step, args, kwargs, self.static.get("static_argnums", ()), self.static.get("static_argnames", ())
        )
        key = (static_key, _signature(dynamic, more))
        if key not in self._entries:
            form = frontend.functional(fun, dynamic)
            if self.given is not None:
                made = self.given.bind(_named(form.step, self.step), *form.arguments(dynamic), **more)
            else:
                options = Options(**self.options)
                _check_options(options)
                made = make_plan(_named(form.step, self.step), form.arguments(dynamic), more, options)
            self._entries[key] = (made, made.jit(), form)
        return self._entries[key], dynamic, more

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


def _signature(args: tuple, kwargs: dict) -> Any:
    leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    return tree, tuple(_leaf_key(leaf, path) for path, leaf in leaves)


def _leaf_key(leaf: Any, path: Any) -> tuple:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), leaf.dtype
    got = abstract(leaf, key_path(path[1:]))
    return got.shape, got.dtype


def auto_shard(step: Callable | None = None, **options: Any) -> Any:
    """Decorate a train step written for one device: it then runs on a mesh.

    Bare (``@auto_shard``) or with any option of ``jaxauto.plan``; ``plan=`` runs a saved plan instead of making one.
    The first call of a signature traces, plans, compiles and places; later calls reuse.
    """
    if step is None:
        return functools.partial(auto_shard, **options)
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise ArgumentError(f"auto_shard has no option {unknown[0]!r}; it takes {', '.join(sorted(_OPTIONS))}.")
    return AutoSharded(step, dict(options))


_OPTIONS = {*Options.__dataclass_fields__, "static_argnums", "static_argnames", "plan"}
