"""What calibrate.py and bench_device.py share: arguments born on the device, seconds of a compiled program, kernels by the profiler."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WARM_UP, ROUNDS, ROUND_SECONDS, MOST_CALLS = 3, 5, 0.3, 200


def concrete(avals: Any, below: Mapping[str, int] = MappingProxyType({}), seed: int = 0) -> Any:
    """Arrays for a pytree of ShapeDtypeStructs: floats 0.02 x normal (their squares where the path says so: Adam's ``nu``), scalars zero,
    integers ``below`` what is given for their path, else the rows of the table that they look up (named embed or table), else 256."""
    rows = [x.shape[0] for path, x in jax.tree_util.tree_leaves_with_path(avals) if _table(jax.tree_util.keystr(path)) and x.ndim == 2]
    high = min(rows, default=256)

    def leaf(path: tuple, number: int, aval: Any) -> jax.Array:
        if not aval.shape:
            return jnp.zeros((), aval.dtype)
        key = jax.random.fold_in(jax.random.key(seed), number)
        if jnp.issubdtype(aval.dtype, jnp.floating):
            return _normal(key, aval.shape, jnp.dtype(aval.dtype).name, ".nu" in jax.tree_util.keystr(path))
        if aval.dtype == jnp.bool_:
            return jnp.ones(aval.shape, bool)
        return jax.random.randint(key, aval.shape, 0, below.get(jax.tree_util.keystr(path), high)).astype(aval.dtype)

    leaves, tree = jax.tree_util.tree_flatten_with_path(avals)
    return jax.tree_util.tree_unflatten(tree, [leaf(path, k, aval) for k, (path, aval) in enumerate(leaves)])


def _table(path: str) -> bool:
    return "embed" in path or "table" in path


def _normal_of(key: jax.Array, shape: tuple[int, ...], dtype: str, squares: bool) -> jax.Array:  # noqa: FBT001
    x = 0.02 * jax.random.normal(key, shape, jnp.float32)
    return (jnp.square(x) if squares else x).astype(dtype)


_normal = jax.jit(_normal_of, static_argnums=(1, 2, 3))


def seconds_of(call: Callable[[], Any]) -> list[float]:
    """Seconds of one call in each of ``ROUNDS`` rounds of calls that queue up behind each other; the results are waited for at the end."""
    for _ in range(WARM_UP):
        start = time.perf_counter()
        jax.block_until_ready(call())
        once = time.perf_counter() - start
    calls = int(np.clip(ROUND_SECONDS / once, 1, MOST_CALLS))
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        found.append((time.perf_counter() - start) / calls)
    return found


def kernels_of(call: Callable[[], Any]) -> dict[str, list]:
    """What one call runs on the device, by HLO instruction (else the kernel's name): [runs, seconds, a kernel's name]."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        return _kernels(files[-1]) if files else {}


def _kernels(file: Path) -> dict[str, list]:
    found: dict[str, list] = defaultdict(lambda: [0, 0.0, ""])
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = {name: value for name, value in event.stats if name is not None}
                op = str(stats.get("hlo_op", event.name))  # a replayed graph of kernels is one instruction
                row = found[event.name[:120] if op.startswith("command_buffer") else op[:120]]
                row[0] += 1
                row[1] += event.duration_ns * 1e-9
                row[2] = event.name[:120]
    return dict(found)


def runs(kernels: dict[str, list]) -> int:
    """Kernels that ran."""
    return sum(row[0] for row in kernels.values())


def total(kernels: dict[str, list]) -> float:
    """Seconds of kernels, one after the other."""
    return sum(row[1] for row in kernels.values())


def spread(seconds: Sequence[float]) -> tuple[float, float]:
    """Median, and (largest - least) / median."""
    middle = float(np.median(seconds))
    return middle, float((max(seconds) - min(seconds)) / middle)


def machine() -> dict[str, Any]:
    """The device, as JAX names it, and what JAX may take of its memory."""
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return {"kind": device.device_kind, "devices": len(jax.devices()), "jax": jax.__version__, "bytes limit": limit}
