"""Load a checkpoint or an adapter with its extension: a new one, or the one that it was saved with."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torch import nn
from transformers import PreTrainedModel

from ctxext.checkpoints.adapt import put_adapter, take_out
from ctxext.checkpoints.adapters import SavedAdapter, base_of, finding_base, is_adapter, read_extension
from ctxext.checkpoints.carried import already_extended, arguments_of, differences, plain_config
from ctxext.checkpoints.classes import meta_model
from ctxext.checkpoints.encodings import encoding_weights
from ctxext.checkpoints.read import REPORT, read_config, read_model
from ctxext.checkpoints.source import LoadingOptions, adapter_on_hub, checked_path, gguf_inside
from ctxext.core.architecture import architecture_of, find_architecture
from ctxext.core.edits import Edits
from ctxext.core.old_form import drop_old_form
from ctxext.core.patching import extend, patch, patched_state
from ctxext.core.rebuild import own_defaults
from ctxext.core.saved import (
    arguments_over,
    checked_extension,
    extended_texts,
    extensions_in,
    saved_extension,
    without_guard,
)
from ctxext.core.scaling import same_rope
from ctxext.core.subject import Subject
from ctxext.errors import CheckpointError, CtxextError, InvalidParameterError, VerificationError
from ctxext.files import JsonObject, StrPath
from ctxext.methods import Method, choice_in, is_choice, known_methods, method_class, with_choice
from ctxext.methods.base import resolve
from ctxext.models.refusals import building
from ctxext.models.table import TableArchitecture
from ctxext.spec import ExtensionArguments

if TYPE_CHECKING:
    from transformers import GenerationMixin

    class LoadedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        """Model whose class its config names, for editors: it generates where its class does."""


ModelT = TypeVar("ModelT", bound=PreTrainedModel)
# Arguments of PeftModel.from_pretrained.
ADAPTER = ("is_trainable", "adapter_name", "autocast_adapter_dtype", "ephemeral_gpu_offload", "low_cpu_mem_usage")


def _reporting(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``verb`` with an option to return the loading report next to the model."""

    @functools.wraps(verb)
    def reporting(*args: Any, output_loading_info: bool = False, **given: Any) -> Any:
        REPORT.set({})  # nothing is read for a base in memory
        model = verb(*args, **given)
        return (model, REPORT.get()) if output_loading_info else model

    return reporting


@overload
def load(path: StrPath, method: Any = ..., *, auto_class: type[ModelT], **given: Any) -> ModelT: ...


@overload
def load(
    path: StrPath,
    method: str | Method | None = ...,
    *,
    factor: float | None = ...,
    target_length: int | None = ...,
    trained_length: int | None = ...,
    sliding_window: str | None = ...,
    scaling: str | None = ...,
    attention: str | None = ...,
    base: Any = ...,
    auto_class: Any = ...,
    **loading: Any,
) -> LoadedModel: ...


