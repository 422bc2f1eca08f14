"""Finished cells on disk: what is there survives a kill, a full disk and a second try, and is not computed again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from jaxtyping import Float
from torch import Tensor

from ctxext.errors import ResultsError
from ctxext.evaluation._journal import Journal, parsed_object, told_of_disk
from ctxext.evaluation.comparison.plan import Cell
from ctxext.files import write_whole

__all__ = ["CellStore", "Outcome"]

IDENTITY, LOSSES = "comparison.json", "losses"
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one cell gave.

    Args:
        losses: nats per token, [positions], of a loss cell.
        correct: whether the key was found, of a passkey cell.
        loss: of the key's tokens, nats, of a passkey cell.
        seconds: wall time.
    """

    losses: Float[Tensor, " positions"] | None = None
    correct: bool = False
    loss: float = 0.0
    seconds: float = 0.0


class CellStore:
    """A folder of finished cells: a line of ``cells*.jsonl`` each, and losses by position in a file beside.

    A line is written only after its losses are safe on disk.

    Args:
        folder: made if it is missing.
        process: number of this process, 0 for the main one.
    """

    def __init__(self, folder: Path, process: int = 0) -> None:
        self.folder = folder
        self._lines = Journal(folder / "cells.jsonl", process)

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Make the folder this comparison's, or see that it already is.

        Args:
            identity: ``{"checkpoint": {"name", "sha256"}, "corpus": {"name", "sha256"}}``.

        Raises:
            ResultsError: the folder holds a comparison of another checkpoint or corpus, or something else, or cannot
                be written.
        """
        path = self.folder / IDENTITY
        with told_of_disk(self.folder, lambda: 0):
            (self.folder / LOSSES).mkdir(parents=True, exist_ok=True)
            if not path.exists():
                if any(entry.name != LOSSES for entry in self.folder.iterdir()):
                    raise ResultsError(
                        f"{str(self.folder)!r} is not empty and holds no earlier comparison; choose another --output."
                    )
                made = {"made_by": "ctxext eval compare", "format": FORMAT, **identity}
                write_whole(path, json.dumps(made, indent=1) + "\n")
                return
            found = parsed_object(path.read_text(encoding="utf-8"))
        if found.get("format") != FORMAT:
            raise ResultsError(f"{str(path)!r} is not of format {FORMAT} of a comparison; choose another --output.")
        for part, mine in identity.items():
            theirs = found.get(part) or {}
            if theirs.get("sha256") != mine["sha256"]:
                raise ResultsError(
                    f"{str(self.folder)!r} holds a comparison of another {part}: {theirs.get('name')} (sha256 "
                    f"{theirs.get('sha256')}), and this is {mine['name']} (sha256 {mine['sha256']}). Choose another "
                    f"--output, or give what that comparison was made of."
                )

    def finished(self) -> dict[str, dict[str, Any]]:
        """The line of every finished cell, of all processes, by key."""
        found = {}
        for entry in self._lines.entries():
            if "key" in entry and ("file" not in entry or (self.folder / entry["file"]).is_file()):
                found[entry["key"]] = entry
        return found

    def outcome(self, entry: Mapping[str, Any]) -> Outcome:
        """What a finished cell gave.

        Raises:
            ResultsError: its losses cannot be read.
        """
        if "file" not in entry:
            return Outcome(correct=entry["correct"], loss=entry["loss"], seconds=entry["seconds"])
        path = self.folder / entry["file"]
        try:
            return Outcome(losses=safetensors.torch.load_file(path)["losses"], seconds=entry["seconds"])
        except (OSError, KeyError, safetensors.SafetensorError) as error:
            raise ResultsError(f"{str(path)!r} is damaged ({error}). Delete it and run the command again.") from error

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Keep a finished cell: once this returns, it is on disk.

        Raises:
            ResultsError: it cannot be written; every cell before it is kept.
        """
        entry = {name: value for name, value in asdict(cell).items() if name not in ("cost", "passes", "index")}
        with told_of_disk(self.folder, lambda: len(self.finished())):
            if outcome.losses is None:
                entry |= {"correct": outcome.correct, "loss": outcome.loss}
            else:
                entry["file"] = f"{LOSSES}/{cell.key}.safetensors"
                about = {"reading": cell.reading, "document": cell.item, "unit": "nats per token"}
                content = safetensors.torch.save({"losses": outcome.losses.contiguous()}, metadata=about)
                write_whole(self.folder / entry["file"], content)
            self._lines.append(entry | {"seconds": round(outcome.seconds, 3)})
