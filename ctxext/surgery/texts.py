"""Access to parts of a config: the text part, and the part at a dotted path."""

from __future__ import annotations

from typing import Any


def text_of(config: Any) -> Any:
    """Return the text part of a config, which is the config itself for most models; never a copy.

    For a config that describes an encoder and a decoder side by side, transformers returns a copy with other field
    names. Changes of a copy would be lost, so such a config is its own text part.
    """
    text = config.get_text_config(decoder=True)
    return config if type(text) is type(config) else text


def part_of_config(config: Any, place: str) -> Any:
    """Return the part of a config at ``place``, a dotted path of attributes; the config itself for an empty path."""
    for name in place.split(".") if place else ():
        config = getattr(config, name)
    return config


def field_of(config: Any, name: str) -> tuple[Any, str]:
    """Return the part of a config that holds the field of a dotted name, and the last part of the name."""
    place, _, leaf = name.rpartition(".")
    return part_of_config(config, place), leaf
