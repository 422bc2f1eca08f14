"""Finished work that survives a kill and a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from jaxtyping import Float
from torch import Tensor

from ctxext.errors import ResultsError
from ctxext.files import JsonObject, StrPath, parse_json, write_whole

FORMAT = 1
CLAIM = b'{"made_by": '  # the start of the line that claims a journal
LOSSES = "losses"  # the folder of losses, where the whole folder belongs to the journal


class JournalLine(dict[str, Any]):
    """A JSON object out of a journal; a field that it lacks is an error that names the file and the line."""

    def __init__(self, values: JsonObject, place: str) -> None:
        super().__init__(values)
        self.place = place

    def __missing__(self, field: str) -> Any:
        raise _damaged(self.place, f"lacks the field {field!r}")


class Journal:
    """Finished work of one measurement: a JSON object with a ``key`` on each line, and files of losses by position.

    Every process appends to a file that no other process writes, so that none waits for another and a kill of one
    tears no line of another. A last line that a kill tore is left out; a line is written only after its losses are
    safe on disk.

    Args:
        path: File of process 0, such as ``cells.jsonl``; process 1 writes ``cells.1.jsonl`` next to it. None keeps
            everything in memory alone.
        identity: Name of the file in the same folder that identifies the measurement; the whole folder belongs to the
            journal then. None where the first line of the journal identifies it.

    Raises:
        ResultsError: the folder is there, and is something else's.
    """

    def __init__(self, path: Path | None, process: int = 0, *, identity: StrPath | None = None) -> None:
        self.path = path
        self.folder = Path() if path is None else path.parent
        self._process = process
        self._identity = None if path is None or identity is None else self.folder / identity
        self._losses = LOSSES if path is None or identity is not None else f"{path.stem}.{LOSSES}"
        self._is_whole = False
        self.in_memory: dict[str, JsonObject] = {}
        if path is not None and identity is not None and not process and self.folder.exists():
            with explain_disk_error(path):  # before any weights are read
                self._claimed(path)

    def claim(self, identity: JsonObject) -> None:
        """Make the journal this measurement's, or see that it already is.

        Args:
            identity: ``made_by``, the command; and of everything measured (``checkpoint``, ``corpus``) its ``name`` and
                ``sha256``.

        Raises:
            ResultsError: it holds work of another command, checkpoint or corpus, or something else, or cannot be
                written.
        """
        if self.path is None:
            return
        place = str(self._identity or self.path)
        with explain_disk_error(self.path):
            claimed = self._claimed(self.path)
            if claimed is None:  # the first process that comes writes down whose it is
                identity = {"made_by": identity["made_by"], "format": FORMAT, **identity}
                if self._identity is None:
                    self.append(identity)
                else:
                    write_whole(self._identity, json.dumps(identity, indent=1) + "\n")
                return
        if (claimed.get("made_by"), claimed.get("format")) != (identity["made_by"], FORMAT):
            raise ResultsError(
                f"{place!r} holds no jobs of `{identity['made_by']}` in format {FORMAT} (found made_by="
                f"{claimed.get('made_by')!r}, format={claimed.get('format')!r}). Choose another --output, or delete it."
            )
        for part in [name for name in identity if name != "made_by"]:
            theirs, mine = claimed.get(part), identity[part]
            theirs = theirs if isinstance(theirs, dict) else {}
            if theirs.get("sha256") != mine["sha256"]:
                raise ResultsError(
                    f"{place!r} holds jobs of another {part}: {theirs.get('name')} (sha256 "
                    f"{theirs.get('sha256')}), and this is {mine['name']} (sha256 {mine['sha256']}). Choose another "
                    f"--output, or delete it."
                )

    def finished(self) -> dict[str, JsonObject]:
        """Read the line of every finished job, of all processes, by its key.

        Raises:
            ResultsError: a file cannot be read, or a line of it is damaged.
        """
        if self.path is None:
            return dict(self.in_memory)
        with explain_disk_error(self.path):
            lines = [line for line in self._lines(self.path) if "key" in line]
            for line in lines:
                for field in ("key", "file"):
                    if not isinstance(line.get(field, ""), str):
                        raise _damaged(line.place, f"holds {line[field]!r} as {field!r}")
            return {line["key"]: line for line in lines if "file" not in line or (self.folder / line["file"]).is_file()}

    def keep(self, line: JsonObject, losses: Float[Tensor, " positions"] | None = None) -> None:
        """Keep a finished result: once this returns, the line and its losses are on disk.

        Args:
            line: JSON values; ``key`` names everything that the others depend on.
            losses: Losses in nats per token, where the work gave them.

        Raises:
            ResultsError: it cannot be written; everything before it is kept.
        """
        if self.path is None:
            self.in_memory[line["key"]] = {**line, **({} if losses is None else {"losses": losses})}
            return
        with explain_disk_error(self.path, lambda: len(self.finished())):
            if losses is not None:
                line = {**line, "file": f"{self._losses}/{line['key']}.safetensors"}
                about = {"reading": line["reading"], "document": line["item"], "unit": "nats per token"}
                (self.folder / self._losses).mkdir(exist_ok=True)
                content = safetensors.torch.save({"losses": losses.contiguous()}, metadata=about)
                write_whole(self.folder / line["file"], content)
            self.append(line)

    def losses(self, line: JsonObject) -> Float[Tensor, " positions"]:
        """Return the losses of a finished line.

        Raises:
            ResultsError: they cannot be read.
        """
        if "losses" in line:
            kept: Tensor = line["losses"]
            return kept
        path = self.folder / line["file"]
        try:
            return safetensors.torch.load_file(path)["losses"]
        except (OSError, KeyError, safetensors.SafetensorError) as error:
            raise ResultsError(f"{str(path)!r} is damaged ({error}). Delete it and run the command again.") from error

    def append(self, line: JsonObject) -> None:
        """Write a line to this process's file: once this returns, it is on disk.

        Raises:
            OSError: it cannot be written; the file is as it was.
        """
        assert self.path is not None, "in memory there is no file"
        number = f".{self._process}" if self._process else ""
        with open(self.folder / f"{self.path.stem}{number}{self.path.suffix}", "ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if end and not self._is_whole:
                file.seek(0)
                end = file.read().rfind(b"\n") + 1  # a line that a kill tore goes
                file.truncate(end)
            self._is_whole = True
            try:
                file.write(f"{json.dumps(line)}\n".encode())
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise

    def _lines(self, path: Path) -> Iterator[JournalLine]:
        """Yield every whole line of all processes."""
        name = re.compile(rf"{re.escape(path.stem)}(\.\d+)?{re.escape(path.suffix)}")
        for file in sorted(self.folder.glob(f"*{path.suffix}")):
            if name.fullmatch(file.name):
                whole = file.read_bytes().split(b"\n")[:-1]  # what has no newline was torn
                for number, line in enumerate(whole, start=1):
                    yield _parsed(line, f"Line {number} of {str(file)!r}")

    def _claimed(self, path: Path) -> JsonObject | None:
        """Read the identity that was claimed before; return None where there is nothing yet."""
        if self._identity is None:
            content = path.read_bytes() if path.exists() else b""
            if b"\n" not in content and CLAIM.startswith(content[: len(CLAIM)]):  # a kill may have torn the claim
                return None
            return next((line for line in self._lines(path) if "made_by" in line), {})
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._identity.exists():
            return _parsed(self._identity.read_bytes(), repr(str(self._identity)))
        if any(entry.name != LOSSES for entry in self.folder.iterdir()):
            raise ResultsError(
                f"{str(self.folder)!r} is not empty and holds no earlier {self._identity.stem}; choose another "
                f"--output."
            )
        return None


@contextlib.contextmanager
def explain_disk_error(place: Path, kept: Callable[[], int] | None = None, what: str = "jobs") -> Iterator[None]:
    """Turn an ``OSError`` while reading or writing into an error that tells the user what to do.

    Args:
        kept: Function that counts finished jobs; None where they cannot be read.

    Raises:
        ResultsError: instead of the ``OSError``.
    """
    try:
        yield
    except OSError as error:
        why = "The disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"{error.strerror}"
        raise ResultsError(
            f"Cannot use {str(place)!r}: {why}. Finished {what} are kept{f' ({kept()} of them)' if kept else ''}; make "
            f"room there, or give the right to read and write, and run the same command again."
        ) from error


def _damaged(place: str, how: str) -> ResultsError:
    return ResultsError(f"{place} is damaged: it {how}. Delete it and run the same command again; all else is kept.")


def _parsed(line: bytes, place: str) -> JournalLine:
    """Parse a JSON object in UTF-8; return an empty one for anything else."""
    try:
        value = parse_json(line, object_hook=lambda values: JournalLine(values, place))
    except ValueError:
        value = {}
    return value if isinstance(value, JournalLine) else JournalLine({}, place)
