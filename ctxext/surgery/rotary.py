"""Where rotary frequencies live in a model, and what they are when nothing extends them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError
from ctxext.surgery.probe import Layers, look, reader_of
from ctxext.surgery.rebuild import rotaries
from ctxext.surgery.windows import is_windowed, mixes_windows

__all__ = ["UNSEEN", "PinnedApply", "RotarySite", "find_sites", "survey"]


@dataclass(frozen=True)
class RotarySite:
    """One set of frequencies in a model: a rotary module, and the layer type it serves (None = all layers)."""

    path: str
    layer_type: str | None

    @property
    def prefix(self) -> str:
        """What the names of the module's buffers start with."""
        return "" if self.layer_type is None else f"{self.layer_type}_"


def find_sites(model: PreTrainedModel, text: Any) -> list[RotarySite]:
    """Frequencies of the decoder that reach beyond a sliding window.

    Raises:
        IncompatibleError: if there are none.
    """
    return survey(model, text)[0]


def survey(model: PreTrainedModel, text: Any) -> tuple[list[RotarySite], Layers]:
    """Frequencies of the decoder that reach beyond a sliding window, and what its layers do with them.

    Raises:
        IncompatibleError: if there are none, or where windows and whole layers mix and the layers could not be seen.
    """
    sites = _candidates(model, text)
    if model.config.is_encoder_decoder:
        classes = ", ".join(sorted({type(module).__name__ for _, module in rotaries(model)}))
        raise IncompatibleError(
            f"This {model.config.model_type} is an encoder-decoder: the text is read by its encoder and written by its "
            f"decoder, and each of them rotates by itself ({classes}). To extend the decoder alone would not let it "
            f"read further, so ctxext extends neither."
        )
    if reader_of(model, sites[0].path) is None:
        first = next(iter(inspect.signature(model.forward).parameters))
        raise IncompatibleError(
            f"{type(model).__name__} reads no tokens (the first argument of its forward is {first!r}). ctxext extends "
            f"what reads text; patch the model that this one is a part of."
        )
    layers = look(model, list(dict.fromkeys(site.path for site in sites)))
    if layers.failure and sites[0].layer_type is None and mixes_windows(text):
        raise IncompatibleError(
            f"This {text.model_type} has layers with a sliding window beside others, and which of its layers rotate "
            f"could not be seen: {UNSEEN.format(layers.failure)} If only the windowed ones do, an extension would harm "
            f"and not help."
        )
    if layers.rotates_in_windows_only:
        raise IncompatibleError(WINDOWS_ONLY.format(text.model_type))
    return sites, layers


UNSEEN = "its forward pass does not run without data ({})."

WINDOWS_ONLY = (
    "The rotary positions of this {} belong to its sliding-window layers only, and its other layers have no positions "
    "to extend: they already see everything."
)


def _candidates(model: PreTrainedModel, text: Any) -> list[RotarySite]:
    """Frequencies of the decoder, but for those that the config gives to windowed layers by name."""
    sites, elsewhere = [], []
    for path, module in rotaries(model):
        if module.config is not text and not _is_copy(module.config, text):
            elsewhere.append(path)
            continue
        kinds = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
        sites += [RotarySite(path, kind) for kind in kinds if kind is None or not is_windowed(kind)]
    if sites:
        return sites
    if elsewhere:
        raise IncompatibleError(
            f"This {text.model_type} is made of parts with a config each ({', '.join(elsewhere)} rotate by their own), "
            f"so no one extension of its config lengthens its reach."
        )
    if any(True for _ in rotaries(model)):
        raise IncompatibleError(WINDOWS_ONLY.format(text.model_type))
    raise IncompatibleError(f"{type(model).__name__} has no rotary positions.")


def _is_copy(config: Any, text: Any) -> bool:
    """Whether a config is a changed copy of the text config, which some models hand to their modules."""
    return type(config) is type(text) and getattr(config, "layer_types", None) == getattr(text, "layer_types", None)


@dataclass
class PinnedApply:
    """Stands in for ``module._apply``: moves tensors between devices but never rounds them.

    ``model.bfloat16()`` would otherwise round ``inv_freq``: 0.7 rad of phase error at position 4096.
    """

    module: nn.Module

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Apply ``fn`` and undo a change of floating dtype."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor.is_floating_point() and moved.dtype != tensor.dtype:
                return tensor.to(device=moved.device)
            return moved

        type(self.module)._apply(self.module, keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self.module
