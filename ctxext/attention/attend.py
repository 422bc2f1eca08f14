"""Install ctxext's attention in a model, after a trial on a twin; shared by ALiBi, remapping and encodings."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.caches.call import SharedForward
from ctxext.caches.digest import shares_heads
from ctxext.caches.layout_mask import LayoutMask
from ctxext.caches.records import ATTENTION
from ctxext.core.edits import Edits
from ctxext.core.rebuild import FAILURES, Rebuild
from ctxext.core.scaling import heads_of
from ctxext.core.steps import ExtendedPart, register_description
from ctxext.core.subject import Subject
from ctxext.errors import BackendUnavailableError, IncompatibleError
from ctxext.kernels import AttentionBackend, Call, Layout, Need, require_usable, select
from ctxext.methods import EncodingMethod, Method
from ctxext.probe.code import names_of
from ctxext.probe.layers import Layers, forward_without_data, reads_an_encoder
from ctxext.probe.replaced import original_twin
from ctxext.rotary.sites import UNSEEN, RotaryPlace
from ctxext.spec import Description

KNOWN_ARGUMENTS = frozenset(
    {
        *("position_ids", "dropout", "scaling", "use_cache", "output_attentions", "sliding_window", "is_causal"),
        "deterministic",  # of flash-attn's backward
    }
)
"""Arguments of a layer's attention function that ctxext's attention takes, or that change no score."""
WITHOUT_FLOAT64 = frozenset({"mps"})
"""Kinds of devices that have no float64."""


@dataclass
class Backends:
    """The attention backends of one model, selected once per kind of call."""

    name: str = "auto"
    _chosen: dict[Need, AttentionBackend] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        require_usable(self.name)

    def for_(self, need: Need) -> AttentionBackend:
        """Return the backend that serves such a call."""
        if torch.compiler.is_compiling():
            return select(self.name, need)[0]
        backend = self._chosen.get(need)
        if backend is None:
            if len(self._chosen) > 256:  # a need contains lengths, so decoding adds one per token
                self._chosen.clear()
            backend = self._chosen[need] = select(self.name, need)[0]
        return backend

    def run(self, call: Call) -> Tensor:
        """Compute a call by the backend that serves it."""
        return self.for_(call.need).run(call)


class LayerCall(NamedTuple):
    """One call of an attention layer, with queries and keys as the model rotated them.

    Args:
        q: queries, ``[batch, heads, query, head_dim]``; keys and values have fewer heads, one for each group.
        window: tokens that a query sees, itself included; None for all.
        given: arguments of the layer's attention function.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: LayoutMask
    module: nn.Module
    scale: float
    window: int | None = None
    dropout: float = 0.0
    given: Mapping[str, Any] = {}

    @property
    def disputed_window(self) -> str | None:
        """The windows that the layer and its mask tell, where they differ; None if they agree."""
        if self.mask.window == self.window:
            return None
        return (
            f"{type(self.module).__name__} calls attention with a window of {self.window} tokens under a mask of "
            f"{self.mask.window} (None means all). ctxext's attention cannot tell which of them holds"
        )

    def call(self, layout: Layout | None = None, **changes: Any) -> Call:
        """Return the call of a backend, with tensors in the dtype of autocast; on all keys of the text by itself."""
        layout = self.mask.layout if layout is None else layout
        if self.window is not None and self.mask.replaced.get("kv_offset") and not torch.compiler.is_compiling():
            layout.memo(("in window", self.window), functools.partial(_require_window, layout, self.window))
        q, k, v = as_autocast_wants(*(changes.pop(name, getattr(self, name)) for name in "qkv"))
        how = {"scale": self.scale, "window": self.window, "dropout": self.dropout}
        return Call.of(q, k, v, layout, **how | changes)


def _require_window(layout: Layout, window: int) -> None:
    """Raise unless the keys of a call hold all that a window shows to its queries.

    Caches of a window count slots. So padding between two tokens pushes tokens out that are still seen.
    """
    if layout.query_documents is None or layout.key_documents is None:
        return
    none = 1 << 40  # the position of a row without keys; a row without queries has twice as much
    first = torch.where(layout.key_documents >= 0, layout.key_positions, none).amin(1)
    asking = torch.where(layout.query_documents >= 0, layout.query_positions, 2 * none).amin(1)
    by_slots = (layout.key_positions.diff(dim=1) == 1).all(1)  # padding has positions too, as the window counts it
    if bool(((first > (asking - window + 1).clamp(min=0)) & ~by_slots).any()):
        raise IncompatibleError(
            f"This cache of a window of {window} tokens counts padding between tokens, and dropped tokens that are "
            f"still seen. Pad in front of the text only, or give the model an empty DynamicCache()."
        )