@_reporting
def load(
    path: StrPath,
    method: str | Method | None = None,
    *,
    factor: float | None = None,
    target_length: int | None = None,
    trained_length: int | None = None,
    sliding_window: str | None = None,
    scaling: str | None = None,
    attention: str | None = None,
    base: Any = None,
    auto_class: Any = None,
    **loading: Any,
) -> Any:
    """Load a checkpoint and extend it, by ``method`` or as it was saved. Adapter directories restore their extension.

    The config is extended before the weights are read, so that meta-device, quantised and sharded loading build the
    right model from the start. Weights are read from safetensors (or GGUF) only, and remote code runs only where
    ``trust_remote_code=True`` is passed.

    Args:
        path: a checkpoint or adapter directory, a ``.gguf`` file (which is dequantised), or a name on the hub.
        method: method, see ``ctxext.patch``; None restores the extension in the checkpoint or adapter. An adapter of a
            plain model is loaded onto its base, and the result is extended.
        factor: See ``ctxext.patch``.
        target_length: See ``ctxext.patch``.
        trained_length: See ``ctxext.patch``.
        sliding_window: See ``ctxext.patch``.
        scaling: See ``ctxext.patch``.
        attention: See ``ctxext.patch``.
        base: for an adapter, the base checkpoint if it has moved; or a model in memory with the same extension, to
            which the adapter is added (an additional one, if it is a PEFT model already). Weights of an encoding that
            were saved with the adapter replace the ones in memory. With a method that has a parameter of this name
            (``abf``), that parameter.
        auto_class: the class to load with, or its name in transformers, such as ``"AutoModelForCausalLM"``; default
            is the class that the checkpoint was saved from (``architectures`` in its config), so that a classifier
            keeps its head and a vision-language model its vision.
        **loading: the method's own parameters; everything else goes to ``from_pretrained`` (``dtype``,
            ``device_map``, ``quantization_config``, ``gguf_file``, ...), which takes fields of the config, too
            (``num_labels``).

    Returns:
        The model (a ``PeftModel`` for an adapter directory), patched: ``describe`` and ``unpatch`` work on it. With
        ``output_loading_info=True``, a tuple of it and the report of ``from_pretrained`` on the weights.

    Raises:
        CheckpointError: nothing at ``path``, no config in it, no extension to restore, or trained weights of an
            encoding for which ``method`` would draw others.
        IncompatibleError: transformers has no class for the checkpoint.
        UnknownNameError: an argument that neither the method nor ``from_pretrained`` knows.
        VerificationError: the restored model does not have the frequencies that were saved.
    """
    _refuse_arguments(path, loading)
    parameters = {field.name for kind in known_methods().values() for field in fields(kind)}
    of_method = {name: loading.pop(name) for name in list(loading) if name in parameters}
    known = method_class(method)
    # ``base`` also names a parameter of some methods (abf): with one of these it is the parameter.
    if base is not None and known is not None and "base" in {field.name for field in fields(known)}:
        of_method["base"], base = base, None
    arguments = ExtensionArguments(
        method=method,
        factor=factor,
        target_length=target_length,
        trained_length=trained_length,
        sliding_window=sliding_window,
        scaling=scaling,
        attention=attention,
        parameters=of_method,
    )
    if method is None:
        refuse_without_method(vars(arguments) | of_method, "load restores what was saved")
        return load_saved(path, base=base, attention=attention, auto_class=auto_class, **loading)
    arguments = with_choice(arguments)
    where, loading = gguf_inside(*adapter_on_hub(path, loading))
    place = checked_path(where, loading)
    if is_adapter(place):
        if read_extension(Path(place), plain=True, base=base).extension:
            raise CheckpointError(f"{place} is an adapter that carries its own extension; leave method out.")
        plain = load_saved(place, plain_class=auto_class or True, base=base, auto_class=auto_class, **loading)
        try:
            return extend(plain, arguments)
        except CtxextError:
            if isinstance(base, nn.Module):
                take_out(plain, loading.get("adapter_name", "default"), is_last=plain is not base)
            raise
    _refuse_base(base, place)
    return _extended(place, read_config(place, loading), arguments, loading, auto_class)


def _extended(
    place: str,
    config: Any,
    arguments: ExtensionArguments | dict[str, ExtensionArguments],
    loading: LoadingOptions,
    auto_class: Any,
) -> PreTrainedModel:
    """Load a checkpoint with a new extension instead of the one in its ``config``."""
    written, saved = config, saved_extension(config, place)
    if saved is not None:
        if isinstance(arguments, ExtensionArguments):
            arguments, saved = arguments_over(config, saved, arguments)
        if saved is None:
            del config.ctxext
        else:
            config = plain_config(config, saved)
    former = None if saved is None else saved["target_length"]
    if isinstance(arguments, ExtensionArguments) and arguments.target_length is None:
        resolve(arguments.method, arguments.factor, None, None, arguments.parameters)  # before weights are read
    trusted = bool(loading.get("trust_remote_code", False))
    model = meta_model(config, auto_class=auto_class, trust_remote_code=trusted)
    if not replaces_weights(model, saved):
        if isinstance(arguments, ExtensionArguments) and reads_weights(arguments.method, arguments.parameters):
            return extend(read_model(place, config, loading, auto_class), arguments, former=former)
        extended = extend(model, arguments).config
        refuse_drawn_anew(place, model, saved, extended.ctxext)
        if not replaces_weights(model, extended.ctxext):
            read = read_model(place, _buildable(extended, config), loading, auto_class)
            return attached(read, place, former=former)
    return extend(read_model(place, written, loading, auto_class), arguments, former=former)


