"""The child process that compiles. Run as a module-less command by ``jaxauto.aot``; reads requests from stdin, answers on stdout.

A message is a pickle behind its length (8 bytes). A request is a dict: ``target``, ``mesh_shape``, ``module`` (StableHLO text) and
``options`` (XLA's, by name). The answer is a dict with ``text``, ``memory``, ``cost`` and ``seconds``, or ``error`` with the
compiler's message.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from typing import Any, BinaryIO

_LENGTH_BYTES = 8
_MEMORY = {
    "argument_size_in_bytes": "argument",
    "output_size_in_bytes": "output",
    "alias_size_in_bytes": "alias",
    "temp_size_in_bytes": "temp",
    "peak_memory_in_bytes": "peak",
    "generated_code_size_in_bytes": "code",
    "host_argument_size_in_bytes": "host_argument",
    "host_output_size_in_bytes": "host_output",
    "host_alias_size_in_bytes": "host_alias",
    "host_temp_size_in_bytes": "host_temp",
}


def send(stream: BinaryIO, message: object) -> None:
    """Writes one message and flushes."""
    data = pickle.dumps(message)
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Reads one message; None at the end of the stream."""
    header = stream.read(_LENGTH_BYTES)
    if len(header) < _LENGTH_BYTES:
        return None
    data = stream.read(int.from_bytes(header, "big"))
    return pickle.loads(data)


def main() -> None:
    """Answers requests until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a compiler prints goes to the log, not between the answers
    requests = sys.stdin.buffer
    while (request := receive(requests)) is not None:
        try:
            answer = compile_module(**request)
        except Exception as error:  # noqa: BLE001 (the parent raises it again)
            answer = {"error": f"{type(error).__name__}: {error}"}
        send(answers, answer)


def compile_module(*, target: str, mesh_shape: tuple[int, ...], module: str, options: dict) -> dict:
    """Compiles a StableHLO module, partitioned over a mesh of the target's ahead-of-time devices."""
    from jaxauto import compat
    from jaxauto.targets.target import Target

    devices = Target(target).device_array(mesh_shape).ravel().tolist()
    start = time.perf_counter()
    text, stats, cost = compat.compile_stablehlo(module, devices, options)
    return {
        "text": text,
        "memory": {name: int(getattr(stats, attribute, 0) or 0) for attribute, name in _MEMORY.items()},
        "cost": {key: float(value) for key, value in cost.items() if isinstance(value, (int, float))},
        "seconds": time.perf_counter() - start,
    }
