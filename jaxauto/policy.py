"""A plan's remat decision as a policy of jax.checkpoint, for users' own code.

jax.checkpoint asks a policy of each equation of the block whether to save its results, with the primitive, the operands' avals and the
parameters. So an equation of the plan's graph is known again by these (its *signature*), and equal ones by their order: the answers for
one signature, in program order, repeat with the layers; their shortest period is what the policy goes round.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxauto.blocks import Block, closure, find_blocks
from jaxauto.core import Decisions, Graph, Literal

Turns = tuple[bool, ...]


def checkpoint_policy(graph: Graph, decisions: Decisions) -> Callable[..., bool]:
    """A policy for ``jax.checkpoint(block, policy=…)`` that saves what the plan keeps.

    Layers for which the plan decides differently (the first, whose input may need no gradient) get what most of them have: JAX traces alike
    blocks once. What the plan knows nothing of is not saved, as in ``jax.checkpoint`` without a policy. No policy can say that trips of a
    scan differ (``core.Trips``): it saves what the first ones keep.

    Args:
      graph: the graph of the step.
      decisions: of the plan.
    """
    table = policy_table(graph, decisions)
    asked: Counter = Counter()

    def policy(prim: Any, *avals: Any, **params: Any) -> bool:
        key = signature(prim.name, avals, params)
        turns = table.get(key, (False,))
        asked[key] += 1
        return turns[(asked[key] - 1) % len(turns)]

    return policy


def policy_table(graph: Graph, decisions: Decisions, *, detailed: bool = True) -> dict[tuple, Turns]:
    """Signature → whether results are saved, for equal equations in turn. Not ``detailed``: signatures without parameters."""
    answers: dict[tuple, list[tuple[int, int, bool]]] = defaultdict(list)
    blocks = find_blocks(graph)
    words = [_word(block, graph) for block in blocks]
    for number, (block, kept) in enumerate(zip(blocks, decisions.kept, strict=True)):
        alone = words[number] not in words[max(number - 1, 0) : number] + words[number + 1 : number + 2]
        saved, again = block_answers(block, kept, frozenset(block.outputs) if kept or alone else frozenset())
        for node in block.forward:
            if node.id in saved or node.id in again:
                avals = [x.aval if isinstance(x, Literal) else graph.values[x].aval for x in node.inputs]
                key = signature(node.prim, avals, node.params if detailed else {})
                answers[key] += ((turn, number, node.id in saved) for turn in (node.id, *node.also))
    return {key: _turns([answer for _, *answer in sorted(found)]) for key, found in answers.items()}


def _word(block: Block, graph: Graph) -> tuple:
    return tuple((node.prim, *(graph.values[out].shape for out in node.outputs)) for node in block.forward)


def block_answers(block: Block, kept: frozenset[int] | None, waist: frozenset[int]) -> tuple[set[int], set[int]]:
    """(ids of nodes whose results are saved, ids of those that run again); the others' results nobody needs later.

    Args:
      block: from ``find_blocks``.
      kept: of the block, None for as written.
      waist: outputs of the block to save, because they can be inside the user's block. In a row of equal blocks that keep nothing, none:
        the user's block has its own boundary somewhere in each, which jax.checkpoint saves anyway.
    """
    if kept is None:
        wanted = {*block.residuals, *block.outputs}
        return {node.id for node in block.forward if wanted & {*node.outputs}}, set()
    nodes, reads = closure(block, kept)
    wanted = {*kept, *waist, *({*reads} - {*block.outputs})}
    saved = {node.id for node in block.forward if wanted & {*node.outputs}}
    again = {node.id for node in nodes} | {node.id for node in block.forward if {*block.outputs} & {*node.outputs}}
    return saved, again - saved


def signature(prim: str, avals: Sequence[Any], params: Mapping[str, Any]) -> tuple:
    """What an equation is known by: primitive, types of its operands, and those parameters that are plain data."""
    plain = tuple(f"{k}={v}" for k, v in sorted(params.items()) if _is_plain(v))
    return (prim, *(f"{a.dtype}{list(a.shape)}" for a in avals), *plain)


def _is_plain(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return all(map(_is_plain, x))
    return x is None or isinstance(x, (bool, int, float, str, enum.Enum, np.dtype, type))


def _turns(found: Sequence[Sequence]) -> Turns:
    """The shortest period of the answers in program order; without one, what most blocks have at each place."""
    answers = [answer for _, answer in found]
    count = len(answers)
    for period in range(1, count // 2 + 1):
        if count % period == 0 and answers == answers[:period] * (count // period):
            return tuple(answers[:period])
    blocks: dict[int, list[bool]] = defaultdict(list)
    for number, answer in found:
        blocks[number].append(answer)
    alike = Counter(map(tuple, blocks.values()))
    return max(alike, key=lambda turns: (alike[turns], len(turns)))
