"""Find a saved form of the method that stock transformers rebuilds into what the method says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError
from ctxext.methods import RopeMethod
from ctxext.methods.formulas import as_longrope
from ctxext.spec import RopeSpec
from ctxext.surgery.lengths import max_length_of
from ctxext.surgery.old_form import REFUSALS
from ctxext.surgery.published import without_foreign
from ctxext.surgery.rebuild import Rebuild, rotaries
from ctxext.surgery.rope_types import ROPE_NAME, ROPE_TYPE, method_rope_parameters, with_base
from ctxext.surgery.rotary import LatentSpec, ProportionalSpec, RotarySite, disagreement
from ctxext.surgery.texts import text_of


@dataclass(frozen=True)
class StoredForm:
    """A proven way to write a method into the config, before anything is edited.

    Args:
        method: the method, in the form that is stored.
        sites: the frequencies that it extends, at least one.
        rebuild: the model that transformers builds from the config with the method in it.
        stored_as: how the config says it, in a few words.
    """

    method: RopeMethod
    sites: Sequence[RotarySite]
    rebuild: Rebuild
    stored_as: str

    @property
    def spec(self) -> RopeSpec:
        """What the method starts from, in the first place; the other places have the same lengths."""
        return self.sites[0].spec

    @property
    def stock(self) -> bool:
        """Whether stock transformers computes the frequencies of every site by itself."""
        return all(self.rope_type(site) != ROPE_TYPE for site in self.sites)

    def rope_type(self, site: RotarySite) -> str:
        """The name under which the config stores the frequencies of one site."""
        return str(site.rope_dict(self.rebuild.text)["rope_type"])


def find_stored_form(
    model: PreTrainedModel, method: RopeMethod, sites: Sequence[RotarySite], windows: dict[str, Any]
) -> StoredForm:
    """Find the first saved form that stock transformers rebuilds into what the method says.

    Args:
        model: the live model; it is not touched.
        method: the extension.
        sites: the frequencies that it extends.
        windows: other fields of the config that change with it.

    Raises:
        IncompatibleError: if there is none, with what was tried.
    """
    text, reasons = text_of(model.config), []
    for stored_as, forms in _forms(method, sites):
        try:
            rebuild = Rebuild(model, _fields(text, method, sites, forms, windows))
        except REFUSALS as error:
            said = str(error.__cause__ or error).strip()
            reasons.append(f"{stored_as}: its config does not accept it ({said})")
            continue
        found = StoredForm(method, sites, rebuild, stored_as)
        problem = _rebuilt_wrong(found)
        if problem is None:
            return found
        reasons.append(f"{stored_as}: a reload would not give the same model ({problem})")
    if not reasons:
        raise IncompatibleError(
            f"Method {method.name!r} cannot be stored in the config of this {text.model_type}: its frequencies are "
            f"'proportional', which take a factor (pi) or another base (ntk, abf) and nothing else."
        )
    tried = "; ".join(dict.fromkeys(reasons))
    raise IncompatibleError(
        f"Method {method.name!r} cannot be stored in the config of this {text.model_type}. Tried {tried}"
    )


Form = dict[str, Any]


def _fields(
    text: Any, method: RopeMethod, sites: Sequence[RotarySite], forms: Sequence[Form], windows: dict[str, Any]
) -> dict[str, Any]:
    """All fields of a text config that store the method as one form for each site."""
    rope, trained_length = dict(text.rope_parameters), sites[0].spec.trained_length
    for site, form in zip(sites, forms, strict=True):
        rope = site.rescaled(rope, _on_scores(site.spec, form))
    fields = {"rope_parameters": rope, **windows, **_implied_head_dim(text), **without_foreign(text)}
    # Stock code measures the stretch of its dynamic type from this field, so it must keep the trained length.
    is_stock_dynamic = any(form["rope_type"] == "dynamic" for form in forms)
    if hasattr(text, "max_position_embeddings"):
        reach = trained_length if is_stock_dynamic else method.target_length(trained_length)
        fields["max_position_embeddings"] = reach
        if max_length_of(text) is not None:
            fields["model_max_length"] = reach
    if hasattr(text, "original_max_position_embeddings"):
        fields["original_max_position_embeddings"] = trained_length
    return fields


def _implied_head_dim(text: Any) -> dict[str, Any]:
    """The size of a head, where a config has the field and leaves it empty (Mixtral-8x7B as it is published).

    Stock code then takes this quotient for plain positions, but multiplies by the empty field for yarn and longrope.
    """
    declared = {field.name for field in dataclasses.fields(text)} if dataclasses.is_dataclass(text) else set()
    if "head_dim" not in declared | vars(text).keys() or vars(text).get("head_dim") is not None:
        return {}
    return {"head_dim": text.hidden_size // text.num_attention_heads}


def _forms(method: RopeMethod, sites: Sequence[RotarySite]) -> Iterator[tuple[str, list[Form]]]:
    """Saved forms of the method, one for each site, best first: its own stock form, stock longrope factors, ours."""
    specs = [site.spec for site in sites]
    is_scaled = any(spec.inv_freq is not None for spec in specs)
    # A method's own stock form starts from plain frequencies, and from nothing else.
    stock = [] if is_scaled else [method.rope_parameters(spec) for spec in specs]
    found = [form for form in stock if form is not None]
    is_stock = len(found) == len(specs)
    if any(isinstance(spec, ProportionalSpec) for spec in specs):
        if is_stock and {form["rope_type"] for form in found} <= {"linear", "default"}:
            forms = [
                form | ({"rope_type": "proportional"} if isinstance(spec, ProportionalSpec) else {})
                for spec, form in zip(specs, found, strict=True)
            ]
            yield "stock rope_type 'proportional' with a factor or another rope_theta", forms
        return
    if is_stock:
        name = found[0]["rope_type"]
        changed = " with another rope_theta" if name == "default" else ""
        yield f"stock rope_type {name!r}{changed}", found
    if not method.is_table:
        if not found:
            ours = [method_rope_parameters(method, spec) for spec in specs]
            said = f"rope_type {ROPE_NAME!r}, which only ctxext loads"
            yield said, ours
            yield said, [with_base(form) for form in ours]
        return
    tables = [
        as_longrope(site.spec, site.mathematics(method)(site.spec.trained_length), method.factor) for site in sites
    ]
    lines = [line for line in map(_as_linear, tables) if line is not None]
    if is_scaled and len(lines) == len(tables):
        yield "stock rope_type 'linear'", lines
    yield "stock rope_type 'longrope' holding the frequencies themselves", tables


def _on_scores(spec: RopeSpec, form: Form) -> Form:
    """A saved form whose temperature multiplies whole scores, where the spec asks for that."""
    if not isinstance(spec, LatentSpec) or form.get("factor", 1) == 1:  # without a factor there is no such number
        return form
    new = form | {"mscale_all_dim": (spec.temperature - 1) / (0.1 * math.log(form["factor"]))}
    return new | {"attention_factor": spec.attention_scale} if form["rope_type"] in ("yarn", "longrope") else new


def _as_linear(form: Form) -> Form | None:
    """A table of factors in the form that all runtimes read, if they are one and the same."""
    factors = form["long_factor"]
    # The frequencies that a checkpoint was trained with are float32: seven digits are theirs.
    if form["attention_factor"] != 1 or max(factors) > min(factors) * (1 + 1e-6):
        return None
    return {"rope_type": "linear", "rope_theta": form["rope_theta"], "factor": float(f"{factors[0]:.7g}")}


def checked_lengths(method: RopeMethod, spec: RopeSpec) -> list[int]:
    """Lengths at which the method is checked; the last is where the model is meant to reach."""
    target = max(method.target_length(spec.trained_length), spec.trained_length + 1)
    return [spec.trained_length, spec.trained_length + 1, target] if method.dynamic else [target]


def _rebuilt_wrong(form: StoredForm) -> str | None:
    """What is wrong with the rotary modules that stock transformers builds from a form; None where nothing is."""
    for site in form.sites:
        try:
            rotary = form.rebuild.rotary(site.path)
        except REFUSALS as error:
            name = type(form.rebuild.model.get_submodule(site.path)).__name__
            return f"{name} does not build: {type(error).__name__}: {error}"
        lengths = checked_lengths(form.method, site.spec)
        if form.rope_type(site) == ROPE_TYPE and form.method.dynamic:
            lengths = lengths[:1]  # the rest is DynamicForward's
        lengths = [*lengths, lengths[-1]]  # stock longrope keeps its long frequencies: what it does next must hold too
        try:
            problem = disagreement(site.output(rotary), site.mathematics(form.method), lengths)
        except IncompatibleError as error:  # for one, transformers 5.17, longrope per layer type, second long text
            return str(error)
        if problem:
            return problem
    return None


def score_form(
    model: PreTrainedModel, method: RopeMethod, sites: Sequence[RotarySite], windows: dict[str, Any]
) -> StoredForm:
    """The stored form that puts the method's temperature on whole attention scores, where this model can do that.

    A temperature on cos and sin reaches only what rotates. Models with latent attention can scale the whole score
    instead, by a number that they compute from their config when they are built. That form is taken only if stock
    code, building the model from it, really puts the temperature on the scores; else it is ``find_stored_form``'s.

    Raises:
        IncompatibleError: the temperature follows the length, or the one that the weights were trained with would be
            lost; both cannot be stored. Or there is no form at all.
    """
    text, spec = text_of(model.config), sites[0].spec
    if not hasattr(text, "qk_rope_head_dim"):
        return find_stored_form(model, method, sites, windows)
    scales = {method.frequencies(spec, length).attention_scale for length in checked_lengths(method, spec)}
    trained = _score_factor(Rebuild(model), sites) if spec.inv_freq is not None else 1.0
    if len(scales) > 1:
        raise IncompatibleError(
            f"The temperature of {method.name!r} follows the length of the text, but only a part of each head of this "
            f"{text.model_type} rotates and its whole scores are scaled by a constant. Take a method whose temperature "
            f"is fixed (yarn), or one without (dynamic_ntk)."
        )
    temperature = trained * scales.pop()
    if temperature == trained == 1:
        return find_stored_form(model, method, sites, windows)
    latent = [replace(site, spec=LatentSpec(**asdict(site.spec), temperature=temperature)) for site in sites]
    adapted = method.for_latent_attention()
    tries: list[tuple[RopeMethod, Sequence[RotarySite]]] = [(method, latent)]
    if adapted != method and trained == 1:
        tries.insert(0, (adapted, sites))
    for tried, at in tries:
        try:
            found = find_stored_form(model, tried, at, windows)
        except IncompatibleError:
            continue  # the search for the method itself says why, if that has no form either
        if math.isclose(_score_factor(found.rebuild, sites), temperature, rel_tol=1e-6):
            return found
    if trained != 1:
        raise IncompatibleError(
            f"The scores of this {text.model_type} were trained with a temperature of {trained:.4g}, which stock code "
            f"takes from the scaling that its config has now and which {method.name!r} (factor {method.factor:g}) "
            f"could not keep. Take another factor, or scaling='replace'."
        )
    return find_stored_form(model, method, sites, windows)


def _score_factor(built: Rebuild, sites: Sequence[RotarySite]) -> float:
    """What a model multiplies queries and keys by outside the rotation, as stock code builds it: 1 if plain."""
    text = text_of(built.model.config)
    rope = dict(text.rope_parameters)
    for site in sites:
        rope = site.rescaled(rope, {"rope_type": "default", "rope_theta": site.rope_dict(text)["rope_theta"]})
    plain = Rebuild(built.model, {"rope_parameters": rope})
    rotary_paths = {path for path, _ in rotaries(built.model)}
    found = set()
    for path, _, was, now in built.changes(plain):
        if path not in rotary_paths and isinstance(now, float) and isinstance(was, float) and was > 0 and now > 0:
            found.add(round(math.sqrt(now / was), 9))
    return found.pop() if len(found) == 1 else 1.0
