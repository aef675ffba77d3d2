"""The notebooks of this repository: ``check`` that they are stored without outputs, ``strip`` them, or ``run`` them from top to bottom."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
CELL_TIMEOUT_SECONDS = 300


def strip(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Returns the notebook without outputs, execution counts and volatile metadata; changes it in place."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def check_notebook(path: Path) -> str | None:
    """Returns what is wrong with a stored notebook, or None."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    dirty = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]
    if dirty:
        return f"{path.name}: cells {dirty} hold outputs; run 'python scripts/notebooks.py strip'"
    return None


def strip_notebook(path: Path) -> str | None:
    """Writes the notebook back without outputs."""
    nbformat.write(strip(nbformat.read(path, as_version=4)), path)
    return None


def run_notebook(path: Path) -> str | None:
    """Executes the notebook in a fresh kernel of this interpreter; returns the first failing cell's error, or None."""
    notebook = nbformat.read(path, as_version=4)
    started = time.monotonic()
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_SECONDS, kernel_name="python3", resources=where)
    try:
        client.execute()
    except CellExecutionError as error:
        return f"{path.name}: {error}"
    print(f"{path.name}: ran in {time.monotonic() - started:.0f} s")
    return None


ACTIONS = {"check": check_notebook, "strip": strip_notebook, "run": run_notebook}


def main(arguments: list[str]) -> int:
    """Runs one action on the named notebooks, or on all of them. Returns the exit code."""
    if not arguments or arguments[0] not in ACTIONS:
        print(f"usage: notebooks.py {'|'.join(ACTIONS)} [notebook …]", file=sys.stderr)
        return 2
    paths = [Path(name) for name in arguments[1:]] or sorted(NOTEBOOKS.glob("*.ipynb"))
    problems = [problem for problem in map(ACTIONS[arguments[0]], paths) if problem]
    print("\n".join(problems) or f"{len(paths)} notebook(s): {arguments[0]} ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
