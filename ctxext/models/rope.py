"""All models with rotary positions, found by structure: single, per layer type, partial, interleaved, MLA, mRoPE."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from typing import Any

import torch

from ctxext.core.architecture import Architecture, refuse_choices, required_length
from ctxext.core.edits import Edits
from ctxext.core.override import PinnedApply
from ctxext.core.rebuild import Rebuild
from ctxext.core.saved import guarded_field
from ctxext.core.scaling import Scaling, of_layers, scaling_of, stated_window
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, VerificationError
from ctxext.files import JsonObject
from ctxext.methods import BiasMethod, Method, RopeMethod
from ctxext.methods.encoding import EncodingMethod
from ctxext.methods.remap import RemapMethod
from ctxext.models.windows import window_fields, window_note
from ctxext.probe.layers import Layers
from ctxext.rope_types import GUARD
from ctxext.rotary.sites import (
    UNSEEN,
    LatentSpec,
    ProportionalSpec,
    RotarySite,
    find_sites,
    require_as_configured,
    survey,
)
from ctxext.rotary.stored_form import StoredForm, checked_lengths, find_stored_form
from ctxext.spec import Extension, ExtensionArguments, RopeSpec


class Rope(Architecture):
    """Rotary models, whose facts are read from modules and proven on a rebuild, never from a list of names."""

    name = "rope"
    positions = "rotary"

    def matches(self, subject: Subject) -> bool:
        # Falcon builds its rotary module also for the checkpoints that were trained with ALiBi.
        has_alibi = any(getattr(module, "use_alibi", False) for module in subject.model.modules())
        return bool(subject.rotaries) and not has_alibi

    def apply(self, subject: Subject, method: Method, request: ExtensionArguments, edits: Edits) -> Extension:
        text = subject.text
        places, layers = survey(subject)
        trained_length = required_length(subject, request)
        require_as_configured(subject, places, trained_length)
        if not isinstance(method, RopeMethod):
            if isinstance(method, BiasMethod | EncodingMethod):
                from ctxext.models.rope_replaced import replace_rotation

                return replace_rotation(subject, method, request, places, layers, edits)
            raise IncompatibleError(
                f"This {subject.kind} has rotations, which method {method.name!r} does not extend. "
                f"Take a method for rotations, such as yarn or self_extend."
            )
        if not isinstance(method, RemapMethod):
            way = "Choose its kernel with model.set_attn_implementation(...)"
            refuse_choices(request, ("attention",), f"method {method.name!r} leaves attention to the model. {way}")
        scaling = scaling_of(subject.config)
        sites = find_sites(subject, trained_length, scaled=request.scaling == "extend", places=places)
        if layers.both_ways:
            _require_order(subject, method, sites[0].spec)
        windows = _windows(subject, method, request, trained_length)
        if isinstance(method, RemapMethod):
            from ctxext.attention.remapped_layers import install_pieces, require_remappable

            sites = [_as_it_rotates(subject, site, request) for site in sites]
            require_remappable(subject, method, sites[0], places, layers)
        before = {}
        if method.dynamic:
            # Texts inside the trained window keep the live frequencies bit for bit; the formula may round some to a
            # neighbour.
            before = {(s.path, s.layer_type): _as_it_rotates(subject, s, request).spec.inv_freq or () for s in sites}
        find = find_stored_form
        if hasattr(text, "qk_rope_head_dim"):
            from ctxext.models.latent import score_form as find
        form = find(subject, method, sites, windows)
        original = {name: copy.deepcopy(getattr(text, name)) for name in form.rebuild.fields}
        # Everything above may refuse the model; the first edit is here.
        form.rebuild.apply(edits)
        for path in dict.fromkeys(site.path for site in form.sites):
            rotary = subject.model.get_submodule(path)
            # model.bfloat16() would round the frequencies too: 0.7 rad of phase error at position 4096.
            edits.set(rotary, "_apply", PinnedApply(rotary))
        if method.dynamic:
            from ctxext.caches.dynamic import follow_length

            follow_length(subject, form, before, edits)
        _prove(subject, form)
        attention, notes = request.attention, _notes(text, form, layers)
        if isinstance(method, RemapMethod):
            attention = attention or "auto"
            notes = (*install_pieces(subject, method, sites[0], layers, form.rebuild, attention, edits), *notes)
        if scaling is not None:
            notes = (_scaling_note(scaling, request, form.sites[0].spec), *notes)
        if form.is_guarded_elsewhere:
            # The stored rope dict is that of the plain model, so an invalid value of another field has to stop programs
            # without ctxext.
            field = guarded_field(subject, "would load it without the extension")
            original[field] = getattr(subject.config, field)
            edits.set_unchecked(subject.config, field, GUARD)
        return Extension(
            trained_length=trained_length,
            target_length=form.method.target_length(trained_length),
            stored_as=form.stored_as,
            stock=form.stock,
            fingerprint=fingerprint(form.method, form.sites[0].spec),
            notes=notes,
            sliding_window=request.sliding_window,
            scaling=request.scaling,
            attention=attention,
            original=original,
        )

    def refuse_arguments(self, subject: Subject, method: Method, request: ExtensionArguments) -> None:
        if request.trained_length is not None and isinstance(method, RemapMethod):
            from ctxext.attention.attend import Backends, refuse_shared_heads

            refuse_shared_heads(subject, method)
            Backends(request.attention or "auto")
            _windows(subject, method, request, request.trained_length)

    def revert(self, subject: Subject, original: JsonObject, edits: Edits) -> None:
        Rebuild(subject, original).apply(edits)


def _windows(subject: Subject, method: Method, request: ExtensionArguments, trained_length: int) -> JsonObject:
    """Return the config fields that the choice for sliding windows changes, or refuse that."""
    text = subject.text
    if request.sliding_window is None and stated_window(text) is None:
        return {}
    return window_fields(text, request.sliding_window, method.target_length(trained_length))


def _as_it_rotates(subject: Subject, site: RotarySite, request: ExtensionArguments) -> RotarySite:
    """Return the site with the exact float32 frequencies of its module, so that unchanged distances keep every bit.

    A spec without frequencies means the powers of its base, which transformers computes in float32. The config that
    they are computed from still has a scaling that is replaced.
    """
    if site.spec.inv_freq is not None:
        return site
    fields: JsonObject = {}
    if request.scaling == "replace":
        plain = {"rope_type": "default", "rope_theta": site.spec.base}
        fields["rope_parameters"] = site.rescaled(subject.text.rope_parameters, plain)
    inv_freq = getattr(Rebuild(subject, fields).rotary(site.path), f"{site.prefix}inv_freq")
    return replace(site, spec=replace(site.spec, inv_freq=tuple(inv_freq.double().tolist())))


def _require_order(subject: Subject, method: RopeMethod, spec: RopeSpec) -> None:
    """Refuse to take all positions from a model that reads both ways."""
    if not method.frequencies(spec, method.target_length(spec.trained_length)).inv_freq.any():
        raise IncompatibleError(
            f"Method {method.name!r} removes all positions, but this {subject.text.model_type} reads both ways. "
            f"Without a causal mask it could not tell the order of tokens, even after training. Keep its rotation "
            f"(yarn, ntk, pi)."
        )


def fingerprint(method: RopeMethod, spec: RopeSpec) -> str:
    """Return 12 hexadecimal digits of a hash of the frequencies at the target length."""
    target = method.target_length(spec.trained_length)
    frequencies = method.frequencies(spec, target)
    parts = [repr(round(frequencies.attention_scale * spec.attention_scale, 9))]
    parts += map(repr, method.parts(spec, target)) if isinstance(method, RemapMethod) else []
    whole = frequencies.inv_freq.float().numpy().tobytes() + "".join(parts).encode()
    return hashlib.sha256(whole).hexdigest()[:12]


def _prove(subject: Subject, form: StoredForm) -> None:
    """Compare the live cos and sin with the method's own mathematics."""
    method = form.method
    for site in form.sites:
        rotary = subject.model.get_submodule(site.path)
        buffer = getattr(rotary, f"{site.prefix}inv_freq")
        if buffer.is_meta:
            continue
        problem = site.disagreement(rotary, site.mathematics(method), checked_lengths(method, site.spec))
        if problem or buffer.dtype != torch.float32:
            raise VerificationError(
                f"The patched {type(rotary).__name__} does not compute {method.name!r}: {problem or buffer.dtype}"
            )


