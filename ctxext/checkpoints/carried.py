"""Take off the extension that a config carries, give it again, or compare it with another."""

from __future__ import annotations

import copy
import reprlib
from typing import Any

from ctxext.core.old_form import drop_old_form
from ctxext.core.saved import extended_texts, extensions_in, identity, saved_method, saved_sides
from ctxext.core.scaling import REFUSALS, scaling_of
from ctxext.core.subject import field_of
from ctxext.errors import CheckpointError
from ctxext.files import JsonObject
from ctxext.rope_types import GUARD
from ctxext.spec import ExtensionArguments


def already_extended(config: Any) -> str | None:
    """Say in a few words how a config is already extended; None for a plain config."""
    saved = getattr(config, "ctxext", None)
    if saved:
        return "; ".join(
            f"{name and f'{name}: '}ctxext {part['method']['method']}, trained_length={part['trained_length']}"
            for name, part in extensions_in(saved).items()
        )
    scaling = scaling_of(config)
    return None if scaling is None else str(scaling)


def plain_config(config: Any, saved: JsonObject) -> Any:
    """Return a copy of a config as it was before the extension ``saved`` was written into it."""
    plain = copy.deepcopy(config)
    for text, extension in zip(extended_texts(plain), extensions_in(saved).values(), strict=True):
        drop_old_form(text)
        try:
            for name, value in extension["original"].items():
                part, leaf = field_of(plain if "." in name else text, name)  # dots lead through the whole config
                if value is None and leaf in vars(part):
                    delattr(part, leaf)
                elif value is not None:
                    setattr(part, leaf, copy.deepcopy(value))
        except REFUSALS as error:
            place = config._name_or_path or "this config"
            raise CheckpointError(f"The extension in {place} is damaged, under original: {error}") from error
    del plain.ctxext
    if GUARD in plain.to_json_string():
        raise CheckpointError("The extension in this config is damaged: original lacks what it replaced.")
    return plain


def arguments_of(saved: JsonObject, attention: str | None = None) -> ExtensionArguments | dict[str, ExtensionArguments]:
    """Return the arguments that give a model this extension again; for an encoder-decoder, by side."""
    parts = extensions_in(saved)
    computed = [name for name, part in parts.items() if part["attention"]] or parts  # refused where there is none
    each = {
        name: ExtensionArguments(method=saved_method(part), **choices(part, attention if name in computed else None))
        for name, part in parts.items()
    }
    return each.get("", each)


def choices(saved: JsonObject, attention: str | None = None) -> JsonObject:
    """Return the arguments of ``patch`` besides the method; ``attention`` overrides the saved backend."""
    given = {key: saved[key] for key in ("trained_length", "sliding_window", "scaling", "attention")}
    return given if attention is None else given | {"attention": attention}


def differences(there: JsonObject | None, here: JsonObject | None) -> str:
    """Say how two saved extensions differ in what logits depend on, with both values; empty if in nothing."""
    if (there and saved_sides(there)) or (here and saved_sides(here)):
        sides = [saved_sides(saved or {}) for saved in (there, here)]
        each = {name: differences(*(side.get(name) for side in sides)) for name in sides[0] | sides[1]}
        return "; ".join(f"{name}: {difference}" for name, difference in each.items() if difference)
    one, other = (None if saved is None else identity(saved) for saved in (there, here))
    if one is None or other is None:
        names = ["not extended" if choice is None else f"method {choice['method']!r}" for choice in (one, other)]
        return "" if one == other else f"{names[0]} there, {names[1]} here"
    # Two methods differ in which parameters they have; two versions of ctxext in which choices they know.
    known = [name for name in one | other if one["method"] == other["method"] or (name in one and name in other)]
    different = [name for name in known if one.get(name) != other.get(name)]
    if len(different) > 1 and "fingerprint" in different:  # which follows from the others
        different.remove("fingerprint")
    return "; ".join(
        f"{name} {reprlib.repr(one.get(name))} there, {reprlib.repr(other.get(name))} here" for name in different
    )
