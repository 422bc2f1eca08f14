"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a kill, meets the old one or the new one and never half of it.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(half, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except OSError:
        half.unlink(missing_ok=True)
        raise
