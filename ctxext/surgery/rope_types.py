"""Register ctxext's rope types with transformers, and write and read their saved form."""

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

# Configs of these models have no field about positions, so plain transformers would load an extended checkpoint as a
# plain one. transformers 5 checks types: a sentence in place of this number stops every class, and the error quotes
# it. Programs without checks, such as transformers 4, cannot compute with a sentence. Patched models have the number.
GUARDED_FIELD = "layer_norm_epsilon"
GUARD = "this checkpoint is extended by ctxext: load it with ctxext.load"

# Plain transformers raises a KeyError that quotes an unknown rope type, and so do other programs. It treats names that
# contain "dynamic" in a special way, so these do not. Earlier versions wrote only the part before the colon.
ROPE_NAME = "ctxext_rope"
ROPE_TYPE = f"{ROPE_NAME}: {GUARD}"
UNROTATED_NAME = "ctxext_unrotated"
UNROTATED_TYPE = f"{UNROTATED_NAME}: {GUARD}"


def without_guard(config: Any) -> None:
    """Replace guards in a config by the original numbers, in place."""
    for name in [name for name, value in vars(config).items() if value == GUARD]:
        setattr(config, name, config.ctxext["original"][name])


def method_rope_parameters(method: RopeMethod, rope: RopeSpec) -> dict[str, Any]:
    """Return the saved form of a method that transformers cannot express, under a rope type that it refuses."""
    trained: dict[str, Any] = {}
    if rope.inv_freq is not None:
        trained = {"trained_inv_freq": list(rope.inv_freq), "trained_scale": rope.attention_scale}
    details = {"rotary_dim": rope.rotary_dim, "trained_length": rope.trained_length, **trained, **method.to_dict()}
    # Latent attention of older transformers reads the factor of any type.
    return _guarded(ROPE_TYPE, {"rope_theta": rope.base} | details) | {"factor": float(method.factor)}


def unrotated_rope_parameters(method: Method, base: float) -> dict[str, Any]:
    """Return the saved form of a model without rotation, under a rope type that transformers refuses."""
    return _guarded(UNROTATED_TYPE, {"rope_theta": base} | method.to_dict())


def _guarded(rope_type: str, details: dict[str, Any]) -> dict[str, Any]:
    """Return a rope dict that no other program can compute with, even after an unknown rope type (Unsloth).

    The details are one string, because other programs expect a number, a word or a list in every value (vLLM 0.32.0,
    rotary_embedding/__init__.py, makes a key of the values before it looks at the type).
    """
    return {"rope_type": rope_type, "rope_theta": GUARD, "ctxext": json.dumps(details, sort_keys=True)}


def with_base(form: dict[str, Any]) -> dict[str, Any]:
    """Return a saved form with the base, for models whose code computes with it under every rope type."""
    return form | {"rope_theta": _details(form)["rope_theta"]}


def _details(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return ctxext's own entries of a rope dict, in the form of any earlier version."""
    saved = parameters["ctxext"]
    details: dict[str, Any] = json.loads(saved) if isinstance(saved, str) else copy.deepcopy(saved)
    return {"rope_theta": parameters["rope_theta"]} | details


def current_form(rope: Any) -> Any:
    """Return a saved rope dict as this version would write it, so that dicts of two versions can be compared."""
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
    """Compute frequencies and scale of the rope type ``ctxext_rope``; transformers calls this."""
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
        raise CheckpointError(f"Method {method.name!r} of this checkpoint has no frequencies: config.json is damaged.")
    if not method.is_table and not RESTORING.get():
        raise CheckpointError(
            f"This checkpoint is extended by method {method.name!r}, which transformers cannot compute from a config. "
            f"Load it with ctxext.load(path)."
        )
    with torch.device("cpu"):  # real numbers, even if the model is built on another device or on meta
        frequencies = method.frequencies(rope, rope.trained_length if seq_len is None else int(seq_len))
    place = torch.get_default_device() if device is None else device
    scale = float(frequencies.attention_scale * rope.attention_scale)
    return frequencies.inv_freq.to(device=place, dtype=torch.float32), scale


def _no_rotation(
    config: Any, device: torch.device | None = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """Return zero frequencies for the rope type ``ctxext_unrotated``: cos is 1 and sin is 0 everywhere."""
    if not RESTORING.get():
        raise CheckpointError(
            "This checkpoint has no rotary positions any more, and its attention needs ctxext. Load it with "
            "ctxext.load(path)."
        )
    parameters = config.rope_parameters[layer_type] if layer_type is not None else config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    return torch.zeros(width // 2, device=device), 1.0


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for transformers' log lines that it has no check for ctxext's rope types, which ctxext has."""
    message = record.getMessage()
    return "Missing validation function" not in message or not any(
        name in message for name in (ROPE_NAME, UNROTATED_NAME)
    )


for _name in (ROPE_NAME, ROPE_TYPE):
    ROPE_INIT_FUNCTIONS.setdefault(_name, _initial_frequencies)
for _name in (UNROTATED_NAME, UNROTATED_TYPE):
    ROPE_INIT_FUNCTIONS.setdefault(_name, _no_rotation)
logging.getLogger("transformers.modeling_rope_utils").addFilter(_is_news)
