"""Inspect a checkpoint before anything is loaded: its positions, its window, and the methods that extend it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ctxext.checkpoints.adapters import EXTENSION_FILE, is_adapter, read_beside
from ctxext.checkpoints.carried import already_extended, plain_config
from ctxext.checkpoints.classes import meta_model
from ctxext.checkpoints.export import exports_of, require_consistent
from ctxext.checkpoints.source import checked_path, keeps_old_readers_out, read_any_config
from ctxext.core.architecture import trained_length_of
from ctxext.core.edits import own_attributes
from ctxext.core.patching import describe, patch, unpatch
from ctxext.core.rebuild import Scalar
from ctxext.core.saved import arguments_over, checked_extension, describe_saved, saved_extension, saved_sides
from ctxext.core.scaling import published_json, scaling_of
from ctxext.core.subject import Subject, text_of
from ctxext.errors import CheckpointError, CtxextError, IncompatibleError, PatchStateError
from ctxext.files import StrPath, read_json
from ctxext.methods import EncodingMethod, Method, known_methods
from ctxext.methods.parameters import checked_tokens
from ctxext.models import architecture_of
from ctxext.models.alibi import AlibiArchitecture
from ctxext.models.buckets import Buckets
from ctxext.models.refusals import foreign_fields, refuse_lost_share, unstated_base
from ctxext.models.rope_replaced import TRAIN_FIRST
from ctxext.models.sinusoid import Sinusoids
from ctxext.models.table import LearnedTable
from ctxext.models.windows import window_fields, window_note
from ctxext.recommended import LONG, fits_unextended
from ctxext.rotary.sites import find_sites
from ctxext.runtimes.base import Export
from ctxext.spec import LLAMA, Description, ExtensionArguments, RopeSpec

FEW = 8
"""The fewest layers to try where layers differ: no pattern that a config gives by a number is longer."""
TRIED = 4
"""The factor that methods are tried at, of ``Method.example``."""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """One set of rotary frequencies: its scaling in the config, its plain form, and the side of an encoder-decoder."""

    layer_type: str | None
    rope_type: str
    base: float
    rotary_dim: int
    side: str | None = None


@dataclass(frozen=True, kw_only=True)
class MethodCheck:
    """The verdict about one method on this checkpoint, proven on a model on the meta device.

    Args:
        runtimes: Runtimes that serve the result.
        stock: True if a process without ctxext loads the result.
        needs_training: True if the model is useless with it until it has been trained so.
    """

    method: str
    factor: float
    target_length: int | None = None
    stored_as: str = ""
    runtimes: tuple[str, ...] = ()
    stock: bool = False
    refused: str | None = None
    needs_training: bool = False

    def of(self, method: Method) -> MethodCheck:
        """Return this verdict for another method that is put in by the same code, with the same factor."""
        refused = self.refused and self.refused.replace(repr(self.method), repr(method.name))
        return replace(self, method=method.name, refused=refused)


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The result of ``ctxext inspect``.

    Args:
        positions: the rotary frequencies that reach beyond a sliding window, as they were before ctxext extended them.
        trained_length: Tokens that the weights were trained for: before an extension by ctxext, or with the scaling
            that the config has otherwise; None where nothing says so.
        window: Description of the sliding windows, and of the cap that they put on the reach; None without any.
        extended: Description of the extension that the checkpoint has already; None where it is plain.
        exports: per target, the flags for an extended checkpoint or the reason against.
        notes: Sentences on fields that other programs read and transformers passes over, and on a length that most
            texts fit into already.
    """

    model_type: str
    positions: tuple[Positions, ...] = ()
    no_positions: str | None = None
    trained_length: int | None = None
    longest: int | None = None
    window: str | None = None
    window_caps: bool = False
    extended: str | None = None
    description: Description | None = None
    verdicts: tuple[MethodCheck, ...] = ()
    exports: dict[str, Export | str] | None = None
    notes: tuple[str, ...] = ()


