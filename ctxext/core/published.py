"""Compare a checkpoint's config.json, as published, with the config that transformers built from it."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ctxext.core.config import (
    CHUNKED,
    FOREIGN_KEYS,
    REFUSALS,
    UNSCALED,
    heads_of,
    is_windowed,
    published_text,
    rope_dicts,
    short,
)
from ctxext.core.subject import Subject, text_of
from ctxext.errors import CheckpointError

# Model types of transformers whose own code reads such a key.
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
SAID = (
    *("factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
    *("mscale", "mscale_all_dim", "short_factor", "long_factor", "truncate"),
)
# Names of the length in published configs and other programs; transformers reads the one that the class declares.
LENGTH = "max_position_embeddings"
LENGTHS = (
    *(LENGTH, "n_positions", "n_ctx", "seq_length", "seq_len", "max_seq_len", "max_seq_length", "max_sequence_length"),
    *("model_max_length", "max_context_length", "context_length"),
)


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
        return f"{self.name}={short(self.stated)} (built: {short(self.built)})"


def lost_fields(published: dict[str, Any], config: Any) -> list[Lost]:
    """Return the values of a published config.json about rotation of text that the built config lacks."""
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


def _declared(config: Any) -> set[str]:
    """Return the fields that the class of a config declares, and so reads."""
    return {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()


def _lost_numbers(part: dict[str, Any], ropes: list[dict[str, Any]], declared: set[str]) -> Iterator[Lost]:
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


def _blocks(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a config's fields and those of its blocks about attention and positions, windowed layers' left out."""
    nested = [value for name, value in part.items() if isinstance(value, dict) and NESTED.search(str(name))]
    deeper = [
        entry
        for block in nested
        for name, entry in block.items()
        if isinstance(entry, dict) and not is_windowed(str(name))
    ]
    return [part, *nested, *deeper]


def _lost_dimensions(part: dict[str, Any], ropes: list[dict[str, Any]], text: Any) -> Iterator[Lost]:
    """Yield stated numbers of rotated dimensions if the built model rotates another number."""
    stated = {name: part[name] for name in part.keys() - _declared(text) if DIMENSIONS.match(str(name))}
    for name, value in stated.items():
        head = heads_of(text)[2]
        built = [head * (rope.get("partial_rotary_factor") or 1) for rope in ropes]
        if is_number(value) and value not in built:
            yield Lost(name, value, built[0])


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
    # A proportional type turns a share of all pairs, and latent attention has rotated dimensions of their own.
    if not widths or subject.saved or hasattr(text, "kv_lora_rank") or "proportional" in str(text.rope_parameters):
        return
    fields = [field for block in _blocks(vars(text)) for field in block.items() if is_number(field[1])]
    for name, value in fields:
        if name in _declared(text) or not (PART.match(name) or DIMENSIONS.match(name)):
            continue
        head = heads_of(text)[2]
        dimensions = value * head if PART.match(name) else value
        if int(dimensions) not in widths:
            raise CheckpointError(
                f"The config of {place} says {name}={value}, {int(dimensions)} of the {head} dimensions of each head, "
                f"but {type(subject.model).__name__} of transformers ignores it and rotates {max(widths)}. Load the "
                f"weights with the code that they were trained with, or take the field out if it is wrong."
            )


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
    if is_number(original) and built_originals and original not in built_originals:
        yield Lost(ORIGINAL, original, built_originals[0])


def is_number(value: Any) -> bool:
    """Return whether a value is a number, which True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def unstated_base(published: dict[str, Any], config: Any) -> tuple[str, Any] | None:
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


def refuse_lost_fields(config: Any, place: str, published: dict[str, Any], *, live: bool = False) -> None:
    """Raise if transformers builds other positions from a config.json than the file states.

    The ``config`` of a ``live`` model is its current one: a change of it in memory is no error of the file.

    Raises:
        CheckpointError: with each lost field, and the value that was built instead.
    """
    unstated = unstated_base(published, config)
    if unstated is not None and unstated[0] == "rope_parameters":  # readers of rope_scaling take their own default
        raise CheckpointError(
            f"The config.json of {place} has rope_parameters without rope_theta, for which transformers takes "
            f"{unstated[1]}. Write the base that the weights were trained with into rope_parameters."
        )
    lost = lost_fields(published, config)
    if lost and live:
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
