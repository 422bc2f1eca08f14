"""Compare a checkpoint's config.json, as published, with the config that transformers built from it."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig

from ctxext.errors import CheckpointError, IncompatibleError
from ctxext.surgery.code import source_of_home
from ctxext.surgery.old_form import REFUSALS, rope_dicts
from ctxext.surgery.subject import Subject, path_to, text_of

CHUNKED = "dual_chunk_attention_config"
"""The field by which Qwen's 1M checkpoints ask vLLM and SGLang for dual chunk attention; transformers ignores it."""

# Keys of a rope dict that transformers' rope types ignore: each with its neutral value and the programs that obey it
# (vLLM 0.33 and SGLang 0.5.23: get_rope of their rotary_embedding; llama.cpp: its converter).
FOREIGN_KEYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "attn_factor": (1, ("vllm", "sglang", "llama.cpp")),
    "extrapolation_factor": (1, ("vllm", "sglang")),
    "apply_yarn_scaling": (True, ("vllm",)),
    "short_mscale": (None, ("vllm", "sglang")),
    "long_mscale": (None, ("vllm", "sglang")),
    "max_trained_positions": (None, ("vllm",)),
    "alpha": (None, ("vllm", "sglang")),
}
# Model types of transformers whose own code reads such a key.
OWN_KEYS = {"alpha": "hunyuan", "short_mscale": "phimoe", "long_mscale": "phimoe"}

