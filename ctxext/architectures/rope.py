"""Every model with rotary positions, found by structure: single, per layer type, partial, interleaved, MLA, mRoPE."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ctxext._edits import Edits
from ctxext.architectures._dynamic import DynamicForward
from ctxext.architectures._hf import ROPE_TYPE, method_rope_parameters, restoring
from ctxext.architectures._pin import PinnedApply
from ctxext.architectures._sliding import is_windowed, window_fields, window_note
from ctxext.architectures._twins import changed_scalars, meta_twin, rotary_twin, round_trip
from ctxext.architectures._verify import disagreement
from ctxext.architectures.base import Architecture, Extension, Request
from ctxext.errors import IncompatibleError, PatchStateError, VerificationError
from ctxext.methods import Method, RopeMethod
from ctxext.methods._math import as_longrope, plain_inv_freq
from ctxext.spec import Frequencies, RopeSpec

__all__ = ["Rope"]

# Keys of a rope dict that say how it is scaled; all others (mrope_section, ...) belong to the model and are kept.
SCALING_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
        *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
        "ctxext",
    }
)


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
class Plan:
    """A proven way to write the method into the config, before anything is edited."""

    fields: dict[str, Any]
    config: Any
    specs: dict[str | None, RopeSpec]
    rope_types: dict[str | None, str]
    stored_as: str


class Rope(Architecture):
    """Rotary models. Facts are read from the modules and proven on twins, never from a list of names."""

    name: ClassVar[str] = "rope"

    def matches(self, model: PreTrainedModel) -> bool:
        return any(_rotaries(model))

    def apply(self, model: PreTrainedModel, method: Method, request: Request, edits: Edits) -> Extension:
        if not isinstance(method, RopeMethod):
            raise IncompatibleError(f"Method {method.name!r} does not work on rotary positions.")
        text = model.config.get_text_config(decoder=True)
        sites = _sites(model, text)
        trained_length = self._trained_length(model, text, request)
        specs = {site.layer_type: _spec(model, text, site, trained_length) for site in sites}
        windows = window_fields(text, request, trained_length)
        with restoring():
            plan = _plan(model, method, sites, specs, windows)
            _edit(model, plan, method, sites, edits)
            _prove(model, plan, method, sites)
        notes = _notes(text, method, sites, plan)
        spec = next(iter(plan.specs.values()))
        return Extension(
            trained_length=trained_length,
            target_length=method.target_length(trained_length),
            stored_as=plan.stored_as,
            stock=ROPE_TYPE not in plan.rope_types.values(),
            fingerprint=fingerprint(method, spec),
            notes=notes,
        )

    def _trained_length(self, model: PreTrainedModel, text: Any, request: Request) -> int:
        extended = already_extended(model.config)
        if extended and request.trained_length is None:
            raise PatchStateError(
                f"This checkpoint is already extended ({extended}). Say which length its weights were trained for "
                f"before that extension: trained_length=...; the new method then replaces the old one."
            )
        length = request.trained_length or self.trained_length(model.config)
        if length is None:
            raise IncompatibleError(
                f"The config of this {text.model_type} has no max_position_embeddings. Pass trained_length=..."
            )
        return length


def already_extended(config: Any) -> str | None:
    """How a config is already extended, in a few words; None where it is plain."""
    saved = getattr(config, "ctxext", None)
    if saved:
        return f"ctxext {saved['method']['method']}, trained_length={saved['trained_length']}"
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type", "default")
        if kind in ("linear", "dynamic", "yarn", "longrope", "llama3"):
            original = parameters.get("original_max_position_embeddings")
            return f"rope_type={kind}" + (f", original_max_position_embeddings={original}" if original else "")
    return None


def fingerprint(method: RopeMethod, spec: RopeSpec) -> str:
    """12 hexadecimal digits that two models share exactly when their frequencies at the target length agree."""
    frequencies = method.frequencies(spec, method.target_length(spec.trained_length))
    digest = hashlib.sha256(frequencies.inv_freq.float().numpy().tobytes())
    digest.update(repr(round(frequencies.attention_scale, 9)).encode())
    return digest.hexdigest()[:12]


def _rotaries(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        has_frequencies = any(name.endswith("original_inv_freq") for name in module._buffers)
        if has_frequencies and hasattr(module, "rope_type") and hasattr(module, "config"):
            yield path, module


def _sites(model: PreTrainedModel, text: Any) -> list[Site]:
    sites = []
    for path, module in _rotaries(model):
        if module.config is not text:
            continue
        kinds = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
        sites += [Site(path, kind) for kind in kinds if kind is None or not is_windowed(kind)]
    if sites:
        return sites
    if any(True for _ in _rotaries(model)):
        raise IncompatibleError(
            f"The rotary positions of this {text.model_type} belong to sliding-window layers only, or to parts of the "
            f"model with a config of their own; an extension would not lengthen its reach."
        )
    raise IncompatibleError(f"{type(model).__name__} has no rotary positions.")


def _parameters(text: Any, layer_type: str | None) -> dict[str, Any]:
    rope = text.rope_parameters
    return dict(rope if layer_type is None else rope[layer_type])


def _spec(model: PreTrainedModel, text: Any, site: Site, trained_length: int) -> RopeSpec:
    """Read the site's spec off its unscaled twin, and make sure that its frequencies are the plain ones."""
    parameters = _parameters(text, site.layer_type)
    base = parameters.get("rope_theta")
    if base is None:
        raise IncompatibleError(
            f"The config of this {text.model_type} has no rope_theta in rope_parameters={parameters}. "
            f"Put it there: config.rope_parameters['rope_theta'] = 10000.0 is the default of the RoPE paper."
        )
    plain = _merged(text, site.layer_type, {"rope_type": "default", "rope_theta": base})
    kind = parameters.get("rope_type", "default")
    if kind in ("proportional", "axial"):
        raise IncompatibleError(
            f"The {site.layer_type or 'only'} rotary positions of this {text.model_type} are {kind!r}: their "
            f"frequencies are not base^(-2i/d), which every method here starts from."
        )
    config = round_trip(model.config, {"rope_parameters": plain}).get_text_config(decoder=True)
    twin = rotary_twin(model.get_submodule(site.path), config)
    half = getattr(twin, f"{site.prefix}inv_freq").shape[-1]
    spec = RopeSpec(rotary_dim=2 * half, base=float(base), trained_length=trained_length)
    problem = disagreement(
        twin, lambda length: Frequencies(plain_inv_freq(spec)), [trained_length], layer_type=site.layer_type
    )
    if problem:
        raise IncompatibleError(
            f"The unextended rotary positions of this {text.model_type} are not base^(-2i/d), which every method here "
            f"starts from: {problem}"
        )
    return spec


