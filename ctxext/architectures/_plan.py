"""Find a saved form of the method that stock transformers rebuilds into what the method says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from ctxext.architectures._hf import ROPE_TYPE, method_rope_parameters
from ctxext.architectures._sites import LatentSpec, ProportionalSpec, Site, merged, parameters_of, rotating
from ctxext.architectures._twins import rotary_twin, round_trip, twin_config
from ctxext.architectures._verify import disagreement, module_output
from ctxext.errors import IncompatibleError
from ctxext.methods import RopeMethod
from ctxext.methods._math import as_longrope
from ctxext.spec import Frequencies, RopeSpec

__all__ = ["Plan", "checked_lengths", "make_plan", "mathematics"]


@dataclass(frozen=True)
class Plan:
    """A proven way to write the method into the config, before anything is edited."""

    fields: dict[str, Any]
    config: Any
    specs: dict[str | None, RopeSpec]
    rope_types: dict[str | None, str]
    stored_as: str


def make_plan(
    model: PreTrainedModel,
    method: RopeMethod,
    sites: list[Site],
    specs: dict[str | None, RopeSpec],
    windows: dict[str, Any],
) -> Plan:
    """Find the first saved form that stock transformers rebuilds into what the method says."""
    text = model.config.get_text_config(decoder=True)
    reasons = []
    for stored_as, plain_forms in _forms(method, specs):
        forms = {kind: _on_scores(specs[kind], form) for kind, form in plain_forms.items()}
        rope: dict[str, Any] = dict(text.rope_parameters)
        for layer_type, form in forms.items():
            new = merged(text, layer_type, form)
            rope = new if layer_type is None else rope | {layer_type: new[layer_type]}
        spec = next(iter(specs.values()))
        fields = {"rope_parameters": rope, **windows, **_implied_head_dim(text)}
        # Stock code measures the stretch of its dynamic type from this field, so it must keep the trained length.
        is_stock_dynamic = any(form["rope_type"] == "dynamic" for form in forms.values())
        if hasattr(text, "max_position_embeddings"):
            reach = spec.trained_length if is_stock_dynamic else method.target_length(spec.trained_length)
            fields["max_position_embeddings"] = reach
        if hasattr(text, "original_max_position_embeddings"):
            fields["original_max_position_embeddings"] = spec.trained_length
        try:
            config = round_trip(model.config, fields)
        except (AttributeError, KeyError, ValueError, TypeError, StrictDataclassError) as error:
            said = str(error.__cause__ or error).strip()
            reasons.append(f"{stored_as}: its config does not accept it ({said})")
            continue
        rope_types = {layer_type: form["rope_type"] for layer_type, form in forms.items()}
        problem = _rebuilt_wrong(model, config, method, sites, specs)
        if problem is None:
            return Plan(fields, config, specs, rope_types, stored_as)
        reasons.append(f"{stored_as}: a reload would not give the same model ({problem})")
    if not reasons:
        raise IncompatibleError(
            f"Method {method.name!r} cannot be stored in the config of this {text.model_type}: its frequencies are "
            f"'proportional', which take a factor (pi) or another base (ntk, abf) and nothing else."
        )
    raise IncompatibleError(
        f"Method {method.name!r} cannot be stored in the config of this {text.model_type}. Tried " + "; ".join(reasons)
    )


def _implied_head_dim(text: Any) -> dict[str, Any]:
    """The size of a head, where a config has the field and leaves it empty (Mixtral-8x7B as it is published).

    Stock code then takes this quotient for plain positions, but multiplies by the empty field for yarn and longrope.
    """
    declared = {field.name for field in dataclasses.fields(text)} if dataclasses.is_dataclass(text) else set()
    if "head_dim" not in declared | vars(text).keys() or vars(text).get("head_dim") is not None:
        return {}
    return {"head_dim": text.hidden_size // text.num_attention_heads}


def _forms(
    method: RopeMethod, specs: dict[str | None, RopeSpec]
) -> Iterator[tuple[str, dict[str | None, dict[str, Any]]]]:
    """Saved forms of the method, best first: its own stock form, stock longrope factors, ctxext's rope type."""
    is_scaled = any(spec.inv_freq is not None for spec in specs.values())
    # A method's own stock form starts from plain frequencies, and from nothing else.
    stock = {} if is_scaled else {kind: method.rope_parameters(spec) for kind, spec in specs.items()}
    found = {kind: form for kind, form in stock.items() if form is not None}
    if any(isinstance(spec, ProportionalSpec) for spec in specs.values()):
        names = {form["rope_type"] for form in found.values()}
        if len(found) == len(specs) and names <= {"linear", "default"}:
            forms = {kind: form | {"rope_type": _proportional(specs[kind], form)} for kind, form in found.items()}
            yield "stock rope_type 'proportional' with a factor or another rope_theta", forms
        return
    if len(found) == len(specs):
        name = next(iter(found.values()))["rope_type"]
        changed = " with another rope_theta" if name == "default" else ""
        yield f"stock rope_type {name!r}{changed}", found
    if method.dynamic:
        if not found:
            yield (
                f"rope_type {ROPE_TYPE!r}, which only ctxext loads",
                {kind: method_rope_parameters(method, spec) for kind, spec in specs.items()},
            )
        return
    tables = {
        kind: as_longrope(spec, mathematics(method, spec)(spec.trained_length), method.factor)
        for kind, spec in specs.items()
    }
    lines = {kind: _as_linear(form) for kind, form in tables.items()}
    if is_scaled and all(line is not None for line in lines.values()):
        yield "stock rope_type 'linear'", {kind: line for kind, line in lines.items() if line is not None}
    yield "stock rope_type 'longrope' holding the frequencies themselves", tables


