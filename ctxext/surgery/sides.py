"""Encoder-decoders: two readers in one model, each with rotary positions and a config of its own.

A side is extended as a model of its own would be. It is one: transformers builds encoders and decoders as models, and
each holds the part of the whole config that a reload builds it from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ctxext.errors import IncompatibleError
from ctxext.surgery.rebuild import rotaries

SIDES = ("encoder", "decoder")


@dataclass(frozen=True, eq=False)
class Side:
    """One side of an encoder-decoder.

    Args:
        model: the innermost model that owns the side's rotary module and reads for it.
        place: where the side's config lies in the whole one, such as ``"encoder.text_config"``.
    """

    model: PreTrainedModel
    place: str


def sides_of(model: PreTrainedModel) -> dict[str, Side]:
    """Find the sides of an encoder-decoder that rotate, by name; empty for any other model.

    Raises:
        IncompatibleError: if the two share one config, or one of them has none that a reload would read.
    """
    if not model.config.is_encoder_decoder:
        return {}
    sides: dict[str, Side] = {}
    for path, rotary in rotaries(model):
        name = next((part for part in path.split(".") if part in SIDES), None)
        reader = _reader(model, path)
        if name is None or reader is None:
            continue
        if name in sides:
            raise IncompatibleError(
                f"The {name} of this {model.config.model_type} rotates in several places ({path} and others), and no "
                f"one extension of its config would be right for all of them."
            )
        if reader.config is model.config:
            raise IncompatibleError(
                f"The encoder and the decoder of this {model.config.model_type} are built from one and the same config "
                f"({type(rotary).__name__} reads {type(model.config).__name__}), which cannot say which of them is "
                f"extended, or that one reads sound and the other writes text. ctxext extends sides that have a config "
                f"each."
            )
        places = [place for place, part in _parts(model.config, "") if part is reader.config]
        if not places:
            raise IncompatibleError(
                f"The {name} of this {model.config.model_type} has a config that is no part of the whole one, so a "
                f"reload would not know of its extension."
            )
        sides[name] = Side(reader, places[0])
    return sides


def _reader(model: PreTrainedModel, path: str) -> PreTrainedModel | None:
    """Find the innermost model around a rotary module."""
    while path:
        path = path.rpartition(".")[0]
        owner: nn.Module = model.get_submodule(path)
        if isinstance(owner, PreTrainedModel):
            return owner
    return None


def _parts(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Walk every part of a config that is a config itself, with its path."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield prefix + name, value
            yield from _parts(value, f"{prefix}{name}.")
