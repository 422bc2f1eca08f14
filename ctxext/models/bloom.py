"""BLOOM, whose eager ALiBi from absolute indices in 16 bits is replaced by exact distances on fused kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel, build_alibi_tensor

from ctxext.attention.alibi import AlibiAttend
from ctxext.caches.layout_mask import LayoutMask
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods import BiasMethod, Method
from ctxext.methods.alibi import ALiBi
from ctxext.models.alibi import AlibiArchitecture, AlibiForward, refuse_halves, slopes_in

# Trained length of the published BLOOMs (arXiv:2211.05100, table 3), for configs that do not state it.
TRAINED_LENGTH = 2048


@dataclass
class BloomForward(AlibiForward):
    """Replacement of ``BloomAttention.forward``.

    Args:
        stock_within: tokens up to which ``bias="stock"`` reproduces transformers' rounding; None for exact ALiBi.
    """

    stock_within: int | None = None

    def __call__(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute one attention layer, ``[batch, seq, hidden]`` to the same, and add the residual."""
        module = self.attention
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        how = {"scale": module.inv_norm_factor, "dropout": module.attention_dropout.p}
        merged = module.dense(self.attended(q, k, v, attention_mask, kwargs, **how))
        return F.dropout(merged, module.hidden_dropout, module.training) + residual, None

    def attention_of(self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, scale: float, dropout: float) -> Tensor:
        """Attend on a backend, or with ``stock_within`` by BLOOM's own arithmetic, rounding included.

        BLOOM adds a bias from absolute positions, in the tensors' dtype.
        """
        if self.stock_within is None:
            return super().attention_of(q, k, v, mask, scale, dropout)
        layout = mask.layout
        if layout.key_length > self.stock_within:
            raise IncompatibleError(
                f"bias='stock' reproduces BLOOM's rounding inside its trained window of {self.stock_within} tokens "
                f"only, found {layout.key_length} keys. Use bias='exact'."
            )
        batch, heads, query, _ = q.shape
        slopes = self.attend.slopes(self.stock_within, q.device).float()
        positions = layout.key_positions
        if layout.key_documents is not None:
            positions = torch.where(layout.key_documents >= 0, positions, 0)
        bias = (slopes[None, :, None] * positions[:, None, :]).to(q.dtype).reshape(batch * heads, 1, -1)
        scores = bias.baddbmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), beta=1.0, alpha=scale)
        lowest = torch.finfo(q.dtype).min
        hidden = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~layout.visible(), lowest)
        scores = scores.view(batch, heads, query, -1) + hidden[:, None]
        weights = F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), dropout, dropout > 0)
        return torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view(q.shape)


class Bloom(AlibiArchitecture):
    """BLOOM and BLOOMZ of every size."""

    name = "bloom"
    decoder_class = BloomModel
    attention_class = BloomAttention
    forward_class = BloomForward
    length_field = "seq_length"

    def stock_slopes(self, subject: Subject) -> Tensor:
        return slopes_in(build_alibi_tensor, subject.config.n_head)

    def trained_length(self, subject: Subject) -> int | None:
        if subject.saved is not None:  # seq_length is the extended length then
            return int(subject.saved["trained_length"])
        return int(getattr(subject.config, "seq_length", None) or TRAINED_LENGTH)

    def refuse(self, subject: Subject, method: BiasMethod) -> None:
        refuse_halves(subject.kind, method)
        if subject.config.slow_but_exact and subject.config.pretraining_tp > 1:
            raise IncompatibleError("slow_but_exact=True: this BLOOM sums in slices. Set it to False before patching.")

    def forward_of(self, attention: nn.Module, attend: AlibiAttend, method: Method) -> BloomForward:
        stock = isinstance(method, ALiBi) and method.bias == "stock"
        named = attend.backends.name
        if stock and named != "auto":
            raise InvalidParameterError(
                f"attention={named!r}: bias='stock' is BLOOM's own arithmetic, without a backend. Leave attention out."
            )
        return BloomForward(attention, attend, attend.alibi.trained_length if stock else None)
