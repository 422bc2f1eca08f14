"""Latent attention: only a part of each head rotates, and a temperature must reach the rest of the score too."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from ctxext.architectures._plan import checked_lengths, make_plan
from ctxext.architectures._sites import LatentSpec, Site, merged, rotaries
from ctxext.architectures._twins import changed_scalars, meta_twin, round_trip
from ctxext.errors import IncompatibleError
from ctxext.methods import RopeMethod
from ctxext.spec import RopeSpec

__all__ = ["for_scores"]

Specs = dict[str | None, RopeSpec]


def for_scores(
    model: PreTrainedModel, method: RopeMethod, sites: list[Site], specs: Specs, windows: dict[str, Any]
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


def _score_factor(model: PreTrainedModel, config: Any, sites: list[Site]) -> float:
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
