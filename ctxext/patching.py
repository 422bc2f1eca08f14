"""The verbs' bodies: the only code that knows methods, architectures and models together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ctxext.adapters import keep_extension
from ctxext.attention.heads import with_heads
from ctxext.caches.continuous import batch_continuously
from ctxext.caches.generation import LengthRule, recompute_in_generate
from ctxext.caches.records import FilledUnder, guard_caches, guards_of
from ctxext.core.config import (
    checked_scaling,
    heads_of,
    published_json,
    refuse_changed_length,
    refuse_idle_scaling,
    refuse_shrinking,
    scaling_of,
    stated_length,
    write_old_form,
)
from ctxext.core.edits import Edits, follow_replicas
from ctxext.core.published import refuse_lost_fields, refuse_lost_share
from ctxext.core.rebuild import own_defaults
from ctxext.core.saved import (
    arguments_in_place_of,
    checked_trained_length,
    choices,
    identity,
    saved_extension,
    saved_form,
    saved_sides,
    saved_sides_form,
    untested_versions,
)
from ctxext.core.subject import EXTENDED_IN_MEMORY, SIDES, Subject, give_own_config
from ctxext.errors import (
    BackendUnavailableError,
    IncompatibleError,
    InvalidParameterError,
    PatchStateError,
    UnknownNameError,
    no_reach,
)
from ctxext.kernels import Call, select
from ctxext.methods import METHODS, Method, RopeMethod, TableMethod, is_choice, known_methods, method_class, method_in
from ctxext.methods.encoding import EncodingMethod
from ctxext.methods.parameters import checked_tokens, parameters_of
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.models import Architecture, architecture_of, find_architecture
from ctxext.spec import Description, Extension, ExtensionArguments

ModelT = TypeVar("ModelT")
JOURNAL = "_ctxext_journal"
"""Attribute of a model that is extended, or in part: the journal that undoes it."""
REFERENCE = (
    "Trainers that load a reference model by themselves (TRL's DPO, KTO, GRPO and RLOO without PEFT) would load the "
    "plain one: give them ctxext.training.reference(model), or save the model and train what is loaded from there."
)


@dataclass
class Patched:
    """The state that ``patch`` leaves on a model: enough to describe the extension and to undo it.

    Args:
        method: the extension; of an encoder-decoder, that of the text that is read.
        sides: of an encoder-decoder, the extension of each side by its name.
    """

    method: Method
    extension: Extension
    edits: Edits
    sides: dict[str, SideExtension] = field(default_factory=dict)

    def saved_form(self) -> dict[str, Any]:
        """Build what ``config.ctxext`` holds."""
        each = {name: (part.side.place, saved_form(part.method, part.extension)) for name, part in self.sides.items()}
        return saved_sides_form(each) if each else saved_form(self.method, self.extension)


@dataclass(frozen=True)
class SideExtension:
    """The extension of one side of an encoder-decoder."""

    side: Subject
    method: Method
    extension: Extension


def method(name: str, *, factor: float | None = None, **parameters: Any) -> Method:
    """Build a method from its name, for configs and command lines.

    Args:
        name: one of ``ctxext.methods()``.
        factor: target_length / trained_length, at least 1; left out, the method's default.
        **parameters: the method's own parameters.

    Raises:
        UnknownNameError: for an unknown method or parameter, with a suggestion.
        InvalidParameterError: for a value outside its range, and for "auto", which has to be measured.
    """
    if name == "auto" and name not in METHODS:
        raise InvalidParameterError(
            "No formula knows which method suits a model, so there is no method 'auto': measure it on your own texts. "
            "Run `ctxext choose CHECKPOINT -t mine.txt --target TOKENS`, or call ctxext.choose(model, tokenizer, "
            "texts=[...], target_length=TOKENS) and patch with its method."
        )
    kind = method_class(name)
    if kind is None:
        raise UnknownNameError.of("method", name, known_methods())
    return kind.of(parameters if factor is None else parameters | {"factor": factor})


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

    Without training take ``self_extend``, by 2 to 4: short texts are read as before. For other runtimes take ``yarn``,
    by 2, and to fine-tune too. ``retrieval_heads`` needs less time and memory on long texts. To choose by measuring:
    ``ctxext.choose``. The methods are, for frequencies of a rotation: abf, clipped, dynamic_ntk, dynamic_pi,
    dynamic_yarn, llama3, longrope, ntk, ntk_by_parts, pi, table, yarn; for its positions: dpe, dual_chunk, rerope,
    retrieval_heads, self_extend, streaming, string; for biases and tables: alibi, group, hierarchical, stretch,
    stretch_buckets, tile.

    Writes the extension into the model's existing config and live modules, then compares what the rotary modules
    compute with the method's own mathematics in float64. If anything fails, the model is left as it was.

    PEFT adapters that put layers into the model (LoRA and its kin), added before or after, are saved with the extension
    whoever saves them. Those that only put virtual tokens before the text (prompt and prefix tuning) leave no trace
    on the model: wrap it before ``patch`` and give ``patch`` the wrapper, or save with ``ctxext.save``.

    Args:
        model: a transformers model; or a PEFT, compiled or data-parallel wrapper around one; or what holds one beside
            its tokenizer (a SentenceTransformer, a CrossEncoder, a pipeline), whose own limit is raised where it was
            the trained length.
        method: a name (``ctxext.methods()`` lists them), a method object such as ``YaRN(factor=4)``, or the path of the
            ``choice.json`` that ``ctxext choose`` wrote. It extends both sides of an encoder-decoder.
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
        PatchStateError: the model is already patched or already extended; or it is not what its config says, because
            one of them was changed after loading.
        CheckpointError: the config.json that the model was loaded from names other positions than were built from it.
        VerificationError: the patched model does not compute what the method says.
    """
    return extend(
        model,
        ExtensionArguments(
            method=method,
            factor=factor,
            target_length=target_length,
            trained_length=trained_length,
            sliding_window=sliding_window,
            scaling=scaling,
            attention=attention,
            parameters=parameters,
        ),
    )


