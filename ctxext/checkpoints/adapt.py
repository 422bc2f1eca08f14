"""Put a saved adapter on a model that is extended alike, or refuse it and leave the model as it was."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ctxext.checkpoints.adapters import ADAPTER_FILE, ADAPTER_WEIGHTS, ENCODING_FILE, SavedAdapter, keep_extension
from ctxext.checkpoints.carried import differences
from ctxext.checkpoints.encodings import encoding_weights
from ctxext.core.edits import Edits
from ctxext.core.patching import patched_state
from ctxext.core.subject import Subject
from ctxext.errors import CheckpointError, CtxextError, IncompatibleError, InvalidParameterError

# Ending of LoRA's weights, the side that is the layer's, and names of that width: of linear layers, and of GPT-2's.
WIDTHS = ((".lora_A.weight", 1, ("in_features", "nx")), (".lora_B.weight", 0, ("out_features", "nf")))


def put_adapter(model: Any, adapter: SavedAdapter, edits: Edits | None = None, *, drawn: bool, **arguments: Any) -> Any:
    """Put a saved adapter, and the encoding that was saved with it, on a model that is extended alike.

    A PEFT model gets one more adapter. ``drawn`` says that the encoding of ``model`` was drawn at random, and belongs
    to no adapter yet. Without ``edits``, changes made here are undone with the extension of ``model``.

    Returns:
        A ``peft.PeftModel`` around ``model``, or ``model`` itself where it is one.

    Raises:
        CheckpointError: if the model is extended otherwise than the one that the adapter was trained on; or if the
            encoding was not saved with the adapter, or differs from the encoding of the model's adapters.
        IncompatibleError: if weights of the model are on a disk, PEFT refuses the adapter, or the adapter belongs on
            the model inside a wrapper, such as a pipeline.
        InvalidParameterError: if the model has an adapter of this name.
    """
    from peft import PeftMixedModel, PeftModel

    subject = Subject.of(model)
    base = subject.model
    if "disk" in (getattr(base, "hf_device_map", None) or {}).values():
        raise IncompatibleError(
            f"This {type(base).__name__} has weights on a disk, which PEFT cannot put an adapter on. Load it with "
            f"another device_map, such as 'cpu'."
        )
    if edits is None:
        edits = Edits() if (state := patched_state(base)) is None else state.edits
    if adapter.extension and (different := differences(adapter.extension, subject.saved)):
        raise CheckpointError(
            f"The adapter in {adapter.directory} was trained on another extension than this {type(base).__name__} has: "
            f"{different}. Extend it the same way first, with ctxext.patch."
        )
    adapted = next((outer for outer in subject.wrappers if isinstance(outer, PeftModel | PeftMixedModel)), None)
    name = arguments.pop("adapter_name", "default")
    there = getattr(base if adapted is None else adapted, "peft_config", {})
    if name in there:
        raise InvalidParameterError(
            f"This {type(model).__name__} has an adapter {name!r} already. Give the new one another name: "
            f"adapter_name=..."
        )
    known = encoding_weights(base)
    stored = _require_encoding(base, adapter, known, drawn=drawn, shared=bool(there))
    first = {key.removeprefix("base_model.model.").partition(".")[0] for key in stored}
    children = {name for name, _ in model.named_children()} if isinstance(model, nn.Module) else set[str]()
    if adapted is None and subject.wrappers and not first <= children:
        raise IncompatibleError(
            f"base={type(model).__name__}: the adapter in {adapter.directory} belongs on the {type(base).__name__} "
            f"inside it, by whose names PEFT finds layers. Give that model: base=..."
        )
    # PEFT changes the model before it reads the weights, so sizes are compared first.
    _require_sizes(base, adapter.directory, stored)
    try:
        if adapted is None:
            outer = PeftModel.from_pretrained(
                model, adapter.directory, adapter_name=name, config=adapter.config, **arguments
            )
            subject = replace(subject, wrappers=(outer, *subject.wrappers))
        else:
            outer = model
            _add_adapter(adapted, adapter, name, **arguments)
    except (CtxextError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError) as error:  # of sizes, of names of modules, of two kinds of adapters
        why = " ".join(str(error).split())[:300]
        raise IncompatibleError(
            f"PEFT does not put the adapter in {adapter.directory} on this {type(base).__name__}: {why}"
        ) from error
    reader = outer if adapted is None else adapted
    keep_biases(reader)
    # Only now do the names of PEFT's layers exist to compare with the file's; a bad adapter is taken out again.
    if (unreached := _unreached(reader, stored.keys(), name)) is not None:
        take_out(reader, name, is_last=adapted is None)
        raise CheckpointError(
            f"The adapter in {adapter.directory} does not fit this {type(base).__name__}: {unreached}. Give the base, "
            f"and the class (auto_class), that it was trained on, or mend {ADAPTER_FILE}."
        )
    with torch.no_grad():
        for key, weight in adapter.encoding.items():
            known[key].copy_(weight)
    if arguments.get("is_trainable"):
        for key in adapter.trained:
            known[key].requires_grad_()
    keep_extension(subject, edits)
    return outer


def take_out(model: Any, name: str, *, is_last: bool) -> None:
    """Take an adapter out of a PEFT model, with its layers; a learned prompt has put none into the model inside."""
    if not is_last:
        model.delete_adapter(name)
    elif hasattr(model, "unload"):
        model.unload()


def keep_biases(adapted: nn.Module) -> None:
    """Give trained heads that share an embedding's weights their biases, which PEFT leaves out of such layers."""
    for module in adapted.modules():
        bias: Any = getattr(getattr(module, "original_module", None), "bias", None)
        for trained in getattr(module, "modules_to_save", {}).values() if bias is not None else ():
            if trained.bias is None:
                del trained.bias
                trained.register_buffer("bias", bias.detach())  # no parameter, which PEFT would train at will