def inspect_checkpoint(
    place: StrPath,
    *,
    trained_length: int | None = None,
    trust_remote_code: bool = False,
    **location: Any,
) -> Inspection:
    """Inspect a checkpoint from its config alone; ``location`` may name a ``gguf_file`` in the directory.

    Raises:
        CheckpointError: nothing readable there.
    """
    config, saved, plain = _read(place, trained_length, trust_remote_code, location)
    model = _shortest(plain, trust_remote_code)
    subject = Subject.of(model)
    refuse_lost_share(subject, os.fspath(place))
    known = trained_length or (trained_length_of(subject) if saved is None else saved["trained_length"])
    extended = already_extended(config)
    given: dict[str, Any] = {"trained_length": known if extended else trained_length}
    if saved is not None:  # the sides of an encoder-decoder have a length each, in their configs
        given = {} if saved_sides(saved) else {name: saved[name] for name in ("trained_length", "scaling")}
    require_consistent(config, trust_remote_code)
    window, caps = _window(text_of(plain), known)
    positions, reason, spec = _positions(subject, known or 1)
    verdicts = _verdicts(model, given, spec, caps)
    return Inspection(
        model_type=config.model_type,
        positions=positions,
        no_positions=reason,
        trained_length=known,
        longest=getattr(text_of(config), "max_position_embeddings", None),
        window=window,
        window_caps=caps,
        extended=extended,
        description=describe_saved(saved, config.model_type) if saved else None,
        verdicts=verdicts,
        exports=exports_of(
            config,
            str(Path(place, location.get("gguf_file", ""))),
            guarded=keeps_old_readers_out(place, config, **location),
            targets=["llama.cpp"] if "gguf_file" in location else (),  # the others serve checkpoints
        )
        if extended
        else None,
        notes=(*_notes(plain, model), *_long_already(plain, known if positions else None, verdicts)),
    )


def _shortest(config: Any, trust_remote_code: bool) -> PreTrainedModel:
    """Build the model of a config with as few layers as have one of every kind, for which every verdict is the same.

    Every method is tried on every layer, so that the whole of a deep model would take minutes.
    """
    whole = meta_model(config, trust_remote_code=trust_remote_code)
    few = 2 if all(_is_one_repeated(part) for part in whole.modules() if isinstance(part, nn.ModuleList)) else FEW
    if (short := shortened(config, few)) is config:
        return whole
    try:
        shallow = meta_model(short, trust_remote_code=trust_remote_code)
    except CheckpointError:  # its config checks one field against another, which says the number of layers too
        return whole
    return shallow if _kinds(shallow) == _kinds(whole) else whole


def shortened(config: Any, least: int) -> Any:
    """Return a copy of a config with fewer layers that has one of every kind, or the config if none has fewer."""
    short = copy.deepcopy(config)
    text = text_of(short)
    count = getattr(text, "num_hidden_layers", None)
    if not isinstance(count, int) or getattr(text, "num_kv_shared_layers", None):  # the last layers read earlier ones
        return config
    own = {int(layer): fields for layer, fields in (text.to_dict().get("per_layer_config") or {}).items()}
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == count}
    kinds = [repr(kind) for kind in zip(map(own.get, range(count)), *lists.values(), strict=True)]
    # The last layer stays of its kind, which some classes require.
    fits = (end for end in range(least, count) if kinds[end - 1] == kinds[-1] and set(kinds[:end]) == set(kinds))
    if (keep := next(fits, count)) == count:
        return config
    for name, value in lists.items():
        setattr(text, name, value[:keep])
    text.num_hidden_layers = keep
    if own:
        text.per_layer_config = {layer: fields for layer, fields in own.items() if layer < keep}
    return short


def _is_one_repeated(layers: nn.ModuleList) -> bool:
    """Return whether layers have the same modules, whose numbers and words differ in the layer's index alone."""
    traits = [[(path, type(module), _words(module)) for path, module in layer.named_modules()] for layer in layers]
    return all(one == traits[0] for one in traits)


