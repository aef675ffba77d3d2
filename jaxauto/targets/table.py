"""The table of known chips, for people: numbers, sources, and which compilers are installed."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxauto.targets.chip import GIB, Chip, Number
from jaxauto.targets.chips import CHIPS
from jaxauto.targets.compilers import INSTALL, compiler_of_platform

_NODE_LINKS = {"tpu": "ICI {:.0f} GB/s a link, {}-D torus", "gpu": "NVLink {:.0f} GB/s, 8 a node", "cpu": "shared memory {:.0f} GB/s"}
_COLUMNS = ("chip", "bf16", "f32", "int8", "fp8", "HBM", "HBM bandwidth", "interconnect", "host", "network", "largest", "compiler")
_MARKS = {"datasheet": "", "fitted": "~", "assumed": "?"}


@dataclass(frozen=True)
class TargetTable:
    """The known chips. Iterating gives ``Chip`` objects; printing gives a table; ``sources()`` says where each number comes from."""

    chips: tuple[Chip, ...]

    def __iter__(self) -> Iterator[Chip]:
        return iter(self.chips)

    def __len__(self) -> int:
        return len(self.chips)

    def __getitem__(self, name: str) -> Chip:
        return {chip.name: chip for chip in self.chips}[name]

    @property
    def rows(self) -> list[dict[str, str]]:
        """One dict of texts for each chip, by column."""
        return [_row(chip) for chip in self.chips]

    def sources(self) -> list[tuple[str, str, Number]]:
        """(chip, name of the figure, the figure with unit, source and origin), for every figure."""
        return [
            (chip.name, name, number)
            for chip in self.chips
            for name, number in [*((f"peak {dtype}", peak) for dtype, peak in chip.peaks.items()), *chip.numbers.items()]
        ]

    def __rich__(self) -> Group:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for column in _COLUMNS:
            table.add_column(column, no_wrap=column != "compiler", justify="right" if column in _COLUMNS[1:7] else "left")
        for row in self.rows:
            table.add_row(*(row[column] for column in _COLUMNS))
        return Group(table, Text(_legend(), style="dim"))

    def __str__(self) -> str:
        stream = io.StringIO()
        Console(file=stream, width=200, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(column)}</th>" for column in _COLUMNS)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(row[column])}</td>" for column in _COLUMNS) + "</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{html.escape(_legend())}</p>"


def _legend() -> str:
    return (
        "Per JAX device (a tpu7x chip is two). Tflop/s dense, Top/s for int8; GB is 1e9 bytes, GiB 2**30. HBM: what a program may use. "
        "~ fitted to measurements, ? assumed, else published; jaxauto.targets().sources() has the source of each."
    )


def _row(chip: Chip) -> dict[str, str]:
    link = chip.numbers["link_bandwidth"]
    return {
        "chip": chip.name,
        "bf16": _peak(chip, "bfloat16"),
        "f32": _peak(chip, "float32"),
        "int8": _peak(chip, "int8"),
        "fp8": _peak(chip, "float8_e4m3fn"),
        "HBM": _marked(chip.numbers["hbm_bytes"], GIB, "GiB", 2),
        "HBM bandwidth": _marked(chip.numbers["hbm_bandwidth"], 1e9, "GB/s", 0),
        "interconnect": _MARKS[link.origin] + _NODE_LINKS[chip.platform].format(link.value / 1e9, chip.dims),
        "host": _marked(chip.numbers["host_bandwidth"], 1e9, "GB/s", 0),
        "network": _marked(chip.numbers["network_bandwidth"], 1e9, "GB/s", 1),
        "largest": "x".join(map(str, chip.max_topology)) if chip.platform == "tpu" else "any",
        "compiler": compiler_of_platform(chip.platform) or INSTALL[chip.platform],
    }


def _peak(chip: Chip, dtype: str) -> str:
    number = chip.peaks.get(dtype)
    return _marked(number, 1e12, "", 0 if number.value >= 1e12 else 2) if number else "-"


def _marked(number: Number, unit: float, name: str, digits: int) -> str:
    return f"{_MARKS[number.origin]}{number.value / unit:.{digits}f} {name}".rstrip()


def targets() -> TargetTable:
    """The known chips with their numbers and sources: printable, iterable, shown as a table in notebooks."""
    return TargetTable(tuple(CHIPS.values()))
