"""Find a saved form of the method that stock transformers rebuilds into what the method says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError
from ctxext.methods import RopeMethod
from ctxext.methods.formulas import as_longrope, plain_inv_freq
from ctxext.spec import Frequencies, RopeSpec
from ctxext.surgery.rebuild import changed_scalars, meta_twin, rotaries, rotary_twin, round_trip, twin_config
from ctxext.surgery.rope_types import ROPE_TYPE, method_rope_parameters
from ctxext.surgery.rotary import RotarySite
from ctxext.surgery.verify import disagreement, module_output

__all__ = [
    "LatentSpec",
    "ProportionalSpec",
    "StoredForm",
    "checked_lengths",
    "for_scores",
    "make_plan",
    "mathematics",
    "merged",
    "parameters_of",
    "plain_spec",
    "rotating",
    "trained_spec",
]


@dataclass(frozen=True)
class StoredForm:
    """A proven way to write the method into the config, before anything is edited."""

    fields: dict[str, Any]
    config: Any
    specs: dict[str | None, RopeSpec]
    rope_types: dict[str | None, str]
    stored_as: str


def make_plan(
    model: PreTrainedModel,
    method: RopeMethod,
    sites: list[RotarySite],
    specs: dict[str | None, RopeSpec],
    windows: dict[str, Any],
) -> StoredForm:
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
            return StoredForm(fields, config, specs, rope_types, stored_as)
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
    sites: list[RotarySite],
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


def _rope_type(text: Any, site: RotarySite) -> str:
    return str(parameters_of(text, site.layer_type)["rope_type"])


Specs = dict[str | None, RopeSpec]


def for_scores(
    model: PreTrainedModel, method: RopeMethod, sites: list[RotarySite], specs: Specs, windows: dict[str, Any]
) -> tuple[RopeMethod, Specs]:
    """The method and the specs in the form that this model applies to whole attention scores, where it has one.

    A temperature on cos and sin reaches only what rotates. Models with latent attention can scale the whole score
    instead, by a number that they compute from their config when they are built. That form is taken only if stock
    code, building the model from it, really puts the temperature on the scores.

    Raises:
        IncompatibleError: the temperature follows the length, or the one that the weights were trained with would be
            lost; both cannot be stored.
    """
    text = model.config.get_text_config(decoder=True)
    if not hasattr(text, "qk_rope_head_dim"):
        return method, specs
    spec = next(iter(specs.values()))
    scales = {method.frequencies(spec, length).attention_scale for length in checked_lengths(method, spec)}
    trained = _score_factor(model, round_trip(model.config, {}), sites) if spec.inv_freq is not None else 1.0
    if len(scales) > 1:
        raise IncompatibleError(
            f"The temperature of {method.name!r} follows the length of the text, but only a part of each head of this "
            f"{text.model_type} rotates and its whole scores are scaled by a constant. Take a method whose temperature "
            f"is fixed (yarn), or one without (dynamic_ntk)."
        )
    scale = scales.pop()
    if scale == 1 and trained == 1:
        return method, specs
    latent: Specs = {kind: LatentSpec(**asdict(found), temperature=trained * scale) for kind, found in specs.items()}
    adapted = method.for_latent_attention()
    tries: list[tuple[RopeMethod, Specs]] = [(adapted, specs)] if adapted != method and trained == 1 else []
    for tried, with_specs in (*tries, (method, latent)):
        try:
            plan = make_plan(model, tried, sites, with_specs, windows)
        except IncompatibleError:
            continue  # the plan for the method itself says why, if that one does not exist either
        if math.isclose(_score_factor(model, plan.config, sites), (trained * scale), rel_tol=1e-6):
            return tried, with_specs
    if trained != 1:
        raise IncompatibleError(
            f"The scores of this {text.model_type} were trained with a temperature of {trained:.4g}, which stock code "
            f"takes from the scaling that its config has now and which {method.name!r} (factor {method.factor:g}) "
            f"could not keep. Take another factor, or scaling='replace'."
        )
    return method, specs


def _score_factor(model: PreTrainedModel, config: Any, sites: list[RotarySite]) -> float:
    """What a config multiplies queries and keys by outside the rotation, as stock code builds the model: 1 if plain."""
    text = model.config.get_text_config(decoder=True)
    rope = dict(text.rope_parameters)
    for site in sites:
        kind = site.layer_type
        base = (rope if kind is None else rope[kind])["rope_theta"]
        new = merged(text, kind, {"rope_type": "default", "rope_theta": base})
        rope = new if kind is None else rope | {kind: new[kind]}
    plain, built = meta_twin(model, round_trip(model.config, {"rope_parameters": rope})), meta_twin(model, config)
    rotary_paths = {path for path, _ in rotaries(model)}
    before = dict(plain.named_modules())
    found = set()
    for path, name, value in changed_scalars(plain, built):
        was = getattr(before[path], name)
        if path not in rotary_paths and isinstance(value, float) and isinstance(was, float) and was > 0 and value > 0:
            found.add(round(math.sqrt(value / was), 9))
    return found.pop() if len(found) == 1 else 1.0


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


def parameters_of(text: Any, layer_type: str | None) -> dict[str, Any]:
    """The rope dict of one layer type, or the only one."""
    rope = text.rope_parameters
    return dict(rope if layer_type is None else rope[layer_type])


def plain_spec(model: PreTrainedModel, text: Any, site: RotarySite, trained_length: int) -> RopeSpec:
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


def trained_spec(model: PreTrainedModel, text: Any, site: RotarySite, trained_length: int) -> RopeSpec:
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