def extend(model: ModelT, arguments: ExtensionArguments | Mapping[str, ExtensionArguments]) -> ModelT:
    """Extend a model as ``patch`` does.

    Args:
        arguments: of ``patch``; or those of each side of an encoder-decoder by its name, as they were saved. A side
            that is not named stays as it is.
    """
    subject = Subject.of(model)
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
    if str(base.config._attn_implementation).startswith("paged|"):
        raise PatchStateError(
            f"A manager of continuous batches has set the attention of this {type(base).__name__} to "
            f"{base.config._attn_implementation!r}. Stop the manager first, or call model.set_attn_implementation."
        )
    name, published = f"this {type(base).__name__}", published_json(base.config)
    refuse_idle_scaling(base.config, name)
    if published:
        refuse_lost_fields(base.config, name, published, live=True)
        refuse_lost_share(subject, name)
    with own_defaults(), Edits() as edits:
        edits.set(base, JOURNAL, edits)  # these two first, and so undone last: unpatch can go on after an interrupt
        edits.set(base, "_ctxext", None)
        saved = saved_extension(base.config, f"the config of {name}")
        if isinstance(arguments, ExtensionArguments) and not subject.sides:
            chosen, architecture, request = _resolved(subject, arguments, saved, edits)
            give_own_config(base, edits)
            extension = _short_config(subject, architecture.apply(subject, chosen, request, edits))
            if chosen.dynamic:
                recompute_in_generate(base, LengthRule(chosen, extension.trained_length), edits)
            state = Patched(chosen, extension, edits)
        else:
            extended = _extended_sides(subject, arguments, edits)
            first = next(iter(extended.values()))
            state = Patched(first.method, first.extension, edits, extended)
        batch_continuously(base, state.method, edits)
        follow_replicas(base.modules(), edits)
        edits.set(base.config, "ctxext", state.saved_form())
        if getattr(base.config, "_name_or_path", ""):  # where the model lies unextended
            edits.set(base.config, "_name_or_path", EXTENDED_IN_MEMORY)
        for part in [extended.side for extended in state.sides.values()] or [subject]:
            write_old_form(part.config, edits, of_any_type=True)
        _raise_limits(subject, state, edits)
        base._ctxext = state
        keep_extension(subject, edits)
        _guard_caches(subject, state, edits)
    return model


def _resolved(
    subject: Subject, asked: ExtensionArguments, saved: dict[str, Any] | None, edits: Edits
) -> tuple[Method, Architecture, ExtensionArguments]:
    """Turn arguments into a method and a request, and take off the extension that the model was saved with."""
    architecture, trained_length, taken_off = architecture_of(subject), asked.trained_length, None
    if trained_length is not None:
        trained_length = checked_tokens("trained_length", trained_length)
    if saved is not None:  # the new extension takes the place of the one that was loaded, and not its top
        checked_trained_length(saved, trained_length)
        architecture.revert(subject, saved["original"], edits)
        if subject.saved is not None:  # a side's is in the config of the whole
            edits.delete(subject.config, "ctxext")
        taken_off = choices(saved)["scaling"]
    elif trained_length is None:
        refuse_changed_length(subject)
    carried, scaling = scaling_of(subject.config), asked.scaling or taken_off
    if carried is not None or scaling is not None:
        scaling, trained_length = checked_scaling(subject.kind, carried, scaling, trained_length)
    known_length = trained_length or architecture.trained_length(subject)
    chosen = resolve(asked.method, asked.factor, asked.target_length, known_length, asked.parameters)
    if isinstance(chosen, RetrievalHeads):
        chosen = with_heads(subject, chosen)
    if known_length is not None:
        known_length = checked_tokens("The trained length that the config names", known_length)
        if carried is not None:
            refuse_shrinking(carried, chosen.target_length(known_length))
    return chosen, architecture, replace(asked, method=chosen, trained_length=known_length, scaling=scaling)


