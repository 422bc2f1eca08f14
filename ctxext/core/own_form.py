"""The rope types of ctxext for methods that no type of transformers expresses; programs without ctxext refuse them."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ctxext.core.rebuild import RESTORING
from ctxext.core.scaling import heads_of
from ctxext.errors import CheckpointError, shown
from ctxext.files import parse_json
from ctxext.methods import Method, RopeMethod, saved_class
from ctxext.rope_types import GUARD, ROPE_TYPE, UNROTATED_TYPE
from ctxext.spec import RopeSpec


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
    """Return ctxext's own entries of a rope dict; refuse damaged ones."""
    saved = parameters["ctxext"]
    try:
        return {**parse_json(saved)}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"rope_parameters.ctxext in the config is damaged: {shown(saved)}.") from error


def stored_method(parameters: dict[str, Any]) -> tuple[RopeMethod, RopeSpec]:
    """Rebuild the method of a saved rope dict, and the rotation that it extends.

    Raises:
        CheckpointError: if the method has no frequencies.
    """
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
    return method, rope


def initial_frequencies(
    config: Any,
    device: torch.device | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
    **_: Any,  # where a model keeps the width of its heads, which the saved form says itself
) -> tuple[Tensor, float]:
    """Compute frequencies and scale of the rope type ``ctxext_rope``; transformers calls this."""
    parameters = config.rope_parameters[layer_type] if layer_type is not None else config.rope_parameters
    method, rope = stored_method(parameters)
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


def no_rotation(
    config: Any, device: torch.device | None = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """Return zero frequencies for the rope type ``ctxext_unrotated``: cos is 1 and sin is 0 everywhere."""
    if not RESTORING.get():
        raise CheckpointError(
            "This checkpoint has no rotary positions any more, and its attention needs ctxext. Load it with "
            "ctxext.load(path)."
        )
    parameters = config.rope_parameters[layer_type] if layer_type is not None else config.rope_parameters
    width = int(heads_of(config)[2] * parameters.get("partial_rotary_factor", 1.0))
    return torch.zeros(width // 2, device=device), 1.0
