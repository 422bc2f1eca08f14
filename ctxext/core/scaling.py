"""Read the positions of a config: its rope dicts, trained length and scaling, in the forms that were published.

The table of what each published form means is in ``docs/guides/methods.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError

from ctxext.core.subject import Subject, path_to, text_of
from ctxext.errors import InvalidParameterError, PatchStateError
from ctxext.files import JsonObject, parse_json
from ctxext.methods.formulas import NEVER
from ctxext.methods.parameters import require

# Errors that transformers raises if it cannot read a config, or build a model from one; a RuntimeError where its code
# takes a field for one that all layers share.
REFUSALS = (AttributeError, KeyError, ValueError, TypeError, RuntimeError, StrictDataclassError)

CHUNKED = "dual_chunk_attention_config"
"""The field by which Qwen's 1M checkpoints ask vLLM and SGLang for dual chunk attention; transformers ignores it."""

# Keys of a rope dict that transformers' rope types ignore: each with its neutral value and the programs that obey it
# (vLLM 0.33 and SGLang 0.5.23: get_rope of their rotary_embedding; llama.cpp: its converter).
FOREIGN_KEYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "attn_factor": (1, ("vllm", "sglang", "llama.cpp")),
    "extrapolation_factor": (1, ("vllm", "sglang")),
    "apply_yarn_scaling": (True, ("vllm",)),
    "short_mscale": (None, ("vllm", "sglang")),
    "long_mscale": (None, ("vllm", "sglang")),
    "max_trained_positions": (None, ("vllm",)),
    "alpha": (None, ("vllm", "sglang")),
}

# Fields that transformers does not read in most models. vLLM and SGLang serve no longer text than the least of them.
OTHER_LENGTHS = ("max_sequence_length", "max_seq_length", "max_seq_len", "seq_length", "seq_len", "model_max_length")

SCALED = ("linear", "dynamic", "yarn", "longrope", "llama3")
FOLLOWING = frozenset({"dynamic", "longrope"})
"""Rope types of transformers whose frequencies depend on the length of the current text."""


def rope_dicts(text: Any) -> Iterator[tuple[str | None, JsonObject]]:
    """Yield each rope dict of a text config, or of its ``rope_parameters``, with its layer type (None for all)."""
    rope = (text if isinstance(text, dict) else getattr(text, "rope_parameters", None)) or {}
    nested = {kind: entry for kind, entry in rope.items() if isinstance(entry, dict)}
    labels = getattr(text, "_rope_type_labels", None) or getattr(text, "layer_types", None) or ()
    if nested and (nested.keys() & set(labels) or not rope.get("rope_type")):
        yield from nested.items()
    elif rope:
        yield None, rope


def rope_follows_length(text: Any) -> bool:
    """Return whether any rope type of a text config follows the length of the current text."""
    return any(rope.get("rope_type") in FOLLOWING for _, rope in rope_dicts(text))