def _merged(text: Any, layer_type: str | None, new: dict[str, Any]) -> dict[str, Any]:
    """The config's rope dict with one entry rescaled; keys that are not about scaling are kept."""
    kept = {k: v for k, v in _parameters(text, layer_type).items() if k not in SCALING_KEYS}
    entry = kept | new
    return entry if layer_type is None else dict(text.rope_parameters) | {layer_type: entry}


def _plan(
    model: PreTrainedModel,
    method: RopeMethod,
    sites: list[Site],
    specs: dict[str | None, RopeSpec],
    windows: dict[str, Any],
) -> Plan:
    """Find the first saved form that stock transformers rebuilds into what the method says."""
    text = model.config.get_text_config(decoder=True)
    reasons = []
    for stored_as, forms in _forms(method, specs):
        rope: dict[str, Any] = dict(text.rope_parameters)
        for layer_type, form in forms.items():
            merged = _merged(text, layer_type, form)
            rope = merged if layer_type is None else rope | {layer_type: merged[layer_type]}
        spec = next(iter(specs.values()))
        fields = {"rope_parameters": rope, **windows}
        if all(form["rope_type"] != "dynamic" for form in forms.values()):
            fields["max_position_embeddings"] = method.target_length(spec.trained_length)
        else:  # stock code measures the stretch from this field
            fields["max_position_embeddings"] = spec.trained_length
        if hasattr(text, "original_max_position_embeddings"):
            fields["original_max_position_embeddings"] = spec.trained_length
        try:
            config = round_trip(model.config, fields)
        except (KeyError, ValueError, TypeError) as error:
            reasons.append(f"{stored_as}: its config does not accept it ({error})")
            continue
        rope_types = {layer_type: form["rope_type"] for layer_type, form in forms.items()}
        problem = _rebuilt_wrong(model, config, method, sites, specs)
        if problem is None:
            return Plan(fields, config, specs, rope_types, stored_as)
        reasons.append(f"{stored_as}: a reload would not give the same model ({problem})")
    raise IncompatibleError(
        f"Method {method.name!r} cannot be stored in the config of this {text.model_type}. Tried " + "; ".join(reasons)
    )


def _forms(
    method: RopeMethod, specs: dict[str | None, RopeSpec]
) -> Iterator[tuple[str, dict[str | None, dict[str, Any]]]]:
    """Saved forms of the method, best first: its own stock form, stock longrope factors, ctxext's rope type."""
    stock = {kind: method.rope_parameters(spec) for kind, spec in specs.items()}
    found = {kind: form for kind, form in stock.items() if form is not None}
    if len(found) == len(specs):
        name = next(iter(found.values()))["rope_type"]
        changed = " with another rope_theta" if name == "default" else ""
        yield f"stock rope_type {name!r}{changed}", found
    if method.dynamic:
        if not found:
            yield f"rope_type {ROPE_TYPE!r}, which only ctxext loads", {
                kind: method_rope_parameters(method, spec) for kind, spec in specs.items()
            }
        return
    yield "stock rope_type 'longrope' holding the frequencies themselves", {
        kind: as_longrope(spec, method.frequencies(spec, spec.trained_length), method.factor)
        for kind, spec in specs.items()
    }


