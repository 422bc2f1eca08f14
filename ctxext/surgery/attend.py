"""How ctxext's attention takes the place of a model's own, and what whoever sits there has in common."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.attention import AttentionBackend, Need, named, require_usable, select
from ctxext.errors import IncompatibleError
from ctxext.surgery.edits import Edits
from ctxext.surgery.positions import ATTENTION, LayoutMask, SharedForward
from ctxext.surgery.probe import FAILURES, Layers, forward_without_data
from ctxext.surgery.rebuild import Rebuild, without_weights
from ctxext.surgery.rotary import UNSEEN, RotaryPlace

__all__ = [
    "Backends",
    "Tried",
    "as_autocast_wants",
    "attention_layers",
    "decoder_of",
    "install_attention",
    "try_install",
    "why_no_custom_attention",
]


@dataclass
class Backends:
    """The attention backends of one model, asked for once per kind of call.

    Args:
        name: a backend's name as ``ctxext.attention.named`` takes it, or "auto".
    """

    name: str = "auto"
    _chosen: dict[Need, AttentionBackend] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        require_usable(self.name)

    def notes(self) -> tuple[str, ...]:
        """What a user must know about a backend that was asked for by name."""
        said = None if self.name == "auto" else named(self.name).approximation
        return () if said is None else (said,)

    def for_(self, need: Need) -> AttentionBackend:
        """The backend that serves such a call."""
        if torch.compiler.is_compiling():
            return select(self.name, need)[0]
        found = self._chosen.get(need)
        if found is None:
            if len(self._chosen) > 256:  # lengths are part of a need: decoding would fill it
                self._chosen.clear()
            found = self._chosen[need] = select(self.name, need)[0]
        return found


def as_autocast_wants(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the dtype that autocast gives to torch's own attention.

    Rotation leaves queries and keys in float32 there, and values as their projection made them.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(part if part.dtype is torch.float64 else part.to(dtype) for part in tensors)


def decoder_of(model: PreTrainedModel, place: RotaryPlace) -> nn.Module:
    """The module that owns the rotary module: it builds the mask and calls the layers."""
    owner: nn.Module = model.get_submodule(place.path.rpartition(".")[0])
    return owner


def attention_layers(decoder: nn.Module) -> list[nn.Module]:
    """Attention modules that call transformers' attention interface, in order."""
    return [
        module
        for module in decoder.modules()
        if hasattr(module, "scaling")
        and (isinstance(getattr(module, "layer_idx", None), int) or hasattr(module, "is_causal"))
        and hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS")
    ]


def why_no_custom_attention(model: PreTrainedModel, places: list[RotaryPlace], seen: Layers) -> str | None:
    """Why ctxext's attention cannot take the place of this model's own; None if it can."""
    text = model.config.get_text_config(decoder=True)
    if len(places) != 1 or places[0].layer_type is not None:
        return "its positions differ by layer type"
    layers = attention_layers(decoder_of(model, places[0]))
    if not layers or not type(model)._can_set_attn_implementation():
        return "its attention does not go through transformers' attention interface"
    if len(layers) != text.num_hidden_layers:
        return "not all of its layers are attention layers"
    for layer in layers:
        if getattr(layer, "kv_lora_rank", None) is not None:
            return "its keys and values differ in size (multi-head latent attention)"
        if getattr(layer, "sinks", None) is not None:
            return "its attention has sinks, which no backend here has"
    if getattr(text, "attn_logit_softcapping", None):
        return "it caps attention scores (attn_logit_softcapping), which no backend here does"
    if seen.failure:
        return f"which of its layers rotate could not be seen: {UNSEEN.format(seen.failure).rstrip('.')}"
    if len(seen.rotating) != len(layers):
        return "some of its layers have no positions at all"
    return None


@dataclass(frozen=True)
class Tried:
    """What came of letting a model without data run on ctxext's attention.

    Args:
        failure: why it would not; None if it would.
        sees_both_ways: whether tokens see what comes after them.
    """

    failure: str | None = None
    sees_both_ways: bool = False


@dataclass
class _Witness:
    """Stands in for the attention of one layer in a proof: gives the shape of its result, and knows what was asked."""

    sees: str | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, **_: Any) -> Tensor:
        self.sees = mask.layout.sees
        return q.new_empty(*q.shape[:-1], v.shape[-1])


def try_install(rebuild: Rebuild, place: RotaryPlace) -> Tried:
    """Whether a rebuilt model would run on ctxext's attention.

    Proven by one forward pass without data: a model's own code may compute with the mask that a layout takes the place
    of, or may want attention that a layout cannot say.
    """
    twin = without_weights(rebuild.model, rebuild.config).eval()
    decoder, edits = decoder_of(twin, place), Edits()
    install_attention(twin, place, None, edits)
    witnesses = [_Witness() for _ in attention_layers(decoder)]
    for layer, witness in zip(attention_layers(decoder), witnesses, strict=True):
        edits.set(layer, "_ctxext_attend", witness)
    try:
        forward_without_data(decoder)
    except IncompatibleError as error:
        return Tried(str(error).removesuffix(" Unpatch the model for such inputs.").rstrip("."))
    except FAILURES as error:
        return Tried(f"its own code fails on what takes the place of a mask ({type(error).__name__}: {error})")
    asked = [witness.sees for witness in witnesses if witness.sees is not None]
    if len(asked) != len(witnesses):
        return Tried(f"{len(asked)} of its {len(witnesses)} layers ask ctxext's attention")
    return Tried(sees_both_ways="both" in asked)


def install_attention(model: PreTrainedModel, place: RotaryPlace, attend: Any, edits: Edits) -> None:
    """Give every attention layer ``attend`` and let the decoder hand it a layout."""
    decoder = decoder_of(model, place)
    edits.set(model.config.get_text_config(decoder=True), "_attn_implementation_internal", ATTENTION)
    edits.set(decoder, "forward", SharedForward.around(decoder))
    for layer in attention_layers(decoder):
        edits.set(layer, "_ctxext_attend", attend)
