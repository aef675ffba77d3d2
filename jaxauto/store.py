"""Plan ↔ JSON, and binding a plan from a file to the step it was made for.

The file speaks of argument paths and PartitionSpecs. Decisions inside the step go by value ids, which follow program order, and carry names
for people; the fingerprint says whether a step is still the program that they belong to.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from jaxauto import compat, frontend
from jaxauto.core import Collective, Decisions, Estimate, Graph, Trips
from jaxauto.errors import ArgumentError, PlanMismatchError
from jaxauto.export import export
from jaxauto.options import device_mesh, is_here, mesh_axes
from jaxauto.plan import Certificate, Plan, Program, RematDecision, SolverReport
from jaxauto.planner import fingerprint, read
from jaxauto.targets.target import Target
from jaxauto.trace import abstract, key_path
from jaxauto.writing import write_text

if TYPE_CHECKING:
    from jaxauto.planner import Step

__all__ = ["bind", "export", "load", "save"]

FORMAT = "jaxauto.plan"
VERSION = 2  # 1: scans that are split had segments of one length each


def save(plan: Plan, path: str) -> str:
    """Write the plan as JSON; returns ``path``. The file is whole or not there."""
    write_text(path, json.dumps(to_dict(plan), indent=1, allow_nan=False) + "\n")
    return path


def load(path: str) -> Plan:
    """Read a plan; it knows no step until it is bound.

    Raises:
      ArgumentError: not a plan, a damaged one, or one of a newer jaxauto.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ArgumentError(f'{path} is not a plan: it is no JSON object with "format": "{FORMAT}". Plans are written by plan.save(path).')
    version = data.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise ArgumentError(
            f"{path} is a plan of format version {version}; this one reads up to {VERSION}. Upgrade jaxauto, or plan again."
        )
    try:
        return from_dict(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(f"{path} is a damaged plan ({type(error).__name__}: {error}). Plan again and save it anew.") from error


# ------------------------------------------------------------------------------------------------------------- Plan → dict


def to_dict(plan: Plan) -> dict[str, Any]:
    """What the file holds: dicts, lists, texts, numbers and None."""
    e = plan.estimate.as_dict()
    return _plain(
        {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": plan.fingerprint,
            "target": plan.target,
            "mesh": [[name, n] for name, n in dict(plan.mesh.shape).items()],
            "budget_bytes": plan.budget_bytes,
            "arguments": [
                {"path": p, **_aval(a), "spec": _spec(s), "donated": d}
                for p, a, s, d in zip(plan.in_paths, plan.in_avals, plan.in_specs, plan.donated, strict=True)
            ],
            "results": [
                {"path": p, **_aval(a), "spec": _spec(s)} for p, a, s in zip(plan.out_paths, plan.out_avals, plan.out_specs, strict=True)
            ],
            "decisions": _decisions(plan.decisions, plan.program.graph if plan.program else None),
            "remat": [dataclasses.asdict(d) for d in plan.remat],
            "estimate": e,
            "solver": dataclasses.asdict(plan.solver),
            "certificate": dataclasses.asdict(plan.certificate) if plan.certificate else None,
            "notes": list(plan.notes),
            "host": {"arguments": sorted(plan.in_host), "results": sorted(plan.out_host)},
        }
    )


def _plain(x: Any) -> Any:
    """JSON knows no infinity, no tuples and no numpy numbers."""
    if isinstance(x, Mapping):
        return {str(k): _plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(v) for v in x]
    if x is None or isinstance(x, (str, bool, int)):
        return x
    number = float(x)
    return number if math.isfinite(number) else str(number)


def _aval(aval: jax.ShapeDtypeStruct) -> dict[str, Any]:
    return {"shape": aval.shape, "dtype": str(aval.dtype)}


def _spec(spec: PartitionSpec) -> list:
    return [list(p) if isinstance(p, tuple) else p for p in spec]


def _decisions(decisions: Decisions, graph: Graph | None) -> dict[str, Any]:
    return {
        "values": [{"value": n, **_name(n, graph), "sharding": s} for n, s in decisions.values.items()],
        "operands": [{"node": n, "operand": k, **_name(n, graph), "sharding": s} for (n, k), s in decisions.operands.items()],
        "kept": [_kept(kept, graph) for kept in decisions.kept],
        "gathered_late": [[n, k, awaited] for (n, k), awaited in sorted(decisions.gathered_late.items())],
        "in_order": None if decisions.in_order is None else sorted(decisions.in_order),
        "short": sorted(decisions.short),
        "made": [{"value": n, **_name(n, graph), "sharding": s} for n, s in decisions.made.items()],
        "offloaded": [{"value": n, **_name(n, graph)} for n in sorted(decisions.offloaded)],
        "remade": [{"value": n, "depth": depth, **_name(n, graph)} for n, depth in sorted(decisions.remade)],
        "splits": [{"block": b, "parts": [_trips(t, graph) for t in parts]} for b, parts in sorted(decisions.splits.items())],
    }


def _kept(kept: frozenset[int] | None, graph: Graph | None) -> list | None:
    return None if kept is None else [{"value": n, **_name(n, graph)} for n in sorted(kept)]


def _trips(trips: Trips, graph: Graph | None) -> dict[str, Any]:
    return {"count": trips.count, "kept": _kept(trips.kept, graph), "inside": [_trips(t, graph) for t in trips.inside]}


def _name(number: int, graph: Graph | None) -> dict[str, str]:
    """For people: what makes the value, and where it is written."""
    value = graph.values.get(number) if graph is not None else None
    if value is None or value.producer is None:
        return {}
    node = value.producer
    return {"name": f"{node.scope}/{node.prim}" if node.scope else node.prim, "source": node.source}


# ------------------------------------------------------------------------------------------------------------- dict → Plan


def from_dict(data: Mapping[str, Any]) -> Plan:
    """The inverse of ``to_dict``; the plan is not bound and its mesh is abstract."""
    names, sizes = zip(*data["mesh"], strict=True)
    ins, outs, solver = data["arguments"], data["results"], data["solver"]
    return Plan(
        mesh=AbstractMesh(tuple(sizes), tuple(names)),
        target=data["target"],
        budget_bytes=float(data["budget_bytes"]),
        in_paths=tuple(a["path"] for a in ins),
        out_paths=tuple(a["path"] for a in outs),
        in_avals=tuple(map(_to_aval, ins)),
        out_avals=tuple(map(_to_aval, outs)),
        in_specs=tuple(_to_spec(a["spec"]) for a in ins),
        out_specs=tuple(_to_spec(a["spec"]) for a in outs),
        donated=tuple(bool(a["donated"]) for a in ins),
        decisions=_to_decisions(data["decisions"]),
        remat=[RematDecision(**{**d, "shape": tuple(d["shape"])}) for d in data["remat"]],
        estimate=_to_estimate(data["estimate"]),
        solver=SolverReport(**{**solver, "meshes": {k: float(v) for k, v in solver["meshes"].items()}}),
        fingerprint=data["fingerprint"],
        certificate=Certificate(**data["certificate"]) if data["certificate"] else None,
        notes=tuple(data["notes"]),
        in_host=frozenset(data.get("host", {}).get("arguments", ())),
        out_host=frozenset(data.get("host", {}).get("results", ())),
    )


def _to_aval(entry: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    name = entry["dtype"]
    return jax.ShapeDtypeStruct(tuple(entry["shape"]), _key_dtype(name) if name.startswith("key<") else jax.numpy.dtype(name))


def _key_dtype(name: str) -> Any:
    """The dtype of PRNG keys that prints as ``name``, e.g. ``"key<fry>"``."""
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        dtype = jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype
        if str(dtype) == name:
            return dtype
    raise ValueError(f"no PRNG implementation has the dtype {name}")


def _to_spec(parts: list) -> PartitionSpec:
    return PartitionSpec(*(tuple(p) if isinstance(p, list) else p for p in parts))


def _to_sharding(dims: list) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axes) for axes in dims)


