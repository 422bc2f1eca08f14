"""ALiBi on a model that was trained with rotation: rotate by nothing, and let distance speak."""

from __future__ import annotations

import copy
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError, InvalidParameterError, VerificationError
from ctxext.methods import BiasMethod
from ctxext.spec import AlibiSpec, Extension, Request
from ctxext.surgery.alibi import AlibiAttend, bias_fingerprint, why_not_ours, why_wiring_fails, wire
from ctxext.surgery.edits import Edits
from ctxext.surgery.generation import recompute_in_generate
from ctxext.surgery.override import follow_replicas
from ctxext.surgery.probe import Layers
from ctxext.surgery.rebuild import carry_over, round_trip
from ctxext.surgery.rope_types import UNROTATED_TYPE, restoring
from ctxext.surgery.rotary import PinnedApply, RotarySite
from ctxext.surgery.stored_form import merged
from ctxext.surgery.windows import window_fields, window_note

__all__ = ["retrofit"]

NOTE = "Rotation is gone and ALiBi took its place: the weights do not know it yet. Train before use."


def retrofit(
    model: PreTrainedModel,
    method: BiasMethod,
    request: Request,
    sites: list[RotarySite],
    layers: Layers,
    trained_length: int,
    edits: Edits,
) -> Extension:
    """Replace rotary positions by ``method``'s bias.

    Raises:
        IncompatibleError: if ctxext's attention cannot take the place of the model's own.
    """
    text = model.config.get_text_config(decoder=True)
    reason = why_not_ours(model, text, sites, layers)
    if reason:
        raise IncompatibleError(_refusal(method, text, reason))
    if getattr(method, "bias", "exact") != "exact":
        raise InvalidParameterError("bias='stock' reproduces BLOOM's rounding; a rotary model has none to reproduce.")
    site, target = sites[0], method.target_length(trained_length)
    base = text.rope_parameters["rope_theta"]
    rope = merged(text, None, {"rope_type": UNROTATED_TYPE, "rope_theta": base, "ctxext": method.to_dict()})
    fields = {"rope_parameters": rope, "max_position_embeddings": target}
    fields |= window_fields(text, request, target)
    original = {name: copy.deepcopy(getattr(text, name)) for name in fields}
    alibi = AlibiSpec(num_heads=text.num_attention_heads, trained_length=trained_length)
    with restoring():
        try:
            config = round_trip(model.config, fields)
        except (AttributeError, KeyError, ValueError, TypeError, StrictDataclassError) as error:
            raise IncompatibleError(
                f"Method {method.name!r} cannot be stored: the config of this {text.model_type} does not accept "
                f"rope_type {UNROTATED_TYPE!r} ({error})"
            ) from error
        reason = why_wiring_fails(model, config, site)
        if reason:
            raise IncompatibleError(_refusal(method, text, reason))
        carry_over(model, config, fields, edits)
    rotary = model.get_submodule(site.path)
    edits.set(rotary, "_apply", PinnedApply(rotary))
    attend = AlibiAttend(method, alibi, request.attention or "auto")
    wire(model, text, site, attend, edits)
    if method.dynamic:
        recompute_in_generate(model, method, trained_length, edits)
    follow_replicas(model.modules(), edits)
    if not rotary.inv_freq.is_meta and bool(rotary.inv_freq.any()):
        raise VerificationError(f"{type(rotary).__name__} still rotates after patching.")
    window = window_note(text, target)
    return Extension(
        trained_length=trained_length,
        target_length=target,
        stored_as=f"rope_type {UNROTATED_TYPE!r}, which only ctxext loads",
        stock=False,
        fingerprint=bias_fingerprint(method, alibi),
        notes=(NOTE, *attend.notes(), *([window] if window else [])),
        sliding_window=request.sliding_window,
        scaling=request.scaling,
        attention=request.attention or "auto",
        original=original,
    )


def _refusal(method: BiasMethod, text: Any, reason: str) -> str:
    return f"Method {method.name!r} cannot replace the rotation of this {text.model_type}: {reason}."