def _words(module: nn.Module) -> dict[str, Any]:
    held = own_attributes(module).items()
    return {name: value for name, value in held if isinstance(value, Scalar) and name != "layer_idx"}


def _kinds(model: PreTrainedModel) -> set[Any]:
    """Return the kinds of modules in a model: their classes and the shapes of their weights."""
    return {
        (type(module), tuple(weight.shape for weight in module.parameters(recurse=False)))
        for module in model.modules()
        if not isinstance(module, nn.ModuleList)
    }


def _notes(config: Any, model: PreTrainedModel) -> tuple[str, ...]:
    """Describe the fields that transformers passes over and a user must know of."""
    notes = [str(field) for field in foreign_fields(config)]
    if (unstated := unstated_base(published_json(config), config)) is not None:
        notes.append(f"Its config has {unstated[0]} and no rope_theta; transformers takes {unstated[1]} for its class.")
    if getattr(config, "auto_map", None) and type(model).__module__.startswith("transformers."):
        notes.append(
            f"Its config names Python code of its own (auto_map); {type(model).__name__} of transformers was looked at "
            f"instead."
        )
    return tuple(notes)


def _long_already(config: Any, known: int | None, verdicts: Sequence[MethodCheck]) -> Iterator[str]:
    """Yield what an extension costs texts that fit without it, for a rotary checkpoint that reads long ones already."""
    scaling = scaling_of(config)
    before = scaling.original or 0 if scaling else 0
    native = before if before >= LONG else known or 0
    if native >= LONG:
        yield fits_unextended(native, [verdict.method for verdict in verdicts if verdict.refused is None])


def _read(
    place: StrPath, trained_length: int | None, trust_remote_code: bool, location: dict[str, Any]
) -> tuple[Any, dict[str, Any] | None, Any]:
    """Return a checkpoint's config, the extension that a new method would take off, and the config without it."""
    if trained_length is not None:
        checked_tokens("trained_length", trained_length, least=2)
    checked_path(place, location)
    config = read_any_config(place, trust_remote_code=trust_remote_code, **location)
    saved = saved_extension(config, os.fspath(place))
    if saved is not None and trained_length is not None:
        _, saved = arguments_over(config, saved, ExtensionArguments(method=None, trained_length=trained_length))
        if saved is None:
            del config.ctxext
    return config, saved, config if saved is None else plain_config(config, saved)


def rope_of_checkpoint(
    place: StrPath, *, trained_length: int | None = None, trust_remote_code: bool = False
) -> RopeSpec:
    """Return the plain rotation of a checkpoint.

    Raises:
        CheckpointError: nothing readable there.
        IncompatibleError: no rotary positions, or no trained length.
    """
    _, saved, plain = _read(place, trained_length, trust_remote_code, {})
    subject = Subject.of(meta_model(plain, trust_remote_code=trust_remote_code))
    known = trained_length or (trained_length_of(subject) if saved is None else saved["trained_length"])
    if known is None:
        raise IncompatibleError(f"The config of {place} does not say its trained length; give --trained-length.")
    _, reason, spec = _positions(subject, known)
    if spec is None:
        kind = str(reason).removeprefix("none: ")
        way = f"`ctxext inspect {place}` names the methods that fit."
        raise IncompatibleError(kind if kind == reason else f"{place} has no rotation: {kind}. {way}")
    return spec


def inspect_adapter(directory: Path) -> Description:
    """Describe the extension that an adapter directory carries; nothing of the base model is read.

    Raises:
        CheckpointError: if it carries no extension.
    """
    if not is_adapter(directory):
        raise CheckpointError(f"{directory} is not an adapter directory.")
    path = directory / EXTENSION_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{directory} is an adapter without {EXTENSION_FILE}: it carries no extension. Inspect its base model."
        )
    base = read_json(directory / "adapter_config.json").get("base_model_name_or_path")
    return describe_saved(checked_extension(read_beside(path)["extension"], str(path)), f"adapter for {base}")


