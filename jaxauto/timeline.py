"""What a profile shows: rows by scope or equation, and live bytes along the program."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxauto.errors import ArgumentError
from jaxauto.tables import Section, as_html, duration

_UNITS = ("", "K", "M", "G", "T", "P", "E")


@dataclass(frozen=True)
class Row:
    """One equation, or all equations of one scope and phase; for one device, loops times their trips.

    Attributes:
      name: scope and primitive; phase: ``"forward" | "backward" | "optimizer"``.
      flops: see ``Profile.flops``. bytes_: HBM traffic. live_bytes: device memory alive after it (after its last equation).
      seconds: roofline on the target; None without a target.
      shape, dtype: of its (last) result, whole. source: ``"file.py:12 (function)"``.
      times: how often it runs in a step (the first equation). equations: how many there are.
    """

    name: str
    phase: str
    flops: float
    bytes_: float
    live_bytes: float
    seconds: float | None
    shape: tuple[int, ...]
    dtype: str
    source: str
    times: int
    equations: int = 1


@dataclass(frozen=True)
class Table:
    """Rows in program order. Prints as a table; iterates over its rows."""

    rows: tuple[Row, ...]

    def __iter__(self):
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def only(self, phase: str) -> Table:
        """The rows of one phase: ``"forward" | "backward" | "optimizer"``."""
        return Table(tuple(r for r in self.rows if r.phase == phase))

    def largest(self, count: int, by: str = "flops", *, ordered: bool = False) -> Table:
        """The ``count`` rows that have most of a column, most first.

        Args:
          by: ``"flops" | "bytes_" | "seconds" | "live_bytes"``; seconds need a profile with a target.
          ordered: in program order instead.
        """
        if by not in _NUMBERS or (by == "seconds" and any(r.seconds is None for r in self.rows)):
            known = ", ".join(n for n in _NUMBERS if n != "seconds" or (self.rows and self.rows[0].seconds is not None))
            raise ArgumentError(f"largest(by={by!r}): these rows have {known}; seconds need profile(..., target=).")
        chosen = sorted(range(len(self.rows)), key=lambda k: (-getattr(self.rows[k], by), k))[:count]
        return Table(tuple(self.rows[k] for k in (sorted(chosen) if ordered else chosen)))

    def _columns(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Headings, and the texts of each row; time only if there is any."""
        timed = any(r.seconds is not None for r in self.rows)
        head = ("scope", "phase", "times", "flops", "bytes", *(("time",) if timed else ()), "live after", "output", "source")
        cells = [
            (
                *(r.name, r.phase, str(r.times), short(r.flops), short(r.bytes_, "B")),
                *((duration(r.seconds or 0.0),) if timed else ()),
                *(short(r.live_bytes, "B"), shape_text(r.dtype, r.shape), source_text(r.source)),
            )
            for r in self.rows
        ]
        return head, cells

    def __str__(self) -> str:
        head, cells = self._columns()
        return text_table(head, cells, right=range(2, len(head) - 2))

    def _repr_html_(self) -> str:
        head, cells = self._columns()
        right = range(2, len(head) - 2)
        return as_html([Section("", tuple(f">{h}" if k in right else h for k, h in enumerate(head)), cells)])


@dataclass(frozen=True)
class Live:
    """An array that is alive at the peak: ``shape`` of the whole, ``bytes_`` what one device holds of it; kind: see ``Profile.memory``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes_: float
    source: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Timeline:
    """Live bytes of one device along the program. A loop's body stands once, at its fullest.

    Attributes:
      live_bytes: ``float [positions]``. names, sources, phases: of the equation at each position.
      peak_position: where ``live_bytes`` is largest; peak: what lives there, largest first.
      turn: the position where the backward pass begins, or None.
      by_kind: kind → ``float [positions]``, those that occur; they sum to ``live_bytes``.
    """

    live_bytes: np.ndarray
    names: tuple[str, ...]
    sources: tuple[str, ...]
    phases: tuple[str, ...]
    peak: tuple[Live, ...] = field(repr=False)
    turn: int | None = None
    by_kind: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def peak_position(self) -> int:
        return int(self.live_bytes.argmax())

    @property
    def peak_bytes(self) -> float:
        return float(self.live_bytes.max())

    def __len__(self) -> int:
        return len(self.live_bytes)

    def __str__(self) -> str:
        return self._head() + "\n" + text_table(_PEAK_HEAD, self._peak_cells(), right=(3,))

    def _repr_html_(self) -> str:
        from jaxauto.picture import svg

        columns = tuple(f">{h}" if k == 3 else h for k, h in enumerate(_PEAK_HEAD))
        return svg(self) + as_html([Section(self._head(), columns, self._peak_cells())])

    def _head(self) -> str:
        at = self.peak_position
        where = " · ".join(x for x in (self.names[at], self.phases[at], source_text(self.sources[at])) if x)
        return f"peak {short(self.peak_bytes, 'B')} at position {at} of {len(self)}: {where}"

    def _peak_cells(self) -> list[tuple[str, ...]]:
        cells = [(x.name, x.kind, shape_text(x.dtype, x.shape), short(x.bytes_, "B"), source_text(x.source)) for x in self.peak[:_SHOWN]]
        rest = self.peak[_SHOWN:]
        return cells + ([(f"and {len(rest)} more", "", "", short(sum(x.bytes_ for x in rest), "B"), "")] if rest else [])

    def plot(self, path: Any = None) -> Any:
        """Draw live bytes along the program, by kind.

        Args:
          path: where to save the figure (``.png``, ``.svg``, ``.pdf``); None: not saved.

        Returns:
          The matplotlib Figure.

        Raises:
          ImportError: matplotlib is not installed.
        """
        from jaxauto.picture import figure

        drawn = figure(self)
        if path is not None:
            drawn.savefig(path)
        return drawn


_PEAK_HEAD = ("alive at the peak", "kind", "array", "bytes", "made at")
_NUMBERS = ("flops", "bytes_", "seconds", "live_bytes")
_SHOWN = 12


# ---------------------------------------------------------------------------------------------------------------- text


def short(number: float, unit: str = "") -> str:
    """``"1.23 GB"``: three digits and a decimal prefix."""
    index = 0
    while abs(number) >= 999.5 and index < len(_UNITS) - 1:
        number /= 1000
        index += 1
    digits = f"{number:.0f}" if index == 0 and number == int(number) else f"{number:.3g}"
    return f"{digits} {_UNITS[index]}{unit}".strip()


def shape_text(dtype: str, shape: Sequence[int]) -> str:
    """``"bfloat16[8,1024]"``."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def source_text(source: str) -> str:
    """``"/home/me/project/train/model.py:12 (f)"`` → ``"train/model.py:12 (f)"``: the file and the folder it is in."""
    path, separator, function = source.partition(" ")
    return "/".join(path.replace("\\", "/").split("/")[-2:]) + separator + function


def text_table(head: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table for a terminal, as text."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for k, title in enumerate(head):
        table.add_column(title, justify="right" if k in right else "left", overflow="fold", no_wrap=k in right)
    for row in cells:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    console = Console(file=io.StringIO(), width=160, no_color=True, force_terminal=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines() if line.strip())  # type: ignore[attr-defined]
