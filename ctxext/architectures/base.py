"""The contract of an architecture: where positions live in one model family."""

from __future__ import annotations

import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods import Method
from ctxext.methods.parameters import checked_tokens
from ctxext.spec import Extension, Request
from ctxext.surgery.code import names_of, own_bases, source_of
from ctxext.surgery.edits import Edits
from ctxext.surgery.lengths import stated_length
from ctxext.surgery.texts import text_of


class Architecture(ABC):
    """One family of models, recognised by structure rather than by name.

    Class attributes of a family:
        name: how it is listed.
        positions: what kind its positions are, as ``refuse_other_positions`` knows them.
        decoder_class: transformers' class of the module that builds the mask and calls the layers; a family that is
            found in another way overrides ``matches`` and has none.
    """

    name: ClassVar[str]
    positions: ClassVar[str] = "table"
    decoder_class: ClassVar[type[nn.Module]]

    def matches(self, model: PreTrainedModel) -> bool:
        """Whether this family's positions live in ``model``."""
        return any(isinstance(module, self.decoder_class) and self.holds(module) for module in model.modules())

    def holds(self, decoder: nn.Module) -> bool:
        """Whether a decoder of the family's class has its positions; some have others where their config says so."""
        return True

    @abstractmethod
    def apply(self, model: PreTrainedModel, method: Method, request: Request, edits: Edits) -> Extension:
        """Extend ``model`` in place, through ``edits`` only.

        Raises:
            IncompatibleError: if the method cannot be right on this model; nothing was edited then.
            VerificationError: if the patched model does not compute what the method says.
        """

    @abstractmethod
    def revert(self, model: PreTrainedModel, original: dict[str, Any], edits: Edits) -> None:
        """Make a model that was loaded extended what it was before, given the config fields as they were then."""

    def why_final(self, model: PreTrainedModel) -> str | None:
        """Why the extension that a model was loaded with cannot be taken off; None where ``revert`` does that."""
        return None

    def replaces_weights(self, model: PreTrainedModel, saved: dict[str, Any] | None = None) -> bool:
        """Whether an extension of ``model`` replaces weights, so that a checkpoint is more than another config.

        Args:
            model: it is not touched.
            saved: the extension, as a config holds it; None asks whether it is so with every one.
        """
        return False

    def replaced_weights(self, model: PreTrainedModel) -> dict[str, nn.Parameter]:
        """The weights that an extension of ``model`` replaces, by name."""
        return {}

    def trained_length(self, model: PreTrainedModel) -> int | None:
        """Tokens that the config says the checkpoint was trained for, None where it does not say."""
        return stated_length(text_of(model.config))

    def known_length(self, model: PreTrainedModel, request: Request) -> int:
        """Tokens that the checkpoint was trained for, as the user says or else its config.

        Raises:
            IncompatibleError: if neither does.
        """
        length = request.trained_length or self.trained_length(model)
        if length is None:
            raise IncompatibleError(
                f"The config of this {model.config.model_type} does not say how long its texts were. Pass "
                f"trained_length=..."
            )
        return checked_tokens("The trained length that the config names", length)


def refuse_attention_choices(request: Request, leaves: str) -> None:
    """Raise ``InvalidParameterError`` for a choice about attention, where an extension ``leaves`` that to the model."""
    for name in ("sliding_window", "attention"):
        if (given := getattr(request, name)) is not None:
            raise InvalidParameterError(f"{name}={given!r}: {leaves} attention to the model. Leave {name} out.")


def rotates_by_table(model: nn.Module) -> bool:
    """Whether a model rotates by a table of sinusoids, which other models add to their input."""
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
# Other than of text.
ELSEWHERE = re.compile(r"vision|visual|image|audio|video", re.I)
# What code of any author computes positions with.
ARITHMETIC = re.compile(r"\b(pos|positions?|position_ids|theta|inv_freq|freqs?\w*|cos|sin|polar|slopes?)\b")


