"""How many tokens a config says its weights know, and how it scales their positions.

The one reader of lengths: inspect, plan, patch, export, eval, choose and recipes take the trained window of a
checkpoint from here. ``docs/methods.md`` has the table of what each published form means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ctxext.errors import InvalidParameterError, PatchStateError
from ctxext.methods.formulas import NEVER
from ctxext.surgery.old_form import rope_dicts
from ctxext.surgery.published import CHUNKED, published_json, published_text
from ctxext.surgery.rebuild import rotaries
from ctxext.surgery.texts import text_of
from ctxext.surgery.windows import is_windowed

SCALED = ("linear", "dynamic", "yarn", "longrope", "llama3")
CHOICES = ("extend", "replace")
# Model types that are published with linear scaling and a length that it has raised already (vLLM excepts them, too).
RAISED = ("gemma3", "gemma3_text")
# Rope types whose original length transformers fills in where config.json does not state it.
FILLED_IN = ("yarn", "longrope", "llama3")
ROUNDING = 1e-3
"""By how much a length may differ from original length times factor, relative: factors are published rounded."""


@dataclass(frozen=True)
class Scaling:
    """What a config says about how its rotary positions are scaled; ``str()`` is a few words.

    Args:
        rope_type: stock transformers' name of it.
        factor: its factor, None where it has none (``longrope``).
        original: tokens that the weights were trained for before it, None where nothing says so.
        windows: tokens that the scaled checkpoint may have been trained for, ascending. Several where published
            checkpoints of this form mean one length or the other; none where the config names no length.
        serves: tokens before the scaling, and tokens that a runtime should serve; None where nothing says so.
        has_two_sets: whether short and long texts have frequencies of their own (``longrope``).
    """

    rope_type: str
    factor: float | None
    original: int | None
    windows: tuple[int, ...]
    serves: tuple[int, int] | None
    has_two_sets: bool = False

    @property
    def window(self) -> int | None:
        """The length that the scaled checkpoint was trained for, None where the config leaves it open."""
        return self.windows[0] if len(self.windows) == 1 else None

    @property
    def reach(self) -> int | None:
        """Tokens that the scaled checkpoint reads at least, None where nothing says so."""
        return self.windows[0] if self.windows else None

    def __str__(self) -> str:
        factor = "" if self.factor is None else f", factor {self.factor:g}"
        original = "" if self.original is None else f", original_max_position_embeddings={self.original}"
        return f"rope_type={self.rope_type}{factor}{original}"


def stated_length(text: Any) -> int | None:
    """Tokens that a text config names as its length, whatever scales its positions; None where it names none."""
    chunked = getattr(text, CHUNKED, None)
    if isinstance(chunked, dict):
        # max_position_embeddings is then what chunks reach; the weights know one chunk.
        original = chunked.get("original_max_position_embeddings") or chunked.get("chunk_size")
        if original:
            return int(original)
    length = max_length_of(text) or getattr(text, "max_position_embeddings", None)
    return int(length) if length else None


def max_length_of(text: Any) -> int | None:
    """The ``model_max_length`` of a Cohere config, which vLLM obeys; None where it has none.

    Command R was published with the length of its pretraining in ``max_position_embeddings``.
    """
    length = getattr(text, "model_max_length", None) if text.model_type.startswith("cohere") else None
    return length if isinstance(length, int) else None


def scaling_of(config: Any) -> Scaling | None:
    """The scaling of the layers that reach beyond a sliding window; None where their positions are plain."""
    text = text_of(config)
    for layer_type, rope in rope_dicts(text):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        is_plain = kind == "linear" and rope.get("factor") == 1
        if kind in SCALED and not is_plain and not (layer_type and is_windowed(layer_type)):
            return _scaling(config, text, rope, kind)
    return None


def _scaling(config: Any, text: Any, rope: dict[str, Any], kind: str) -> Scaling:
    longest = stated_length(text)
    original = getattr(text, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    original = int(original) if original else None
    factor = None if rope.get("factor") is None else float(rope["factor"])
    if kind == "dynamic":
        return _dynamic(rope, factor, original, longest)
    has_two_sets = rope.get("short_factor") != rope.get("long_factor")
    if longest is not None and longest == original and kind in FILLED_IN and _is_filled_in(config, text, kind):
        original = None
    windows, serves = _windows(text, kind, factor, original, longest)
    return Scaling(kind, factor, original, windows, serves, has_two_sets)


def _dynamic(rope: dict[str, Any], factor: float | None, original: int | None, longest: int | None) -> Scaling:
    """Weights are plain inside their window, and stock code counts the stretch from ``max_position_embeddings``.

    An original length of its own is read by no code of transformers 5: it may be what the weights know.
    """
    windows = tuple(sorted({length for length in (original, longest) if length is not None}))
    serves = None
    if longest is not None:
        stretch = factor if factor and not rope.get("alpha") else 1.0  # Hunyuan: another base, whatever the length
        serves = (longest, math.floor(longest * stretch))
    return Scaling("dynamic", factor, original or longest, windows, serves)


def _windows(
    text: Any, kind: str, factor: float | None, original: int | None, longest: int | None
) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """``windows`` and ``serves`` of a scaling that its weights were trained with."""
    if kind == "linear" and factor is not None and factor >= NEVER:
        factor = None  # it stops all rotation, and says nothing about lengths
    if factor is None or (original is None and longest is None):
        return ((), None) if longest is None else ((longest,), (original or longest, longest))
    if original is None:
        assert longest is not None
        if text.model_type in RAISED:
            return (longest,), (round(longest / factor), longest)
        both = (longest, math.floor(longest * factor))  # before the scaling, or behind it
        return both, both
    reached = math.floor(original * factor)
    if longest is not None and abs(longest - reached) <= ROUNDING * reached:
        return (longest,), (original, longest)
    if kind == "llama3" and longest is not None and longest > original:
        return (longest,), (original, longest)  # Llama 3.1 was trained for twice the product, 3.2 for half of it
    if longest is None or original <= longest < reached:
        return (reached,), (original, reached)  # model cards of YaRN leave the field as it was
    if longest < original and kind != "llama3":
        return (reached,), (original, reached)
    return tuple(sorted((longest, reached))), (original, reached)


def _is_filled_in(config: Any, text: Any, kind: str) -> bool:
    """Whether config.json does not state the original length that the built config has."""
    published = published_text(config, published_json(config))
    block = published.get("rope_scaling") or published.get("rope_parameters")
    if not isinstance(block, dict) or hasattr(text, "original_max_position_embeddings"):
        return False
    of_kind = [rope for _, rope in rope_dicts(block) if kind in (rope.get("rope_type"), rope.get("type"))]
    return bool(of_kind) and not any(rope.get("original_max_position_embeddings") for rope in of_kind)


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


def refuse_changed_length(model: PreTrainedModel) -> None:
    """Raise where a config names another length than its model was built with, or than its config.json.

    Programs raise ``max_position_embeddings`` before a model is patched (axolotl does, to its sequence length). The
    weights know nothing of that.

    Raises:
        PatchStateError: with both lengths, one of which must be given.
    """
    text = text_of(model.config)
    now = getattr(text, "max_position_embeddings", None)
    published = published_json(model.config)
    found = {
        f"{type(rotary).__name__} was built for": getattr(rotary, "original_max_seq_len", None)
        for _, rotary in rotaries(model)
        if rotary.config is text
    }
    if "ctxext" not in published:  # which holds the extended length
        found["its config.json says"] = published_text(model.config, published).get("max_position_embeddings")
    for where, length in found.items():
        if isinstance(now, int) and isinstance(length, int) and length != now:
            raise PatchStateError(
                f"The config of this {text.model_type} has max_position_embeddings={now}, and {where} {length}. Say "
                f"which of them its weights were trained for: trained_length={length} or trained_length={now}."
            )


def refuse_shrinking(scaling: Scaling | None, target_length: int) -> None:
    """Raise ``InvalidParameterError`` where an extension would reach less far than the checkpoint does already."""
    if scaling is not None and scaling.reach is not None and target_length < scaling.reach:
        raise InvalidParameterError(
            f"The target of {target_length} tokens is below the {scaling.reach} that this checkpoint reads already "
            f"({scaling}), so nothing would be extended. Ask for more: target_length=... above {scaling.reach}."
        )
