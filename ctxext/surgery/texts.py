"""Parts of a config: the one that says how a model reads text, and those that a path leads to."""

from __future__ import annotations

from typing import Any


def text_of(config: Any) -> Any:
    """The text part of a config, which is the whole of it for most models; always an object that belongs to it.

    Of a config that describes an encoder and a decoder side by side, transformers makes a copy with the names changed.
    What is written into that is lost, so such a config stands for itself.
    """
    found = config.get_text_config(decoder=True)
    return config if type(found) is type(config) else found


def part_of_config(config: Any, place: str) -> Any:
    """The part of a config at ``place``, a path of attributes; the config itself for an empty one."""
    for name in place.split(".") if place else ():
        config = getattr(config, name)
    return config


def field_of(config: Any, name: str) -> tuple[Any, str]:
    """The part of a config that holds the field of a dotted name, and the field's own name."""
    place, _, leaf = name.rpartition(".")
    return part_of_config(config, place), leaf
