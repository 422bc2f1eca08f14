"""Latent attention: only a part of each head rotates, and a temperature must reach the rest of the score too."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedModel

from ctxext.architectures._plan import make_plan
from ctxext.architectures._sites import Site, rotaries
from ctxext.architectures._twins import changed_scalars, meta_twin, round_trip
from ctxext.errors import IncompatibleError
from ctxext.methods import RopeMethod
from ctxext.spec import RopeSpec

__all__ = ["for_scores"]


def for_scores(
    model: PreTrainedModel,
    method: RopeMethod,
    sites: list[Site],
    specs: dict[str | None, RopeSpec],
    windows: dict[str, Any],
) -> RopeMethod:
    """The method in the form that this model applies to whole attention scores, where it has one.

    A temperature on cos and sin reaches only what rotates. Models with latent attention can scale the whole score
    instead, by a number that they compute from their config when they are built. The method's other form is taken
    only if stock code, building the model from it, really puts on the scores what is missing on cos and sin.
    """
    adapted = method.for_latent_attention()
    if adapted == method or not hasattr(model.config.get_text_config(decoder=True), "qk_rope_head_dim"):
        return method
    try:
        plan = make_plan(model, adapted, sites, specs, windows)
    except IncompatibleError:
        return method  # the plan for the method itself says why, if that one does not exist either
    old, new = meta_twin(model, round_trip(model.config, {})), meta_twin(model, plan.config)
    spec = next(iter(specs.values()))
    scale, adapted_scale = (form.frequencies(spec, spec.trained_length).attention_scale for form in (method, adapted))
    expected = (scale / adapted_scale) ** 2
    rotary_paths = {path for path, _ in rotaries(model)}
    before = dict(old.named_modules())
    for path, name, value in changed_scalars(old, new):
        was = getattr(before[path], name)
        is_scale = path not in rotary_paths and isinstance(value, float) and isinstance(was, float)
        if is_scale and math.isclose(value, was * expected, rel_tol=1e-6):
            return adapted
    return method
