"""Every model with rotary positions, found by structure: single, per layer type, partial, interleaved, MLA, mRoPE."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ctxext._edits import Edits
from ctxext.architectures._dynamic import DynamicForward
from ctxext.architectures._hf import ROPE_TYPE, restoring
from ctxext.architectures._pin import PinnedApply
from ctxext.architectures._plan import Plan, checked_lengths, make_plan, mathematics
from ctxext.architectures._sites import Site, find_sites, plain_spec, rotaries
from ctxext.architectures._sliding import window_fields, window_note
from ctxext.architectures._twins import changed_scalars, meta_twin, rotary_twin, round_trip
from ctxext.architectures._verify import disagreement
from ctxext.architectures.base import Architecture, Extension, Request
from ctxext.errors import IncompatibleError, PatchStateError, VerificationError
from ctxext.methods import Method, RopeMethod
from ctxext.spec import RopeSpec

__all__ = ["Rope"]


class Rope(Architecture):
    """Rotary models. Facts are read from the modules and proven on twins, never from a list of names."""

    name: ClassVar[str] = "rope"

    def matches(self, model: PreTrainedModel) -> bool:
        return any(True for _ in rotaries(model))

    def apply(self, model: PreTrainedModel, method: Method, request: Request, edits: Edits) -> Extension:
        if not isinstance(method, RopeMethod):
            raise IncompatibleError(f"Method {method.name!r} does not work on rotary positions.")
        text = model.config.get_text_config(decoder=True)
        sites = find_sites(model, text)
        trained_length = self._trained_length(model, text, request)
        specs = {site.layer_type: plain_spec(model, text, site, trained_length) for site in sites}
        windows = window_fields(text, request, trained_length)
        with restoring():
            plan = make_plan(model, method, sites, specs, windows)
            original = {name: copy.deepcopy(getattr(text, name)) for name in plan.fields}
            _edit(model, plan, method, sites, edits)
            _prove(model, plan, method, sites)
        notes = _notes(text, method, sites, plan)
        spec = next(iter(plan.specs.values()))
        return Extension(
            trained_length=trained_length,
            target_length=method.target_length(trained_length),
            stored_as=plan.stored_as,
            stock=ROPE_TYPE not in plan.rope_types.values(),
            fingerprint=fingerprint(method, spec),
            notes=notes,
            sliding_window=request.sliding_window,
            original=original,
        )

    def revert(self, model: PreTrainedModel, original: dict[str, Any]) -> None:
        with restoring():
            _carry_over(model, round_trip(model.config, original), original, Edits())

    def _trained_length(self, model: PreTrainedModel, text: Any, request: Request) -> int:
        extended = already_extended(model.config)
        if extended and request.trained_length is None:
            raise PatchStateError(
                f"This checkpoint is already extended ({extended}). Say which length its weights were trained for "
                f"before that extension: trained_length=...; the new method then replaces the old one."
            )
        length = request.trained_length or self.trained_length(model.config)
        if length is None:
            raise IncompatibleError(
                f"The config of this {text.model_type} has no max_position_embeddings. Pass trained_length=..."
            )
        return length


def already_extended(config: Any) -> str | None:
    """How a config is already extended, in a few words; None where it is plain."""
    saved = getattr(config, "ctxext", None)
    if saved:
        return f"ctxext {saved['method']['method']}, trained_length={saved['trained_length']}"
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type", "default")
        if kind in ("linear", "dynamic", "yarn", "longrope", "llama3"):
            original = parameters.get("original_max_position_embeddings")
            return f"rope_type={kind}" + (f", original_max_position_embeddings={original}" if original else "")
    return None


def fingerprint(method: RopeMethod, spec: RopeSpec) -> str:
    """12 hexadecimal digits that two models share exactly when their frequencies at the target length agree."""
    frequencies = method.frequencies(spec, method.target_length(spec.trained_length))
    digest = hashlib.sha256(frequencies.inv_freq.float().numpy().tobytes())
    digest.update(repr(round(frequencies.attention_scale, 9)).encode())
    return digest.hexdigest()[:12]


def _edit(model: PreTrainedModel, plan: Plan, method: RopeMethod, sites: list[Site], edits: Edits) -> None:
    _carry_over(model, plan.config, plan.fields, edits)
    for path in dict.fromkeys(site.path for site in sites):
        rotary = model.get_submodule(path)
        edits.set(rotary, "_apply", PinnedApply(rotary))
        if method.dynamic:
            _make_dynamic(rotary, [site for site in sites if site.path == path], plan, method, edits)


def _carry_over(model: PreTrainedModel, config: Any, fields: Iterable[str], edits: Edits) -> None:
    """Make the live model what transformers would build from ``config``, which differs from its own in ``fields``."""
    old, new = meta_twin(model, round_trip(model.config, {})), meta_twin(model, config)
    text, new_text = model.config.get_text_config(decoder=True), config.get_text_config(decoder=True)
    for path, name, value in changed_scalars(old, new):
        edits.set(model.get_submodule(path), name, value)
    for name in fields:
        edits.set(text, name, getattr(new_text, name))
    for _, rotary in rotaries(model):
        if rotary.config is not text:
            continue
        for name, buffer in rotary_twin(rotary, new_text).named_buffers(recurse=False):
            edits.set(rotary, name, buffer.to(getattr(rotary, name).device))
        for name in [name for name in vars(rotary) if name.endswith("long_inv_freq")]:
            edits.delete(rotary, name)  # stock code caches it from the config it saw first


def _make_dynamic(rotary: nn.Module, sites: list[Site], plan: Plan, method: RopeMethod, edits: Edits) -> None:
    table = {site.layer_type: (method, plan.specs[site.layer_type], plan.rope_types[site.layer_type]) for site in sites}
    edits.set(rotary, "forward", DynamicForward(rotary, table))
    for site in sites:  # the forward pass changes it; recorded here so that undo brings it back
        name = f"{site.prefix}attention_scaling"
        edits.set(rotary, name, getattr(rotary, name))
    # Stock forward methods update themselves by the name of the rope type; this name means: do not.
    if isinstance(rotary.rope_type, dict):
        edits.set(rotary, "rope_type", rotary.rope_type | {site.layer_type: ROPE_TYPE for site in sites})
    else:
        edits.set(rotary, "rope_type", ROPE_TYPE)


def _prove(model: PreTrainedModel, plan: Plan, method: RopeMethod, sites: list[Site]) -> None:
    for site in sites:
        rotary = model.get_submodule(site.path)
        spec = plan.specs[site.layer_type]
        buffer = getattr(rotary, f"{site.prefix}inv_freq")
        if buffer.is_meta:
            continue
        lengths = checked_lengths(method, spec)
        problem = disagreement(rotary, mathematics(method, spec), lengths, site.layer_type, buffer.device)
        if problem or buffer.dtype != torch.float32:
            raise VerificationError(f"The patched model does not compute {method.name!r}: {problem or buffer.dtype}")


def _notes(text: Any, method: RopeMethod, sites: list[Site], plan: Plan) -> tuple[str, ...]:
    notes = []
    if method.dynamic:
        notes.append(
            "Frequencies follow the length of the sequence, so keys already in a KV cache keep the frequencies of the "
            "step that wrote them: cached decoding beyond the trained window differs from one full forward pass."
        )
    if sites[0].layer_type is not None:
        kinds = ", ".join(sorted({str(site.layer_type) for site in sites}))
        notes.append(f"Positions differ by layer type; extended: {kinds}.")
    window = window_note(text)
    return tuple(notes + ([window] if window else []))
