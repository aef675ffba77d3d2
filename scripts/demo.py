"""Trains a small language model on emulated devices, sharded by jaxauto, and checks it against the same training on one device.

Run it through scripts/demo.sh, which makes an environment first.
Exit codes: 0 done; 1 sharded and plain training disagree, or the compiled step exceeds the budget; 2 bad usage; 3 nothing fits the budget.
"""

from __future__ import annotations

import argparse
import math
import os
import sys


def parse_mesh(text: str) -> dict[str, int]:
    """``"data=4,model=2"`` to ``{"data": 4, "model": 2}``."""
    try:
        mesh = {name.strip(): int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form data=4,model=2") from None
    if not all(name.isidentifier() and size > 0 for name, size in mesh.items()):
        raise argparse.ArgumentTypeError(f"{text!r}: axes need names and positive sizes, as in data=4,model=2")
    return mesh


def parse_budget(text: str) -> float | str:
    """``"60%"`` to 0.6; anything else (``"200MiB"``) is left to jaxauto."""
    if not text.endswith("%"):
        return text
    try:
        percent = float(text[:-1])
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage such as 60%") from None
    if not 0 < percent <= 100:
        raise argparse.ArgumentTypeError(f"{text!r}: a percentage between 0 and 100 is needed")
    return percent / 100


def parse_count(text: str) -> int:
    """A whole number above zero."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line; leaves with exit code 2 when it makes no sense."""
    parser = argparse.ArgumentParser(prog="demo.sh", description="Train a byte-level GPT on emulated devices, sharded by jaxauto.")
    parser.add_argument("--steps", type=parse_count, default=150, help="training steps (default 150)")
    parser.add_argument("--devices", type=parse_count, default=8, help="emulated CPU devices (default 8)")
    parser.add_argument("--mesh", type=parse_mesh, help="mesh axes and sizes, such as data=4,model=2 (default: jaxauto searches)")
    parser.add_argument(
        "--budget",
        type=parse_budget,
        help="memory of each device: bytes (200MiB), or a percentage (60%%) of what the step compiles to when planned without a budget",
    )
    parser.add_argument("--seed", type=int, default=0, help="of parameters, dropout and batches (default 0)")
    options = parser.parse_args(arguments)
    wanted = math.prod((options.mesh or {}).values())
    if options.mesh and wanted != options.devices:
        parser.error(f"--mesh {options.mesh} needs {wanted} devices; --devices is {options.devices}")
    return options


def emulate_devices(count: int) -> None:
    """Makes the CPU look like ``count`` devices; has to come before JAX is imported."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"


def main() -> int:
    """Command line, devices, demo."""
    options = parse_arguments()
    emulate_devices(options.devices)
    from demo_training import run  # imports JAX

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
