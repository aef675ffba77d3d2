"""A plan as source text that runs without jaxauto: mesh, PartitionSpecs, jit, constraints and a jax.checkpoint policy."""

from __future__ import annotations

import pprint
from collections import defaultdict
from typing import TYPE_CHECKING

from jax.sharding import PartitionSpec

from jaxauto.blocks import phases
from jaxauto.core import Decisions, Graph
from jaxauto.graph import walk
from jaxauto.naming import spec_text
from jaxauto.policy import policy_table
from jaxauto.rewrite.apply import partition_spec

if TYPE_CHECKING:
    from jaxauto.plan import Plan

_CODE = '''

def make_mesh(devices=None):
    """The mesh of the plan; ``devices``: default jax.devices()."""
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH), (AxisType.Auto,) * len(MESH), devices=devices)


def path_of(key_path):
    """The name of a leaf of the arguments tuple, as in SPECS."""
    parts = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in key_path]
    if len(parts) > 1 and parts[-1] in ("value", "raw_value"):
        parts.pop()
    return ".".join(parts)


def in_shardings(args, mesh):
    """A tree of NamedSharding like ``args``, the tuple of the step's positional arguments (arrays or ShapeDtypeStructs)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(mesh, SPECS[path_of(path)]), args)


def out_shardings(step, args, mesh):
    """A tree of NamedSharding like the result of ``step(*args)``."""
    tree = jax.tree.structure(jax.eval_shape(step, *args))
    return jax.tree.unflatten(tree, [NamedSharding(mesh, spec) for spec in OUT_SPECS])


def jit_step(step, args, mesh):
    """``step`` jitted with the plan's shardings; put its arguments with ``jax.device_put(args, in_shardings(args, mesh))``."""
    shardings = {"in_shardings": in_shardings(args, mesh), "out_shardings": out_shardings(step, args, mesh)}
    return jax.jit(step, **shardings, donate_argnums=DONATE, compiler_options=COMPILER_OPTIONS or None)


def constrain(x, mesh, *spec):
    """Pins an activation inside the step; CONSTRAINTS below says where."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
'''

_POLICY = '''

# Rematerialisation: wrap each block of the model in jax.checkpoint(block, policy=checkpoint_policy()).
# (primitive, dtypes and shapes of its operands) -> whether its results are saved, in program order where equal ones differ.
SAVED = {table}


def checkpoint_policy():
    """A policy for jax.checkpoint; make a new one for each trace, because it counts equal operations."""
    seen = collections.Counter()

    def policy(prim, *avals, **params):
        key = (prim.name, *(f"{{a.dtype}}{{list(a.shape)}}" for a in avals))
        turns = SAVED.get(key, (False,))
        seen[key] += 1
        return turns[(seen[key] - 1) % len(turns)]

    return policy
'''


def export(plan: Plan) -> str:
    """Source text of a Python module that needs only jax."""
    graph = plan.program.graph if plan.program is not None else None
    parts = [_head(plan), _data(plan), _CODE]
    if graph is not None:
        parts.append(_constraints(plan, graph))
        parts.append(policy_source(graph, plan.decisions))
    else:
        parts.append(
            "\n# The plan was loaded from a file: plan.bind(step, *args).export() also lists constraints and the jax.checkpoint policy.\n"
        )
    return "".join(parts)


def _head(plan: Plan) -> str:
    mesh = " x ".join(f"{name}={n}" for name, n in dict(plan.mesh.shape).items())
    lines = [
        f'"""Shardings made by jaxauto for {plan.target}, mesh {mesh}; needs only jax.',
        "",
        f"Predicted: {plan.estimate.step_time * 1e3:.3f} ms for a step, {plan.estimate.peak_memory / 2**30:.3f} GiB on each device.",
        '"""',
        "",
        "import collections",
        "",
        "import jax",
        "from jax.sharding import AxisType, NamedSharding",
        "from jax.sharding import PartitionSpec as P",
        "",
    ]
    return "\n".join(lines)


