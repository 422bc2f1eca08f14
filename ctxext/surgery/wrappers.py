"""The model that is patched: found inside its wrappers, and given a config of its own where others share it."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError
from ctxext.surgery.edits import Edits
from ctxext.surgery.texts import text_of

# Trainers that need a reference model build it from the path in the config, where the model lies unextended (TRL
# 1.16.0, trainer/dpo_trainer.py:926, kto_trainer.py:937, grpo_trainer.py:1003, rloo_trainer.py:689).
EXTENDED_IN_MEMORY = (
    "extended in memory by ctxext: no path leads to this model. Give a reference model by "
    "ctxext.training.reference(model) and the tokenizer, or save the model and load that"
)


def base_model(model: Any) -> PreTrainedModel:
    """Unwrap PEFT, torch.compile and data-parallel wrappers, and what holds a model beside its tokenizer.

    Raises:
        IncompatibleError: if there is no transformers model inside, or none that is found alone.
    """
    inner = unwrapped(model)[-1]
    if not isinstance(inner, PreTrainedModel):
        parts = dict(inner.named_modules()) if isinstance(inner, nn.Module) else getattr(inner, "__dict__", {})
        held = [name for name, part in parts.items() if isinstance(part, PreTrainedModel)]
        way = f" It holds one: extend its {held[0]}." if held else " Give the model that it was made from."
        raise IncompatibleError(f"ctxext extends transformers models; found {type(model).__name__}.{way}")
    return inner


def length_limits(model: Any) -> list[tuple[Any, str, int]]:
    """Find the limits at which whatever holds a model cuts its texts: the object, the attribute and its value.

    Such limits are ``max_seq_length`` of older versions of sentence-transformers, and ``model_max_length`` of a
    tokenizer, which newer ones, their CrossEncoder and transformers' pipelines go by.
    """
    limits: list[tuple[Any, str, int]] = []
    for holder in unwrapped(model)[:-1]:
        places = [(getattr(holder, "tokenizer", None), "model_max_length")]
        places += [(holder, name) for name in ("max_seq_length", "max_length") if name in vars(holder)]
        for owner, name in places:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not any(owner is other and name == known for other, known, _ in limits):
                limits.append((owner, name, value))
    return limits


def is_zero3(model: nn.Module) -> bool:
    """Tell whether DeepSpeed ZeRO-3 has shared a model's weights out: it puts an id on each."""
    return any(hasattr(weight, "ds_id") for weight in model.parameters())


def unwrapped(model: Any) -> list[Any]:
    """Unwrap a transformers model, and return the chain of wrappers and the model, outermost first.

    Wrappers are those of torch.compile, data-parallel and PEFT, and what holds a model beside its tokenizer: a
    SentenceTransformer, a CrossEncoder, a pipeline.
    """
    chain = [model]
    while not isinstance(chain[-1], PreTrainedModel):
        outer = chain[-1]
        compiled = dict(outer.named_children()).get("_orig_mod") if isinstance(outer, nn.Module) else None
        if compiled is not None:  # asked first: it answers for every attribute of what is inside
            chain.append(compiled)
        elif hasattr(outer, "get_base_model"):
            chain.append(outer.get_base_model())
        elif isinstance(getattr(outer, "module", None), nn.Module):
            chain.append(outer.module)
        elif isinstance(held := _beside_a_tokenizer(outer), nn.Module):
            chain.append(held)
        else:
            break
    return chain


def _beside_a_tokenizer(holder: Any) -> Any:
    """Find the model that an object holds beside its tokenizer; of a pipeline of modules, the first module's."""
    if not hasattr(holder, "tokenizer"):
        return None
    for name in ("auto_model", "model"):
        held = getattr(holder, name, None)
        if isinstance(held, nn.Module) and isinstance(unwrapped(held)[-1], PreTrainedModel):
            return held
    first = next(holder.children(), None) if isinstance(holder, nn.Sequential) else None
    return first if first is not None and _beside_a_tokenizer(first) is not None else None


_OWNERS: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def owns_its_config(model: PreTrainedModel) -> None:
    """Note that no other model was built from this one's config, so that none is looked for at each extension.

    To look for one takes a second in a process of many objects, and ``inspect`` tries dozens of methods on one model.
    """
    _OWNERS.add(model)


def give_own_config(model: PreTrainedModel, edits: Edits) -> None:
    """Give a model a copy of its config where another live model, built from the same object, would change with it.

    ``LlamaForCausalLM(config)`` keeps the object that it is given, and so do all its modules. A model that shares it
    with none keeps it: whoever holds that object (PEFT, the Trainer) sees the extension.
    """
    if model in _OWNERS or _holds_config_alone(model):
        return
    config = model.config
    text = text_of(config)
    if not _is_held_by_others(model, config, text):  # asked first, since to go through all objects takes much longer
        return
    # By type(): isinstance asks an object for its __class__, which proxies answer by loading what they stand for.
    live = [thing for thing in gc.get_objects() if issubclass(type(thing), PreTrainedModel)]
    # The text part is edited, too: a vision-language config keeps the object that it was made from.
    holders = [other for other in live if other.config is config or other.config is text]
    if all(_is_part(model, other) or _is_part(other, model) for other in holders):
        return
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)  # fills in the copy of every part, under the part's id
    for module in model.modules():
        copied = copies.get(id(getattr(module, "config", None)))
        if copied is not None:
            edits.set(module, "config", copied)


def _holds_config_alone(model: PreTrainedModel) -> bool:
    """Tell whether only the model and its modules refer to its config, and the config is that of its text.

    How many references a function's own names and arguments make differs between versions of Python, so they are
    counted on an object that has one holder.
    """
    own = sum(value is model.config for module in model.modules() for value in vars(module).values())
    alone = _references(SimpleNamespace(config=SimpleNamespace())) - 1
    return text_of(model.config) is model.config and _references(model) == own + alone


def _references(holder: Any) -> int:
    """Count the references to ``holder.config``, those of this call included."""
    return sys.getrefcount(holder.config)


def lead_nowhere(config: Any, edits: Edits) -> None:
    """Put a sentence in the place of the path that a config was loaded from, where the model is not extended."""
    if getattr(config, "_name_or_path", ""):
        edits.set(config, "_name_or_path", EXTENDED_IN_MEMORY)


def _is_held_by_others(model: nn.Module, *configs: Any) -> bool:
    """Tell whether a module that is no part of the model has one of the configs as an attribute."""
    own = {id(holder) for module in model.modules() for holder in (module, vars(module))}
    for holder in gc.get_referrers(*configs):
        # Attributes are held by the module's dictionary, or by the module itself where Python has not made one yet.
        is_module = "_modules" in holder if type(holder) is dict else issubclass(type(holder), nn.Module)
        if is_module and id(holder) not in own:
            return True
    return False


def _is_part(model: nn.Module, whole: nn.Module) -> bool:
    return any(part is model for part in whole.modules())
