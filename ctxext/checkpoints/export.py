"""Export an extended checkpoint: the flags that make another runtime serve it, or the reason why it cannot."""

from __future__ import annotations

import copy
import json
import numbers
import os
import shlex
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ctxext.checkpoints.adapters import is_adapter
from ctxext.checkpoints.carried import already_extended, arguments_of, plain_config
from ctxext.checkpoints.classes import meta_model, model_class, way_to_run
from ctxext.checkpoints.gguf_file import scaling_in_gguf
from ctxext.checkpoints.into_gguf import write_into_gguf
from ctxext.checkpoints.load import extended_config, refuse_without_method
from ctxext.checkpoints.source import checked_path, config_place, keeps_old_readers_out, read_any_config
from ctxext.core.patching import extend
from ctxext.core.saved import GUARDED_FIELD, saved_extension, saved_method, saved_sides
from ctxext.core.scaling import is_windowed, rope_dicts, same_rope, scaling_of
from ctxext.core.subject import Subject, field_of, text_of
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError, PatchStateError, refuse_unknown
from ctxext.files import JsonObject, Progress, StrPath, digest
from ctxext.methods import METHODS, Method, TableMethod
from ctxext.mistakes import refuse_gguf
from ctxext.models.drafts import about_drafts, draft_heads
from ctxext.models.refusals import building, foreign_fields
from ctxext.rope_types import GUARD
from ctxext.runtimes import RUNTIMES
from ctxext.runtimes.base import STOCK_TYPES, Export, ExtensionInConfig, OwnALiBi
from ctxext.runtimes.llama_cpp import architecture_of, in_file
from ctxext.spec import ExtensionArguments


def export(
    checkpoint: StrPath | nn.Module,
    *,
    to: str,
    method: str | Method | None = None,
    gguf: tuple[StrPath, StrPath] | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **arguments: Any,
) -> Export:
    """Return the flags with which another runtime serves an extended checkpoint, and the limits of that runtime.

    Call it before deploying: runtimes disagree on rope scaling, and none of them warns when it computes something else.
    ``exact`` is claimed only for runtimes and versions that were run, or whose code was read. No weights are loaded and
    nothing is started; a file is written only with ``gguf``. Where the runtime has no such flags, or they would leave
    draft heads (MTP) behind, the command first writes an extended copy, and the flags are for that copy.

    Args:
        checkpoint: a directory, a name on the hub, or a patched model (treated as if saved by ``ctxext.save``). With
            ``gguf`` and ``method`` also a ``.gguf`` file whose positions are not scaled.
        to: the runtime: "llama.cpp", "mlx-lm", "sglang" or "vllm".
        method: method for a checkpoint to be served extended without changes to its files, as for ``ctxext.patch``.
            None exports the extension in the checkpoint.
        gguf: for llama.cpp: a GGUF file of this model, in any quantisation, and the path of the copy with the extension
            to write. The copy can hold extensions that no flag expresses, such as searched frequencies.
        trust_remote_code: permission to run Python code in the checkpoint that its config names.
        progress: called with (bytes copied, bytes to copy) while a copy is written.
        **arguments: with ``method``, arguments of ``ctxext.patch``, including the method's own parameters.

    Raises:
        UnknownNameError: for another target.
        IncompatibleError: the target cannot run this extension; the message names the reason.
        PatchStateError: the checkpoint is not extended and no method is given.
        CheckpointError: nothing at ``checkpoint``, an adapter, or a config that contradicts itself; or the GGUF file is
            of another model, or its copy cannot be written.
        InvalidParameterError: a GGUF file for another runtime, or arguments of a method without one.

    Source: vLLM 0.33.0 (vllm/config/model.py, vllm/model_executor/layers/rotary_embedding); llama.cpp as vendored by
        llama_cpp_python 0.3.36 (conversion/, common/arg.cpp, src/llama-context.cpp); sglang 0.5.23 (srt/layers);
        mlx-lm 0.32.2 (models/rope_utils.py).
    """
    refuse_unknown("export target", [to], RUNTIMES)
    if gguf is not None and to != "llama.cpp":
        raise InvalidParameterError(f"gguf: a GGUF file is written for llama.cpp, and not for {to}. Leave it out.")
    if gguf is not None and (isinstance(gguf, str | os.PathLike) or len(gguf) != 2):
        raise InvalidParameterError(f"gguf must be two paths, of a GGUF file and of the copy to write, found {gguf!r}.")
    if method is None:
        refuse_without_method(arguments, "the extension that is there is exported")
    if not isinstance(checkpoint, str | os.PathLike):
        if method is not None:
            raise InvalidParameterError("A model is exported as it is patched; give method with a checkpoint path.")
        subject = Subject.of(checkpoint)
        if any(getattr(part, "peft_config", None) for part in subject.chain):
            _refuse_adapter(f"This {type(checkpoint).__name__} has an adapter", "model")
        config, served, guarded = subject.config, None, False
        place, is_there = "CHECKPOINT", False
        trust_remote_code = True  # its code has run
    else:
        config, served, guarded = _read(checkpoint, method, gguf is not None, trust_remote_code, arguments)
        place, is_there = os.fspath(checkpoint), True
    if served is None:
        require_consistent(config, trust_remote_code)
    if gguf is None and served is None:
        return with_start(export_config(config, to=to, guarded=guarded), place, is_there=is_there)
    if gguf is None:
        return _of_original(config, served, to, place, _patch_command(place, method, trust_remote_code, arguments))
    extended = read_extended(config, served)
    saved = saved_extension(config, f"this {config.model_type}")
    plain = served or (config if saved is None else plain_config(config, saved))
    exported = in_file(extended)
    source, out = map(Path, gguf)
    write_into_gguf(extended, plain, source, out, architecture=architecture_of(extended), progress=progress)
    return with_start(replace(exported, file=str(out)), place, is_there=is_there)


