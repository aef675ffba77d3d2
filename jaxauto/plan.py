"""Plan: what was decided, in argument paths and PartitionSpecs; runs, explains, saves and exports it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxauto import compat
from jaxauto import place as _place
from jaxauto.core import Decisions, Estimate, Graph
from jaxauto.errors import ArgumentError, PlanMismatchError
from jaxauto.graph import HOST, walk
from jaxauto.rewrite.apply import apply
from jaxauto.targets import Target
from jaxauto.targets.compilers import COMPILER_OPTIONS, CONVOLUTION_OPTIONS, memory_limit
from jaxauto.trace import Traced, abstract


@dataclass(frozen=True)
class RematDecision:
    """What happens to one residual (or a stack of them) between forward and backward pass, on one device; or to state between steps.

    Attributes:
      name: block and scope, e.g. ``"block/3: attention/dot_general"``; of state ``"state: "`` and the argument's path.
      action: ``"kept" | "recomputed" | "offloaded"``.
      bytes_: what it takes, or would take, on one device over all trips. seconds: what making it again takes, per step.
    """

    name: str
    action: str
    shape: tuple[int, ...]
    dtype: str
    bytes_: float
    seconds: float
    source: str = ""


@dataclass(frozen=True)
class SolverReport:
    """How the plan was found.

    Attributes:
      bound: no sharding on this mesh is faster with any of the levels of rematerialisation that were searched, or with the mixture of them
        that was kept; by the planner's own estimate. Levels between those, and mixtures that were not kept, are not covered.
      gap: ``1 - bound / objective``.
      meshes: seconds of the best plan on each mesh that was searched, inf where none fits.
    """

    status: str
    objective: float
    bound: float
    gap: float
    seconds: Mapping[str, float]
    variables: int
    constraints: int
    meshes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Certificate:
    """What a compiler said of the plan: bytes on one device, against the budget.

    ``limit_bytes``: what it was told that it may use, which the plan's step is compiled with from then on; 0: all that the chip has.
    """

    compiler: str
    bytes_: float
    budget_bytes: float
    rounds: int
    limit_bytes: float = 0.0

    @property
    def fits(self) -> bool:
        return self.bytes_ <= self.budget_bytes


@dataclass(eq=False)
class Plan:
    """A plan for one signature of a step. See ``jaxauto.plan``.

    Attributes:
      mesh: jax.sharding.Mesh, or an AbstractMesh when the target is not here.
      specs: flat ``{argument path: PartitionSpec}``; out_specs: the same for the outputs, by position.
      in_host, out_host: positions of the arguments and results that lie in the host's memory between steps (``remat="offload"``).
      remat: list of RematDecision. estimate: Estimate. solver: SolverReport. certificate: Certificate or None.
      notes: what the plan assumes or could not do.
    """

    mesh: Any
    target: str
    budget_bytes: float
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    out_avals: tuple[jax.ShapeDtypeStruct, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    donated: tuple[bool, ...]
    decisions: Decisions
    remat: list[RematDecision]
    estimate: Estimate
    solver: SolverReport
    fingerprint: str
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()
    in_host: frozenset[int] = frozenset()
    out_host: frozenset[int] = frozenset()
    program: Program | None = None

    # ------------------------------------------------------------------------------------------------------------ shardings

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        return dict(zip(self.in_paths, self.in_specs, strict=True))

    @property
    def flat_in_shardings(self) -> list[NamedSharding]:
        return self._shardings(self.in_specs, self.in_host)

    @property
    def flat_out_shardings(self) -> list[NamedSharding]:
        return self._shardings(self.out_specs, self.out_host)

    def _shardings(self, specs: Iterable[PartitionSpec], host: Set[int]) -> list[NamedSharding]:
        return [NamedSharding(self.mesh, s, memory_kind=HOST if k in host else None) for k, s in enumerate(specs)]

    @property
    def in_shardings(self) -> Any:
        """Pytree of NamedSharding, same structure as the arguments (a tuple, or (args, kwargs) if there were keywords)."""
        args, kwargs = jax.tree_util.tree_unflatten(self._bound().traced.in_tree, self.flat_in_shardings)
        return (args, kwargs) if kwargs else args

    @property
    def out_shardings(self) -> Any:
        return jax.tree_util.tree_unflatten(self._bound().traced.out_tree, self.flat_out_shardings)

    @functools.cached_property
    def compiler_options(self) -> dict[str, str]:
        """XLA options by name that ``jit`` compiles the step with, for ``jax.jit(compiler_options=…)``."""
        platform = Target(self.target).chip.platform
        limit = memory_limit(platform, self.certificate.limit_bytes) if self.certificate is not None else {}
        # a loaded plan does not know; where there are none, the options mean nothing
        convolves = self.program is None or any(node.prim == "conv_general_dilated" for node in walk(self.program.graph))
        return {**COMPILER_OPTIONS[platform], **(CONVOLUTION_OPTIONS[platform] if convolves else {}), **limit}

    @property
    def checkpoint_policy(self) -> Callable:
        """The remat decision as a policy for ``jax.checkpoint(block, policy=…)``: saves the results of the primitives that are kept."""
        from jaxauto.policy import checkpoint_policy

        return checkpoint_policy(self._bound().graph, self.decisions)

    # -------------------------------------------------------------------------------------------------------------- running

    def jit(self) -> PlannedStep:
        """The step on the plan's mesh: takes and returns what the step does."""
        return PlannedStep(self)

    @compat.propagated()
    def lower(self) -> Any:
        """``jax.stages.Lowered`` of the planned step for the plan's own arguments; for the target's platform when it is elsewhere."""
        arguments = _with_shardings(self.in_avals, self.flat_in_shardings)
        platform = {"gpu": "cuda"}.get(Target(self.target).chip.platform, Target(self.target).chip.platform)
        if self.is_here:
            return self._flat_jit.lower(*arguments)
        return self._flat_jit.trace(*arguments).lower(lowering_platforms=(platform,))

    def compile(self) -> Any:
        """``jax.stages.Compiled``; compiled once.

        Raises:
          ArgumentError: the target is elsewhere.
        """
        self.require_here("compile() makes a program to run; verify() compiles ahead of time")
        return self._compiled

    @property
    def is_here(self) -> bool:
        """Whether the plan's mesh is of devices of this process."""
        return isinstance(self.mesh, Mesh)

    def require_here(self, hint: str) -> None:
        """Raise ArgumentError, with ``hint``, unless the plan's devices are here."""
        self._bound()
        if not self.is_here:
            raise ArgumentError(f"the plan is for {self.target}, whose devices are not here: {hint}.")

    @functools.cached_property
    def _compiled(self) -> Any:
        return self.lower().compile()

    @functools.cached_property
    def _flat_jit(self) -> Any:
        program = self._bound()
        fun = apply(program.graph, self.decisions, self.mesh, Target(self.target).chip.platform)
        donate = tuple(k for k, d in enumerate(self.donated) if d)
        return jax.jit(
            fun,
            in_shardings=tuple(self.flat_in_shardings),
            out_shardings=self.flat_out_shardings,
            donate_argnums=donate,
            compiler_options=self.compiler_options or None,
        )

    def place(self, *args: Any) -> tuple:
        """Arguments put where the plan wants them: from the host, one device, or another sharding.

        Raises:
          PlanMismatchError: other structure, shapes or dtypes than planned; names the leaf.
        """
        self.require_here("nothing can be placed on them")
        leaves = self.check(args, {})
        placed = compat.typed(_place.put(leaves, self.flat_in_shardings, self.in_paths))
        return jax.tree_util.tree_unflatten(self._bound().traced.in_tree, placed)[0]

    def init(self, init_fn: Callable, *args: Any) -> Any:
        """Run ``init_fn(*args)`` so that its outputs are born sharded: no device ever holds the whole.

        Raises:
          PlanMismatchError: the result is none of the step's arguments.
        """
        self.require_here("nothing can be initialised on them")
        return _place.init(self, init_fn, args)

    def check(self, args: tuple, kwargs: Mapping[str, Any]) -> list:
        """The leaves of a call, if they are what the plan was made for; else PlanMismatchError with the first leaf that differs."""
        leaves, tree = jax.tree_util.tree_flatten((args, dict(kwargs)))
        expected = self._bound().traced.in_tree
        if tree != expected:
            raise PlanMismatchError(_structure_message(tree, expected, len(leaves), len(self.in_avals)))
        for leaf, aval, path in zip(leaves, self.in_avals, self.in_paths, strict=True):
            got = abstract(leaf, path)
            if got.shape != aval.shape or got.dtype != aval.dtype:
                raise PlanMismatchError(
                    f"argument {path} is {got.dtype}{list(got.shape)}; the plan was made for {aval.dtype}{list(aval.shape)}. "
                    "Plan again for the new shapes (auto_shard does so by itself)."
                )
        return leaves

    def _bound(self) -> Program:
        if self.program is None:
            raise PlanMismatchError("this plan was loaded from a file and knows no step yet: call plan.bind(step, *args) first.")
        return self.program

    def bind(self, step: Callable, *args: Any, **kwargs: Any) -> Plan:
        """A loaded plan for ``step``, after checking that it is the step the plan was made for.

        Raises:
          PlanMismatchError: other arguments, or another program.
        """
        from jaxauto.store import bind

        return bind(self, step, args, kwargs)

    # ------------------------------------------------------------------------------------------------- looking, keeping, sharing

    def verify(self, **options: Any) -> Any:
        """Verification: the estimate beside what the compiler made of it. ``run=True`` also times the step on zeros."""
        from jaxauto.verify import verify

        return verify(self, **options)

    def explain(self, path: str | None = None) -> str:
        """Why this sharding and not another; what binds memory; what costs time."""
        from jaxauto.report import explain

        return explain(self, path)

    def summary(self) -> str:
        from jaxauto.report import summary

        return summary(self)

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        from jaxauto.report import html

        return html(self)

    def to_html(self, path: str) -> str:
        """Write the summary as a page; returns ``path``."""
        from jaxauto.report import write_html

        return write_html(self, path)

    def save(self, path: str) -> str:
        """Write the plan as JSON; returns ``path``."""
        from jaxauto.store import save

        return save(self, path)

    @staticmethod
    def load(path: str, step: Callable | None = None, *args: Any, **kwargs: Any) -> Plan:
        """Read a plan; with ``step`` and its arguments also bind it."""
        from jaxauto.store import load

        plan = load(path)
        return plan if step is None else plan.bind(step, *args, **kwargs)

    def export(self) -> str:
        """Source text: PartitionSpecs, constraints and a jax.checkpoint policy that run without jaxauto."""
        from jaxauto.store import export

        return export(self)


