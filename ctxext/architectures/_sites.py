"""Where rotary frequencies live in a model, and what they are when nothing extends them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ctxext.architectures._probe import Layers, look, reader_of
from ctxext.architectures._sliding import is_windowed, mixes_windows
from ctxext.architectures._twins import rotary_twin, round_trip, twin_config
from ctxext.architectures._verify import disagreement, module_output
from ctxext.errors import IncompatibleError
from ctxext.methods._math import plain_inv_freq
from ctxext.spec import Frequencies, RopeSpec

__all__ = [
    "UNSEEN",
    "LatentSpec",
    "ProportionalSpec",
    "Site",
    "find_sites",
    "merged",
    "parameters_of",
    "plain_spec",
    "rotaries",
    "rotating",
    "survey",
    "trained_spec",
]

# Keys of a rope dict that say how it is scaled; all others (mrope_section, ...) belong to the model and are kept.
SCALING_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
        *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
        "ctxext",
    }
)
# Rope types that weights are trained with. ("dynamic" leaves texts of the trained length as they are.)
TRAINED_WITH = frozenset({"linear", "yarn", "longrope", "llama3"})


@dataclass(frozen=True)
class Site:
    """One set of frequencies in a model: a rotary module, and the layer type it serves (None = all layers)."""

    path: str
    layer_type: str | None

    @property
    def prefix(self) -> str:
        """What the names of the module's buffers start with."""
        return "" if self.layer_type is None else f"{self.layer_type}_"


@dataclass(frozen=True)
class ProportionalSpec(RopeSpec):
    """Exponents run over the whole head, but only the first ``rotated`` pairs rotate at all (Gemma 4)."""

    rotated: int = 0


@dataclass(frozen=True)
class LatentSpec(RopeSpec):
    """Only a part of each head rotates: queries and keys are multiplied by ``temperature`` as a whole (DeepSeek).

    Stock code reads it off the config as ``0.1 * mscale_all_dim * ln(factor) + 1``.
    """

    temperature: float = 1.0


def rotating(spec: RopeSpec, frequencies: Frequencies) -> Frequencies:
    """What a model of this spec makes of a method's frequencies.

    Pairs that never rotate stay at zero, and the method's scale comes on top of the one that the weights know.
    """
    inv_freq = frequencies.inv_freq
    if isinstance(spec, ProportionalSpec):
        inv_freq = inv_freq.clone()
        inv_freq[spec.rotated :] = 0.0
    scale = 1.0 if isinstance(spec, LatentSpec) else frequencies.attention_scale
    return Frequencies(inv_freq, scale * spec.attention_scale)


