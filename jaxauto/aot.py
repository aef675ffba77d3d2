"""Ahead-of-time compilation for a target that is not here, in a child process.

The step is traced and lowered here, for abstract devices: shardings, sharding constraints, donation and memory kinds are written into the
StableHLO module, and no device of the target is needed. The module goes as text to a child process, one for each platform, which loads
the compiler, compiles for the target's topology and sends back the scheduled program with its memory and costs. So the caller's process
keeps its platform and its environment, prints nothing, and survives a compiler that crashes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, cast

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxauto import compat
from jaxauto.compat import abstract_mesh
from jaxauto.errors import JaxAutoError
from jaxauto.targets import worker
from jaxauto.targets.compilers import GPU_ENVIRONMENT, TPU_ENVIRONMENT, compiler_for, memory_limit, require_compiler
from jaxauto.targets.target import Target

__all__ = ["Compiled", "CompilerFailure", "CompilerOutOfMemory", "abstract_mesh", "close_workers", "compile_module", "compile_step"]
__all__ += ["compiler_for", "lower_step"]

_LOWERING_PLATFORM = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a step, for one device.

    Attributes:
      text: the optimised, scheduled HLO.
      memory: bytes by kind: ``argument, output, alias, temp, peak, code, host_argument, host_output, host_alias, host_temp``.
        ``peak`` is the compiler's live peak, 0 where it does not tell.
      cost: the compiler's cost analysis (``flops``, ``bytes accessed``, ...); loop bodies are counted once.
      seconds: what compiling took.
      compiler: package and version.
    """

    text: str = field(repr=False)
    memory: Mapping[str, int]
    cost: Mapping[str, float] = field(repr=False)
    seconds: float
    compiler: str

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory the program needs: arguments, outputs that alias none of them, temporaries."""
        return self.memory["argument"] + self.memory["output"] - self.memory["alias"] + self.memory["temp"]


class CompilerFailure(JaxAutoError):  # noqa: N818 (what happened, not a misuse)
    """The compiler refused the program, crashed, or took too long; ``text`` is what it said."""

    def __init__(self, message: str, text: str = ""):
        super().__init__(message)
        self.text = text


class CompilerOutOfMemory(CompilerFailure):
    """The program does not fit: ``needed_bytes`` of ``limit_bytes`` (0: the compiler did not say)."""

    def __init__(self, message: str, text: str, needed_bytes: int, limit_bytes: int):
        super().__init__(message, text)
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


# ------------------------------------------------------------------------------------------------------------ lowering


@compat.propagated()
def lower_step(
    make_fun: Callable[[AbstractMesh], Callable],
    args: Sequence[jax.ShapeDtypeStruct],
    in_shardings: Sequence[PartitionSpec | NamedSharding],
    out_shardings: Sequence[PartitionSpec | NamedSharding],
    donate_argnums: Sequence[int],
    target: Target,
    mesh_shape: Sequence[int],
    axis_names: Sequence[str],
) -> str:
    """StableHLO text of a step for a mesh of the target, with source locations; arguments as in ``compile_step``."""
    mesh = abstract_mesh(mesh_shape, axis_names)
    jitted = jax.jit(
        make_fun(mesh),
        in_shardings=tuple(_on(mesh, sharding) for sharding in in_shardings),
        out_shardings=[_on(mesh, sharding) for sharding in out_shardings],
        donate_argnums=tuple(donate_argnums),
    )
    platform = _LOWERING_PLATFORM[target.chip.platform]
    return jitted.trace(*args).lower(lowering_platforms=(platform,)).as_text(debug_info=True)


def _on(mesh: AbstractMesh, sharding: PartitionSpec | NamedSharding) -> NamedSharding:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return NamedSharding(mesh, sharding)


# ----------------------------------------------------------------------------------------------------------- compiling


def compile_step(
    make_fun: Callable[[AbstractMesh], Callable],
    args: Sequence[jax.ShapeDtypeStruct],
    in_shardings: Sequence[PartitionSpec | NamedSharding],
    out_shardings: Sequence[PartitionSpec | NamedSharding],
    donate_argnums: Sequence[int],
    target: Target,
    mesh_shape: Sequence[int],
    axis_names: Sequence[str],
    timeout: float = 600.0,
    memory_limit_bytes: float | None = None,
    options: Mapping[str, str | bool | int] | None = None,
) -> Compiled:
    """Compiles a step for a target, whatever devices there are here.

    Args:
      make_fun: given the (abstract) mesh, the function to compile: of flat arrays, returning a list of arrays. Constraints inside it are
        ``jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))`` on that mesh.
      args: shapes and dtypes of its arguments.
      in_shardings: one for each argument: a PartitionSpec, or a NamedSharding whose spec and memory kind are taken.
      out_shardings: the same for each result.
      donate_argnums: arguments whose memory the results may take.
      target: what to compile for.
      mesh_shape: sizes of the mesh axes; their product is the target's number of devices.
      axis_names: names of the mesh axes.
      timeout: seconds to wait for the compiler.
      memory_limit_bytes: what the compiler may use of a device (whole MiB); None: all the chip has. Only the TPU compiler knows such a
        limit, and it plans for it: with room to spare it may take much more memory than it needs. For others compare ``device_bytes``.
      options: XLA options by name, for example ``{"xla_tpu_enable_latency_hiding_scheduler": True}``.

    Returns:
      The program, its memory and its costs.

    Raises:
      TargetError: no compiler for the target is installed, or the mesh does not fit it.
      CompilerOutOfMemory: the program does not fit the device.
      CompilerFailure: the compiler refused, crashed, or did not finish in time.
    """
    require_compiler(target)
    target.axis_links(mesh_shape)
    module = lower_step(make_fun, args, in_shardings, out_shardings, donate_argnums, target, mesh_shape, axis_names)
    return compile_module(module, target, mesh_shape, timeout, memory_limit_bytes, options)


def compile_module(
    module: str,
    target: Target,
    mesh_shape: Sequence[int],
    timeout: float = 600.0,
    memory_limit_bytes: float | None = None,
    options: Mapping[str, str | bool | int] | None = None,
) -> Compiled:
    """Compiles StableHLO text that was lowered for a mesh of ``mesh_shape``; the rest as ``compile_step``."""
    compiler = require_compiler(target)
    chosen = {**(options or {}), **memory_limit(target.chip.platform, memory_limit_bytes or 0.0)}
    request = {"target": target.name, "mesh_shape": tuple(mesh_shape), "module": module, "options": chosen}
    answer = _worker_for(target).ask(request, timeout)
    if "error" in answer:
        raise _failure(answer["error"], target)
    return Compiled(compiler=compiler, **answer)


def _failure(text: str, target: Target) -> CompilerFailure:
    first = text.strip().splitlines()[0][:500]
    if "RESOURCE_EXHAUSTED" not in text:
        return CompilerFailure(f"the compiler for {target} failed: {first}", text)
    amount = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"Used {amount}i?B? of {amount}", text)
    if found is None:
        over = re.search(rf"\({amount}i?B?\) exceeds available \S+ \({amount}", text)
        found = over or re.search(rf"allocate {amount}()()", text)
    needed, limit = (_bytes(found.group(1), found.group(2)), _bytes(found.group(3), found.group(4))) if found else (0, 0)
    detail = f": it needs {needed / 2**30:.2f} GiB of {limit / 2**30:.2f} GiB" if limit else f": {first}"
    return CompilerOutOfMemory(f"the program does not fit one device of {target}{detail}", text, needed, limit)


def _bytes(number: str, unit: str) -> int:
    return int(float(number or 0) * _UNITS[unit])


# ------------------------------------------------------------------------------------------------------------- workers


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen
    requests: BinaryIO
    answers: BinaryIO
    log: BinaryIO

    def last_words(self) -> str:
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), 4000, max(0, size - 4000)).decode(errors="replace").strip()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        for stream in (self.requests, self.answers, self.log):
            with contextlib.suppress(OSError):
                stream.close()


class _Worker:
    """One warm child process; starts on the first request and again after it died."""

    def __init__(self, environment: Mapping[str, str]):
        self._environment = environment
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def ask(self, request: dict, timeout: float) -> dict:
        with self._lock:
            child = self._living()
            answer, in_time = None, True
            try:
                worker.send(child.requests, request)
                in_time = bool(select.select([child.answers], [], [], timeout)[0])
                answer = worker.receive(child.answers) if in_time else None
            except BrokenPipeError:
                pass
            except BaseException:  # an interrupt leaves an answer under way, which the next request must not read
                self.close()
                raise
            if answer is not None:
                return answer
            said = child.last_words()
            self.close()
        if not in_time:
            raise CompilerFailure(f"the compiler for {request['target']} did not finish within {timeout:g} s", said)
        reason = f": {said.splitlines()[-1]}" if said else ""
        raise CompilerFailure(f"the compiler process for {request['target']} died{reason}", said)

    def _living(self) -> _Child:
        if self._child is None or self._child.process.poll() is not None:
            self.close()
            atexit.register(close_workers)
            self._child = _start(self._environment)
        return self._child

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()


def _start(environment: Mapping[str, str]) -> _Child:
    log = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
    # -c and not multiprocessing: a spawned process would import the caller's main module.
    command = f"import sys; sys.path[:] = {sys.path!r}; from jaxauto.targets.worker import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, **environment},
        start_new_session=True,  # an interrupt at the terminal is the parent's to handle
    )
    return _Child(process, cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout), cast(BinaryIO, log))


_workers: dict[tuple, _Worker] = {}
_workers_lock = threading.Lock()


def _worker_for(target: Target) -> _Worker:
    platform = target.chip.platform
    environment = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment |= {"tpu": TPU_ENVIRONMENT, "gpu": GPU_ENVIRONMENT, "cpu": {}}[platform]
    count = target.num_devices if platform == "cpu" else 1
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ.get("XLA_FLAGS", ""))
    environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()
    with _workers_lock:
        return _workers.setdefault((platform, environment["XLA_FLAGS"]), _Worker(environment))


def close_workers() -> None:
    """Ends the compiler processes; the next request starts one again. Runs by itself at exit."""
    with _workers_lock:
        for child in _workers.values():
            child.close()
        _workers.clear()
