"""Check a config before a model is built from it, where transformers would fail without naming a field."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ctxext.core.config import rope_dicts
from ctxext.core.rebuild import FAILURES
from ctxext.core.saved import GUARD, extended_texts, saved_extension, saved_method, saved_sides
from ctxext.errors import CheckpointError, CtxextError, IncompatibleError
from ctxext.methods.parameters import is_number

# What code ends in when a value is of another kind than it takes for granted.
UNFIT = (*FAILURES, StrictDataclassError)
# Of a rope dict: above zero, and not below it.
POSITIVE = ("rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "partial_rotary_factor")
NUMBERS = ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim")
TABLES = ("short_factor", "long_factor")
# The most of anything that a config may ask for, by the end of the field's name: far above every published model, and
# little enough that a model without weights is built in seconds.
MOST = {
    re.compile(r"(layers|n_layer|blocks|block_count)$"): 2_000,
    re.compile(r"(heads|n_head|experts|head_count)$"): 100_000,
    re.compile(r"(hidden_size|head_dim|d_model|n_embd|embedding_length)$"): 10**6,
    re.compile(r"(position_embeddings|n_positions|n_ctx|context_length)$"): 2**27,
    re.compile(r"(_size|_dim|d_ff)$"): 10**8,
}


@contextlib.contextmanager
def building(what: str) -> Iterator[None]:
    """Turn the errors of transformers into sentences while it reads or builds ``what`` from a config.

    Nothing of ctxext's own belongs in the block, so that a defect of ours is not taken for a mistake in a config.

    Raises:
        CheckpointError: in the place of what transformers ends in.
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
        CheckpointError: in the place of what the code ends in.
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


def check_sizes(raw: Any, place: str) -> None:
    """Refuse a config that asks for more of something than any model has, before anything is built from it.

    ``raw`` is the config as its file holds it, parts of several models included.

    Raises:
        CheckpointError: the message names the field, the value and the bound.
    """
    for name, value in raw.items():
        if isinstance(value, dict):
            check_sizes(value, place)
        if not isinstance(value, int | float):
            continue
        most = next((most for ending, most in MOST.items() if ending.search(name)), None)
        if most is not None and value > most:
            raise CheckpointError(
                f"The config of {place} has {name}={value}; models of at most {most:,} are read. Compare it with the "
                f"published one."
            )


def check_config(config: Any, place: str) -> None:
    """Refuse a config that carries an unknown form of extension, or a rope dict that no model could be built from.

    Raises:
        CheckpointError: for a value of the wrong kind; the message names the field and the value.
        IncompatibleError: for a rope dict without its base.
    """
    saved = saved_extension(config, place)
    if saved is not None:
        for extension in saved_sides(saved).values() or [saved]:
            saved_method(extension)
    named = config.architectures
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise CheckpointError(f"The config of {place} has architectures={named!r}; it should be a list of class names.")
    for text in extended_texts(config):
        _check_text(config, text, place)


def _check_text(config: Any, text: Any, place: str) -> None:
    """Check the part of a config that describes how text is read, or one of several such parts."""
    for dtype in (config.dtype, getattr(text, "dtype", None)):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"The config of {place} has dtype={dtype!r}; it should be one of torch's, by its name."
            )
    length = getattr(text, "max_position_embeddings", None)
    if length is not None and (not is_number(length) or length < 1):
        raise CheckpointError(
            f"The config of {place} has max_position_embeddings={length!r}; it should be a number of tokens."
        )
    rope = getattr(text, "rope_parameters", None)
    if rope is None:
        return
    if not isinstance(rope, dict):
        raise CheckpointError(f"The config of {place} has rope_parameters={rope!r}; it should be a JSON object.")
    for _, parameters in rope_dicts(text):
        if "rope_type" in parameters:
            _refuse_unread(text, parameters)
            _check_rope(parameters, config.model_type, place)


def _refuse_unread(text: Any, parameters: dict[str, Any]) -> None:
    """Raise where a class has no field for a rope dict that lacks its base: a base would not help."""
    kind = type(text)
    declared = {field.name for field in dataclasses.fields(kind)} if kind.__module__.startswith("transformers.") else ()
    if declared and "rope_parameters" not in declared and parameters.get("rope_theta") is None:
        raise IncompatibleError(
            f"The config of this {text.model_type} has rope_parameters={parameters}, which {kind.__name__} of "
            f"transformers does not declare: its class would not rotate by them. Load it with the code that it was "
            f"trained with, or take them out."
        )


def _check_rope(parameters: dict[str, Any], model_type: str, place: str) -> None:
    kind = parameters["rope_type"]
    if not isinstance(kind, str) or kind not in {"default", *ROPE_INIT_FUNCTIONS}:
        known = ", ".join(sorted({"default", *(name for name in ROPE_INIT_FUNCTIONS if not name.startswith("ctxext"))}))
        hint = " ('su' is the old name of longrope, whose tables it needs.)" if kind == "su" else ""
        raise CheckpointError(
            f"The config of {place} has rope_type={kind!r}, which transformers does not know: {known}.{hint}"
        )
    if parameters.get("rope_theta") is None:  # transformers would fail on it with a TypeError
        raise IncompatibleError(
            f"The config of this {model_type} has no rope_theta in rope_parameters={parameters}. Write it into "
            f"config.json: the base that the model was trained with (10000.0 in the RoPE paper)."
        )
    for name in (*POSITIVE, *NUMBERS):
        value = parameters.get(name)
        if value == GUARD and "ctxext" in parameters:
            continue
        if value is not None and not (is_number(value) and (value > 0 or name in NUMBERS)):
            raise CheckpointError(
                f"The config of {place} has {name}={value!r} in rope_parameters; it should be a finite number"
                f"{'' if name in NUMBERS else ' above 0'}."
            )
    if not isinstance(parameters.get("truncate"), bool | None):  # any other word is true to transformers
        raise CheckpointError(
            f"The config of {place} has truncate={parameters['truncate']!r} in rope_parameters; it should be true or "
            f"false."
        )
    for name in TABLES:
        values = parameters.get(name)
        if values is not None and not (isinstance(values, list) and all(is_number(v) and v > 0 for v in values)):
            raise CheckpointError(
                f"The config of {place} has {name}={values!r:.80} in rope_parameters; it should be a list of numbers "
                f"above 0."
            )