def _on_scores(spec: RopeSpec, form: dict[str, Any]) -> dict[str, Any]:
    """A saved form whose temperature multiplies whole scores, where the spec asks for that."""
    if not isinstance(spec, LatentSpec) or form.get("factor", 1) == 1:  # without a factor there is no such number
        return form
    new = form | {"mscale_all_dim": (spec.temperature - 1) / (0.1 * math.log(form["factor"]))}
    return new | {"attention_factor": spec.attention_scale} if form["rope_type"] in ("yarn", "longrope") else new


def _as_linear(form: dict[str, Any]) -> dict[str, Any] | None:
    """A table of factors in the form that all runtimes read, if they are one and the same."""
    factors = form["long_factor"]
    # The frequencies that a checkpoint was trained with are float32: seven digits are theirs.
    if form["attention_factor"] != 1 or max(factors) > min(factors) * (1 + 1e-6):
        return None
    return {"rope_type": "linear", "rope_theta": form["rope_theta"], "factor": float(f"{factors[0]:.7g}")}


def _proportional(spec: RopeSpec, form: dict[str, Any]) -> str:
    return "proportional" if isinstance(spec, ProportionalSpec) else str(form["rope_type"])


def checked_lengths(method: RopeMethod, spec: RopeSpec) -> list[int]:
    """Lengths at which the method is checked; the last is where the model is meant to reach."""
    target = max(method.target_length(spec.trained_length), spec.trained_length + 1)
    return [spec.trained_length, spec.trained_length + 1, target] if method.dynamic else [target]


def mathematics(method: RopeMethod, spec: RopeSpec) -> Callable[[int], Frequencies]:
    """The method's own frequencies on this model, as a function of the length."""
    return lambda length: rotating(spec, method.frequencies(spec, length))


def _rebuilt_wrong(
    model: PreTrainedModel,
    config: Any,
    method: RopeMethod,
    sites: list[Site],
    specs: dict[str | None, RopeSpec],
) -> str | None:
    for site in sites:
        live = model.get_submodule(site.path)
        spec = specs[site.layer_type]
        text = twin_config(model, site.path, config)
        try:
            twin = rotary_twin(live, text)
        except (AttributeError, KeyError, ValueError, TypeError) as error:
            return f"{type(live).__name__} does not build: {type(error).__name__}: {error}"
        lengths = checked_lengths(method, spec)
        if _rope_type(text, site) == ROPE_TYPE and method.dynamic:
            lengths = lengths[:1]  # the rest is DynamicForward's
        lengths = [*lengths, lengths[-1]]  # stock longrope keeps its long frequencies: what it does next must hold too
        try:
            problem = disagreement(module_output(twin, site.layer_type), mathematics(method, spec), lengths)
        except NameError as error:  # transformers 5.17, longrope per layer type, second long text
            return f"{type(live).__name__} itself fails on it: {error}"
        if problem:
            return problem
    return None


def _rope_type(text: Any, site: Site) -> str:
    return str(parameters_of(text, site.layer_type)["rope_type"])
