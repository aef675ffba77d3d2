"""What a profile shows: rows by scope or equation, and live bytes along the program."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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

    _HEAD = ("scope", "phase", "times", "flops", "bytes", "live after", "output", "source")

    def __iter__(self):
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                *(r.name, r.phase, str(r.times), short(r.flops), short(r.bytes_, "B"), short(r.live_bytes, "B")),
                *(shape_text(r.dtype, r.shape), r.source),
            )
            for r in self.rows
        ]

    def __str__(self) -> str:
        return text_table(self._HEAD, self._cells(), right=(2, 3, 4, 5))

    def _repr_html_(self) -> str:
        return html_table(self._HEAD, self._cells())


@dataclass(frozen=True)
class Live:
    """One array that is alive at the peak: ``shape`` is of the whole array, ``bytes_`` what one device holds of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes_: float
    source: str = ""


@dataclass(frozen=True)
class Timeline:
    """Live bytes of one device along the program. A loop's body stands once, at its fullest.

    Attributes:
      live_bytes: ``float [positions]``. names, sources, phases: of the equation at each position.
      peak_position: where ``live_bytes`` is largest; peak: what lives there, largest first.
      turn: the position where the backward pass begins, or None.
    """

    live_bytes: np.ndarray
    names: tuple[str, ...]
    sources: tuple[str, ...]
    phases: tuple[str, ...]
    peak: tuple[Live, ...] = field(repr=False)
    turn: int | None = None

    @property
    def peak_position(self) -> int:
        return int(self.live_bytes.argmax())

    @property
    def peak_bytes(self) -> float:
        return float(self.live_bytes.max())

    def __len__(self) -> int:
        return len(self.live_bytes)

    def __str__(self) -> str:
        at = self.peak_position
        where = " · ".join(x for x in (self.names[at], self.phases[at], self.sources[at]) if x)
        cells = [(x.name, shape_text(x.dtype, x.shape), short(x.bytes_, "B"), x.source) for x in self.peak[:_SHOWN]]
        rest = self.peak[_SHOWN:]
        if rest:
            cells.append((f"and {len(rest)} more", "", short(sum(x.bytes_ for x in rest), "B"), ""))
        head = f"peak {short(self.peak_bytes, 'B')} at position {at} of {len(self)}: {where}"
        return head + "\n" + text_table(("alive at the peak", "array", "bytes", "made at"), cells, right=(2,))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def plot(self, path: Any = None) -> Any:
        """Draw live bytes along the program.

        Args:
          path: where to save the figure (``.png``, ``.svg``, ``.pdf``); None: not saved.

        Returns:
          The matplotlib Figure.

        Raises:
          ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("timeline.plot draws with matplotlib, which is not installed: pip install 'jaxauto[viz]'") from error
        figure = Figure(figsize=(9, 3.5), layout="constrained")
        axes = figure.add_subplot()
        positions = np.arange(len(self))
        axes.fill_between(positions, self.live_bytes / 1e9, step="mid", alpha=0.3)
        axes.step(positions, self.live_bytes / 1e9, where="mid")
        at = self.peak_position
        axes.annotate(
            f"{short(self.peak_bytes, 'B')}: {self.names[at]}",
            (at, self.peak_bytes / 1e9),
            xytext=(0, 6),
            textcoords="offset points",
            ha="right" if at > len(self) / 2 else "left",
        )
        if self.turn is not None:
            axes.axvline(self.turn, linestyle=":", color="gray")
            axes.text(self.turn, 0, " backward", color="gray", va="bottom")
        axes.set(xlabel="equation", ylabel="live GB", xlim=(0, len(self) - 1), ylim=(0, 1.12 * self.peak_bytes / 1e9))
        if path is not None:
            figure.savefig(path)
        return figure


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


def html_table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """The same for a notebook."""
    titles = "".join(f"<th>{html.escape(t)}</th>" for t in head)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in cells)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"
