"""Seconds (and collectives) to bring an array from one sharding to another, vectorised over pairs of states.

For each mesh axis, from its position in the source to that in the target (partial: the source holds terms of a sum along the axis):

=====================  =====================================  =========================
from → to              what happens                           array the collective sees
=====================  =====================================  =========================
partial → dimension    reduce-scatter                         local bytes
partial → whole        all-reduce                             local bytes
whole → dimension      each device cuts its piece             free
dimension → other      all-to-all                             local bytes × axis size
axis comes or goes     collective-permute                     local bytes × axes' size
 before one that stays,
 or that is cut there
axis goes where        collective-permute                     new local bytes × axes' size
 another cuts
dimension → whole      all-gather                             local bytes × axis size
=====================  =====================================  =========================

in this order, so that what makes the array smaller comes first. Axes that need the same collective share one: all-to-alls those that go
from one dimension to one other (``rewrite/passage.py`` sees to it), all-gathers those of one dimension, but for gathers over all devices
where the compiler writes those as one all-reduce (``MeshAxes.sums_whole``). Axes on one dimension are in mesh order, major first: where an
axis joins or leaves on the major side of one that stays, the pieces are in another order than the mesh's, and change places.
Where one goes and another cuts the dimension, no new piece is of a device's old one: all are sent, once old pieces are joined that make
one (``scripts/results/exchanges.md``).

A reduce-scatter is an all-reduce of which each device keeps its piece (on TPU, ``scripts/results/sums.md``) where it goes to several
dimensions and over all devices of some topologies (``MeshAxes.scatters_whole``).

Terms of a sum that goes to a dimension which an axis splits on the minor side are summed where they are: ``positions.made_in`` has them
pinned so, as the partitioner would gather what they are made of (``scripts/results/exchanges.md``). Then each device has a part of what
another needs and sends it, in one collective-permute, whatever else changes; what takes more than a device has is gathered then. The sum
is scattered if the array is cut in one dimension, by as many as it is summed over; else it is one all-reduce.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from jaxauto.core import MeshAxes
from jaxauto.cost.collectives import collective_seconds
from jaxauto.strategies import WHOLE, shards

_SUMS = ("all-reduce", "reduce-scatter")


def passage_seconds(source: np.ndarray, target: np.ndarray, bytes_: float, mesh: MeshAxes, partial: np.ndarray | None = None) -> np.ndarray:
    """Seconds for every pair of states: the sum of ``passage_tables``."""
    return passage_tables(source, target, bytes_, mesh, partial).sum(0)


def passage_tables(
    source: np.ndarray,
    target: np.ndarray,
    bytes_: float,
    mesh: MeshAxes,
    partial: np.ndarray | None = None,
    beside: np.ndarray | None = None,
    together: int = 1,
) -> np.ndarray:
    """Seconds for every pair of states: of collectives that other work can hide, and of those that are waited for.

    Args:
      source: ``[a, axes]`` positions in the array's dimensions. target: ``[b, axes]``.
      bytes_: of the whole array.
      partial: ``bool [a, axes]``, axes along which the source is a term of a sum.
      beside: ``bool [a, b]``, sums that are scattered beside what makes them (``windowed.py``), where the compiler has windows; None: none.
      together: sums that the compiler makes as one all-reduce, this one among them: it is charged its share.

    Returns:
      ``float [2, a, b]``.
    """
    tables = np.zeros((2, len(source), len(target)))
    waited = np.ones(tables.shape[1:], bool) if beside is None else ~beside
    for kind, written, amount, axes, chosen in _steps(source, target, bytes_, mesh, partial):
        sizes, links = _subset(mesh, axes)
        alone = kind == "all-to-all" and mesh.windows is not None  # XLA:TPU runs no exchange beside work
        waits = waited[chosen] if kind in _SUMS and mesh.windows else np.full(len(amount), written != kind or alone)
        ring = _in_a_ring(axes, mesh) if kind in _SUMS and mesh.windows else 1.0
        tables[0][chosen] += np.where(waits, 0.0, collective_seconds(kind, ring * amount, sizes, links))
        tables[1][chosen] += np.where(waits, _shared(written, amount, sizes, links, together), 0.0)
    return tables


def _shared(written: str, amount: np.ndarray, sizes: list, links: list, together: int) -> np.ndarray:
    """Seconds of one of ``together`` all-reduces of one size that are made as one; of any other collective."""
    count = together if written == "all-reduce" else 1
    return collective_seconds(written, count * amount, sizes, links) / count


def _in_a_ring(axes: tuple[int, ...], mesh: MeshAxes) -> float:
    """What n devices send beside a dot, in bytes of a reduce-scatter: n + 1 pieces, not n - 1 (``results/rings.md``)."""
    n = math.prod(mesh.sizes[a] for a in axes)
    return (n + 1) / max(1, n - 1)


def _written(kind: str, axes: tuple[int, ...], mesh: MeshAxes) -> str:
    """The collective that the compiler makes of one."""
    whole = {"all-gather": mesh.sums_whole, "reduce-scatter": mesh.sums_whole or mesh.scatters_whole}
    return "all-reduce" if whole.get(kind) and _is_whole(axes, mesh) else kind


def _is_whole(axes: tuple[int, ...], mesh: MeshAxes) -> bool:
    return all(n == 1 or a in axes for a, n in enumerate(mesh.sizes))


def passage_collectives(
    source: np.ndarray,
    target: np.ndarray,
    bytes_: float,
    mesh: MeshAxes,
    partial: np.ndarray | None = None,
    *,
    beside: bool = False,
    together: int = 1,
) -> list[tuple[str, float, tuple[int, ...], float]]:
    """The collectives of one passage: list of (kind, bytes of the full array on the group, axis indices, seconds).

    ``beside``: the sum is scattered beside what makes it. ``together``: as above.
    """
    part = None if partial is None else partial[None]
    found = []
    for kind, written, amount, axes, _ in _steps(source[None], target[None], bytes_, mesh, part):
        sizes, links = _subset(mesh, axes)
        ring = beside and kind in _SUMS
        sent = amount * (_in_a_ring(axes, mesh) if ring else 1.0)
        waits = kind in _SUMS and bool(mesh.windows) and not ring
        seconds = _shared(kind if ring else written, sent, sizes, links, together if waits else 1)
        found += [(kind, float(sent[0]), axes, float(seconds[0]))]
    return found


def _subset(mesh: MeshAxes, axes: tuple[int, ...]):
    return [mesh.sizes[a] for a in axes], [mesh.links[a] for a in axes]


def _steps(source, target, bytes_, mesh, partial) -> Iterator[tuple[str, str, np.ndarray, tuple[int, ...], tuple]]:
    """(kind, as the compiler writes it, bytes for each chosen pair, axes, index of the chosen pairs), in order of running."""
    s, t = source[:, None, :], target[None, :, :]
    p = np.zeros_like(s, bool) if partial is None else partial[:, None, :]
    sizes = np.asarray(mesh.sizes, float)
    local = np.broadcast_to((bytes_ / shards(source, mesh.sizes))[:, None], (len(source), len(target))).copy()
    whole_s, whole_t = s == WHOLE, t == WHOLE
    minor = under(p & ~whole_t, s, t)
    inside = minor.any(-1, keepdims=True)
    scatter, reduce_, cut = p & ~whole_t & ~inside, p & whole_t & ~inside, whole_s & ~whole_t & (~p | inside)
    fewer = (shards(target, mesh.sizes) < shards(source, mesh.sizes)[:, None])[..., None]
    left, gather = ~whole_s & ~inside, ~whole_s & whole_t & (~inside | fewer)

    yield from _inside(s, t, p, minor, bytes_, mesh)
    for axes, chosen in _by_axes(scatter):
        kind = "reduce-scatter" if mesh.scatters else "all-reduce"
        apart = _to_several(t, axes, chosen) if mesh.windows else np.zeros(len(chosen[0]), bool)
        for written, here in (("all-reduce", apart), (_written(kind, axes, mesh), ~apart)):
            some = tuple(index[here] for index in chosen)
            if here.any():
                yield kind, written, local[some], axes, some
    local = local / np.where(scatter | cut, sizes, 1.0).prod(-1)
    for axes, chosen in _by_axes(reduce_):
        yield "all-reduce", "all-reduce", local[chosen], axes, chosen
    out, into = _swapped(left & (s != t), whole_s & ~whole_t & ~p & ~inside, s, t)
    alone, exchanged, gathered = _parts(out, into, sizes)
    for together in _exchanges(left & ~whole_t & (s != t) & ~alone, s, t):
        for axes, chosen in _by_axes(together):
            some = np.where(out[chosen][:, axes].any(-1), exchanged[chosen], 1.0)
            yield "all-to-all", "all-to-all", some * local[chosen] * np.prod(sizes[list(axes)]), axes, chosen
    local = local * np.where(gather & alone, sizes, 1.0).prod(-1)
    gather = gather & ~alone
    grown = np.where(gather & out, sizes, 1.0).prod(-1)
    for axes, chosen in _by_axes((_reordered(s, t, p) & ~inside) | out | into):
        yield "collective-permute", "collective-permute", (local * grown)[chosen] * np.prod(sizes[list(axes)]), axes, chosen
    if mesh.sums_whole:
        for axes, chosen in _by_axes(gather):
            if _is_whole(axes, mesh):
                yield "all-gather", "all-reduce", local[chosen] * np.prod(sizes[list(axes)]), axes, chosen
                gather[chosen] = False
    for dim in range(int(source.max(initial=WHOLE)) + 1):  # one all-gather joins pieces along one dimension
        for axes, chosen in _by_axes(gather & (s == dim)):
            full = local[chosen] * np.prod(sizes[list(axes)])
            some = np.where(out[chosen][:, axes].any(-1), gathered[chosen], 1.0)
            yield "all-gather", _written("all-gather", axes, mesh), some * full, axes, chosen
            local[chosen] = full


def _inside(s, t, p, minor, bytes_, mesh) -> Iterator[tuple[str, str, np.ndarray, tuple[int, ...], tuple]]:
    """Of sums to a dimension that ``minor`` axes split inside: the sum, and what devices send each other then."""
    sizes, inside = np.asarray(mesh.sizes, float), minor.any(-1)
    once = _cut_once(p, s, t, sizes)
    pieces = np.broadcast_arrays(*(np.where(where == WHOLE, 1.0, sizes).prod(-1) for where in (s, t)))
    for kind, pairs in ("all-reduce", inside & ~once), ("reduce-scatter" if mesh.scatters else "all-reduce", inside & once):
        for axes, chosen in _by_axes(p & pairs[..., None]):
            yield kind, _written(kind, axes, mesh), bytes_ / pieces[0][chosen], axes, chosen
    for axes, chosen in _by_axes(np.where(p, t != WHOLE, minor | (s != t)) & inside[..., None]):
        device = bytes_ / np.maximum(*pieces)[chosen]
        yield "collective-permute", "collective-permute", device * np.prod(sizes[list(axes)]), axes, chosen


def _exchanges(exchange: np.ndarray, s: np.ndarray, t: np.ndarray) -> Iterator[np.ndarray]:
    """The axes that go together from one dimension to another: ``bool [a, b, axes]`` for each axis as their first."""
    for first in range(exchange.shape[-1]):
        one = slice(first, first + 1)
        alike = exchange & exchange[..., one] & (s == s[..., one]) & (t == t[..., one])
        yield alike & ~alike[..., :first].any(-1, keepdims=True)


def _to_several(t: np.ndarray, axes: tuple[int, ...], chosen: tuple) -> np.ndarray:
    """Whether the axes go to different dimensions, of each chosen pair."""
    there = t[0, chosen[1]][:, list(axes)]
    return (there != there[:, :1]).any(-1)


def under(scatter: np.ndarray, s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Axes that split a dimension on the minor side of one over which a sum is scattered to it: ``bool [a, b, axes]``.

    Args:
      scatter: ``bool [a, b, axes]``. s, t: ``[a or 1, b or 1, axes]`` positions in the array's dimensions, before and after.
    """
    found = np.zeros(scatter.shape, bool)
    for major, minor in itertools.combinations(range(scatter.shape[-1]), 2):
        found[..., minor] |= scatter[..., major] & (s[..., minor] == t[..., major])
    return found


