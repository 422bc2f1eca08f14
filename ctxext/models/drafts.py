"""Draft heads in a checkpoint: layers for multi-token prediction (MTP), whose guesses the model checks in one pass.

The decoder's class in transformers does not build them, so ``patch`` does not reach them. Servers build them from
config.json.

Source: the fields that transformers 5.24 and vLLM count (vllm/config/speculative.py at 002e77c1, hf_config_override).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ctxext.core.steps import Moment, Step, Work, register
from ctxext.core.subject import text_of

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields of configs that count draft heads."""
UNCOUNTED = ("longcat_flash", "mimo_v2_flash", "qwen3_next")
"""Model types that are published with one draft head and without a field that counts it."""


def draft_heads(config: Any) -> int:
    """Count the draft heads that a config names; one if it has no count, but other fields of a head (``mtp_*``)."""
    text = text_of(config)
    if counts := [getattr(text, name) or 0 for name in COUNTS if hasattr(text, name)]:
        return max(counts)
    fields = [name for name, value in vars(text).items() if value and (name.startswith("mtp_") or name == "use_mtp")]
    return int(bool(fields) or text.model_type in UNCOUNTED)


def about_drafts(config: Any, says: str) -> tuple[str, ...]:
    """Return a note about the draft heads of a config; none for a config without them."""
    heads = draft_heads(config)
    return (f"MTP draft heads ({heads}): {says}",) if heads else ()


def _note_drafts(work: Work) -> None:
    notes = about_drafts(work.subject.config, "ctxext leaves them plain. A server extends them by config.json.")
    work.extension = replace(work.extension, notes=(*work.extension.notes, *notes))


register(Step(Moment.MODULES, _note_drafts, applies=lambda work: not work.sides))
