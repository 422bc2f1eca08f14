"""The contract of an architecture: access to the positions of one model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

from torch import nn
from transformers import PreTrainedModel

from ctxext import registry
from ctxext.core.edits import Edits
from ctxext.core.rebuild import Rebuild
from ctxext.core.scaling import REFUSALS, scaling_of, stated_length
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.files import JsonObject
from ctxext.methods import METHODS, Method, RopeMethod
from ctxext.spec import Extension, ExtensionArguments


class Architecture(ABC):
    """One family of models, recognised by structure rather than by name.

    Class attributes of a family:
        name: Name of the family in lists.
        positions: Kind of positions, as in ``models/refusals.py``.
        methods: Kind of the methods that are made for such positions.
        decoder_class: transformers' class of the module that builds the mask and calls the layers; a family without
            one overrides ``matches``.
    """

    name: ClassVar[str]
    positions: ClassVar[str] = "table"
    methods: ClassVar[type[Method]] = RopeMethod
    decoder_class: ClassVar[type[nn.Module]]

    def matches(self, subject: Subject) -> bool:
        """Return whether ``subject`` has the positions of this family."""
        return any(isinstance(module, self.decoder_class) and self.holds(module) for module in subject.model.modules())

    def holds(self, decoder: nn.Module) -> bool:
        """Return whether a decoder of the family's class has its positions; the config of some asks for others."""
        return True

    def method_names(self) -> list[str]:
        """Return the names of the methods that are made for the positions of this family."""
        return [name for name, method in METHODS.items() if issubclass(method, self.methods)]

    @abstractmethod
    def apply(self, subject: Subject, method: Method, request: ExtensionArguments, edits: Edits) -> Extension:
        """Extend ``subject`` in place, through ``edits`` only.

        Raises:
            IncompatibleError: if the method does not fit this model; nothing was edited then.
            VerificationError: if the patched model does not compute the method.
        """

    def refuse_arguments(self, subject: Subject, method: Method, request: ExtensionArguments) -> None:
        """Refuse what ``apply`` would refuse by its arguments alone, before a method measures the model.

        Raises:
            CtxextError: as ``apply``.
        """
        if method.name not in (names := self.method_names()):
            raise IncompatibleError(
                f"Method {method.name!r} is not for the positions of this {subject.kind}. Methods for it: "
                f"{', '.join(names)}."
            )

    @abstractmethod
    def revert(self, subject: Subject, original: JsonObject, edits: Edits) -> None:
        """Remove the extension of a model that was loaded with it, given the original config fields."""

    def why_final(self, subject: Subject) -> str | None:
        """Return why the extension of a loaded model cannot be removed; None if ``revert`` can."""
        return None

    def replaces_weights(self, subject: Subject, saved: JsonObject | None = None) -> bool:
        """Return whether an extension replaces weights: the one ``saved`` in a config, or any of this family."""
        return False

    def replaced_weights(self, subject: Subject) -> dict[str, nn.Parameter]:
        """Return the weights that an extension of the model replaces, by name."""
        return {}

    def trained_length(self, subject: Subject) -> int | None:
        """Return the trained length in tokens that the config states; None if it states none."""
        return stated_length(subject.text)


ARCHITECTURES: Mapping[str, type[Architecture]] = {}
"""Families by name, rotary models first; ``ctxext.models`` replaces it with the registry of all its families."""
CHECKS: list[Callable[[Subject, str], None]] = []
"""Checks of a model against its config and its kind of positions, each of which may raise; ``models/`` adds them."""
EXPLANATIONS: list[Callable[[PreTrainedModel], str]] = []
"""Reasons why no family matches a model; ``models/`` adds the one there is."""


def find_architecture(subject: Subject) -> Architecture | None:
    """Return the first architecture that matches the model; None if none does."""
    registry.fill("steps")
    return next((family for kind in ARCHITECTURES.values() if (family := kind()).matches(subject)), None)


def architecture_of(subject: Subject) -> Architecture:
    """Return the first architecture that matches the model.

    Raises:
        IncompatibleError: if none matches, or the config asks for other positions than the model has, or its class
            refuses to read it back or to build from it.
    """
    try:
        Rebuild(subject)
    except REFUSALS as error:
        raise IncompatibleError(
            f"The config of this {subject.kind} could not be read back from a file: {error} Change what it names."
        ) from error
    _refuse_padding(subject)
    if (family := find_architecture(subject)) is not None:
        for check in CHECKS:
            check(subject, family.positions)
        return family
    registry.fill("explanations")
    raise IncompatibleError(
        f"{type(subject.model).__name__} ({subject.kind}) has no positions that ctxext can extend: "
        f"{' '.join(explain(subject.model) for explain in EXPLANATIONS)}. Known families: {', '.join(ARCHITECTURES)}."
    )


def _refuse_padding(subject: Subject) -> None:
    """Refuse a padding token, named since the model was built, with which transformers cannot build it again."""
    named, modules = getattr(subject.text, "pad_token_id", None), [*subject.model.modules()]
    least = min((module.num_embeddings for module in modules if isinstance(module, nn.Embedding)), default=0)
    has_rows = bool(subject.rotaries) and 0 <= int(named or 0) < least  # a table of positions may have fewer
    if named is None or has_rows or any(getattr(module, "padding_idx", None) == named for module in modules):
        return
    try:
        _ = Rebuild(subject).whole
    except (AssertionError, IndexError) as error:
        raise IncompatibleError(
            f"transformers cannot build this {subject.kind} again, since its config has pad_token_id={named}: {error}. "
            f"Name the padding token of its training, or call model.resize_token_embeddings for a new one first."
        ) from error
    except REFUSALS:  # of another reason, which matters only to families that build the model
        return


def trained_length_of(subject: Subject) -> int | None:
    """Return how many tokens the weights were trained for by the config; None if the config does not say."""
    if subject.saved is not None:
        return int(subject.saved["trained_length"])
    scaling = scaling_of(subject.config)
    if scaling is not None:  # its weights were trained with that, unless somebody says otherwise
        return scaling.window
    architecture = find_architecture(subject)
    return stated_length(subject.text) if architecture is None else architecture.trained_length(subject)


def required_length(subject: Subject, request: ExtensionArguments) -> int:
    """Return the trained length that the user or else the config states.

    Raises:
        IncompatibleError: if neither states one.
    """
    if request.trained_length is None:
        raise IncompatibleError(
            f"The config of this {subject.kind} does not state the trained length. Pass trained_length "
            f"(--trained-length)."
        )
    return int(request.trained_length)


def refuse_choices(request: ExtensionArguments, names: Iterable[str], reason: str) -> None:
    """Raise ``InvalidParameterError`` for the first of the named arguments of ``patch`` that was given."""
    for name in names:
        if (given := getattr(request, name)) is not None:
            raise InvalidParameterError(f"{name}={given!r}: {reason}. Leave {name} out.")
