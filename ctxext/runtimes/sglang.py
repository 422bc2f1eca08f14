"""Export for SGLang, known from its source for the model classes named here, and never run.

SGLang takes ``rope_parameters`` in the form of transformers 5, but reads YaRN's attention factor under another name
(``attn_factor``, a multiple of its default) and longrope's as ``short_mscale`` and ``long_mscale``. An override of
``rope_parameters`` is merged into the files' fields. Classes differ: Gemma's passes on the base and no scaling at all,
so only classes that were read are called exact.

Source: sglang 0.5.23 (srt/layers/rotary_embedding/factory.py:125-443, yarn.py:91-181 and rope_variant.py:37-130 there;
    srt/utils/hf_transformers/common.py:501 and :677, config.py:405-422; srt/models/llama.py:322, mistral.py,
    qwen2.py:273, qwen3.py:381, gemma.py:178; srt/configs/model_config.py:962 for drafts, :1291).
"""

from __future__ import annotations

import math

from ctxext.core.scaling import raised_lengths
from ctxext.core.subject import path_to
from ctxext.errors import IncompatibleError
from ctxext.files import JsonObject
from ctxext.runtimes.base import (
    USUAL_YARN,
    Export,
    ExtensionInConfig,
    Runtime,
    longest,
    longrope_scales,
    overridden,
    require_known_type,
    whole,
    with_whole_table,
)

VERSION = "0.5.23"
# Model types whose classes pass the config's rope parameters on unchanged.
READ = ("llama", "mistral", "qwen2", "qwen3")
# Model types whose classes pass on the base only.
BASE_ONLY = ("gemma",)


class SGLang(Runtime):
    """SGLang, as ``python -m sglang.launch_server`` starts it."""

    name = "sglang"
    start = ("python", "-m", "sglang.launch_server", "--model-path")
    length_flag = "--context-length"
    drafts = "SGLang gives them the same config.json and arguments (by its source)."

    def export(self, extended: ExtensionInConfig) -> Export:
        """Return the arguments for ``python -m sglang.launch_server``.

        Raises:
            IncompatibleError: if SGLang refuses the rope type, or would drop the scaling.
        """
        _refuse(extended)
        extended = with_whole_table(extended)
        rope, overrides = extended.rope, extended.unsaid | raised_lengths(extended.text, extended.target_length)
        notes, exact = extended.length_notes, True
        if extended.rope_type == "dynamic":
            overrides["max_position_embeddings"] = extended.trained_length
            notes.append(
                f"Dynamic scaling is static in SGLang: every text gets the base that transformers uses at "
                f"{_end_of_dynamic(extended)} tokens."
            )
            exact = False
        elif extended.target_length > _promised(extended):
            overrides["max_position_embeddings"] = extended.target_length
        is_told, scale, stays = "rope_parameters" in overrides, _scale(extended), _neutral(extended)
        in_full = extended.leaves_factor_open or (extended.rope_type == "yarn" and is_told)
        if in_full or scale or (stays and is_told):
            usual = USUAL_YARN if in_full else {}  # an override keeps the files' value of every key it leaves out
            overrides["rope_parameters"] = whole(extended, usual | rope | stays | scale)
        if scale:
            notes.append(f"SGLang does not read attention_factor; {' and '.join(scale)} replace it.")
        if extended.has_two_sets:
            notes.append(
                f"SGLang chooses between short_factor and long_factor once per batch: one position above "
                f"{extended.trained_length} gives long_factor to all texts in it."
            )
            exact = False
        path = path_to(extended.config, extended.text)
        if overrides and len(path) > 1:
            raise IncompatibleError(
                f"SGLang {VERSION} would drop the rest of this {extended.config.model_type}'s {path[0]}: it merges "
                f"arguments one level deep, not into {'.'.join(path)}. Write a copy (ctxext patch), and export that."
            )
        if extended.config.model_type not in READ or extended.layer_type is not None:
            notes.append(
                f"Not proven: SGLang {VERSION}'s code for {extended.config.model_type} was not read, only that for "
                f"{', '.join(READ)}."
            )
            exact = False
        elif window := extended.narrow_window:
            notes.append(f"SGLang {VERSION} has no sliding window here: it attends beyond the {window} tokens.")
            exact = False
        flags = overridden(extended, "--json-model-override-args", overrides)
        return self.serving(extended, *flags, notes=notes, exact=exact)


def _refuse(extended: ExtensionInConfig) -> None:
    model_type = extended.text.model_type
    require_known_type("SGLang", extended)
    if extended.loses_factor or (model_type in BASE_ONLY and extended.rope_type != "default"):
        raise IncompatibleError(
            f"SGLang {VERSION} would run this {model_type} unextended: it reads the base and no factor. Extend the "
            f"checkpoint by another base (ntk or abf). {extended.way_to_run} otherwise."
        )
    if extended.rope_type == "dynamic" and extended.target_length > _end_of_dynamic(extended):
        raise IncompatibleError(
            f"SGLang {VERSION} does not serve {extended.target_length} tokens of this {model_type}. For rope_type "
            f"'dynamic' the limit is {_end_of_dynamic(extended)} tokens (max_position_embeddings times the factor). "
            f"Give --factor the whole stretch, or choose a static method (yarn or ntk)."
        )
    stays = [name for name in ("original_max_position_embeddings", "alpha") if name in extended.files]
    if extended.rope_type == "dynamic" and stays:
        raise IncompatibleError(
            f"SGLang {VERSION} would serve another length or base of this {model_type}. It keeps {' and '.join(stays)} "
            f"of config.json with the dynamic scaling in arguments. Write a copy (ctxext patch), and export that."
        )


def _end_of_dynamic(extended: ExtensionInConfig) -> int:
    """Return the length in tokens at which SGLang fixes dynamic scaling."""
    return math.floor(extended.trained_length * float(extended.rope["factor"]) + 1e-6)


def _promised(extended: ExtensionInConfig) -> int:
    """Return the longest text, in tokens, that SGLang derives from a config."""
    rope = extended.rope
    scales = extended.layer_type is None and extended.rope_type != "llama3"
    scales &= "original_max_position_embeddings" not in rope
    return int(longest(extended) * (rope.get("factor", 1.0) if scales else 1.0))


def _neutral(extended: ExtensionInConfig) -> JsonObject:
    """Return values that neutralise keys of the files which a merged override would keep."""
    values: JsonObject = {"attn_factor": 1.0, "extrapolation_factor": 1.0, "mscale": None, "mscale_all_dim": None}
    values |= dict.fromkeys(("short_mscale", "long_mscale"), extended.scale)
    return {name: value for name, value in values.items() if name in extended.files.keys() - extended.rope.keys()}


def _scale(extended: ExtensionInConfig) -> JsonObject:
    """Return the keys that give SGLang the scale of cos and sin, if its default would differ."""
    rope = extended.rope
    if extended.rope_type != "yarn":
        return longrope_scales(extended)
    default = 0.1 * math.log(max(rope["factor"], 1.0)) + 1
    if rope.get("mscale") is not None and rope.get("mscale_all_dim") is not None:
        above, below = (0.1 * rope[name] * math.log(rope["factor"]) + 1 for name in ("mscale", "mscale_all_dim"))
        default = above / below
    return {"attn_factor": extended.scale / default} if abs(extended.scale / default - 1) > 1e-6 else {}
