"""Encodings on a live model: their modules, and the code that hands them positions, queries and keys."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ctxext.attention.attend import (
    Backends,
    LayerCall,
    as_autocast_wants,
    attention_layers,
    decoder_of,
    install_attention,
)
from ctxext.caches.digest import is_fsdp, is_hooked
from ctxext.caches.layout_mask import layout_of
from ctxext.caches.travelling import Travelling
from ctxext.core.edits import Edits
from ctxext.core.override import ForwardOverride
from ctxext.core.rebuild import FAILURES, Rebuild
from ctxext.core.scaling import heads_of
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.files import digest
from ctxext.kernels.base import without_autocast
from ctxext.methods import method_class
from ctxext.methods.encoding import ENCODING, Encoding, EncodingMethod, EncodingSpec, Pairs, Weighting
from ctxext.probe.layers import forward_without_data
from ctxext.probe.replaced import original_twin
from ctxext.rotary.sites import RotaryPlace, find_places

ModelClass = TypeVar("ModelClass", bound=type[PreTrainedModel])


@dataclass
class EncodingAttend:
    """Attention of one layer, whose queries and keys an encoding weighs.

    Args:
        owner: the module that the encoding is attached to. It is looked up there at every call, because adapters
            replace it.
    """

    owner: nn.Module
    backends: Backends

    def __call__(self, layer: LayerCall) -> Tensor:
        """Compute the attention of one layer, ``[batch, heads, seq, head_dim]``."""
        if layer.mask.layout.sees == "both":
            raise IncompatibleError(
                "This encoding knows the past alone, but in this call tokens see later ones too. Set config.is_causal "
                "back to True, or unpatch the model."
            )
        q, k, v = as_autocast_wants(*layer[:3])
        with without_autocast(q.device):
            layer = layer._replace(q=q, k=k, v=v)
            call, score = layer.call(), self._score(layer)
            if score is None:
                return self.backends.run(call)
            return score.attend(call, self.backends.for_(replace(call.need, encoded=True)))

    def _score(self, layer: LayerCall) -> Weighting | None:
        """Return what weighs the queries and keys of a call; None where attention stays as it is."""
        q, k, _, mask, window = *layer[:4], layer.window
        layout = mask.layout
        rows = slice(0, 1) if layout.whole and layout.consecutive else slice(None)  # there all rows are alike

        def visible(queries: slice) -> Tensor:
            return layout.visible(window, queries=queries)

        documents = None if layout.key_documents is None else layout.key_documents[rows]
        pairs = Pairs(
            q,
            k,
            layout.query_positions[rows],
            layout.key_positions[rows],
            layer.scale,
            visible,
            layout.places()[rows],
            None if mask.travels is None else _carried(mask.travels, k),
            documents,
        )
        score: Weighting | None = getattr(self.owner, ENCODING).score(pairs)
        if window is not None and score is not None and score.reads_all:
            raise IncompatibleError(
                f"this encoding needs all tokens before a query, and a sliding window of {window} keeps the last"
            )
        return score


def _carried(travels: Travelling, keys: Tensor) -> Tensor:
    """Return the numbers that travelled with the keys of a call.

    Raises:
        IncompatibleError: if the keys are others.
    """
    numbers = travels.numbers
    if numbers.shape[2] != keys.shape[2]:
        raise IncompatibleError(
            f"A layer attends to {keys.shape[2]} keys, of which {numbers.shape[2]} are its own. It takes the "
            f"keys of another layer or cache, with which the numbers of this encoding did not travel."
        )
    return numbers


@dataclass
class CarryingForward(ForwardOverride):
    """Replacement of the ``forward`` of an attention layer whose encoding has numbers for each token.

    The numbers go with the mask to the attention function, and with the keys through a cache, if there is one.
    """

    owner: nn.Module | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        given = dict(self.given(args, kwargs))
        name = "attention_mask" if given.get("ctxext_layout") is None else "ctxext_layout"
        travels = Travelling(getattr(self.owner, ENCODING).carried(given["hidden_states"]))
        given[name] = layout_of(given.get(name)).carrying(travels)
        for cache in [key for key, value in given.items() if isinstance(value, Cache)]:
            given[cache] = travels.through(given[cache])
        return self.run(**given)


@dataclass
class AddedForward(ForwardOverride):
    """Replacement of the ``forward`` of the first layer, which adds a vector for each position to its input.

    Positions are the layout's, in which padding counts for nothing and packed documents begin at 0.
    """

    owner: nn.Module | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        given = self.given(args, kwargs)
        mask = given.get("ctxext_layout")
        layout = layout_of(given.get("attention_mask") if mask is None else mask).layout
        states: Tensor = given["hidden_states"]
        added = getattr(self.owner, ENCODING).added(layout.query_positions)
        states = states + added.to(states.device, states.dtype)
        if args:
            return self.run(states, *args[1:], **kwargs)
        return self.run(**kwargs | {"hidden_states": states})


def spec_of(subject: Subject, trained_length: int) -> EncodingSpec:
    """Return the facts about a rotary model that a method for encodings may use."""
    text = subject.text
    heads, kv_heads, head_dim = heads_of(text)
    return EncodingSpec(
        hidden_size=text.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_layers=text.num_hidden_layers,
        trained_length=trained_length,
        embedding_std=getattr(text, "initializer_range", None) or 0.02,
    )


def encoding_fingerprint(method: EncodingMethod, spec: EncodingSpec) -> str:
    """Return 12 hexadecimal digits of a hash of the method and of the model's facts that it uses."""
    form = json.dumps([method.to_dict(), asdict(spec)], sort_keys=True)
    return digest(form)


