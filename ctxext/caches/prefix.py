"""Caches of a text's beginning: taken back to it, copied, and kept in a file.

A prompt that begins like one that was read needs no second reading of that beginning. A layer whose keys all lie in
memory is cropped; others (a sliding window that is full, dropped keys, a state) can only be copied before they go on.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
)

from ctxext.caches.digest import is_shared_out, weights_digest
from ctxext.caches.guards import guards_of
from ctxext.caches.held import HeldLayer, Reach
from ctxext.caches.records import cached_tokens, plain_class
from ctxext.core.saved import identity
from ctxext.core.scaling import rope_follows_length
from ctxext.core.subject import Subject
from ctxext.errors import CheckpointError, IncompatibleError
from ctxext.files import JsonObject, parse_json, whole_file
from ctxext.kernels.groups import SplitGroups
from ctxext.version import __version__

LAYERS = {kind.__name__: kind for kind in (DynamicLayer, HeldLayer, DynamicSlidingWindowLayer)}
NUMBERS = ("newest_slot", "whole_until", "turned", "turned_for", "cumulative_length")
TENSORS = ("keys", "values", "first_slots")
KEYLESS: Any = getattr(cache_utils, "DummyLayer", ())
"""Layers of a cache for layers of a model that read the keys of others, or none."""


def new_cache(model: PreTrainedModel, room: int | None = None) -> Cache:
    """Return an empty cache of a model. It grows, unless ``room`` gives the number of tokens that it holds."""
    return DynamicCache(config=model.config) if room is None else StaticCache(model.config, max_cache_len=room)


def _holding(cache: Any) -> list[Any]:
    """Return the layers of a cache that hold keys."""
    return [layer for layer in cache.layers if not isinstance(layer, KEYLESS)]


def virtual_tokens(subject: Subject) -> Any:
    """Return the config of an adapter in use that puts tokens of its own before each text; None for no such adapter."""
    adapter: Any = getattr(subject.chain[0], "active_peft_config", None)
    return adapter if getattr(adapter, "is_prompt_learning", False) else None


def why_no_prefix(subject: Subject) -> str | None:
    """Return why no cache of a model may serve a longer text that begins alike; None if it may."""
    model = subject.model
    if virtual_tokens(subject) is not None:
        return "an adapter puts tokens of its own before each text"
    is_plain = getattr(model.config, "ctxext", None) is None
    if any(guard.by_length for guard in guards_of(model)) or (is_plain and rope_follows_length(subject.text)):
        return "the positions of a text follow its length"
    try:
        layers = _holding(new_cache(model)) if model._supports_default_dynamic_cache() else []
    except (AttributeError, TypeError, ValueError):
        layers = []
    if not layers or model._is_stateful or any(plain_class(layer).__name__ not in LAYERS for layer in layers):
        return "its layers keep a state of all that they have read"
    return None


def why_no_graph(subject: Subject) -> str | None:
    """Return why steps of a model are not run as graphs, over a cache with room for all tokens; None if they are."""
    if (reason := why_no_prefix(subject)) is not None:
        return reason
    if not hasattr(StaticLayer, "crop"):
        return "this version of transformers cannot take back a cache of a fixed size. Update it"
    if any(type(layer) is not StaticLayer for layer in _holding(new_cache(subject.model, 1))):
        return "some layers hold a window of the text only"
    return None


def require_graph(subject: Subject) -> None:
    """Raise ``IncompatibleError`` if steps of a model are not run as graphs."""
    if (reason := why_no_graph(subject)) is not None:
        raise IncompatibleError(f"Steps of {type(subject.chain[0]).__name__} cannot run as graphs: {reason}.")


def _crops(layer: Any) -> bool:
    """Return whether a layer holds the keys of all tokens, of all heads."""
    is_whole = plain_class(layer) in (DynamicLayer, HeldLayer, StaticLayer)
    return is_whole and getattr(layer, "first_slots", None) is None and getattr(layer, "near", None) is None


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common beginning of two texts, in tokens."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False)))


def shorten(cache: Any, tokens: int) -> bool:
    """Take a cache back to its first tokens; return False if it cannot be, and is of no use any more."""
    removed = cached_tokens(cache) - tokens
    try:
        if removed > 0:
            cache.crop(-removed)
    except (IncompatibleError, RuntimeError, ValueError):  # the last two of a sliding window that is full
        return False
    return removed >= 0


def beginning(cache: Any, tokens: int) -> Any:
    """Return a copy of the first tokens of a cache, which takes no memory for others; None if layers hold too few."""
    if not all(map(_crops, _holding(cache))):
        return None
    part = copy.copy(cache)
    part.layers = [copy.copy(layer) for layer in cache.layers]
    if not shorten(part, tokens):
        return None
    for layer in _holding(part):
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    return part


class Mark:
    """A place in a text to which its cache can be taken back, whatever was read behind it.

    Args:
        by_length: True for positions that follow the length of a text: all layers are copied.
    """

    def __init__(self, cache: Any, *, by_length: bool) -> None:
        self.cache, self.tokens = cache, cached_tokens(cache)
        self._whole = copy.deepcopy(cache) if by_length else None
        self._copies = {
            number: copy.deepcopy(getattr(layer, "near", None) or layer)
            for number, layer in enumerate(cache.layers)
            if not _crops(layer)
        }

    def back(self) -> bool:
        """Take the cache back; return False if it cannot be: a layer dropped keys behind the mark."""
        if self._whole is not None:
            self.cache = copy.deepcopy(self._whole)
            return True
        for number, layer in enumerate(self.cache.layers):
            copied, near = copy.deepcopy(self._copies.get(number)), getattr(layer, "near", None)
            if copied is not None and near is None:
                self.cache.layers[number] = copied
                continue
            if copied is None and not _crops(layer):
                return False
            layer.near = None
            layer.crop(min(0, self.tokens - int(layer.get_seq_length())))
            layer.near = copied
        return True


def _state(layer: Any) -> tuple[dict[str, Tensor], JsonObject]:
    """Return the tensors of a layer, and its numbers."""
    near, heads = getattr(layer, "near", None), getattr(layer, "heads", None)
    tensors = {name: value for name in TENSORS if (value := getattr(layer, name, None)) is not None}
    facts: JsonObject = {"class": plain_class(layer).__name__}
    facts |= {name: value for name in NUMBERS if isinstance(value := getattr(layer, name, None), int)}
    if getattr(layer, "reach", None) is not None:
        facts["reach"] = list(layer.reach)
    if near is not None and heads is not None:
        theirs, facts["near"] = _state(near)
        tensors |= {f"near.{name}": value for name, value in theirs.items()}
        facts["heads"] = [heads.far.numbers, heads.far.total]
    return tensors, facts


def _restore(layer: Any, facts: JsonObject, tensors: dict[str, Tensor]) -> None:
    """Give an empty layer what ``_state`` returned of another."""
    kind: Any = LAYERS[facts["class"]]
    if not issubclass(kind, type(layer)):
        raise ValueError(f"layers of {facts['class']}, not of {type(layer).__name__}")
    layer.__class__ = kind
    layer.lazy_initialization(tensors["keys"], tensors["values"])
    vars(layer).update({name: facts[name] for name in NUMBERS if name in facts})
    vars(layer).update({name: tensors[name] for name in TENSORS if name in tensors})
    if "reach" in facts:
        layer.reach = Reach(*facts["reach"])
    if "near" in facts:
        layer.near, layer.heads = HeldLayer(), SplitGroups.of(*facts["heads"])
        theirs = {name.removeprefix("near."): x for name, x in tensors.items() if name.startswith("near.")}
        _restore(layer.near, facts["near"], theirs)


def depends_on(subject: Subject) -> JsonObject:
    """Return what a cache depends on: weights, their dtype, the extension, and the versions that computed it."""
    saved = subject.saved
    return {
        "extension": "none" if saved is None else repr(identity(saved)),
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "weights": weights_digest(subject.chain[0]),
        "ctxext": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def require_prefix(subject: Subject) -> None:
    """Raise ``IncompatibleError`` if no longer text may go on from a file of a cache of this model."""
    reason = why_no_prefix(subject)
    if reason is None and is_shared_out(subject.model):  # whose keys may be shared, too, and whose digest is unknown
        reason = "processes share its weights"
    if reason is not None:
        name = type(subject.chain[0]).__name__
        raise IncompatibleError(f"A text that {name} has read is not written to a file: {reason}.")


def write_prefix(path: Path, subject: Subject, cache: Any, tokens: list[int]) -> None:
    """Write a cache and its tokens to a file, whole or not at all.

    Raises:
        IncompatibleError: if no longer text may go on from the cache.
        CheckpointError: if the file cannot be written, as on a full disk.
    """
    require_prefix(subject)
    tensors, layers = {"tokens": torch.tensor(tokens)}, []
    for number, layer in enumerate(_holding(cache)):
        own, facts = _state(layer)
        tensors |= {f"{number}.{name}": value.cpu().contiguous() for name, value in own.items()}
        layers.append(facts)
    about = {name: json.dumps(value) for name, value in (depends_on(subject) | {"layers": layers}).items()}
    try:
        with whole_file(path) as half:
            save_file(tensors, half, metadata=about)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"What was read could not be written to {path}: {error}. Make room, or name another file."
        ) from error


def read_prefix(path: Path, subject: Subject) -> tuple[Any, list[int]]:
    """Read a cache of a model that ``write_prefix`` wrote, and its tokens.

    Raises:
        CheckpointError: if the file is damaged, or belongs to another model, extension, dtype or version.
    """
    try:
        with safetensors.safe_open(path, "pt", device=str(subject.model.device)) as file:
            about = {name: parse_json(value) for name, value in (file.metadata() or {}).items()}
            layers, tensors = about.pop("layers"), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, value in depends_on(subject).items():
            if about[name] != value:
                raise CheckpointError(
                    f"{path} was written with {name} {about[name]}, and this model has {value}. Name another "
                    f"file, or load that model."
                )
        cache, tokens = new_cache(subject.model), tensors.pop("tokens").tolist()
        for number, (layer, facts) in enumerate(zip(_holding(cache), layers, strict=True)):
            own = {name.partition(".")[2]: x for name, x in tensors.items() if name.startswith(f"{number}.")}
            _restore(layer, facts, own)
            if layer.get_seq_length() != len(tokens):
                raise ValueError(f"layer {number} holds {layer.get_seq_length()} of {len(tokens)} tokens")
    except CheckpointError:
        raise
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} holds no text that was read ({error}). Name another file.") from error
    for guard in guards_of(subject.model):
        guard.claim(cache)
    return cache, tokens
