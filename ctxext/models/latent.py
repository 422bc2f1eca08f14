"""Store a temperature in the config of latent attention (DeepSeek), which scales whole attention scores by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

from ctxext.core.rebuild import Rebuild
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.files import JsonObject
from ctxext.methods import RopeMethod
from ctxext.rotary.sites import LatentSpec, RotarySite
from ctxext.rotary.stored_form import StoredForm, checked_lengths, find_stored_form


def score_form(subject: Subject, method: RopeMethod, sites: Sequence[RotarySite], windows: JsonObject) -> StoredForm:
    """Find the stored form that applies the method's temperature to the scores of latent attention, if the model can.

    A temperature on cos and sin affects the rotated part of a head only. Models with latent attention can scale the
    whole score instead, by a number that they compute from their config when they are built. Such a form counts only if
    a model that transformers builds from it scales its scores so; otherwise ``find_stored_form`` decides.

    Raises:
        IncompatibleError: if the temperature follows the length, if the temperature of the training would be lost, or
            if no form exists at all.
    """
    text, spec = subject.text, sites[0].spec
    scales = {method.frequencies(spec, length).attention_scale for length in checked_lengths(method, spec)}
    trained = _score_factor(Rebuild(subject), sites) if spec.inv_freq is not None else 1.0
    if len(scales) > 1:
        raise IncompatibleError(
            f"The temperature of {method.name!r} follows the length of the text, but this {text.model_type} scales its "
            f"attention scores by a constant. Take a method with a fixed temperature (yarn), or with none "
            f"(dynamic_ntk)."
        )
    temperature = trained * scales.pop()
    if temperature == trained == 1:
        return find_stored_form(subject, method, sites, windows)
    latent = [replace(site, spec=LatentSpec(**asdict(site.spec), temperature=temperature)) for site in sites]
    adapted = method.for_latent_attention()
    candidates: list[tuple[RopeMethod, Sequence[RotarySite]]] = [(method, latent)]
    if adapted != method and trained == 1:
        candidates.insert(0, (adapted, sites))
    for candidate, at_sites in candidates:
        try:
            form = find_stored_form(subject, candidate, at_sites, windows)
        except IncompatibleError:
            continue  # the last find_stored_form says why, if no form exists
        if math.isclose(_score_factor(form.rebuild, sites), temperature, rel_tol=1e-6):
            return form
    if trained != 1:
        raise IncompatibleError(
            f"Method {method.name!r} (factor {method.factor:g}) cannot keep the temperature {trained:.4g} of this "
            f"{text.model_type}. Its scores were trained with that number, which comes from the scaling of its config. "
            f"Take another factor, or scaling='replace' (--scaling replace)."
        )
    return find_stored_form(subject, method, sites, windows)


def _score_factor(built: Rebuild, sites: Sequence[RotarySite]) -> float:
    """Return the number by which a built model multiplies queries and keys outside the rotation; 1 if it does not."""
    text = built.subject.text
    rope = dict(text.rope_parameters)
    for site in sites:
        rope = site.rescaled(rope, {"rope_type": "default", "rope_theta": site.rope_dict(text)["rope_theta"]})
    plain = Rebuild(built.subject, {"rope_parameters": rope})
    rotary_paths = {path for path, _ in built.subject.rotaries}
    factors = {
        round(math.sqrt(new / old), 9)
        for path, _, old, new in built.changes(plain)
        if path not in rotary_paths and isinstance(new, float) and isinstance(old, float) and old > 0 and new > 0
    }
    return factors.pop() if len(factors) == 1 else 1.0