def as_autocast_wants(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast queries, keys and values to the dtype that autocast uses for torch's own attention.

    Under autocast, rotation leaves queries and keys in float32, and values keep the dtype of their projection.
    """
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # a dry run on the meta device computes nothing
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(part if part.dtype is torch.float64 else part.to(dtype) for part in tensors)


class _Under:
    """A layer or its config as it was before ``patch``: with some attributes of other values."""

    def __init__(self, now: Any, **before: Any) -> None:
        vars(self).update(before, _now=now)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_now"], name)


def attention_function(module: nn.Module, implementation: str) -> Any:
    """Return the function by which a layer computes attention under an implementation of transformers."""
    names = names_of(type(module))
    return names["ALL_ATTENTION_FUNCTIONS"].get_interface(implementation, names.get("eager_attention_forward"))


def attend_as_before(implementation: str, call: LayerCall) -> Tensor:
    """Compute a layer's attention by the function and the mask that it had before ``patch``, bit for bit."""
    q, k, v, mask, module, *_, given = call
    attention = attention_function(module, implementation)
    # Flash attention reads in the config of the layer which kernel to load.
    layer = _Under(module, config=_Under(module.config, _attn_implementation=implementation))
    out: Tensor = attention(layer, q, k, v, mask.under(implementation), **given)[0]
    return out.transpose(1, 2)


def decoder_of(subject: Subject, place: RotaryPlace) -> nn.Module:
    """Return the module that owns the rotary module, builds the mask and calls the layers."""
    owner: nn.Module = subject.model.get_submodule(place.path.rpartition(".")[0])
    return owner


def require_float64(device: torch.device) -> None:
    """Raise ``IncompatibleError`` for a device without float64, in which rotations and slopes are computed."""
    if device.type in WITHOUT_FLOAT64:
        raise IncompatibleError(
            f"This method computes positions in float64, which {device.type} lacks. Move the model to the CPU. "
            f"On a rotary model, yarn, ntk and pi need no float64."
        )


def attention_layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the attention modules that call transformers' attention interface, in order."""
    return [
        module
        for module in decoder.modules()
        if (hasattr(module, "is_causal") or {"scaling", "layer_idx"} <= vars(module).keys())
        and "ALL_ATTENTION_FUNCTIONS" in names_of(type(module))
    ]


def put_in_evaluation(model: nn.Module, edits: Edits) -> None:
    """Leave dropout out of a model, until ``edits`` is undone."""
    for module in model.modules():
        if module.training:
            edits.set(module, "training", False)


def refuse_shared_heads(subject: Subject, method: Method, why: str = "tells heads apart") -> None:
    """Refuse a method that needs all heads, on a model whose heads processes share (tensor parallelism).

    Each process would take the heads it holds for all of them, or draw weights that no other has.
    """
    if shares_heads(subject.model):
        raise IncompatibleError(
            f"Method {method.name!r} {why}, and processes share the heads of this {subject.kind} (tensor parallelism). "
            f"Take a method for all heads, such as yarn or self_extend, or load the model whole."
        )


def why_no_layer_attends_by_layout(subject: Subject, places: list[RotaryPlace], seen: Layers) -> str | None:
    """Return why ctxext's attention cannot replace the attention of any layer of this model; None if it may."""
    if (getattr(getattr(subject.config, "distributed_config", None), "pp_size", None) or 1) > 1:
        return "processes share its layers (pipeline parallelism)"
    decoder = decoder_of(subject, places[0])
    if not all(_rotates_like(subject, places[0], place) for place in places[1:]):
        return "its positions differ by layer type"
    owner = decoder if isinstance(decoder, PreTrainedModel) else subject.model
    if not attention_layers(decoder) or not type(owner)._can_set_attn_implementation():
        return "its attention does not go through transformers' attention interface"
    if seen.failure:
        return f"ctxext cannot tell which of its layers rotate: {UNSEEN.format(seen.failure).rstrip('.')}"
    return None


def _rotates_like(subject: Subject, first: RotaryPlace, other: RotaryPlace) -> bool:
    """Return whether two rotary modules of one decoder have the same frequencies (Granite SWA: one for each base)."""
    modules = [subject.model.get_submodule(place.path) for place in (first, other)]
    in_decoder = other.path.startswith(f"{first.path.rpartition('.')[0]}.")
    alike = modules[0].config.rope_parameters == modules[1].config.rope_parameters
    return in_decoder and alike and first.layer_type is other.layer_type is None


def why_no_custom_attention(subject: Subject, places: list[RotaryPlace], seen: Layers) -> str | None:
    """Return why ctxext's attention cannot replace the attention of all layers of this model; None if it can."""
    text = subject.text
    if places[0].layer_type is not None:
        return "its positions differ by layer type"
    if reason := why_no_layer_attends_by_layout(subject, places, seen):
        return reason
    decoder = decoder_of(subject, places[0])
    layers = attention_layers(decoder)
    if len(layers) != text.num_hidden_layers * (2 if reads_an_encoder(decoder) else 1):
        return "not all of its layers are attention layers"
    for layer in layers:
        if getattr(layer, "kv_lora_rank", None) is not None:
            return "its keys and values differ in size (multi-head latent attention)"
        if getattr(layer, "sinks", None) is not None:
            return "its attention has sinks, which no backend supports"
    if getattr(text, "attn_logit_softcapping", None):
        return "it caps attention scores (attn_logit_softcapping), which no backend supports"
    if len(seen.rotating) != text.num_hidden_layers:
        return "some of its layers have no positions at all"
    return None


@dataclass
class TriedLayer:
    """Replacement of the attention of one layer in a trial: it records its arguments, and returns an empty result.

    Args:
        mask: the layout that replaces the mask; set when the layer is called.
        window: tokens that a query sees, of the mask or of the layer; None for all.
        keys: the keys, without data; layers that share theirs get one tensor.
        arguments: names of further arguments of the attention function that hold something.
        disputed: the windows of the layer and of its mask, where they differ.
    """

    checks_window: ClassVar[bool] = False
    mask: LayoutMask = field(init=False)
    window: int | None = None
    key_heads: int = 0
    keys: Tensor | None = None
    arguments: frozenset[str] = frozenset()
    disputed: str | None = None
    calls: int = 0

    def __call__(self, layer: LayerCall) -> Tensor:
        self.mask, self.keys, self.key_heads = layer.mask, layer.k, layer.k.shape[1]
        self.window, self.calls = layer.window if self.mask.window is None else self.mask.window, self.calls + 1
        self.arguments = frozenset(name for name, value in layer.given.items() if value is not None)
        self.disputed = layer.disputed_window
        return layer.q.new_empty(*layer.q.shape[:-1], layer.v.shape[-1])

    @property
    def sees_both_ways(self) -> bool:
        """True if tokens see later tokens of their text."""
        return not (self.mask.refusal or self.crosses) and self.mask.layout.sees == "both"

    @property
    def crosses(self) -> bool:
        """True if the keys come from an encoder."""
        return self.mask.crosses


@dataclass(frozen=True)
class Tried:
    """The result of a trial run of a twin on ctxext's attention.

    Args:
        layers: the attention layers that were called, by their paths below the decoder, in order.
        silent: paths of modules that look like attention and were not called.
    """

    failure: str | None = None
    layers: Mapping[str, TriedLayer] = field(default_factory=dict)
    silent: tuple[str, ...] = ()

    @property
    def sees_both_ways(self) -> bool:
        """True if tokens of any layer see later tokens."""
        return any(layer.sees_both_ways for layer in self.layers.values())

    def implementation(self, own: str) -> str:
        """Return the attention of transformers that computes as the model's code does, or eager attention.

        sdpa drops soft caps, and transformers 5.16 takes it for Gemma 2 and its kin all the same.
        """
        capped = any("softcap" in layer.arguments for layer in self.layers.values())
        return "eager" if capped and own == "sdpa" else own

    @property
    def crossing(self) -> tuple[str, ...]:
        """Paths of attention whose keys come from an encoder."""
        return tuple(path for path, layer in self.layers.items() if layer.crosses)

    @property
    def why_not_all(self) -> str | None:
        """Reason for which not all attention of the model can be replaced; None if it can."""
        for layer in self.layers.values():
            if layer.mask.refusal:
                return layer.mask.refusal.rstrip(".")
            if layer.disputed:
                return layer.disputed
            if unknown := layer.arguments - KNOWN_ARGUMENTS:
                return f"its attention computes with {min(unknown)}, which no backend supports"
        if not self.silent:
            return None
        return f"only {len(self.layers)} of its {len(self.layers) + len(self.silent)} layers call ctxext's attention"


def try_install(rebuild: Rebuild, place: RotaryPlace) -> Tried:
    """Run a twin of a rebuilt model on ctxext's attention, without data, and return the result.

    The trial is needed because a model's code may compute with the mask that a layout replaces, or may need attention
    that a layout cannot express.
    """
    try:
        twin = Subject(original_twin(rebuild.subject.model, rebuild.config).eval())
        decoder, edits = decoder_of(twin, place), Edits()
        install_attention(twin, place, None, edits)
        layers = {path: TriedLayer() for path in _paths(decoder)}
        for path, layer in layers.items():
            edits.set(decoder.get_submodule(path), "_ctxext_attend", layer)
        forward_without_data(decoder)
    except IncompatibleError as error:
        return Tried(str(error).removesuffix(" Unpatch the model for such inputs.").rstrip("."))
    except FAILURES as error:
        return Tried(f"its code fails on the layout in place of a mask ({type(error).__name__}: {error})")
    called = {path: layer for path, layer in layers.items() if layer.calls}
    return Tried(layers=called, silent=tuple(path for path in layers if path not in called))


def _paths(decoder: nn.Module) -> list[str]:
    """Return the paths of a decoder's attention layers, without what ``torch.compile`` puts around a layer."""
    layers, modules = attention_layers(decoder), decoder.named_modules()
    return [path.replace("_orig_mod.", "") for path, module in modules if any(module is layer for layer in layers)]


@dataclass
class LeaveAttend:
    """Attention of a layer that an extension leaves as it is, under the mask of the model."""

    implementation: str
    checks_window: ClassVar[bool] = False
    reads_pages: ClassVar[bool] = True

    def __call__(self, layer: LayerCall) -> Tensor:
        """Compute the attention of one layer, ``[batch, heads, seq, head_dim]``."""
        return attend_as_before(self.implementation, layer)


@dataclass
class CrossAttend:
    """Attention to the states of an encoder: without distances, and with padding hidden."""

    backends: Backends

    def __call__(self, layer: LayerCall) -> Tensor:
        """Compute the attention of one layer, ``[batch, heads, seq, head_dim]``."""
        if not layer.mask.crosses:
            raise IncompatibleError(
                "A layer that attends to an encoder's text was called without encoder_hidden_states, which ctxext's "
                "attention needs. Give the model the encoder's output, or unpatch it for such inputs."
            )
        return self.backends.run(layer.call(window=None))


def install_attention(
    subject: Subject,
    place: RotaryPlace,
    attend: Any,
    edits: Edits,
    crossing: Sequence[str] = (),
    left: Collection[str] = (),
    implementation: str | None = None,
) -> None:
    """Give every attention layer ``attend``, and make the decoder hand it a layout.

    Args:
        attend: replacement of the attention of all layers, or one for each layer by its path below the decoder.
        crossing: paths of layers that attend to an encoder's text; they get attention without distances.
        left: paths of layers that stay as they are, under an ``implementation``; by default the model's.
    """
    decoder, leave = decoder_of(subject, place), LeaveAttend(implementation or subject.text._attn_implementation)
    for config in (subject.text, decoder.config):  # two objects where the model's config was replaced
        edits.set(config, "_attn_implementation_internal", ATTENTION)
    edits.set(decoder, "forward", SharedForward.around(decoder))
    across = CrossAttend(attend.backends) if crossing else None
    others = dict.fromkeys(crossing, across) | dict.fromkeys(left, leave)
    for path in _paths(decoder):
        if isinstance(attend, Mapping) and path not in attend and path not in others:
            continue  # no text reaches it, such as a layer that reads images
        own = attend.get(path) if isinstance(attend, Mapping) else attend
        edits.set(decoder.get_submodule(path), "_ctxext_attend", others.get(path, own))


def _name_backend(part: ExtendedPart, description: Description) -> Description:
    """Name the backend that serves a whole text on this model now, and the reasons against those before it in order."""
    if (name := part.extension.attention) is None:
        return description
    base = part.subject.model
    heads, kv_heads, head_dim = heads_of(part.subject.text)
    q, k = (torch.empty(1, count, 128, head_dim, dtype=base.dtype, device=base.device) for count in (heads, kv_heads))
    slopes = torch.zeros(heads, dtype=torch.float32, device=base.device)
    need = Call.of(q, k, k, scale=1.0, slopes=slopes).need
    if isinstance(part.method, EncodingMethod):
        need = replace(need, biased=False, encoded=part.method.form != "input")
    try:
        backend, passed_over = select(name, need)
    except BackendUnavailableError as error:  # a forward pass raises it; a description says it
        return replace(description, attention=f"{name} ({error})")
    reasons = "; ".join(f"{other}: {why}" for other, why in passed_over.items())
    line = name + (f" -> {backend.name}" if name == "auto" else "") + (f" (not {reasons})" if reasons else "")
    return replace(description, attention=line)


register_description(_name_backend)
