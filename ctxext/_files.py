"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["whole_file", "write_whole"]


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside ``path``, with its ending, to be written instead; it takes its place unless the block raises."""
    half = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield half
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a kill, meets the old one or the new one and never half of it.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    with whole_file(path) as half, open(half, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
