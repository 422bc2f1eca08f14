"""Load the checkpoint that a server is to compute, extended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ctxext.checkpoints.carried import arguments_of
from ctxext.checkpoints.load import reads_weights
from ctxext.core.patching import describe, extend, patch, patched_state, unpatch
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.measuring.checkpoint import Checkpoint, load_checkpoint
from ctxext.methods import Method
from ctxext.models.drafts import about_drafts
from ctxext.spec import ExtensionArguments


@dataclass(frozen=True, eq=False)
class Served:
    """A checkpoint that is served, and what its clients are told about it.

    Args:
        window: most tokens of a prompt and its answer together; None if the model's config does not say.
        facts: method, parameters, factor, trained length, window and dtypes, for programs.
        notes: Changes for the sake of serving, a sentence each.
    """

    name: str
    checkpoint: Checkpoint
    window: int | None
    facts: dict[str, Any]
    notes: tuple[str, ...] = ()


def load_served(
    source: str | None,
    method: str | Method | None = None,
    *,
    name: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: Any = None,
    weights: bool = True,
    **extension: Any,
) -> Served:
    """Load a checkpoint to serve: extended by ``method``, or as it was saved; a plain one is served plain.

    A dynamic method keeps the positions of a request from its first token to its last (``growth="request"``), so that
    no cache is computed again while it decodes.

    ``method``, as for ``ctxext.patch``, takes the place of an extension that was saved. Requests ask for ``name``, by
    default the name of the checkpoint, as given. All else is as for ``load_checkpoint`` and ``ctxext.patch``. A method
    that reads weights has them loaded even where ``weights`` is False.

    Raises:
        CtxextError: as ``load_checkpoint`` and ``ctxext.patch``.
    """
    given = [key for key, value in extension.items() if value is not None]
    if method is None and given:
        raise InvalidParameterError(f"{', '.join(given)}: only with a method, which says how to extend.")
    weights = weights or reads_weights(method)
    checkpoint = load_checkpoint(
        source,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        tokenizer=tokenizer,
        weights=weights,
    )
    if not getattr(checkpoint.words, "is_fast", True):  # one out of a GGUF file is fast, and is read later
        raise IncompatibleError(
            f"{type(checkpoint.words).__name__} is written in Python and cannot decode token by token, as a server "
            f"does. Give a checkpoint with a tokenizer.json."
        )
    model: Any = checkpoint.model
    if method is not None:
        extend_loaded(checkpoint, method, **extension)
    says = "ctxext serve does not draft with them; each pass gives one token."
    notes = _kept_for_a_request(checkpoint) + about_drafts(model.config, says)
    description = describe(model)
    trained, window = description.trained_length, description.target_length
    parameters = dict(description.method or {})
    facts = {
        "method": parameters.pop("method", None),
        "parameters": parameters,
        "factor": window / trained if trained and window else None,
        "trained_length": trained,
        "window": window,
        "dtype": str(checkpoint.subject.model.dtype).removeprefix("torch."),
        "stored_dtype": checkpoint.stored,
    }
    return Served(name or source or checkpoint.name, checkpoint, window, facts, notes)


def extend_loaded(checkpoint: Checkpoint, method: str | Method, **extension: Any) -> None:
    """Extend the model of a checkpoint; the method takes the place of an extension that was saved.

    Raises:
        CtxextError: as ``ctxext.patch``.
    """
    if patched_state(checkpoint.subject.model) is not None:
        unpatch(checkpoint.model)
    patch(checkpoint.model, method, **extension)


def _kept_for_a_request(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Let a dynamic method fit positions to a whole request, and say so."""
    state = patched_state(checkpoint.subject.model)
    growth = getattr(None if state is None else state.method, "growth", "request")
    if state is None or growth == "request":
        return ()
    arguments = arguments_of(checkpoint.subject.config.ctxext)
    assert isinstance(arguments, ExtensionArguments)  # two sides have encoder-decoders, which are not served
    method: Any = state.method
    unpatch(checkpoint.model)
    extend(checkpoint.model, replace(arguments, method=replace(method, growth="request")))
    return (f"{method.name}: growth='request' in place of {growth!r}, so that each request keeps its positions.",)
