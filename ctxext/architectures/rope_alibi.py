"""Replace rotation by ALiBi on a model that was trained with rotation."""

from __future__ import annotations

import copy
from typing import Any

from ctxext.architectures.alibi import refuse_halves
from ctxext.errors import IncompatibleError, InvalidParameterError, VerificationError
from ctxext.methods import BiasMethod, Method
from ctxext.spec import AlibiSpec, Extension, Request
from ctxext.surgery.alibi import AlibiAttend, bias_fingerprint
from ctxext.surgery.attend import Backends, install_attention, try_install, why_no_custom_attention
from ctxext.surgery.config import CHUNKED, REFUSALS, window_fields, window_note
from ctxext.surgery.edits import Edits
from ctxext.surgery.probe import Layers
from ctxext.surgery.rebuild import Rebuild
from ctxext.surgery.rotary import PinnedApply, RotaryPlace
from ctxext.surgery.stored_form import UNROTATED_NAME, unrotated_rope_parameters, with_base
from ctxext.surgery.subject import Subject

BOTH_WAYS = {
    False: "Its tokens see both ways: the score falls equally with distance to both sides.",
    True: "Its tokens see both ways: half of the heads see earlier tokens, the other half later ones.",
}
NOTE = "ALiBi has replaced rotation, and the weights were not trained with it. Train the model before use."


def replace_rotation(
    subject: Subject,
    method: BiasMethod,
    request: Request,
    places: list[RotaryPlace],
    layers: Layers,
    trained_length: int,
    edits: Edits,
) -> Extension:
    """Replace rotary positions by ``method``'s bias.

    Raises:
        IncompatibleError: if ctxext's attention cannot replace that of the model.
    """
    text = subject.text
    refusal = f"Method {method.name!r} cannot replace the rotation of this {text.model_type}"
    if reason := why_no_custom_attention(subject, places, layers):
        raise IncompatibleError(f"{refusal}: {reason}.")
    if getattr(method, "bias", "exact") != "exact":
        raise InvalidParameterError(
            "bias='stock' reproduces BLOOM's rounding, which a rotary model lacks. Leave bias out."
        )
    place, target = places[0], method.target_length(trained_length)
    rebuild = unrotated(subject, method, place, target, window_fields(text, request.sliding_window, target))
    trial = try_install(rebuild, place)
    if trial.failure:
        raise IncompatibleError(f"{refusal}: {trial.failure}.")
    if not trial.sees_both_ways:
        refuse_halves(text.model_type, method)
    original = {name: copy.deepcopy(getattr(text, name)) for name in rebuild.fields}
    rebuild.apply(edits)
    rotary = subject.model.get_submodule(place.path)
    edits.set(rotary, "_apply", PinnedApply(rotary))
    alibi = AlibiSpec(num_heads=text.num_attention_heads, trained_length=trained_length)
    attend = AlibiAttend(method, alibi, Backends(request.attention or "auto"))
    install_attention(subject, place, attend, edits, trial.crossing)
    if not rotary.inv_freq.is_meta and bool(rotary.inv_freq.any()):
        raise VerificationError(f"{type(rotary).__name__} still rotates after patching.")
    window = window_note(text, target)
    ways = [BOTH_WAYS[method.splits_heads]] if trial.sees_both_ways else []
    return Extension(
        trained_length=trained_length,
        target_length=target,
        stored_as=f"rope_type {UNROTATED_NAME!r}, which only ctxext loads",
        stock=False,
        fingerprint=bias_fingerprint(method, alibi),
        notes=(NOTE, *ways, *attend.backends.notes(), *([window] if window else [])),
        sliding_window=request.sliding_window,
        scaling=request.scaling,
        attention=request.attention or "auto",
        original=original,
    )


def unrotated(subject: Subject, method: Method, place: RotaryPlace, target: int, windows: dict[str, Any]) -> Rebuild:
    """Return the rebuilt model without rotation."""
    text = subject.text
    form = unrotated_rope_parameters(method, float(place.rope_dict(text)["rope_theta"]))
    refusal: Exception | None = None
    for candidate in (form, with_base(form)):
        fields = {"rope_parameters": place.rescaled(text.rope_parameters, candidate), "max_position_embeddings": target}
        foreign = {CHUNKED: None} if getattr(text, CHUNKED, None) else {}
        try:
            return Rebuild(subject, fields | windows | foreign)
        except REFUSALS as error:
            refusal = refusal or error
    raise IncompatibleError(
        f"Method {method.name!r} cannot be stored: the config of this {text.model_type} does not accept rope_type "
        f"{UNROTATED_NAME!r} ({refusal})"
    ) from refusal
