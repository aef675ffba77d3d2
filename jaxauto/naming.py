"""Names as people write them: PartitionSpecs, argument paths, ranges of layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec


def local_shape(shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the largest piece that one device holds."""
    parts = [*spec, *[None] * (len(shape) - len(spec))]
    ways = [math.prod(sizes[a] for a in ((p,) if isinstance(p, str) else p or ())) for p in parts]
    return tuple(-(-n // w) for n, w in zip(shape, ways, strict=True))


def spec_text(spec: PartitionSpec) -> str:
    """``P("data", None, ("data", "model"))``: what one would write."""
    return f"P({', '.join(_part(p) for p in spec)})"


def _part(part: Any) -> str:
    if part is None or isinstance(part, str):
        return "None" if part is None else f'"{part}"'
    return "(" + ", ".join(f'"{a}"' for a in part) + ("," if len(part) == 1 else "") + ")"


_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")


def mask(path: str) -> str:
    """A path with its layer numbers hidden; the number of the argument itself stays."""
    head, dot, tail = path.partition(".")
    return head + dot + mask_all(tail)


def mask_all(text: str) -> str:
    """``text`` with its numbers hidden: ``"block[3]"`` → ``"block[#]"``."""
    return _NUMBER.sub("#", text)


def fold_paths(paths: Iterable[str]) -> list[tuple[str, int, str]]:
    """Paths alike but for numbers → ``("0.layers.[0-11].kernel", 12, "0.layers.0.kernel")``: name, how many, the first.

    Only full products of numbers are folded, so a name means exactly its paths.
    """
    rows: list[tuple[list[str], list[tuple[int, ...]], str]] = []
    for path in paths:
        head, dot, tail = path.partition(".")
        pieces = _NUMBER.split(tail)
        rows.append(([head + dot + pieces[0], *pieces[2::2]], [(int(n),) for n in pieces[1::2]], path))
    for slot in reversed(range(max((len(numbers) for _, numbers, _ in rows), default=0))):
        merged: dict[tuple, list[int]] = {}
        first: dict[tuple, tuple[list[str], str]] = {}
        for pieces, numbers, path in rows:
            key = (tuple(numbers[:slot]), tuple(numbers[slot + 1 :]))
            merged.setdefault(key, []).extend(numbers[slot])
            first.setdefault(key, (pieces, path))
        rows = [(first[key][0], [*key[0], tuple(sorted(merged[key])), *key[1]], first[key][1]) for key in merged]
    return [(_folded(pieces, numbers), math.prod(len(n) for n in numbers), path) for pieces, numbers, path in rows]


def _folded(pieces: list[str], numbers: list[tuple[int, ...]]) -> str:
    text = pieces[0]
    for n, piece in zip(numbers, pieces[1:], strict=True):
        text += (str(n[0]) if len(n) == 1 else f"[{_ranges(n)}]") + piece
    return text


def _ranges(numbers: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def mask_place(where: str) -> str:
    """A scope with its layer numbers hidden; of a source line the file's name and the function."""
    return short_source(where) if ".py:" in where else mask_all(where)


def fold_words(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Names alike but for a word that is neither first nor last → ``("0.opt.{mu,nu}.kernel", 2, 0)``: name, number, where the first is."""
    rows = [(name.split("."), 1, k) for k, name in enumerate(names)]
    for slot in range(1, max((len(words) for words, _, _ in rows), default=0) - 1):
        merged: dict[tuple, list[tuple[list[str], int, int]]] = {}
        for row in rows:
            words = row[0]
            key = (*words[:slot], None, *words[slot + 1 :]) if slot < len(words) - 1 else tuple(words)
            merged.setdefault(key, []).append(row)
        rows = [_one_of(members, slot) for members in merged.values()]
    return [(".".join(words), count, k) for words, count, k in rows]


def _one_of(members: list[tuple[list[str], int, int]], slot: int) -> tuple[list[str], int, int]:
    words, count, k = members[0]
    if len(members) == 1:
        return words, count, k
    choice = "{" + ",".join(row[0][slot] for row in members) + "}"
    return [*words[:slot], choice, *words[slot + 1 :]], sum(row[1] for row in members), k


def short_source(source: str) -> str:
    """``"/a/b/model.py:26:24 (Model.<locals>.block)"`` → ``"model.py:26:24 (block)"``."""
    place, blank, function = source.partition(" (")
    name = function.rstrip(")").rpartition(".")[2]
    return place.rpartition("/")[2] + (f" ({name})" if blank and name.isidentifier() else "")
