"""Find the config.json that a config was built from, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from ctxext.core.subject import path_to, text_of
from ctxext.files import parse_json


def published_json(config: Any) -> dict[str, Any]:
    """Read the config.json that a config was built from; return an empty dict if it is not on this machine.

    The file is searched in the directory or in the hub's cache from which transformers read the config, offline.
    """
    name = getattr(config, "_name_or_path", None)
    if not name:
        return {}
    path = Path(name) / "config.json"
    if not path.is_file():
        try:
            cached = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
        except HFValidationError:  # the name is a path, not a repository of the hub
            return {}
        if not isinstance(cached, str):
            return {}
        path = Path(cached)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # removed or damaged since the model was loaded from it
        return {}
    is_same = isinstance(content, dict) and content.get("model_type") == config.model_type
    return content if is_same else {}


def published_text(config: Any, published: dict[str, Any]) -> dict[str, Any]:
    """Return the text part of a published config.json; the whole of it if it has no such part."""
    for name in path_to(config, text_of(config)):
        inner = published.get(name)
        if not isinstance(inner, dict):
            return published  # a file older than the parts of its class; transformers maps its fields
        published = inner
    return published
