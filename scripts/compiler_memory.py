"""What lies in memory at the peak, as told and as compiled: python scripts/compiler_memory.py "flax | PPO | data | off | v5e" FOLDER.

Compiles a row of bench_accuracy.py ahead of time, has XLA:TPU write its buffers to FOLDER, and lists the largest ones of the heap where
most is live: bytes, address, steps of the schedule, the instruction that made it. Before them what the planner believes to be there at its
peak, with positions in its program. What both know needs no thought; the rest says what is told wrong. Arguments are not in the heap.
Beside the heap stands what cost/heap.py makes of its buffers: the same on CPU, where that is how they are placed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import bench_accuracy  # noqa: E402
from compiler_passes import dump  # noqa: E402

from jaxauto.cost.heap import packed  # noqa: E402
from jaxauto.solve.live import timeline  # noqa: E402

MIB = 2**20


class Slot(NamedTuple):
    """A value in the heap: bytes at ``offset`` from one step of the schedule to another."""

    bytes_: int
    offset: int
    begin: int
    end: int
    name: str
    shape: str


def told(plan: Any, most: int) -> None:
    """The planner's buffers at its peak."""
    best = plan.program.solved.best
    model, live = best.model, timeline(best.model, best.x)
    at, b, sizes = int(live.argmax()), model.buffers, model.buffer_sizes(best.x)
    alive = np.nonzero((b.start <= at) & (at <= b.end))[0]
    print(f"told: {live[at] / MIB:,.1f} MiB at {at} of {len(live)}, {(live[at] - sizes[alive].sum()) / MIB:,.1f} beside buffers")
    for k in sorted(alive, key=lambda k: -sizes[k])[:most]:
        value = model.values[int(model.variant.origin[k])]
        what = "argument" if b.is_input[k] else getattr(value.producer, "prim", "")
        print(f"{sizes[k] / MIB:10,.2f}  {b.start[k]}..{b.end[k]}  {value.dtype}{list(value.shape)}  {what}")


def slots(folder: Path) -> list[Slot]:
    """The heap of HBM, of the files that XLA wrote."""
    (ranges,), (assigned,) = (
        [path.read_text() for path in folder.glob(f"*after_optimizations-{name}.txt")] for name in ("live-range", "buffer-assignment")
    )
    lives = ranges[ranges.index("BufferLiveRange:") : ranges.index("Live ranges at")]
    steps = {name: (int(a), int(b)) for name, a, b in re.findall(r"^ +(\S+\{[\d,]*\}):(\d+)-(\d+)", lives, re.MULTILINE)}
    heap = next(
        part
        for part in re.split(r"^allocation ", assigned, flags=re.MULTILINE)
        if re.match(r"\d+: size \d+, (page \d+, )?preallocated-temp", part)
    )
    values = re.findall(r"value: <\d+ (\S+) (?:\(phi\) )?@\d+> \(size=(\d+),offset=(\d+)\): (\S+)", heap)
    named = ((name if name.endswith("}") else f"{name}{{}}", int(size), int(at), shape) for name, size, at, shape in values)
    return [Slot(size, at, *steps[name], name, shape) for name, size, at, shape in named if name in steps]


def live_at(found: Iterable[Slot], step: int) -> tuple[int, list[Slot]]:
    """(bytes that are taken, the values): where one lies upon another they are one buffer."""
    there = sorted((s for s in found if s.begin <= step <= s.end), key=lambda s: (s.offset, -s.bytes_))
    taken = reached = 0
    for s in there:
        end = s.offset + s.bytes_
        taken, reached = taken + max(0, end - max(s.offset, reached)), max(reached, end)
    return taken, there


def placed(found: Iterable[Slot]) -> float:
    """Bytes of the heap by ``cost/heap.py``: values that lie upon each other are one array."""
    arrays: list[list[int]] = []
    for s in sorted(found, key=lambda s: (s.offset, s.bytes_, s.begin)):
        if arrays and arrays[-1][:2] == [s.offset, s.bytes_] and s.begin <= arrays[-1][3]:
            arrays[-1][3] = max(arrays[-1][3], s.end)
        else:
            arrays.append([s.offset, s.bytes_, s.begin, s.end])
    _, bytes_, begin, end = np.array(arrays).T
    return packed(begin, end, bytes_.astype(float))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", help="group | model | sharding | setting | chip, a TPU")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, default=30, help="buffers in each list")
    options = parser.parse_args()
    if options.folder.is_dir() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} has files in it: name a new folder, XLA's files are told apart by their names alone")
    plan = bench_accuracy.plan_of(*(part.strip() for part in options.row.split("|")))
    told(plan, options.most)
    dump(plan, options.folder, "none")
    found = slots(options.folder)
    step = max((s.begin for s in found), key=lambda step: live_at(found, step)[0])
    taken, there = live_at(found, step)
    print(f"compiled: {taken / MIB:,.1f} MiB in the heap at {step}")
    heap = max(s.offset + s.bytes_ for s in found)
    print(f"heap: {heap / MIB:,.1f} MiB with its gaps, {placed(found) / MIB:,.1f} as XLA:CPU would place it")
    first: dict[tuple[int, int], Slot] = {}
    for s in there:
        first.setdefault((s.offset, s.bytes_), s)
    for s in sorted(first.values(), key=lambda s: -s.bytes_)[: options.most]:
        print(f"{s.bytes_ / MIB:10,.2f}  at {s.offset / MIB:,.1f}  {s.begin}..{s.end}  {s.shape}  {s.name}")


if __name__ == "__main__":
    main()
