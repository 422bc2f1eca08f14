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

__all__ = ["Journal", "TrialStore", "parsed_object", "told_of_disk"]


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


FORMAT = 1


class TrialStore:
    """A file of trials below a line that says of which checkpoint; every process has a file of its own.

    Args:
        path: of the main process, such as ``passkey.trials.jsonl``; None keeps trials in memory alone.
        process: number of this process.
    """

    def __init__(self, path: Path | None, process: int = 0) -> None:
        self.path = path
        self._journal = None if path is None else Journal(path, process)
        self._added: dict[str, dict[str, Any]] = {}

    def claim(self, made_by: str, checkpoint: Mapping[str, str]) -> None:
        """Make the file this measurement's, or see that it already is.

        Args:
            made_by: the command.
            checkpoint: ``{"name", "sha256"}``.

        Raises:
            ResultsError: it holds trials of another command or checkpoint, or something else, or cannot be written.
        """
        if self.path is None or self._journal is None:
            return
        header = {"made_by": made_by, "format": FORMAT, "checkpoint": dict(checkpoint)}
        with told_of_disk(self.path, lambda: 0, "trials"):
            if not self.path.exists() or not self.path.stat().st_size:
                self._journal.append(header)
                return
            found = next((entry for entry in self._journal.entries() if "made_by" in entry), {})
        if (found.get("made_by"), found.get("format")) != (made_by, FORMAT):
            raise ResultsError(
                f"{str(self.path)!r} holds no trials of `{made_by}` in format {FORMAT} (found made_by="
                f"{found.get('made_by')!r}, format={found.get('format')!r}). Delete it, or choose another --output."
            )
        theirs = found["checkpoint"]
        if theirs["sha256"] != checkpoint["sha256"]:
            raise ResultsError(
                f"{str(self.path)!r} holds trials of another checkpoint: {theirs['name']} (sha256 {theirs['sha256']}), "
                f"and this is {checkpoint['name']} (sha256 {checkpoint['sha256']}). Delete it, or choose another "
                f"--output."
            )

    def finished(self) -> dict[str, dict[str, Any]]:
        """Every trial of all processes by its key.

        Raises:
            ResultsError: a file cannot be read.
        """
        if self.path is None or self._journal is None:
            return self._added
        with told_of_disk(self.path, lambda: 0, "trials"):
            return {entry["key"]: entry["trial"] for entry in self._journal.entries() if "key" in entry}

    def add(self, key: str, reading: str, trial: dict[str, Any]) -> None:
        """Keep a trial: once this returns, it is on disk.

        Args:
            key: of everything that the trial depends on.
            reading: who read, for people who look into the file.
            trial: JSON values.

        Raises:
            ResultsError: it cannot be written; every trial before it is kept.
        """
        self._added[key] = trial
        if self.path is not None and self._journal is not None:
            with told_of_disk(self.path, lambda: len(self.finished()), "trials"):
                self._journal.append({"key": key, "reading": reading, "trial": trial})
