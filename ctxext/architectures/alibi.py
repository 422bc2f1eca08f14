"""Models that were trained with ALiBi: what BLOOM, MPT and Falcon have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.architectures.base import Architecture
from ctxext.errors import IncompatibleError, InvalidParameterError, VerificationError
from ctxext.methods import BiasMethod, Method
from ctxext.methods.formulas import trained_slopes
from ctxext.spec import AlibiSpec, Extension, Request
from ctxext.surgery.alibi import AlibiAttend, bias_fingerprint
from ctxext.surgery.attend import Backends
from ctxext.surgery.caches import cache_argument
from ctxext.surgery.edits import Edits
from ctxext.surgery.positions import ATTENTION, LayoutMask, PositionedForward, layout_of
from ctxext.surgery.rope_types import GUARD, GUARDED_FIELD


@dataclass
class AlibiForward(ABC):
    """Stands in for the ``forward`` of an attention module: its own projections around attention on a backend.

    Args:
        attention: the patched module.
        attend: computes attention from q, k, v and a layout.
    """

    attention: Any
    attend: AlibiAttend

    @abstractmethod
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Takes and returns what the class's own forward does: ``[batch, seq, hidden]`` to the same, and no weights."""

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, cache: Any, *, scale: float, dropout: float | int
    ) -> Tensor:
        """Attention over what is cached and new, ``[batch, heads, seq, head_dim]`` to ``[batch, seq, hidden]``."""
        mask = layout_of(attention_mask)
        if mask.layout.sees != "past":
            raise IncompatibleError(
                "Its attention is not causal here (is_causal=False), and what ALiBi says of a key that comes after the "
                "query is nothing that its weights were trained with. Unpatch the model for such inputs."
            )
        if cache is not None:
            k, v = cache.update(k, v, self.attention.layer_idx)
        out = self.attention_of(q, k, v, mask, scale, float(dropout) if self.attention.training else 0.0)
        return out.transpose(1, 2).flatten(2)

    def attention_of(self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, scale: float, dropout: float) -> Tensor:
        """Attention itself, where every key is known: ``[batch, heads, seq, head_dim]``."""
        return self.attend(q, k, v, mask, scale=scale, window=None, dropout=dropout)


class AlibiArchitecture(Architecture):
    """A family whose attention adds ALiBi by itself, eagerly; every attention module gets a forward of ours.

    Class attributes of a family, beside those of every architecture:
        attention_class: transformers' class of its attention modules.
        forward_class: what stands in for the ``forward`` of such a module.
        length_field: the config field that says how long the model may read.
    """

    positions: ClassVar[str] = "alibi"
    attention_class: ClassVar[type[nn.Module]]
    forward_class: ClassVar[type[AlibiForward]]
    length_field: ClassVar[str]

    def forward_of(self, attention: nn.Module, attend: AlibiAttend, method: Method) -> AlibiForward:
        """What stands in for ``attention.forward``."""
        return self.forward_class(attention, attend)

    def spec(self, model: PreTrainedModel, trained_length: int) -> AlibiSpec:
        """Heads and slopes of the checkpoint: here, those of the ALiBi paper."""
        return AlibiSpec(num_heads=model.config.num_attention_heads, trained_length=trained_length)

    @abstractmethod
    def stock_slopes(self, model: PreTrainedModel) -> Tensor:
        """The slopes that transformers' own code uses, float64 [heads]; proves ``spec``."""

    def trained_length(self, model: PreTrainedModel) -> int | None:
        length = getattr(model.config, self.length_field, None)
        return int(length) if length else None

    def refuse(self, model: PreTrainedModel, method: BiasMethod) -> None:
        """Raise ``IncompatibleError`` for what this family cannot do."""
        if getattr(method, "bias", "exact") == "stock":
            raise IncompatibleError("bias='stock' is for BLOOM: it reproduces the rounding of BLOOM's own bias.")
        refuse_halves(model.config.model_type, method)

    def apply(self, model: PreTrainedModel, method: Method, request: Request, edits: Edits) -> Extension:
        config = model.config
        if not isinstance(method, BiasMethod):
            raise IncompatibleError(
                f"This {config.model_type} has ALiBi, which method {method.name!r} is not for. "
                f"Methods for it: alibi, pi, dynamic_pi."
            )
        if request.sliding_window is not None:
            raise InvalidParameterError(
                f"sliding_window is for models that have one; this {config.model_type} has not."
            )
        self.refuse(model, method)
        trained_length = self.known_length(model, request)
        alibi = self.spec(model, trained_length)
        problem = slopes_differ(trained_slopes(alibi), self.stock_slopes(model))
        if problem:
            raise VerificationError(f"The slopes of this {config.model_type} are not what ctxext expects: {problem}")
        target = method.target_length(trained_length)
        plain = not method.dynamic and bool((method.slopes(alibi, target) == trained_slopes(alibi)).all())
        changed = [self.length_field] if plain else [self.length_field, GUARDED_FIELD]
        original = {name: getattr(config, name, None) for name in changed}
        attend = AlibiAttend(method, alibi, Backends(request.attention or "auto"))
        edits.set(config, self.length_field, target)
        if not plain:
            edits.set_unchecked(config, GUARDED_FIELD, GUARD)
        edits.set(config, "_attn_implementation_internal", ATTENTION)
        for module in list(model.modules()):
            if module is model or isinstance(module, self.decoder_class):  # stock heads do not hand position_ids on
                edits.set(module, "forward", PositionedForward.around(module))
            elif isinstance(module, self.attention_class):
                _require_cache_argument(module)
                edits.set(module, "forward", self.forward_of(module, attend, method))
        return Extension(
            trained_length=trained_length,
            target_length=target,
            stored_as="the checkpoint's own ALiBi" if plain else "config.ctxext; stock code refuses the checkpoint",
            stock=plain,
            fingerprint=bias_fingerprint(method, alibi),
            notes=attend.backends.notes(),
            attention=request.attention or "auto",
            original=original,
        )

    def revert(self, model: PreTrainedModel, original: dict[str, Any], edits: Edits) -> None:
        for name, value in original.items():
            if value is None:
                edits.delete(model.config, name)
            else:
                edits.set(model.config, name, value)


def _require_cache_argument(attention: nn.Module) -> None:
    """Raise ``IncompatibleError`` where the forward that stands in would pass a layer's cache by."""
    if cache_argument(attention) is None:
        raise IncompatibleError(
            f"{type(attention).__name__}.forward takes no cache under a name that ctxext knows. Decoding would forget "
            f"the tokens before. Install a version of transformers that ctxext was tested with."
        )


def refuse_halves(model_type: str, method: BiasMethod) -> None:
    """Raise ``InvalidParameterError`` where half the heads would look ahead of tokens that see the past only."""
    if method.splits_heads:
        raise InvalidParameterError(
            f"both_ways='halves' is for encoders, whose tokens see both ways; the attention of this {model_type} is "
            f"causal, and half of its heads would see nothing but their own token. Leave both_ways out."
        )


def slopes_differ(ours: Tensor, theirs: Tensor) -> str | None:
    """One sentence where two sets of slopes differ by more than float32 rounding, else None."""
    if ours.shape != theirs.shape:
        return f"{len(ours)} slopes against {len(theirs)}."
    error = ((ours - theirs) / theirs).abs().max()
    return f"they differ by up to {float(error):.2g}." if error > 1e-6 else None