def rotaries(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with rotary frequencies that transformers' own rope types control, with its path."""
    for path, module in model.named_modules():
        has_frequencies = any(name.endswith("original_inv_freq") for name in module._buffers)
        if has_frequencies and hasattr(module, "rope_type") and hasattr(module, "config"):
            yield path, module


def find_sites(model: PreTrainedModel, text: Any) -> list[Site]:
    """Frequencies of the decoder that reach beyond a sliding window.

    Raises:
        IncompatibleError: if there are none.
    """
    return survey(model, text)[0]


def survey(model: PreTrainedModel, text: Any) -> tuple[list[Site], Layers]:
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


def _candidates(model: PreTrainedModel, text: Any) -> list[Site]:
    """Frequencies of the decoder, but for those that the config gives to windowed layers by name."""
    sites, elsewhere = [], []
    for path, module in rotaries(model):
        if module.config is not text and not _is_copy(module.config, text):
            elsewhere.append(path)
            continue
        kinds = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
        sites += [Site(path, kind) for kind in kinds if kind is None or not is_windowed(kind)]
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


def parameters_of(text: Any, layer_type: str | None) -> dict[str, Any]:
    """The rope dict of one layer type, or the only one."""
    rope = text.rope_parameters
    return dict(rope if layer_type is None else rope[layer_type])


def plain_spec(model: PreTrainedModel, text: Any, site: Site, trained_length: int) -> RopeSpec:
    """Read the site's spec off its unscaled twin, and make sure that its frequencies are the plain ones."""
    parameters = parameters_of(text, site.layer_type)
    base = parameters.get("rope_theta")
    if base is None:
        raise IncompatibleError(
            f"The config of this {text.model_type} has no rope_theta in rope_parameters={parameters}. "
            f"Put it there: config.rope_parameters['rope_theta'] = 10000.0 is the default of the RoPE paper."
        )
    is_proportional = parameters.get("rope_type") == "proportional"
    unscaled = {"rope_type": "proportional" if is_proportional else "default", "rope_theta": base}
    plain = merged(text, site.layer_type, unscaled)
    config = round_trip(model.config, {"rope_parameters": plain})
    live = model.get_submodule(site.path)
    twin = rotary_twin(live, twin_config(model, site.path, config))
    inv_freq = getattr(twin, f"{site.prefix}inv_freq")
    spec = RopeSpec(rotary_dim=2 * inv_freq.shape[-1], base=float(base), trained_length=trained_length)
    if is_proportional:
        spec = ProportionalSpec(spec.rotary_dim, spec.base, trained_length, rotated=int(inv_freq.count_nonzero()))
    plain_frequencies = rotating(spec, Frequencies(plain_inv_freq(spec)))
    problem = disagreement(module_output(twin, site.layer_type), lambda length: plain_frequencies, [trained_length])
    if problem and live.config is not text:
        raise IncompatibleError(
            f"This {text.model_type} has rotary modules with a rope_theta of their own, which no field of its config "
            f"could rescale together: {problem}"
        )
    if problem:
        raise IncompatibleError(
            f"The unextended rotary positions of this {text.model_type} are not base^(-2i/d), which every method here "
            f"starts from: {problem}"
        )
    return spec


def trained_spec(model: PreTrainedModel, text: Any, site: Site, trained_length: int) -> RopeSpec:
    """Read off the site's twin what a checkpoint was trained with whose positions are scaled already.

    That are the frequencies and the scale of cos and sin that its config gives a text of ``trained_length`` tokens,
    in the float32 that its weights saw.
    """
    plain = plain_spec(model, text, site, trained_length)
    parameters = parameters_of(text, site.layer_type)
    if parameters.get("rope_type") == "proportional" and (parameters.get("factor") or 1.0) != 1:
        raise IncompatibleError(
            f"The frequencies of this {text.model_type} are 'proportional' with factor={parameters['factor']}, which "
            f"no method here can extend. Where that factor was put on after training, take it out of config.json."
        )
    if parameters.get("rope_type") not in TRAINED_WITH:
        return plain
    config = round_trip(model.config, {})
    twin = rotary_twin(model.get_submodule(site.path), twin_config(model, site.path, config))
    module_output(twin, site.layer_type)(torch.tensor([0, trained_length - 1]))  # longrope: its set for long texts
    inv_freq = getattr(twin, f"{site.prefix}inv_freq").double()
    scale = float(getattr(twin, f"{site.prefix}attention_scaling"))
    return replace(plain, inv_freq=tuple(inv_freq.tolist()), attention_scale=scale)


def merged(text: Any, layer_type: str | None, new: dict[str, Any]) -> dict[str, Any]:
    """The config's rope dict with one entry rescaled; keys that are not about scaling are kept."""
    old = parameters_of(text, layer_type)
    entry = {k: v for k, v in old.items() if k not in SCALING_KEYS} | new
    if "llama_4_scaling_beta" in old:  # the temperature of its queries steps at this length, whatever scales positions
        entry["original_max_position_embeddings"] = old["original_max_position_embeddings"]
    return entry if layer_type is None else dict(text.rope_parameters) | {layer_type: entry}