def _scaling_note(scaling: Scaling, request: ExtensionArguments, spec: RopeSpec) -> str:
    if request.scaling == "replace":
        return f"The extension replaces the scaling that this checkpoint had ({scaling})."
    if spec.inv_freq is None:
        return f"The extension replaces its scaling ({scaling}), which leaves {spec.trained_length} tokens as they are."
    note = f"Extends the frequencies that its scaling ({scaling}) gives a text of {spec.trained_length} tokens."
    if scaling.rope_type == "longrope" and scaling.has_two_sets:
        note += f" Texts of up to {scaling.original} tokens, which had other frequencies, get these too."
    return note


def _notes(text: Any, form: StoredForm, layers: Layers) -> tuple[str, ...]:
    """Return the notes for a user of the model, one or two sentences each."""
    method, sites, spec, notes = form.method, form.sites, form.sites[0].spec, []
    frequencies = method.frequencies(spec, method.target_length(spec.trained_length))
    if not frequencies.inv_freq.any():
        notes.append(
            f"Rotation is gone, and the weights were not trained without it. The model is useless until it is trained "
            f"at its old length of {spec.trained_length} tokens; after that it reads further."
        )
    if isinstance(spec, LatentSpec) or (getattr(method, "mscale_all_dim", None) and hasattr(text, "qk_rope_head_dim")):
        notes.append(
            "The temperature multiplies whole attention scores (mscale_all_dim), as in DeepSeek's checkpoints. On cos "
            "and sin it would reach only the rotated part of each head."
        )
    elif frequencies.attention_scale != 1:
        # A factor on cos and sin misses the dimensions of a head that do not rotate, unlike the paper's.
        head_dim = max(width or text.hidden_size // text.num_attention_heads for width in of_layers(text, "head_dim"))
        if hasattr(text, "qk_rope_head_dim") and hasattr(text, "qk_nope_head_dim"):
            head_dim = text.qk_rope_head_dim + text.qk_nope_head_dim
        if spec.rotary_dim < head_dim:
            notes.append(
                f"The temperature reaches the {spec.rotary_dim} rotated dimensions of each head, as in transformers, "
                f"and not the other {head_dim - spec.rotary_dim}. In the paper it divides the whole score."
            )
    if isinstance(spec, ProportionalSpec):
        notes.append(
            f"Only the {spec.rotated} fastest of {spec.rotary_dim // 2} pairs of dimensions rotate, so another base "
            f"stretches the slowest rotating pair by less than the factor."
        )
    if method.dynamic:
        notes.append(_growth_note(getattr(method, "growth", "")))
        if form.stock:
            notes.append(
                f"Plain transformers loads it, but mixes positions: all rows of a batch get those of the longest, and "
                f"stale caches are not recomputed. Beyond {spec.trained_length} tokens in a text or its batch, its "
                f"logits and generate() differ from these. ctxext.load gives these."
            )
    if sites[0].layer_type is not None:
        kinds = ", ".join(sorted({str(site.layer_type) for site in sites}))
        notes.append(f"Positions differ by layer type; extended: {kinds}.")
    window = None if stated_window(text) is None else window_note(text, method.target_length(spec.trained_length))
    notes += [window] if window else []
    if layers.failure:
        notes.append(
            f"ctxext cannot tell which layers rotate: {UNSEEN.format(layers.failure)} The config names no layers "
            f"with a window beside others, so all are taken to be alike."
        )
    return tuple(notes)


def _growth_note(growth: str) -> str:
    if growth == "request":
        return (
            "Positions follow the length that each row may reach. generate() takes prompt + max_new_tokens and "
            "recomputes nothing while it decodes. Other calls count their own tokens, or ctxext_length=<tokens>."
        )
    often = "at every token beyond the trained window" if growth == "exact" else "when it must"
    return (
        f"Positions follow the length of each sequence. generate() recomputes its cache {often}, so that it equals "
        f"decoding without one. Other code that passes a stale cache gets an error."
    )
