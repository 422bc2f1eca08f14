"""What ctxext registers with transformers: new names only, in transformers' own registries."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ctxext.errors import CheckpointError
from ctxext.methods import METHODS, Method, RopeMethod, saved_class
from ctxext.spec import RopeSpec
from ctxext.surgery.rebuild import RESTORING

# These configs have no field that says how positions work, so stock code would load an extended checkpoint as a plain
# one. transformers 5 checks types: a sentence in the place of this number stops every stock class and is quoted in the
# error. Readers that check none, such as transformers 4, cannot compute with it; a patched model needs it no more.
GUARDED_FIELD = "layer_norm_epsilon"
GUARD = "this checkpoint is extended by ctxext: load it with ctxext.load"

# Stock transformers ends in a KeyError that quotes a rope type which it does not know, and so do others. It reacts to
# types whose name contains "dynamic", so these must not. What is before the colon was all that earlier versions wrote.
ROPE_NAME = "ctxext_rope"
ROPE_TYPE = f"{ROPE_NAME}: {GUARD}"
UNROTATED_NAME = "ctxext_unrotated"
UNROTATED_TYPE = f"{UNROTATED_NAME}: {GUARD}"


def without_guard(config: Any) -> None:
    """Put back into a config the numbers in whose place only stock code, which must refuse it, is to see a sentence."""
    for name in [name for name, value in vars(config).items() if value == GUARD]:
        setattr(config, name, config.ctxext["original"][name])


def method_rope_parameters(method: RopeMethod, rope: RopeSpec) -> dict[str, Any]:
    """The saved form of a method that stock transformers cannot express; stock code refuses its rope type."""
    trained: dict[str, Any] = {}
    if rope.inv_freq is not None:
        trained = {"trained_inv_freq": list(rope.inv_freq), "trained_scale": rope.attention_scale}
    details = {"rotary_dim": rope.rotary_dim, "trained_length": rope.trained_length, **trained, **method.to_dict()}
    # Latent attention of older transformers reads the factor whatever the type.
    return _guarded(ROPE_TYPE, {"rope_theta": rope.base} | details) | {"factor": float(method.factor)}


def unrotated_rope_parameters(method: Method, base: float) -> dict[str, Any]:
    """The saved form of a model whose positions are no rotation any more; stock code refuses its rope type."""
    return _guarded(UNROTATED_TYPE, {"rope_theta": base} | method.to_dict())


def _guarded(rope_type: str, details: dict[str, Any]) -> dict[str, Any]:
    """A rope dict that no other program can compute with, also one that goes on after an unknown rope type (Unsloth).

    The details are one string since other programs take every value for a number, a word or a list (vLLM 0.32.0,
    rotary_embedding/__init__.py, makes a key of them before it looks at the type).
    """
    return {"rope_type": rope_type, "rope_theta": GUARD, "ctxext": json.dumps(details, sort_keys=True)}


def with_base(form: dict[str, Any]) -> dict[str, Any]:
    """A saved form for models whose stock code computes with the base whatever the rope type."""
    return form | {"rope_theta": _details(form)["rope_theta"]}


def _details(parameters: dict[str, Any]) -> dict[str, Any]:
    """What a rope dict of ctxext's types holds for ctxext, however an earlier version wrote it."""
    saved = parameters["ctxext"]
    details: dict[str, Any] = json.loads(saved) if isinstance(saved, str) else copy.deepcopy(saved)
    return {"rope_theta": parameters["rope_theta"]} | details


def current_form(rope: Any) -> Any:
    """A saved rope dict as this version would write it, so that two can be compared, whichever versions wrote them."""
    if not isinstance(rope, dict) or "ctxext" not in rope:
        return {name: current_form(value) for name, value in rope.items()} if isinstance(rope, dict) else rope
    details = _details(rope)
    known = METHODS.get(details["method"])
    defaults = [] if known is None else [field for field in fields(known) if field.default is not MISSING]
    details = {field.name: field.default for field in defaults} | details
    is_unrotated = str(rope["rope_type"]).startswith(UNROTATED_NAME)
    return rope | _guarded(UNROTATED_TYPE if is_unrotated else ROPE_TYPE, details)


def _initial_frequencies(
    config: Any, device: torch.device | None = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """Rope init function of ``ctxext_rope``, in the signature that transformers calls."""
    parameters = config.rope_parameters[layer_type] if layer_type is not None else config.rope_parameters
    saved = _details(parameters)
    trained = saved.pop("trained_inv_freq", None)
    rope = RopeSpec(
        rotary_dim=saved.pop("rotary_dim"),
        base=saved.pop("rope_theta"),
        trained_length=saved.pop("trained_length"),
        inv_freq=None if trained is None else tuple(trained),
        attention_scale=saved.pop("trained_scale", 1.0),
    )
    method = saved_class(saved["method"]).from_dict(saved)
    if not isinstance(method, RopeMethod):
        raise CheckpointError(
            f"The method {method.name!r} of this checkpoint has no frequencies: config.json is damaged."
        )
    if not method.is_table and not RESTORING.get():
        raise CheckpointError(
            f"This checkpoint is extended by the method {method.name!r}, which needs more than its config "
            f"to be computed rightly. Load it with ctxext.load(path)."
        )
    with torch.device("cpu"):  # numbers, also where a model is built on another device or on none
        frequencies = method.frequencies(rope, rope.trained_length if seq_len is None else int(seq_len))
    place = torch.get_default_device() if device is None else device
    scale = float(frequencies.attention_scale * rope.attention_scale)
    return frequencies.inv_freq.to(device=place, dtype=torch.float32), scale


def _no_rotation(
    config: Any, device: torch.device | None = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """Rope init function of ``ctxext_unrotated``: cos is 1 and sin is 0 everywhere."""
    if not RESTORING.get():
        raise CheckpointError(
            "This checkpoint has no rotary positions any more: its attention needs ctxext. Load it with "
            "ctxext.load(path)."
        )
    parameters = config.rope_parameters[layer_type] if layer_type is not None else config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    return torch.zeros(width // 2, device=device), 1.0


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log line of transformers says more than that ctxext, not transformers, checks ctxext's rope types."""
    said = record.getMessage()
    return "Missing validation function" not in said or not any(name in said for name in (ROPE_NAME, UNROTATED_NAME))


for _name in (ROPE_NAME, ROPE_TYPE):
    ROPE_INIT_FUNCTIONS.setdefault(_name, _initial_frequencies)
for _name in (UNROTATED_NAME, UNROTATED_TYPE):
    ROPE_INIT_FUNCTIONS.setdefault(_name, _no_rotation)
logging.getLogger("transformers.modeling_rope_utils").addFilter(_is_news)
