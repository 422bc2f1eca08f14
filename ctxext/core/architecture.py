"""The contract of an architecture: access to the positions of one model family."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig

from ctxext.core.code import source_of_home, why_absent
from ctxext.core.config import stated_length
from ctxext.core.edits import Edits
from ctxext.core.published import BLOCKS, NESTED, is_number
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods import Method
from ctxext.spec import Extension, ExtensionArguments


class Architecture(ABC):
    """One family of models, recognised by structure rather than by name.

    Class attributes of a family:
        name: its name in lists.
        positions: its kind of positions, as in ``refuse_other_positions``.
        decoder_class: transformers' class of the module that builds the mask and calls the layers; a family without
            one overrides ``matches``.
    """

    name: ClassVar[str]
    positions: ClassVar[str] = "table"
    decoder_class: ClassVar[type[nn.Module]]

    def matches(self, subject: Subject) -> bool:
        """Return whether ``subject`` has the positions of this family."""
        return any(isinstance(module, self.decoder_class) and self.holds(module) for module in subject.model.modules())

    def holds(self, decoder: nn.Module) -> bool:
        """Return whether a decoder of the family's class has its positions; the config of some asks for others."""
        return True

    @abstractmethod
    def apply(self, subject: Subject, method: Method, request: ExtensionArguments, edits: Edits) -> Extension:
        """Extend ``subject`` in place, through ``edits`` only.

        Raises:
            IncompatibleError: if the method does not fit this model; nothing was edited then.
            VerificationError: if the patched model does not compute the method.
        """

    @abstractmethod
    def revert(self, subject: Subject, original: dict[str, Any], edits: Edits) -> None:
        """Remove the extension of a model that was loaded with it, given the original config fields."""

    def why_final(self, subject: Subject) -> str | None:
        """Return why the extension of a loaded model cannot be removed; None if ``revert`` can."""
        return None

    def replaces_weights(self, subject: Subject, saved: dict[str, Any] | None = None) -> bool:
        """Return whether an extension replaces weights: the one ``saved`` in a config, or any of this family."""
        return False

    def replaced_weights(self, subject: Subject) -> dict[str, nn.Parameter]:
        """Return the weights that an extension of the model replaces, by name."""
        return {}

    def trained_length(self, subject: Subject) -> int | None:
        """Return the trained length in tokens that the config states; None if it states none."""
        return stated_length(subject.text)


ARCHITECTURES: dict[str, type[Architecture]] = {}
"""Families by name, rotary models first, which are the most; the folder fills it."""


def find_architecture(subject: Subject) -> Architecture | None:
    """Return the first architecture that matches the model; None if none does."""
    return next((family for kind in ARCHITECTURES.values() if (family := kind()).matches(subject)), None)


def architecture_of(subject: Subject) -> Architecture:
    """Return the first architecture that matches the model.

    Raises:
        IncompatibleError: if none matches, or the config asks for other positions than the model has.
    """
    if (family := find_architecture(subject)) is not None:
        refuse_other_positions(subject, family.positions)
        return family
    raise IncompatibleError(
        f"{type(subject.model).__name__} ({subject.kind}) has no positions that ctxext can extend: "
        f"{why_absent(subject.model)}. Known families: {', '.join(ARCHITECTURES)}."
    )


def unknown_length(subject: Subject) -> IncompatibleError:
    """Return the error for a model whose trained length neither the user nor its config states."""
    return IncompatibleError(
        f"The config of this {subject.kind} does not state the trained length. Pass trained_length (--trained-length)."
    )


def refuse_attention_choices(request: ExtensionArguments, leaves: str) -> None:
    """Raise ``InvalidParameterError`` for a choice about attention that the extension ``leaves`` to the model."""
    for name in ("sliding_window", "attention"):
        if (given := getattr(request, name)) is not None:
            raise InvalidParameterError(f"{name}={given!r}: {leaves} attention to the model. Leave {name} out.")


