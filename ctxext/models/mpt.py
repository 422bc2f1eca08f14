"""MPT, whose relative ALiBi in float32 is eager in transformers, with a hard limit at ``max_seq_len``."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.mpt.modeling_mpt import MptAttention, MptModel, build_mpt_alibi_tensor

from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.methods import BiasMethod
from ctxext.models.alibi import AlibiArchitecture, AlibiForward


class MptForward(AlibiForward):
    """Replacement of ``MptAttention.forward``."""

    def __call__(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute one attention layer, ``[batch, seq, hidden]`` to the same."""
        module = self.attention
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        q, k, v = (part.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=-1))
        how = {"scale": module.softmax_scale, "dropout": module.attn_dropout_p}
        return module.out_proj(self.attended(q, k, v, attention_mask, kwargs, **how)), None


class Mpt(AlibiArchitecture):
    """MPT of every size."""

    name = "mpt"
    decoder_class = MptModel
    attention_class = MptAttention
    forward_class = MptForward
    length_field = "max_seq_len"

    def refuse(self, subject: Subject, method: BiasMethod) -> None:
        super().refuse(subject, method)
        for name, read in (("alibi_bias_max", 8), ("prefix_lm", False)):
            if (said := getattr(subject.config.attn_config, name, read)) != read:
                raise IncompatibleError(
                    f"attn_config.{name} of this mpt is {said}, and transformers computes positions as for {read}: it "
                    f"is not the model that was trained. Run it by code that reads the field."
                )

    def stock_slopes(self, subject: Subject) -> Tensor:
        bias: Tensor = build_mpt_alibi_tensor(subject.config.n_heads, 2)
        return -bias[:, 0, 0].double()
