"""Store a method in a config from which transformers, or ctxext, rebuilds a model that rotates as the method says.

Where no rope type of transformers can express the method, the form is one of ctxext's, which programs without it
refuse; transformers calls ``initial_frequencies`` or ``no_rotation`` for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctxext.core.rebuild import RESTORING, Rebuild
from ctxext.core.scaling import CHUNKED, REFUSALS, declared_fields, heads_of, length_fields
from ctxext.core.subject import Subject
from ctxext.errors import CheckpointError, IncompatibleError, shown
from ctxext.files import JsonObject, parse_json
from ctxext.methods import Method, RopeMethod, saved_class
from ctxext.methods.formulas import as_longrope
from ctxext.methods.remap import RemapMethod
from ctxext.rope_types import GUARD, ROPE_NAME, ROPE_TYPE, UNROTATED_TYPE
from ctxext.rotary.sites import SCALING_KEYS, LatentSpec, ProportionalSpec, RotarySite
from ctxext.spec import RopeSpec

# Of methods that keep the frequencies, where the config accepts only its usual rope type (Phi-3).
AS_TRAINED = "the frequencies of the training, and a sentence in place of a number, which only ctxext loads"


@dataclass(frozen=True)
class StoredForm:
    """A proven way to write a method into the config, before anything is edited."""

    method: RopeMethod
    sites: Sequence[RotarySite]
    rebuild: Rebuild
    stored_as: str

    @property
    def is_guarded_elsewhere(self) -> bool:
        """True if the frequencies are stored as they were, and another field must keep other programs out."""
        return self.stored_as == AS_TRAINED

    @property
    def stock(self) -> bool:
        """True if plain transformers computes the frequencies of every site, and what the method does with them."""
        return not self.is_guarded_elsewhere and all(self.rope_type(site) != ROPE_TYPE for site in self.sites)

    def rope_type(self, site: RotarySite) -> str:
        """Return the rope type under which the config stores the frequencies of one site."""
        return str(site.rope_dict(self.rebuild.text)["rope_type"])


def find_stored_form(
    subject: Subject, method: RopeMethod, sites: Sequence[RotarySite], windows: JsonObject
) -> StoredForm:
    """Find the first saved form from which transformers rebuilds the frequencies of the method.

    Raises:
        IncompatibleError: if there is none; the message lists the forms that were tried.
    """
    text, reasons = subject.text, []
    for stored_as, forms in _forms(text, method, sites):
        try:
            rebuild = Rebuild(subject, _fields(text, method, sites, forms, windows))
        except REFUSALS as error:
            reason = str(error.__cause__ or error).strip()
            reasons.append(f"{stored_as}: its config does not accept it ({reason})")
            continue
        form = StoredForm(method, sites, rebuild, stored_as)
        problem = _rebuilt_wrong(form)
        if problem is None:
            return form
        reasons.append(f"{stored_as}: a reload would not give the same model ({problem})")
    if not reasons:
        raise IncompatibleError(
            f"Method {method.name!r} cannot be stored in the config of this {text.model_type}. Its rope type is "
            f"'proportional', which takes a factor or another base only. Take pi, ntk or abf."
        )
    tried = "; ".join(dict.fromkeys(reasons))
    raise IncompatibleError(
        f"Method {method.name!r} cannot be stored in the config of this {text.model_type}. Tried {tried}"
    )


def _fields(
    text: Any, method: RopeMethod, sites: Sequence[RotarySite], forms: Sequence[JsonObject], windows: JsonObject
) -> JsonObject:
    """Return the fields of a text config that store the method, in one form for each site."""
    rope, trained_length = dict(text.rope_parameters), sites[0].spec.trained_length
    for site, form in zip(sites, forms, strict=True):
        rope = site.rescaled(rope, _on_scores(site.spec, form) if isinstance(site.spec, LatentSpec) else form)
    fields = {"rope_parameters": rope, **windows}
    # vLLM and SGLang would apply dual chunk attention on top of the extension.
    if getattr(text, CHUNKED, None):
        fields[CHUNKED] = None
    # Configs with an empty head_dim, as of the published Mixtral-8x7B: transformers computes this quotient for plain
    # positions, but multiplies by the empty field for yarn and longrope.
    if "head_dim" in declared_fields(text) | vars(text).keys() and vars(text).get("head_dim") is None:
        fields["head_dim"] = heads_of(text)[2]
    # transformers measures the stretch of its dynamic type from this field, so the field keeps the trained length.
    is_stock_dynamic = any(form["rope_type"] == "dynamic" for form in forms)
    fields |= length_fields(text, trained_length if is_stock_dynamic else method.target_length(trained_length))
    if hasattr(text, "original_max_position_embeddings"):
        fields["original_max_position_embeddings"] = trained_length
    return fields


def _forms(text: Any, method: RopeMethod, sites: Sequence[RotarySite]) -> Iterator[tuple[str, list[JsonObject]]]:
    """Yield saved forms, one per site, best first: transformers' own form, longrope factors, ctxext's form."""
    specs = [site.spec for site in sites]
    is_scaled = any(spec.inv_freq is not None for spec in specs)
    # transformers' own forms start from plain frequencies only.
    stock = [] if is_scaled else [method.rope_parameters(spec) for spec in specs]
    plain_forms = [form for form in stock if form is not None]
    is_stock = len(plain_forms) == len(specs)
    if any(isinstance(spec, ProportionalSpec) for spec in specs):
        if is_stock and {form["rope_type"] for form in plain_forms} <= {"linear", "default"}:
            forms = [
                form | ({"rope_type": "proportional"} if isinstance(spec, ProportionalSpec) else {})
                for spec, form in zip(specs, plain_forms, strict=True)
            ]
            yield "stock rope_type 'proportional' with a factor or another rope_theta", forms
        if not isinstance(method, RemapMethod):
            return
    if is_stock:
        name = plain_forms[0]["rope_type"]
        changed = " with another rope_theta" if name == "default" else ""
        yield f"stock rope_type {name!r}{changed}", plain_forms
    if not method.is_table:
        # Of older transformers, Qwen2-VL's rotary module does not follow the length.
        if not plain_forms or plain_forms[0]["rope_type"] == "dynamic":
            # Without rope_theta first: ctxext needs none outside its entry. Some models read it under every rope
            # type.
            ours = [method_rope_parameters(method, spec) for spec in specs]
            description = f"rope_type {ROPE_NAME!r}, which only ctxext loads"
            yield description, ours
            yield description, [with_base(form) for form in ours]
        if isinstance(method, RemapMethod):
            # Remapping keeps the frequencies, so the rope dict may stay as it is. Then it cannot keep out programs
            # without ctxext, and another field of the config has to (``is_guarded_elsewhere``).
            ropes = [site.rope_dict(text) for site in sites]
            yield AS_TRAINED, [{key: rope[key] for key in SCALING_KEYS & rope.keys()} for rope in ropes]
        return
    # longrope divides each plain frequency by a separate factor, so it can hold any frequencies at all.
    tables = [
        as_longrope(site.spec, site.mathematics(method)(site.spec.trained_length), method.factor) for site in sites
    ]
    lines = [line for line in map(_as_linear, tables) if line is not None]
    if is_scaled and len(lines) == len(tables):
        yield "stock rope_type 'linear'", lines
    yield "stock rope_type 'longrope' holding the frequencies themselves", tables


def _on_scores(spec: LatentSpec, form: JsonObject) -> JsonObject:
    """Return a form whose temperature multiplies whole scores."""
    if form.get("factor", 1) == 1:  # ln(1) = 0: this form cannot hold a temperature
        return form
    new = form | {"mscale_all_dim": (spec.temperature - 1) / (0.1 * math.log(form["factor"]))}
    return new | {"attention_factor": spec.attention_scale} if form["rope_type"] in ("yarn", "longrope") else new


def _as_linear(form: JsonObject) -> JsonObject | None:
    """Return a table of equal factors as the 'linear' form, which all runtimes read; None if they differ."""
    factors = form["long_factor"]
    # The frequencies of the training are float32, which holds seven digits.
    if form["attention_factor"] != 1 or max(factors) > min(factors) * (1 + 1e-6):
        return None
    return {"rope_type": "linear", "rope_theta": form["rope_theta"], "factor": float(f"{factors[0]:.7g}")}


def checked_lengths(method: RopeMethod, spec: RopeSpec) -> list[int]:
    """Return the lengths at which to check the method; the last one is the target length."""
    target = max(method.target_length(spec.trained_length), spec.trained_length + 1)
    return [spec.trained_length, spec.trained_length + 1, target] if method.dynamic else [target]


def _rebuilt_wrong(form: StoredForm) -> str | None:
    """Return the error in the rotary modules that transformers builds from a form; None if they are right."""
    for site in form.sites:
        try:
            rotary = form.rebuild.rotary(site.path)
        except REFUSALS as error:
            name = type(form.rebuild.subject.model.get_submodule(site.path)).__name__
            return f"{name} does not build: {type(error).__name__}: {error}"
        lengths = checked_lengths(form.method, site.spec)
        if form.rope_type(site) == ROPE_TYPE and form.method.dynamic:
            lengths = lengths[:1]  # DynamicForward computes the longer lengths
        # longrope of transformers keeps its long frequencies, so check the call after a long one too.
        lengths = [*lengths, lengths[-1]]
        try:
            problem = site.disagreement(rotary, site.mathematics(form.method), lengths)
        except IncompatibleError as error:  # transformers 5.17: on a second long text, with longrope per layer type
            return str(error)
        if problem:
            return problem
    return None


def method_rope_parameters(method: RopeMethod, rope: RopeSpec) -> JsonObject:
    """Return the saved form of a method that transformers cannot express, under a rope type that it refuses."""
    trained: JsonObject = {}
    if rope.inv_freq is not None:
        trained = {"trained_inv_freq": list(rope.inv_freq), "trained_scale": rope.attention_scale}
    details = {"rotary_dim": rope.rotary_dim, "trained_length": rope.trained_length, **trained, **method.to_dict()}
    # Latent attention of older transformers reads the factor of any type.
    return _guarded(ROPE_TYPE, {"rope_theta": rope.base} | details) | {"factor": float(method.factor)}


def unrotated_rope_parameters(method: Method, base: float) -> JsonObject:
    """Return the saved form of a model without rotation, under a rope type that transformers refuses."""
    return _guarded(UNROTATED_TYPE, {"rope_theta": base} | method.to_dict())


def _guarded(rope_type: str, details: JsonObject) -> JsonObject:
    """Return a rope dict that no other program can compute with, even after an unknown rope type (Unsloth).

    The details are one string: vLLM (0.32.0, rotary_embedding/__init__.py) makes a key of all values of any type.
    """
    return {"rope_type": rope_type, "rope_theta": GUARD, "ctxext": json.dumps(details, sort_keys=True)}


def with_base(form: JsonObject) -> JsonObject:
    """Return a saved form with the base, for models whose code computes with it under every rope type."""
    return form | {"rope_theta": _details(form)["rope_theta"]}


def _details(parameters: JsonObject) -> JsonObject:
    """Return ctxext's own entries of a rope dict; refuse damaged ones."""
    saved = parameters["ctxext"]
    try:
        return {**parse_json(saved)}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"rope_parameters.ctxext in the config is damaged: {shown(saved)}.") from error


