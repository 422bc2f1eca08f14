"""What beside a model's config limits how long its texts may be: files of tokenizers, of generate, of pipelines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ctxext.checkpoints.source import read_json
from ctxext.errors import InvalidParameterError

__all__ = ["LENGTH_FIELDS", "copy_raised", "raise_limits", "refuse_tokenizer"]

# Where files beside a model's config may hold its window: the tokenizer's, generate's, sentence-transformers'.
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
    lines = _raised(path, place, trained, target)
    if not lines:
        shutil.copyfile(path, place)
    return lines


def raise_limits(old: Path, new: Path, trained: int, target: int) -> None:
    """Raise what limits the length of texts in the files beside a model.

    Args:
        old: a directory with files from before, which stay as they are.
        new: a directory to write into. A file that lies there already is raised itself.
        trained: the old window, in tokens.
        target: the new window, in tokens.
    """
    for name in LENGTH_FIELDS:
        path = next((place / name for place in (new, old) if (place / name).is_file()), None)
        if path is not None:
            _raised(path, new / name, trained, target)


def _raised(path: Path, place: Path, trained: int | None, target: int | None) -> list[str]:
    """Write a file with its limit raised to ``place``, and say so in a line; nothing is written where it stays."""
    settings, field = read_json(path), LENGTH_FIELDS[path.name]
    limit = settings.get(field)
    is_count = isinstance(limit, int | float) and not isinstance(limit, bool)
    if target is None or limit is None or not is_count or limit >= target:
        return []
    if field != "model_max_length" and limit != trained:
        return []
    settings[field] = target
    place.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return [f"{path.name}: {field} {limit:g} -> {target}"]


def refuse_tokenizer(tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer whose padding is not the model's, where rows of its table of positions are counted from that.

    Args:
        tokenizer: to be saved beside the model.
        config: of a model that gives tokens which are padding by their id no position.

    Raises:
        InvalidParameterError: with both ids.
    """
    ours, theirs = config.pad_token_id, getattr(tokenizer, "pad_token_id", None)
    if theirs is not None and ours is not None and theirs != ours:
        raise InvalidParameterError(
            f"This tokenizer pads with the token {theirs} ({tokenizer.pad_token!r}), and the model counts positions of "
            f"all tokens but {ours} (config.pad_token_id): padded texts would stand at other positions than they do "
            f"alone. Give the tokenizer of this checkpoint, or set tokenizer.pad_token to its token {ours}."
        )
