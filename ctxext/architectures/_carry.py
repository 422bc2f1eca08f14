"""Make a live model what transformers would build from another config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformers
from transformers import PreTrainedModel

from ctxext._edits import Edits
from ctxext.architectures._sites import rotaries
from ctxext.architectures._twins import changed_scalars, meta_twin, rotary_twin, round_trip
from ctxext.errors import IncompatibleError

__all__ = ["carry_over"]


def carry_over(model: PreTrainedModel, config: Any, fields: Iterable[str], edits: Edits) -> None:
    """Make the live model what transformers would build from ``config``, which differs from its own in ``fields``."""
    old = meta_twin(model, round_trip(model.config, {}))
    try:
        new = meta_twin(model, config)
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise IncompatibleError(
            f"transformers {transformers.__version__} cannot build {type(model).__name__} from its extended config: "
            f"{type(error).__name__}: {error}"
        ) from error
    text, new_text = model.config.get_text_config(decoder=True), config.get_text_config(decoder=True)
    for path, name, value in changed_scalars(old, new):
        edits.set(model.get_submodule(path), name, value)
    for name in fields:
        edits.set(text, name, getattr(new_text, name))
    for path, rotary in rotaries(model):
        rotary_config = new_text
        if rotary.config is not text:
            rotary_config = new.get_submodule(path).config
            if rotary_config.to_dict() == old.get_submodule(path).config.to_dict():
                continue
            edits.set(rotary, "config", rotary_config)  # a changed copy of the text config, made when it was built
        for name, buffer in rotary_twin(rotary, rotary_config).named_buffers(recurse=False):
            edits.set(rotary, name, buffer.to(getattr(rotary, name).device))
        for name in [name for name in vars(rotary) if name.endswith("long_inv_freq")]:
            edits.delete(rotary, name)  # stock code caches it from the config it saw first
