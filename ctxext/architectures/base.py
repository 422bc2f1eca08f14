"""The contract of an architecture: access to the positions of one model family."""

from __future__ import annotations

import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods import Method
from ctxext.methods.parameters import checked_tokens
from ctxext.spec import Extension, Request
from ctxext.surgery.code import names_of, own_bases, source_of
from ctxext.surgery.edits import Edits
from ctxext.surgery.lengths import stated_length
from ctxext.surgery.subject import Subject


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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("matches", "apply", "revert"):
            if name in vars(cls) and "model" in inspect.signature(vars(cls)[name]).parameters:
                raise TypeError(
                    f"{cls.__name__}.{name} takes model, and is called with a ctxext.surgery.subject.Subject now. "
                    f"Rename the argument to subject, and take the model from subject.model."
                )

    def matches(self, subject: Subject) -> bool:
        """Return whether ``subject`` has the positions of this family."""
        return any(isinstance(module, self.decoder_class) and self.holds(module) for module in subject.model.modules())

    def holds(self, decoder: nn.Module) -> bool:
        """Return whether a decoder of the family's class has its positions; the config of some asks for others."""
        return True

    @abstractmethod
    def apply(self, subject: Subject, method: Method, request: Request, edits: Edits) -> Extension:
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
        """Return whether an extension of the model replaces weights, so that a changed config is not enough.

        Args:
            subject: the model, which is not touched.
            saved: the extension in its saved form; None for any extension of this family.
        """
        return False

    def replaced_weights(self, subject: Subject) -> dict[str, nn.Parameter]:
        """Return the weights that an extension of the model replaces, by name."""
        return {}

    def trained_length(self, subject: Subject) -> int | None:
        """Return the trained length in tokens that the config states; None if it states none."""
        return stated_length(subject.text)

    def known_length(self, subject: Subject, request: Request) -> int:
        """Return the trained length in tokens that the user passed, or else the one that the config states.

        Raises:
            IncompatibleError: if neither is known.
        """
        length = request.trained_length or self.trained_length(subject)
        if length is None:
            raise IncompatibleError(
                f"The config of this {subject.kind} does not state the trained length. Pass trained_length "
                f"(--trained-length)."
            )
        return checked_tokens("The trained length that the config names", length)


def refuse_attention_choices(request: Request, leaves: str) -> None:
    """Raise ``InvalidParameterError`` for a choice about attention that the extension ``leaves`` to the model."""
    for name in ("sliding_window", "attention"):
        if (given := getattr(request, name)) is not None:
            raise InvalidParameterError(f"{name}={given!r}: {leaves} attention to the model. Leave {name} out.")


def rotates_by_table(model: nn.Module) -> bool:
    """Return whether a model rotates by a table of sinusoids, which other models add to their input."""
    code = names_of(type(model))
    buffers = [name for name, _ in model.named_buffers()] + [name for name, _ in model.named_parameters()]
    verbs = [*code, *(name for module in model.modules() for name in vars(type(module)))]
    return any("embed_positions" in name for name in buffers) and any(name.startswith("apply_rotary") for name in verbs)


TABLE = re.compile(r"pos|wpe")
BUCKETS = re.compile(r"relative_attention_bias|rel_pos_bias")
SOME_POSITION = re.compile(
    r"rotary|alibi|sinus|wpe|relative|rel_|position_?(bias|emb|enc)|embed_pos|pos_?(emb|enc)", re.I
)
ROTATION = re.compile(r"rotary|rope(?![a-z])|^Rot([A-Z]|$)|Rope(?![a-z])|RoPE")
# Names of parts that do not read text.
ELSEWHERE = re.compile(r"vision|visual|image|audio|video", re.I)
# Words by which code of any author computes positions.
ARITHMETIC = re.compile(r"\b(pos|positions?|position_ids|theta|inv_freq|freqs?\w*|cos|sin|polar|slopes?)\b")