# Names of the base of rotation in configs; names of towers for images and sound are left out.
BASE = re.compile(r"(?=.*(rope|rotary))(?=.*(theta|base))(?!.*(vision|visual|image|audio|speech))", re.I)
PART = re.compile(r"^(partial_rotary_factor|rotary_pct|rotary_percent|rope_pct)$")
# Names of the number of rotated dimensions, which some configs give instead of a fraction.
DIMENSIONS = re.compile(r"^(rotary|rope)_(emb_)?n?dims?$")
# Names of blocks in which checkpoints nest these fields.
NESTED = re.compile(r"attn|attention|rope|rotary|position", re.I)
BLOCKS = ("rope_scaling", "rope_parameters")
ORIGINAL = "original_max_position_embeddings"
SAID = (
    *("factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
    *("mscale", "mscale_all_dim", "short_factor", "long_factor", "truncate"),
)
UNSCALED = (None, "default", "mrope", "proportional", "axial")
# Keys that scale positions.
FACTORS = ("factor", "short_factor", "long_factor")
# Names of the length in published configs and other programs; transformers reads the one that the class declares.
LENGTH = "max_position_embeddings"
LENGTHS = (
    *(LENGTH, "n_positions", "n_ctx", "seq_length", "seq_len", "max_seq_len", "max_seq_length", "max_sequence_length"),
    *("model_max_length", "max_context_length", "context_length"),
)


def published_json(config: Any) -> dict[str, Any]:
    """Read the config.json that a config was built from; return an empty dict if it is not on this machine.

    The file is searched in the directory or in the hub's cache from which transformers read the config, offline.
    """
    name = getattr(config, "_name_or_path", None)
    if not name:
        return {}
    path = Path(name) / "config.json"
    if not path.is_file():
        try:
            cached = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
        except HFValidationError:  # the name is a path, not a repository of the hub
            return {}
        if not isinstance(cached, str):
            return {}
        path = Path(cached)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # removed or damaged since the model was loaded from it
        return {}
    is_same = isinstance(content, dict) and content.get("model_type") == config.model_type
    return content if is_same else {}


def published_text(config: Any, published: dict[str, Any]) -> dict[str, Any]:
    """Return the text part of a published config.json; the whole of it if it has no such part."""
    for name in path_to(config, text_of(config)):
        inner = published.get(name)
        if not isinstance(inner, dict):
            return published  # a file older than the parts of its class; transformers maps its fields
        published = inner
    return published


@dataclass(frozen=True)
class Foreign:
    """A field of a config that transformers ignores and other programs obey.

    Args:
        name: the field, or the key of its rope dict.
        value: its value.
        programs: runtimes that obey it, by the names that ``ctxext.export`` takes.
    """

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


def without_foreign(text: Any) -> dict[str, Any]:
    """Return the changes that remove such fields from a text config, those of its rope dict left out."""
    return {CHUNKED: None} if getattr(text, CHUNKED, None) else {}


@dataclass(frozen=True)
class Lost:
    """A value of config.json about rotary positions that the built config lacks."""

    name: str
    stated: Any
    built: Any

    def __str__(self) -> str:
        return f"{self.name}={_short(self.stated)} (built: {_short(self.built)})"


def _short(value: Any) -> str:
    return f"<{len(value)} values>" if isinstance(value, list) else repr(value)


def lost_fields(published: dict[str, Any], config: Any) -> list[Lost]:
    """Return the values of a published config.json about rotation of text that the built config lacks.

    Args:
        published: the JSON object.
        config: the config that transformers built from it.
    """
    text = text_of(config)
    ropes = [rope for _, rope in rope_dicts(text)]
    if not ropes or "ctxext" in published:  # extended checkpoints have their own checks
        return []
    part = published_text(config, published)
    losses = [*_lost_numbers(part, ropes, _declared(text)), *_lost_scaling(part, ropes)]
    if part is not published and "rope_parameters" not in _declared(
        config
    ):  # else the fields outside are another part's
        losses += [*_lost_numbers(published, ropes, _declared(config)), *_lost_scaling(published, ropes)]
    losses += [*_lost_dimensions(part, ropes, text), *_lost_lengths(published, part, config, text)]
    return list({str(lost): lost for lost in losses}.values())


def _lost_lengths(published: dict[str, Any], part: dict[str, Any], config: Any, text: Any) -> Iterator[Lost]:
    """Yield lengths in places, or under names, that the class does not read, so that it uses its default."""
    built = getattr(text, LENGTH, None)
    read = {LENGTH, text.attribute_map.get(LENGTH)} | (_declared(text) & set(LENGTHS))
    if not isinstance(built, int):
        return
    if part.keys() & read:
        # Older configs have the length beside the text part; transformers maps that for some classes only.
        if part is published and text is not config and LENGTH not in _declared(config):
            value = part.get(LENGTH)
            if isinstance(value, int) and value != built:
                yield Lost(LENGTH, value, built)
        return
    for where in (part, published):
        for name in LENGTHS:
            value = where.get(name)
            if where is not part and name in _declared(config):
                continue
            if isinstance(value, int) and value > 0 and value != built:
                yield Lost(name, value, built)


def _refuse_idle_scaling(config: Any, place: str) -> None:
    """Raise if a rope dict has factors and a type that ignores them, so that the model is built plain."""
    for _, rope in rope_dicts(text_of(config)):
        idle = [f"{name}={_short(rope[name])}" for name in FACTORS if rope.get(name) not in (None, 1)]
        if idle and rope.get("rope_type", "default") == "default":
            if (kind := rope.get("type")) not in UNSCALED:
                raise CheckpointError(
                    f"The config of {place} says type={kind!r} and {', '.join(idle)}. {type(text_of(config)).__name__} "
                    f"does not read the key type and builds rope_type='default', which scales nothing. Rename type to "
                    f"rope_type={kind!r} in rope_parameters."
                )
            raise CheckpointError(
                f"The config of {place} has {', '.join(idle)} in rope_parameters, but rope_type='default', which "
                f"scales nothing. Set the rope_type that they belong to (yarn, linear), or remove them."
            )


def _declared(config: Any) -> set[str]:
    """Return the fields that the class of a config declares, and so reads."""
    return {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()


def _lost_numbers(part: dict[str, Any], ropes: list[dict[str, Any]], declared: set[str]) -> Iterator[Lost]:
    """Yield bases and rotated parts of heads that no built rope dict has, except fields that the class reads."""
    nested = [value for name, value in part.items() if isinstance(value, dict) and NESTED.search(str(name))]
    deeper = [entry for block in nested for entry in block.values() if isinstance(entry, dict)]
    for where in (part, *nested, *deeper):
        for name, value in where.items():
            key = "rope_theta" if BASE.match(str(name)) else "partial_rotary_factor" if PART.match(str(name)) else None
            if key is None or not _is_number(value) or (where is part and name in declared):
                continue
            built = [rope.get(key) for rope in ropes]
            if key == "partial_rotary_factor" and (value == 1 or not any(built)):
                continue
            if not any(_is_number(number) and abs(number - value) <= 1e-6 * abs(value) for number in built):
                yield Lost(name, value, built[0])


def _lost_dimensions(part: dict[str, Any], ropes: list[dict[str, Any]], text: Any) -> Iterator[Lost]:
    """Yield stated numbers of rotated dimensions if the built model rotates another number."""
    stated = {name: part[name] for name in part.keys() - _declared(text) if DIMENSIONS.match(str(name))}
    for name, value in stated.items():
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        built = [head * (rope.get("partial_rotary_factor") or 1) for rope in ropes]
        if _is_number(value) and value not in built:
            yield Lost(name, value, built[0])


def _lost_scaling(part: dict[str, Any], ropes: list[dict[str, Any]]) -> Iterator[Lost]:
    """Yield values of the scaling blocks that no built rope dict has."""
    blocks = [part[name] for name in BLOCKS if isinstance(part.get(name), dict)]
    stated = [rope for block in blocks for _, rope in rope_dicts(block)]
    for rope in stated:
        kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) not in UNSCALED]
        for kind in kinds:
            if all(built.get("rope_type") != kind for built in ropes):
                yield Lost("rope_type", kind, ropes[0].get("rope_type"))
        for name in SAID if kinds else ():
            if rope.get(name) is not None and all(built.get(name) != rope[name] for built in ropes):
                yield Lost(name, rope[name], ropes[0].get(name))
    original = part.get(ORIGINAL)
    built_originals = [rope[ORIGINAL] for rope in ropes if rope.get(ORIGINAL)]
    if _is_number(original) and built_originals and original not in built_originals:
        yield Lost(ORIGINAL, original, built_originals[0])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def refuse_lost_fields(config: Any, place: str, published: dict[str, Any] | None = None) -> None:
    """Raise if transformers builds other positions from a config.json than the file states.

    Args:
        config: the built config; of a live model, its current one.
        place: the checkpoint's name in the message.
        published: the JSON object; None searches the file that the config was read from.

    Raises:
        CheckpointError: with each lost field, and the value that was built instead.
    """
    read_now = published is None
    published = published_json(config) if published is None else published
    if getattr(config, "ctxext", None) is None:  # extended checkpoints have their own checks
        _refuse_idle_scaling(config, place)
    lost = lost_fields(published, config) if published else []
    if lost and read_now:  # a change of the config in memory is not an error of the file
        try:
            again = type(config).from_dict(copy.deepcopy(published))
        except REFUSALS:
            return
        lost = [field for field in lost if field in lost_fields(published, again)]
    if lost:
        says = f"The config.json of {place} says {', '.join(map(str, lost))}, which transformers ignores. "
        if all(field.name in LENGTHS for field in lost):
            raise CheckpointError(
                f"{says}Its class reads another field and uses its own default. Write the trained length of the "
                f"weights as {LENGTH} into the text part of config.json."
            )
        if all(DIMENSIONS.match(field.name) for field in lost):
            raise CheckpointError(
                f"{says}Its class does not read this field. Write partial_rotary_factor, the fraction of a head that "
                f"rotates, into rope_parameters of the text part."
            )
        raise CheckpointError(
            f"{says}A rope_scaling replaces rope_parameters as a whole, and fields that the class does not read are "
            f"dropped. Write all values, rope_theta included, into rope_parameters of the text part."
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

    Checkpoints with code of their own may use a model type of transformers. The class of that type takes their weights
    and ignores fields that it does not know. A model that was built from its own code passes.

    Args:
        subject: the built model.
        kind: its kind of positions: "rotary", "alibi", "relative", "table", "sinusoids", or anything else.

    Raises:
        IncompatibleError: with the field and the way out.
    """
    home = type(subject.model).__module__
    if home.startswith("transformers_modules."):
        return
    code = source_of_home(type(subject.model))
    for config in {id(config): config for config in (subject.config, subject.text)}.values():
        for place, name, value in _asking(config, kind):
            reads = re.compile(rf"(\.|['\"]){re.escape(name)}\b")  # as an attribute, or as a string
            if reads.search(code) or (place == "" and reads.search(source_of_home(type(config)))):
                continue
            remedy = "Load it with the code that it was trained with."
            if getattr(config, "auto_map", None):
                remedy = "The checkpoint brings its code (auto_map): read it, then load with trust_remote_code=True."
            of_transformers = " of transformers" if home.startswith("transformers.") else ""
            raise IncompatibleError(
                f"The config of this {config.model_type} has {place}{name}={value!r}, but "
                f"{type(subject.model).__name__}{of_transformers} does not read it. The built model has other "
                f"positions than the weights were trained with. {remedy}"
            )


def _asking(config: Any, kind: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the block, name and value of each field that asks for other positions than those of ``kind``."""
    for place, where in _mappings(config):
        switched = {
            (each, where[name])
            for each, switch in SWITCHES.items()
            for name in where
            if switch.match(name)
            if isinstance(where[name], bool)
        }
        off = {each for each, is_on in switched if not is_on and (each, True) not in switched}
        for name, value in where.items():
            field_kind = _asked_kind(name, value, kind)
            if field_kind is not None and field_kind != kind and field_kind not in off:
                yield place, name, value


def _mappings(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the fields of a config, and those of its blocks about attention or positions."""
    yield "", vars(config)
    for name, value in vars(config).items():
        block = vars(value) if isinstance(value, PreTrainedConfig) else value
        if isinstance(block, dict) and NESTED.search(name) and name not in BLOCKS:
            yield f"{name}.", block


def _asked_kind(name: str, value: Any, kind: str) -> str | None:
    """Return the kind of positions that a field asks for; None if it asks for no kind, or for a table."""
    if NAMES_KIND.match(name) and isinstance(value, str):
        label = value.lower()
        return "none" if label in NO_KIND else next((each for word, each in KINDS.items() if word in label), None)
    if value is False and kind in SWITCHES and SWITCHES[kind].match(name):
        return "none"
    if not value:
        return None
    if kind == "rotary" and SCALES.match(name) and _is_number(value) and value != 1:
        return "scaled"
    return next((each for each, pattern in ASKED.items() if pattern.search(name)), None)
