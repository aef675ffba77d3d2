"""Sections of rows → text for a terminal, HTML for a page. Knows nothing of plans."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 120

_STYLE = (
    "<style>.jaxauto{font:13px/1.45 system-ui,sans-serif}.jaxauto table{border-collapse:collapse;margin:0 0 1em}"
    ".jaxauto th,.jaxauto td{padding:2px 10px 2px 0;text-align:left;vertical-align:top;border-bottom:1px solid #8884}"
    ".jaxauto td.n,.jaxauto th.n{text-align:right;font-variant-numeric:tabular-nums}"
    ".jaxauto h3{margin:.8em 0 .2em;font-size:1.05em}.jaxauto p{margin:.1em 0}.jaxauto code{font-size:.95em}</style>"
)


@dataclass(frozen=True)
class Section:
    """A title, a table and lines of text below it.

    Attributes:
      columns: headings; one that starts with ``>`` is of numbers and is set to the right.
      rows: one text for each column.
      lines: sentences; may stand without a table.
    """

    title: str
    columns: tuple[str, ...] = ()
    rows: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()


def as_text(sections: Sequence[Section]) -> str:
    """The sections as plain text, without colours, ``WIDTH`` columns wide."""
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, color_system=None, highlight=False, markup=False, emoji=False, legacy_windows=False)
    for number, section in enumerate(sections):
        if number:
            console.print()
        console.print(section.title)
        if section.rows:
            console.print(_rich_table(section))
        for line in section.lines:
            console.print(Text("  ") + Text(line))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _rich_table(section: Section) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, show_header=any(section.columns))
    for column in section.columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def as_html(sections: Sequence[Section]) -> str:
    """The sections as one self-contained ``<div>``: no scripts, no outside resources, every text escaped."""
    return f'<div class="jaxauto">{_STYLE}{"".join(map(_html_section, sections))}</div>'


def page(fragment: str, title: str) -> str:
    """A whole HTML document around a fragment."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head>'
        f"<body>{fragment}</body></html>\n"
    )


def _html_section(section: Section) -> str:
    parts = [f"<h3>{html.escape(section.title)}</h3>"]
    if section.rows:
        marks = [' class="n"' if column.startswith(">") else "" for column in section.columns]
        head = "".join(f"<th{mark}>{html.escape(column.lstrip('>'))}</th>" for mark, column in zip(marks, section.columns, strict=True))
        body = "".join(f"<tr>{_cells(marks, row)}</tr>" for row in section.rows)
        parts.append(f"<table>{f'<thead><tr>{head}</tr></thead>' if any(section.columns) else ''}<tbody>{body}</tbody></table>")
    parts += [f"<p>{html.escape(line)}</p>" for line in section.lines]
    return "".join(parts)


def _cells(marks: Sequence[str], row: Sequence[str]) -> str:
    return "".join(f"<td{mark}>{html.escape(cell)}</td>" for mark, cell in zip(marks, row, strict=True))


# -------------------------------------------------------------------------------------------------------------- quantities


def duration(seconds: float) -> str:
    """``"1.23 ms"``, in the unit that fits."""
    if seconds == float("inf"):
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-9:.0f} ns" if seconds else "0 s"


def size(bytes_: float, *, up: bool = False) -> str:
    """``"1.50 GiB"``, in the unit that fits; negative numbers keep their sign; ``up``: never less than it is."""
    for unit, one in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(bytes_) >= one:
            shown = math.ceil(100 * bytes_ / one) / 100 if up else bytes_ / one
            return f"{shown:.2f} {unit}"
    return f"{bytes_:.0f} B"


def flops(number: float) -> str:
    """``"1.50 Tflop"``, in the unit that fits."""
    for unit, one in (("Pflop", 1e15), ("Tflop", 1e12), ("Gflop", 1e9), ("Mflop", 1e6), ("kflop", 1e3)):
        if number >= one:
            return f"{number / one:.2f} {unit}"
    return f"{number:.0f} flop"


def share(part: float, whole: float) -> str:
    """``"12.5 %"``."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