def _data(plan: Plan) -> str:
    specs = "".join(f"    {path!r}: {spec_text(spec)},\n" for path, spec in plan.specs.items())
    keywords = [path for path in plan.in_paths if not path.partition(".")[0].isdigit()]
    note = "# Keyword arguments of the step must be passed by position: jax.jit takes in_shardings for those alone.\n" if keywords else ""
    if plan.in_host:
        note += f"# The plan keeps {len(plan.in_host)} of them in host memory between steps; here they stay on the device.\n"
    outs = "".join(f"    {spec_text(spec)},  # {_comment(path)}\n" for path, spec in zip(plan.out_paths, plan.out_specs, strict=True))
    return (
        f"\nMESH = {dict(plan.mesh.shape)!r}\n"
        f"\n# Argument path (position, then keys) -> PartitionSpec.\n{note}SPECS = {{\n{specs}}}\n"
        f"\n# Of the results, in the order of jax.tree.leaves.\nOUT_SPECS = [\n{outs}]\n"
        f"\n# Arguments whose buffers the step may reuse.\nDONATE = {_donated(plan)!r}\n"
        f"\n# What the compiler is told beside its defaults.\nCOMPILER_OPTIONS = {plan.compiler_options!r}\n"
    )


def _comment(text: str) -> str:
    return " ".join(text.split())


def _donated(plan: Plan) -> tuple[int, ...]:
    """Positions of the arguments that are donated whole."""
    whole: dict[str, bool] = {}
    for path, donated in zip(plan.in_paths, plan.donated, strict=True):
        head = path.partition(".")[0]
        whole[head] = whole.get(head, True) and donated
    return tuple(int(head) for head, donated in whole.items() if donated and head.isdigit())


def policy_source(graph: Graph, decisions: Decisions) -> str:
    """Source of ``checkpoint_policy()``, or a comment when nothing is recomputed."""
    if all(kept is None for kept in decisions.kept) and not decisions.splits:
        return "\n# Rematerialisation: none; everything is kept as the step is written.\n"
    sent = decisions.offloaded.difference(graph.inputs, graph.outputs)
    away = f"\n# The plan keeps {len(sent)} arrays in host memory; this policy saves them on the device.\n" if sent else ""
    if decisions.splits:
        away += (
            "\n# The layers of a loop keep unalike in the plan, or run again in segments; this policy saves what the first of them keep.\n"
        )
    table = {key: turns for key, turns in policy_table(graph, decisions, detailed=False).items() if any(turns)}
    return away + _POLICY.format(table=pprint.pformat(table, width=130, sort_dicts=False))


# ------------------------------------------------------------------------------------------------------------- constraints


def _constraints(plan: Plan, graph: Graph) -> str:
    """For each source line of the model, what to pin there, as comments that can be pasted."""
    forward = _forward(graph)
    places: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for number, sharding in plan.decisions.values.items():
        node = graph.values[number].producer if number in graph.values else None
        if node is None or node.id not in forward or node.bodies:
            continue
        value = graph.values[number]
        spec = partition_spec(sharding)
        what = f"{node.prim} -> {value.dtype}{list(value.shape)}:  x = constrain({_arguments(spec)})"
        places[node.source, node.scope][what] += 1
    lines = ["\n# CONSTRAINTS: what the plan pins, at the source lines of the model. Without them the compiler guesses from the arguments."]
    for (source, scope), pins in places.items():
        lines.append(f"# {_comment(source) or 'unknown source'}{'  in ' + _comment(scope) if scope else ''}")
        lines += [f"#     {_comment(what)}{f'   ({count} times)' if count > 1 else ''}" for what, count in pins.items()]
    return "\n".join(lines) + "\n"


def _arguments(spec: PartitionSpec) -> str:
    return f"x, mesh, {spec_text(spec)[2:-1]}" if len(spec) else "x, mesh"


def _forward(graph: Graph) -> set[int]:
    """Nodes of the model itself: of the first forward phase, and in bodies of loops there; not those that only the optimizer reads."""
    phase = phases(graph)
    backward = {node.id for node in graph.nodes if phase[node.id]}
    reaching = {node.id for node in graph.nodes} if not backward else set()
    for node in reversed(graph.nodes):
        users = (user for out in node.outputs for user in graph.values[out].users)
        if phase[node.id] == 0 and any(user.id in reaching or (user.id in backward and user.backward) for user in users):
            reaching.add(node.id)
    inner = {n.id for node in graph.nodes if node.id in reaching for body in node.bodies for n in walk(body) if not n.backward}
    return reaching | inner
