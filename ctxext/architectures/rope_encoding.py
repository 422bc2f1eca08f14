"""Encodings on a model that was trained with rotation: rotate by nothing, and let a new module tell the order."""

from __future__ import annotations

import copy

from ctxext.architectures.rope_alibi import unrotated
from ctxext.errors import IncompatibleError, VerificationError
from ctxext.methods.encoding import EncodingMethod
from ctxext.spec import Extension, Request
from ctxext.surgery.attend import Backends, try_install, why_no_custom_attention
from ctxext.surgery.config import window_fields, window_note
from ctxext.surgery.edits import Edits
from ctxext.surgery.encodings import encoding_fingerprint, install_encoding, spec_of, why_not_run
from ctxext.surgery.probe import Layers
from ctxext.surgery.rotary import PinnedApply, RotaryPlace
from ctxext.surgery.stored_form import UNROTATED_NAME
from ctxext.surgery.subject import Subject

NOTE = "Rotation is gone and {name} took its place: the weights do not know it yet. Train before use."
NEW = "Its {count:,} new weights ({where}) are in state_dict under ctxext_encoding, and are trained with the others."


def replace_by_encoding(
    subject: Subject,
    method: EncodingMethod,
    request: Request,
    places: list[RotaryPlace],
    layers: Layers,
    trained_length: int,
    edits: Edits,
) -> Extension:
    """Replace rotary positions by ``method``'s encoding.

    Raises:
        IncompatibleError: if ctxext's attention cannot take the place of the model's own.
    """
    text = subject.text
    refusal = f"Method {method.name!r} cannot replace the rotation of this {text.model_type}"
    if reason := why_no_custom_attention(subject, places, layers):
        raise IncompatibleError(f"{refusal}: {reason}.")
    place, target = places[0], method.target_length(trained_length)
    rebuild = unrotated(subject, method, place, target, window_fields(text, request.sliding_window, target))
    tried = try_install(rebuild, place)
    if tried.failure or tried.crossing:
        raise IncompatibleError(f"{refusal}: {tried.failure or 'its layers attend to the text of an encoder too'}.")
    if tried.sees_both_ways:
        raise IncompatibleError(f"{refusal}: its tokens see both ways, and this encoding knows the past alone.")
    spec, backends = spec_of(subject, trained_length), Backends(request.attention or "auto")
    if reason := why_not_run(rebuild, place, method, spec):
        raise IncompatibleError(f"{refusal}: {reason}.")
    original = {name: copy.deepcopy(getattr(text, name)) for name in rebuild.fields}
    rebuild.apply(edits)
    rotary = subject.model.get_submodule(place.path)
    edits.set(rotary, "_apply", PinnedApply(rotary))
    count = install_encoding(subject, place, method, spec, backends, edits)
    if not rotary.inv_freq.is_meta and bool(rotary.inv_freq.any()):
        raise VerificationError(f"{type(rotary).__name__} still rotates after patching.")
    where = "shared by all layers" if method.shared else "each layer has its own"
    notes = [NOTE.format(name=method.name), *([NEW.format(count=count, where=where)] if count else [])]
    window = window_note(text, target)
    return Extension(
        trained_length=trained_length,
        target_length=target,
        stored_as=f"rope_type {UNROTATED_NAME!r}, which only ctxext loads",
        stock=False,
        fingerprint=encoding_fingerprint(method, spec),
        notes=(*notes, *backends.notes(), *([window] if window else [])),
        sliding_window=request.sliding_window,
        scaling=request.scaling,
        attention=request.attention or "auto",
        original=original,
    )
