"""``config.ctxext``: the saved form of an extension, written by ``patch`` and checked when it is read."""

from __future__ import annotations

import copy
import reprlib
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

import torch
import transformers
from packaging.version import Version

from ctxext.errors import CheckpointError, IncompatibleError, PatchStateError
from ctxext.methods import Method, method_class, saved_class
from ctxext.spec import Extension, ExtensionArguments
from ctxext.surgery.edits import Edits
from ctxext.surgery.lengths import SCALED, scaling_of
from ctxext.surgery.old_form import drop_old_form, rope_dicts, write_old_form
from ctxext.surgery.sides import SIDES
from ctxext.surgery.texts import field_of, part_of_config, text_of
from ctxext.version import __version__

# The newest versions that the test suite was run on; releases that mend the same minor version count as tested.
TESTED = {"transformers": "5.24.0", "torch": "2.13.0"}

FORMAT = 1
# Of an encoder-decoder: under "sides", what each side would hold if it were a model of its own, and its "place".
SIDES_FORMAT = 2
# What no logit depends on: who wrote it, how it was found (``ctxext choose``) and how it is expressed, what to tell a
# user, how to undo it, which of several exact kernels computes it, and what follows from the rest. Whatever else a
# saved form holds, now or later, counts.
NOT_IDENTITY = (
    "format",
    "versions",
    "stored_as",
    "stock",
    "notes",
    "original",
    "attention",
    "target_length",
    "chosen",
)
OPTIONAL = {field.name: field.default for field in fields(Extension) if field.default is not MISSING}
# What later code relies on; a file may have been damaged, or changed by hand.
KINDS = {
    "method": dict,
    "versions": dict,
    "original": dict,
    "notes": list,
    "fingerprint": str,
    "stored_as": str,
    "trained_length": int,
    "target_length": int,
}


def untested_versions() -> list[str]:
    """A sentence for each of transformers and torch that is newer here than any version that ctxext was tested with."""
    installed = {"transformers": transformers.__version__, "torch": torch.__version__}
    return [
        f"ctxext {__version__} was tested with {name} up to {TESTED[name]}, and this is {version}. If something "
        f"fails here, install {name}=={TESTED[name]}."
        for name, version in installed.items()
        if Version(version).release[:2] > Version(TESTED[name]).release[:2]
    ]


