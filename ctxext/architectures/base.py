"""The contract of an architecture: where positions live in one model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedModel

from ctxext._edits import Edits
from ctxext.methods import Method

__all__ = ["Architecture", "Extension", "Request"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for, apart from the method itself.

    Args:
        trained_length: tokens the checkpoint was trained for; None reads ``max_position_embeddings``, and is given
            for a checkpoint that is not extended only.
        sliding_window: "keep", "lift" or None; see ``ctxext.patch``.
        scaling: "extend", "replace" or None, for a checkpoint whose config scales its positions already; see
            ``ctxext.patch``.
        attention: name of an attention backend, "auto" or None; see ``ctxext.patch``.
    """

    trained_length: int | None = None
    sliding_window: str | None = None
    scaling: str | None = None
    attention: str | None = None


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What an architecture did to a model; the journal holds how to undo it.

    Args:
        trained_length: tokens that the unextended checkpoint was trained for.
        target_length: tokens that the extended model is meant for.
        stored_as: one line: how the config expresses the method.
        stock: whether a process without ctxext loads the same model.
        fingerprint: 12 hexadecimal digits of a hash of the frequencies at ``target_length``.
        notes: sentences that a user must know before relying on the model.
        sliding_window: what the user chose to do about it, see ``ctxext.patch``.
        scaling: whether a scaling that the checkpoint had was extended or replaced; None where it had none.
        attention: the attention backend asked for, where the method needs one of ctxext's; else None.
        original: the config fields that were changed, as they were.
    """

    trained_length: int
    target_length: int
    stored_as: str
    stock: bool
    fingerprint: str
    notes: tuple[str, ...] = field(default=())
    sliding_window: str | None = None
    scaling: str | None = None
    attention: str | None = None
    original: dict[str, Any] = field(default_factory=dict)


class Architecture(ABC):
    """One family of models, recognised by structure rather than by name."""

    name: ClassVar[str]

    @abstractmethod
    def matches(self, model: PreTrainedModel) -> bool:
        """Whether this family's positions live in ``model``."""

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

    def trained_length(self, config: Any) -> int | None:
        """Tokens that ``config`` says the checkpoint was trained for, None where it does not say."""
        length = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        return int(length) if length else None
