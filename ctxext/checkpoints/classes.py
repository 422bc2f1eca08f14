"""Find the class of transformers that a checkpoint is loaded with, and build its model without weights."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ctxext.core.rebuild import on_meta
from ctxext.core.subject import path_to, text_of
from ctxext.errors import IncompatibleError, UnknownNameError
from ctxext.models.own_config import owns_its_config
from ctxext.models.refusals import building

# In the name of a class, transformers' or one that it does not have (LLaMAForCausalLM, with code in the checkpoint).
PREDICTS_TOKENS = re.compile("CausalLM|LMHead|ConditionalGeneration")


def model_class(config: PreTrainedConfig, auto_class: Any = None) -> Any:
    """Return the class that loads a checkpoint: ``auto_class``, the class it was saved from, or the causal model.

    ``auto_class`` is a class of transformers or its name; None follows ``architectures``.

    Raises:
        UnknownNameError: transformers has no class of this name.
        IncompatibleError: transformers knows no model that this checkpoint could be, or its class is the user's own.
    """
    if auto_class is not None:
        return _named_class(auto_class)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if remote and not type(config).__module__.startswith("transformers."):
        return AutoModelForCausalLM
    names = config.architectures if isinstance(config.architectures, list | tuple) else ()
    for name in names:
        saved = getattr(transformers, name, None) if isinstance(name, str) else None
        is_model = isinstance(saved, type) and issubclass(saved, PreTrainedModel)
        if is_model and isinstance(config, getattr(saved, "config_class", ())):
            return saved
    if type(config) not in AutoModelForCausalLM._model_mapping:  # and no class of transformers is named
        named = f" and no class {', '.join(map(str, names))}" if names else ""
        raise IncompatibleError(
            f"This is a {config.model_type}, which transformers {transformers.__version__} has no causal language "
            f"model for{named}. Write the class it was saved from into config.json: architectures."
        )
    if config_of(config, AutoModelForCausalLM) is not config:
        raise IncompatibleError(
            f"This {config.model_type} does not say which class it was saved from (architectures={names!r} in "
            f"config.json), and the causal language model of its type is only a part of it. Write the class into "
            f"config.json, or choose that part: auto_class='AutoModelForCausalLM'."
        )
    if names and not any(PREDICTS_TOKENS.search(str(name)) for name in names):
        raise IncompatibleError(
            f"This {config.model_type} is of the class {', '.join(map(str, names))} (architectures in config.json), "
            f"which transformers {transformers.__version__} does not have for it, and is not taken for a causal "
            f"language model without being asked. Give your class, ctxext.load(path, auto_class=...), or call "
            f"ctxext.patch on the model that it loads; if the weights are a language model's, write that class there."
        )
    return AutoModelForCausalLM


def require_language_model(config: Any, place: str) -> None:
    """Raise ``IncompatibleError`` for a checkpoint whose class has another head than a language model's."""
    chosen = model_class(config)
    if chosen is not AutoModelForCausalLM and not chosen.can_generate():
        raise IncompatibleError(
            f"{place} holds a {chosen.__name__}, which predicts no tokens (architectures in config.json); read as a "
            f"causal language model it would have a head of random weights. Give a language model's checkpoint."
        )


def way_to_run(config: Any, *, is_saved: bool) -> str:
    """Return the way to run what no other program runs: `ctxext serve`, which takes classes that write text alone.

    A checkpoint that was not saved extended (``is_saved``) needs a causal class of transformers for it.
    """
    served = not config.is_encoder_decoder
    try:
        chosen = model_class(config)
    except IncompatibleError:
        served = False
    else:
        served &= chosen is AutoModelForCausalLM or bool(chosen.can_generate())
    if not served:
        return "Run it with transformers, by ctxext.load"
    is_taken = is_saved or _takes(AutoModelForCausalLM, config)
    return "Serve it with ctxext serve" if is_taken else "Serve a copy (ctxext patch) with ctxext serve"


def _takes(kind: Any, config: Any) -> bool:
    """Return whether ``kind``, a class such as ``AutoModelForCausalLM``, takes a checkpoint."""
    return type(config) in kind._model_mapping or kind.__name__ in (getattr(config, "auto_map", None) or {})


def require_class(config: Any, kind: Any, place: str) -> None:
    """Raise ``IncompatibleError`` unless ``kind``, a class such as ``AutoModelForCausalLM``, takes a checkpoint."""
    if not _takes(kind, config):
        predicts = "causal" if kind is AutoModelForCausalLM else "masked"
        raise IncompatibleError(
            f"{place} holds a {config.model_type}, for which transformers has no {predicts} language model. Give a "
            f"checkpoint of another type; to run this one, call ctxext.load(path)."
        )


def _named_class(auto_class: Any) -> Any:
    kind = getattr(transformers, auto_class, None) if isinstance(auto_class, str) else auto_class
    if not hasattr(kind, "from_pretrained"):
        known = [name for name in dir(transformers) if name.startswith("AutoModel")]
        raise UnknownNameError.of("class of transformers", auto_class, known)
    return kind


def config_of(config: Any, chosen: Any) -> Any:
    """Return ``config``, or its text part if ``chosen`` builds a model of that part alone."""
    text, mapping = text_of(config), getattr(chosen, "_model_mapping", None)
    if mapping is None:
        expected = getattr(chosen, "config_class", None)
        if expected is not None and not isinstance(config, expected) and not isinstance(text, expected):
            raise IncompatibleError(
                f"{chosen.__name__} is the class of a {expected.model_type}, and this checkpoint is a "
                f"{config.model_type}. Give another auto_class, or leave it out."
            )
    elif type(config) in mapping:
        expected = mapping[type(config)].config_class
    else:
        return config  # from_pretrained lists the configs that the class takes
    if text is config or expected is None or isinstance(config, expected) or not isinstance(text, expected):
        return config
    part = copy.deepcopy(text)
    for name in ("ctxext", "quantization_config"):
        if getattr(config, name, None) is not None:
            setattr(part, name, copy.deepcopy(getattr(config, name)))
    if "original" in (getattr(part, "ctxext", None) or {}):  # names of fields lead through the whole config
        inside = "".join(f"{name}." for name in path_to(config, text))
        part.ctxext["original"] = {name.removeprefix(inside): value for name, value in part.ctxext["original"].items()}
    return part


def meta_model(
    config: Any, *, auto_class: Any = None, trust_remote_code: bool = False, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Build the model of a config on the meta device: all of its structure, no memory for weights.

    The model gets a copy of the config, which also gives the dtype where ``dtype`` is None. Errors of ``model_class``
    are raised too.

    Raises:
        CheckpointError: transformers cannot build it.
    """
    with building(f"a {config.model_type}"), on_meta():
        chosen = model_class(config, auto_class)
        copied, build = copy.deepcopy(config_of(config, chosen)), getattr(chosen, "from_config", chosen)
        options: dict[str, Any] = {} if dtype is None or build is chosen else {"dtype": dtype}
        if chosen is AutoModelForCausalLM:
            options["trust_remote_code"] = trust_remote_code
        model: PreTrainedModel = build(copied, **options)
    owns_its_config(model)
    return model