def with_start(made: Export, checkpoint: str, *, is_there: bool = True) -> Export:
    """Return an export with the command that serves a checkpoint of this name, or the GGUF file that holds it.

    The name of a checkpoint that is yet to be written (``is_there`` False) leads to none of its files.
    """
    named = checkpoint if checkpoint.endswith(".gguf") else "OUT.gguf" if made.in_file else "MODEL.gguf"
    file = made.file or named
    runtime, config = RUNTIMES[made.target], Path(checkpoint) / "config.json"
    made = replace(made, config_sha256=digest(config.read_bytes()) if is_there and config.is_file() else "")
    return replace(made, start=(*(made.start or runtime.start), file if runtime.reads_gguf else checkpoint))


def _of_original(config: Any, served: Any, to: str, place: str, first: tuple[str, ...]) -> Export:
    """Export a checkpoint that is not extended yet: by flags, or by a copy where flags leave something behind."""
    runtime, before = RUNTIMES[to], getattr(served, "ctxext", None) or {}
    is_read = before.get("stock", True)  # other programs refuse other files before they look at arguments
    has_flags = is_read and not runtime.needs_copy(config)
    flags = with_start(export_config(config, to=to, served=served), place) if has_flags else None
    if flags is not None and not (runtime.drafts_missed and draft_heads(config)):
        return flags
    made = with_start(export_config(config, to=to), "NEW", is_there=False)
    notes = made.notes if flags is None else (*made.notes, f"{flags.notes[-1]} Without drafts: {flags.command}")
    return replace(made, first=first, notes=notes)


def _patch_command(place: str, method: Any, trust_remote_code: bool, arguments: dict[str, Any]) -> tuple[str, ...]:
    """Return the command that writes what ``export`` was given as an extended checkpoint."""
    given = ({"method": method} if isinstance(method, str) else method.to_dict()) | arguments
    options = {field.name for field in fields(ExtensionArguments)}
    words = ["ctxext", "patch", place, "NEW"] + ["--trust-remote-code"] * trust_remote_code
    for name, value in given.items():
        said = value if isinstance(value, str) else json.dumps(value, default=_plain_number)
        if value is not None and name != "attention":  # a backend of ctxext, which no other program runs
            words += [f"--{name.replace('_', '-')}", said] if name in options else ["-p", f"{name}={said}"]
    return tuple(words)


def _plain_number(number: Any) -> int | float:
    """Return a number of NumPy, or a fraction, as one of Python's, which JSON has."""
    return int(number) if isinstance(number, numbers.Integral) else float(number)


def _read(
    checkpoint: StrPath,
    method: str | Method | None,
    into_gguf: bool,
    trust_remote_code: bool,
    arguments: dict[str, Any],
) -> tuple[Any, Any, bool]:
    """Read the extended config, the one in the files if it differs, and whether the files refuse old readers."""
    place, inside = config_place(checkpoint)
    if inside:
        if method is None or not into_gguf:
            refuse_gguf(checkpoint)
        if scaling := scaling_in_gguf(Path(place, inside["gguf_file"])):
            raise CheckpointError(
                f"{checkpoint} scales its positions already ({', '.join(scaling)}), and an extension of them is "
                f"written beside its config only. Give the checkpoint that it was converted from."
            )
    else:
        checked_path(place, {})
    if is_adapter(place):
        _refuse_adapter(f"{place} is an adapter", f"ctxext.load({place!r})")
    config = read_any_config(place, trust_remote_code=trust_remote_code, **inside)
    model_class(config)  # it says so where transformers has none
    if method is None:
        return config, None, keeps_old_readers_out(place, config, **inside)
    return extended_config(config, method, trust_remote_code=trust_remote_code, **arguments), config, False