def install_encoding(
    subject: Subject,
    place: RotaryPlace,
    method: EncodingMethod,
    spec: EncodingSpec,
    backends: Backends,
    edits: Edits,
) -> int:
    """Attach the encoding, make attention and the first layer use it, and return the number of its weights.

    Encodings that are attached already stay: a loaded checkpoint has trained ones.

    Raises:
        IncompatibleError: if the weights of an encoding would be offloaded, or unknown to FSDP.
    """
    decoder = decoder_of(subject, place)
    layers = attention_layers(decoder)
    install_attention(subject, place, EncodingAttend(decoder, backends), edits)
    for owner in _owners(decoder, method):
        loaded = getattr(owner, ENCODING, None)
        encoding = _built(method, spec, owner, decoder) if loaded is None else loaded
        # FSDP neither shards nor averages a weight that it did not know when it took the model.
        brings = loaded is None and next(encoding.parameters(), None) is not None
        if brings and is_fsdp(subject.model):
            raise IncompatibleError(
                f"FSDP manages this {subject.kind}, and would leave the weights of {method.name!r} to each process. "
                f"Extend the model first, and wrap it then."
            )
        absent = any(weight.is_meta for weight in (*encoding.parameters(), *encoding.buffers()))
        if absent and is_hooked(owner):
            raise IncompatibleError(
                f"This {subject.kind} is offloaded, which the weights of {method.name!r} cannot be. Load it "
                f"onto a device."
            )
        edits.attach(owner, ENCODING, encoding)
    if not method.shared:
        for layer in layers:
            edits.set(layer, "_ctxext_attend", EncodingAttend(layer, backends))
    if method.carries:
        for layer in layers:
            owner = decoder if method.shared else layer
            edits.set(layer, "forward", CarryingForward(layer, layer.__dict__.get("forward"), owner))
    if method.form == "input":
        first = _block_of(decoder, layers[0])
        edits.set(first, "forward", AddedForward(first, first.__dict__.get("forward"), decoder))
    return sum(weight.numel() for owner in _owners(decoder, method) for weight in getattr(owner, ENCODING).parameters())


def why_not_run(rebuild: Rebuild, place: RotaryPlace, method: EncodingMethod, spec: EncodingSpec) -> str | None:
    """Return why a rebuilt model would not run with the encoding, tried without data; None if it would."""
    try:
        twin = Subject(original_twin(rebuild.subject.model, rebuild.config).eval())
        install_encoding(twin, place, method, spec, Backends(), Edits())
        forward_without_data(decoder_of(twin, place))
    except InvalidParameterError:  # its message says which parameter to change
        raise
    except FAILURES as error:
        return f"its own code fails with it ({type(error).__name__}: {error})"
    return None


def _owners(decoder: nn.Module, method: EncodingMethod) -> list[nn.Module]:
    return [decoder] if method.shared else attention_layers(decoder)


def _built(method: EncodingMethod, spec: EncodingSpec, owner: nn.Module, decoder: nn.Module) -> Encoding:
    """Build an encoding on the device of its owner's weights, and in their dtype; quantised ones have the decoder's."""
    place, source = next(owner.parameters()).device, owner if all(map(_is_number, owner.parameters())) else decoder
    dtype = next(weight.dtype for weight in source.parameters() if _is_number(weight))
    made_on = torch.device("meta" if place.type == "meta" else "cpu")  # a dry run draws no random numbers
    with torch.inference_mode(False), made_on:  # weights made in inference mode could not be trained
        return method.build(spec).to(place, dtype)


def _is_number(weight: Tensor) -> bool:
    """Return whether a weight is in floating point of 16 bits or more, as one that is not quantised."""
    return weight.is_floating_point() and weight.dtype.itemsize > 1


def _block_of(decoder: nn.Module, attention: nn.Module) -> nn.Module:
    """Return the decoder layer of an attention module: the outermost module around it in a list of layers."""
    path = next(path for path, module in decoder.named_modules() if module is attention)
    parts = path.split(".")
    for stop in range(1, len(parts) + 1):
        if isinstance(decoder.get_submodule(".".join(parts[: stop - 1])), nn.ModuleList):
            return decoder.get_submodule(".".join(parts[:stop]))
    raise IncompatibleError(f"{type(decoder).__name__} keeps its layers in no list, so its first one is not known.")


def with_encodings(chosen: Any, config: Any) -> Any:
    """Return the class that builds a checkpoint with its encodings; ``chosen`` itself for one without encodings.

    transformers builds a model, and then reads the weights that the model has; so a model that is built with its
    encodings gets their weights with all others.
    """
    saved = config.ctxext.get("method") or {}
    kind = method_class(saved["method"]) if "method" in saved else None
    if kind is None or not issubclass(kind, EncodingMethod):
        return chosen
    method, trained_length = kind.from_dict(saved), config.ctxext["trained_length"]
    plain = getattr(chosen, "_model_mapping", {}).get(type(config), chosen)

    class WithEncodings(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            subject = Subject(self)
            (place, *_), _ = find_places(subject)  # a tower that reads sound or images may rotate, too
            spec, decoder = spec_of(subject, trained_length), decoder_of(subject, place)
            for owner in _owners(decoder, method):
                owner.add_module(ENCODING, _built(method, spec, owner, decoder))

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(WithEncodings, name, getattr(plain, name))
    return WithEncodings
