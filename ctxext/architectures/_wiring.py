"""Put ctxext's attention into a rotary model: which layers it reaches, and what it cannot stand in for."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ctxext._edits import Edits
from ctxext.architectures._positions import ATTENTION, SharedForward
from ctxext.architectures._sites import Site

__all__ = ["attention_layers", "decoder_of", "why_not_ours", "wire"]


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


def why_not_ours(model: PreTrainedModel, text: Any, sites: list[Site]) -> str | None:
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
        if getattr(layer, "use_rope", True) in (False, 0):
            return "some of its layers have no positions at all"
    if getattr(text, "attn_logit_softcapping", None):
        return "it caps attention scores (attn_logit_softcapping), which no backend here does"
    if getattr(text, "no_rope_layers", None) or getattr(text, "mrope_section", None):
        return "some of its layers have no positions at all"
    return None


def wire(model: PreTrainedModel, text: Any, site: Site, attend: Any, edits: Edits) -> None:
    """Give every attention layer ``attend`` and let the decoder hand it a layout."""
    decoder = decoder_of(model, site)
    edits.set(text, "_attn_implementation_internal", ATTENTION)
    edits.set(decoder, "forward", SharedForward.around(decoder))
    for layer in attention_layers(decoder):
        edits.set(layer, "_ctxext_attend", attend)
