"""A checkpoint's config.json as it was published, beside the config that transformers built from it."""

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
from transformers import PreTrainedConfig, PreTrainedModel

from ctxext.errors import CheckpointError, IncompatibleError
from ctxext.surgery.code import source_of_home
from ctxext.surgery.old_form import REFUSALS, rope_dicts
from ctxext.surgery.texts import text_of

CHUNKED = "dual_chunk_attention_config"
"""The field by which Qwen's 1M checkpoints ask vLLM and SGLang for dual chunk attention; transformers ignores it."""

# Keys of a rope dict that transformers' own rope types do not read, with the value at which they change nothing and the
# programs that obey them (vLLM 0.33 and SGLang 0.5.23: get_rope of their rotary_embedding; llama.cpp: its converter).
FOREIGN_KEYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "attn_factor": (1, ("vllm", "sglang", "llama.cpp")),
    "extrapolation_factor": (1, ("vllm", "sglang")),
    "apply_yarn_scaling": (True, ("vllm",)),
    "short_mscale": (None, ("vllm", "sglang")),
    "long_mscale": (None, ("vllm", "sglang")),
    "max_trained_positions": (None, ("vllm",)),
    "alpha": (None, ("vllm", "sglang")),
}
# Model types whose own code in transformers reads such a key.
OWN_KEYS = {"alpha": "hunyuan", "short_mscale": "phimoe", "long_mscale": "phimoe"}

