"""What a patched attention layer does with its queries and keys."""

from __future__ import annotations

import functools
import hashlib
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from transformers import PreTrainedModel

from ctxext.attention import AttentionBackend, Call, Layout, Need, named, require_usable, select
from ctxext.errors import IncompatibleError
from ctxext.methods import BiasMethod
from ctxext.spec import AlibiSpec
from ctxext.surgery.caches import current_filling
from ctxext.surgery.edits import Edits
from ctxext.surgery.generation import LengthRule, note_fitted_lengths, refuse_stale_cache
from ctxext.surgery.positions import ATTENTION, LayoutMask, SharedForward
from ctxext.surgery.probe import FAILURES, Layers, forward_without_data
from ctxext.surgery.rebuild import Rebuild, without_weights
from ctxext.surgery.rotary import UNSEEN, RotaryPlace

__all__ = ["AlibiAttend", "bias_fingerprint", "install_attention", "why_install_fails", "why_no_custom_attention"]


@dataclass
class AlibiAttend:
    """ALiBi on a backend. One object serves all layers of a model.

    Args:
        method: gives the slopes; may depend on the length of each row.
        alibi: heads and trained length.
        backend: a backend's name as ``ctxext.attention.named`` takes it, or "auto".
    """

    method: BiasMethod
    alibi: AlibiSpec
    backend: str = "auto"
    _slopes: dict[Any, Tensor] = field(default_factory=dict, repr=False)
    _chosen: dict[Need, AttentionBackend] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        require_usable(self.backend)

    def notes(self) -> tuple[str, ...]:
        """What a user must know about a backend that was asked for by name."""
        said = None if self.backend == "auto" else named(self.backend).approximation
        return () if said is None else (said,)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, *, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        """Attention of one layer; tensors are ``[batch, heads, seq, head_dim]``."""
        layout = mask.layout
        q, k, v = _as_autocast_wants(q, k, v)

        def run(q: Tensor, k: Tensor, v: Tensor, layout: Layout, length: int) -> Tensor:
            slopes = self.slopes(length, q.device)
            return self._run(Call.of(q, k, v, layout, slopes=slopes, scale=scale, window=window, dropout=dropout))

        if not self.method.dynamic:
            return run(q, k, v, layout, self.alibi.trained_length)
        rows = layout.memo("fitted_lengths", lambda: self._fitted_lengths(mask))
        fitted_lengths = {fitted for documents in rows for fitted in documents.values()}
        if len(fitted_lengths) == 1:
            return run(q, k, v, layout, fitted_lengths.pop())
        parts = []
        for row, documents in enumerate(rows):
            one = layout.memo(("row", row), functools.partial(layout.rows, row, row + 1))
            here = slice(row, row + 1)
            out = torch.zeros_like(q[here])
            for fitted in sorted(set(documents.values())):
                found = run(q[here], k[here], v[here], one, fitted)
                out = torch.where(_standing_in(one, documents, fitted), found, out)
            parts.append(out)
        return torch.cat(parts)

    def _fitted_lengths(self, mask: LayoutMask) -> list[dict[int, int]]:
        """For each row, the fitted length of each document; padding and unfilled cache slots are in none."""
        layout, filling = mask.layout, current_filling()
        rule = LengthRule(self.method, self.alibi.trained_length)
        if filling is not None:
            filling.spoil()  # this layer's keys are in the cache already
        if mask.length is not None:
            fitted = rule.fitted(mask.length)
            note_fitted_lengths(0, [fitted])
            return [{0: fitted}]
        ends = _extremes(layout.key_positions, layout.key_documents, "amax")
        starts = _extremes(layout.query_positions, layout.query_documents, "amin")
        rows = []
        for row, (last, first) in enumerate(zip(ends, starts, strict=True)):
            before, now = [first.get(d, 0) for d in last], [place + 1 for place in last.values()]
            refuse_stale_cache(rule, row, len(ends), before, now)
            rows.append({d: rule.fitted(p + 1) for d, p in last.items()} or {0: rule.trained_length})
        return rows

    def slopes(self, length: int, device: torch.device) -> Tensor:
        """The method's slopes for ``length`` tokens, float64 [heads], kept per device."""
        found = self._slopes.get((length, device))  # asked once: another thread may clear them at any time
        if found is None:
            if len(self._slopes) > 64:
                self._slopes.clear()
            with torch.inference_mode(False):  # what is made in it could not be used in training, and this is kept
                found = self.method.slopes(self.alibi, length).to(device)
            # A tensor without data, as torch.export traces with, would stay behind in the live model.
            if torch.compiler.is_dynamo_compiling() or not is_fake(found):
                self._slopes[length, device] = found
        return found

    def _run(self, call: Call) -> Tensor:
        """On the backend for such a call, which is asked for once per kind of call."""
        if torch.compiler.is_compiling():
            return select(self.backend, call.need)[0].run(call)
        found = self._chosen.get(call.need)
        if found is None:
            if len(self._chosen) > 256:  # lengths are part of a need: decoding would fill it
                self._chosen.clear()
            found = self._chosen[call.need] = select(self.backend, call.need)[0]
        return found.run(call)


