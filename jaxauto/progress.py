"""A progress line while planning takes longer than a moment, on a terminal or in a notebook."""

from __future__ import annotations

import sys
import time
from typing import Any

PATIENCE_SECONDS = 2.0


class Progress:
    """Call it with the name of each stage; shows nothing until ``PATIENCE_SECONDS`` have passed.

    ``wanted``: True, False, or None: where somebody can see it.
    """

    def __init__(self, wanted: bool | None):  # noqa: FBT001  an option of the user's, three-valued
        self.wanted = _visible() if wanted is None else wanted
        self.started = time.monotonic()
        self.status: Any = None

    def __enter__(self) -> Progress:
        return self

    def __call__(self, stage: str) -> None:
        elapsed = time.monotonic() - self.started
        if not self.wanted or elapsed < PATIENCE_SECONDS:
            return
        text = f"jaxauto: {stage} ({elapsed:.0f} s)"
        if self.status is None:
            from rich.console import Console

            self.status = Console(stderr=True).status(text)
            self.status.start()
        self.status.update(text)

    def __exit__(self, *exc: object) -> None:
        if self.status is not None:
            self.status.stop()


def _visible() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules
