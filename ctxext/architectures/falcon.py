"""Falcon with ALiBi (the RW models): absolute bfloat16 bias in stock code, added twice by its eager path."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconAttention, FalconModel, build_alibi_tensor

from ctxext.architectures.alibi import AlibiArchitecture
from ctxext.errors import IncompatibleError
from ctxext.methods import Method
from ctxext.methods.formulas import alibi_slopes
from ctxext.spec import AlibiSpec
from ctxext.surgery.alibi import AlibiAttend
from ctxext.surgery.positions import layout_of

__all__ = ["Falcon"]


class Falcon(AlibiArchitecture):
    """Falcon whose config says ``alibi``; the others are rotary models."""

    name: ClassVar[str] = "falcon"
    decoder_class: ClassVar[type[nn.Module]] = FalconModel
    attention_class: ClassVar[type[nn.Module]] = FalconAttention
    length_field: ClassVar[str] = "max_position_embeddings"

    def has_alibi(self, decoder: nn.Module) -> bool:
        return bool(decoder.use_alibi)

    def spec(self, model: PreTrainedModel, trained_length: int) -> AlibiSpec:
        heads = model.config.num_attention_heads
        # Falcon was trained with slopes rounded to bfloat16 and divided, like the scores, by sqrt(head_dim).
        rounded = alibi_slopes(heads).float().bfloat16().double() / math.sqrt(model.config.hidden_size // heads)
        return AlibiSpec(num_heads=heads, trained_length=trained_length, slopes=tuple(rounded.tolist()))

    def stock_slopes(self, model: PreTrainedModel) -> Tensor:
        heads = model.config.num_attention_heads
        bias: Tensor = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
        return bias.reshape(heads, 2)[:, 1].double() / math.sqrt(model.config.hidden_size // heads)

    def forward_of(self, attention: nn.Module, attend: AlibiAttend, method: Method) -> FalconForward:
        return FalconForward(attention, attend)


@dataclass
class FalconForward:
    """Stands in for ``FalconAttention.forward``."""

    attention: Any
    attend: AlibiAttend

    def __call__(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """One attention layer: ``[batch, seq, hidden]`` to the same."""
        if output_attentions:
            raise IncompatibleError("A fused kernel has no attention weights; ctxext.unpatch the model to see them.")
        module, mask = self.attention, layout_of(attention_mask)
        parts = module._split_heads(module.query_key_value(hidden_states))
        q, k, v = (part.transpose(1, 2) for part in parts)
        if layer_past is not None:
            k, v = layer_past.update(k, v, module.layer_idx)
        dropout = module.attention_dropout.p if module.training else 0.0
        out = self.attend(q, k, v, mask, scale=module.inv_norm_factor, window=None, dropout=dropout)
        return module.dense(out.transpose(1, 2).flatten(2)), None