def _extended_sides(
    subject: Subject, arguments: ExtensionArguments | Mapping[str, ExtensionArguments], edits: Edits
) -> dict[str, SideExtension]:
    """Extend each side of an encoder-decoder as the model that it is."""
    saved = subject.saved
    if isinstance(arguments, ExtensionArguments) and saved is not None:
        arguments = arguments_in_place_of(saved, arguments)
    if isinstance(arguments, ExtensionArguments):
        arguments = dict.fromkeys(SIDES, arguments)
    give_own_config(subject.model, edits)
    before = saved_sides(saved or {})
    if before:
        edits.delete(subject.config, "ctxext")
    extended = {}
    for name in (name for name in SIDES if name in subject.sides and name in arguments):
        side = subject.sides[name]
        chosen, architecture, request = _resolved(side, arguments[name], before.get(name), edits)
        if chosen.dynamic and name == "decoder":
            raise IncompatibleError(
                f"Method {chosen.name!r} follows the length of the text, and the cache of an encoder-decoder's decoder "
                f"cannot be recomputed when that changes. Give a method of fixed positions, such as yarn."
            )
        extended[name] = SideExtension(side, chosen, architecture.apply(side, chosen, request, edits))
    return extended


def _raise_limits(subject: Subject, state: Patched, edits: Edits) -> None:
    """Raise the limits of ``generate`` and of the wrappers, where they were the trained length; others were chosen."""
    writer = state.sides.get("decoder")
    if writer is not None or not state.sides:
        writing = state.extension if writer is None else writer.extension
        settings = getattr(subject.model, "generation_config", None)
        if settings is not None and settings.max_length == writing.trained_length < writing.target_length:
            edits.set(settings, "max_length", writing.target_length)
    reading = state.extension
    for owner, name, value in subject.length_limits() if subject.wrappers else ():
        if value == reading.trained_length < reading.target_length:
            edits.set(owner, name, reading.target_length)


def _limit_notes(subject: Subject, extension: Extension) -> list[str]:
    """Say where texts are cut below the new window."""
    length = extension.target_length
    if length <= extension.trained_length:
        return []
    limits = subject.length_limits()
    if not limits:
        return [
            f"A tokenizer that truncates cuts at its own limit: set tokenizer.model_max_length = {length}, and save it "
            f"with the model: ctxext.save(model, path, tokenizer=tokenizer)."
        ]
    return [
        f"Texts are cut at {name}={value} of this {type(owner).__name__}, a choice that was not the trained length. "
        f"Set it to {length} for the whole window."
        for owner, name, value in limits
        if value < length
    ]


def _short_config(subject: Subject, extension: Extension) -> Extension:
    """Add a note to an extension whose config goes on naming a shorter length, at which other programs cut."""
    named = getattr(subject.text, "max_position_embeddings", None)
    if not isinstance(named, int) or named >= extension.target_length:
        return extension
    note = (
        f"The config goes on saying max_position_embeddings={named}, from which stock code counts. Programs cut texts "
        f"there unless told otherwise after each load: lm-eval by max_length={extension.target_length}, "
        f"sentence-transformers by max_seq_length={extension.target_length}."
    )
    return replace(extension, notes=(*extension.notes, note))


def _guard_caches(subject: Subject, state: Patched, edits: Edits) -> None:
    """Let every cache record the extension that fills it; a prefix that PEFT learned is taken without a record."""
    method, holders = state.method, (*subject.wrappers, subject.model)
    under = FilledUnder(repr(identity(subject.config.ctxext)), f"{method.name!r} (factor {method.factor:g})")
    configs = [getattr(holder, "active_peft_config", None) for holder in holders]
    prefix = any(getattr(config, "is_prompt_learning", False) for config in configs)
    guard_caches(subject.model, under, dynamic=method.dynamic, takes_made=prefix, edits=edits)


