"""Draft heads in a checkpoint: layers for multi-token prediction (MTP), whose guesses the model checks in one pass.

The decoder's class in transformers does not build them, so ``patch`` does not reach them. Servers build them from
config.json.

Source: the fields that transformers 5.24 and vLLM count (vllm/config/speculative.py at 002e77c1, hf_config_override).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ctxext.caches.records import ATTENTION
from ctxext.core.steps import Moment, Step, Work, register
from ctxext.core.subject import text_of
from ctxext.errors import IncompatibleError

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


@dataclass
class Drafting:
    """Replacement of ``model._get_candidate_generator`` that lets ``generate(use_mtp=True)`` find the draft heads.

    transformers reads them from the path in the config, where an extension in memory has a sentence, and runs them on
    the model's own rotary module. ``make`` is an earlier replacement, None without one.
    """

    model: Any
    place: str
    refused: str | None
    make: Any = None

    def __call__(self, *, generation_config: Any, **kwargs: Any) -> Any:
        """Make the candidate generator as transformers does.

        Raises:
            IncompatibleError: for draft heads, if the method gives no fixed positions that they could share.
        """
        make = self.make or type(self.model)._get_candidate_generator.__get__(self.model)
        if not getattr(generation_config, "use_mtp", None):
            return make(generation_config=generation_config, **kwargs)
        if self.refused is not None:
            raise IncompatibleError(
                f"use_mtp=True: draft heads rotate as transformers does, which method {self.refused!r} does not. "
                f"Generate without use_mtp."
            )
        config, said = self.model.config, self.model.config._name_or_path
        config._name_or_path = self.place
        try:
            return make(generation_config=generation_config, **kwargs)
        finally:
            config._name_or_path = said


def _find_drafts(work: Work) -> None:
    """Let ``generate`` build the draft heads of a checkpoint around the model."""
    model: Any = work.subject.model
    is_other = work.method.dynamic or work.subject.text._attn_implementation == ATTENTION
    place, made = model.config._name_or_path, vars(model).get("_get_candidate_generator")
    drafting = Drafting(model, place, work.method.name if is_other else None, made)
    work.edits.set(model, "_get_candidate_generator", drafting)


register(Step(Moment.MODULES, _note_drafts, applies=lambda work: not work.sides))
register(
    Step(
        Moment.MODULES,
        _find_drafts,
        applies=lambda work: (
            getattr(work.subject.text, "num_mtp_layers", None)
            and hasattr(work.subject.model, "_get_candidate_generator")
        ),
    )
)