def load_saved(
    path: StrPath,
    *,
    plain_class: Any = None,
    base: Any = None,
    attention: str | None = None,
    auto_class: Any = None,
    **loading: Any,
) -> Any:
    """Load a checkpoint or an adapter as it was saved: with the extension that it carries, or plain if it has none.

    Args:
        plain_class: the class that reads a checkpoint without an extension, also as the base of an adapter; True
            takes the one that it was saved from, None refuses such a checkpoint. Weights that lack any of the class's
            tensors are refused.
        attention: the backend that an extension is restored on; None for the one that was saved.

    Raises:
        CheckpointError: as ``load``, whose other errors are raised too.
    """
    where, loading = gguf_inside(*adapter_on_hub(path, loading))
    place = checked_path(where, loading)
    if is_adapter(place):
        return _load_adapter(Path(place), base, attention, loading, auto_class, plain_class)
    _refuse_base(base, place)
    config = read_config(place, loading)
    if saved_extension(config, place) is not None:
        return _restored(place, config, attention, loading, auto_class, complete=plain_class is not None)
    if plain_class is not None:
        return read_model(place, config, loading, None if plain_class is True else plain_class, complete=True)
    scaling_there = already_extended(config)
    if loading.get("gguf_file") and scaling_there is not None:
        raise CheckpointError(
            f"{place} carries no extension to restore. Its GGUF file scales positions ({scaling_there}), which "
            f"transformers passes over. Say which method to add to them, as in "
            f"ctxext.load({str(path)!r}, method='yarn', factor=4, scaling='extend')."
        )
    file = f", gguf_file={loading['gguf_file']!r}" if loading.get("gguf_file") else ""
    raise CheckpointError(
        f"{place} carries no extension to restore. Say which one to apply, as in "
        f"ctxext.load({str(path)!r}, method='yarn', factor=4), or load it plain with "
        f"AutoModelForCausalLM.from_pretrained({place!r}{file})."
    )


def _restored(
    place: str, config: Any, attention: str | None, loading: LoadingOptions, auto_class: Any, *, complete: bool = False
) -> PreTrainedModel:
    """Load a checkpoint with the extension in its ``config``."""
    model = read_model(place, config, loading, auto_class, restored=True, complete=complete)
    # Extending names the model as one in memory only, but this extension is in the checkpoint too.
    leads_to_it = model.config._name_or_path
    attached(model, place, attention)
    model.config._name_or_path = leads_to_it
    return model


def _refuse_base(base: Any, place: str) -> None:
    if base is not None:
        given = type(base).__name__ if isinstance(base, nn.Module) else repr(base)
        raise InvalidParameterError(f"base={given} is for adapters, and {place} is a whole model.")


def refuse_drawn_anew(place: str, model: nn.Module, before: JsonObject | None, after: JsonObject) -> None:
    """Raise ``CheckpointError`` where one extension replaces another by the same encoding, and would draw its weights.

    ``model`` has one of the two.
    """
    name = after.get("method", {}).get("method")  # the sides of an encoder-decoder have one each, and no encodings
    if before is not None and before.get("method", {}).get("method") == name and encoding_weights(model):
        raise CheckpointError(
            f"{place} holds weights that were trained with {name}, and a new {name} would draw them anew. Load it as "
            f"it is, with ctxext.load({place!r}), and train that."
        )


def replaces_weights(model: PreTrainedModel, saved: JsonObject | None) -> bool:
    """Return whether weights that fit the config of ``model`` without an extension do not fit it with one.

    ``saved`` is the extension, as a config holds it; None asks whether it is so with every one.
    """
    subject = Subject.of(model)
    architecture = find_architecture(subject)
    return architecture is not None and architecture.replaces_weights(subject, saved)