# What a config calls the base of rotation, wherever it says so; those of towers for pictures and sound are theirs.
BASE = re.compile(r"(?=.*(rope|rotary))(?=.*(theta|base))(?!.*(vision|visual|image|audio|speech))", re.I)
PART = re.compile(r"^(partial_rotary_factor|rotary_pct|rotary_percent|rope_pct)$")
# How many dimensions of a head rotate, where a config says that instead of a part.
DIMENSIONS = re.compile(r"^(rotary|rope)_(emb_)?n?dims?$")
# Where checkpoints nest it.
NESTED = re.compile(r"attn|attention|rope|rotary|position", re.I)
BLOCKS = ("rope_scaling", "rope_parameters")
ORIGINAL = "original_max_position_embeddings"
SAID = (
    *("factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
    *("mscale", "mscale_all_dim", "short_factor", "long_factor", "truncate"),
)
UNSCALED = (None, "default", "mrope", "proportional", "axial")
# By what a rope type scales positions.
FACTORS = ("factor", "short_factor", "long_factor")
# What published configs, trainers and other programs call the length; transformers reads what the class declares.
LENGTH = "max_position_embeddings"
LENGTHS = (
    *(LENGTH, "n_positions", "n_ctx", "seq_length", "seq_len", "max_seq_len", "max_seq_length", "max_sequence_length"),
    *("model_max_length", "max_context_length", "context_length"),
)


def published_json(config: Any) -> dict[str, Any]:
    """Read the config.json that a config was built from; empty where it is not on this machine.

    It is looked for where transformers says that it read it: in a directory, or in the cache of the hub. The network is
    not asked.
    """
    name = getattr(config, "_name_or_path", None)
    if not name:
        return {}
    path = Path(name) / "config.json"
    if not path.is_file():
        try:
            cached = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
        except HFValidationError:  # a path, and not a name on the hub
            return {}
        if not isinstance(cached, str):
            return {}
        path = Path(cached)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # removed or damaged since the model was loaded from it
        return {}
    is_same = isinstance(found, dict) and found.get("model_type") == config.model_type
    return found if is_same else {}


def published_text(config: Any, published: dict[str, Any]) -> dict[str, Any]:
    """The part of a published config.json that says how text is read: all of it where that is not a part of its own."""
    for name in _path_to(config, text_of(config)):
        inner = published.get(name)
        if not isinstance(inner, dict):
            return published  # written before the class had parts, and mapped into them by transformers
        published = inner
    return published


def _path_to(config: Any, part: Any) -> list[str]:
    """The attributes that lead from a config to one of its parts; none where the part is the config."""
    return [] if part is config else next(_paths(config, part), [])


def _paths(config: Any, part: Any) -> Iterator[list[str]]:
    for name, value in vars(config).items():
        if value is part:
            yield [name]
        elif isinstance(value, PreTrainedConfig):
            yield from ([name, *rest] for rest in _paths(value, part))


@dataclass(frozen=True)
class Foreign:
    """A field of a config that transformers passes over and other programs obey.

    Args:
        name: the field, or the key of its rope dict.
        value: what it says.
        programs: which runtimes obey it, by the names that ``ctxext.export`` takes.
    """

    name: str
    value: Any
    programs: tuple[str, ...]

    def __str__(self) -> str:
        value = "{...}" if isinstance(self.value, dict) else repr(self.value)
        return (
            f"{self.name}={value} in its config changes positions in {' and '.join(self.programs)}, and transformers "
            f"passes it over. An extension by ctxext takes it out."
        )


def foreign_fields(config: Any) -> list[Foreign]:
    """Fields of a config that say something about positions to other programs, and nothing to transformers."""
    text = text_of(config)
    found = []
    if getattr(text, CHUNKED, None):
        found.append(Foreign(CHUNKED, getattr(text, CHUNKED), ("vllm", "sglang")))
    for _, rope in rope_dicts(text):
        for name, (neutral, programs) in FOREIGN_KEYS.items():
            is_own = name in OWN_KEYS and text.model_type.startswith(OWN_KEYS[name])
            if rope.get(name) not in (None, neutral) and not is_own:
                found.append(Foreign(name, rope[name], programs))
    return found


def without_foreign(text: Any) -> dict[str, Any]:
    """What takes such fields out of a text config, beside its rope dict."""
    return {CHUNKED: None} if getattr(text, CHUNKED, None) else {}


@dataclass(frozen=True)
class Lost:
    """What config.json says of rotary positions and the built config does not hold."""

    name: str
    stated: Any
    built: Any

    def __str__(self) -> str:
        return f"{self.name}={_short(self.stated)} (built: {_short(self.built)})"


def _short(value: Any) -> str:
    return f"<{len(value)} values>" if isinstance(value, list) else repr(value)


def lost_fields(published: dict[str, Any], config: Any) -> list[Lost]:
    """What a published config.json says of the rotation of text, and the config that was built from it does not.

    Args:
        published: the JSON object.
        config: what transformers made of it.
    """
    text = text_of(config)
    ropes = [rope for _, rope in rope_dicts(text)]
    if not ropes or "ctxext" in published:  # which has checks of its own
        return []
    part = published_text(config, published)
    found = [*_lost_numbers(part, ropes, _declared(text)), *_lost_scaling(part, ropes)]
    if part is not published and "rope_parameters" not in _declared(config):  # or they are those of another part
        found += [*_lost_numbers(published, ropes, _declared(config)), *_lost_scaling(published, ropes)]
    found += [*_lost_dimensions(part, ropes, text), *_lost_lengths(published, part, config, text)]
    return list({str(lost): lost for lost in found}.values())


def _lost_lengths(published: dict[str, Any], part: dict[str, Any], config: Any, text: Any) -> Iterator[Lost]:
    """Lengths in places, or under names, that the class does not read, where it fills in a default of its own."""
    built = getattr(text, LENGTH, None)
    read = {LENGTH, text.attribute_map.get(LENGTH)} | (_declared(text) & set(LENGTHS))
    if not isinstance(built, int):
        return
    if part.keys() & read:
        # Beside the part that reads text, where older configs have it: transformers maps those of some classes only.
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
    """Raise where a rope dict has factors, and a type that scales nothing: what they were meant for is built plain."""
    for _, rope in rope_dicts(text_of(config)):
        idle = [f"{name}={_short(rope[name])}" for name in FACTORS if rope.get(name) not in (None, 1)]
        if idle and rope.get("rope_type", "default") == "default":
            if (said := rope.get("type")) not in UNSCALED:
                raise CheckpointError(
                    f"The config of {place} says type={said!r} and {', '.join(idle)}. {type(text_of(config)).__name__} "
                    f"reads another name and builds rope_type='default', which scales nothing. Write "
                    f"rope_type={said!r} in the place of type, in rope_parameters."
                )
            raise CheckpointError(
                f"The config of {place} has {', '.join(idle)} in rope_parameters, and a rope_type of 'default', which "
                f"scales nothing. Write the rope_type that they are for (yarn, linear), or take them out."
            )


def _declared(config: Any) -> set[str]:
    """The fields that the class of a config declares, and so reads."""
    return {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()


def _lost_numbers(part: dict[str, Any], ropes: list[dict[str, Any]], declared: set[str]) -> Iterator[Lost]:
    """Bases, and parts of heads that rotate, which no built rope dict has; what the class declares, it reads itself."""
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
            if not any(_is_number(one) and abs(one - value) <= 1e-6 * abs(value) for one in built):
                yield Lost(name, value, built[0])


def _lost_dimensions(part: dict[str, Any], ropes: list[dict[str, Any]], text: Any) -> Iterator[Lost]:
    """Numbers of dimensions that rotate, where the class rotates another part of a head."""
    stated = {name: part[name] for name in part.keys() - _declared(text) if DIMENSIONS.match(str(name))}
    for name, value in stated.items():
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        built = [head * (rope.get("partial_rotary_factor") or 1) for rope in ropes]
        if _is_number(value) and value not in built:
            yield Lost(name, value, built[0])


def _lost_scaling(part: dict[str, Any], ropes: list[dict[str, Any]]) -> Iterator[Lost]:
    """What its blocks say about scaling and no built rope dict has."""
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
    """Raise where transformers builds other positions from a config.json than those that it names.

    Args:
        config: as it was built; of a live model, as it is now.
        place: where it was read, to show.
        published: the JSON object; None looks for it where the config was read.

    Raises:
        CheckpointError: with each field that got lost, and what was built in its place.
    """
    read_now = published is None
    published = published_json(config) if published is None else published
    if getattr(config, "ctxext", None) is None:  # which has checks of its own
        _refuse_idle_scaling(config, place)
    lost = lost_fields(published, config) if published else []
    if lost and read_now:  # what somebody changed in memory since is no mistake of the file
        try:
            again = type(config).from_dict(copy.deepcopy(published))
        except REFUSALS:
            return
        lost = [one for one in lost if one in lost_fields(published, again)]
    if lost:
        says = f"The config.json of {place} says {', '.join(map(str, lost))}, which transformers loses when it builds "
        if all(one.name in LENGTHS for one in lost):
            raise CheckpointError(
                f"{says}the model: its class reads another field and fills in its own default. Write the length that "
                f"the weights were trained for as {LENGTH} into the part of config.json that reads text."
            )
        if all(DIMENSIONS.match(one.name) for one in lost):
            raise CheckpointError(
                f"{says}the model: its class does not read this field. Write partial_rotary_factor, the part of a head "
                f"that rotates, into rope_parameters of the part that reads text."
            )
        raise CheckpointError(
            f"{says}the model. A rope_scaling beside rope_parameters takes its place whole, and fields that its class "
            f"does not read are dropped. Write all of it into rope_parameters of the part that reads text, rope_theta "
            f"included."
        )


# Fields by which configs ask for positions of a kind, and the kind.
ASKED = {
    "alibi": re.compile(r"alibi", re.I),
    "relative": re.compile(r"^(rel_pos|relative_(attention|position))", re.I),
    "rotary": re.compile(
        r"^((use_|with_)?(rotary|rope)$|use_(rotary|rope)|rotary_emb_(fraction|base)|rope_(theta|scaling|parameters)$)",
        re.I,
    ),
}
# Fields that turn a kind on or off; where one says no, its other fields are left over and ask for nothing.
SWITCHES = {
    "alibi": re.compile(r"^((use|with)_)?alibi$", re.I),
    "rotary": re.compile(r"^((use|with)_)?(rope|rotary)((_pos(ition(al)?)?)?_emb(ed(ding)?s?)?)?$", re.I),
    "table": re.compile(r"^(use|with|add)_(abs(olute)?_)?pos(ition(al)?)?_(emb(ed(ding)?s?)?|enc(oding)?s?)$", re.I),
}
# Fields that name the kind, as position_embedding_type does, and what they call each.
NAMES_KIND = re.compile(
    r"^(pos(ition(al)?)?_(emb(ed(ding)?s?)?|enc(oding)?s?)(_type)?|pos(ition(al)?)?_type|pe_type)$", re.I
)
KINDS = {"alibi": "alibi", "rel": "relative", "rot": "rotary", "rope": "rotary", "sin": "sinusoids"}
NO_KIND = ("none", "nope", "no", "false")
# Fields that scale rotation, under names that transformers' rope dicts do not have.
SCALES = re.compile(
    r"^(rope|rotary)_(emb_)?(ratio|scale|((freq|linear|ntk)_)?(scaling_|scale_)?factor)$|^compress_pos_emb$", re.I
)


def refuse_other_positions(model: PreTrainedModel, kind: str) -> None:
    """Raise where a config asks for positions of a kind that the built model does not have.

    Checkpoints with code of their own may stand under a model type of transformers, whose class then takes their
    weights and ignores what it does not know. A model that was built from that code has what its weights know.

    Args:
        model: as it was built.
        kind: what its positions are: "rotary", "alibi", "relative", "table", "sinusoids", or anything else.

    Raises:
        IncompatibleError: with the field and what to do.
    """
    home = type(model).__module__
    if home.startswith("transformers_modules."):
        return
    code = source_of_home(type(model))
    for config in {id(config): config for config in (model.config, text_of(model.config))}.values():
        for place, name, value in _asking(config, kind):
            reads = re.compile(rf"(\.|['\"]){re.escape(name)}\b")  # of an object, or as a string
            if reads.search(code) or (place == "" and reads.search(source_of_home(type(config)))):
                continue
            own = getattr(config, "auto_map", None)
            remedy = (
                "Its code is its own (auto_map): load it with trust_remote_code=True after reading that code."
                if own
                else "Load it with the code that it was trained with."
            )
            of_transformers = " of transformers" if home.startswith("transformers.") else ""
            raise IncompatibleError(
                f"The config of this {config.model_type} has {place}{name}={value!r}, and {type(model).__name__}"
                f"{of_transformers} does not read it: the model that is built has other positions than its weights "
                f"were trained with. {remedy}"
            )


def _asking(config: Any, kind: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each field that asks for other positions than those of a kind: where it stands, its name and value."""
    for place, where in _mappings(config):
        said = {
            (each, where[name])
            for each, switch in SWITCHES.items()
            for name in where
            if switch.match(name)
            if isinstance(where[name], bool)
        }
        off = {each for each, is_on in said if not is_on and (each, True) not in said}
        for name, value in where.items():
            asked = _asked_kind(name, value, kind)
            if asked is not None and asked != kind and asked not in off:
                yield place, name, value


def _mappings(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields of a config, and those of the blocks of it that speak of attention or positions."""
    yield "", vars(config)
    for name, value in vars(config).items():
        block = vars(value) if isinstance(value, PreTrainedConfig) else value
        if isinstance(block, dict) and NESTED.search(name) and name not in BLOCKS:
            yield f"{name}.", block


def _asked_kind(name: str, value: Any, kind: str) -> str | None:
    """The kind of positions that a field asks for; None where it asks for none, or for those of a table."""
    if NAMES_KIND.match(name) and isinstance(value, str):
        said = value.lower()
        return "none" if said in NO_KIND else next((each for word, each in KINDS.items() if word in said), None)
    if value is False and kind in SWITCHES and SWITCHES[kind].match(name):
        return "none"
    if not value:
        return None
    if kind == "rotary" and SCALES.match(name) and _is_number(value) and value != 1:
        return "scaled"
    return next((each for each, pattern in ASKED.items() if pattern.search(name)), None)
