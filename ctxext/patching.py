"""The verbs' bodies: the only code that knows methods, architectures and models together."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ctxext.adapters import keep_extension
from ctxext.architectures import Architecture, architecture_of, find_architecture
from ctxext.attention import Call, select
from ctxext.errors import BackendUnavailableError, InvalidParameterError, PatchStateError, UnknownNameError
from ctxext.methods import METHODS, Method, RopeMethod, TableMethod
from ctxext.methods.base import is_number, require
from ctxext.saved import (
    checked_scaling,
    checked_trained_length,
    choices,
    identity,
    refuse_shrinking,
    saved_extension,
    saved_form,
    scaling_of,
)
from ctxext.spec import Description, Extension, Request
from ctxext.surgery.caches import FilledUnder, guard_caches, guards_of
from ctxext.surgery.edits import Edits, follow_replicas
from ctxext.surgery.generation import LengthRule, recompute_in_generate
from ctxext.surgery.old_form import write_old_form
from ctxext.surgery.rebuild import own_defaults
from ctxext.surgery.wrappers import base_model, give_own_config, unwrapped

__all__ = ["describe", "describe_saved", "method", "patch", "patched_state", "resolve", "trained_length_of", "unpatch"]

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass
class Patched:
    """What a patched model carries: enough to describe it and to undo it."""

    method: Method
    extension: Extension
    edits: Edits


def method(name: str, *, factor: float | None = None, **parameters: Any) -> Method:
    """Build a method from its name, for configs and command lines.

    Args:
        name: one of ``ctxext.methods()``.
        factor: target_length / trained_length, at least 1; left out, the method's default.
        **parameters: the method's own parameters.

    Raises:
        UnknownNameError: for an unknown method or parameter, with a suggestion.
        InvalidParameterError: for a value outside its range.
    """
    if name not in METHODS:
        raise UnknownNameError.of("method", name, METHODS)
    return METHODS[name].of(parameters if factor is None else parameters | {"factor": factor})


def patch(
    model: ModelT,
    method: str | Method,
    *,
    factor: float | None = None,
    target_length: int | None = None,
    trained_length: int | None = None,
    sliding_window: str | None = None,
    scaling: str | None = None,
    attention: str | None = None,
    **parameters: Any,
) -> ModelT:
    """Give a loaded model a longer context, in place, and prove that it took effect.

    Writes the extension into the model's existing config and live modules, then compares what the rotary modules
    compute with the method's own mathematics in float64. If anything fails, the model is left as it was.

    PEFT adapters that put layers into the model (LoRA and its kin), added before or after, are saved with the extension
    whoever saves them. Those that only put virtual tokens before the text (prompt and prefix tuning) leave no trace
    on the model: wrap it before ``patch`` and give ``patch`` the wrapper, or save with ``ctxext.save``.

    Args:
        model: a transformers model, or a PEFT, compiled or data-parallel wrapper around one.
        method: a name (``ctxext.methods()`` lists them) or a method object such as ``YaRN(factor=4)``.
        factor: target_length / trained_length, at least 1. With a name only, and needed there for every rotary method
            unless ``target_length`` is given.
        target_length: tokens to extend to, instead of ``factor``.
        trained_length: tokens that the checkpoint was trained for; default ``config.max_position_embeddings``.
            Required for a checkpoint that is already extended. One that ctxext extended: the length before that, and
            the new method replaces the old one. One whose config scales its rotary positions (Llama 3.1, gpt-oss,
            Phi-3): the length with that scaling, and the new method extends the frequencies that it gives.
        sliding_window: "lift" or "keep", needed where every attention layer has one narrower than the extension.
        scaling: for a checkpoint whose config scales its rotary positions: "extend", if its weights were trained with
            that scaling, starts from its frequencies and its scale of cos and sin (the default where
            ``trained_length`` is the scaled length); "replace", if it was put on afterwards, takes it off.
        attention: where ctxext computes attention (ALiBi models, and ALiBi on rotary ones): "auto" (the default) takes
            the first backend that can serve each call, a name such as "flash" never falls back. Rotary methods leave
            attention to the model and refuse it.
        **parameters: the method's own parameters, with a name only.

    Returns:
        The same model.

    Raises:
        UnknownNameError: unknown method or parameter.
        InvalidParameterError: a value outside its range, factor and target_length that contradict each other, neither
            of them, or a target below what the checkpoint reads already.
        IncompatibleError: the method cannot be right on this model; the message says why.
        PatchStateError: the model is already patched or already extended.
        VerificationError: the patched model does not compute what the method says.
    """
    base = base_model(model)
    if (patched := patched_state(base)) is not None:
        raise PatchStateError(
            f"This {type(base).__name__} is already extended by {patched.method.name!r} (factor "
            f"{patched.method.factor:g}). Call ctxext.unpatch(model) first; extensions are never stacked."
        )
    architecture = architecture_of(base)
    if trained_length is not None:
        _require_tokens("trained_length", trained_length)
    with own_defaults(), Edits() as edits:
        taken_off = _take_off(base, architecture, trained_length, edits)
        scaling = scaling or taken_off
        carried = scaling_of(base.config)
        scaling, trained_length = checked_scaling(base.config.model_type, carried, scaling, trained_length)
        known_length = trained_length or architecture.trained_length(base)
        chosen = resolve(method, factor, target_length, known_length, parameters)
        if known_length is not None:
            refuse_shrinking(carried, chosen.target_length(known_length))
        request = Request(
            trained_length=trained_length, sliding_window=sliding_window, scaling=scaling, attention=attention
        )
        give_own_config(base, edits)
        extension = architecture.apply(base, chosen, request, edits)
        if chosen.dynamic:
            recompute_in_generate(base, LengthRule(chosen, extension.trained_length), edits)
        follow_replicas(base.modules(), edits)
        edits.set(base.config, "ctxext", saved_form(chosen, extension))
        write_old_form(base.config, edits)
        _raise_generation_limit(base, extension, edits)
        edits.set(base, "_ctxext", Patched(chosen, extension, edits))
        keep_extension(model, edits)
        _guard_caches(model, chosen, edits)
    return model


def _take_off(
    base: PreTrainedModel, architecture: Architecture, trained_length: int | None, edits: Edits
) -> str | None:
    """Take off the extension that a model was loaded with, so that the new one takes its place and not its top.

    Returns:
        What that extension did to a scaling that the checkpoint had before; None where there was none, or no extension.
    """
    saved = saved_extension(base.config, f"the config of this {type(base).__name__}")
    if saved is None:
        return None
    checked_trained_length(saved, trained_length)
    architecture.revert(base, saved["original"], edits)
    edits.delete(base.config, "ctxext")
    did: str | None = choices(saved)["scaling"]
    return did


def _raise_generation_limit(base: PreTrainedModel, extension: Extension, edits: Edits) -> None:
    """Let ``generate`` of a live model reach the new window, if its limit was the old one."""
    settings = getattr(base, "generation_config", None)
    if settings is not None and settings.max_length == extension.trained_length < extension.target_length:
        edits.set(settings, "max_length", extension.target_length)


def _guard_caches(model: nn.Module, chosen: Method, edits: Edits) -> None:
    chain = unwrapped(model)
    under = FilledUnder(repr(identity(chain[-1].config.ctxext)), f"{chosen.name!r} (factor {chosen.factor:g})")
    prefix = any(getattr(getattr(outer, "active_peft_config", None), "is_prompt_learning", False) for outer in chain)
    guard_caches(chain[-1], under, dynamic=chosen.dynamic, takes_made=prefix, edits=edits)


def unpatch(model: ModelT) -> ModelT:
    """Undo ``patch``: logits, config and ``state_dict`` are again what they were, bit for bit.

    A cache that was filled while the model was patched does not fit any more, and refuses to be continued. A copy of a
    cache that the patched model never read, or one on the disk, cannot be told what happened: drop those.

    Returns:
        The same model.

    Raises:
        PatchStateError: if this model was not patched in this process (or by ``ctxext.load``).
    """
    base = base_model(model)
    patched = patched_state(base)
    if patched is None:
        raise PatchStateError(
            f"This {type(base).__name__} was not patched in place, so there is nothing to undo. A checkpoint that was "
            f"saved extended is undone by loading the original checkpoint."
        )
    guards = guards_of(base)
    with own_defaults():
        patched.edits.undo()
    for guard in guards:
        guard.release()
    return model


def describe(model: nn.Module) -> Description:
    """Say how a model is extended: method, lengths, saved form, fingerprint, what to know, what was edited."""
    base = base_model(model)
    patched, model_type = patched_state(base), base.config.model_type
    if patched is not None:
        extension, notes = patched.extension, list(patched.extension.notes)
        found = describe_saved(saved_form(patched.method, extension), model_type, tuple(patched.edits.lines()))
        if extension.target_length > extension.trained_length:
            notes.append(
                f"A tokenizer that truncates cuts at its own limit: set tokenizer.model_max_length = "
                f"{extension.target_length}, and save it with the model: ctxext.save(model, path, tokenizer=tokenizer)."
            )
        return replace(found, attention=attention_line(base, extension.attention), notes=tuple(notes))
    saved = getattr(base.config, "ctxext", None)
    if saved:
        return describe_saved(saved, model_type)
    architecture = find_architecture(base)
    length = getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if architecture is not None and (length is None or architecture.replaces_weights):
        length = architecture.trained_length(base)
    return Description(model_type=model_type, method=None, trained_length=length, target_length=length)


def describe_saved(saved: dict[str, Any], model_type: str, edits: tuple[str, ...] = ()) -> Description:
    """The description of an extension in its saved form, ``config.ctxext``."""
    known = {field.name for field in fields(Description)} - {"method", "notes", "attention"}
    values = {key: value for key, value in saved.items() if key in known}
    notes = tuple(saved["notes"])
    return Description(model_type=model_type, method=saved["method"], notes=notes, edits=edits, **values)


def attention_line(base: PreTrainedModel, name: str | None) -> str:
    """Which backend serves a whole text on this model as it is now, and why those before it in order do not."""
    if name is None:
        return ""
    config = base.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    like = {"dtype": base.dtype, "device": base.device}
    q, k = (torch.empty(1, count, 128, head_dim, **like) for count in (heads, kv_heads))
    slopes = torch.zeros(heads, dtype=torch.float32, device=base.device)
    try:
        backend, passed_over = select(name, Call.of(q, k, k, scale=1.0, slopes=slopes).need)
    except BackendUnavailableError as error:  # a forward pass raises it; a description says it
        return f"{name} ({error})"
    reasons = "; ".join(f"{other}: {why}" for other, why in passed_over.items())
    return f"{name}" + (f" -> {backend.name}" if name == "auto" else "") + (f" (not {reasons})" if reasons else "")


def resolve(
    chosen: str | Method,
    factor: float | None,
    target_length: int | None,
    trained_length: int | None,
    parameters: dict[str, Any],
) -> Method:
    """Turn what the user wrote into one method object, or say which two things contradict each other."""
    if isinstance(chosen, Method):
        given = {"factor": factor, "target_length": target_length, **parameters}
        extra = [key for key, value in given.items() if value is not None]
        if extra:
            raise InvalidParameterError(
                f"A method object already holds its parameters; give {', '.join(extra)} to {type(chosen).__name__}(...)"
                f" instead, or pass the method by name."
            )
        return chosen
    if not isinstance(chosen, str):
        raise InvalidParameterError(f"method must be a name or a ctxext method object, found {chosen!r}.")
    if target_length is not None:
        factor = _factor_for(target_length, trained_length, factor)
    built = method(chosen, factor=factor, **parameters)
    if factor is None and isinstance(built, RopeMethod | TableMethod) and not built.says_target:
        raise InvalidParameterError(
            f"Method {chosen!r} needs to know how far to reach: give factor=... (target_length / trained_length) or "
            f"target_length=... in tokens."
        )
    return built


def _factor_for(target_length: int, trained_length: int | None, factor: float | None) -> float:
    _require_tokens("target_length", target_length)
    if factor is not None:
        require(is_number(factor), "factor", factor, "a finite number, at least 1")
    if trained_length is None:
        raise InvalidParameterError("target_length needs to know the trained length here; pass trained_length=...")
    implied = target_length / trained_length
    if factor is not None and abs(factor * trained_length - target_length) > 1:
        raise InvalidParameterError(
            f"factor={factor} and target_length={target_length} contradict each other: the checkpoint was trained for "
            f"{trained_length} tokens, so target_length means factor={implied:g}. Give one of them."
        )
    if implied < 1:
        raise InvalidParameterError(
            f"target_length={target_length} is below the trained length of {trained_length} tokens; there is nothing "
            f"to extend."
        )
    return implied if factor is None else factor


def _require_tokens(name: str, value: object) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(is_count, name, value, "a positive whole number of tokens")


def patched_state(base: PreTrainedModel) -> Patched | None:
    """What ``patch`` left on the model, None where it is not patched."""
    state: Patched | None = base.__dict__.get("_ctxext")
    return state


def trained_length_of(model: PreTrainedModel) -> int | None:
    """What the config says the weights were trained for; None where it does not say."""
    config = model.config
    saved = getattr(config, "ctxext", None)
    if saved:
        return int(saved["trained_length"])
    scaling = scaling_of(config)
    if scaling is not None:  # its weights were trained with that, unless somebody says otherwise
        return scaling.window
    architecture = find_architecture(model)
    return None if architecture is None else architecture.trained_length(model)