def reads_weights(method: Any, parameters: dict[str, Any] | None = None) -> bool:
    """Return whether the method reads the weights: it scores a model's heads, or compares their scores with them."""
    if isinstance(method, str) and is_choice(method):
        method = choice_in(method)["method"]
    kind = method_class(method) if isinstance(method, str) else type(method)
    given = vars(method) if isinstance(method, Method) else parameters or {}
    return kind is not None and issubclass(kind, Method) and kind.reads_weights(given)


def _buildable(extended: Any, config: Any) -> Any:
    """Remove from an extended config the fields that are for live models, or for code that must refuse the config."""
    extended._name_or_path = config._name_or_path
    extended._attn_implementation = config._attn_implementation_internal  # and its parts'
    for text in extended_texts(extended):
        drop_old_form(text)
    without_guard(extended)
    return extended


def _refuse_arguments(path: Any, loading: LoadingOptions) -> None:
    if not isinstance(path, str | os.PathLike):
        raise InvalidParameterError(f"path must be a directory or a name on the hub, found {path!r}.")
    if "config" in loading:
        raise InvalidParameterError(
            "config=...: load reads the config from the checkpoint, extends that and proves it. For a config of your "
            "own, build the model with from_pretrained(path, config=...) and call ctxext.patch on it."
        )


def refuse_without_method(arguments: Mapping[str, Any], otherwise: str) -> None:
    """Raise ``InvalidParameterError`` for arguments of a method where none is named; ``otherwise`` says why not."""
    others = ("method", "attention", "parameters", "trust_remote_code")  # a saved extension may take another backend
    given = [f"{name}={value!r}" for name, value in arguments.items() if value is not None and name not in others]
    if given:
        raise InvalidParameterError(
            f"{', '.join(given)} belongs to a method; without one, {otherwise}. Name the method too."
        )


def extended_config(
    config: Any,
    method: str | Method | None,
    *,
    trust_remote_code: bool = False,
    auto_class: Any = None,
    **arguments: Any,
) -> Any:
    """Return an extended copy of ``config``, proven on a model without weights; arguments as for ``ctxext.patch``."""
    model = meta_model(config, auto_class=auto_class, trust_remote_code=trust_remote_code)
    return patch(model, method, **arguments).config


@own_defaults()
def attached(
    model: PreTrainedModel, place: str, attention: str | None = None, former: int | None = None
) -> PreTrainedModel:
    """Patch a model that was built extended, so that it is proven, complete and reversible.

    The reach of an extension that was taken off before is ``former``, as for ``extend``.
    """
    saved, texts = checked_extension(model.config.ctxext, place), extended_texts(model.config)
    for text in texts:
        drop_old_form(text)  # a config that was not read from a file still has it
    plain_config(model.config, saved)  # which refuses a damaged original
    ropes = [getattr(text, "rope_parameters", None) for text in texts]
    arguments = arguments_of(saved, attention)
    loaded: dict[str, nn.Parameter] = {}
    subject, named = Subject.of(model), model.config.architectures or ()
    with building(f"the plain model of ctxext.original in {place}"):
        for name, extension in extensions_in(saved).items():
            part = subject.sides[name] if name else subject
            architecture = architecture_of(part)
            renamed = isinstance(architecture, TableArchitecture) and type(model).__name__ not in named
            if architecture.why_final(part) is not None:  # it is in the weights, and complete without us
                return model
            loaded |= architecture.replaced_weights(part)
            architecture.revert(part, extension["original"], Edits())
    del model.config.ctxext
    extend(model, arguments, is_restored=True, former=former)
    if renamed:  # the same tables have other names in another class, such as AutoModel's
        saved = saved | {"fingerprint": model.config.ctxext["fingerprint"]}
    lengths = [extension.get("target_length") for extension in (saved, model.config.ctxext)]
    different = differences(saved, model.config.ctxext)
    if not different and lengths[0] != lengths[1]:
        different = f"target_length {lengths[0]} there, {lengths[1]} here"
    if different:
        version = next(iter(extensions_in(saved).values()))["versions"]["ctxext"]
        raise VerificationError(
            f"The extension restored from {place} is not the one that was saved: {different}. Either its config.json "
            f"was changed by hand, or ctxext {version} that saved it computed otherwise."
        )
    forms = [[part["stored_as"] for part in extensions_in(each).values()] for each in (saved, model.config.ctxext)]
    for text, rope, there, here in zip(extended_texts(model.config), ropes, *forms, strict=True):
        # Versions of transformers may rebuild the same positions from different forms.
        if there == here and not same_rope(getattr(text, "rope_parameters", None), rope):
            raise VerificationError(
                f"The config of {place} contradicts itself: its ctxext entry stands for rope_parameters="
                f"{text.rope_parameters}, but it holds {rope}. Load the original checkpoint and extend that."
            )
    if "chosen" in saved:  # how it was found, for whoever saves it again
        model.config.ctxext["chosen"] = saved["chosen"]
    if (patched := patched_state(model)) is not None:  # what was trained since the extension stays
        patched.edits.replace_weights(model, loaded)
    return model


