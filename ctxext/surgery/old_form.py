"""Write the config fields of transformers 4 beside ``rope_parameters``, which older programs do not read.

transformers 4, and programs written for its configs, read the base from ``rope_theta`` and the scaling from
``rope_scaling``. If a config has neither, they silently take 10000 and no scaling. So an extended config holds both
forms if the old one can express the extension, and otherwise a base that no program can compute with.
transformers 5 gives ``rope_scaling`` precedence, takes the other old fields as defaults, and keeps none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from ctxext.surgery.edits import Edits
from ctxext.surgery.subject import text_of

OLD_GUARD = "this checkpoint is extended by ctxext in a way that needs transformers 5: older readers must not take it"

# Errors that transformers raises if it cannot read a config, or build a model from one.
REFUSALS = (AttributeError, KeyError, ValueError, TypeError, StrictDataclassError)

# Names of the base in configs of transformers 4, which differ by family; nearly all use the first.
BASES = ("rope_theta", "rotary_emb_base", "global_rope_theta")
# Names of the rotated part of each head.
PARTS = ("rotary_pct", "partial_rotary_factor")
OLD_FIELDS = ("rope_scaling", "rope_local_base_freq", *BASES)

# Rope types that transformers 4 (4.57.1, modeling_rope_utils.py) computes as transformers 5 does.
OLD_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "llama3"})
# Model types whose classes in transformers 4.57.1 read the base and silently ignore any scaling.
PASS_OVER_SCALING = frozenset({"nemotron"})


def write_old_form(config: Any, edits: Edits, *, of_any_type: bool) -> None:
    """Put the old form beside the new one in the text part of an extended config.

    Args:
        config: the config, or its text part.
        edits: the journal.
        of_any_type: set for a live model. The Trainer writes its config into checkpoints and reads it back as a plain
            ``PreTrainedConfig``. If that class could not read both forms, a guard takes the place of the old form, and
            older programs refuse what ``save_pretrained`` writes. A checkpoint that ctxext writes needs no such care.
    """
    text = text_of(config)
    for name in _consumed(text):  # from an earlier extension, if the config is shared with another model
        edits.delete_unchecked(text, name)
    for name, value in old_form(text, of_any_type=of_any_type).items():
        # In transformers 5 rope_scaling is a property, an alias of rope_parameters; config.json gets the entries of
        # the object's own dictionary.
        edits.set_unchecked(text, name, value)


def drop_old_form(text: Any) -> None:
    """Remove the old form that ``write_old_form`` wrote, as reading the config from a file would."""
    for name in _consumed(text):
        del vars(text)[name]


def _consumed(text: Any) -> list[str]:
    """Return the old fields that ``text`` holds and that reading it from a file would consume."""
    held = {name: vars(text)[name] for name in OLD_FIELDS if name in vars(text)}
    kept = vars(_read(text, held)) if held else {}
    return [name for name in held if name not in kept]


def rope_dicts(text: Any) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield each rope dict of a text config with its layer type, None if one dict serves all layers.

    Args:
        text: the text part of a config, or its ``rope_parameters``, which is one rope dict or one for each layer type.
    """
    rope = (text if isinstance(text, dict) else getattr(text, "rope_parameters", None)) or {}
    nested = {kind: entry for kind, entry in rope.items() if isinstance(entry, dict)}
    labels = getattr(text, "_rope_type_labels", None) or getattr(text, "layer_types", None) or ()
    if nested and (nested.keys() & set(labels) or not rope.get("rope_type")):
        yield from nested.items()
    elif rope:
        yield None, rope


def same_rope(first: Any, second: Any) -> bool:
    """Return whether two rope dicts are equal; ``type``, the old name of ``rope_type``, does not count."""
    return bool(_without_type(first) == _without_type(second))


