"""Copies that a layout costs: collectives join and part arrays along the dimension that is outermost in memory.

XLA:GPU lays out the operand of an all-gather or a reduce-scatter so that its dimension comes first (gpu_layout_assignment.cc). What is made
in a step is made so. Results have the layout of the caller: one that is gathered at the end is copied whole. XLA:TPU copies those gathered
along any dimension: it gathers beside other work, and not into the donated memory (``scripts/results/endings.md``). Parameters have the
caller's layout too: on GPU a weight's piece is copied before it is gathered, a gradient's after it is scattered (``wrapped_transpose`` of
whole stacks before a loop); XLA:TPU narrows weights before loops, and writes the layout that it wants.
"""

from __future__ import annotations

import numpy as np

from jaxauto.strategies import WHOLE

AT_ODDS = {"gpu": lambda rank: range(1, rank), "tpu": range}  # dimensions
COPIES_PIECES = frozenset({"gpu"})


def turned(source: np.ndarray, target: np.ndarray, rank: int, platform: str, partial: np.ndarray | None = None) -> np.ndarray:
    """Whether a passage joins or parts an array along a dimension at odds with its layout: ``bool [a, b]``.

    Args:
      source: ``[a, axes]`` positions in the array's dimensions. target: ``[b, axes]``.
      rank: dimensions of the array.
      partial: ``bool [a, axes]``, axes along which the source is a term of a sum.
    """
    if rank < 2 or platform not in AT_ODDS:
        return np.zeros((len(source), len(target)), bool)
    s, t = source[:, None, :], target[None, :, :]
    at_odds = np.zeros(rank + 1, bool)  # the last: of WHOLE
    at_odds[AT_ODDS[platform](rank)] = True
    gathered = at_odds[s] & (t == WHOLE)
    scattered = False if partial is None else at_odds[t] & partial[:, None, :]
    return (gathered | scattered).any(-1)