def _load_adapter(
    directory: Path,
    base: Any,
    attention: str | None,
    loading: LoadingOptions,
    auto_class: Any,
    plain_class: Any,
) -> Any:
    for_adapter = {name: loading.pop(name) for name in ADAPTER if name in loading}
    name = for_adapter.get("adapter_name", "default")
    if not isinstance(name, str) or not name or "." in name:  # it becomes a part of the names of weights
        raise InvalidParameterError(f"adapter_name must be a name without a dot, found {name!r}.")
    # It says so where PEFT is missing.
    adapter = read_extension(directory, plain=plain_class is not None, base=base)
    if base is not None and not isinstance(base, str | os.PathLike):
        given = {"attention": attention, "auto_class": auto_class}
        extra = [*loading, *(name for name, value in given.items() if value is not None)]
        if extra:
            raise InvalidParameterError(f"{', '.join(extra)}: base is a model in memory, which is loaded already.")
        model, drawn = base, False  # or anything else that a user gave, which is refused
    else:
        model, drawn = _load_base(adapter, base, attention, loading, auto_class, plain_class)
    return put_adapter(model, adapter, drawn=drawn, **for_adapter)


def _load_base(
    adapter: SavedAdapter,
    base: StrPath | None,
    attention: str | None,
    loading: LoadingOptions,
    auto_class: Any,
    plain_class: Any,
) -> tuple[nn.Module, bool]:
    """Load the base of an adapter, extended as it was trained on, and tell whether its encoding was drawn anew.

    An extension that the base carries is replaced only where the adapter itself names that base.
    """
    directory, saved = adapter.directory, adapter.extension
    named = base_of(directory) if base is None else os.fspath(base)
    if base is None and adapter.config.revision is not None:
        loading.setdefault("revision", adapter.config.revision)
    with finding_base(directory, named):
        place, where = gguf_inside(named, loading)
        checked_path(place, where)
        is_plain = not saved and os.path.exists(place)  # or an adapter in turn
        config = None if is_plain else read_config(place, where)  # which asks the hub
    if not saved:
        return load_saved(named, plain_class=plain_class, auto_class=auto_class, **loading), False
    carried = saved_extension(config, place)
    restored = carried is not None and not differences(saved, carried)
    if restored:
        model = _restored(place, config, attention, where, auto_class)
    elif carried is None or base is None:  # trained on the weights of that base, with the adapter's extension
        model = _extended(place, config, arguments_of(saved, attention), where, auto_class)
    else:
        raise CheckpointError(
            f"The adapter in {directory} was trained on another extension than its base {place} has: "
            f"{differences(saved, carried)}. Give the right base with base=..."
        )
    different = differences(saved, model.config.ctxext)
    if different:
        raise VerificationError(
            f"The base {place}, extended as the adapter says, is not what it was trained on: {different}; it is not "
            f"the same base model. Give the right one with base=..."
        )
    return model, not restored
