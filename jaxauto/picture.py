"""Live memory along a program, drawn: as SVG text for notebooks and pages, as a matplotlib figure for files."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxauto.timeline import Timeline, short

COLOURS = {
    "parameters": "#4c78a8",
    "optimizer state": "#9ecae9",
    "batch and other inputs": "#bab0ac",
    "activations kept": "#f58518",
    "gradients and updates": "#54a24b",
    "results": "#b279a2",
    "transients": "#e45756",
}
_PHASE_COLOURS = {"forward": "#88888833", "backward": "#88888877", "optimizer": "#888888bb"}
_COLUMNS = 400
_WIDTH, _HEIGHT, _LEFT, _TOP, _STRIP = 900, 260, 70, 26, 8  # pixels; the strip below the axis shows the phases


@dataclass(frozen=True)
class Columns:
    """Of neighbouring positions of a timeline the one where most is alive. ``positions [columns]``; ``stacks [kinds, columns]``."""

    positions: np.ndarray
    kinds: tuple[str, ...]
    stacks: np.ndarray

    @staticmethod
    def of(timeline: Timeline, limit: int = _COLUMNS) -> Columns:
        """At most ``limit`` columns; the peak is always among them."""
        parts = np.array_split(np.arange(len(timeline)), min(limit, len(timeline)))
        positions = np.array([part[int(timeline.live_bytes[part].argmax())] for part in parts])
        kinds = tuple(k for k in COLOURS if k in timeline.by_kind)
        stacks = np.array([timeline.by_kind[k][positions] for k in kinds]).reshape(len(kinds), len(positions))
        return Columns(positions, kinds, stacks)


def svg(timeline: Timeline) -> str:
    """The picture as one ``<svg>`` element: no script, nothing from outside; what stands at a column shows under the pointer."""
    columns = Columns.of(timeline)
    count, top = len(columns.positions), 1.1 * max(timeline.peak_bytes, 1.0)
    bottom = _HEIGHT - _STRIP - 18
    x = np.linspace(_LEFT, _WIDTH - 10, count + 1)
    edges = np.vstack([np.zeros(count), np.cumsum(columns.stacks, axis=0)])
    y = bottom - edges * (bottom - _TOP) / top
    parts = [_area(x, y[k], y[k + 1], COLOURS[kind], kind) for k, kind in enumerate(columns.kinds)]
    for tick in _ticks(timeline.peak_bytes):
        at = bottom - tick * (bottom - _TOP) / top
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{at:.1f}" y2="{at:.1f}" stroke="#8884"/>')
        parts.append(_text(_LEFT - 6, at + 4, short(tick, "B"), "end"))
    parts += _phase_strip(timeline, columns, x, bottom + 2)
    parts += _hover(timeline, columns, x, bottom)
    peak = int(np.flatnonzero(columns.positions == timeline.peak_position)[0])
    middle = (x[peak] + x[peak + 1]) / 2
    parts.append(f'<path d="M{middle:.1f} {y[-1][peak]:.1f}l-4 -7h8z" fill="currentColor"/>')
    side = "end" if middle > _WIDTH / 2 else "start"
    parts.append(_text(middle, y[-1][peak] - 9, f"{short(timeline.peak_bytes, 'B')} at {timeline.names[timeline.peak_position]}", side))
    parts += _legend(columns.kinds)
    style = "font:11px system-ui,sans-serif;max-width:100%"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" style="{style}" role="img">{"".join(parts)}</svg>'


def figure(timeline: Timeline) -> Any:
    """The picture as a matplotlib Figure.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("timeline.plot draws with matplotlib, which is not installed: pip install 'jaxauto[viz]'") from error
    columns = Columns.of(timeline, 4 * _COLUMNS)
    drawn = Figure(figsize=(9, 3.5), layout="constrained")
    axes = drawn.add_subplot()
    axes.stackplot(
        columns.positions,
        columns.stacks / 1e9,
        labels=columns.kinds,
        colors=[COLOURS[k] for k in columns.kinds],
        step="mid",  # type: ignore[arg-type]
    )
    at = timeline.peak_position
    side = "right" if at > len(timeline) / 2 else "left"
    text = f"{short(timeline.peak_bytes, 'B')}: {timeline.names[at]}"
    axes.annotate(text, (at, timeline.peak_bytes / 1e9), xytext=(0, 6), textcoords="offset points", ha=side)
    if timeline.turn is not None:
        axes.axvline(timeline.turn, linestyle=":", color="gray")
        axes.text(timeline.turn, 0, " backward", color="white", va="bottom")
    axes.set(xlabel="equation", ylabel="live GB", xlim=(0, max(len(timeline) - 1, 1)), ylim=(0, 1.15 * max(timeline.peak_bytes, 1.0) / 1e9))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True, frameon=False)
    return drawn


