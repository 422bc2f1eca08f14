"""Falcon with ALiBi (the RW models), whose bias in transformers is bfloat16, and added twice by its eager path."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconAttention, FalconModel, build_alibi_tensor

from ctxext.core.subject import Subject
from ctxext.methods.formulas import alibi_slopes
from ctxext.models.alibi import AlibiArchitecture, AlibiForward, slopes_in
from ctxext.spec import AlibiSpec


class FalconForward(AlibiForward):
    """Replacement of ``FalconAttention.forward``."""

    def __call__(
        self, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Compute one attention layer, ``[batch, seq, hidden]`` to the same."""
        module = self.attention
        parts = module._split_heads(module.query_key_value(hidden_states))
        q, k, v = (part.transpose(1, 2) for part in parts)
        how = {"scale": module.inv_norm_factor, "dropout": module.attention_dropout.p}
        return module.dense(self.attended(q, k, v, attention_mask, kwargs, **how)), None


class Falcon(AlibiArchitecture):
    """Falcon models whose config says ``alibi``; the others are rotary models."""

    name = "falcon"
    decoder_class = FalconModel
    attention_class = FalconAttention
    forward_class = FalconForward
    length_field = "max_position_embeddings"

    def holds(self, decoder: nn.Module) -> bool:
        return bool(decoder.use_alibi)

    def spec(self, subject: Subject, trained_length: int) -> AlibiSpec:
        heads = subject.config.num_attention_heads
        # Falcon was trained with slopes rounded to bfloat16 and divided, like the scores, by sqrt(head_dim).
        rounded = alibi_slopes(heads).float().bfloat16().double() / math.sqrt(subject.config.hidden_size // heads)
        return AlibiSpec(num_heads=heads, trained_length=trained_length, slopes=tuple(rounded.tolist()))

    def stock_slopes(self, subject: Subject) -> Tensor:
        heads = subject.config.num_attention_heads
        return slopes_in(build_alibi_tensor, heads) / math.sqrt(subject.config.hidden_size // heads)