def _cut_once(p: np.ndarray, s: np.ndarray, t: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Whether one dimension is cut into as many more as a sum is over, and no other into more or less: ``bool [a, b]``."""
    pieces = lambda where: np.stack([np.where(where == d, sizes, 1.0).prod(-1) for d in range(max(s.max(), t.max(), 0) + 1)])  # noqa: E731
    more = pieces(t) / pieces(s)
    return ((more != 1).sum(0) == 1) & (more == np.where(p, sizes, 1.0).prod(-1)).any(0)


def _swapped(leaves: np.ndarray, cuts: np.ndarray, s: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Axes that leave a dimension which others cut, that nothing was split along before; and these: ``bool [a, b, axes]`` each.

    A device's new piece is not a piece of its old one: each sends the whole of another's.
    """
    out, into = np.zeros(leaves.shape, bool), np.zeros(leaves.shape, bool)
    for a, b in itertools.permutations(range(leaves.shape[-1]), 2):
        hit = leaves[..., a] & cuts[..., b] & (s[..., a] == t[..., b])
        out[..., a] |= hit
        into[..., b] |= hit
    return out, into


def _parts(out: np.ndarray, into: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of axes that go ``out`` as others come ``into`` their dimension: those that do nothing else, ``bool [a, b, axes]``; and what part is
    left of an exchange along the others, and of a gather, ``[a, b]``.

    Cut into as many pieces as before, or more, each new piece is of one old piece. Into fewer, so many old pieces are joined before.
    """
    gone, come = (np.where(which, sizes, 1.0).prod(-1) for which in (out, into))
    joined = np.maximum(gone / come, 1.0)
    return out & (gone <= come)[..., None], joined / gone, (joined - 1) / np.maximum(gone - 1, 1.0)


def _reordered(s: np.ndarray, t: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Axes between which pieces of one dimension change places: ``bool [a, b, axes]``."""
    turned = np.zeros(np.broadcast_shapes(s.shape, t.shape), bool)
    moved, stays = s != t, (s == t) & (s != WHOLE)
    exchanged, cut = moved & (s != WHOLE) & (t != WHOLE), (s == WHOLE) & (t != WHOLE) & ~p
    for major, minor in itertools.combinations(range(turned.shape[-1]), 2):
        shared = (s[..., major] == s[..., minor]) | (t[..., major] == t[..., minor])
        hit = moved[..., major] & stays[..., minor] & shared & ~p[..., major]
        hit |= exchanged[..., major] & cut[..., minor] & (t[..., major] == t[..., minor])
        turned[..., major] |= hit
        turned[..., minor] |= hit
    return turned


def _by_axes(where: np.ndarray) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Pairs that need the same set of axes together."""
    number = where.shape[-1]
    code = (where * (1 << np.arange(number))).sum(-1)
    for size in range(1, number + 1):
        for axes in itertools.combinations(range(number), size):
            chosen = np.nonzero(code == sum(1 << a for a in axes))
            if len(chosen[0]):
                yield axes, chosen