def _refuse_adapter(what: str, model: str) -> None:
    """Raise ``CheckpointError`` with a way to merge the adapter into the model that the code ``model`` gives."""
    raise CheckpointError(
        f"{what}. A runtime's own LoRA does not read its extension, and vLLM's refuses it. Merge it "
        f"into its base model first: {model}.merge_and_unload().save_pretrained(NEW), then export NEW."
    )


def export_config(config: Any, *, to: str, served: Any = None, guarded: bool = False) -> Export:
    """Export the extension that ``config`` holds; a config from a file must be consistent.

    ``served`` is the config in the files, where it is another one. ``guarded`` says that the files keep out whoever
    reads the fields of transformers 4, or lack them.
    """
    runtime, saved = RUNTIMES[to], saved_extension(config, f"this {config.model_type}")
    method = None if saved is None or saved_sides(saved) else saved_method(saved)
    if saved is not None and method is not None and saved["stock"]:
        # Not of pi, which changes rotary positions and ALiBi too.
        if isinstance(method, TableMethod) and not {"rope_parameters", GUARDED_FIELD} & saved["original"].keys():
            return _longer_table(config, saved, served, to)
        if isinstance(method, METHODS["alibi"]):
            unsaid = {} if served is None else _changed(config, served)
            own = OwnALiBi(model_type=config.model_type, target_length=saved["target_length"], unsaid=unsaid)
            return runtime.export_own_alibi(own)
    exported = runtime.export(replace(read_extended(config, served), guarded=guarded))
    obeyed = tuple(str(field) for field in foreign_fields(config) if to in field.programs)
    missed = runtime.drafts_missed if exported.by_flag.keys() - {runtime.length_flag} else ""
    drafts = about_drafts(config, missed or runtime.drafts)
    return replace(exported, exact=exported.exact and not obeyed, notes=(*exported.notes, *obeyed, *drafts))


def exports_of(
    config: Any, place: str, *, guarded: bool = False, served: Any = None, targets: Iterable[str] = ()
) -> dict[str, Export | str]:
    """Export the extension that ``config`` holds to every runtime, or return the reason why a runtime cannot serve it.

    ``served`` is the config in the files, where it is another one and the runtime needs no copy with this one.
    """
    exports: dict[str, Export | str] = {}
    for target in targets or RUNTIMES:
        try:
            files = None if served is None or RUNTIMES[target].needs_copy(config) else served
            exports[target] = with_start(export_config(config, to=target, served=files, guarded=guarded), place)
        except IncompatibleError as error:
            exports[target] = str(error)
    return exports


def _longer_table(config: Any, saved: JsonObject, served: Any, to: str) -> Export:
    """Export a longer table of positions, which lies in the weights.

    Raises:
        IncompatibleError: for a checkpoint whose files hold the shorter table.
    """
    if served is not None:
        words = _patch_command("SOURCE", saved_method(saved), False, {"trained_length": saved["trained_length"]})
        raise IncompatibleError(
            f"No flag makes {to} read a longer table of positions than the checkpoint holds. Write one first: "
            f"{shlex.join(words)}"
        )
    target, flag = saved["target_length"], RUNTIMES[to].length_flag
    note = (
        f"The longer table of positions is among the weights, and config.json says how long it is: there is nothing "
        f"else to be told. That {to} runs a {config.model_type} so was not tried here."
    )
    return Export(target=to, flags=() if flag is None else (flag, str(target)), notes=(note,), exact=False)


def require_consistent(config: Any, trust_remote_code: bool = False) -> None:
    """Require that the fields for other runtimes agree with the saved extension.

    Raises:
        CheckpointError: a field of the config has another value than its ``ctxext`` entry would write.
    """
    saved = saved_extension(config, f"this {config.model_type}")
    if saved is None or saved_sides(saved):
        return
    plain = plain_config(config, saved)
    again = extend(meta_model(plain, trust_remote_code=trust_remote_code), arguments_of(saved), is_restored=True).config
    if saved["stored_as"] != again.ctxext["stored_as"]:  # the one that another version of transformers rebuilds
        return
    for name in saved["original"]:
        (here, leaf), (there, _) = (field_of(one if "." in name else text_of(one), name) for one in (config, again))
        value, expected = getattr(here, leaf, None), getattr(there, leaf, None)
        if expected == GUARD and value in (GUARD, saved["original"][name]):  # in memory, or as a config is read
            continue
        if not same_rope(value, expected):
            raise CheckpointError(
                f"The config of this {config.model_type} contradicts itself: its ctxext entry stands for {name}="
                f"{expected}, but it holds {value}. One of them was changed by hand; extend the original checkpoint "
                f"anew (ctxext patch)."
            )


