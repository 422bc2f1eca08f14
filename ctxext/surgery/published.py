"""A checkpoint's config.json as it was published, beside the config that transformers built from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig

from ctxext.surgery.texts import text_of

__all__ = ["published_json", "published_text"]


def published_json(config: Any) -> dict[str, Any]:
    """Read the config.json that a config was built from; empty where it is not on this machine.

    It is looked for where transformers says that it read it: in a directory, or in the cache of the hub. The network is
    not asked.
    """
    name = getattr(config, "_name_or_path", None)
    if not name:
        return {}
    path = Path(name) / "config.json"
    if not path.is_file():
        try:
            cached = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
        except HFValidationError:  # a path, and not a name on the hub
            return {}
        if not isinstance(cached, str):
            return {}
        path = Path(cached)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # removed or damaged since the model was loaded from it
        return {}
    is_same = isinstance(found, dict) and found.get("model_type") == config.model_type
    return found if is_same else {}


def published_text(config: Any, published: dict[str, Any]) -> dict[str, Any]:
    """The part of a published config.json that says how text is read: all of it where that is not a part of its own."""
    for name in _path_to(config, text_of(config)):
        inner = published.get(name)
        if not isinstance(inner, dict):
            return published  # written before the class had parts, and mapped into them by transformers
        published = inner
    return published


def _path_to(config: Any, part: Any) -> list[str]:
    """The attributes that lead from a config to one of its parts; none where the part is the config."""
    return [] if part is config else next(_paths(config, part), [])


def _paths(config: Any, part: Any) -> Iterator[list[str]]:
    for name, value in vars(config).items():
        if value is part:
            yield [name]
        elif isinstance(value, PreTrainedConfig):
            yield from ([name, *rest] for rest in _paths(value, part))
