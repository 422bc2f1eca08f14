"""Say why no family matches a model, from its modules and the code of their classes."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ctxext.core.architecture import EXPLANATIONS
from ctxext.core.subject import text_of
from ctxext.models.sinusoid import rotates_by_table
from ctxext.probe.code import names_of, own_bases, source_of

TABLE = re.compile(r"pos|wpe")
BUCKETS = re.compile(r"relative_attention_bias|rel_pos_bias")
SOME_POSITION = re.compile(
    r"rotary|alibi|sinus|wpe|relative|rel_|position_?(bias|emb|enc)|embed_pos|pos_?(emb|enc)", re.I
)
ROTATION = re.compile(r"rotary|rope(?![a-z])|^Rot([A-Z]|$)|Rope(?![a-z])|RoPE")
# Names of parts that do not read text.
ELSEWHERE = re.compile(r"vision|visual|image|audio|video", re.I)
# Words by which code of any author computes positions.
ARITHMETIC = re.compile(r"\b(pos|positions?|position_ids|theta|inv_freq|freqs?\w*|cos|sin|polar|slopes?)\b")


def why_absent(model: nn.Module) -> str:
    """Return the likeliest reason why no family matches, from the model's modules and the code of their classes."""
    code = names_of(type(model))
    if rotates_by_table(model):
        return (
            "it rotates by a sinusoid table that its own code computes once, and no field of its config (no "
            "rope_parameters) changes that table in a reload"
        )
    owners = [value for name, value in code.items() if name.endswith("RotaryEmbedding") and "Vision" not in name]
    if rotation := _own_rotation(model):
        return f"it rotates by code of its own ({rotation}), which does not have the form of transformers' rope types"
    if any(hasattr(owner, "compute_default_rope_parameters") for owner in owners):
        return "its code has rotary positions, but this checkpoint's config switches them off"
    if computing := [path for path, module in model.named_modules() if "Sinusoid" in type(module).__name__]:
        return (
            f"it adds sinusoids to its input ({computing[0]}), which its own code computes for each text. No field of "
            f"its config sets the size of a table"
        )
    return (
        _table(model)
        or _none_at_all(model)
        or "it has no rotary embedding in the form of transformers' rope types, and no ALiBi"
    )


def _own_rotation(model: nn.Module) -> str | None:
    """Return the path and class of a module that rotates text by its name; None if there is none."""
    for path, module in model.named_modules():
        name, kind = path.rpartition(".")[2], type(module).__name__
        if (ROTATION.search(name) or ROTATION.search(kind)) and not ELSEWHERE.search(f"{path} {kind}"):
            return f"{path}: {kind}"
    return None


def towers_of(model: PreTrainedModel) -> set[nn.Module]:
    """Return all modules of the parts that read pictures or sound: models inside, with configs of other classes."""
    kinds = {type(config) for config in (model.config, text_of(model.config))}
    inside = (part for part in model.modules() if isinstance(part, PreTrainedModel) and type(part.config) not in kinds)
    return {module for part in inside for module in part.modules()}


def learned_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions of text with a learned vector each; None if the model has no such table."""
    towers, tables = towers_of(model), _tables(model)
    return next((rows for path, table, rows in tables if table not in towers and _is_learned(path, table)), None)


def _tables(model: nn.Module) -> Iterator[tuple[str, nn.Embedding, int]]:
    """Yield each embedding with its path and the number of tokens with a row; the decoder's before the encoder's."""
    stated = getattr(model.config, "max_position_embeddings", None)
    for path, module in reversed(list(model.named_modules())):
        if isinstance(module, nn.Embedding):
            rows = module.num_embeddings - int(getattr(module, "offset", 0))
            # The first rows of some tables belong to no position.
            yield path, module, stated if isinstance(stated, int) and 0 < stated <= rows else rows


def _is_learned(path: str, module: nn.Embedding) -> bool:
    name = path.rpartition(".")[2]
    return bool(TABLE.search(name)) and not BUCKETS.search(name) and "Sinusoid" not in type(module).__name__


def _table(model: nn.Module) -> str | None:
    """Return the reason for a model with a table of positions or of distances; None without such a table."""
    for path, module, rows in _tables(model):
        name = path.rpartition(".")[2]
        if BUCKETS.search(name):
            return (
                f"it has {module.num_embeddings} buckets of relative distances ({path}), the last of which holds all "
                f"farther distances"
            )
        if _is_learned(path, module):
            return (
                f"it has learned positions, one vector each for {rows:,} tokens ({path}), in an unknown form: no field "
                f"of its config that counts positions sets the size of that table"
            )
    return None


def _none_at_all(model: nn.Module) -> str | None:
    """Return the reason for a model without positions, or with positions in unknown code; None for others."""
    kinds: set[Any] = {type(module) for module in model.modules()}  # mypy takes these for unhashable
    own_classes = {
        base for kind in kinds for base in own_bases(kind) if not base.__module__.startswith("transformers.")
    }
    if computing := sorted(base.__name__ for base in own_classes if ARITHMETIC.search(_source_beside(base))):
        return f"its positions are in code of its own (beside {computing[0]}), in a form that ctxext does not know"
    lines = [line for kind in kinds for base in own_bases(kind) for line in source_of(base).splitlines()]
    if any(SOME_POSITION.search(line) for line in lines if not line.lstrip().startswith("@")):  # decorators only offer
        return None
    return "it has no positions at all, so nothing needs extending: only memory and its training limit its texts"


def _source_beside(kind: type) -> str:
    """Return the source of a class, and of the functions of its module, which it may call."""
    functions = [value for value in vars(sys.modules[kind.__module__]).values() if inspect.isfunction(value)]
    beside = [function for function in functions if function.__module__ == kind.__module__]
    return "\n".join(source_of(code) for code in (kind, *beside))


EXPLANATIONS.append(why_absent)
