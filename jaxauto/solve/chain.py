"""The dynamic programme over a chain of blocks: what each block keeps for its backward pass.

Blocks 0 … n-1 run forward in order and backward in reverse. Block b offers options o, each with

  k[b,o]  bytes it keeps from its forward to its backward pass             Option.kept_bytes
  p[b,o]  bytes that live on top of what is kept while its backward runs   Option.peak_bytes
  s[b,o]  seconds, recomputation included                                  Option.seconds

When block b's backward runs, the blocks before it still hold what they kept, those after it are done:

  minimise    Σ_b s[b,o_b]                                                 solve_chain
  subject to  K_b + p[b,o_b] ≤ M_b   for each b                            _extend
  with        K_b = Σ_{c≤b} k[c,o_c]                                       _extend

State after block b: the set of pairs (K_b, seconds so far) that no other pair beats in both               _front
  F_b = front{ (K + k[b,o], t + s[b,o]) : (K, t) ∈ F_{b-1}, K + k[b,o] + p[b,o] ≤ M_b }                   _extend
A front longer than ``bins`` is thinned to the fastest pair of each of ``bins`` slots of [0, max M], and the leanest      _thin
pair of all. Pairs carry exact bytes, so an answer never needs more than it says; it is optimal while no front was
thinned (ChainSolution.exact), and otherwise no slower than the optimum of a budget smaller by n · max M / bins. The
leanest pair decides whether anything fits, so thinning never turns a feasible chain into an infeasible one.

Least budget: whatever the budget, the leanest option that still fits leaves most to the blocks after it, so one pass
decides feasibility                                                                                             _leanest
and bisection over budgets finds the least one                                                              least_budget

Sources: Rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, Inria RR-9302) for chains, Rockmate (Zhao, Le Hellard,
Eyraud-Dubois, Gusak, Beaumont, arXiv 2307.01236) for blocks with several options each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Option:
    """One way to run a block. Bytes and seconds for each device; see the head of this file. ``what``: what it stands for."""

    kept_bytes: float
    peak_bytes: float
    seconds: float
    what: Any = None


@dataclass(frozen=True)
class ChainSolution:
    """The chosen option of each block.

    Attributes:
      choice: index into the options of each block.
      seconds: sum over the blocks.
      kept_bytes: what all blocks keep together.
      peak_bytes: for each block, what lives when its backward runs: K_b + p.
      exact: no front was thinned, so no choice is faster.
    """

    choice: tuple[int, ...]
    seconds: float
    kept_bytes: float
    peak_bytes: tuple[float, ...]
    exact: bool


def solve_chain(options: Sequence[Sequence[Option]], budget_bytes: float | Sequence[float], bins: int = 1000) -> ChainSolution | None:
    """The fastest choice of one option for each block within the budget; None if nothing fits.

    Args:
      options: for each block, in forward order, its options.
      budget_bytes: for every block alike, or for each block, what may live while its backward runs.
      bins: how many states are carried from block to block at most (about).

    Raises:
      ValueError: a block without options, or as many budgets as there are no blocks.
    """
    budgets = _budgets(options, budget_bytes)
    slot_bytes = max(max(budgets, default=0.0), 0.0) / bins
    kept, seconds = np.zeros(1), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    exact = True
    for block, budget in zip(options, budgets, strict=True):
        kept, seconds, parent, chosen = _extend(kept, seconds, block, budget)
        if not len(kept):
            return None
        if len(kept) > bins:
            index = _thin(kept, slot_bytes)
            exact &= len(index) == len(kept)
            kept, seconds, parent, chosen = kept[index], seconds[index], parent[index], chosen[index]
        steps.append((parent, chosen))
    choice: list[int] = []
    state = len(kept) - 1  # fronts are ordered by bytes, so the last pair is the fastest
    for parent, chosen in reversed(steps):
        choice.append(int(chosen[state]))
        state = int(parent[state])
    return _solution(options, tuple(reversed(choice)), exact=exact)


def least_budget(options: Sequence[Sequence[Option]]) -> float:
    """The smallest budget (bytes, one for all blocks) with which ``solve_chain`` finds a choice."""
    _budgets(options, 0.0)
    low, high = 0.0, _leanest(options, float("inf"))
    if high is None:
        raise ValueError("a chain without a budget always has a choice")
    while high - low > 1e-9 * max(high, 1.0):
        middle = (low + high) / 2
        needed = _leanest(options, middle)
        if needed is None:
            low = middle
        else:
            high = needed
    return high


def _budgets(options: Sequence[Sequence[Option]], budget_bytes: float | Sequence[float]) -> list[float]:
    for number, block in enumerate(options):
        if not block:
            raise ValueError(f"block {number} of {len(options)} has no options: give it at least the one that keeps everything")
    if isinstance(budget_bytes, (int, float)):
        return [float(budget_bytes)] * len(options)
    budgets = [float(b) for b in budget_bytes]
    if len(budgets) != len(options):
        raise ValueError(f"{len(budgets)} budgets for {len(options)} blocks: give one for each block, or one number")
    return budgets


def _columns(block: Sequence[Option]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = np.array([(o.kept_bytes, o.peak_bytes, o.seconds) for o in block])
    return table[:, 0], table[:, 1], table[:, 2]


def _extend(kept: np.ndarray, seconds: np.ndarray, block: Sequence[Option], budget: float):
    """F_b from F_{b-1}: (kept bytes, seconds, index of the state before, option), by increasing bytes."""
    k, p, s = _columns(block)
    total = kept[:, None] + k[None, :]
    parent, chosen = np.nonzero(total + p[None, :] <= budget)
    reached, time = total[parent, chosen], seconds[parent] + s[chosen]
    index = _front(reached, time)
    return reached[index], time[index], parent[index], chosen[index]


def _front(kept: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Indices of the pairs that no other beats in both, by increasing bytes and decreasing seconds."""
    order = np.lexsort((seconds, kept))
    ordered = seconds[order]
    best_before = np.minimum.accumulate(np.concatenate([[np.inf], ordered[:-1]])) if len(ordered) else ordered
    return order[ordered < best_before]


def _thin(kept: np.ndarray, slot_bytes: float) -> np.ndarray:
    """Indices of the fastest pair of each slot of ``slot_bytes``, and of the leanest pair; ``kept`` is a front."""
    slot = np.floor(kept / slot_bytes)
    last_of_slot = np.append(slot[1:] != slot[:-1], [True])
    last_of_slot[0] = True
    return np.nonzero(last_of_slot)[0]


def _leanest(options: Sequence[Sequence[Option]], budget: float) -> float | None:
    """The most that ever lives if each block takes the leanest option that fits ``budget``; None if one has none."""
    kept, most = 0.0, 0.0
    for block in options:
        fitting = [o for o in block if kept + o.kept_bytes + o.peak_bytes <= budget]
        if not fitting:
            return None
        best = min(fitting, key=lambda o: (o.kept_bytes, o.peak_bytes))
        kept += best.kept_bytes
        most = max(most, kept + best.peak_bytes)
    return most


def _solution(options: Sequence[Sequence[Option]], choice: tuple[int, ...], *, exact: bool) -> ChainSolution:
    picked = [block[o] for block, o in zip(options, choice, strict=True)]
    kept = np.cumsum([o.kept_bytes for o in picked])
    peaks = tuple(float(k + o.peak_bytes) for k, o in zip(kept, picked, strict=True))
    return ChainSolution(choice, float(sum(o.seconds for o in picked)), float(kept[-1]) if picked else 0.0, peaks, exact)
