"""A config object of one's own, where several models were built from the same one."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

from transformers import PreTrainedModel

from ctxext.surgery.edits import Edits

__all__ = ["give_own_config"]


def give_own_config(model: PreTrainedModel, edits: Edits) -> None:
    """Give a model a copy of its config where another live model, built from the same object, would change with it.

    ``LlamaForCausalLM(config)`` keeps the object that it is given, and so do all its modules. A model that shares it
    with none keeps it: whoever holds that object (PEFT, the Trainer) sees the extension.
    """
    config = model.config
    text = config.get_text_config(decoder=True)
    own = sum(value is config for module in model.modules() for value in vars(module).values())
    if text is config and sys.getrefcount(config) == own + 3:  # two names here, and the argument: nobody else holds it
        return
    # The text part is edited, too: a vision-language config keeps the object that it was made from.
    holders = (other for other in _live_models() if other.config is config or other.config is text)
    if not any(_are_apart(model, other) for other in holders):
        return
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)  # fills in the copy of every part, under the part's id
    for module in model.modules():
        found = copies.get(id(getattr(module, "config", None)))
        if found is not None:
            edits.set(module, "config", found)


def _live_models() -> list[PreTrainedModel]:
    # By type(): isinstance asks an object for its __class__, which proxies answer by loading what they stand for.
    return [found for found in gc.get_objects() if issubclass(type(found), PreTrainedModel)]


def _are_apart(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether neither is a part of the other."""
    return all(part is not other for part in model.modules()) and all(part is not model for part in other.modules())
