"""The subject of every verb: a transformers model inside its wrappers, and what its config says of text.

A verb makes one ``Subject`` of what the user gave, and hands it down, so that nothing below unwraps a model again or
searches its config for the part about text. Each side of an encoder-decoder that rotates, with a config each, is a
separate subject: transformers builds it as a model, from its part of the whole config.
"""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ctxext.errors import IncompatibleError

SIDES = ("encoder", "decoder")

# Trainers that need a reference model build it from the path in the config, where the model lies unextended (TRL
# 1.16.0, trainer/dpo_trainer.py:926, kto_trainer.py:937, grpo_trainer.py:1003, rloo_trainer.py:689).
EXTENDED_IN_MEMORY = (
    "extended in memory by ctxext: no path leads to this model. Give a reference model by "
    "ctxext.training.reference(model) and the tokenizer, or save the model and load that"
)


@dataclass(frozen=True, eq=False)
class Subject:
    """A transformers model that a verb works on, with the wrappers around it.

    Args:
        wrappers: Wrappers around it, outermost first.
        place: Path to the config of a side of an encoder-decoder in the whole config, such as
            ``"encoder.text_config"``; empty for a whole model.
    """

    model: PreTrainedModel
    wrappers: tuple[Any, ...] = ()
    place: str = ""

    @classmethod
    def of(cls, given: Any) -> Subject:
        """Unwrap what the user gave: PEFT, torch.compile, data-parallel wrappers, holders of a model and a tokenizer.

        Raises:
            IncompatibleError: if no wrapper known here leads to a transformers model.
        """
        *wrappers, inner = unwrapped(given)
        if not isinstance(inner, PreTrainedModel):
            parts = dict(inner.named_modules()) if isinstance(inner, nn.Module) else getattr(inner, "__dict__", {})
            held = [name for name, part in parts.items() if isinstance(part, PreTrainedModel)]
            way = f" It holds one: extend its {held[0]}." if held else " Give the model that it was made from."
            if isinstance(inner, str | os.PathLike):
                way = f" Load it first: ctxext.load({os.fspath(inner)!r}, method=..., factor=...)."
            raise IncompatibleError(f"ctxext extends transformers models; found {type(given).__name__}.{way}")
        return cls(inner, tuple(wrappers))

    @property
    def chain(self) -> tuple[Any, ...]:
        """The wrappers and the model, outermost first."""
        return (*self.wrappers, self.model)

    @property
    def config(self) -> Any:
        """The config of the model."""
        return self.model.config

    @property
    def text(self) -> Any:
        """The part of the config about text."""
        return text_of(self.model.config)

    @property
    def kind(self) -> str:
        """The model type, transformers' name of the architecture."""
        return str(self.model.config.model_type)

    @property
    def saved(self) -> dict[str, Any] | None:
        """The extension in the config, as it was saved; None for a plain model."""
        return getattr(self.model.config, "ctxext", None) or None

    @property
    def ordinary_tokens(self) -> Int[Tensor, " tokens"]:
        """The ids without a special meaning in the config or a row of padding, or all ids if that leaves none."""
        usable = torch.ones(getattr(self.text, "vocab_size", None) or 0, dtype=torch.bool)
        special = [
            (value if isinstance(value, list | tuple) else [value])
            for name, value in [*vars(self.config).items(), *vars(self.text).items()]
            if name.endswith(("_token_id", "_token_ids", "_token_index"))
        ]
        tables = (module for module in self.model.modules() if isinstance(module, nn.Embedding))
        special.append([table.padding_idx for table in tables if table.num_embeddings >= len(usable)])
        for token in itertools.chain.from_iterable(special):
            if isinstance(token, int) and -len(usable) <= token < len(usable):
                usable[token] = False
        return (usable if usable.any() else ~usable).nonzero()[:, 0]

    @functools.cached_property
    def rotaries(self) -> list[tuple[str, nn.Module]]:
        """The modules whose frequencies follow transformers' rope types, with their paths."""
        return [
            (path, module)
            for path, module in self.model.named_modules()
            if any(name.endswith("original_inv_freq") for name in module._buffers)
            and hasattr(module, "rope_type")
            and hasattr(module, "config")
        ]

    @functools.cached_property
    def sides(self) -> dict[str, Subject]:
        """The sides of an encoder-decoder that rotate, by name; empty for any other model.

        Raises:
            IncompatibleError: if the two share one config, or one of them has none that a reload would read.
        """
        sides: dict[str, Subject] = {}
        for path, _ in self.rotaries if self.config.is_encoder_decoder else ():
            # transformers builds each side as a model, so the innermost one around a rotary module is the side.
            name = next((part for part in path.split(".") if part in SIDES), None)
            owners = [self.model.get_submodule(path[:end]) for end, sign in enumerate(path) if sign == "."]
            reader = next((owner for owner in reversed(owners) if isinstance(owner, PreTrainedModel)), None)
            if name is None or reader is None:
                continue
            if name in sides:
                raise IncompatibleError(
                    f"The {name} of this {self.kind} rotates in several places ({path} and others), and no one "
                    f"extension of its config would be right for all of them."
                )
            if reader.config is self.config:
                raise IncompatibleError(
                    f"The encoder and the decoder of this {self.kind} share one config ({type(self.config).__name__}), "
                    f"so it cannot record an extension per side. ctxext extends sides that have a config each."
                )
            place = path_to(self.config, reader.config)
            if not place:
                raise IncompatibleError(
                    f"The {name} of this {self.kind} has a config that is no part of the whole one, so a reload would "
                    f"not know of its extension."
                )
            sides[name] = Subject(reader, place=".".join(place))
        return sides


def unwrapped(model: Any) -> list[Any]:
    """Unwrap a transformers model, and return the chain of wrappers and the model, outermost first.

    Wrappers come from torch.compile, data-parallel training and PEFT, or hold a tokenizer too (as pipelines do).
    """
    chain = [model]
    while not isinstance(chain[-1], PreTrainedModel):
        outer = chain[-1]
        compiled = dict(outer.named_children()).get("_orig_mod") if isinstance(outer, nn.Module) else None
        if compiled is not None:  # asked first: it answers for every attribute of the module inside
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
    """Find the model that an object holds with its tokenizer; in a pipeline of modules, look at the first one."""
    if not hasattr(holder, "tokenizer"):
        return None
    for name in ("auto_model", "model"):
        held = getattr(holder, name, None)
        if isinstance(held, nn.Module) and isinstance(unwrapped(held)[-1], PreTrainedModel):
            return held
    first = next(holder.children(), None) if isinstance(holder, nn.Sequential) else None
    return first if first is not None and _beside_a_tokenizer(first) is not None else None


def text_of(config: Any) -> Any:
    """Return the text part of a config, which is the config itself for most models; never a copy.

    For an encoder and a decoder side by side transformers returns a copy, with other field names: take the whole there.
    """
    text = config.get_text_config(decoder=True)
    return config if type(text) is type(config) else text


def field_of(config: Any, name: str) -> tuple[Any, str]:
    """Return the part of a config, or of a model, that holds what a dotted name says, and the last part of the name."""
    *path, leaf = name.split(".")
    return functools.reduce(getattr, path, config), leaf


def path_to(config: Any, part: Any) -> list[str]:
    """Return the attributes that lead from a config to one of its parts; none for the config itself and for others."""
    for name, value in vars(config).items() if part is not config else ():
        if value is part:
            return [name]
        if isinstance(value, PreTrainedConfig) and (rest := path_to(value, part)):
            return [name, *rest]
    return []