@dataclass(frozen=True, eq=False)
class Program:
    """The step a plan is bound to: its trace, its graph, and what the solver knew (for ``explain``; None after loading)."""

    step: Callable
    traced: Traced
    graph: Graph
    solved: Any = None


class PlannedStep:
    """The runnable step of a plan: call it, or ``lower`` it, with the arguments of the user's step."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.plan.require_here("the step cannot run; plan without target= for the devices that are")
        leaves = self.plan.check(args, kwargs)
        return self.run(_place.put(leaves, self.plan.flat_in_shardings, self.plan.in_paths))

    def run(self, leaves: list) -> Any:
        """Run on placed leaves."""
        with compat.propagated():
            results = self.plan._flat_jit(*leaves)
        return jax.tree_util.tree_unflatten(self.plan._bound().traced.out_tree, compat.typed(list(results)))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            self.plan.check(args, kwargs)
        return self.plan.lower()


def _with_shardings(avals, shardings) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(avals, shardings, strict=True)]


def _structure_message(tree: Any, expected: Any, leaves: int, expected_leaves: int) -> str:
    return (
        f"the arguments have another structure than the plan was made for: {leaves} leaves instead of {expected_leaves}.\n"
        f"  got      {str(tree)[:300]}\n  expected {str(expected)[:300]}"
    )
