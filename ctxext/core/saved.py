"""Write, check and read the saved form of an extension: ``config.ctxext``, plain JSON."""

from __future__ import annotations

import functools
from dataclasses import asdict, fields, replace
from typing import Any

import torch
import transformers
from packaging.version import Version

from ctxext.core.scaling import scaling_of
from ctxext.core.subject import SIDES, Subject, text_of
from ctxext.errors import CheckpointError, IncompatibleError, PatchStateError
from ctxext.files import JsonObject
from ctxext.methods import Method, method_class, saved_class
from ctxext.rope_types import GUARD
from ctxext.spec import Description, Extension, ExtensionArguments
from ctxext.version import __version__

# The newest versions that the test suite was run on; releases that mend the same minor version count as tested.
TESTED = {"transformers": "5.24.0", "torch": "2.13.0"}

FORMAT = 1
# For an encoder-decoder. Under "sides", each side has the entries of a whole model, and its "place".
SIDES_FORMAT = 2
# What no logit depends on: who wrote it, how it was found (``ctxext choose``) and how it is expressed, what to tell a
# user, how to undo it, which of several exact kernels computes it, and what follows from the rest. Whatever else a
# saved form holds, now or later, counts.
NOT_IDENTITY = ("format", "versions", "stored_as", "stock", "notes", "original", "attention", "target_length", "chosen")
# What later code relies on; a file may have been damaged, or changed by hand.
KINDS: dict[str, type] = {
    **dict.fromkeys(("method", "versions", "original", "sides"), dict),
    **dict.fromkeys(("fingerprint", "stored_as", "place"), str),
    **dict.fromkeys(("trained_length", "target_length"), int),
    "notes": list,
}

# A guard keeps programs without ctxext out of a checkpoint whose config has no field about its extension. It is a
# sentence instead of a number: transformers 5 checks types and quotes it, and programs without checks cannot compute
# with it. Live modules of a patched model have the number.

GUARDED_FIELD = "layer_norm_epsilon"
"""The guarded number of models with ALiBi."""

GUARDED = (GUARDED_FIELD, "dropout", "hidden_dropout", "rms_norm_eps")
"""Numbers that every class of transformers with such a field reads and checks to be numbers."""


def untested_versions() -> list[str]:
    """Return a sentence for each of transformers and torch that is newer here than every tested version."""
    installed = {"transformers": transformers.__version__, "torch": torch.__version__}
    return [
        f"ctxext {__version__} was tested with {name} up to {TESTED[name]}, and this is {version}. If something "
        f"fails here, install {name}=={TESTED[name]}."
        for name, version in installed.items()
        if Version(version).release[:2] > Version(TESTED[name]).release[:2]
    ]


