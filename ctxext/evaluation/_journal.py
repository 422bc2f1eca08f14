"""Lines of finished work that survive a kill and a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ctxext.errors import ResultsError

__all__ = ["Journal", "parsed_object", "told_of_disk"]


class Journal:
    """Finished work as JSON objects, one a line.

    Every process appends to a file of its own, so that none waits for another and a kill of one tears no line of
    another. A last line that a kill tore is left out.

    Args:
        path: of process 0, such as ``cells.jsonl``; process 1 writes ``cells.1.jsonl`` beside it.
        process: number of this process, 0 for the main one.
    """

    def __init__(self, path: Path, process: int = 0) -> None:
        self.path = path if process == 0 else path.with_name(f"{path.stem}.{process}{path.suffix}")
        self._own = re.compile(rf"{re.escape(path.stem)}(\.\d+)?{re.escape(path.suffix)}")
        self._is_whole = False

    def entries(self) -> Iterator[dict[str, Any]]:
        """Every whole line of all processes.

        Raises:
            OSError: a file cannot be read.
        """
        for path in sorted(self.path.parent.glob(f"*{self.path.suffix}")):
            if self._own.fullmatch(path.name):
                for line in path.read_text(encoding="utf-8").split("\n")[:-1]:  # what has no newline was torn
                    yield parsed_object(line)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Keep an entry: once this returns, it is on disk.

        Raises:
            OSError: it cannot be written; the file is as it was.
        """
        with open(self.path, "ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if end and not self._is_whole:
                file.seek(0)
                end = file.read().rfind(b"\n") + 1  # a line that a kill tore goes
                file.truncate(end)
            self._is_whole = True
            try:
                file.write(f"{json.dumps(entry)}\n".encode())
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise


@contextlib.contextmanager
def told_of_disk(place: Path, kept: Callable[[], int], what: str = "cells") -> Iterator[None]:
    """Turn an ``OSError`` while reading or writing into what the user has to know.

    Args:
        place: where it happens.
        kept: how much finished work is safe.
        what: that work is called.

    Raises:
        ResultsError: in place of the ``OSError``.
    """
    try:
        yield
    except OSError as error:
        why = "The disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"{error.strerror}"
        raise ResultsError(
            f"Cannot write to {str(place)!r}: {why}. Finished {what} are kept ({kept()} of them); make room there, or "
            f"give the right to write, and run the same command again."
        ) from error


def parsed_object(line: str) -> dict[str, Any]:
    """A JSON object, or an empty one for what is none."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
