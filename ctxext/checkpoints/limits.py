"""Limits beside a model's config that hold its window: the tokenizer's, ``generate``'s, sentence-transformers'."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from ctxext.checkpoints.source import read_json

__all__ = ["LENGTH_FIELDS", "copy_raised", "raised_tokenizer"]

LENGTH_FIELDS = {
    "tokenizer_config.json": "model_max_length",
    "generation_config.json": "max_length",
    "sentence_bert_config.json": "max_seq_length",
}


def copy_raised(path: Path, place: Path, trained: int | None, target: int | None) -> list[str]:
    """Copy one of the files named in ``LENGTH_FIELDS``; a limit that was the old window becomes the new one.

    A tokenizer's limit is raised wherever it is below the new window. The others may also hold a choice that has
    nothing to do with the window, and then stay as they are.

    Args:
        path: the file.
        place: where its copy goes.
        trained: the old window, in tokens.
        target: the new window, in tokens.

    Returns:
        What was changed, a line each.
    """
    settings, field = read_json(path), LENGTH_FIELDS[path.name]
    limit = settings.get(field)
    is_count = isinstance(limit, int | float) and not isinstance(limit, bool)
    if (
        target is None
        or limit is None
        or not is_count
        or limit >= target
        or (field != "model_max_length" and limit != trained)
    ):
        shutil.copyfile(path, place)
        return []
    settings[field] = target
    place.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return [f"{path.name}: {field} {limit:g} -> {target}"]


def raised_tokenizer(tokenizer: Any, target: int) -> Any:
    """A copy of a tokenizer that lets ``target`` tokens pass."""
    longer = copy.deepcopy(tokenizer)
    longer.model_max_length = max(longer.model_max_length, target)
    return longer
