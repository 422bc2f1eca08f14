"""What vLLM must be told, read off vLLM 0.33.0."""

from __future__ import annotations

import json
import math
from typing import Any

from ctxext.errors import IncompatibleError
from ctxext.runtimes.base import Export, Extended

__all__ = ["to_vllm"]

# vLLM multiplies max_position_embeddings by `factor` for these, although the config already holds the new length.
MULTIPLIED = ("linear", "dynamic")


def to_vllm(extended: Extended) -> Export:
    """Flags for ``vllm serve``.

    Raises:
        IncompatibleError: if vLLM refuses the rope type.
    """
    if not extended.stock:
        raise IncompatibleError(
            f"vLLM cannot run {extended.method!r}: the config says rope_type={extended.rope_type!r}, which "
            f"vLLM refuses as unknown, and it has no setting that computes the same. Extend the checkpoint by a method "
            f"with a stock form instead (ctxext methods lists them), or serve it with transformers."
        )
    if extended.loses_factor:
        raise IncompatibleError(
            f"vLLM would run this {extended.text.model_type} unextended: it does not read the factor of rope_type "
            f"{extended.rope_type!r}. Extend it by another base (ntk or abf), or serve it with transformers."
        )
    overrides, notes, exact = _overrides(extended)
    if not overrides:
        notes.insert(0, "config.json says it all; the flag only sets the length to serve.")
    notes += _notes(extended)
    flags = ("--hf-overrides", json.dumps(_nested(extended, overrides))) if overrides else ()
    flags = (*flags, "--max-model-len", str(extended.target_length))
    return Export(target="vllm", flags=flags, notes=tuple(notes), exact=exact)


def _overrides(extended: Extended) -> tuple[dict[str, Any], list[str], bool]:
    """Config fields that vLLM needs to see otherwise than the files say, what to know about it, and whether exact."""
    rope, overrides = extended.rope, dict(extended.unsaid)
    if extended.rope_type == "dynamic":
        rope["max_trained_positions"] = extended.trained_length
        overrides["max_position_embeddings"] = extended.target_length
        overrides["rope_parameters"] = _whole(extended, rope)
        return (
            overrides,
            [
                f"Dynamic scaling is static in vLLM: every text, short ones included, gets the base that transformers "
                f"uses at {extended.target_length} tokens. Without these overrides vLLM would not stretch at all.",
                "max_trained_positions is read by vLLM 0.33.0; older versions compute yet another base.",
            ],
            False,
        )
    if extended.rope_type != "longrope":
        return overrides, [], True
    notes = ["vLLM applies longrope to models with half-split rotation only (Llama's layout, not GLM's or Cohere's)."]
    if abs(_longrope_scale(extended) - extended.scale) > 1e-6:
        rope |= {"short_mscale": extended.scale, "long_mscale": extended.scale}
        overrides["rope_parameters"] = _whole(extended, rope)
        notes.append("vLLM does not read attention_factor for longrope; short_mscale and long_mscale carry it.")
    exact = rope["short_factor"] == rope["long_factor"]
    if not exact:
        notes.append(
            f"vLLM chooses between short_factor and long_factor once, by --max-model-len: above "
            f"{extended.trained_length} every text gets long_factor, short ones included."
        )
    return overrides, notes, exact


def _longrope_scale(extended: Extended) -> float:
    """What vLLM computes where the config says nothing else: it looks at the lengths only."""
    original = extended.trained_length
    stretch = extended.text.max_position_embeddings / original
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))


def _whole(extended: Extended, rope: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` complete, since an override replaces the whole dictionary."""
    return rope if extended.layer_type is None else dict(extended.text.rope_parameters) | {extended.layer_type: rope}


def _nested(extended: Extended, overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides at the place of the decoder's config inside a composite one."""
    if extended.text is extended.config:
        return overrides
    parts = [name for name in extended.config.sub_configs if getattr(extended.config, name, None) is extended.text]
    return {parts[0]: overrides}


def _notes(extended: Extended) -> list[str]:
    notes = []
    read_late = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if extended.rope.get(key) is not None]
    if extended.rope_type == "yarn" and read_late:
        notes.append(
            f"{' and '.join(read_late)}: read by vLLM from PR #56446 on (merged 2026-09-11); older versions drop it "
            f"and scale attention by the default."
        )
    if extended.rope_type in MULTIPLIED:
        notes.append(
            f"--max-model-len is needed: vLLM multiplies max_position_embeddings by factor for rope_type "
            f"{extended.rope_type!r} and would otherwise promise a length {extended.rope['factor']:g} times too long."
        )
    if extended.rope_type == "longrope":
        notes.append("--max-model-len is needed: vLLM may otherwise serve the trained length only.")
    if extended.layer_type is not None:
        notes.append(f"Only the {extended.layer_type} positions are extended; vLLM reads them per layer type.")
    return notes
