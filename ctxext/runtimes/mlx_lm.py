"""Export for mlx-lm, known by running it.

mlx-lm has no setting of positions: it reads ``config.json``, in most classes the fields of transformers 4
(``rope_theta``, ``rope_scaling``), which ``ctxext patch`` and ``ctxext.save`` write in addition to the new fields. Some
classes read the base only, and would silently run the unextended model. ``mlx_lm.json`` next to this file holds, for
every model type and rope type, the distance of a real mlx-lm from the patched model; ``scripts/mlx_lm_table.py``
measures it on a CPU.

Source: mlx-lm 0.32.2 (models/rope_utils.py:248, initialize_rope; SuScaledRoPE there takes long_factor whatever the
    length; utils.py:409, load_model).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctxext.errors import IncompatibleError
from ctxext.runtimes.base import (
    Export,
    ExtensionInConfig,
    Runtime,
    is_close,
    longrope_scales,
    read_table,
    require_known_type,
    runs,
)

TABLE = Path(__file__).with_name("mlx_lm.json")
# The classes that read a scaling in the fields of transformers 5.
READ_NEW = (
    *("gemma4", "gemma4_text", "glm_moe_dsa", "laguna", "mellum", "ministral3", "mistral4"),
    *("qwen3", "qwen3_5", "qwen3_5_moe"),
)


class MlxLm(Runtime):
    """mlx-lm, as ``mlx_lm.server`` starts it."""

    name = "mlx-lm"
    start = ("mlx_lm.server", "--model")
    length_flag = None
    drafts = "mlx-lm does not load them."

    def needs_copy(self, config: Any) -> bool:
        return True

    def export(self, extended: ExtensionInConfig) -> Export:
        """Return an export without flags; the files hold the extension.

        Raises:
            IncompatibleError: if mlx-lm stops on the checkpoint, or would compute other positions.
        """
        require_known_type("mlx-lm", extended)
        model_type = extended.text.model_type
        is_ours, line = getattr(extended.config, "ctxext", None) is not None, _line(extended)
        if extended.guarded and not is_ours and line and Path(line["class"]).stem not in READ_NEW:
            raise IncompatibleError(
                f"mlx-lm may not read the positions of this {model_type}: its config.json has the fields of "
                f"transformers 5 alone, which most of mlx-lm's classes do not read. Write rope_theta and "
                f"rope_scaling into it, too."
            )
        if extended.guarded and is_ours:
            raise IncompatibleError(
                f"mlx-lm may stop on this {model_type}: save_pretrained wrote its config.json with the fields of "
                f"transformers 5, and most of mlx-lm's classes read those of transformers 4. Write both: "
                f"ctxext.save(ctxext.load(THIS), NEW)."
            )
        why = _why_not_exact(extended)
        notes = [
            f"config.json is enough, up to {extended.target_length} tokens, if ctxext patch or ctxext.save wrote it; "
            f"on a config.json of save_pretrained alone, mlx-lm may stop. mlx-lm has no limit of its own."
        ]
        notes += [*([why] if why else []), *extended.length_notes]
        return self.serving(extended, notes=notes, exact=why is None)


def _version() -> str:
    return f"mlx-lm {read_table(TABLE)['versions']['mlx_lm']}"


def _line(extended: ExtensionInConfig) -> dict[str, Any]:
    """Return the table's entry for this model type; empty if there is none."""
    line: dict[str, Any] = read_table(TABLE)["types"].get(extended.config.model_type, {})  # a part has another class
    return line


def _why_not_exact(extended: ExtensionInConfig) -> str | None:
    """Return why mlx-lm is not known to compute the extension; None if it was seen to.

    Raises:
        IncompatibleError: if mlx-lm was seen to stop, or to compute other positions.
    """
    kind, form, line = extended.config.model_type, form_of(extended), _line(extended)
    if not line:
        return f"Not proven: {_version()} has no class for {kind}, or its models were not tried."
    measured = line["forms"].get(form, {})
    error = measured.get("error")
    if error is None:
        return f"Not proven: this {extended.rope_type} was not tried on a {kind}."
    right = is_close(error, measured["matters"])
    if not right and not runs(line):  # what differs without extension proves nothing of one
        noise = line["noise"]
        size = f"by {noise:g} nats" if isinstance(noise, float) else noise
        return f"Not proven: tiny models of this type differ from transformers there even without extension ({size})."
    if isinstance(error, str):
        raise IncompatibleError(
            f"{_version()} stops on this {kind}: its class ({line['class']}) does not read this "
            f"{extended.rope_type} ({error}). {_OTHERWISE} {extended.way_to_run} otherwise."
        )
    if not right:
        raise IncompatibleError(
            f"{_version()} would run this {kind} with other positions: its class ({line['class']}) does not read all "
            f"of this {extended.rope_type}. It was {error:g} nats from the patched model; the unextended model is "
            f"{measured['matters']:g} away. {_OTHERWISE} {extended.way_to_run} otherwise."
        )
    if (window := extended.narrow_window) and not line["window"]:
        return f"Not proven: this {kind} has a sliding window of {window} tokens; the models that were run had none."
    if extended.rope_type == "dynamic":
        return "mlx-lm keeps cached keys at the base they were computed with, so decoding differs from one forward."
    if extended.has_two_sets:
        return "mlx-lm takes long_factor for every text, short ones included."
    return None


_OTHERWISE = "Extend the checkpoint by a method that mlx-lm reads (for most types ntk or abf, another base)."


def form_of(extended: ExtensionInConfig) -> str:
    """Return the name of this scaling in the table."""
    rope, kind = extended.rope, extended.rope_type
    if kind == "yarn" and rope.get("truncate") is False:
        return "yarn_truncate"
    if kind == "yarn" and extended.scales_scores:
        return "yarn_scores" if rope.get("attention_factor") is None else "yarn_scores_attention"
    if kind == "yarn" and (extended.leaves_factor_open or {"mscale", "mscale_all_dim"} & rope.keys()):
        return "yarn_untried"  # mlx-lm computes no factor, and reads mscale and mscale_all_dim one by one
    if kind == "yarn":
        return "yarn" if abs(extended.scale - extended.yarn_scale) < 1e-6 else "yarn_attention"
    if longrope_scales(extended):
        return "longrope_attention"
    return kind