def _to_decisions(data: Mapping[str, Any]) -> Decisions:
    return Decisions(
        values={d["value"]: _to_sharding(d["sharding"]) for d in data["values"]},
        operands={(d["node"], d["operand"]): _to_sharding(d["sharding"]) for d in data["operands"]},
        kept=tuple(_to_kept(kept) for kept in data["kept"]),
        gathered_late={(n, k): awaited for n, k, *rest in data["gathered_late"] for awaited in (*rest, None)[:1]},
        in_order=None if data.get("in_order") is None else frozenset(data["in_order"]),
        short=frozenset(data.get("short", ())),
        made={d["value"]: _to_sharding(d["sharding"]) for d in data.get("made", ())},
        offloaded=frozenset(d["value"] for d in data.get("offloaded", ())),
        remade=frozenset((d["value"], d.get("depth", 1)) for d in data.get("remade", ())),
        splits={d["block"]: _to_parts(d) for d in data.get("splits", ())},
    )


def _to_kept(kept: list | None) -> frozenset[int] | None:
    return None if kept is None else frozenset(d["value"] for d in kept)


def _to_parts(data: Mapping[str, Any]) -> tuple[Trips, ...]:
    if "parts" not in data:
        raise ValueError("it splits a loop in the form of version 1, which is not read any more")
    return tuple(map(_to_trips, data["parts"]))


