"""The part of a config that says how a model reads text."""

from __future__ import annotations

from typing import Any

__all__ = ["text_of"]


def text_of(config: Any) -> Any:
    """The text part of a config, which is the whole of it for most models; always an object that belongs to it.

    Of a config that describes an encoder and a decoder side by side, transformers makes a copy with the names changed.
    What is written into that is lost, so such a config stands for itself.
    """
    found = config.get_text_config(decoder=True)
    return config if type(found) is type(config) else found
