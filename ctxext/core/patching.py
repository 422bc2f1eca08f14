"""The verbs that extend a live model, undo that and describe it; nothing here knows a cache, a kernel or a family."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ctxext.core.architecture import architecture_of, find_architecture, trained_length_of
from ctxext.core.edits import Edits
from ctxext.core.old_form import put_old_form
from ctxext.core.rebuild import fill_in, own_defaults
from ctxext.core.saved import (
    arguments_over,
    describe_saved,
    saved_extension,
    saved_form,
    saved_sides_form,
    untested_versions,
)
from ctxext.core.scaling import checked_scaling, refuse_changed_length, refuse_shrinking, scaling_of
from ctxext.core.steps import ExtendedPart, Moment, Work, described, fill_steps_of, run, steps
from ctxext.core.subject import EXTENDED_IN_MEMORY, Subject
from ctxext.errors import InvalidParameterError, PatchStateError
from ctxext.methods import Method, with_choice
from ctxext.methods.base import resolve
from ctxext.methods.parameters import checked_tokens
from ctxext.spec import Description, Extension, ExtensionArguments

ModelT = TypeVar("ModelT")
JOURNAL = "_ctxext_journal"
"""Attribute of a model that is extended, or in part: the journal that undoes it."""
WHOLE = "_ctxext_whole"
"""Attribute of a model inside an extended one: the class of the whole."""
REFERENCE = (
    "Trainers that load a reference model by themselves (TRL's DPO, KTO, GRPO and RLOO without PEFT) would load the "
    "plain one: give them ctxext.training.reference(model), or save the model and train what is loaded from there."
)


@dataclass
class Patched:
    """The state that ``patch`` leaves on a model: enough to describe the extension and to undo it.

    Args:
        method: Method of the model; of an encoder-decoder, that of the text that is read.
        sides: Extension of each side of an encoder-decoder by its name; empty for other models.
        config: Config that the extension was written into.
        former: Tokens that the extension taken off before reached; None for a model that was plain.
    """

    method: Method
    extension: Extension
    edits: Edits
    sides: dict[str, ExtendedPart]
    config: Any
    former: int | None

    def saved_form(self) -> dict[str, Any]:
        """Build what ``config.ctxext`` holds."""
        each = {
            name: saved_form(part.method, part.extension) | {"place": part.subject.place}
            for name, part in self.sides.items()
        }
        return saved_sides_form(each) if each else saved_form(self.method, self.extension)


def patch(
    model: ModelT,
    method: str | Method | None = None,
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

    ```python
    model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    ctxext.patch(model, "self_extend", factor=2)  # 8K -> 16K tokens
    ```

    Without training use ``self_extend``, by 2 to 4: results for short texts stay the same. Use ``yarn``, by 2, for
    other runtimes, and for fine-tuning. ``retrieval_heads`` keeps a third of the cache on long texts, and takes less
    time there on a CPU. To choose by measuring: ``ctxext.choose``.

    Writes the extension into the model's existing config and live modules, then compares what the rotary modules
    compute with the method's own mathematics in float64. If anything fails, the model is left as it was.

    PEFT adapters with layers inside the model (LoRA and its variants), added before or after, are saved with the
    extension by every way of saving. Adapters that only put virtual tokens before the text (prompt and prefix tuning)
    leave no trace on the model: wrap the model before ``patch`` and pass the wrapper to ``patch``, or save with
    ``ctxext.save``.

    Args:
        model: a transformers model; or a PEFT, compiled or data-parallel wrapper around one; or a SentenceTransformer,
            CrossEncoder or pipeline, whose own limit is set to the new window if it was the window before.
        method: a name (``ctxext.methods()`` lists them), a method object such as ``YaRN(factor=4)``, or the path of the
            ``choice.json`` that ``ctxext choose`` wrote, with its lengths. It extends both sides of an encoder-decoder.
        factor: target_length / trained_length, at least 1. With a name only, and needed there for every rotary method
            unless ``target_length`` is given.
        target_length: tokens to extend to, instead of ``factor``.
        trained_length: tokens that the checkpoint was trained for; default ``config.max_position_embeddings``. Required
            for a checkpoint that is already extended. If ctxext extended it: the length before, and the new method
            replaces the old one; or, if its weights were trained with that extension, the length that it reaches, and
            the new method extends it further. If its config scales rotary positions (Llama 3.1, gpt-oss, Phi-3): the
            length with that scaling, and the new method extends the scaled frequencies.
        sliding_window: "lift" or "keep", required if every attention layer has a window narrower than the extension.
        scaling: for a checkpoint whose config scales its rotary positions: "extend" keeps the scaling's frequencies and
            its scale of cos and sin as the start, for weights that were trained with it (the default if
            ``trained_length`` is the scaled length); "replace" removes the scaling, if it was added afterwards.
        attention: Backend where ctxext computes attention (ALiBi models, and ALiBi on rotary ones): "auto" (the
            default) takes the first backend that can serve each call, a name such as "flash" never falls back. Rotary
            methods leave attention to the model and refuse it.
        **parameters: the method's own parameters, with a name only.

    Returns:
        The same model.

    Raises:
        UnknownNameError: unknown method or parameter.
        InvalidParameterError: a value outside its range, factor and target_length that contradict each other, neither
            of them, or a target below the checkpoint's present length.
        IncompatibleError: the method cannot be right on this model; the message says why.
        PatchStateError: the model is already patched or extended; or model and config disagree, because one of them was
            changed after loading.
        CheckpointError: the model's positions differ from those in the config.json that it was loaded from.
        VerificationError: the patched model does not compute what the method says.
    """
    arguments = ExtensionArguments(
        method=method,
        factor=factor,
        target_length=target_length,
        trained_length=trained_length,
        sliding_window=sliding_window,
        scaling=scaling,
        attention=attention,
        parameters=parameters,
    )
    return extend(model, with_choice(arguments))


