"""Answered prompts on disk, so that an interruption loses at most the one in progress."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxext.errors import ResultsError
from ctxext.evaluation._journal import Journal, told_of_disk

__all__ = ["TrialStore"]

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