def _as_autocast_wants(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the dtype that autocast gives to torch's own attention.

    Rotation leaves queries and keys in float32 there, and values as their projection made them.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(part if part.dtype is torch.float64 else part.to(dtype) for part in tensors)


def _standing_in(layout: Layout, documents: dict[int, int], fitted: int) -> Tensor:
    """Which queries of a row stand in a document of this fitted length: bool ``[1, 1, query, 1]``."""
    if layout.query_documents is None:
        return torch.ones(1, 1, layout.query_length, 1, dtype=torch.bool, device=layout.query_positions.device)
    chosen = torch.tensor([d for d, own in documents.items() if own == fitted], device=layout.query_positions.device)
    return torch.isin(layout.query_documents, chosen)[:, None, :, None]


def _extremes(positions: Tensor, documents: Tensor | None, which: str) -> list[dict[int, int]]:
    """For each row, the last ("amax") or first ("amin") position of each document."""
    if documents is None:
        return [{0: place} for place in getattr(positions, which)(1).tolist()]
    rows = []
    for places, names in zip(positions, documents, strict=True):
        ids, index = torch.unique(names, return_inverse=True)
        found = torch.empty_like(ids).scatter_reduce(0, index, places.to(ids.dtype), which, include_self=False)
        rows.append({name: place for name, place in zip(ids.tolist(), found.tolist(), strict=True) if name >= 0})
    return rows


def bias_fingerprint(method: BiasMethod, alibi: AlibiSpec) -> str:
    """12 hexadecimal digits that two models share exactly when their slopes at the target length agree."""
    slopes = method.slopes(alibi, method.target_length(alibi.trained_length))
    return hashlib.sha256(slopes.float().numpy().tobytes()).hexdigest()[:12]


def decoder_of(model: PreTrainedModel, place: RotaryPlace) -> nn.Module:
    """The module that owns the rotary module: it builds the mask and calls the layers."""
    owner: nn.Module = model.get_submodule(place.path.rpartition(".")[0])
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


@dataclass
class _Witness:
    """Stands in for the attention of one layer in a proof: gives the shape of its result, and knows if it was asked."""

    asked: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: LayoutMask, **_: Any) -> Tensor:
        self.asked = True
        return q.new_empty(*q.shape[:-1], v.shape[-1])


def why_install_fails(rebuild: Rebuild, place: RotaryPlace) -> str | None:
    """Why a rebuilt model would not run on ctxext's attention; None if it would.

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
        return str(error).removesuffix(" Unpatch the model for such inputs.").rstrip(".")
    except FAILURES as error:
        return f"its own code fails on what takes the place of a mask ({type(error).__name__}: {error})"
    asked = sum(witness.asked for witness in witnesses)
    return None if asked == len(witnesses) else f"{asked} of its {len(witnesses)} layers ask ctxext's attention"


def install_attention(model: PreTrainedModel, place: RotaryPlace, attend: Any, edits: Edits) -> None:
    """Give every attention layer ``attend`` and let the decoder hand it a layout."""
    decoder = decoder_of(model, place)
    edits.set(model.config.get_text_config(decoder=True), "_attn_implementation_internal", ATTENTION)
    edits.set(decoder, "forward", SharedForward.around(decoder))
    for layer in attention_layers(decoder):
        edits.set(layer, "_ctxext_attend", attend)
