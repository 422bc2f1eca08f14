"""The scaling of rotary positions that a config carries already, with which its weights were trained or not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ctxext.architectures._sliding import is_windowed
from ctxext.errors import InvalidParameterError, PatchStateError

__all__ = ["SCALED", "Scaling", "checked_scaling", "refuse_shrinking", "rope_dicts", "scaling_of"]

SCALED = ("linear", "dynamic", "yarn", "longrope", "llama3")
CHOICES = ("extend", "replace")


@dataclass(frozen=True)
class Scaling:
    """What a config says about how its rotary positions are scaled; ``str()`` is a few words.

    Args:
        rope_type: stock transformers' name of it.
        factor: its factor, None where it has none (``longrope``).
        original: tokens that the weights were trained for before it, None where nothing says so.
        reach: tokens that the scaled checkpoint reads, None where nothing says so.
        has_two_sets: whether short and long texts have frequencies of their own (``longrope``).
        windows: what may be meant by the length that the scaled checkpoint was trained for: ``reach``, and for
            ``linear`` without an original length also ``max_position_embeddings`` times the factor, since published
            checkpoints mean either by that field.
    """

    rope_type: str
    factor: float | None
    original: int | None
    reach: int | None
    windows: tuple[int, ...]
    has_two_sets: bool = False

    @property
    def window(self) -> int | None:
        """The length that the scaled checkpoint was trained for, None where the config leaves it open."""
        return self.windows[0] if len(self.windows) == 1 else None

    def __str__(self) -> str:
        factor = "" if self.factor is None else f", factor {self.factor:g}"
        original = "" if self.original is None else f", original_max_position_embeddings={self.original}"
        return f"rope_type={self.rope_type}{factor}{original}"


def rope_dicts(text: Any) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield each rope dict of a text config with the layer type that it is for, None where one serves all layers."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = {kind: entry for kind, entry in rope.items() if isinstance(entry, dict)}
    if nested and not rope.get("rope_type"):
        yield from nested.items()
    elif rope:
        yield None, rope


def scaling_of(config: Any) -> Scaling | None:
    """The scaling of the layers that reach beyond a sliding window; None where their positions are plain."""
    text = config.get_text_config(decoder=True)
    for layer_type, rope in rope_dicts(text):
        kind = rope.get("rope_type", "default")
        is_plain = kind == "linear" and rope.get("factor") == 1
        if kind in SCALED and not is_plain and not (layer_type and is_windowed(layer_type)):
            return _read(text, rope, kind)
    return None


def _read(text: Any, rope: dict[str, Any], kind: str) -> Scaling:
    longest = getattr(text, "max_position_embeddings", None)
    longest = int(longest) if longest else None
    original = getattr(text, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    original = int(original) if original else None
    factor = None if rope.get("factor") is None else float(rope["factor"])
    if kind == "dynamic":  # the weights are plain, and stock code counts the stretch from max_position_embeddings
        return Scaling(kind, factor, longest, longest, () if longest is None else (longest,))
    reach = longest
    if original is not None and factor is not None and longest in (None, original):
        # As Qwen2.5's model card has it: the field still says what the weights were trained for.
        reach = math.floor(original * factor)
    windows = [] if reach is None else [reach]
    if kind == "linear" and original is None and reach is not None and factor is not None:
        windows.append(math.floor(reach * factor))
    has_two_sets = rope.get("short_factor") != rope.get("long_factor")
    return Scaling(kind, factor, original, reach, tuple(windows), has_two_sets)


def checked_scaling(
    model_type: str, scaling: Scaling | None, choice: str | None, trained_length: int | None
) -> tuple[str | None, int | None]:
    """What to do about a checkpoint's own scaling, and the trained length that follows.

    Raises:
        InvalidParameterError: an unknown choice, one without a scaling, or one that contradicts ``trained_length``.
        PatchStateError: the checkpoint is scaled, and what was said does not tell what its weights know.
    """
    if choice not in (None, *CHOICES):
        raise InvalidParameterError(f"scaling must be 'extend' or 'replace' (or left out), found {choice!r}.")
    if scaling is None:
        if choice is not None:
            raise InvalidParameterError(
                f"scaling={choice!r}: the rotary positions of this {model_type} are not scaled, so there is nothing to "
                f"extend or to replace. Leave scaling out."
            )
        return None, trained_length
    if choice is None and trained_length in scaling.windows:
        choice = "extend"
    if choice is None:
        raise PatchStateError(_question(scaling, trained_length))
    known = scaling.original if choice == "replace" else scaling.window
    if trained_length is None and known is None:
        raise InvalidParameterError(
            f"scaling={choice!r}: the config of this {model_type} ({scaling}) does not say the length that is meant; "
            f"pass trained_length=..."
        )
    if choice == "replace" and trained_length is not None and known not in (None, trained_length):
        raise InvalidParameterError(
            f"trained_length={trained_length} contradicts the config, whose scaling ({scaling}) starts from {known} "
            f"tokens. Leave it out, or correct config.json."
        )
    return choice, trained_length or known


def _question(scaling: Scaling, trained_length: int | None) -> str:
    given = "" if trained_length is None else f", and trained_length={trained_length} is not the length that it reads"
    lengths = " or ".join(f"trained_length={window}" for window in scaling.windows) or "its trained_length"
    original = scaling.original or "..."
    return (
        f"This checkpoint is already extended ({scaling}){given}. Were its weights trained with that scaling (Llama "
        f"3.1, gpt-oss, Phi-3)? Then pass {lengths}, and the new method extends the frequencies that they know. Was it "
        f"put on afterwards? Then pass scaling='replace', trained_length={original}, and the new method takes its "
        f"place."
    )


def refuse_shrinking(scaling: Scaling | None, target_length: int) -> None:
    """Raise ``InvalidParameterError`` where an extension would reach less far than the checkpoint does already."""
    if scaling is not None and scaling.reach is not None and target_length < scaling.reach:
        raise InvalidParameterError(
            f"The target of {target_length} tokens is below the {scaling.reach} that this checkpoint reads already "
            f"({scaling}), so nothing would be extended. Ask for more: target_length=... above {scaling.reach}."
        )
