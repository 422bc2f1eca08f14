"""What mlx-lm computes of an extended checkpoint, as found by running it.

mlx-lm has no setting of positions: what it knows of them it reads from ``config.json``, most of its classes in the
fields of transformers 4 (``rope_theta``, ``rope_scaling``), which ``ctxext patch`` and ``ctxext.save`` write beside the
new ones. Some classes look at the base alone, and would run the unextended model without a word. ``mlx_lm.json`` beside
this file says for every model type and rope type how far a real mlx-lm was from the patched model;
``scripts/mlx_lm_table.py`` makes it, on a CPU.

Source: mlx-lm 0.32.2 (models/rope_utils.py:248, initialize_rope; SuScaledRoPE there takes long_factor whatever the
    length; utils.py:409, load_model).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

from ctxext.errors import IncompatibleError
from ctxext.runtimes.base import (
    Export,
    ExtensionInConfig,
    Runtime,
    is_close,
    longrope_scale,
    read_table,
    require_known_type,
)
from ctxext.surgery.windows import window_of

TABLE = Path(__file__).with_name("mlx_lm.json")


class MlxLm(Runtime):
    """mlx-lm, as ``mlx_lm.server`` starts it."""

    name: ClassVar[str] = "mlx-lm"
    length_flag: ClassVar[str | None] = None
    files_only: ClassVar[bool] = True

    def start(self, checkpoint: str, gguf: str) -> tuple[str, ...]:
        return "mlx_lm.server", "--model", checkpoint

    def export(self, extended: ExtensionInConfig) -> Export:
        """No flags, since there are none, and whether the files say it all.

        Raises:
            IncompatibleError: if mlx-lm stops on the checkpoint, or would compute other positions.
        """
        require_known_type("mlx-lm", extended)
        model_type = extended.text.model_type
        if extended.unsaid:
            raise self.needs_files(extended)
        if extended.guarded:
            raise IncompatibleError(
                f"mlx-lm may stop on this {model_type}: save_pretrained wrote its config.json for readers of "
                f"transformers 5, and most of mlx-lm's classes read the fields of transformers 4. Write it with both: "
                f"ctxext.save(ctxext.load(THIS), NEW)."
            )
        why = _why_not_exact(extended)
        notes = [
            f"config.json says it all, up to {extended.target_length} tokens, where ctxext patch or ctxext.save wrote "
            f"it; on what save_pretrained writes by itself, mlx-lm may stop. It has no limit of its own."
        ]
        notes += [note for note in (why, extended.length_note) if note]
        return Export(target=self.name, flags=(), notes=tuple(notes), exact=why is None)


def _version() -> str:
    return f"mlx-lm {read_table(TABLE)['versions']['mlx_lm']}"


def _why_not_exact(extended: ExtensionInConfig) -> str | None:
    """Why it is not known that mlx-lm computes the extension; None where it was seen to.

    Raises:
        IncompatibleError: if it was seen to stop, or to compute other positions.
    """
    kind, form = extended.config.model_type, form_of(extended)  # of a model of several parts its text says nothing
    line: dict[str, Any] = read_table(TABLE)["types"].get(kind, {})
    if not line:
        return f"Not proven: {_version()} has no class for {kind}, or its models were not tried."
    found = line["forms"].get(form, {})
    error = found.get("error")
    if error is None:
        return f"Not proven: this {extended.rope_type} was not tried on a {kind}."
    right = is_close(error, found["matters"])
    if not right and not runs(line):
        noise = line["noise"]
        said = f"by {noise:g} nats" if isinstance(noise, float) else noise
        return (
            f"Not proven: tiny models of this type differ there from transformers without any extension, too ({said})."
        )
    if isinstance(error, str):
        raise IncompatibleError(
            f"{_version()} stops on this {kind}: its class ({line['class']}) does not read this "
            f"{extended.rope_type} ({error}). {_OTHERWISE}"
        )
    if not right:
        raise IncompatibleError(
            f"{_version()} would run this {kind} with other positions: its class ({line['class']}) does not read all "
            f"of this {extended.rope_type}; it was {error:g} nats from the patched model, when the unextended one is "
            f"{found['matters']:g} away. {_OTHERWISE}"
        )
    window = window_of(extended.text)
    if window and window < extended.target_length and not line["window"]:
        return f"Not proven: this {kind} has a sliding window of {window} tokens, and those that were run had none."
    if extended.rope_type == "dynamic":
        return "mlx-lm caches keys with the base of their time, so that decoding differs from one pass over the text."
    if extended.rope_type == "longrope" and extended.rope["short_factor"] != extended.rope["long_factor"]:
        return "mlx-lm takes long_factor for every text, short ones included."
    return None


def runs(line: dict[str, Any]) -> bool:
    """Whether mlx-lm computes this model type as transformers does, in any form."""
    forms = [form for form in line["forms"].values() if "error" in form]
    return any(is_close(error, form["matters"]) for form in forms for error in (line["noise"], form["error"]))


_OTHERWISE = (
    "Extend it by a method that it reads (for most types ntk or abf, another base), or serve it with transformers."
)


def form_of(extended: ExtensionInConfig) -> str:
    """The name under which the table holds this scaling."""
    rope, kind = extended.rope, extended.rope_type
    if kind == "yarn" and rope.get("truncate") is False:
        return "yarn_truncate"
    if kind == "yarn" and extended.scales_scores:
        return "yarn_scores" if rope.get("attention_factor") is None else "yarn_scores_attention"
    if kind == "yarn":
        usual = 0.1 * math.log(rope["factor"]) + 1
        return "yarn" if abs(extended.scale - usual) < 1e-6 else "yarn_attention"
    if kind == "longrope" and abs(extended.scale - longrope_scale(extended)) > 1e-6:
        return "longrope_attention"
    return kind
