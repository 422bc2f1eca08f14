"""Requests for a picture: the checkpoint to show a method on, or an example of the method's kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from ctxext.attention.encodings import spec_of
from ctxext.checkpoints.classes import meta_model, model_class
from ctxext.checkpoints.inspect import rope_of_checkpoint
from ctxext.checkpoints.load import load, load_saved
from ctxext.checkpoints.source import checked_path, read_any_config, read_tokenizer
from ctxext.core.saved import saved_extension
from ctxext.core.subject import Subject
from ctxext.errors import InvalidParameterError
from ctxext.measuring.readings import known_trained_length
from ctxext.methods import EncodingMethod, Method, saved_class
from ctxext.methods.encoding import Encoding, EncodingSpec
from ctxext.methods.parameters import checked_tokens
from ctxext.models.table_rows import twins_of
from ctxext.spec import LLAMA, RopeSpec

UNTRAINED = "as it begins, untrained"
SMALL = EncodingSpec(hidden_size=64, num_heads=8, num_kv_heads=8, head_dim=16, num_layers=1, trained_length=512)
"""The model that an encoding is shown on where there is no checkpoint."""


@dataclass(frozen=True, kw_only=True)
class PictureRequest:
    """Checkpoint (None for an example of the method's kind), text and layer to show a method on.

    Args:
        length: Tokens of the text to read; None for as many as there are, at most 1,024.

    Raises:
        InvalidParameterError: a length is not a number of tokens.
    """

    checkpoint: str | None = None
    text: str | None = None
    layer: int = 0
    length: int | None = None
    trained_length: int | None = None
    trust: bool = False

    def __post_init__(self) -> None:
        for name in ("length", "trained_length"):
            if getattr(self, name) is not None:
                checked_tokens(name, getattr(self, name))

    @property
    def model(self) -> str:
        """Name of the checkpoint in a title; empty for an example."""
        return Path(self.checkpoint).name if self.checkpoint else ""

    @cached_property
    def config(self) -> Any:
        """Config of the checkpoint."""
        checked_path(str(self.checkpoint), {})
        return read_any_config(str(self.checkpoint), trust_remote_code=self.trust)

    @cached_property
    def structure(self) -> Subject:
        """Model of the checkpoint on the meta device."""
        return Subject(meta_model(self.config, trust_remote_code=self.trust))

    @cached_property
    def positions(self) -> Literal["table", "rotation", "elsewhere"] | None:
        """Place where the checkpoint has its positions; None without a checkpoint."""
        if self.checkpoint is None:
            return None
        if self.structure.rotaries:
            return "rotation"
        twins = twins_of(self.structure.model)
        return "table" if twins.has_learned or twins.has_sinusoids else "elsewhere"

    def load(self, method: Method | None = None) -> PreTrainedModel:
        """Load the checkpoint in float32, extended by a method or as it was saved."""
        how: dict[str, Any] = {"trust_remote_code": True} if self.trust else {}
        place = str(self.checkpoint)
        if method is None:
            loaded = load_saved(place, plain_class=model_class(self.config), dtype=torch.float32, **how)
        else:
            loaded = load(place, method, trained_length=self.trained_length, dtype=torch.float32, **how)
        model: PreTrainedModel = Subject.of(loaded).model
        return model.eval()

    def rope(self, trained_length: int) -> RopeSpec:
        """Return the rotation of the checkpoint, or an example that was trained for so many tokens."""
        if self.checkpoint is None:
            return replace(LLAMA, trained_length=self.trained_length or trained_length)
        return rope_of_checkpoint(self.checkpoint, trained_length=self.trained_length, trust_remote_code=self.trust)

    def load_encoded(self, method: EncodingMethod) -> tuple[PreTrainedModel, EncodingMethod, str]:
        """Load the checkpoint as it was trained with an encoding, or else as it begins with it.

        Returns:
            The model, the method as it was saved, and what to know of its weights; empty where they were trained.
        """
        saved = (saved_extension(self.config, str(self.checkpoint)) or {}).get("method") or {}
        if saved.get("method") != method.name:
            return self.load(method), method, UNTRAINED
        known = saved_class(method.name).from_dict(saved)
        assert isinstance(known, EncodingMethod)
        return self.load(), known, ""

    def encoding(
        self, method: EncodingMethod, trained_length: int
    ) -> tuple[EncodingMethod, Encoding, EncodingSpec, str, str]:
        """Build or load one layer's encoding.

        Returns:
            The method as it was saved, the module, the model's sizes, and words about its weights and its layer for
            the title, which are empty where there is nothing to say.

        Raises:
            InvalidParameterError: a layer that does not exist.
        """
        torch.manual_seed(0)
        if self.checkpoint is None:
            spec = replace(SMALL, trained_length=self.trained_length or trained_length)
            module, state, layer = method.build(spec), UNTRAINED, ""
        else:
            model, method, state = self.load_encoded(method)
            modules = [module for module in model.modules() if isinstance(module, Encoding)]
            if not 0 <= self.layer < len(modules):
                raise InvalidParameterError(
                    f"There is no layer {self.layer} with an encoding: the model has {len(modules)}."
                )
            subject = Subject(model)
            spec = spec_of(subject, known_trained_length(subject, self.trained_length))
            module, layer = modules[self.layer], f", layer {self.layer}" if len(modules) > 1 else ""
        return method, module, spec, state if any(True for _ in module.parameters()) else "", layer

    def tokens(self, text: str) -> tuple[Int[Tensor, "1 seq"], Any]:
        """Tokenise a text as the checkpoint does; return its tokens and the tokenizer."""
        tokenizer = read_tokenizer(str(self.checkpoint), trust_remote_code=self.trust)
        tokens: Tensor = tokenizer(text, return_tensors="pt").input_ids
        if not tokens.shape[1]:
            raise InvalidParameterError("--text holds no token. Give a sentence, or a file with one.")
        return tokens, tokenizer