# Fields by which configs ask for a kind of positions.
ASKED = {
    "alibi": re.compile(r"alibi", re.I),
    "relative": re.compile(r"^(rel_pos|relative_(attention|position))", re.I),
    "rotary": re.compile(
        r"^((use_|with_)?(rotary|rope)$|use_(rotary|rope)|rotary_emb_(fraction|base)|rope_(theta|scaling|parameters)$)",
        re.I,
    ),
}
# Fields that turn a kind on or off; if one is false, other fields of that kind are leftovers and count for nothing.
SWITCHES = {
    "alibi": re.compile(r"^((use|with)_)?alibi$", re.I),
    "rotary": re.compile(r"^((use|with)_)?(rope|rotary)((_pos(ition(al)?)?)?_emb(ed(ding)?s?)?)?$", re.I),
    "table": re.compile(r"^(use|with|add)_(abs(olute)?_)?pos(ition(al)?)?_(emb(ed(ding)?s?)?|enc(oding)?s?)$", re.I),
}
# Fields that name the kind, such as position_embedding_type, and the words that they use for it.
NAMES_KIND = re.compile(
    r"^(pos(ition(al)?)?_(emb(ed(ding)?s?)?|enc(oding)?s?)(_type)?|pos(ition(al)?)?_type|pe_type)$", re.I
)
KINDS = {"alibi": "alibi", "rel": "relative", "rot": "rotary", "rope": "rotary", "sin": "sinusoids"}
NO_KIND = ("none", "nope", "no", "false")
# Fields that scale rotation under names outside transformers' rope dicts.
SCALES = re.compile(
    r"^(rope|rotary)_(emb_)?(ratio|scale|((freq|linear|ntk)_)?(scaling_|scale_)?factor)$|^compress_pos_emb$", re.I
)


def refuse_other_positions(subject: Subject, kind: str) -> None:
    """Raise if a config asks for a kind of positions that the built model does not have.

    Checkpoints with code of their own may use a model type of transformers. The class of that type takes their weights
    and ignores fields that it does not know. A model that was built from its own code passes.

    Args:
        kind: its kind of positions: "rotary", "alibi", "relative", "table", "sinusoids", or anything else.

    Raises:
        IncompatibleError: with the field and the way out.
    """
    home = type(subject.model).__module__
    if home.startswith("transformers_modules."):
        return
    for config in {id(config): config for config in (subject.config, subject.text)}.values():
        blocks = {"": vars(config)}
        for name, value in vars(config).items():
            block = vars(value) if isinstance(value, PreTrainedConfig) else value
            if isinstance(block, dict) and NESTED.search(name) and name not in BLOCKS:
                blocks[f"{name}."] = block
        for place, name in ((place, name) for place, block in blocks.items() for name in _asking(block, kind)):
            reads = re.compile(rf"(\.|['\"]){re.escape(name)}\b")  # as an attribute, or as a string
            readers = [type(subject.model), *([type(config)] if place == "" else [])]
            if any(reads.search(source_of_home(reader)) for reader in readers):
                continue
            remedy = "Load it with the code that it was trained with."
            if getattr(config, "auto_map", None):
                remedy = "The checkpoint brings its code (auto_map): read it, then load with trust_remote_code=True."
            of_transformers = " of transformers" if home.startswith("transformers.") else ""
            raise IncompatibleError(
                f"The config of this {config.model_type} has {place}{name}={blocks[place][name]!r}, but "
                f"{type(subject.model).__name__}{of_transformers} does not read it. The built model has other "
                f"positions than the weights were trained with. {remedy}"
            )


def _asking(block: dict[str, Any], kind: str) -> Iterator[str]:
    """Yield the names of fields that ask for other positions than those of ``kind``."""
    switches = [
        (each, value)
        for each, switch in SWITCHES.items()
        for name, value in block.items()
        if isinstance(value, bool) and switch.match(name)
    ]
    off = {each for each, is_on in switches if not is_on and (each, True) not in switches}
    for name, value in block.items():
        asked: str | None = None
        if NAMES_KIND.match(name) and isinstance(value, str):
            label = value.lower()
            asked = "none" if label in NO_KIND else next((each for word, each in KINDS.items() if word in label), None)
        elif value is False and kind in SWITCHES and SWITCHES[kind].match(name):
            asked = "none"
        elif value and kind == "rotary" and SCALES.match(name) and is_number(value) and value != 1:
            asked = "scaled"
        elif value:
            asked = next((each for each, pattern in ASKED.items() if pattern.search(name)), None)
        if asked is not None and asked != kind and asked not in off:
            yield name