def saved_form(chosen: Method, extension: Extension) -> dict[str, Any]:
    """What ``config.ctxext`` holds: plain JSON, enough to rebuild, to describe and to trace the extension."""
    versions = {"ctxext": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
    saved = asdict(extension) | {"notes": list(extension.notes)}
    return {"format": FORMAT, "method": chosen.to_dict(), **saved, "versions": versions}


def saved_sides_form(sides: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What the ``config.ctxext`` of an encoder-decoder holds.

    Args:
        sides: by name, the encoder first: where its config lies in the whole one, and its own saved form.
    """
    held = {name: saved | {"place": place} for name, (place, saved) in sides.items()}
    first = next(iter(held.values()))
    lengths = {name: first[name] for name in ("trained_length", "target_length")}  # of the text that is read
    return {"format": SIDES_FORMAT, **lengths, "sides": held}


def saved_sides(saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The extensions of the sides of an encoder-decoder, by name; empty where there is one extension for all."""
    found: dict[str, dict[str, Any]] = saved.get("sides", {})
    return {name: found[name] for name in SIDES if name in found}  # files have them by the alphabet


def version_of(saved: dict[str, Any]) -> str:
    """The version of ctxext that wrote an extension."""
    one = next(iter(saved_sides(saved).values()), saved)
    return str(one["versions"]["ctxext"])


def arguments_of(
    saved: dict[str, Any], attention: str | None = None
) -> ExtensionArguments | dict[str, ExtensionArguments]:
    """Return the arguments that give a model this extension again; of an encoder-decoder, those of each side by name.

    Args:
        saved: the extension.
        attention: the backend that takes the place of the saved one, where there is one.
    """
    if sides := saved_sides(saved):
        each = {name: choices(side, attention if side["attention"] else None) for name, side in sides.items()}
        return {name: ExtensionArguments(method=saved_method(sides[name]), **each[name]) for name in sides}
    return ExtensionArguments(method=saved_method(saved), **choices(saved, attention))


def arguments_in_place_of(
    saved: dict[str, Any], arguments: ExtensionArguments
) -> ExtensionArguments | dict[str, ExtensionArguments]:
    """Return the arguments of an extension that replaces a saved one; of an encoder-decoder, those of each side.

    The trained length of an encoder-decoder is that of its first extended side. Each side is extended from its own.

    Raises:
        PatchStateError: the trained length is missing, or not the saved one.
    """
    sides = saved_sides(saved)
    checked_trained_length(next(iter(sides.values()), saved), arguments.trained_length)
    if not sides:
        return replace(arguments, scaling=arguments.scaling or choices(saved)["scaling"])
    each = dict.fromkeys(SIDES, replace(arguments, trained_length=None))
    for name, side in sides.items():
        scaling = arguments.scaling or choices(side)["scaling"]
        each[name] = replace(arguments, trained_length=side["trained_length"], scaling=scaling)
    return each


def extended_texts(config: Any) -> list[Any]:
    """The parts of a config that its extension is written into: one, or one for each side of an encoder-decoder."""
    sides = saved_sides(getattr(config, "ctxext", None) or {})
    return [part_of_config(config, side["place"]) for side in sides.values()] or [text_of(config)]


def saved_extension(config: Any, place: str) -> dict[str, Any] | None:
    """The extension that a config carries, None where it is plain.

    Raises:
        CheckpointError: if it is not in a form that this version of ctxext reads.
    """
    saved = getattr(config, "ctxext", None)
    return None if saved is None else checked_extension(saved, place)


def checked_extension(saved: Any, place: str) -> dict[str, Any]:
    """``saved``, if it is in the form that this version of ctxext reads and writes, with every choice in it.

    A choice that did not exist yet when it was saved has its default: that is how the model was extended then.

    Raises:
        CheckpointError: if it is not.
    """
    found = saved.get("format") if isinstance(saved, dict) else saved
    if found == SIDES_FORMAT and isinstance(saved.get("sides"), dict):
        whole: dict[str, Any] = saved
        sides = {name: checked_extension(side, f"{place} ({name})") for name, side in whole["sides"].items()}
        return whole | {"sides": sides}
    if not isinstance(saved, dict) or found != FORMAT:
        raise CheckpointError(
            f"The extension in {place} has format {found!r}; ctxext {__version__} reads format {FORMAT}. It was "
            f"saved by another version of ctxext, or changed by hand."
        )
    needed = {"method", "versions", *(field.name for field in fields(Extension) if field.name not in OPTIONAL)}
    missing = sorted(needed - saved.keys())
    if missing:
        raise CheckpointError(f"The extension in {place} is incomplete, without {', '.join(missing)}.")
    for name, kind in KINDS.items():
        if name in saved and (not isinstance(saved[name], kind) or isinstance(saved[name], bool)):
            raise CheckpointError(f"The extension in {place} is damaged: {name}={saved[name]!r} is no {kind.__name__}.")
    for name, part in (("method", "method"), ("versions", "ctxext")):
        if part not in saved[name]:
            raise CheckpointError(f"The extension in {place} is incomplete: {name} is without {part}.")
    return _complete(saved)


def _complete(saved: dict[str, Any]) -> dict[str, Any]:
    """With every choice that did not exist yet when it was saved, as the model was extended then."""
    return OPTIONAL | {"scaling": _scaling_before(saved)} | saved


def saved_method(saved: dict[str, Any]) -> Method:
    """Rebuild the method of a saved extension.

    Raises:
        CheckpointError: if no method of its name is known in this process.
        IncompatibleError: if its two sides have an extension each.
    """
    if saved_sides(saved):
        raise IncompatibleError(
            "This is an encoder-decoder whose sides have an extension each, and what was asked is for models with one. "
            "Use patch, load, describe and save."
        )
    return saved_class(saved["method"]["method"]).from_dict(saved["method"])


def identity(saved: dict[str, Any]) -> dict[str, Any]:
    """Every choice in a saved extension that logits depend on: the same weights compute the same where this is equal.

    Args:
        saved: ``config.ctxext`` of a model, or what was stored of it.
    """
    if sides := saved_sides(saved):
        return {name: identity(side) for name, side in sides.items()}
    rest = {name: value for name, value in _complete(saved).items() if name not in (*NOT_IDENTITY, "method")}
    kept = {"sliding_window": rest.get("sliding_window") or "keep"}  # leaving it out is to keep what there is
    # A method of the user's own, passed as an object, cannot be rebuilt from its name: it is compared as it was saved.
    known = method_class(saved["method"]["method"])
    chosen = saved["method"] if known is None else known.from_dict(saved["method"]).to_dict()
    return chosen | rest | kept


def differences(there: dict[str, Any] | None, here: dict[str, Any] | None) -> str:
    """How two saved extensions differ in what logits depend on, with both values; empty where they are one.

    Args:
        there: what was saved, None for a model that was not extended.
        here: what is compared with it, None for a model that is not extended.
    """
    if (there and saved_sides(there)) or (here and saved_sides(here)):
        return _differing_sides(saved_sides(there or {}), saved_sides(here or {}))
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


def _differing_sides(there: dict[str, dict[str, Any]], here: dict[str, dict[str, Any]]) -> str:
    found = {name: differences(there.get(name), here.get(name)) for name in there | here}
    return "; ".join(f"{name}: {said}" for name, said in found.items() if said)


def choices(saved: dict[str, Any], attention: str | None = None) -> dict[str, Any]:
    """What else ``patch`` was told; the attention backend may be another on another machine."""
    full = _complete(saved)
    given = {key: full[key] for key in ("trained_length", "sliding_window", "scaling", "attention")}
    return given if attention is None else given | {"attention": attention}


def _scaling_before(saved: dict[str, Any]) -> str | None:
    """What an extension did to a scaling before that was said: it replaced it."""
    before = saved["original"].get("rope_parameters") or {}
    kinds = {rope.get("rope_type", "default") for _, rope in rope_dicts(before)}
    return "replace" if kinds & set(SCALED) else None


def checked_trained_length(saved: dict[str, Any], trained_length: int | None) -> None:
    """Refuse to extend anew what is saved extended, unless the length that its weights were trained for is said.

    Raises:
        PatchStateError: without a length, or with another one than was saved.
    """
    known, name = saved["trained_length"], saved["method"]["method"]
    if trained_length == known:
        return
    remedy = f", and trained_length={trained_length} contradicts that. Pass"
    if trained_length is None:
        remedy = ". Say which length its weights were trained for before that extension:"
    raise PatchStateError(
        f"This checkpoint is already extended (ctxext {name}, trained_length={known}){remedy} trained_length={known}; "
        f"the new method then replaces the old one."
    )


def plain_config(config: Any, saved: dict[str, Any]) -> Any:
    """A copy of ``config`` as it was before the extension ``saved`` was written into it."""
    plain = copy.deepcopy(config)
    for text, own in zip(extended_texts(plain), saved_sides(saved).values() or [saved], strict=True):
        drop_old_form(text)
        for name, value in own["original"].items():
            part, leaf = field_of(plain if "." in name else text, name)  # dots lead through the whole config
            if value is None and leaf in vars(part):
                delattr(part, leaf)
            elif value is not None:
                setattr(part, leaf, copy.deepcopy(value))
    del plain.ctxext
    return plain


def with_old_form(config: Any) -> Any:
    """A copy of an extended config for a config.json of its own, with the old form wherever its own class reads it."""
    copied = copy.deepcopy(config)
    put_old_form(copied, Edits())
    return copied


def put_old_form(config: Any, edits: Edits) -> None:
    """Make an extended config itself such a one, until ``edits`` is undone."""
    for text in extended_texts(config):
        write_old_form(text, edits, of_any_type=False)


def already_extended(config: Any) -> str | None:
    """How a config is already extended, in a few words; None where it is plain."""
    saved = getattr(config, "ctxext", None)
    if saved:
        sides = {f"{name}: ": own for name, own in saved_sides(saved).items()} or {"": saved}
        return "; ".join(
            f"{whose}ctxext {own['method']['method']}, trained_length={own['trained_length']}"
            for whose, own in sides.items()
        )
    scaling = scaling_of(config)
    return None if scaling is None else str(scaling)