def saved_form(chosen: Method, extension: Extension) -> JsonObject:
    """Return what ``config.ctxext`` holds: plain JSON that rebuilds, describes and traces an extension."""
    versions = {"ctxext": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
    saved = asdict(extension) | {"notes": list(extension.notes)}
    return {"format": FORMAT, "method": chosen.to_dict(), **saved, "versions": versions}


def saved_sides_form(sides: dict[str, JsonObject]) -> JsonObject:
    """Return the ``config.ctxext`` of an encoder-decoder, from the form and place of each side, the encoder first."""
    first = next(iter(sides.values()))
    lengths = {name: first[name] for name in ("trained_length", "target_length")}  # of the text that is read
    return {"format": SIDES_FORMAT, **lengths, "sides": sides}


def saved_sides(saved: JsonObject) -> dict[str, JsonObject]:
    """Return the extension of each side of an encoder-decoder by its name; empty for every other model."""
    sides: dict[str, JsonObject] = saved.get("sides", {})
    return {name: sides[name] for name in SIDES if name in sides}  # in files they are sorted by the alphabet


def extensions_in(saved: JsonObject) -> dict[str, JsonObject]:
    """Return each side's extension by its name, or a whole model's under the empty name."""
    return saved_sides(saved) or {"": saved}


def arguments_over(
    config: Any, saved: JsonObject, arguments: ExtensionArguments
) -> tuple[ExtensionArguments | dict[str, ExtensionArguments], JsonObject | None]:
    """Return the arguments for a config that is already extended, and the extension to take off before.

    None is taken off where the weights were trained with it: without its entry it is a scaling as in any checkpoint.
    Each side of an encoder-decoder is extended from its saved length; the arguments give the first side's.

    Raises:
        PatchStateError: the trained length is missing or no length of that extension; or only ctxext computes what
            should be kept.
    """
    parts = extensions_in(saved)
    reach, known, given = saved["target_length"], saved["trained_length"], arguments.trained_length
    # A user whose weights were trained with the extension passes its reach as the length, or only a ``scaling``.
    goes_on = given == reach != known or (given is None and arguments.scaling is not None)
    kept, stock = goes_on and arguments.scaling in (None, "extend"), all(part["stock"] for part in parts.values())
    if not (stock if kept else given == known):
        contradiction = "" if given is None else f", and trained_length={given} contradicts that"
        way = "Only ctxext computes that extension, so no method can begin from it."
        if stock and reach != known:
            way = (
                f"If its weights were trained with that extension, pass trained_length={reach}: the new method then "
                f"extends it further."
            )
        raise PatchStateError(
            f"This checkpoint is already extended (ctxext {next(iter(parts.values()))['method']['method']}, "
            f"trained_length={known}){contradiction}. Pass the length before that extension, trained_length={known} "
            f"(--trained-length {known}): the new method then replaces it. {way}"
        )
    each = dict.fromkeys(SIDES, replace(arguments, trained_length=None))
    for (name, part), text in zip(parts.items(), extended_texts(config), strict=True):
        scaling = part["scaling"] if arguments.scaling is None else arguments.scaling
        if kept:
            scaling = "extend" if scaling_of(text) else None
        length = part["target_length" if kept else "trained_length"]
        each[name] = replace(arguments, trained_length=length, scaling=scaling)
    return each.get("", each), None if kept else saved


def extended_texts(config: Any) -> list[Any]:
    """Return the parts of a config that hold its extension: one, or one for each side of an encoder-decoder."""
    sides = saved_sides(getattr(config, "ctxext", None) or {})
    places = [side.get("place", "") for side in sides.values()]
    texts = [
        functools.reduce(lambda part, name: getattr(part, name, None), place.split("."), config) for place in places
    ]
    if not all(isinstance(text, transformers.PreTrainedConfig) for text in texts):
        raise CheckpointError(f"The extension in this config is damaged: {' or '.join(places)} is no part of it.")
    return texts or [text_of(config)]


def saved_extension(config: Any, place: str) -> JsonObject | None:
    """Return the extension that a config carries; None for a plain config.

    Raises:
        CheckpointError: if it is not in a form that this version of ctxext reads.
    """
    saved = getattr(config, "ctxext", None)
    return None if saved is None else checked_extension(saved, place)


def checked_extension(saved: Any, place: str) -> JsonObject:
    """Return a saved extension, or raise ``CheckpointError`` if this version of ctxext does not read its form."""
    version = saved.get("format") if isinstance(saved, dict) else saved
    if not isinstance(saved, dict) or version not in (FORMAT, SIDES_FORMAT):
        raise CheckpointError(
            f"The extension in {place} has format {version!r}; ctxext {__version__} reads format {FORMAT}. It was "
            f"saved by another version of ctxext, or changed by hand."
        )
    needed = {"sides", "trained_length", "target_length"}
    if version == FORMAT:
        needed = {"method", "versions", *(field.name for field in fields(Extension))}
    missing = sorted(needed - saved.keys())
    if missing:
        raise CheckpointError(f"The extension in {place} is incomplete, without {', '.join(missing)}.")
    for name, kind in KINDS.items():
        if name in saved and (not isinstance(saved[name], kind) or isinstance(saved[name], bool)):
            raise CheckpointError(f"The extension in {place} is damaged: {name}={saved[name]!r} is no {kind.__name__}.")
    if version == SIDES_FORMAT:
        sides = {name: checked_extension(side, f"{place} ({name})") for name, side in saved["sides"].items()}
        if not saved_sides(saved):
            raise CheckpointError(f"The extension in {place} is damaged: sides={sorted(sides)}, of {', '.join(SIDES)}.")
        return saved | {"sides": sides}
    for name, part in (("method", "method"), ("versions", "ctxext")):
        if part not in saved[name]:
            raise CheckpointError(f"The extension in {place} is incomplete: {name} is without {part}.")
    return saved


def describe_saved(saved: JsonObject, model_type: str, edits: tuple[str, ...] = ()) -> Description:
    """Describe an extension from its saved form, ``config.ctxext``."""
    if sides := saved_sides(saved):
        each = {name: describe_saved(side, f"{model_type} {name}") for name, side in sides.items()}
        return Description(
            model_type=model_type,
            method={name: side["method"] for name, side in sides.items()},
            trained_length=saved["trained_length"],
            target_length=saved["target_length"],
            stored_as="; ".join(f"{name}: {side.stored_as}" for name, side in each.items()),
            stock=all(side.stock for side in each.values()),
            fingerprint="-".join(side.fingerprint for side in each.values()),
            edits=edits,
            sides=tuple(each.items()),
        )
    known = {field.name for field in fields(Description)} - {"method", "notes", "attention", "sides", "verbose"}
    values = {key: value for key, value in saved.items() if key in known}
    notes = tuple(map(str, saved["notes"]))  # a file may hold anything
    return Description(model_type=model_type, method=saved["method"], notes=notes, edits=edits, **values)


def saved_method(saved: JsonObject) -> Method:
    """Rebuild the method of a saved extension.

    Raises:
        CheckpointError: if no method of its name is known in this process.
        IncompatibleError: if its two sides have an extension each.
    """
    if saved_sides(saved):
        raise IncompatibleError(
            "This operation does not support encoder-decoders, whose two sides are extended separately. "
            "Use patch, load, describe and save."
        )
    return saved_class(saved["method"]["method"]).from_dict(saved["method"])


def identity(saved: JsonObject) -> JsonObject:
    """Return every choice in a saved extension that logits depend on: equal ones give the same weights equal logits."""
    if "sides" in saved:
        return {name: identity(side) for name, side in saved_sides(saved).items()}
    rest = {name: value for name, value in saved.items() if name not in (*NOT_IDENTITY, "method")}
    kept = {"sliding_window": rest.get("sliding_window") or "keep"}  # leaving it out is to keep what there is
    # A method of the user's own, passed as an object, cannot be rebuilt from its name: it is compared as it was saved.
    known = method_class(saved["method"]["method"])
    chosen = saved["method"] if known is None else known.from_dict(saved["method"]).to_dict()
    return chosen | rest | kept


def guarded_field(subject: Subject, otherwise: str) -> str:
    """Return the config field whose guard makes plain transformers refuse a checkpoint.

    Raises:
        IncompatibleError: if no such field exists.
    """
    for name in GUARDED:
        if isinstance(vars(subject.config).get(name), int | float):
            return name
    raise IncompatibleError(
        f"Plain transformers {otherwise}, and ctxext cannot make it refuse the checkpoint of this {subject.kind}. That "
        f"needs one of the fields {', '.join(GUARDED)} in the config."
    )


def without_guard(config: Any) -> None:
    """Replace guards in a config by the original numbers, in place."""
    for name in [name for name, value in vars(config).items() if value == GUARD]:
        setattr(config, name, config.ctxext["original"][name])