def _require_encoding(
    base: nn.Module, adapter: SavedAdapter, known: Mapping[str, Tensor], *, drawn: bool, shared: bool
) -> dict[str, list[int]]:
    """Refuse an adapter whose encoding is not the one of a model, and return the sizes of the adapter's own weights.

    Args:
        known: Weights of the encoding on the model, by name.
        drawn: True if they were drawn at random.
        shared: True if the model has adapters, which need them as they are.

    Raises:
        CheckpointError: also if the weights cannot be read.
    """
    directory, beside = adapter.directory, adapter.encoding
    if any(key not in known or weight.shape != known[key].shape for key, weight in beside.items()):
        raise CheckpointError(
            f"{directory / ENCODING_FILE} does not fit the encoding of this {type(base).__name__}. It is "
            f"another adapter's; copy the one that was saved with this."
        )
    path = directory / ADAPTER_WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            stored = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 - no dict
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy it again.") from error
    lacking = (key for key in known if key not in beside and not any(own.endswith(f".{key}") for own in stored))
    if drawn and (lacks := next(lacking, None)) is not None:
        raise CheckpointError(
            f"The adapter in {directory} was saved without the weights of its encoding ({lacks}), and this "
            f"base has none either. Give the base that it was trained on, with base=..."
        )
    if shared and any(not torch.equal(known[key].cpu(), each.to(known[key].dtype)) for key, each in beside.items()):
        raise CheckpointError(
            f"The encoding saved with the adapter in {directory} has other weights than this model, whose own "
            f"adapters need them. Load it onto a model of its own."
        )
    return stored


def _require_sizes(base: nn.Module, directory: Path, stored: Mapping[str, list[int]]) -> None:
    """Refuse an adapter whose weights are of other sizes than a model's, before PEFT changes the model."""
    modules = dict(base.named_modules())
    # ZeRO-3 leaves no numbers in a weight, and keeps its size in ``ds_shape``.
    sizes = {name: list(getattr(weight, "ds_shape", weight.shape)) for name, weight in base.named_parameters()}
    for key, found in stored.items():
        name = key.removeprefix("base_model.model.")
        if sizes.get(name, found) != found:
            raise CheckpointError(
                f"The adapter in {directory} holds {name} of size {found}, and this {type(base).__name__} has "
                f"{sizes[name]}. Give the base that it was trained on; one with other tokens takes "
                f"model.resize_token_embeddings({found[0]}) first."
            )
        for ending, side, widths in (each for each in WIDTHS if name.endswith(each[0])):
            if name == key:  # as transformers writes adapters with save_peft_format=False
                raise CheckpointError(
                    f"The adapter in {directory} holds {key} without base_model.model. in front of it, where PEFT does "
                    f"not find it. Save the adapter again without save_peft_format=False."
                )
            layer = modules.get(name.removesuffix(ending))
            width = next((known for known in (getattr(layer, each, None) for each in widths) if known), None)
            if isinstance(width, int) and width != found[side]:
                raise CheckpointError(
                    f"The adapter in {directory} holds {name} of size {found}, and this {type(base).__name__} has "
                    f"{widths[0]}={width} there. Give the base that it was trained on."
                )


def _unreached(adapted: Any, stored: Set[str], name: str) -> str | None:
    """Say which weights of an adapter found no place in a model, or which it lacks; names of no module do no harm."""
    from peft.utils import get_peft_model_state_dict

    held = set(get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=False))
    lost, lacking = stored - held - adapted.state_dict().keys(), held - stored
    # Experts have other names in the file of an older transformers, and PEFT gives them patterns.
    for what, keys in (("it has no place for", lost), ("the adapter lacks", lacking)):
        if keys := {key for key in keys if "expert" not in key}:
            return f"{what} {min(keys)} ({len(keys)} of {len(stored)} weights)"
    paths = getattr(adapted.base_model, "targeted_parameter_names", ())
    for entry in getattr(adapted.peft_config[name], "target_parameters", None) or ():  # experts, passed over above
        if "gate_up_proj" not in entry and not any(f".{path}".endswith(f".{entry}") for path in paths):
            return f"nothing of it is named {entry} (target_parameters)"
    return None


def _add_adapter(model: Any, adapter: SavedAdapter, name: str, *, is_trainable: bool = False, **arguments: Any) -> None:
    """Give a PEFT model one more adapter, as PEFT's ``load_adapter`` does with an unmarked adapter."""
    adapter.config.inference_mode = not is_trainable
    of_layers = {key: arguments[key] for key in ("low_cpu_mem_usage", "autocast_adapter_dtype") if key in arguments}
    model.add_adapter(name, adapter.config, **of_layers)
    try:
        model.load_adapter(adapter.directory, name, is_trainable=is_trainable, **arguments)
    except BaseException:
        model.delete_adapter(name)
        raise
    if is_trainable:
        model.set_requires_grad(name)