def why_absent(model: nn.Module) -> str:
    """The likeliest reason, read off the model's modules and the code of their classes."""
    code = names_of(type(model))
    if rotates_by_table(model):
        return (
            "it rotates by a sinusoid table that its own code computes once, and no field of its config (no "
            "rope_parameters) could make a reload compute another one"
        )
    owners = [name for name, value in code.items() if name.endswith("RotaryEmbedding") and "Vision" not in name]
    if rotation := _own_rotation(model):
        return (
            f"it rotates by code of its own ({rotation}), which is not of the form that transformers' own rope types "
            f"use"
        )
    if any(hasattr(code[name], "compute_default_rope_parameters") for name in owners):
        return "its code knows rotary positions, but this checkpoint's config leaves them off"
    if computing := [path for path, module in model.named_modules() if "Sinusoid" in type(module).__name__]:
        return (
            f"it adds sinusoids to its input ({computing[0]}), which its own code computes for each text: there is no "
            f"table whose size a field of its config sets"
        )
    return (
        _table(model)
        or _none_at_all(model)
        or ("no rotary embedding of the form that transformers' own rope types use, and no ALiBi")
    )


def _own_rotation(model: nn.Module) -> str | None:
    """Return where a module rotates text, and of which class it is; None where there is none by name."""
    for path, module in model.named_modules():
        name, kind = path.rpartition(".")[2], type(module).__name__
        if (ROTATION.search(name) or ROTATION.search(kind)) and not ELSEWHERE.search(f"{path} {kind}"):
            return f"{path}: {kind}"
    return None


def learned_positions(model: nn.Module) -> int | None:
    """How many positions a model has learned, one vector each; None where it has no such table."""
    return next((rows for path, module, rows in _tables(model) if _is_learned(path, module)), None)


def _tables(model: nn.Module) -> Iterator[tuple[str, nn.Embedding, int]]:
    """Each embedding with its path and how many tokens it has rows for; the decoder's before the encoder's."""
    said = getattr(model.config, "max_position_embeddings", None)
    for path, module in reversed(list(model.named_modules())):
        if isinstance(module, nn.Embedding):
            rows = module.num_embeddings - int(getattr(module, "offset", 0))
            # Some tables begin with rows that stand for no position.
            yield path, module, said if isinstance(said, int) and 0 < said <= rows else rows


def _is_learned(path: str, module: nn.Embedding) -> bool:
    name = path.rpartition(".")[2]
    return bool(TABLE.search(name)) and not BUCKETS.search(name) and "Sinusoid" not in type(module).__name__


def _table(model: nn.Module) -> str | None:
    """What is said of a table with a row for each position, or for each kind of distance."""
    for path, module, rows in _tables(model):
        name = path.rpartition(".")[2]
        if BUCKETS.search(name):
            return (
                f"it has {module.num_embeddings} buckets of relative distances ({path}); all distances beyond the last "
                f"bucket's share that one, whatever the length"
            )
        if _is_learned(path, module):
            return (
                f"it has learned positions, one vector each for {rows:,} tokens ({path}), in a form that is not "
                f"recognised: no field of its config that counts positions sets the size of that table"
            )
    return None


def _none_at_all(model: nn.Module) -> str | None:
    """What is said of a model whose order of tokens comes from recurrence and the causal mask alone."""
    kinds: set[Any] = {type(module) for module in model.modules()}  # mypy thinks these have no hash
    own = {base for kind in kinds for base in own_bases(kind) if not base.__module__.startswith("transformers.")}
    if computing := sorted(base.__name__ for base in own if ARITHMETIC.search(_source_beside(base))):
        return f"its positions are in code of its own (where {computing[0]} is), in no form that ctxext recognises"
    if any(_speaks_of_positions(base) for kind in kinds for base in own_bases(kind)):
        return None
    return "it has no positions at all, so nothing needs extending: it reads as far as memory and its training carry"


def _source_beside(kind: type) -> str:
    """The source of a class, and of the functions of its module, which it may call."""
    functions = [value for value in vars(sys.modules[kind.__module__]).values() if inspect.isfunction(value)]
    beside = [function for function in functions if function.__module__ == kind.__module__]
    return "\n".join(source_of(code) for code in (kind, *beside))


def _speaks_of_positions(kind: type) -> bool:
    lines = source_of(kind).splitlines()
    return any(SOME_POSITION.search(line) for line in lines if not line.lstrip().startswith("@"))  # those only offer
