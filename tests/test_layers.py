"""A stage imports only earlier stages: the order of the house, from which no file may deviate."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "jaxauto"
# Each may import those before it, and those beside it in its own line.
ORDER = [
    {"errors"},
    {"core", "compat"},
    {"alike", "dilated", "masks", "one_hot", "swapped"},
    {"trace", "graph", "passes", "rules", "hlo", "hlo_ops", "hlo_loops", "hlo_collectives", "hlo_roles", "progress"},
    {"targets", "segments", "blocks", "reruns", "flow"},
    {"groups", "strategies", "rewrite", "frontend"},
    {"cost"},
    {"solve", "constraints", "options"},
    {"place", "estimate", "aot"},
    {
        "plan",
        "policy",
        "verify",
        "certify",
        "tune",
        "store",
        "planner",
        "reserve",
        "residuals",
        "finer",
        "report",
        "explain",
        "tables",
        "naming",
        "writing",
        "alternatives",
        "undivided",
        "export",
    },
    {"profile", "profile_memory", "profile_mesh", "profile_traffic", "timeline", "picture"},
    {"api"},
    {"__init__", "cli", "__main__"},
]


def stage_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports(path: pathlib.Path):
    """(imported module of jaxauto, line); imports inside functions count: they hide the same dependency."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("jaxauto"):
            names = [f"jaxauto.{a.name}" for a in node.names] if node.module == "jaxauto" else [node.module]
            yield from ((n, node.lineno) for n in names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names if a.name.startswith("jaxauto."))


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_backwards(path):
    level = {stage: k for k, stages in enumerate(ORDER) for stage in stages}
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert own in level, f"{own} has no place in the order of stages: add it to ORDER"
    for module, line in imports(path):
        other = stage_of(module)
        assert other in level, f"{path.name}:{line} imports {module}, which has no place in the order"
        assert level[other] <= level[own], f"{path.name}:{line}: {own} imports {other}, a later stage"


@pytest.mark.parametrize("path", sorted(p for p in ROOT.rglob("*.py") if p.name != "compat.py"), ids=lambda p: str(p.relative_to(ROOT)))
def test_private_jax_stays_in_compat(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        for name in names:
            assert not name.startswith(("jax._src", "jax.interpreters", "jax.extend", "jaxlib")), (
                f"{path.name}:{node.lineno} imports {name}"
            )


def test_importing_does_nothing():
    """No backend is started, nothing is printed, no environment variable is set."""
    code = (
        "import os, jax; before = dict(os.environ); import jaxauto; from jax._src import xla_bridge; "
        "assert not xla_bridge._backends, 'a backend was started'; assert dict(os.environ) == before, 'the environment changed'"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT.parent, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