def unpatch(model: ModelT) -> ModelT:
    """Undo ``patch``: logits, config and ``state_dict`` are again what they were, bit for bit.

    After an interrupt (Ctrl-C) a second call undoes the rest. A cache that was filled while the model was patched does
    not fit any more, and refuses to be continued. A copy of a cache that the patched model never read, or one on the
    disk, cannot be told what happened: drop those.

    Returns:
        The same model.

    Raises:
        PatchStateError: if this model was not patched in this process (or by ``ctxext.load``).
    """
    subject = Subject.of(model)
    base, edits = subject.model, vars(subject.model).get(JOURNAL)
    if edits is None:
        architecture = find_architecture(subject) if subject.saved is not None else None
        final = None if architecture is None else architecture.why_final(subject)
        way = "A checkpoint that was saved extended is undone by loading the original checkpoint."
        raise PatchStateError(
            f"This {type(base).__name__} was not patched in place, so there is nothing to undo. {final or way}"
        )
    for guard in guards_of(base):
        guard.release()
    with own_defaults():
        edits.undo(keep=1)
    edits.undo()  # the journal leaves the model last of all
    return model


@contextlib.contextmanager
def patched(model: ModelT, method: str | Method, **arguments: Any) -> Iterator[ModelT]:
    """Extend a model inside a ``with`` statement, and undo the extension at its end, also after an error.

    Pick it to compare a model with its own extension: ``with ctxext.patched(model, "yarn", factor=4): ...``. A model
    that was unpatched inside the block stays plain.

    Args:
        model: as for ``patch``.
        method: as for ``patch``.
        **arguments: as for ``patch``, whose errors are raised too.
    """
    patch(model, method, **arguments)
    try:
        yield model
    finally:
        if JOURNAL in vars(Subject.of(model).model):
            unpatch(model)


def describe(model: Any, *, verbose: bool = False) -> Description:
    """Say how a model is extended: method, lengths, saved form, who loads it, and what to know.

    Args:
        model: as for ``patch``.
        verbose: print also the pieces of a remapping, the fingerprint, and what was edited.
    """
    subject = Subject.of(model)
    state, model_type = patched_state(subject.model), subject.kind
    if state is not None:
        description = describe_saved(state.saved_form(), model_type, tuple(state.edits.lines()))
        sides = [
            (name, replace(side, attention=attention_line(part.side, part.extension.attention)))
            for (name, side), part in zip(description.sides, state.sides.values(), strict=True)
        ]
        notes = [*state.extension.notes, *_limit_notes(subject, state.extension)] if not sides else []
        if not sides and getattr(subject.config, "_name_or_path", "") == EXTENDED_IN_MEMORY:
            notes.append(REFERENCE)
        attention = attention_line(subject, state.extension.attention) if not sides else ""
        description = replace(description, attention=attention, notes=tuple(notes), sides=tuple(sides))
    elif subject.saved is not None:
        description = describe_saved(subject.saved, model_type)
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


def describe_saved(saved: dict[str, Any], model_type: str, edits: tuple[str, ...] = ()) -> Description:
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
    notes = tuple(saved["notes"])
    return Description(model_type=model_type, method=saved["method"], notes=notes, edits=edits, **values)


def attention_line(subject: Subject, name: str | None) -> str:
    """Say which backend serves a whole text on this model now, and why the backends before it in order do not."""
    if name is None:
        return ""
    base, config = subject.model, subject.text
    heads, kv_heads, head_dim = heads_of(config)
    like = {"dtype": base.dtype, "device": base.device}
    q, k = (torch.empty(1, count, 128, head_dim, **like) for count in (heads, kv_heads))
    slopes = torch.zeros(heads, dtype=torch.float32, device=base.device)
    need = Call.of(q, k, k, scale=1.0, slopes=slopes).need
    state = patched_state(base)
    if state is not None and isinstance(state.method, EncodingMethod):
        need = replace(need, biased=False, score=state.method.score_form)
    try:
        backend, passed_over = select(name, need)
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
    if isinstance(chosen, str) and chosen not in METHODS and is_choice(chosen):
        chosen = method_in(chosen)
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
        raise no_reach(chosen)
    return built


def _factor_for(target_length: int, trained_length: int | None, factor: float | None) -> float:
    target_length = checked_tokens("target_length", target_length)
    if factor is not None:
        parameters_of(Method)["factor"].checked(factor)
    if trained_length is None:
        raise InvalidParameterError(
            "target_length needs the trained length here. Pass trained_length (--trained-length)."
        )
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


def patched_state(base: PreTrainedModel) -> Patched | None:
    """Return the state that ``patch`` left on a model; None if it is not patched."""
    state: Patched | None = base.__dict__.get("_ctxext")
    return state


def trained_length_of(subject: Subject) -> int | None:
    """Return how many tokens the weights were trained for by the config; None if the config does not say."""
    if subject.saved is not None:
        return int(subject.saved["trained_length"])
    scaling = scaling_of(subject.config)
    if scaling is not None:  # its weights were trained with that, unless somebody says otherwise
        return scaling.window
    architecture = find_architecture(subject)
    return stated_length(subject.text) if architecture is None else architecture.trained_length(subject)
