"""The only file that touches private or version-dependent JAX (0.10 … 0.12)."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core as _core
from jax._src import source_info_util as _source_info
from jax._src.compute_on import extend_compute_type
from jax._src.interpreters import partial_eval as _pe
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

Var = _core.Var
DropVar = _core.DropVar
JaxLiteral = _core.Literal

# Calls that mean nothing but their body. The parameter that holds the body differs.
INLINED_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # what 0.12 calls the two
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_lin": "call_jaxpr",
}
CHECKPOINT_CALLS = ("remat2", "checkpoint")


def open_jaxpr(jaxpr: Any) -> tuple[Any, list]:
    """(jaxpr with constvars/invars/outvars/eqns, values of its constvars) of an open or closed jaxpr."""
    inner = getattr(jaxpr, "jaxpr", None)
    consts = list(getattr(jaxpr, "consts", ()) or ())
    if inner is not None and inner is not jaxpr and hasattr(inner, "eqns"):
        return inner, consts
    return jaxpr, consts


def inlined(eqn: Any) -> Any:
    """The jaxpr that a call means; None: it is none.

    Some functions of ``jax.numpy`` are primitives of their own on 0.12 (``nonzero``, ``searchsorted``), which lower to what they expand to.
    """
    if eqn.primitive.name != "call_hi_primitive":
        return eqn.params.get(INLINED_CALLS.get(eqn.primitive.name))
    prim = eqn.params["_prim"]
    expand = lambda *args: jax.tree_util.tree_leaves(prim.expand(*jax.tree_util.tree_unflatten(prim.in_tree, args)))  # noqa: E731
    return _traced(eqn, expand)


def lowered(eqn: Any) -> Any:
    """The jaxpr that an elementwise primitive of 0.12 lowers to, from which compilers choose what they fuse and keep; None: it is another.

    The derivative of a tanh: a sum that an approximate GELU has as well, and a difference.
    """
    return _traced(eqn, lambda x: (1 + x) * (1 - x)) if eqn.primitive.name == "one_minus_square" else None


def _traced(eqn: Any, function: Any) -> Any:
    with source_of(eqn):
        return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars))


def dead_code_eliminated(closed: Any) -> Any:
    """The closed jaxpr without equations that no output or effect needs; all inputs are kept."""
    jaxpr, consts = open_jaxpr(closed)
    kept, _ = _pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return _pe.close_jaxpr(kept) if not kept.constvars else ClosedJaxpr(kept, consts)


def bind(eqn: Any, operands: list, scope: str = "") -> list:
    """Evaluate one equation on ``operands``, keeping its source line and name stack; always a list of results."""
    subfuns, params = _bind_params(eqn)
    with source_of(eqn, scope):
        results = eqn.primitive.bind(*subfuns, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _bind_params(eqn: Any) -> tuple[list, dict]:
    got = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(got, dict):  # newer: no sub-functions
        return [], got
    return list(got[0]), dict(got[1])


def scatter_selected(eqn: Any, source: Any, operand: Any, zero: Any) -> Any:
    """What a ``select_and_scatter_add`` of floating-point arrays does, into an array of the scalar ``zero``, there a constant."""
    select, padding = eqn.params["select_prim"], eqn.params["padding"]
    least = jnp.array(-jnp.inf if select is lax.ge_p else jnp.inf, operand.dtype)
    of_two = lambda f: jax.make_jaxpr(f)(*[jax.ShapeDtypeStruct((), operand.dtype)] * 2).jaxpr  # noqa: E731
    result = lax.select_and_scatter_p.bind(
        lax.pad(operand, least, [(low, high, 0) for low, high in padding]),
        source,
        zero,
        select_jaxpr=of_two(select.bind),
        select_consts=(),
        scatter_jaxpr=of_two(lax.add),
        scatter_consts=(),
        window_dimensions=eqn.params["window_dimensions"],
        window_strides=eqn.params["window_strides"],
        padding=((0, 0),) * operand.ndim,
    )
    return lax.slice(result, [low for low, _ in padding], [low + n for (low, _), n in zip(padding, operand.shape, strict=True)])


@contextlib.contextmanager
def source_of(eqn: Any, scope: str = "") -> Iterator[None]:
    """Trace under the source line of ``eqn``, what else it was traced under, and the name stack ``scope``."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_source_info.user_context(eqn.source_info.traceback))
        if place := getattr(context(eqn), "compute_type", None):
            stack.enter_context(extend_compute_type(place))
        if metadata := getattr(context(eqn), "xla_metadata", None):
            stack.enter_context(set_xla_metadata(**metadata))
        if scope:
            stack.enter_context(jax.named_scope(scope))
        yield


