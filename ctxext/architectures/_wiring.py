"""Put ctxext's attention into a rotary model: which layers it reaches, and what it cannot stand in for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext._edits import Edits
from ctxext.architectures._layout_mask import LayoutMask
from ctxext.architectures._positions import ATTENTION, SharedForward
from ctxext.architectures._probe import FAILURES, Layers, forward_without_data
from ctxext.architectures._sites import UNSEEN, Site
from ctxext.architectures._twins import meta_twin
from ctxext.errors import IncompatibleError

__all__ = ["attention_layers", "decoder_of", "why_not_ours", "why_wiring_fails", "wire"]


def decoder_of(model: PreTrainedModel, site: Site) -> nn.Module:
    """The module that owns the rotary module: it builds the mask and calls the layers."""
    owner: nn.Module = model.get_submodule(site.path.rpartition(".")[0])
    return owner


def attention_layers(decoder: nn.Module) -> list[nn.Module]:
    """Attention modules that call transformers' attention interface, in order."""
    return [
        module
        for module in decoder.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and hasattr(module, "scaling")
        and hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS")
    ]


def why_not_ours(model: PreTrainedModel, text: Any, sites: list[Site], seen: Layers) -> str | None:
    """Why ctxext's attention cannot take the place of this model's own; None if it can."""
    if len(sites) != 1 or sites[0].layer_type is not None:
        return "its positions differ by layer type"
    layers = attention_layers(decoder_of(model, sites[0]))
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


@dataclass
class _Witness:
    """Stands in for the attention of one layer in a proof: gives the shape of its result, and knows if it was asked."""

    asked: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, **_: Any) -> Tensor:
        self.asked = True
        return q.new_empty(*q.shape[:-1], v.shape[-1])


def why_wiring_fails(model: PreTrainedModel, config: Any, site: Site) -> str | None:
    """Why a model built from ``config`` would not run on ctxext's attention; None if it would.

    Proven by one forward pass of a wired twin, without data: a model's own code may compute with the mask that a
    layout takes the place of, or may want attention that a layout cannot say.
    """
    twin = meta_twin(model, config).eval()
    decoder, edits = decoder_of(twin, site), Edits()
    wire(twin, twin.config.get_text_config(decoder=True), site, None, edits)
    witnesses = [_Witness() for _ in attention_layers(decoder)]
    for layer, witness in zip(attention_layers(decoder), witnesses, strict=True):
        edits.set(layer, "_ctxext_attend", witness)
    try:
        forward_without_data(decoder)
    except IncompatibleError as error:
        return str(error).removesuffix(" Unpatch the model for such inputs.").rstrip(".")
    except FAILURES as error:
        return f"its own code fails on what takes the place of a mask ({type(error).__name__}: {error})"
    asked = sum(witness.asked for witness in witnesses)
    return None if asked == len(witnesses) else f"{asked} of its {len(witnesses)} layers ask ctxext's attention"


def wire(model: PreTrainedModel, text: Any, site: Site, attend: Any, edits: Edits) -> None:
    """Give every attention layer ``attend`` and let the decoder hand it a layout."""
    decoder = decoder_of(model, site)
    edits.set(text, "_attn_implementation_internal", ATTENTION)
    edits.set(decoder, "forward", SharedForward.around(decoder))
    for layer in attention_layers(decoder):
        edits.set(layer, "_ctxext_attend", attend)
