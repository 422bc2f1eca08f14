"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ctxext.errors import CheckpointError

__all__ = [
    "NAME_BYTES",
    "ending_cleanly",
    "hidden_beside",
    "refuse_existing",
    "whole_file",
    "write_json",
    "write_whole",
]

NAME_BYTES = 255  # of a file name, on every file system in use


def hidden_beside(path: Path, ending: str) -> Path:
    """A hidden name beside ``path`` that begins like it and is no longer than file systems allow."""
    room = max(0, NAME_BYTES - 2 - len(os.fsencode(ending)))
    return path.with_name(f".{os.fsencode(path.name)[:room].decode(errors='ignore')}.{ending}")


def refuse_existing(path: Path) -> None:
    """Raise ``CheckpointError`` where something lies at ``path`` already, be it a broken link."""
    if os.path.lexists(path):
        raise CheckpointError(f"{path} already exists and is never overwritten. Give a new name, or remove it.")


@contextlib.contextmanager
def ending_cleanly() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that what is half written is taken away. The main thread only."""
    default = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not default:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside ``path``, with its ending, to be written instead; it takes its place unless the block raises."""
    half = hidden_beside(path, f"{os.getpid()}{path.suffix}")
    with ending_cleanly():
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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")