def extend(
    model: ModelT,
    arguments: ExtensionArguments | Mapping[str, ExtensionArguments],
    *,
    is_restored: bool = False,
    former: int | None = None,
) -> ModelT:
    """Extend a model as ``patch`` does, by the steps of every room in the order of their moments.

    ``arguments`` may be by side of an encoder-decoder: one that is not named remains plain. ``is_restored`` says that
    a saved extension gave them, which is taken as it was saved; ``former`` is the reach in tokens of an extension that
    was taken off before.
    """
    work = Work(Subject.of(model), arguments, Edits(), is_restored=is_restored, former=former)
    base = work.subject.model
    with own_defaults(), work.edits as edits:
        _refuse_state(work.subject)  # not before: another thread may be extending this model
        run(work, Moment.CHECK, Moment.CHECK)
        edits.set(base, JOURNAL, edits)  # these two first, and so undone last: unpatch can go on after an interrupt
        edits.set(base, "_ctxext", None)
        for part in base.modules():
            if isinstance(part, PreTrainedModel) and part is not base:
                edits.set(part, WHOLE, type(base).__name__)
        work.saved = saved_extension(base.config, f"the config of this {type(base).__name__}")
        run(work, Moment.OWN_CONFIG, Moment.OWN_CONFIG)
        if work.saved is not None and isinstance(arguments, ExtensionArguments):
            work.arguments, work.saved = arguments_over(base.config, work.saved, arguments)
            if work.saved is None:
                edits.delete(base.config, "ctxext")
        if work.saved is not None:
            work.former = work.saved["target_length"]
        run(work, Moment.PARTS, Moment.PARTS)
        if work.sides:
            work.method, work.extension = (lead := next(iter(work.sides.values()))).method, lead.extension
        else:
            extend_positions(work)
        run(work, Moment.MODULES, Moment.REPLICAS)
        state = Patched(work.method, work.extension, edits, work.sides, base.config, work.former)
        edits.set(base.config, "ctxext", state.saved_form())
        run(work, Moment.CONFIG, Moment.CONFIG)
        if getattr(base.config, "_name_or_path", ""):  # where the model lies unextended
            edits.set(base.config, "_name_or_path", EXTENDED_IN_MEMORY)
        texts = [part.subject.text for part in work.sides.values()] or [work.subject.text]
        put_old_form(texts, edits, of_any_type=True)
        base._ctxext = state
        run(work, Moment.SAVING, Moment.CACHES)
    return model


