"""Write the rope fields of transformers 4 into a config as well, where its classes would read the same positions.

transformers 4, and programs written for its configs, read the base from ``rope_theta`` and the scaling from
``rope_scaling``. If a config has neither, they silently take 10000 and no scaling. So an extended config holds both
forms if the old one can express the extension, and otherwise a base that no program can compute with.
transformers 5 gives ``rope_scaling`` precedence, takes the other old fields as defaults, and keeps none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from ctxext.core.edits import Edits
from ctxext.core.scaling import REFUSALS, declared_fields, rope_dicts, same_rope
from ctxext.core.subject import text_of
from ctxext.files import JsonObject

OLD_GUARD = "this checkpoint is extended by ctxext in a way that needs transformers 5: older readers must not take it"

# Names of the base in configs of transformers 4, which differ by family; nearly all use the first.
BASES = ("rope_theta", "rotary_emb_base", "global_rope_theta")
# Names of the rotated part of each head.
PARTS = ("rotary_pct", "partial_rotary_factor")
OLD_FIELDS = ("rope_scaling", "rope_local_base_freq", *BASES)

# Rope types that transformers 4 (4.57.1, modeling_rope_utils.py) computes as transformers 5 does.
OLD_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "llama3"})
# Model types whose classes in transformers 4.57.1 read the base and silently ignore any scaling.
PASS_OVER_SCALING = frozenset({"nemotron"})


def put_old_form(texts: Iterable[Any], edits: Edits, *, of_any_type: bool = False) -> None:
    """Add the old form to the new one in the text parts of an extended config, until ``edits`` is undone.

    ``of_any_type`` is set for a live model, whose config the Trainer reads back as a plain ``PreTrainedConfig``. Where
    that class could not read both forms, a guard takes the place of the old one: older programs then refuse the file.
    """
    for text in map(text_of, texts):
        drop_old_form(text, edits)  # from an earlier extension, if the config is shared with another model
        for name, value in old_form(text, of_any_type=of_any_type).items():
            # In transformers 5 rope_scaling is a property, an alias of rope_parameters; config.json gets the entries of
            # the object's own dictionary.
            edits.set_unchecked(text, name, value)


def drop_old_form(text: Any, edits: Edits | None = None) -> None:
    """Remove the old form from a text config, as reading it from a file would; through ``edits`` where it is live."""
    held = {name: vars(text)[name] for name in OLD_FIELDS if name in vars(text)}
    kept = vars(_read(text, held)) if held else {}
    for name in [name for name in held if name not in kept]:
        (edits or Edits()).delete_unchecked(text, name)


def old_form(text: Any, *, of_any_type: bool) -> JsonObject:
    """Return the old form of ``text.rope_parameters`` that transformers reads right, both alone and next to the new.

    Without one, return a guard; or nothing if the config class reads no old field: older programs then do not know the
    model type either.
    """
    rope = getattr(text, "rope_parameters", None)
    declared = declared_fields(text)
    if not rope or not declared:
        return {}
    for form in _candidates(text, rope):
        if declared & form.keys() or not _reads(text, form, rope, alone=True) or not _reads(text, form, rope):
            continue
        if of_any_type and "rope_scaling" in form:
            break  # the base class would look for a length that it has not read yet
        return form
    for name in BASES:
        guard = {name: OLD_GUARD}
        if name not in declared and _reads(text, guard, rope):
            return guard
    return {}


def lacks_old_form(text: Any, published: JsonObject) -> bool:
    """Return whether a config.json has no old form of ``text.rope_parameters``, though there is one, or another."""
    if "rope_parameters" not in published or not old_form(text, of_any_type=False):
        return False
    said = {name: published[name] for name in (*OLD_FIELDS, *PARTS) if name in published}
    return not _reads(text, said, text.rope_parameters, alone=True)


def _candidates(text: Any, rope: JsonObject) -> Iterator[JsonObject]:
    """Yield forms of ``rope`` that some config class may read, if transformers 4 computes such a rope dict likewise."""
    has_original = getattr(text, "original_max_position_embeddings", None) is not None
    for _, parameters in rope_dicts(rope):
        kind = parameters.get("rope_type", "default")
        if kind != "default" and text.model_type in PASS_OVER_SCALING:
            return
        if kind == "longrope" and not has_original:
            # transformers 4 would switch, and scale, by max_position_embeddings
            one_set = parameters.get("short_factor") == parameters.get("long_factor")
            if not one_set or parameters.get("attention_factor") is None:
                return
        elif kind != "longrope" and kind not in OLD_TYPES:
            return
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


def _reads(text: Any, form: JsonObject, rope: JsonObject, *, alone: bool = False) -> bool:
    """Return whether transformers reads ``rope`` from these old fields, ``alone`` or next to the new ones."""
    try:
        built = _read(text, form, without=("rope_parameters",) if alone else ())
    except REFUSALS:
        return False
    kept = [name for name in form if name in vars(built) and name != "partial_rotary_factor"]  # some configs keep it
    return same_rope(getattr(built, "rope_parameters", None), rope) and (alone or not kept)


def _read(text: Any, form: JsonObject, without: tuple[str, ...] = ()) -> Any:
    """Read the config from a dictionary that holds ``form`` and no other old field."""
    fields_now = {name: value for name, value in text.to_dict().items() if name not in (*OLD_FIELDS, *without)}
    fields_now |= {name: vars(text)[name] for name in OLD_FIELDS if name in declared_fields(text) & vars(text).keys()}
    return type(text).from_dict(copy.deepcopy(fields_now | form))
