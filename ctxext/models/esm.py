"""ESM-2, whose one vector of frequencies is saved among the weights: plain transformers loads another bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.esm.modeling_esm import EsmModel

from ctxext.core.architecture import Architecture, refuse_choices, required_length
from ctxext.core.edits import Edits
from ctxext.core.override import PinnedApply
from ctxext.core.rebuild import Rebuild
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, PatchStateError
from ctxext.files import JsonObject
from ctxext.methods import Method, RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.models.refusals import LENGTH
from ctxext.models.rope import fingerprint
from ctxext.models.sinusoid import usable_methods
from ctxext.spec import Extension, ExtensionArguments, RopeSpec

ROUNDED = 4e-3
"""Relative difference allowed between frequencies, which checkpoints hold in 16 bits too."""


@dataclass
class OwnFrequencies:
    """Replacement of ``_load_from_state_dict`` of a rotary module that refuses frequencies of another extension."""

    rotary: nn.Module
    inv_freq: Tensor
    method: str

    def __call__(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load the module's frequencies as torch does.

        Raises:
            PatchStateError: if they are not the extension's.
        """
        own = self.inv_freq
        given = state_dict.get(f"{prefix}inv_freq", own)
        is_read = not given.is_meta and given.shape == own.shape  # torch itself refuses another shape
        if is_read and not torch.allclose(given.cpu().double(), own, ROUNDED, 1e-7):
            raise PatchStateError(
                f"These weights hold {prefix}inv_freq of another extension than {self.method!r}, or of none. Call "
                f"ctxext.unpatch(model) before load_state_dict, or load their checkpoint by ctxext.load."
            )
        type(self.rotary)._load_from_state_dict(self.rotary, state_dict, prefix, *rest)


class Esm(Architecture):
    """ESM models that rotate. Their frequencies may be rounded to float16, and are multiplied rather than replaced."""

    name = "esm"
    positions = "frequencies"
    decoder_class = EsmModel

    def holds(self, decoder: nn.Module) -> bool:
        return any(name.endswith("inv_freq") for name in decoder.state_dict())

    def apply(self, subject: Subject, method: Method, request: ExtensionArguments, edits: Edits) -> Extension:
        refuse_choices(request, ("sliding_window", "attention"), "this model attends as it does")
        text, trained, usable = subject.text, required_length(subject, request), usable_methods()
        if not isinstance(method, RopeMethod) or method.name not in usable:
            raise IncompatibleError(
                f"This {subject.kind} keeps frequencies alone among its weights, and {method.name!r} needs more than "
                f"those. Methods for it: {', '.join(usable)}."
            )
        target = method.target_length(trained)
        spec = RopeSpec(text.hidden_size // text.num_attention_heads, getattr(text, "rope_theta", 1e4), trained)
        inv_freq = method.frequencies(spec, target).inv_freq
        ratio = inv_freq / plain_inv_freq(spec)
        original = {LENGTH: text.max_position_embeddings}
        Rebuild(subject, {LENGTH: target}).apply(edits)
        for rotary in [module for module in subject.model.modules() if "inv_freq" in module._buffers]:
            if rotary.inv_freq.is_meta and hasattr(rotary, "_hf_hook"):  # which would bring back the plain ones
                raise IncompatibleError(
                    f"The frequencies of this {subject.kind} are offloaded. Load it without offload_buffers=True."
                )
            held = rotary.inv_freq
            exact = held if held.is_meta else held.cpu().double() * ratio  # not every device has float64
            edits.set(rotary, "inv_freq", exact.float().to(held.device))
            edits.set(rotary, "_load_from_state_dict", OwnFrequencies(rotary, inv_freq, method.name))
            if not rotary.inv_freq.is_meta:  # there they come with the weights, and a config knows the plain ones only
                edits.set(rotary, "_apply", PinnedApply(rotary))
        return Extension(
            trained_length=trained,
            target_length=target,
            stored_as=f"{LENGTH}={target} and other frequencies among the weights",
            stock=True,
            fingerprint=fingerprint(method, spec),
            original=original,
        )

    def revert(self, subject: Subject, original: JsonObject, edits: Edits) -> None:
        raise IncompatibleError(self.why_final(subject))

    def why_final(self, subject: Subject) -> str:
        return "The frequencies among its weights were rounded after they changed. Load the original checkpoint."

    def replaces_weights(self, subject: Subject, saved: JsonObject | None = None) -> bool:
        return True