def _lengths(method: RopeMethod, spec: RopeSpec) -> list[int]:
    """Lengths at which the method is checked; the last is where the model is meant to reach."""
    target = max(method.target_length(spec.trained_length), spec.trained_length + 1)
    return [spec.trained_length, spec.trained_length + 1, target] if method.dynamic else [target]


def _rebuilt_wrong(
    model: PreTrainedModel,
    config: Any,
    method: RopeMethod,
    sites: list[Site],
    specs: dict[str | None, RopeSpec],
) -> str | None:
    text = config.get_text_config(decoder=True)
    for site in sites:
        live = model.get_submodule(site.path)
        spec = specs[site.layer_type]
        try:
            twin = rotary_twin(live, text)
        except (KeyError, ValueError, TypeError) as error:
            return f"{type(live).__name__} does not build: {type(error).__name__}: {error}"
        lengths = _lengths(method, spec)
        if _rope_type(text, site) == ROPE_TYPE and method.dynamic:
            lengths = lengths[:1]  # the rest is DynamicForward's
        problem = disagreement(
            twin, lambda length, spec=spec: method.frequencies(spec, length), lengths, layer_type=site.layer_type
        )
        if problem:
            return problem
    return None


def _rope_type(text: Any, site: Site) -> str:
    return str(_parameters(text, site.layer_type)["rope_type"])


def _edit(model: PreTrainedModel, plan: Plan, method: RopeMethod, sites: list[Site], edits: Edits) -> None:
    old, new = meta_twin(model, round_trip(model.config, {})), meta_twin(model, plan.config)
    text, new_text = model.config.get_text_config(decoder=True), plan.config.get_text_config(decoder=True)
    for path, name, value in changed_scalars(old, new):
        edits.set(model.get_submodule(path), name, value)
    for name in plan.fields:
        edits.set(text, name, getattr(new_text, name))
    for path in dict.fromkeys(site.path for site in sites):
        rotary = model.get_submodule(path)
        twin = rotary_twin(rotary, new_text)
        for name, buffer in twin._buffers.items():
            if buffer is not None:
                edits.set(rotary, name, buffer.to(rotary._buffers[name].device))
        for name in [name for name in vars(rotary) if name.endswith("long_inv_freq")]:
            edits.delete(rotary, name)
        edits.set(rotary, "_apply", PinnedApply(rotary))
        if method.dynamic:
            here = [site for site in sites if site.path == path]
            _make_dynamic(rotary, here, plan, method, edits)


def _make_dynamic(rotary: nn.Module, sites: list[Site], plan: Plan, method: RopeMethod, edits: Edits) -> None:
    table = {site.layer_type: (method, plan.specs[site.layer_type], plan.rope_types[site.layer_type]) for site in sites}
    edits.set(rotary, "forward", DynamicForward(rotary, table))
    # Stock forward methods update themselves by the name of the rope type; this name means: do not.
    if isinstance(rotary.rope_type, dict):
        edits.set(rotary, "rope_type", rotary.rope_type | {site.layer_type: ROPE_TYPE for site in sites})
    else:
        edits.set(rotary, "rope_type", ROPE_TYPE)


def _prove(model: PreTrainedModel, plan: Plan, method: RopeMethod, sites: list[Site]) -> None:
    for site in sites:
        rotary = model.get_submodule(site.path)
        spec = plan.specs[site.layer_type]
        buffer = getattr(rotary, f"{site.prefix}inv_freq")
        if buffer.is_meta:
            continue
        problem = disagreement(
            rotary,
            lambda length, spec=spec: method.frequencies(spec, length),
            _lengths(method, spec),
            layer_type=site.layer_type,
            device=buffer.device,
        )
        if problem or buffer.dtype != torch.float32:
            raise VerificationError(f"The patched model does not compute {method.name!r}: {problem or buffer.dtype}")


def _notes(text: Any, method: RopeMethod, sites: list[Site], plan: Plan) -> tuple[str, ...]:
    notes = []
    if method.dynamic:
        notes.append(
            "Frequencies follow the length of the sequence, so keys already in a KV cache keep the frequencies of the "
            "step that wrote them: cached decoding beyond the trained window differs from one full forward pass."
        )
    if sites[0].layer_type is not None:
        kinds = ", ".join(sorted({str(site.layer_type) for site in sites}))
        notes.append(f"Positions differ by layer type; extended: {kinds}.")
    window = window_note(text)
    return tuple(notes + ([window] if window else []))