def old_form(text: Any, *, of_any_type: bool = False) -> dict[str, Any]:
    """Return the old form of ``text.rope_parameters``, a guard in its place, or nothing.

    A form is returned only if transformers reads it correctly, both alone and beside ``rope_parameters``. Nothing is
    returned if the config class reads no old field: such a model type came with transformers 5, and older programs do
    not know it.

    Args:
        text: the text part of an extended config.
        of_any_type: only accept a form that the base class of configs reads too.
    """
    rope = getattr(text, "rope_parameters", None)
    if not rope or not is_dataclass(text):
        return {}
    declared = {field.name for field in fields(text)}
    if _old_readers_compute(text, rope):
        for form in _candidates(rope):
            if not declared & form.keys() and _means(text, form, rope):
                if (
                    of_any_type and "rope_scaling" in form
                ):  # the base class would look for a length that it has not read yet
                    break
                return form
    for name in BASES:
        guard = {name: OLD_GUARD}
        if name not in declared and _is_ignored(text, guard, rope):
            return guard
    return {}


def _old_readers_compute(text: Any, rope: dict[str, Any]) -> bool:
    has_original = getattr(text, "original_max_position_embeddings", None) is not None
    for _, parameters in rope_dicts(rope):
        kind = parameters.get("rope_type", "default")
        if kind != "default" and text.model_type in PASS_OVER_SCALING:
            return False
        if (
            kind == "longrope" and not has_original
        ):  # transformers 4 would switch, and scale, by max_position_embeddings
            one_set = parameters.get("short_factor") == parameters.get("long_factor")
            if not one_set or parameters.get("attention_factor") is None:
                return False
        elif kind != "longrope" and kind not in OLD_TYPES:
            return False
    return True


def _candidates(rope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield candidates for the old form of ``rope``; the caller tries which of them a config class reads."""
    nested = None not in dict(rope_dicts(rope))
    main = rope.get("full_attention") if nested else rope
    if not isinstance(main, dict) or "rope_theta" not in main:
        return
    apart = {"rope_theta", "partial_rotary_factor"}
    scaling = {key: copy.deepcopy(value) for key, value in main.items() if key not in apart}
    kind = scaling.setdefault("rope_type", "default")
    form = {"rope_scaling": scaling | {"type": kind}} if scaling != {"rope_type": "default"} else {}
    local = (rope.get("sliding_attention") or {}).get("rope_theta") if nested else None
    part = main.get("partial_rotary_factor")
    for base in BASES:
        whole = form | {base: main["rope_theta"]}
        if nested and local is not None:
            yield whole | {"rope_local_base_freq": local}
            if local != main["rope_theta"]:
                continue
        if part is None or part == 1:
            yield whole
        if part is not None:
            yield from (whole | {name: part} for name in PARTS)


def _means(text: Any, form: dict[str, Any], rope: dict[str, Any]) -> bool:
    """Return whether transformers reads ``rope`` from the old form, alone and beside the new one, and consumes it."""
    try:
        alone = _read(text, form, without=("rope_parameters",))
    except REFUSALS:
        return False
    return same_rope(getattr(alone, "rope_parameters", None), rope) and _is_ignored(text, form, rope)


def _is_ignored(text: Any, form: dict[str, Any], rope: dict[str, Any]) -> bool:
    """Return whether transformers 5 reads the same rope dict with these fields as without, and consumes them."""
    try:
        both = _read(text, form)
    except REFUSALS:
        return False
    left = [
        name for name in form if name in vars(both) and name != "partial_rotary_factor"
    ]  # some configs keep this one
    return same_rope(both.rope_parameters, rope) and not left


def _read(text: Any, form: dict[str, Any], without: tuple[str, ...] = ()) -> Any:
    """Read the config from a dictionary that holds ``form`` and no other old field."""
    fields_now = {name: value for name, value in text.to_dict().items() if name not in (*OLD_FIELDS, *without)}
    declared = {field.name for field in fields(text)}
    fields_now |= {name: vars(text)[name] for name in OLD_FIELDS if name in declared and name in vars(text)}
    return type(text).from_dict(copy.deepcopy(fields_now | form))


def _without_type(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope
    redundant = "type" in rope and rope["type"] == rope.get("rope_type")
    return {key: _without_type(value) for key, value in rope.items() if not (redundant and key == "type")}