def stored_method(parameters: JsonObject) -> tuple[RopeMethod, RopeSpec]:
    """Rebuild the method of a saved rope dict, and the rotation that it extends.

    Raises:
        CheckpointError: if the method has no frequencies.
    """
    saved = _details(parameters)
    trained = saved.pop("trained_inv_freq", None)
    rope = RopeSpec(
        rotary_dim=saved.pop("rotary_dim"),
        base=saved.pop("rope_theta"),
        trained_length=saved.pop("trained_length"),
        inv_freq=None if trained is None else tuple(trained),
        attention_scale=saved.pop("trained_scale", 1.0),
    )
    method = saved_class(saved["method"]).from_dict(saved)
    if not isinstance(method, RopeMethod):
        raise CheckpointError(f"Method {method.name!r} of this checkpoint has no frequencies: config.json is damaged.")
    return method, rope


def initial_frequencies(
    config: Any,
    device: torch.device | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
    **_: Any,  # where a model keeps the width of its heads, which the saved form says itself
) -> tuple[Tensor, float]:
    """Compute frequencies and scale of the rope type ``ctxext_rope``; transformers calls this."""
    parameters = config.rope_parameters[layer_type] if layer_type is not None else config.rope_parameters
    method, rope = stored_method(parameters)
    if not method.is_table and not RESTORING.get():
        raise CheckpointError(
            f"This checkpoint is extended by method {method.name!r}, which transformers cannot compute from a config. "
            f"Load it with ctxext.load(path)."
        )
    with torch.device("cpu"):  # real numbers, even if the model is built on another device or on meta
        frequencies = method.frequencies(rope, rope.trained_length if seq_len is None else int(seq_len))
    place = torch.get_default_device() if device is None else device
    scale = float(frequencies.attention_scale * rope.attention_scale)
    return frequencies.inv_freq.to(device=place, dtype=torch.float32), scale


def no_rotation(
    config: Any, device: torch.device | None = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """Return zero frequencies for the rope type ``ctxext_unrotated``: cos is 1 and sin is 0 everywhere."""
    if not RESTORING.get():
        raise CheckpointError(
            "This checkpoint has no rotary positions any more, and its attention needs ctxext. Load it with "
            "ctxext.load(path)."
        )
    parameters = config.rope_parameters[layer_type] if layer_type is not None else config.rope_parameters
    width = int(heads_of(config)[2] * parameters.get("partial_rotary_factor", 1.0))
    return torch.zeros(width // 2, device=device), 1.0
