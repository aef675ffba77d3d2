"""Files are whole or not there: written beside their place, then renamed."""

from __future__ import annotations

import os
import tempfile


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write ``text`` to ``path``; a reader, or a crash, sees the old file or the new one."""
    target = os.path.abspath(os.fspath(path))
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=f".{os.path.basename(target)}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