def source_line(eqn: Any) -> str:
    """``"file.py:12 (function)"`` of the user's frame, or "" when unknown."""
    return _source_info.summarize(eqn.source_info)


def name_stack(eqn: Any) -> str:
    """Scopes and transforms that the equation was traced under, e.g. ``"transpose(jvp(block))/attention"``."""
    return str(eqn.source_info.name_stack)


def scan_parts(eqn: Any) -> tuple[Any, int, int, int, bool]:
    """(body, number of consts, number of carries, length, reverse) of a ``scan`` equation.

    jax 0.12 no longer stores the counts, so they are read from ranks: an xs has one more leading dimension than its body input, a carry
    is among the body's outputs with the same rank. Consts and carries are told apart by ``ft_in`` there.
    """
    params = eqn.params
    if "num_carry" in params:
        return params["jaxpr"], params["num_consts"], params["num_carry"], params["length"], params["reverse"]
    body, _ = open_jaxpr(params["jaxpr"])
    ys = sum(len(o.aval.shape) == len(b.aval.shape) + 1 for o, b in zip(eqn.outvars, body.outvars, strict=True))
    carries = len(eqn.outvars) - ys
    xs = sum(len(o.aval.shape) == len(b.aval.shape) + 1 for o, b in zip(eqn.invars, body.invars, strict=True))
    return params["jaxpr"], len(eqn.invars) - xs - carries, carries, params["length"], params["reverse"]


_TRANSFORM = re.compile(r"\w+\(")


def plain_scope(stack: str) -> str:
    """A name stack without its transforms: ``transpose(jvp(block))/attention`` → ``block/attention``."""
    text = stack
    while True:
        stripped = _TRANSFORM.sub("", text).replace(")", "")
        if stripped == text:
            break
        text = stripped
    parts = [p for p in text.split("/") if p and p not in ("rematted_computation", "checkpoint")]
    return "/".join(parts)


def is_transposed(stack: str) -> bool:
    """Whether a name stack belongs to a backward pass."""
    return "transpose(" in stack


def context(eqn: Any) -> Any:
    """What an equation was traced under (``compute_on``, metadata); equal ones are one object."""
    return getattr(eqn, "ctx", None)


def is_made_again(stack: str) -> bool:
    """Whether a name stack belongs to what ``jax.checkpoint`` recomputes."""
    return "rematted_computation" in stack


def is_key_dtype(dtype: Any) -> bool:
    """Whether these are new-style PRNG keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """What it is called, also an extended type such as that of keys; numpy builds the name anew each time."""
    return str(dtype)


@functools.lru_cache(maxsize=256)
def itemsize(dtype: Any) -> float:
    """Bytes of one element; a PRNG key counts its uint32 words; int4 counts half a byte."""
    if is_key_dtype(dtype):
        base = getattr(getattr(dtype, "_impl", None), "key_shape", (2,))
        words = 1
        for n in base:
            words *= n
        return 4.0 * words
    if dtype_name(dtype) in ("int4", "uint4", "float4_e2m1fn"):
        return 0.5
    return float(dtype.itemsize)


def compile_stablehlo(module: str, devices: list, options: dict) -> tuple[str, Any, dict]:
    """Compiles StableHLO text over ``devices``, one partition each, in this order.

    Args:
      module: text of a lowered module with as many partitions as there are devices.
      devices: ahead-of-time or real devices of one client.
      options: XLA compiler options by name.

    Returns:
      (optimised HLO text, the compiler's memory statistics, its cost analysis or {} where the backend has none).
    """
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    compile_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        env_options_overrides=options,
    )
    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        client = devices[0].client
        # Devices of a topology can only be compiled for; the CPU client has no such mode, and loads.
        compile_ = client.compile_and_load if devices[0].platform == "cpu" else client.compile
        executable = compile_(parsed, executable_devices=xla_client.DeviceList(tuple(devices)), compile_options=compile_options)
    try:
        cost = executable.cost_analysis()
    except jax.errors.JaxRuntimeError:  # the GPU compiler without a GPU has none
        cost = {}
    cost = cost[0] if isinstance(cost, list) else cost
    return executable.hlo_modules()[0].to_string(), executable.get_compiled_memory_stats(), dict(cost or {})


def is_in_host(array: Any) -> bool:
    """Whether a traced array is in the host's memory, beside a device that has its own."""
    return getattr(jax.typeof(array), "memory_space", None) == jax.memory.Space.Host


def transferred(array: Any, kind: str) -> Any:
    """``array`` in the memory kind ``"pinned_host"`` or ``"device"``, inside a jitted function; its sharding stays."""
    return jax.device_put(array, jax.memory.Space.Host if kind == "pinned_host" else jax.memory.Space.Device)


def abstract_mesh(mesh_shape: Sequence[int], axis_names: Sequence[str]) -> AbstractMesh:
    """A mesh without devices, its axes left to the compiler's propagation."""
    return AbstractMesh(tuple(mesh_shape), tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_names))


def device_mesh(devices: Any, axis_names: Sequence[str]) -> Mesh:
    """A mesh of an array of devices, its axes left to the compiler's propagation."""
    return Mesh(devices, tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_names))


@contextlib.contextmanager
def propagated() -> Iterator[None]:
    """Within it no axis of the mesh that ``jax.set_mesh`` has set is ``Explicit``: types have no shardings, and pins are allowed."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        yield
        return
    with jax.sharding.use_abstract_mesh(abstract_mesh(mesh.axis_sizes, mesh.axis_names)):
        yield


def is_typed(sharding: Any) -> bool:
    """Whether arrays that have it have it in their types: an axis of its mesh is ``Explicit``."""
    return AxisType.Explicit in getattr(getattr(sharding, "mesh", None), "axis_types", ())


def untyped(tree: Any) -> Any:
    """Arrays of a pytree without shardings in their types; nothing is copied."""

    def own(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or not is_typed(sharding := x.sharding):
            return x
        mesh = device_mesh(sharding.mesh.devices, sharding.mesh.axis_names)
        return jax.device_put(x, NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind))

    return jax.tree.map(own, tree)


def typed(arrays: list) -> list:
    """Results of a step as the mesh that ``jax.set_mesh`` has set wants them where its axes are ``Explicit``; nothing is copied.

    Of arrays on a mesh of other axes or devices nothing is changed.
    """
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types or any(isinstance(x, jax.core.Tracer) for x in arrays):
        return arrays
    mesh = jax.sharding.get_mesh()

    def wanted(sharding: Any) -> Any:
        own = getattr(sharding, "mesh", None)
        alike = own is not None and own.axis_names == mesh.axis_names and own.devices.shape == mesh.devices.shape
        if not alike or (own.devices != mesh.devices).any():
            return sharding
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)

    return jax.device_put(arrays, [wanted(x.sharding) for x in arrays])


def laid_out(array: Any, order: Sequence[int], mesh: Any, spec: Any) -> Any:
    """``array``, inside a jitted function, each device's part of it with its dimensions in memory in this order, major first.

    Of parts, in a ``shard_map``: told of the whole, the partitioner gathers what is split in two dimensions to lay it out
    (scripts/results/parts.md).
    """
    from jax.experimental.layout import Layout, with_layout_constraint

    def part(x: Any) -> Any:
        return with_layout_constraint(x, Layout(major_to_minor=tuple(order)))

    return jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec)(array)