def _window(text: Any, trained_length: int | None) -> tuple[str | None, bool]:
    target = None if trained_length is None else TRIED * trained_length
    try:
        window_fields(text, None, target)
    except IncompatibleError as error:
        return str(error), True
    return window_note(text, target), False


def _positions(subject: Subject, trained_length: int) -> tuple[tuple[Positions, ...], str | None, RopeSpec | None]:
    """Find the sites of an extension, or why there are none, and the spec of the first."""
    rotations: list[Positions] = []
    try:
        if sides := subject.sides:
            each = {name: _positions(side, trained_length) for name, side in sides.items()}
            for name, (of_side, _, _) in each.items():
                rotations += [replace(positions, side=name) for positions in of_side]
            reasons = [reason for _, reason, _ in each.values() if reason]
            return tuple(rotations), reasons[0] if reasons else None, next(iter(each.values()))[2]
        text = subject.text
        architecture = architecture_of(subject)
        if isinstance(architecture, AlibiArchitecture):
            return (), f"none: this {subject.kind} has ALiBi", None
        if isinstance(architecture, Buckets):
            return (), f"none: this {subject.kind} has buckets of relative distances", None
        if isinstance(architecture, LearnedTable):
            tables = " and ".join(
                f"{table.positions:,} tokens ({table.name})" for table in architecture.tables(subject)
            )
            return (), f"none: it has learned positions, one vector each for {tables}", None
        if isinstance(architecture, Sinusoids):
            names = " and ".join(table.name for table in architecture.tables(subject))
            return (), f"none: it adds sinusoids to its input, from {names}", architecture.spec(subject)
        # Only rotations have sites: for the kinds above, the search would fail with a less precise reason.
        sites = find_sites(subject, trained_length, scaled=True)
        for site in sites:
            kind = str(site.rope_dict(text).get("rope_type", "default"))
            base, rotary_dim = site.spec.base, site.spec.rotary_dim
            rotations.append(Positions(layer_type=site.layer_type, rope_type=kind, base=base, rotary_dim=rotary_dim))
    except IncompatibleError as error:
        return (), str(error), None
    return tuple(dict.fromkeys(rotations)), None, sites[0].spec


def _verdicts(
    model: PreTrainedModel, given: dict[str, Any], spec: RopeSpec | None, caps: bool
) -> tuple[MethodCheck, ...]:
    verdicts, alike, plain = [], dict[Any, MethodCheck](), copy.deepcopy(model.config)
    for kind in known_methods().values():
        method = kind.example(spec or LLAMA)
        # Encodings of one form are put in by the same hand, which looks at the model for a second or two.
        form = (method.form, method.carries) if isinstance(method, EncodingMethod) else method
        if form not in alike:
            alike[form] = _verdict(model, method, given, caps, plain)
        verdicts.append(alike[form].of(method))
    return tuple(verdicts)


def _verdict(model: PreTrainedModel, method: Method, given: dict[str, Any], caps: bool, plain: Any) -> MethodCheck:
    try:
        patch(model, method, sliding_window="lift" if caps else None, **given)
    except CtxextError as error:
        is_asked = isinstance(error, PatchStateError) and already_extended(model.config) is not None
        why = "say --trained-length first: already extended" if is_asked else str(error)
        return MethodCheck(method=method.name, factor=method.factor, refused=why)
    description, exports = describe(model), exports_of(model.config, "", served=plain)
    unpatch(model)
    return MethodCheck(
        method=method.name,
        factor=method.factor,
        target_length=description.target_length,
        stored_as=description.stored_as,
        runtimes=tuple(target for target, made in exports.items() if isinstance(made, Export)),
        stock=description.stock,
        needs_training=method.needs_training or any(note.endswith(TRAIN_FIRST) for note in description.notes),
    )
