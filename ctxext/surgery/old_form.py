"""What readers older than transformers 5 look at: they know nothing of ``rope_parameters``.

transformers 4, and other programs written for its configs, read the base from ``rope_theta`` and the scaling from
``rope_scaling``. Where a config has neither they take 10000 and no scaling at all, without a word. So an extended
config holds both forms where the old one can say the same, and a base that no reader can compute with where it
cannot. transformers 5 gives ``rope_scaling`` precedence, takes the other old fields as defaults, and keeps none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from ctxext.surgery.edits import Edits
from ctxext.surgery.texts import text_of

OLD_GUARD = "this checkpoint is extended by ctxext in a way that needs transformers 5: older readers must not take it"

# What transformers raises where it cannot read a config, or build a model from one.
REFUSALS = (AttributeError, KeyError, ValueError, TypeError, StrictDataclassError)

# How the configs of transformers 4 name the base, by family; the first is what nearly all of them do.
BASES = ("rope_theta", "rotary_emb_base", "global_rope_theta")
# ... and the part of each head that rotates.
PARTS = ("rotary_pct", "partial_rotary_factor")
OLD_FIELDS = ("rope_scaling", "rope_local_base_freq", *BASES)

# Rope types that transformers 4 (4.57.1, modeling_rope_utils.py) computes as transformers 5 does.
OLD_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "llama3"})
# Model types whose classes in transformers 4.57.1 read the base and pass over any scaling without a word.
PASS_OVER_SCALING = frozenset({"nemotron"})


def write_old_form(config: Any, edits: Edits, *, of_any_type: bool) -> None:
    """Put the old form beside the new one in the text part of an extended config.

    Args:
        config: the config, or its text part.
        edits: that undoes it.
        of_any_type: for a live model, whose config the Trainer writes into its checkpoints and reads there as one of no
            type: where such a reader could not read both, a guard stands there, and older readers then refuse what
            ``save_pretrained`` writes. A checkpoint of its own has no such reader.
    """
    text = text_of(config)
    for name in _consumed(text):  # of an earlier extension, where the config is another model's
        edits.delete_unchecked(text, name)
    for name, value in old_form(text, of_any_type=of_any_type).items():
        # transformers 5 has a property of the name rope_scaling, which is an alias of rope_parameters; what it writes
        # to config.json is what the object itself holds.
        edits.set_unchecked(text, name, value)


def drop_old_form(text: Any) -> None:
    """Take away what reading the config from a file would: the old form, if ``write_old_form`` put it there."""
    for name in _consumed(text):
        del vars(text)[name]


def _consumed(text: Any) -> list[str]:
    """The old fields that ``text`` holds, and would not hold had it been read from a file."""
    there = {name: vars(text)[name] for name in OLD_FIELDS if name in vars(text)}
    kept = vars(_read(text, there)) if there else {}
    return [name for name in there if name not in kept]


def rope_dicts(text: Any) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield each rope dict of a text config with the layer type that it is for, None where one serves all layers.

    Args:
        text: the text part of a config, or its ``rope_parameters``: one rope dict, or one for each layer type.
    """
    rope = (text if isinstance(text, dict) else getattr(text, "rope_parameters", None)) or {}
    nested = {kind: entry for kind, entry in rope.items() if isinstance(entry, dict)}
    labels = getattr(text, "_rope_type_labels", None) or getattr(text, "layer_types", None) or ()
    if nested and (nested.keys() & set(labels) or not rope.get("rope_type")):
        yield from nested.items()
    elif rope:
        yield None, rope


def same_rope(one: Any, other: Any) -> bool:
    """Whether two rope dicts say the same; ``type``, the old name of ``rope_type``, says nothing more."""
    return bool(_without_type(one) == _without_type(other))


def old_form(text: Any, *, of_any_type: bool = False) -> dict[str, Any]:
    """The fields of the old form for ``text.rope_parameters``, or a guard, or nothing.

    Nothing where this type's config reads none of them: such a type came with transformers 5, and older readers do
    not know it at all. What is returned was read back by transformers both ways, alone and beside ``rope_parameters``.

    Args:
        text: the text part of an extended config.
        of_any_type: only what transformers also reads without knowing the config's type.
    """
    rope = getattr(text, "rope_parameters", None)
    if not rope or not is_dataclass(text):
        return {}
    declared = {field.name for field in fields(text)}
    if _old_readers_compute(text, rope):
        for form in _candidates(rope):
            if not declared & form.keys() and _means(text, form, rope):
                if of_any_type and "rope_scaling" in form:  # that class looks for a length that it has not read yet
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
        if kind == "longrope" and not has_original:  # they would switch, and scale, by max_position_embeddings
            one_set = parameters.get("short_factor") == parameters.get("long_factor")
            if not one_set or parameters.get("attention_factor") is None:
                return False
        elif kind != "longrope" and kind not in OLD_TYPES:
            return False
    return True


def _candidates(rope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Ways in which configs of transformers 4 say what ``rope`` says; which of them this one reads is tried."""
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
    """Whether the old form alone, and beside the new one, reads as ``rope`` and leaves nothing of itself behind."""
    try:
        alone = _read(text, form, without=("rope_parameters",))
    except REFUSALS:
        return False
    return same_rope(getattr(alone, "rope_parameters", None), rope) and _is_ignored(text, form, rope)


def _is_ignored(text: Any, form: dict[str, Any], rope: dict[str, Any]) -> bool:
    """Whether transformers 5 reads the same rope dict with these fields as without them, and consumes them."""
    try:
        both = _read(text, form)
    except REFUSALS:
        return False
    left = [name for name in form if name in vars(both) and name != "partial_rotary_factor"]  # some keep it beside
    return same_rope(both.rope_parameters, rope) and not left


def _read(text: Any, form: dict[str, Any], without: tuple[str, ...] = ()) -> Any:
    """The config as it is read from a file with ``form`` in it, and without any other old form."""
    fields_now = {name: value for name, value in text.to_dict().items() if name not in (*OLD_FIELDS, *without)}
    declared = {field.name for field in fields(text)}
    fields_now |= {name: vars(text)[name] for name in OLD_FIELDS if name in declared and name in vars(text)}
    return type(text).from_dict(copy.deepcopy(fields_now | form))


def _without_type(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope
    redundant = "type" in rope and rope["type"] == rope.get("rope_type")
    return {key: _without_type(value) for key, value in rope.items() if not (redundant and key == "type")}
