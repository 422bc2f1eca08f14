"""Base of the families that were trained with ALiBi: BLOOM, MPT and Falcon."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ctxext.attention.alibi import AlibiAttend, bias_fingerprint
from ctxext.attention.attend import Backends, LayerCall, require_float64
from ctxext.caches.call import PositionedForward
from ctxext.caches.layout_mask import LayoutMask, layout_of
from ctxext.caches.records import ATTENTION, cache_argument, cache_in
from ctxext.core.architecture import Architecture, refuse_choices, required_length
from ctxext.core.edits import Edits
from ctxext.core.saved import GUARDED_FIELD
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError, VerificationError
from ctxext.files import JsonObject
from ctxext.methods import BiasMethod, Method
from ctxext.methods.formulas import trained_slopes
from ctxext.rope_types import GUARD
from ctxext.spec import AlibiSpec, Extension, ExtensionArguments


@dataclass
class AlibiForward(ABC):
    """Replacement of an attention module's ``forward``: the module's own projections around attention on a backend."""

    attention: Any
    attend: AlibiAttend

    @abstractmethod
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Compute the layer like the class's own forward, ``[batch, seq, hidden]`` to the same, without weights."""

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, given: Any, *, scale: float, dropout: float | int
    ) -> Tensor:
        """Attend to cached and new tokens, ``[batch, heads, seq, head_dim]`` to ``[batch, seq, hidden]``.

        The cache is among the arguments that the layer was ``given``.
        """
        mask = layout_of(attention_mask)
        if mask.layout.sees != "past":
            raise IncompatibleError(
                "Its attention is not causal here (is_causal=False), but its weights were trained with earlier keys "
                "only. Unpatch the model for such inputs."
            )
        if (cache := cache_in(given)) is not None:
            k, v = cache.update(k, v, self.attention.layer_idx)
        out = self.attention_of(q, k, v, mask, scale, float(dropout) if self.attention.training else 0.0)
        return out.transpose(1, 2).flatten(2)

    def attention_of(self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, scale: float, dropout: float) -> Tensor:
        """Attend to all keys, cached ones included: ``[batch, heads, seq, head_dim]``."""
        return self.attend(LayerCall(q, k, v, mask, self.attention, scale, dropout=dropout))


class AlibiArchitecture(Architecture):
    """A family whose eager attention adds ALiBi; every attention module gets a ``forward`` of ctxext.

    Class attributes of a family, added to the attributes of every architecture:
        attention_class: transformers' class of its attention modules.
        forward_class: the replacement of the ``forward`` of such a module.
        length_field: the config field with the largest length.
    """

    positions = "alibi"
    methods = BiasMethod
    attention_class: ClassVar[type[nn.Module]]
    forward_class: ClassVar[type[AlibiForward]]
    length_field: ClassVar[str]

    def forward_of(self, attention: nn.Module, attend: AlibiAttend, method: Method) -> AlibiForward:
        """Return the replacement of ``attention.forward``."""
        return self.forward_class(attention, attend)

    def spec(self, subject: Subject, trained_length: int) -> AlibiSpec:
        """Return heads and slopes of the checkpoint; by default, as in the ALiBi paper."""
        return AlibiSpec(num_heads=subject.config.num_attention_heads, trained_length=trained_length)

    @abstractmethod
    def stock_slopes(self, subject: Subject) -> Tensor:
        """Return the slopes of transformers' own code, float64 [heads], as a proof of ``spec``."""

    def trained_length(self, subject: Subject) -> int | None:
        length = getattr(subject.config, self.length_field, None)
        return int(length) if length else None

    def refuse(self, subject: Subject, method: BiasMethod) -> None:
        """Raise ``IncompatibleError`` for a method that this family cannot serve."""
        if getattr(method, "bias", "exact") == "stock":
            raise IncompatibleError(
                "bias='stock' is for BLOOM: it reproduces the rounding of BLOOM's bias. Leave bias out."
            )
        refuse_halves(subject.kind, method)

    def apply(self, subject: Subject, method: Method, request: ExtensionArguments, edits: Edits) -> Extension:
        config = subject.config
        if not isinstance(method, BiasMethod):
            raise IncompatibleError(
                f"This {config.model_type} has ALiBi, which method {method.name!r} cannot change. "
                f"Methods for it: alibi, pi, dynamic_pi."
            )
        refuse_choices(request, ("sliding_window",), f"this {config.model_type} has no sliding window")
        require_float64(subject.model.device)
        self.refuse(subject, method)
        trained_length = required_length(subject, request)
        alibi = self.spec(subject, trained_length)
        problem = slopes_differ(trained_slopes(alibi), self.stock_slopes(subject))
        if problem:
            raise VerificationError(
                f"The slopes of this {config.model_type} are not those that ctxext expects: {problem}"
            )
        target = method.target_length(trained_length)
        plain = not method.dynamic and bool((method.slopes(alibi, target) == trained_slopes(alibi)).all())
        changed = [self.length_field] if plain else [self.length_field, GUARDED_FIELD]
        original = {name: getattr(config, name, None) for name in changed}
        attend = AlibiAttend(method, alibi, Backends(request.attention or "auto"))
        edits.set(config, self.length_field, target)
        if not plain:
            edits.set_unchecked(config, GUARDED_FIELD, GUARD)
        for module in list(subject.model.modules()):
            # The whole too: heads of transformers do not pass position_ids on.
            if module is subject.model or isinstance(module, self.decoder_class):
                edits.set(module, "forward", PositionedForward.around(module))
                # Where the model's config was replaced, modules keep the object they were built from.
                edits.set(module.config, "_attn_implementation_internal", ATTENTION)
            elif isinstance(module, self.attention_class):
                if cache_argument(module) is None:  # its new forward would miss the cache
                    raise IncompatibleError(
                        f"{type(module).__name__}.forward takes no cache under a name that ctxext knows, so decoding "
                        f"would forget earlier tokens. Install a version of transformers that ctxext was tested with."
                    )
                edits.set(module, "forward", self.forward_of(module, attend, method))
        return Extension(
            trained_length=trained_length,
            target_length=target,
            stored_as="the checkpoint's own ALiBi" if plain else "config.ctxext; stock code refuses the checkpoint",
            stock=plain,
            fingerprint=bias_fingerprint(method, alibi),
            attention=request.attention or "auto",
            original=original,
        )

    def revert(self, subject: Subject, original: JsonObject, edits: Edits) -> None:
        for name, value in original.items():
            if value is None:
                edits.delete(subject.config, name)
            else:
                edits.set(subject.config, name, value)


def slopes_in(build: Callable[..., Any], heads: int) -> Tensor:
    """Return the slope of each head, out of the bias tensor that transformers' ``build`` makes of a mask."""
    bias: Tensor = build(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
    return bias.reshape(heads, 2)[:, 1].double()


def refuse_halves(model_type: str, method: BiasMethod) -> None:
    """Raise ``InvalidParameterError`` for a method whose heads look ahead, on a model with causal attention."""
    if method.splits_heads:
        raise InvalidParameterError(
            f"both_ways='halves' is for encoders, but the attention of this {model_type} is causal. Half of its heads "
            f"would see nothing but their own token. Leave both_ways out."
        )


def slopes_differ(expected: Tensor, actual: Tensor) -> str | None:
    """Return a sentence if two sets of slopes differ by more than float32 rounding, else None."""
    if expected.shape != actual.shape:
        return f"{len(expected)} slopes against {len(actual)}."
    error = ((expected - actual) / actual).abs().max()
    return f"they differ by up to {float(error):.2g}." if error > 1e-6 else None