def read_extended(config: Any, served: Any = None) -> ExtensionInConfig:
    """Read the extension in a config.

    Raises:
        PatchStateError: if it is not extended.
        IncompatibleError: if the extension is not one of rotary positions.
    """
    if not already_extended(config):
        raise PatchStateError(
            f"This {config.model_type} is not extended, so there is nothing to export. Patch it first (ctxext patch), "
            f"or name the extension to serve it with (--method yarn --factor 4)."
        )
    text, before = (None if part is None else text_of(part) for part in (config, served))
    way = way_to_run(config, is_saved=served is None)
    saved = getattr(config, "ctxext", None)
    if saved is not None and saved_sides(saved):
        raise IncompatibleError(
            f"This {config.model_type} is an encoder-decoder whose sides have an extension each; no runtime here has "
            f"flags for that. Run it with transformers, by ctxext.load."
        )
    rotary = saved is None or "rope_parameters" in saved["original"]  # an ALiBi Falcon has a rope dict all the same
    reaching = [
        (kind, rope) for kind, rope in (rope_dicts(text) if rotary else ()) if kind is None or not is_windowed(kind)
    ]
    if not reaching:
        raise IncompatibleError(
            f"The extension of this {config.model_type} is not one of rotary positions; no runtime here has a flag "
            f"for it. {way}."
        )
    types = {rope.get("rope_type", "default") for _, rope in reaching}
    if saved is not None and not saved["stock"] and types <= {*STOCK_TYPES}:
        raise IncompatibleError(
            f"Only ctxext reads {saved['method']['method']!r} from the config of this {config.model_type}. {way}."
        )
    layer_type = reaching[0][0]
    trained_length, target_length, windows = _lengths(config)
    pairs, scale = _pairs_and_scale(text, layer_type)
    return ExtensionInConfig(
        config=config,
        layer_type=layer_type,
        trained_length=trained_length,
        target_length=target_length,
        windows=windows,
        pairs=pairs,
        scale=scale,
        unsaid={} if served is None else _changed(config, served),
        files={} if before is None else dict(rope_dicts(before)).get(layer_type, {}),
        way_to_run=way,
    )


def _lengths(config: Any) -> tuple[int, int, tuple[int, ...]]:
    """Return the trained length, the length to serve, and candidates for the trained one where it is open.

    Raises:
        IncompatibleError: if the config names no length at all.
    """
    saved = getattr(config, "ctxext", None)
    if saved:
        return saved["trained_length"], saved["target_length"], ()
    scaling = scaling_of(config)
    if scaling is None or scaling.serves is None:
        raise IncompatibleError(
            f"The config of this {config.model_type} has no max_position_embeddings, so the length to serve is not "
            f"known. Write it into config.json, or extend the original checkpoint with ctxext."
        )
    return (*scaling.serves, () if scaling.window else scaling.windows)


def _pairs_and_scale(text: Any, layer_type: str | None) -> tuple[int | None, float]:
    """Compute how many frequencies plain transformers makes, and its factor of cos and sin.

    None and 1 where they are plain, or need ctxext anyway.

    Raises:
        CheckpointError: it makes none of such a config, as of longrope with too few factors.
    """
    rope = text.rope_parameters if layer_type is None else text.rope_parameters[layer_type]
    kind = rope.get("rope_type", "default")
    if kind == "default" or kind not in STOCK_TYPES:
        return None, 1.0
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    with building(f"the positions of a {text.model_type}"):
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](copy.deepcopy(text), None, **arguments)
    return len(inv_freq), float(scale)


def _changed(config: Any, served: Any) -> dict[str, Any]:
    """Collect the fields of the decoder's config that the extension changed, or the one that it replaces."""
    new, old = (text_of(part) for part in (config, served))
    changed = config.ctxext["original"] | (getattr(served, "ctxext", None) or {}).get("original", {})
    return {key: value for key in changed if (value := getattr(new, key, None)) != getattr(old, key, None)}