# ----------------------------------------------------------------------------------------------------------------- pieces


def _area(x: np.ndarray, low: np.ndarray, high: np.ndarray, colour: str, kind: str) -> str:
    """One kind as steps between two edges."""
    over = "".join(f"V{h:.1f}H{b:.1f}" for h, b in zip(high, x[1:], strict=True))
    under = "".join(f"V{h:.1f}H{a:.1f}" for h, a in zip(low[::-1], x[-2::-1], strict=True))
    return f'<path d="M{x[0]:.1f} {low[0]:.1f}{over}{under}z" fill="{colour}"><title>{html.escape(kind)}</title></path>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{html.escape(text)}</text>'


def _ticks(peak: float) -> list[float]:
    """Three to seven round numbers of bytes from 0 to the peak."""
    ten = 10.0 ** np.floor(np.log10(max(peak, 1.0)))
    step = next(s for s in (2 * ten, ten, ten / 2, ten / 5) if peak / s >= 2 or s == ten / 5)
    return [k * step for k in range(int(peak / step) + 1)]


def _phase_strip(timeline: Timeline, columns: Columns, x: np.ndarray, y: float) -> list[str]:
    """Which phase each column belongs to. Each is named where it begins; the optimizer, parts of which come early, at its longest run."""
    parts: list[str] = []
    runs: dict[str, list[tuple[float, float]]] = {}  # phase → (width, left end)
    start = 0
    for phase, run in itertools.groupby(timeline.phases[p] for p in columns.positions):
        stop = start + len(list(run))
        if phase in _PHASE_COLOURS:
            width = float(x[stop] - x[start])
            colour = _PHASE_COLOURS[phase]
            parts.append(f'<rect x="{x[start]:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_STRIP}" fill="{colour}"/>')
            runs.setdefault(phase, []).append((width, float(x[start])))
        start = stop
    for phase, found in runs.items():
        if sum(width for width, _ in found) > 7 * len(phase):
            left = max(found)[1] if phase == "optimizer" else found[0][1]
            parts.append(_text(left, y + _STRIP + 12, phase))
    return parts


def _hover(timeline: Timeline, columns: Columns, x: np.ndarray, bottom: float) -> list[str]:
    found = []
    for k, position in enumerate(columns.positions):
        text = f"{timeline.names[position]}: {short(float(timeline.live_bytes[position]), 'B')}"
        size = f'width="{x[k + 1] - x[k]:.1f}" height="{bottom - _TOP:.0f}"'
        found.append(f'<rect x="{x[k]:.1f}" y="{_TOP}" {size} fill="transparent"><title>{html.escape(text)}</title></rect>')
    return found


def _legend(kinds: Sequence[str]) -> list[str]:
    parts, x = [], float(_LEFT)
    for kind in kinds:
        parts.append(f'<rect x="{x:.0f}" y="2" width="10" height="10" fill="{COLOURS[kind]}"/>{_text(x + 14, 11, kind)}')
        x += 30 + 6 * len(kind)
    return parts
