"""Check that the live rotary modules of a model compute what its config says, as they were when it was loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ctxext.core.rebuild import Rebuild
from ctxext.core.rotary import COS_ERROR, FLOAT32, RotaryPlace, find_places, sampled_positions
from ctxext.core.subject import Subject
from ctxext.errors import PatchStateError

LOAD_ANEW = (
    "If the config was changed after loading, load the model with it: from_pretrained(path, config=config). If a "
    "module was changed by hand or by another library, load the model again and patch it first."
)
PATCH_ANEW = (
    "One of them was changed after the extension, and no saved checkpoint could hold that. Call "
    "ctxext.unpatch(model), then ctxext.patch with the values that you want, then save."
)


def require_as_patched(subject: Subject, trained_length: int) -> None:
    """Check that every rotary module of an extended model still computes what its config says.

    Raises:
        PatchStateError: if a module and the config differ; the message has both values.
    """
    places, _ = find_places(subject)
    require_as_configured(subject, places, trained_length, PATCH_ANEW)


def require_as_configured(
    subject: Subject, places: Sequence[RotaryPlace], trained_length: int, way_out: str = LOAD_ANEW
) -> None:
    """Check that live rotary modules compute what the model's config says.

    Methods start from the config. If the config or a module was changed after loading, the weights run with other
    positions than the config says. Modules on the meta device compute nothing yet, and pass.

    Raises:
        PatchStateError: if a module and the config differ; the message has both values.
    """
    if not places:
        return
    text, rebuild = subject.text, Rebuild(subject)
    for place in places:
        live = subject.model.get_submodule(place.path)
        if any(buffer.is_meta for buffer in live.buffers()):
            continue
        problem = _unlike(place, live, rebuild.rotary(place.path), text, trained_length)
        if problem:
            raise PatchStateError(
                f"The live {type(live).__name__} of this {text.model_type} differs from its config "
                f"(rope_parameters={place.rope_dict(text)}): {problem}. {way_out}"
            )


def _unlike(place: RotaryPlace, live: nn.Module, built: nn.Module, text: Any, trained_length: int) -> str | None:
    """Return how a live rotary module differs from the one that its config builds; None if it does not.

    Both start from the frequencies of short texts: a module that follows the length may have read a long one.
    """
    short, current = f"{place.prefix}original_inv_freq", f"{place.prefix}inv_freq"
    follows = place.rope_dict(text).get("rope_type") in ("dynamic", "longrope")
    for name in (short,) if follows else (short, current):
        actual, stated = getattr(live, name).detach().cpu(), getattr(built, name)
        if actual.shape != stated.shape:
            return f"{name} has {len(actual)} frequencies, and the config's {len(stated)}"
        rounding = max(FLOAT32, 2 * torch.finfo(actual.dtype).eps)
        rounded = stated.to(actual.dtype)  # float16 keeps few digits below 6e-5, and none below 6e-8
        different = ~torch.isclose(actual.double(), rounded.double(), rtol=rounding, atol=0.0)
        if different.any():
            pair = int(different.nonzero()[-1])  # the slowest one, which reaches furthest
            return f"{name}[{pair}] is {actual[pair]:.4g} radians per token, and the config's {stated[pair]:.4g}"
    live_inv_freq = getattr(live, short)
    with torch.no_grad():
        built = built.to(live_inv_freq.dtype)  # round both alike, if the live module was rounded
        getattr(built, short).copy_(live_inv_freq)
        getattr(built, current).copy_(live_inv_freq)
    longest = min(trained_length, getattr(text, "max_position_embeddings", None) or trained_length)
    for length in sorted({min(8, longest), max(longest - 1, 1)}):
        positions = sampled_positions(length)
        with torch.no_grad(), _undisturbed(live):
            computed = place.output(live, positions)
            expected = place.output(built, positions)
        for name, part, target in zip(("cos", "sin"), computed, expected, strict=True):
            if part.shape != target.shape:
                return f"it returns {list(part.shape)} numbers, and the config's {list(target.shape)}"
            error = float(
                (part.double().cpu() - target.double()).abs().max() / target.double().abs().max().clamp(min=1)
            )
            if not error <= COS_ERROR:
                return f"its {name} differs by {error:.2g} in a text of {length} tokens"
    return None


@contextlib.contextmanager
def _undisturbed(rotary: nn.Module) -> Iterator[None]:
    """Restore a rotary module after the block: a call may change its buffers and numbers."""
    before, buffers = dict(vars(rotary)), rotary._buffers
    rotary._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}
    try:
        yield
    finally:
        vars(rotary).clear()
        vars(rotary).update(before)
        rotary._buffers = buffers
