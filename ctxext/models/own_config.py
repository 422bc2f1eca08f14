"""Configs that several live models are built from: a model that is extended gets a copy."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ctxext.core.steps import Moment, Step, Work, register

_OWNERS: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def owns_its_config(model: PreTrainedModel) -> None:
    """Note that no other model was built from this one's config, so that none is looked for at each extension.

    To look for one takes a second in a process of many objects, and ``inspect`` tries dozens of methods on one model.
    """
    _OWNERS.add(model)


def _give_own_config(work: Work) -> None:
    """Give a model a copy of its config where another live model, built from the same object, would change with it.

    ``LlamaForCausalLM(config)`` keeps the object that it is given, and so do all its modules. A model that shares it
    with none keeps it: whoever holds that object (PEFT, the Trainer) sees the extension.
    """
    model = work.subject.model
    # How many references an expression makes by itself differs between versions of Python, so they are counted on an
    # object that has one holder.
    own = sum(value is model.config for module in model.modules() for value in vars(module).values())
    lone = SimpleNamespace(config=SimpleNamespace())
    is_alone = sys.getrefcount(model.config) == own + sys.getrefcount(lone.config) - 1
    config, text = model.config, work.subject.text
    if is_alone and text is config:
        return
    if not _is_shared(model, config, text):  # the text part is edited, too
        return
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)  # fills in the copy of every part, under the part's id
    for module in model.modules():
        for name, value in vars(module).items():  # some models keep their text part's config under a second name
            if issubclass(type(value), PreTrainedConfig) and id(value) in copies:
                vars(module)[name] = copies[id(value)]  # for good: unpatching would put back one that knows no changes


def _is_shared(model: nn.Module, *configs: Any) -> bool:
    """Tell whether another live model has one of the configs: no part of this model, and no whole with it inside."""
    own = set(model.modules())
    known = {id(vars(module)) for module in own}
    # By type(): isinstance asks an object for its __class__, which proxies answer by loading their objects.
    holders = [holder for holder in gc.get_referrers(*configs) if id(holder) not in known]
    # Attributes are held by the module's dictionary, or by the module itself where Python has not made one yet.
    attributes = [holder for holder in holders if type(holder) is dict and "_modules" in holder]
    parts = [*holders, *(gc.get_referrers(*attributes) if attributes else ())]
    others = {part for part in parts if issubclass(type(part), PreTrainedModel)} - own
    for whole in [inside for other in others if model in (inside := set(other.modules()))]:
        others -= whole
    return bool(others)


register(Step(Moment.OWN_CONFIG, _give_own_config, applies=lambda work: work.subject.model not in _OWNERS))
