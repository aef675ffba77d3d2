"""The program between the passes of XLA:TPU: python scripts/compiler_passes.py "flax | Llama | data | off | v5e" FOLDER.

Compiles a row of bench_accuracy.py ahead of time and writes the HLO before and after each pass that changes it, text, in order, to FOLDER.
Where a schedule surprises, two such folders tell by which pass programs went apart: what results/pins.md measures was found so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import bench_accuracy  # noqa: E402

from jaxauto import aot  # noqa: E402
from jaxauto.verify import compile_ahead  # noqa: E402


def dump(plan: Any, folder: Path, passes: str) -> None:
    """Compiles a plan; the compiler writes what it knows to ``folder``, and the program after each pass that ``passes`` matches.

    Raises:
      aot.CompilerFailure: the compiler refused.
    """
    told = {"xla_dump_to": str(folder.resolve()), "xla_dump_hlo_as_text": "True", "xla_dump_hlo_pass_re": passes}
    compile_module = aot.compile_module

    def dumping(module: str, target: Any, mesh: Any, timeout: float, memory: Any, known: Any) -> aot.Compiled:
        return compile_module(module, target, mesh, timeout, memory, {**known, **told})

    aot.compile_module = dumping
    try:
        compile_ahead(plan, 900)
    finally:
        aot.compile_module = compile_module
        aot.close_workers()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", help="group | model | sharding | setting | chip")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    dump(bench_accuracy.plan_of(*(part.strip() for part in options.row.split("|"))), options.folder, ".*")
    print(f"{len(list(options.folder.glob('*.txt')))} files in {options.folder}")


if __name__ == "__main__":
    main()