def _to_trips(data: Mapping[str, Any]) -> Trips:
    return Trips(data["count"], _to_kept(data["kept"]), tuple(map(_to_trips, data["inside"])))


def _to_estimate(data: Mapping[str, Any]) -> Estimate:
    collectives = tuple(Collective(**{**c, "axes": tuple(c["axes"])}) for c in data["collectives"])
    return Estimate(**{**data, "collectives": collectives})


# ------------------------------------------------------------------------------------------------------------------ binding


@compat.propagated()
def bind(plan: Plan, step: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Plan:
    """``plan`` for ``step``: the arguments are compared leaf by leaf, then the step is traced and its program compared.

    Returns:
      A plan that runs; its mesh is of the devices here when there are enough of the target's kind.

    Raises:
      PlanMismatchError: names the first leaf that differs, or says that the program is another.
    """
    form = frontend.functional(step, args)
    args = form.arguments(args)
    _check_arguments(plan, args, kwargs)
    known = read(form.step, args, dict(kwargs))
    _check_program(plan, known)
    program = Program(form.step, known.traced, known.graph, None)
    return dataclasses.replace(plan, mesh=_mesh_here(plan), program=program, out_paths=known.traced.out_paths)


def _check_arguments(plan: Plan, args: tuple, kwargs: Mapping[str, Any]) -> None:
    flat = jax.tree_util.tree_flatten_with_path((args, dict(kwargs)))[0]
    paths = [key_path(path[1:]) for path, _ in flat]
    for k in range(max(len(paths), len(plan.in_paths))):
        got, planned = (p[k] if k < len(p) else None for p in (paths, plan.in_paths))
        if got != planned:
            raise PlanMismatchError(
                f"the arguments have another structure than the plan was made for ({len(paths)} leaves, planned {len(plan.in_paths)}): "
                f"leaf {k} is {got or 'missing'}, the plan has {planned or 'no more'} there. Plan again for these arguments."
            )
    found = [abstract(leaf, path) for path, (_, leaf) in zip(paths, flat, strict=True)]
    for what, of in (("shape", lambda a: list(a.shape)), ("dtype", lambda a: str(a.dtype))):
        for path, got, planned in zip(paths, found, plan.in_avals, strict=True):
            if of(got) != of(planned):
                raise PlanMismatchError(
                    f"argument {path} has {what} {of(got)}; the plan was made for {what} {of(planned)}. Plan again for these arguments."
                )


def _check_program(plan: Plan, known: Step) -> None:
    outs = known.traced.out_avals
    same = [(a.shape, a.dtype) for a in outs] == [(a.shape, a.dtype) for a in plan.out_avals]
    got = fingerprint(known.graph)
    if got != plan.fingerprint or not same:
        raise PlanMismatchError(
            "the arguments fit, but the step is another program than the plan was made for "
            f"(fingerprint {got}, planned {plan.fingerprint}; {len(outs)} results, planned {len(plan.out_avals)}): "
            "its code, a static argument or the version of a library has changed. Plan again."
        )


def _mesh_here(plan: Plan) -> Any:
    """The plan's mesh on the devices of this process, or as it is."""
    if not isinstance(plan.mesh, AbstractMesh):
        return plan.mesh
    target = Target(plan.target)
    axes = mesh_axes(dict(plan.mesh.shape), target)
    return device_mesh(axes, None, target, here=is_here(target, axes.num_devices))