def _refuse_state(subject: Subject) -> None:
    """Refuse a model that is extended, in whole or in part, or that is not what its config says."""
    base = subject.model
    if (state := patched_state(base)) is not None:
        raise PatchStateError(
            f"This {type(base).__name__} is already extended by {state.method.name!r} (factor "
            f"{state.method.factor:g}). Call ctxext.unpatch(model) first; extensions are never stacked."
        )
    if JOURNAL in vars(base):
        raise PatchStateError(
            f"This {type(base).__name__} is extended in part: ctxext.patch was interrupted while it undid its work. "
            f"Call ctxext.unpatch(model) first, which undoes the rest."
        )
    inside = [type(part).__name__ for part in base.modules() if JOURNAL in vars(part)]
    around = vars(base).get(WHOLE)
    if inside or around:
        raise PatchStateError(
            f"The {f'{inside[0]} inside' if inside else f'{around} around'} this {type(base).__name__} is already "
            f"extended. Call ctxext.unpatch on it first; extensions are never stacked."
        )
    text = subject.text
    if subject.saved is None and getattr(text, "ctxext", None):
        raise PatchStateError(
            f"The text part of this {type(base).__name__} was extended alone, and saved in it. Call "
            f"ctxext.patch on that part, or load the whole by ctxext.load."
        )
    if subject.sides:  # each of which is checked by itself, too
        architecture_of(subject)


def extend_positions(work: Work) -> None:
    """Take off the extension that a part was saved with, make the new method, and let the architecture apply it."""
    subject, given, edits = work.subject, work.arguments, work.edits
    assert isinstance(given, ExtensionArguments)  # a mapping has been taken apart
    architecture, trained_length = architecture_of(subject), given.trained_length
    for name in ("scaling", "attention"):
        if (value := getattr(given, name)) is not None and not value:
            raise InvalidParameterError(f"{name} must be one of its choices, or left out; found {value!r}.")
    if trained_length is not None:
        trained_length = checked_tokens("trained_length", trained_length, least=2)
    if work.saved is not None:
        architecture.revert(subject, work.saved["original"], edits)
        if subject.saved is not None:  # a side's is in the config of the whole
            edits.delete(subject.config, "ctxext")
    elif trained_length is None:
        refuse_changed_length(subject)
    carried, scaling = scaling_of(subject.config), given.scaling
    if not work.is_restored and (carried is not None or scaling is not None):  # else settled by an earlier file
        scaling, trained_length = checked_scaling(subject.kind, carried, scaling, trained_length)
    stated = architecture.trained_length(subject)
    known_length = trained_length or stated
    work.method = resolve(given.method, given.factor, given.target_length, known_length, given.parameters)
    fill_steps_of(work.method)
    run(work, Moment.METHOD, Moment.METHOD)
    if known_length is not None:
        known_length = checked_tokens("The trained length that the config names", known_length, least=2)
        if carried is not None and not work.is_restored:
            refuse_shrinking(carried, work.method.target_length(known_length))
    request = replace(given, trained_length=known_length, scaling=scaling)
    if work.method.reads_weights(vars(work.method)):  # which may take minutes
        architecture.refuse_arguments(subject, work.method, request)
    run(work, Moment.WEIGHTS, Moment.WEIGHTS)
    work.extension = architecture.apply(subject, work.method, replace(request, method=work.method), edits)
    reach = work.extension.target_length
    if carried is None and scaling is None and stated is not None and stated > reach:
        note = (
            f"The config says {stated} tokens already, and this reaches {reach}, from trained_length={known_length} as "
            f"given, or as chosen. Where the config is right, extend from {stated}."
        )
        work.extension = replace(work.extension, notes=(*work.extension.notes, note))


def require_own_config(base: PreTrainedModel) -> None:
    """Raise ``PatchStateError`` if another config has taken the place of the one that holds a model's extension."""
    if (state := patched_state(base)) is not None and base.config is not state.config:
        raise PatchStateError(
            f"The config of this {type(base).__name__} was replaced after ctxext.patch, which wrote into the old one. "
            f"Put that back, or load the model again."
        )


