"""A profile for one device of a mesh: the planner completes the user's shardings, the step stays as written."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxauto.core import Node
from jaxauto.cost.layout import Laid, local_shape, minor_dims, padding
from jaxauto.errors import ArgumentError
from jaxauto.options import Options, mesh_candidates
from jaxauto.planner import read, search
from jaxauto.profile_memory import Profiled
from jaxauto.rewrite.apply import partition_spec
from jaxauto.solve.decide import sharding_of_value
from jaxauto.solve.facts import major_dims
from jaxauto.solve.live import timeline
from jaxauto.solve.remat import Remat
from jaxauto.solve.search import Candidate
from jaxauto.strategies import WHOLE, shards
from jaxauto.targets.target import Target, resolve

_SECONDS = 20.0  # for the solver


def sharded_program(
    fn: Callable, args: tuple, kwargs: dict, mesh: Any, in_specs: Mapping[str, Any], target: Any, donate_argnums: Any
) -> Profiled:
    """``fn`` as each device of ``mesh`` runs it, under the best sharding that respects ``in_specs``, without a memory limit.

    Raises:
      ConstraintError: ``in_specs`` do not fit. ArgumentError: the mesh is larger than the target.
    """
    shape = dict(getattr(mesh, "shape", mesh))
    if not shape or not all(isinstance(n, int) and n > 0 for n in shape.values()):
        raise ArgumentError(f"mesh={mesh!r}: give a jax.sharding.Mesh or axis sizes, for example {{'data': 4, 'model': 2}}.")
    resolved = resolve(target) if target is not None else Target(f"cpu:{math.prod(shape.values())}")
    step = read(fn, args, kwargs, donate_argnums)
    remat = Remat(step.graph, step.groups, step.aliased, resolved.chip, devices=math.prod(shape.values()), late_only=step.late_only)
    options = Options(mesh=mesh, target=resolved, remat="off", constraints=in_specs, certify=False)
    (axes,) = mesh_candidates(mesh, resolved, None)
    found = search(step, remat, remat.levels()[:1], axes, resolved, math.inf, options, time.monotonic() + _SECONDS)
    best = found.best
    assert best is not None  # any plan fits an infinite budget
    inputs = zip(step.traced.in_paths, step.graph.inputs, strict=True)
    return Profiled(
        traced=step.traced,
        graph=step.graph,
        rules=step.groups.rules,
        buffers=best.model.buffers,
        sizes=best.model.buffer_sizes(best.x),
        live=timeline(best.model, best.x),
        pieces=_pieces(best),
        shares=_shares(best),
        aliased=step.aliased,
        placed=best.model.placed,
        padded=_padded(best),
        local=_local(best),
        mesh=shape,
        specs={path: partition_spec(sharding_of_value(best.model, best.x, n)) for path, n in inputs},
    )


def _pieces(best: Candidate) -> Callable[[int], float]:
    """Value id → into how many pieces it is cut."""
    model = best.model

    @functools.cache
    def of(variable: int, dims: tuple[int, ...]) -> float:
        state = model.states[variable][best.x[variable]]
        return float(np.prod([n for n, d in zip(model.mesh.sizes, state, strict=True) if d != WHOLE and d in dims]))

    def pieces(number: int) -> float:
        group, dims = model.groups.place[number]
        return of(model.var("group", group), dims)

    return pieces


def _padded(best: Candidate) -> Callable[[int], float]:
    """Value id → by how much tiles enlarge one device's part."""
    model = best.model
    major = major_dims(model.groups)

    @functools.cache
    def padded(number: int) -> float:
        minor = minor_dims(major, *model.groups.place[number])
        place, value = model.position(best.x, number)[None], model.values[number]
        return float(padding(place, Laid(value.shape, minor, model.chip.tile_of(value.dtype)), model.mesh.sizes)[0])

    return padded if model.chip.tile else lambda _: 1.0


def _local(best: Candidate) -> Callable[[int], tuple[float, ...]]:
    """Value id → the shape of one device's part."""
    model = best.model
    return lambda n: tuple(local_shape(model.position(best.x, n)[None], model.values[n].shape, model.mesh.sizes)[0].tolist())


def _shares(best: Candidate) -> Callable[[Node], float]:
    """Node → among how many devices its work is divided: an operation's own strategy, else the cut of its largest array."""
    model, pieces = best.model, _pieces(best)
    values = model.values

    def share(node: Node) -> float:
        if node.id in model.operation_of:
            return float(shards(model.state(best.x, "operation", node.id)[None], model.mesh.sizes)[0])
        arrays = [x for x in (*node.inputs, *node.outputs) if isinstance(x, int)]
        return pieces(max(arrays, key=lambda x: values[x].aval.size)) if arrays else 1.0

    return share
