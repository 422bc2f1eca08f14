"""Replace rotation, on a model that was trained with it, by ALiBi or by an encoding that has to be trained."""

from __future__ import annotations

import copy

from ctxext.attention.alibi import AlibiAttend, bias_fingerprint
from ctxext.attention.attend import (
    Backends,
    install_attention,
    refuse_shared_heads,
    require_float64,
    try_install,
    why_no_custom_attention,
)
from ctxext.attention.encodings import encoding_fingerprint, install_encoding, spec_of, why_not_run
from ctxext.core.architecture import required_length
from ctxext.core.edits import Edits
from ctxext.core.override import PinnedApply
from ctxext.core.rebuild import Rebuild
from ctxext.core.scaling import CHUNKED, REFUSALS, length_fields
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError, VerificationError
from ctxext.files import JsonObject
from ctxext.methods import BiasMethod
from ctxext.methods.encoding import EncodingMethod
from ctxext.models.alibi import refuse_halves
from ctxext.models.windows import window_fields, window_note
from ctxext.probe.layers import Layers
from ctxext.rope_types import UNROTATED_NAME
from ctxext.rotary.sites import RotaryPlace
from ctxext.rotary.stored_form import unrotated_rope_parameters, with_base
from ctxext.spec import AlibiSpec, Extension, ExtensionArguments

BOTH_WAYS = {
    False: "Its tokens see both ways: the score falls equally with distance to both sides.",
    True: "Its tokens see both ways: half of the heads see earlier tokens, the other half later ones.",
}
TRAIN_FIRST = "Train the model before use."
NOTE = f"{{name}} has replaced rotation, and the weights were not trained with it. {TRAIN_FIRST}"
NEW = "Its {count:,} new weights ({where}) are in state_dict under ctxext_encoding, and are trained with the others."


def replace_rotation(
    subject: Subject,
    method: BiasMethod | EncodingMethod,
    request: ExtensionArguments,
    places: list[RotaryPlace],
    layers: Layers,
    edits: Edits,
) -> Extension:
    """Replace rotary positions by the bias or the encoding of a method.

    Raises:
        IncompatibleError: if ctxext's attention cannot replace that of the model.
    """
    why = "brings new weights" if isinstance(method, EncodingMethod) else "tells heads apart"
    refuse_shared_heads(subject, method, why)
    trained_length = required_length(subject, request)
    text, place, target = subject.text, places[0], method.target_length(trained_length)
    refusal = f"Method {method.name!r} cannot replace the rotation of this {text.model_type}"
    if reason := why_no_custom_attention(subject, places, layers):
        raise IncompatibleError(f"{refusal}: {reason}.")
    if getattr(method, "bias", "exact") != "exact":
        raise InvalidParameterError(
            "bias='stock' reproduces BLOOM's rounding, which a rotary model lacks. Leave bias out."
        )
    # All refusals come before ``rebuild.apply``: they run on a rebuilt twin, and the live model is not touched yet.
    rebuild = _unrotated(subject, method, place, target, window_fields(text, request.sliding_window, target))
    trial, backends = try_install(rebuild, place), Backends(request.attention or "auto")
    if reason := trial.failure or trial.why_not_all:
        raise IncompatibleError(f"{refusal}: {reason}.")
    original = {name: copy.deepcopy(getattr(text, name)) for name in rebuild.fields}
    if isinstance(method, EncodingMethod):
        spec = spec_of(subject, trained_length)
        if trial.crossing:
            raise IncompatibleError(f"{refusal}: its layers attend to the text of an encoder too.")
        if trial.sees_both_ways:
            raise IncompatibleError(f"{refusal}: its tokens see both ways, and this encoding knows the past alone.")
        if reason := why_not_run(rebuild, place, method, spec):
            raise IncompatibleError(f"{refusal}: {reason}.")
    elif not trial.sees_both_ways:
        refuse_halves(text.model_type, method)
    rebuild.apply(edits)
    rotary = subject.model.get_submodule(place.path)
    edits.set(rotary, "_apply", PinnedApply(rotary))
    if isinstance(method, EncodingMethod):
        count = install_encoding(subject, place, method, spec, backends, edits)
        where = "shared by all layers" if method.shared else "each layer has its own"
        notes = [NOTE.format(name=method.name), *([NEW.format(count=count, where=where)] if count else [])]
        fingerprint = encoding_fingerprint(method, spec)
    else:
        require_float64(subject.model.device)
        alibi = AlibiSpec(num_heads=text.num_attention_heads, trained_length=trained_length)
        install_attention(subject, place, AlibiAttend(method, alibi, backends), edits, trial.crossing)
        notes = [NOTE.format(name="ALiBi"), *([BOTH_WAYS[method.splits_heads]] if trial.sees_both_ways else [])]
        fingerprint = bias_fingerprint(method, alibi)
    if not rotary.inv_freq.is_meta and bool(rotary.inv_freq.any()):
        raise VerificationError(f"{type(rotary).__name__} still rotates after patching.")
    window = window_note(text, target)
    return Extension(
        trained_length=trained_length,
        target_length=target,
        stored_as=f"rope_type {UNROTATED_NAME!r}, which only ctxext loads",
        stock=False,
        fingerprint=fingerprint,
        notes=(*notes, *([window] if window else [])),
        sliding_window=request.sliding_window,
        scaling=request.scaling,
        attention=request.attention or "auto",
        original=original,
    )


def _unrotated(
    subject: Subject, method: BiasMethod | EncodingMethod, place: RotaryPlace, target: int, windows: JsonObject
) -> Rebuild:
    """Return the rebuilt model without rotation."""
    text = subject.text
    form = unrotated_rope_parameters(method, float(place.rope_dict(text)["rope_theta"]))
    foreign = {CHUNKED: None} if getattr(text, CHUNKED, None) else {}
    refusal: Exception | None = None
    for candidate in (form, with_base(form)):
        fields = {"rope_parameters": place.rescaled(text.rope_parameters, candidate)} | length_fields(text, target)
        try:
            return Rebuild(subject, fields | windows | foreign)
        except REFUSALS as error:
            refusal = refusal or error
    raise IncompatibleError(
        f"Method {method.name!r} cannot be stored: the config of this {text.model_type} does not accept rope_type "
        f"{UNROTATED_NAME!r} ({refusal})"
    ) from refusal
