"""Where arrays lie under states of groups and operations, as whole tables."""

from __future__ import annotations

import numpy as np

from jaxauto.core import MeshAxes
from jaxauto.cost.reshard import under
from jaxauto.groups import WHOLE, Operand, Operation
from jaxauto.strategies import project, shards


def moved_share(here: np.ndarray, there: np.ndarray, axis_sizes: tuple[int, ...]) -> np.ndarray:
    """Of an array's bytes, what a second copy in the layout ``there`` takes, where ``here`` has to be moved: ``float [a, b]``."""
    moves = ((here[:, None] != there[None]) & (here[:, None] != WHOLE)).any(-1)
    return moves / shards(there, axis_sizes)


def unsummed(here: np.ndarray, there: np.ndarray, partial: np.ndarray, bytes_: float, mesh: MeshAxes) -> np.ndarray:
    """Bytes of partial results beside their sum: ``float [a, b]``.

    Of a sum that is scattered the whole of it; what is summed whole is summed in place. XLA:CPU does neither: there is what is summed,
    the sum of it, and of that a piece is cut.
    """
    whole = bytes_ / shards(here, mesh.sizes)[:, None]
    scattered = (partial[:, None] & (there[None] != WHOLE)).any(-1)
    if mesh.scatters:
        return scattered * whole
    cut = scattered * (whole - bytes_ / shards(np.where(partial[:, None], there[None], here[:, None]), mesh.sizes))
    return partial.any(-1)[:, None] * whole + cut


def made_in(here: np.ndarray, there: np.ndarray, partial: np.ndarray) -> np.ndarray:
    """Where a result is pinned on its way ``there``, ``int8 [axes]``: partial sums are summed into where they go, see ``cost/reshard.py``.

    Args:
      here: ``int8 [axes]`` positions as the operation makes it. partial: ``bool [axes]``, axes along which that is a term of a sum.
    """
    scattered = (partial & (there != WHOLE))[None, None]
    return here if under(scattered, here[None, None], there[None, None]).any() else np.where(partial, there, here)


def reduced_factors(op: Operation, result: Operand) -> list[int] | tuple[int, ...]:
    """Indices of the factors that operands have and ``result`` has not."""
    own = {f for _, f in result.dims}
    return tuple(i for i, (f, _) in enumerate(op.factors) if f not in own and any(f == g for o in op.operands for _, g in o.dims))


def edge_layout(source, target, dims, reduced, axis_sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """An edge's array before and after: (positions [a, axes], positions [b, axes], partial axes [a, axes], pieces of the result [a]).

    A dimension that is summed away keeps its axes on both sides: they turn into partial sums, not into a gather.
    """
    here = project(source, tuple(a for a, _ in dims))
    there = project(target, tuple(b for _, b in dims))
    partial = np.isin(source, reduced) if reduced else np.zeros(source.shape, bool)
    summed = [i for i, (a, _) in enumerate(dims) if a in reduced and a != WHOLE]
    split = shards(np.where(partial, WHOLE, source), axis_sizes)
    if not summed:
        return here, there, partial, split
    return np.where(np.isin(here, summed), WHOLE, here), np.where(np.isin(there, summed), WHOLE, there), partial, split