def unpatch(model: ModelT) -> ModelT:
    """Undo ``patch``: logits, config and ``state_dict`` are again what they were, bit for bit.

    After an interrupt (Ctrl-C) a second call undoes the rest. A cache that was filled by the patched model is refused
    from then on, as are copies of it, also from the disk.

    Returns:
        The same model.

    Raises:
        PatchStateError: if this model was not patched in this process (or by ``ctxext.load``), or got another config.
    """
    subject = Subject.of(model)
    base, edits = subject.model, vars(subject.model).get(JOURNAL)
    if edits is None:
        architecture = find_architecture(subject) if subject.saved is not None else None
        final = None if architecture is None else architecture.why_final(subject)
        inside = next((type(part).__name__ for part in base.modules() if JOURNAL in vars(part)), None)
        way = "A checkpoint that was saved extended is undone by loading the original checkpoint."
        if inside is not None or WHOLE in vars(base):
            way = f"Call ctxext.unpatch on the {inside or vars(base)[WHOLE]} that was."
        raise PatchStateError(
            f"This {type(base).__name__} was not patched in place, so there is nothing to undo. {final or way}"
        )
    require_own_config(base)
    for step in steps():
        step.undo(base)
    with own_defaults():
        edits.undo(keep=1)
    for _, rotary in subject.rotaries if base.device.type != "meta" else ():
        if on_meta := [name for name, buffer in rotary.named_buffers() if buffer.is_meta]:
            fill_in(rotary, on_meta, base.device)
    edits.undo()  # the journal leaves the model last of all
    return model


@contextlib.contextmanager
def patched(model: ModelT, method: str | Method, **arguments: Any) -> Iterator[ModelT]:
    """Extend a model inside a ``with`` statement, and undo the extension at its end, also after an error.

    Pick it to compare a model with its own extension: ``with ctxext.patched(model, "yarn", factor=4): ...``. A model
    that was unpatched inside the block stays plain.

    Args:
        model: Model, as ``patch`` takes it.
        method: Method, as ``patch`` takes it.
        **arguments: Arguments of ``patch``, whose errors are raised too.
    """
    patch(model, method, **arguments)
    try:
        yield model
    finally:
        if JOURNAL in vars(Subject.of(model).model):
            unpatch(model)


def describe(model: Any, *, verbose: bool = False) -> Description:
    """Describe how a model is extended: method, lengths, saved form, programs that load it, and notes.

    Args:
        model: Model, as ``patch`` takes it.
        verbose: also print the regions of a remapping, and every edited attribute.
    """
    subject = Subject.of(model)
    state, model_type = patched_state(subject.model), subject.kind
    if state is not None:
        description = describe_saved(state.saved_form(), model_type, tuple(state.edits.lines()))
        if state.sides:
            sides = zip(description.sides, state.sides.values(), strict=True)
            each = tuple((name, described(part, side)) for (name, side), part in sides)
            description = replace(description, notes=(), sides=each)
        else:
            description = described(ExtendedPart(subject, state.method, state.extension), description)
            if getattr(subject.config, "_name_or_path", "") == EXTENDED_IN_MEMORY:
                description = replace(description, notes=(*description.notes, REFERENCE))
    elif (saved := subject.saved or getattr(subject.text, "ctxext", None)) is not None:
        description = describe_saved(saved, model_type)
    else:
        length = trained_length_of(subject)
        if length is None and (scaling := scaling_of(subject.config)) is not None:
            length = scaling.reach  # its config leaves open whether it reads further
        description = Description(model_type=model_type, method=None, trained_length=length, target_length=length)
    return replace(
        description,
        notes=(*description.notes, *untested_versions()),
        sides=tuple((name, replace(side, verbose=verbose)) for name, side in description.sides),
        verbose=verbose,
    )


def patched_state(base: PreTrainedModel) -> Patched | None:
    """Return the state that ``patch`` left on a model; None if it is not patched."""
    state: Patched | None = base.__dict__.get("_ctxext")
    return state
