"""Refuse configs that contradict themselves, the file that they were read from, or the model that was built from them.

The loader checks a config before a model is built from it, where transformers would fail without naming a field.
``core/architecture.py`` runs the rest before a model is extended.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ctxext.core.architecture import CHECKS
from ctxext.core.rebuild import FAILURES
from ctxext.core.saved import extended_texts, extensions_in, saved_extension, saved_method
from ctxext.core.scaling import (
    CHUNKED,
    FOREIGN_KEYS,
    REFUSALS,
    declared_fields,
    heads_of,
    is_windowed,
    published_json,
    published_text,
    rope_dicts,
    same_rope,
)
from ctxext.core.subject import Subject, text_of
from ctxext.errors import CheckpointError, CtxextError, IncompatibleError, VerificationError, shown
from ctxext.files import JsonObject
from ctxext.methods.parameters import is_number
from ctxext.probe.code import source_of_home
from ctxext.rope_types import GUARD

UNFIT = (*FAILURES, StrictDataclassError)
"""Errors in which code ends when a value is of another kind than it takes for granted."""
UNSCALED = (None, "default", "mrope", "proportional", "axial")
# Model types of transformers whose code reads such a key.
OWN_KEYS = {"alpha": "hunyuan", "short_mscale": "phimoe", "long_mscale": "phimoe"}

# Names of the base of rotation in configs; names of towers for images and sound are left out.
BASE = re.compile(r"(?=.*(rope|rotary))(?=.*(theta|base))(?!.*(vision|visual|image|audio|speech))", re.I)
PART = re.compile(
    r"^(partial_(rotary|rope)_factor|(rotary|rope)_(emb(edding)?_)?(pct|percent(age)?|fraction|share|part))$"
)
# Names of the number of rotated dimensions, which some configs give instead of a fraction.
DIMENSIONS = re.compile(r"^((rotary|rope)_(emb(ed(ding)?)?_)?n?dim(s|ensions?)?|n_rot|rope_dimension_count)$")
# Names of blocks in which checkpoints nest these fields.
NESTED = re.compile(r"attn|attention|rope|rotary|position", re.I)
BLOCKS = ("rope_scaling", "rope_parameters")
ORIGINAL = "original_max_position_embeddings"
# Names of the length in published configs and other programs; transformers reads the one that the class declares.
LENGTH = "max_position_embeddings"
LENGTHS = (
    *(LENGTH, "n_positions", "n_ctx", "seq_length", "seq_len", "max_seq_len", "max_seq_length", "max_sequence_length"),
    *("model_max_length", "max_context_length", "context_length"),
)


@contextlib.contextmanager
def building(what: str) -> Iterator[None]:
    """Turn the errors of transformers into sentences while it reads or builds ``what`` from a config.

    Nothing of ctxext's own belongs in the block, so that a defect of ours is not taken for a mistake in a config.

    Raises:
        CheckpointError: instead of the error that transformers ends in.
    """
    try:
        with running_code(what):
            yield
    except CtxextError:
        raise
    except UNFIT as error:
        lines = str(error).strip().splitlines()
        raise CheckpointError(
            f"transformers cannot build {what} from its config: {type(error).__name__}: {' '.join(lines)[:300]}. "
            f"Compare config.json with the published one of its model type."
        ) from error


@contextlib.contextmanager
def running_code(what: str) -> Iterator[None]:
    """Turn errors that no value of a config could mend into sentences while the code of ``what`` runs.

    Raises:
        CheckpointError: instead of the error that the code ends in.
    """
    try:
        yield
    except ImportError as error:  # of a package that only some models need; transformers says how to install it
        raise CheckpointError(f"transformers cannot build {what} here: {' '.join(str(error).split())}") from error
    except (NameError, StopIteration, SyntaxError, SystemExit) as error:
        raise CheckpointError(
            f"The code of {what} cannot be run: {type(error).__name__}: {' '.join(str(error).split())[:300]}. The "
            f"mistake is in that code (auto_map in its config.json names the files): mend it there, or ask its authors."
        ) from error


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_positive, value))


POSITIVE = ("factor", ORIGINAL, "attention_factor")
NUMBERS = ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim")
TABLES = ("short_factor", "long_factor")
STATED = (*POSITIVE, *NUMBERS, *TABLES, "truncate")
# Names in a rope dict, the condition for a value that is given, and its wording.
VALUES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("rope_theta", "partial_rotary_factor", *POSITIVE), _is_positive, "a finite number above 0"),
    (NUMBERS, is_number, "a finite number"),
    (TABLES, _is_table, "a list of numbers above 0"),
    (("truncate",), lambda value: isinstance(value, bool), "true or false"),  # any other word is true to transformers
)


def check_config(config: Any, place: str) -> None:
    """Refuse a config that carries an unknown form of extension, or a rope dict that no model could be built from.

    Raises:
        CheckpointError: for a value of the wrong kind; the message names the field and the value.
        IncompatibleError: for a rope dict without its base.
    """

    def require(fits: bool, field: str, value: Any, wanted: str, where: str = "") -> None:
        if not fits and value is not None:
            raise CheckpointError(f"The config of {place} has {field}={shown(value)}{where}; it should be {wanted}.")

    saved = saved_extension(config, place)
    for extension in () if saved is None else extensions_in(saved).values():
        saved_method(extension)
    named = config.architectures
    is_list = isinstance(named, list) and all(isinstance(name, str) for name in named)
    require(is_list, "architectures", named, "a list of class names")
    for text in extended_texts(config):
        for dtype in (config.dtype, getattr(text, "dtype", None)):
            require(isinstance(dtype, torch.dtype), "dtype", dtype, "one of torch's, by its name")
        length: Any = getattr(text, "max_position_embeddings", None)
        is_count = is_number(length) and length >= 1
        require(is_count, "max_position_embeddings", length, "a number of tokens")
        chunked = getattr(text, CHUNKED, None) or {}
        for name in ("chunk_size", "original_max_position_embeddings"):
            chunk = chunked.get(name) if isinstance(chunked, dict) else None
            require(is_number(chunk), name, chunk, "a number of tokens", f" in {CHUNKED}")
        rope = getattr(text, "rope_parameters", None)
        require(isinstance(rope, dict), "rope_parameters", rope, "a JSON object")
        for parameters in (parameters for _, parameters in rope_dicts(text) if "rope_type" in parameters):
            _refuse_unread(text, parameters)
            _refuse_type(parameters["rope_type"], place)
            if parameters.get("rope_theta") is None:  # transformers would fail on it with a TypeError
                raise IncompatibleError(
                    f"The config of this {config.model_type} has no rope_theta in rope_parameters={parameters}. Write "
                    f"it into config.json: the base that the model was trained with (10000.0 in the RoPE paper)."
                )
            for name, fits, wanted in ((name, fits, wanted) for names, fits, wanted in VALUES for name in names):
                value = parameters.get(name)
                if value != GUARD or "ctxext" not in parameters:
                    require(fits(value), name, value, wanted, " in rope_parameters")


def _refuse_unread(text: Any, parameters: JsonObject) -> None:
    """Raise where a class has no field for a rope dict that lacks its base: a base would not help."""
    kind = type(text)
    declared = declared_fields(text) if kind.__module__.startswith("transformers.") else ()
    if declared and "rope_parameters" not in declared and parameters.get("rope_theta") is None:
        raise IncompatibleError(
            f"The config of this {text.model_type} has rope_parameters={parameters}, which {kind.__name__} of "
            f"transformers does not declare: its class would not rotate by them. Load it with the code that it was "
            f"trained with, or take them out."
        )


def _refuse_type(kind: Any, place: str) -> None:
    known = {"default", *ROPE_INIT_FUNCTIONS}
    if not isinstance(kind, str) or kind not in known:
        hint = " ('su' is the old name of longrope, whose tables it needs.)" if kind == "su" else ""
        raise CheckpointError(
            f"The config of {place} has rope_type={kind!r}, which transformers does not know: "
            f"{', '.join(sorted(name for name in known if not name.startswith('ctxext')))}.{hint}"
        )


def refuse_two_stories(config: Any, raw: JsonObject, place: str) -> None:
    """Refuse an extended config whose old form says something else than its new one: transformers believes the old.

    Raises:
        VerificationError: the message shows both forms.
    """
    new_form = _without_old_scaling(raw)
    if new_form == raw:
        return
    for text, alone in zip(extended_texts(config), extended_texts(type(config).from_dict(new_form)), strict=True):
        old, new = text.rope_parameters, alone.rope_parameters
        if not same_rope(old, new):
            raise VerificationError(
                f"The config of {place} contradicts itself: rope_scaling and the fields beside it say {old}, and "
                f"rope_parameters={new}. transformers follows the first. Load the original checkpoint and extend that."
            )


def _without_old_scaling(raw: JsonObject) -> JsonObject:
    """Copy a config as its file holds it, without a ``rope_scaling`` next to ``rope_parameters`` in any part."""
    parts = {
        name: _without_old_scaling(part) if isinstance(part, dict) and name != "ctxext" else part
        for name, part in raw.items()
    }
    has_both = all(isinstance(raw.get(name), dict) for name in BLOCKS)
    return {name: copy.deepcopy(part) for name, part in parts.items() if name != "rope_scaling" or not has_both}


@dataclass(frozen=True)
class Foreign:
    """A field of a config that transformers ignores and other programs obey."""

    name: str
    value: Any
    programs: tuple[str, ...]

    def __str__(self) -> str:
        value = "{...}" if isinstance(self.value, dict) else repr(self.value)
        return (
            f"{self.name}={value} in its config changes positions in {' and '.join(self.programs)}, but transformers "
            f"ignores it. An extension by ctxext removes it."
        )


def foreign_fields(config: Any) -> list[Foreign]:
    """Return the fields of a config that change positions in other programs and not in transformers."""
    text = text_of(config)
    foreign = []
    if getattr(text, CHUNKED, None):
        foreign.append(Foreign(CHUNKED, getattr(text, CHUNKED), ("vllm", "sglang")))
    for _, rope in rope_dicts(text):
        for name, (neutral, programs) in FOREIGN_KEYS.items():
            is_read = name in OWN_KEYS and text.model_type.startswith(OWN_KEYS[name])
            if rope.get(name) not in (None, neutral) and not is_read:
                foreign.append(Foreign(name, rope[name], programs))
    return foreign


@dataclass(frozen=True)
class Lost:
    """A value of config.json about rotary positions that the built config lacks."""

    name: str
    stated: Any
    built: Any

    def __str__(self) -> str:
        return f"{self.name}={_short(self.stated)} (built: {_short(self.built)})"


def _short(value: Any) -> str:
    """Return a value for a message, a list by its length."""
    return f"<{len(value)} values>" if isinstance(value, list) else repr(value)


def lost_fields(published: JsonObject, config: Any) -> list[Lost]:
    """Return the values of a published config.json about rotation of text that the built config lacks."""
    text = text_of(config)
    ropes = [rope for _, rope in rope_dicts(text)]
    if not ropes or "ctxext" in published:  # extended checkpoints have other checks
        return []
    part = published_text(config, published)
    places = [(part, text)]
    if part is not published and "rope_parameters" not in declared_fields(config):  # else its fields are another part's
        places.append((published, config))
    losses = [loss for where, reader in places for loss in _lost_numbers(where, ropes, declared_fields(reader))]
    losses += [loss for where, _ in places for loss in _lost_scaling(where, ropes)]
    losses += [*_lost_dimensions(part, ropes, text), *_lost_lengths(published, part, config, text)]
    return list({str(lost): lost for lost in losses}.values())


def _lost_lengths(published: JsonObject, part: JsonObject, config: Any, text: Any) -> Iterator[Lost]:
    """Yield lengths in places, or under names, that the class does not read, so that it uses its default."""
    built = getattr(text, LENGTH, None)
    read = {LENGTH, text.attribute_map.get(LENGTH)} | (declared_fields(text) & set(LENGTHS))
    if not isinstance(built, int):
        return
    if part.keys() & read:
        # Older configs have the length next to the text part; transformers maps that for some classes only.
        if part is published and text is not config and LENGTH not in declared_fields(config):
            value = part.get(LENGTH)
            if isinstance(value, int) and value != built:
                yield Lost(LENGTH, value, built)
        return
    for where in (part, published):
        for name in LENGTHS:
            value = where.get(name)
            if where is not part and name in declared_fields(config):
                continue
            if isinstance(value, int) and value > 0 and value != built:
                yield Lost(name, value, built)


def _lost_numbers(part: JsonObject, ropes: list[JsonObject], declared: set[str]) -> Iterator[Lost]:
    """Yield bases and rotated parts of heads that no built rope dict has, except fields that the class reads."""
    for where in _blocks(part):
        for name, value in where.items():
            key = "rope_theta" if BASE.match(str(name)) else "partial_rotary_factor" if PART.match(str(name)) else None
            if key is None or not is_number(value) or (where is part and name in declared):
                continue
            built = [rope.get(key) for rope in ropes]
            if key == "partial_rotary_factor" and (value == 1 or not any(built)):
                continue
            if not any(is_number(number) and abs(number - value) <= 1e-6 * abs(value) for number in built):
                yield Lost(name, value, built[0])


def _blocks(part: JsonObject) -> list[JsonObject]:
    """Return the fields of a config and of its blocks about attention and positions, except for windowed layers."""
    nested = [value for name, value in part.items() if isinstance(value, dict) and NESTED.search(str(name))]
    deeper = [
        entry
        for block in nested
        for name, entry in block.items()
        if isinstance(entry, dict) and not is_windowed(str(name))
    ]
    return [part, *nested, *deeper]


def _lost_dimensions(part: JsonObject, ropes: list[JsonObject], text: Any) -> Iterator[Lost]:
    """Yield stated numbers of rotated dimensions if the built model rotates another number."""
    stated = {name: part[name] for name in part.keys() - declared_fields(text) if DIMENSIONS.match(str(name))}
    for name, value in stated.items():
        head = heads_of(text)[2]
        built = [head * (rope.get("partial_rotary_factor") or 1) for rope in ropes]
        if is_number(value) and value not in built:
            yield Lost(name, value, built[0])


def _lost_scaling(part: JsonObject, ropes: list[JsonObject]) -> Iterator[Lost]:
    """Yield values of the scaling blocks that no built rope dict has."""
    blocks = [part[name] for name in BLOCKS if isinstance(part.get(name), dict)]
    stated = [rope for block in blocks for _, rope in rope_dicts(block)]
    for rope in stated:
        kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) not in UNSCALED]
        for kind in kinds:
            if all(built.get("rope_type") != kind for built in ropes):
                yield Lost("rope_type", kind, ropes[0].get("rope_type"))
        for name in STATED if kinds else ():
            if rope.get(name) is not None and all(built.get(name) != rope[name] for built in ropes):
                yield Lost(name, rope[name], ropes[0].get(name))
    original = part.get(ORIGINAL)
    built_originals = [rope[ORIGINAL] for rope in ropes if rope.get(ORIGINAL)]
    if is_number(original) and built_originals and original not in built_originals:
        yield Lost(ORIGINAL, original, built_originals[0])


def unstated_base(published: JsonObject, config: Any) -> tuple[str, Any] | None:
    """Return the block of a published config that rotates by no stated base, and the base that its class takes."""
    text, part = text_of(config), published_text(config, published)
    defaults = getattr(text, "default_theta", None)
    defaults = list(defaults.values()) if isinstance(defaults, dict) else [defaults]
    block = next((name for name in BLOCKS if isinstance(part.get(name), dict) and part[name]), None)
    if block is None or "ctxext" in published or any(BASE.match(str(name)) for name in part):
        return None
    lacking = [kind for kind, rope in rope_dicts(part[block]) if rope.get("rope_theta") is None]
    taken = [rope.get("rope_theta") for kind, rope in rope_dicts(text) if {kind, None} & set(lacking)]
    return next(((block, base) for base in taken if base in defaults), None)


def refuse_lost_fields(config: Any, place: str, published: JsonObject, *, live: bool = False) -> None:
    """Raise if transformers builds other positions from a config.json than the file states, or ignores a factor.

    The ``config`` of a ``live`` model is its current one: a change of it in memory is not an error of the file.

    Raises:
        CheckpointError: with each lost field, and the value that was built instead.
    """
    _refuse_idle_scaling(config, place)
    unstated = unstated_base(published, config) if published else None
    if unstated is not None and unstated[0] == "rope_parameters":  # readers of rope_scaling have other defaults
        raise CheckpointError(
            f"The config.json of {place} has rope_parameters without rope_theta, for which transformers takes "
            f"{unstated[1]}. Write the base that the weights were trained with into rope_parameters."
        )
    lost = lost_fields(published, config) if published else []
    if lost and live:
        try:
            again = type(config).from_dict(copy.deepcopy(published))
        except REFUSALS:
            return
        lost = [field for field in lost if field in lost_fields(published, again)]
    if not lost:
        return
    way = (
        "A rope_scaling replaces rope_parameters as a whole, and fields that the class does not read are dropped. "
        "Write all values, rope_theta included, into rope_parameters of the text part."
    )
    if all(field.name in LENGTHS for field in lost):
        way = (
            f"Its class reads another field and uses its own default. Write the trained length of the weights as "
            f"{LENGTH} into the text part of config.json."
        )
    elif all(DIMENSIONS.match(field.name) for field in lost):
        way = (
            "Its class does not read this field. Write partial_rotary_factor, the fraction of a head that rotates, "
            "into rope_parameters of the text part."
        )
    stated = ", ".join(map(str, lost))
    raise CheckpointError(f"The config.json of {place} says {stated}, which transformers ignores. {way}")


def _refuse_idle_scaling(config: Any, place: str) -> None:
    """Raise if a rope dict has factors and a type that ignores them, so that the model is built plain.

    Extended checkpoints pass: they have other checks.
    """
    text = text_of(config)
    for _, rope in rope_dicts(text) if getattr(config, "ctxext", None) is None else ():
        factors = [(name, rope.get(name)) for name in ("factor", *TABLES)]
        idle = ", ".join(f"{name}={_short(value)}" for name, value in factors if value not in (None, 1))
        if not idle or rope.get("rope_type", "default") != "default":
            continue
        if (kind := rope.get("type")) not in UNSCALED:
            raise CheckpointError(
                f"The config of {place} says type={kind!r} and {idle}. {type(text).__name__} does not read "
                f"the key type and builds rope_type='default', which scales nothing. Rename type to "
                f"rope_type={kind!r} in rope_parameters."
            )
        raise CheckpointError(
            f"The config of {place} has {idle} in rope_parameters, but rope_type='default', which scales nothing. Set "
            f"the rope_type that they belong to (yarn, linear), or remove them."
        )


def refuse_lost_positions(subject: Subject, kind: str) -> None:
    """Raise if a rotary model has other positions than its config, or the config.json that it came from, states."""
    if kind != "rotary":
        return
    place, published = f"this {type(subject.model).__name__}", published_json(subject.config)
    refuse_lost_fields(subject.config, place, published, live=True)
    if published:
        refuse_lost_share(subject, place)


def refuse_lost_share(subject: Subject, place: str) -> None:
    """Raise if a model rotates another number of dimensions than its config states, as a share or a number of them.

    Raises:
        CheckpointError: with the field and both numbers.
    """
    text = subject.text
    widths = {
        2 * buffer.shape[-1]
        for side in [subject, *subject.sides.values()]
        for _, rotary in side.rotaries
        for name, buffer in rotary.named_buffers()
        if name.endswith("inv_freq")
    }
    # A proportional type turns a share of all pairs, and latent attention has separate rotated dimensions.
    if not widths or subject.saved or hasattr(text, "kv_lora_rank") or "proportional" in str(text.rope_parameters):
        return
    fields = [field for block in _blocks(vars(text)) for field in block.items() if is_number(field[1])]
    for name, value in fields:
        if name in declared_fields(text) or not (PART.match(name) or DIMENSIONS.match(name)):
            continue
        head = heads_of(text)[2]
        dimensions = value * head if PART.match(name) else value
        if int(dimensions) not in widths:
            raise CheckpointError(
                f"The config of {place} says {name}={value}, {int(dimensions)} of the {head} dimensions of each head, "
                f"but {type(subject.model).__name__} of transformers ignores it and rotates {max(widths)}. Load the "
                f"weights with the code that they were trained with, or take the field out if it is wrong."
            )


# Fields by which configs ask for a kind of positions.
ASKED = {
    "alibi": re.compile(r"alibi", re.I),
    "relative": re.compile(r"^(rel_pos|relative_(attention|position))", re.I),
    "rotary": re.compile(
        r"^((use_|with_)?(rotary|rope)$|use_(rotary|rope)|rotary_emb_(fraction|base)|rope_(theta|scaling|parameters)$)",
        re.I,
    ),
}
# Fields that turn a kind on or off; if one is false, other fields of that kind are leftovers and count for nothing.
SWITCHES = {
    "alibi": re.compile(r"^((use|with)_)?alibi$", re.I),
    "rotary": re.compile(r"^((use|with)_)?(rope|rotary)((_pos(ition(al)?)?)?_emb(ed(ding)?s?)?)?$", re.I),
    "table": re.compile(r"^(use|with|add)_(abs(olute)?_)?pos(ition(al)?)?_(emb(ed(ding)?s?)?|enc(oding)?s?)$", re.I),
}
# Fields that name the kind, such as position_embedding_type, and the words that they use for it.
NAMES_KIND = re.compile(
    r"^(pos(ition(al)?)?_(emb(ed(ding)?s?)?|enc(oding)?s?)(_type)?|pos(ition(al)?)?_type|pe_type)$", re.I
)
KINDS = {"alibi": "alibi", "rel": "relative", "rot": "rotary", "rope": "rotary", "sin": "sinusoids"}
NO_KIND = ("none", "nope", "no", "false")
# Fields that scale rotation under names outside transformers' rope dicts.
SCALES = re.compile(
    r"^(rope|rotary)_(emb_)?(ratio|scale|((freq|linear|ntk)_)?(scaling_|scale_)?factor)$|^compress_pos_emb$", re.I
)


def refuse_other_positions(subject: Subject, kind: str) -> None:
    """Raise if a config asks for a kind of positions that the built model does not have.

    Checkpoints that bring code may use a model type of transformers. The class of that type takes their weights and
    ignores fields that it does not know. A model that was built from the code it brings passes. ``kind`` is "rotary",
    "alibi", "relative", "table", "sinusoids", or anything else.

    Raises:
        IncompatibleError: with the field and the way out.
    """
    home = type(subject.model).__module__
    if home.startswith("transformers_modules."):
        return
    for config in {id(config): config for config in (subject.config, subject.text)}.values():
        blocks = {"": vars(config)}
        for name, value in vars(config).items():
            block = vars(value) if isinstance(value, PreTrainedConfig) else value
            if isinstance(block, dict) and NESTED.search(name) and name not in BLOCKS:
                blocks[f"{name}."] = block
        for place, name in ((place, name) for place, block in blocks.items() for name in _asking(block, kind)):
            reads = re.compile(rf"(\.|['\"]){re.escape(name)}\b")  # as an attribute, or as a string
            readers = [type(subject.model), *([type(config)] if place == "" else [])]
            if any(reads.search(source_of_home(reader)) for reader in readers):
                continue
            remedy = "Load it with the code that it was trained with."
            if getattr(config, "auto_map", None):
                remedy = "The checkpoint brings its code (auto_map): read it, then load with trust_remote_code=True."
            of_transformers = " of transformers" if home.startswith("transformers.") else ""
            raise IncompatibleError(
                f"The config of this {config.model_type} has {place}{name}={blocks[place][name]!r}, but "
                f"{type(subject.model).__name__}{of_transformers} does not read it. The built model has other "
                f"positions than the weights were trained with. {remedy}"
            )


def _asking(block: JsonObject, kind: str) -> Iterator[str]:
    """Yield the names of fields that ask for positions of another kind than ``kind``."""
    switches = [
        (each, value)
        for each, switch in SWITCHES.items()
        for name, value in block.items()
        if isinstance(value, bool) and switch.match(name)
    ]
    off = {each for each, is_on in switches if not is_on and (each, True) not in switches}
    for name, value in block.items():
        asked: str | None = None
        if NAMES_KIND.match(name) and isinstance(value, str):
            label = value.lower()
            asked = "none" if label in NO_KIND else next((each for word, each in KINDS.items() if word in label), None)
        elif value is False and kind in SWITCHES and SWITCHES[kind].match(name):
            asked = "none"
        elif value and kind == "rotary" and SCALES.match(name) and is_number(value) and value != 1:
            asked = "scaled"
        elif value:
            asked = next((each for each, pattern in ASKED.items() if pattern.search(name)), None)
        if asked is not None and asked != kind and asked not in off:
            yield name


CHECKS.extend((refuse_lost_positions, refuse_other_positions))