def same_rope(first: Any, second: Any) -> bool:
    """Return whether two rope dicts are equal; ``type``, the old name of ``rope_type``, does not count."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return bool(first == second)
    names = [
        {name for name in rope if name != "type" or rope["type"] != rope.get("rope_type")} for rope in (first, second)
    ]
    return names[0] == names[1] and all(same_rope(first[name], second[name]) for name in names[0])


def is_windowed(layer_type: str) -> bool:
    """Return whether a layer of this type looks back over a limited window only."""
    return "sliding" in layer_type or "chunked" in layer_type or layer_type == "local_attention"


def layer_types(config: Any) -> list[str]:
    """Return the type of each layer of a config; empty if it names none."""
    return getattr(config, "layer_types", None) or []


def all_windowed(config: Any) -> bool:
    """Return whether every attention layer of a config with a window has it."""
    kinds = layer_types(config)
    attention = [kind for kind in kinds if "attention" in kind and "linear" not in kind]
    if not kinds:
        return True
    return bool(attention) and all(is_windowed(kind) or kind == "attention" for kind in attention)


def mixes_windows(config: Any) -> bool:
    """Return whether the config has layers with a window and layers without one."""
    return any(map(is_windowed, layer_types(config))) and not all_windowed(config)


def declared_fields(config: Any) -> set[str]:
    """Return the fields that the class of a config declares, and so reads."""
    return {field.name for field in fields(config)} if is_dataclass(config) else set()


def of_layers(text: Any, name: str) -> list[Any]:
    """Return the values that a field has in the layers of a config: one, unless they differ by layer."""
    if name not in (getattr(text, "per_layer_attributes", None) or ()):
        value = getattr(text, name, None)
        return list(dict.fromkeys(value)) if isinstance(value, list | tuple) else [value]
    return list(dict.fromkeys(getattr(layer, name, None) for layer in text.per_layer_config))


def stated_window(config: Any) -> int | None:
    """Return the tokens of the widest sliding window that a config states; None if it states none."""
    windows = [int(window) for window in of_layers(config, "sliding_window") if window]
    by_layer = "sliding_window" in (getattr(config, "per_layer_attributes", None) or ())
    if not by_layer and getattr(config, "use_sliding_window", True) is False:
        return None
    return max(windows, default=None)


def heads_of(text: Any) -> tuple[int, int, int]:
    """Return the most heads and key heads of a layer, and the dimensions of its widest head."""
    heads = max(of_layers(text, "num_attention_heads"))
    key_heads = max(count or heads for count in of_layers(text, "num_key_value_heads"))
    return heads, key_heads, max(width or text.hidden_size // heads for width in of_layers(text, "head_dim"))


# Model types published with linear scaling and a length that includes it already (vLLM excepts them, too).
RAISED = ("gemma3", "gemma3_text")
# Rope types whose original length transformers fills in if config.json does not state it.
FILLED_IN = ("yarn", "longrope", "llama3")
ROUNDING = 1e-3
"""Relative difference allowed between a length and original length times factor: published factors are rounded."""


@dataclass(frozen=True)
class Scaling:
    """The scaling of rotary positions that a config describes; ``str()`` is a short form.

    Args:
        factor: Factor of the scaling, None if it has none (``longrope``).
        original: Tokens of the training before the scaling, None if the config does not say.
        windows: Lengths in tokens that the scaled checkpoint may have been trained for, ascending. Several if
            published checkpoints of this form differ in their meaning; none if the config names no length.
        serves: Tokens before the scaling, and tokens that a runtime should serve; None if the config does not say.
        has_two_sets: True if short and long texts have different frequencies (``longrope``).
    """

    rope_type: str
    factor: float | None
    original: int | None
    windows: tuple[int, ...]
    serves: tuple[int, int] | None
    has_two_sets: bool = False

    @property
    def window(self) -> int | None:
        """Tokens that the scaled checkpoint was trained for, None if the config leaves it open."""
        return self.windows[0] if len(self.windows) == 1 else None

    @property
    def reach(self) -> int | None:
        """Tokens that the scaled checkpoint reads at least, None if the config does not say."""
        return self.windows[0] if self.windows else None

    def __str__(self) -> str:
        factor = "" if self.factor is None else f", factor {self.factor:g}"
        original = "" if self.original is None else f", original_max_position_embeddings={self.original}"
        return f"rope_type={self.rope_type}{factor}{original}"


def stated_length(text: Any) -> int | None:
    """Return the length in tokens that a text config states, whatever its scaling; None if it states none."""
    chunked = getattr(text, CHUNKED, None)
    if isinstance(chunked, dict):
        # max_position_embeddings is then the reach of all chunks; the weights were trained on one chunk.
        original = chunked.get("original_max_position_embeddings") or chunked.get("chunk_size")
        if original:
            return int(original)
    length = max_length_of(text) or getattr(text, "max_position_embeddings", None)
    return int(length) if length else None


def max_length_of(text: Any) -> int | None:
    """Return the ``model_max_length`` of a Cohere config, which vLLM obeys; the other field of Command R has less."""
    length = getattr(text, "model_max_length", None) if text.model_type.startswith("cohere") else None
    return length if isinstance(length, int) else None


def length_fields(text: Any, reach: int) -> dict[str, int]:
    """Return the fields in which a text config states its length, set to ``reach``."""
    fields = {"max_position_embeddings": reach} if hasattr(text, "max_position_embeddings") else {}
    fields |= {} if max_length_of(text) is None else {"model_max_length": reach}
    return fields | raised_lengths(text, reach)


def raised_lengths(text: Any, reach: int) -> dict[str, int]:
    """Return ``reach`` for each of ``OTHER_LENGTHS`` in which a text config states less."""
    said = {name: vars(text).get(name) for name in OTHER_LENGTHS}
    return {name: reach for name, length in said.items() if isinstance(length, int) and length < reach}


def scaling_of(config: Any) -> Scaling | None:
    """Return the scaling of layers that reach beyond a sliding window; None if their positions are plain."""
    text = text_of(config)
    for layer_type, rope in rope_dicts(text):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        is_plain = kind == "linear" and rope.get("factor") == 1
        if kind in SCALED and not is_plain and not (layer_type and is_windowed(layer_type)):
            return _scaling(config, text, rope, kind)
    return None


def _scaling(config: Any, text: Any, rope: JsonObject, kind: str) -> Scaling:
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


def _dynamic(rope: JsonObject, factor: float | None, original: int | None, longest: int | None) -> Scaling:
    """Return the scaling of a dynamic type, which transformers starts at ``max_position_embeddings``.

    It ignores an original length next to it, which may be the trained one, so both are possible windows.
    """
    windows = tuple(sorted({length for length in (original, longest) if length is not None}))
    serves = None
    if longest is not None:
        stretch = factor if factor and not rope.get("alpha") else 1.0  # Hunyuan: alpha changes the base at every length
        serves = (longest, math.floor(longest * stretch))
    return Scaling("dynamic", factor, original or longest, windows, serves)


def _windows(
    text: Any, kind: str, factor: float | None, original: int | None, longest: int | None
) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """Return ``windows`` and ``serves`` of a scaling that the weights were trained with."""
    if kind == "linear" and factor is not None and factor >= NEVER:
        factor = None  # a factor that stops all rotation says nothing about lengths
    if factor is None or (original is None and longest is None):
        return ((), None) if longest is None else ((longest,), (original or longest, longest))
    if original is None:
        assert longest is not None
        if text.model_type in RAISED:
            return (longest,), (round(longest / factor), longest)
        both = (longest, math.floor(longest * factor))  # the stated length is that before the scaling, or that after it
        return both, both
    reached = math.floor(original * factor)
    is_product = longest is not None and abs(longest - reached) <= ROUNDING * reached
    # Llama 3.1 was trained for twice the product, and 3.2 for half of it.
    if longest is not None and (is_product or (kind == "llama3" and longest > original)):
        return (longest,), (original, longest)
    # Model cards for YaRN leave the stated length unchanged.
    if longest is None or original <= longest < reached or (longest < original and kind != "llama3"):
        return (reached,), (original, reached)
    return tuple(sorted((longest, reached))), (original, reached)


def _is_filled_in(config: Any, text: Any, kind: str) -> bool:
    """Return whether the built config has an original length that config.json does not state."""
    published = published_json(config)
    published = published_text(config, published) if published else {}
    block = published.get("rope_scaling") or published.get("rope_parameters")
    if not isinstance(block, dict) or hasattr(text, "original_max_position_embeddings"):
        return False
    of_kind = [rope for _, rope in rope_dicts(block) if kind in (rope.get("rope_type"), rope.get("type"))]
    return bool(of_kind) and not any(rope.get("original_max_position_embeddings") for rope in of_kind)


def published_json(config: Any) -> JsonObject:
    """Read the config.json that a config was built from, offline; return an empty dict if it is not on this machine."""
    name = getattr(config, "_name_or_path", None)
    if not name:
        return {}
    path = Path(name) / "config.json"
    if not path.is_file():
        revision = getattr(config, "_commit_hash", None)
        try:
            cached = try_to_load_from_cache(name, "config.json", revision=revision)
        except HFValidationError:  # the name is a path, not a repository of the hub
            return {}
        if not isinstance(cached, str):
            return {}
        path = Path(cached)
        if revision is None and len([*path.parents[1].glob("*/config.json")]) > 1:
            return {}  # transformers does not keep which revision of several a model was loaded from
    try:
        content = config._decode_special_floats(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # removed or damaged since the model was loaded from it
        return {}
    is_same = isinstance(content, dict) and content.get("model_type") == config.model_type
    return content if is_same else {}


def published_text(config: Any, published: JsonObject) -> JsonObject:
    """Return the text part of a published config.json; the whole of it if it has no such part."""
    for name in path_to(config, text_of(config)):
        inner = published.get(name)
        if not isinstance(inner, dict):
            return published  # a file older than the parts of its class; transformers maps its fields
        published = inner
    return published


def checked_scaling(
    model_type: str, scaling: Scaling | None, choice: str | None, trained_length: int | None
) -> tuple[str | None, int | None]:
    """Return whether to extend or replace the scaling of a checkpoint, and the trained length that follows.

    Raises:
        InvalidParameterError: if the choice is unknown, has no scaling to act on, or contradicts ``trained_length``.
        PatchStateError: if the checkpoint is scaled, and the arguments do not tell what its weights were trained for.
    """
    require(choice in (None, "extend", "replace"), "scaling", choice, "'extend' or 'replace' (or left out)")
    if scaling is None:
        if choice is not None:
            raise InvalidParameterError(
                f"scaling={choice!r}: the config of this {model_type} scales no positions. Leave scaling out."
            )
        return None, trained_length
    if choice is None and trained_length in scaling.windows:
        choice = "extend"
    if choice is None:
        raise PatchStateError(_question(scaling, trained_length))
    known = scaling.original if choice == "replace" else scaling.window
    if trained_length is None and known is None:
        raise InvalidParameterError(
            f"scaling={choice!r}: the config of this {model_type} ({scaling}) does not state the trained length. Pass "
            f"trained_length (--trained-length)."
        )
    if choice == "replace" and trained_length is not None and known not in (None, trained_length):
        raise InvalidParameterError(
            f"trained_length={trained_length} contradicts the config, whose scaling ({scaling}) starts from {known} "
            f"tokens. Leave trained_length out, or correct config.json."
        )
    return choice, trained_length or known


def _question(scaling: Scaling, trained_length: int | None) -> str:
    given = "" if trained_length is None else f", and trained_length={trained_length} is not a length of that scaling"
    lengths = " or ".join(f"trained_length={window}" for window in scaling.windows) or "its trained_length"
    original = scaling.original or "..."
    return (
        f"This checkpoint is already extended ({scaling}){given}. If its weights were trained with that scaling (Llama "
        f"3.1, gpt-oss, Phi-3), pass {lengths}: the new method then extends the frequencies of the training. If the "
        f"scaling was added afterwards, pass scaling='replace', trained_length={original}: the new method then "
        f"replaces it. The options of the command line are --trained-length and --scaling."
    )


def refuse_changed_length(subject: Subject) -> None:
    """Raise if the config's length differs from its config.json, or from the length at the model's construction.

    Some programs raise ``max_position_embeddings`` before a model is patched (axolotl, to its sequence length).

    Raises:
        PatchStateError: with both lengths; the user has to pass one of them.
    """
    text = subject.text
    now = getattr(text, "max_position_embeddings", None)
    published = published_json(subject.config)
    lengths: dict[str, Any] = {
        f"{type(rotary).__name__} was built for": getattr(rotary, "original_max_seq_len", None)
        for _, rotary in subject.rotaries
        if rotary.config is text
    }
    if published and "ctxext" not in published:  # config.json of an extended checkpoint has the extended length
        lengths["its config.json says"] = published_text(subject.config, published).get("max_position_embeddings")
    for where, length in lengths.items():
        if isinstance(now, int) and isinstance(length, int) and length != now:
            raise PatchStateError(
                f"The config of this {text.model_type} has max_position_embeddings={now}, but {where} {length}. Pass "
                f"the length that its weights were trained for: trained_length={length} or trained_length={now} "
                f"(--trained-length)."
            )


def refuse_shrinking(scaling: Scaling, target_length: int) -> None:
    """Raise ``InvalidParameterError`` if the target length is below the present reach of the checkpoint."""
    if scaling.reach is not None and target_length < scaling.reach:
        raise InvalidParameterError(
            f"The target of {target_length} tokens is below the {scaling.reach} that this checkpoint reads already "
            f"({scaling}). Pass a target_length above {scaling.reach}."
        )
