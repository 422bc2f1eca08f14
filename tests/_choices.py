"""What tests of ``ctxext choose`` share: what it is asked about, and what two runs of it must have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ctxext.choosing.verdict import Choice
from tests._checkpoints import save_with_tokenizer


def on_disk(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], folder: Path
) -> list[str | Path]:
    """The command's first words about a checkpoint and texts, which are written as files."""
    asked: list[str | Path] = ["choose", save_with_tokenizer(model, folder / "checkpoint", tokenizer)]
    for number, text in enumerate(texts):
        path = folder / f"{number}.txt"
        path.write_text(text, encoding="utf-8")
        asked += ["-t", path]
    return asked


def told(choice: Choice) -> dict[str, Any]:
    """Everything but what a clock says."""
    found = choice.to_dict()
    del found["provenance"]["date"], found["spent"]["seconds"]
    found["sentences"] = [one for one in found["sentences"] if "of computing" not in one]
    return found