def why_absent(model: nn.Module) -> str:
    """Return the likeliest reason why no family matches, from the model's modules and the code of their classes."""
    code = names_of(type(model))
    if rotates_by_table(model):
        return (
            "it rotates by a sinusoid table that its own code computes once, and no field of its config (no "
            "rope_parameters) changes that table in a reload"
        )
    owners = [name for name, value in code.items() if name.endswith("RotaryEmbedding") and "Vision" not in name]
    if rotation := _own_rotation(model):
        return f"it rotates by code of its own ({rotation}), which does not have the form of transformers' rope types"
    if any(hasattr(code[name], "compute_default_rope_parameters") for name in owners):
        return "its code has rotary positions, but this checkpoint's config switches them off"
    if computing := [path for path, module in model.named_modules() if "Sinusoid" in type(module).__name__]:
        return (
            f"it adds sinusoids to its input ({computing[0]}), which its own code computes for each text. No field of "
            f"its config sets the size of a table"
        )
    return (
        _table(model)
        or _none_at_all(model)
        or "it has no rotary embedding in the form of transformers' rope types, and no ALiBi"
    )


def _own_rotation(model: nn.Module) -> str | None:
    """Return the path and class of a module that rotates text by its name; None if there is none."""
    for path, module in model.named_modules():
        name, kind = path.rpartition(".")[2], type(module).__name__
        if (ROTATION.search(name) or ROTATION.search(kind)) and not ELSEWHERE.search(f"{path} {kind}"):
            return f"{path}: {kind}"
    return None


def learned_positions(model: nn.Module) -> int | None:
    """Return the number of positions with a learned vector each; None if the model has no such table."""
    return next((rows for path, module, rows in _tables(model) if _is_learned(path, module)), None)


def _tables(model: nn.Module) -> Iterator[tuple[str, nn.Embedding, int]]:
    """Yield each embedding with its path and the number of tokens with a row; the decoder's before the encoder's."""
    stated = getattr(model.config, "max_position_embeddings", None)
    for path, module in reversed(list(model.named_modules())):
        if isinstance(module, nn.Embedding):
            rows = module.num_embeddings - int(getattr(module, "offset", 0))
            # The first rows of some tables stand for no position.
            yield path, module, stated if isinstance(stated, int) and 0 < stated <= rows else rows


def _is_learned(path: str, module: nn.Embedding) -> bool:
    name = path.rpartition(".")[2]
    return bool(TABLE.search(name)) and not BUCKETS.search(name) and "Sinusoid" not in type(module).__name__


def _table(model: nn.Module) -> str | None:
    """Return the reason for a model with a table of positions or of distances; None without such a table."""
    for path, module, rows in _tables(model):
        name = path.rpartition(".")[2]
        if BUCKETS.search(name):
            return (
                f"it has {module.num_embeddings} buckets of relative distances ({path}), the last of which holds all "
                f"farther distances"
            )
        if _is_learned(path, module):
            return (
                f"it has learned positions, one vector each for {rows:,} tokens ({path}), in an unknown form: no field "
                f"of its config that counts positions sets the size of that table"
            )
    return None


def _none_at_all(model: nn.Module) -> str | None:
    """Return the reason for a model without positions, or with positions in its own code; None for others."""
    kinds: set[Any] = {type(module) for module in model.modules()}  # mypy takes these for unhashable
    own_classes = {
        base for kind in kinds for base in own_bases(kind) if not base.__module__.startswith("transformers.")
    }
    if computing := sorted(base.__name__ for base in own_classes if ARITHMETIC.search(_source_beside(base))):
        return f"its positions are in code of its own (beside {computing[0]}), in a form that ctxext does not know"
    if any(_speaks_of_positions(base) for kind in kinds for base in own_bases(kind)):
        return None
    return "it has no positions at all, so nothing needs extending: only memory and its training limit its texts"


def _source_beside(kind: type) -> str:
    """Return the source of a class, and of the functions of its module, which it may call."""
    functions = [value for value in vars(sys.modules[kind.__module__]).values() if inspect.isfunction(value)]
    beside = [function for function in functions if function.__module__ == kind.__module__]
    return "\n".join(source_of(code) for code in (kind, *beside))


def _speaks_of_positions(kind: type) -> bool:
    lines = source_of(kind).splitlines()
    return any(SOME_POSITION.search(line) for line in lines if not line.lstrip().startswith("@"))  # those only offer
