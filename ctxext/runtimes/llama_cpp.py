"""Export for llama.cpp, known by running its converter and llama.cpp itself.

``llama_cpp.json`` next to this file holds, for every model type, the class of the converter that writes its GGUF and,
for every rope type, the distance of a real llama.cpp from the patched model; ``scripts/llama_cpp_table.py`` measures
it. The flags always hold the whole scaling, because converters leave out keys that they do not know, and llama.cpp
never reads some keys that they write (``yarn_beta_fast``, ``yarn_beta_slow``). Flags replace the keys of a GGUF, so
repeating a key is safe.

A file can hold scalings that flags cannot express: some architectures load a tensor of divisors, one for each
frequency, which expresses any frequencies. With such a tensor ``rope.scaling.type`` is "none", so that nothing else
divides; ``rope.scaling.attn_factor`` multiplies cos and sin. Other architectures refuse a file with an unknown tensor;
their files can hold the content of flags, in the keys that llama.cpp starts from where no flag is given.

BLOOM has ALiBi there, with slopes that no setting changes.

Source: llama.cpp 0c1e57098 as vendored by llama_cpp_python 0.3.36 (conversion/, common/arg.cpp,
    src/llama-context.cpp:114-214, src/llama-model.cpp:1406-1432 and :2329-2350; for ALiBi src/models/bloom.cpp:18,
    src/llama-graph.cpp:2620-2722; for the tensor src/models/llama.cpp:66
    and its like, get_rope_factors in src/llama-model.cpp:2337, ggml_rope_cache_init in ggml/src/ggml-cpu/ops.cpp:6204;
    for windows LLM_KV_ATTENTION_SLIDING_WINDOW in src/models/; for slots tools/server/server-context.cpp:1213).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from ctxext.errors import IncompatibleError
from ctxext.files import JsonObject
from ctxext.runtimes.base import (
    Export,
    ExtensionInConfig,
    OwnALiBi,
    Runtime,
    is_close,
    longest,
    longrope_scale_of,
    read_table,
    runs,
)

TABLE = Path(__file__).with_name("llama_cpp.json")
# The model types whose ALiBi llama.cpp computes and its converter knows, named as their architectures.
ALIBI = ("bloom",)
# The architectures of the table that have sliding windows; phi3 reads the key and switches its windows off.
WINDOWED = (
    *("afmoe", "cohere2moe", "exaone-moe", "exaone4", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt-oss"),
    *("granite_swa", "laguna", "lfm2", "olmo2"),
)
# The tensor of divisors: float32, one for each pair of rotated dimensions.
DIVISORS = "rope_freqs.weight"


class LlamaCpp(Runtime):
    """llama.cpp, as ``llama-server`` and ``llama-cli`` start it with a GGUF file."""

    name = "llama.cpp"
    start = ("llama-server", "-m")
    reads_gguf = True
    length_flag = "-c"
    drafts = "llama-server gives them the same flags and GGUF file (by its source)."

    def export(self, extended: ExtensionInConfig) -> Export:
        """Return flags for ``llama-server`` and ``llama-cli``, with a GGUF converted by ``convert_hf_to_gguf.py``.

        Where flags cannot express the extension, and a copy of the GGUF file can, the flags are for such a copy.

        Raises:
            IncompatibleError: if llama.cpp would run the model without the extension, or with another extension.
        """
        _refuse(extended)
        line = _line(extended)
        seen = [verdict(line, _form(extended), from_original=original)[0] for original in (False, True)]
        ways = [] if seen == [False, False] else [_by_flags(extended, line)]
        if holds_divisors(extended):
            made = in_file(extended)
            ways.append(dataclasses.replace(made, notes=(_COPY, *made.notes)))
        if not ways:
            raise IncompatibleError(
                f"llama.cpp would run this {extended.text.model_type} with other positions: its converter "
                f"({line['converter']}) loses rope_type {extended.rope_type!r}, and no flag brings it back. "
                f"{_OTHERWISE}"
            )
        return next((way for way in ways if way.exact), ways[0])

    def export_own_alibi(self, extended: OwnALiBi) -> Export:
        """Return the flags for a model trained with ALiBi, which keeps its slopes.

        Raises:
            IncompatibleError: if llama.cpp knows the model's rotary form only, or not at all.
        """
        if extended.model_type not in ALIBI:
            raise IncompatibleError(
                f"llama.cpp was not seen to run the ALiBi of {extended.model_type}, only that of {', '.join(ALIBI)}: "
                f"the converter of {_version()} has no class for it, or one that rotates. Serve it with ctxext serve."
            )
        flags: tuple[str, ...] = ("--flash-attn", "off")
        if extended.unsaid:
            flags = ("--override-kv", f"{extended.model_type}.context_length=int:{extended.target_length}", *flags)
        note = (
            "The slopes are the checkpoint's own and distances are exact. With flash attention distances would be "
            "rounded to float16, so to even numbers from 2,048 tokens on."
        )
        return self.serving(extended, *flags, notes=[note])


def in_file(extended: ExtensionInConfig) -> Export:
    """Return the flags for a GGUF file that holds the extension, in a tensor of divisors or in keys; see ``keys_of``.

    Raises:
        IncompatibleError: if llama.cpp does not load such a file for this model, or was not seen to.
    """
    _refuse(extended)
    if not holds_divisors(extended) and (problem := _why_no_keys(extended)) is not None:
        why = f"As a tensor: {_why_no_divisors(extended)}. As keys: {problem.rstrip('.')}"
        raise IncompatibleError(
            f"A GGUF file of this {extended.config.model_type} cannot hold the extension. {why}. Leave --gguf out to "
            f"get flags instead."
        )
    notes, exact = _differences(extended)
    notes += extended.length_notes
    if abs(extended.scale - 1) > 1e-6:
        notes.append(
            "Leave llama-server's --context-shift off: it would multiply shifted keys by the attention factor once "
            "more (read in its src/llama-kv-cache.cpp, not run)."
        )
    return LlamaCpp().serving(extended, notes=notes, exact=exact, in_file=True)


def holds_divisors(extended: ExtensionInConfig) -> bool:
    """Return whether the file gets a tensor of divisors, instead of the keys that flags would set."""
    return _why_no_divisors(extended) is None


def _why_no_keys(extended: ExtensionInConfig) -> str | None:
    """Return why keys of the file cannot express the extension; None if they mean the same as proven flags."""
    rope, kind = extended.rope, extended.rope_type
    if extended.layer_type is not None:
        return "keys serve all layers, and only some are extended"
    if kind not in ("default", "linear", "yarn") or rope.get("truncate") is False or extended.scales_scores:
        return f"GGUF keys cannot express this {kind} with these parameters"
    if kind == "yarn" and (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1) != (32, 1):
        return "llama.cpp reads beta_fast and beta_slow from flags only"
    proven, why = verdict(_line(extended), _form(extended), from_original=True)
    return None if proven else why


def _why_no_divisors(extended: ExtensionInConfig) -> str | None:
    """Return why the GGUF file of a model type cannot use a tensor of divisors; None if it was proven to work.

    One tensor expresses all frequencies, so one proof for a model type holds for every method.
    """
    if extended.layer_type is not None:
        return f"one {DIVISORS} serves all layers, and only some are extended"
    measured = _line(extended).get("written", {})
    error = measured.get("error", "this model type was not tried")
    if "matters" in measured and is_close(error, measured["matters"]):
        return None
    reason = error if isinstance(error, str) else f"{error:g} nats from the patched model"
    return f"{_version()} was not seen to load {DIVISORS} for this model type ({reason})"


def architecture_of(extended: ExtensionInConfig) -> str:
    """Return llama.cpp's name for the architecture, the prefix of the keys of its GGUF file."""
    return str(_line(extended)["architecture"])


def keys_of(extended: ExtensionInConfig, architecture: str) -> dict[str, str | int | float]:
    """Return the keys of a GGUF file that go with the tensor of divisors, or replace it."""
    keys: dict[str, str | int | float] = {
        "context_length": extended.target_length,
        "rope.scaling.type": "none",
        "rope.scaling.attn_factor": float(extended.scale),
    }
    if not holds_divisors(extended):
        keys["rope.freq_base"] = float(extended.rope["rope_theta"])
        if extended.rope_type != "default":
            keys["rope.scaling.type"] = extended.rope_type
            keys["rope.scaling.factor"] = float(extended.rope["factor"])
        if extended.rope_type == "yarn":  # llama.cpp computes YaRN's default scale from the factor itself
            keys["rope.scaling.original_context_length"] = extended.trained_length
            keys["rope.scaling.attn_factor"] = float(attention_factor(extended))
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def is_scaling(key: str) -> bool:
    """Return whether a key of a GGUF file scales positions, and so must go where a tensor of divisors does."""
    # ``finetuned`` is kept: for some architectures it tells whether they rotate at all.
    return key.partition(".")[2].startswith(("rope.scaling.", "rope.scale_linear")) and not key.endswith(".finetuned")


def _by_flags(extended: ExtensionInConfig, line: JsonObject) -> Export:
    stays = _stays(extended, line)
    proven, why = verdict(line, _form(extended), from_original=bool(extended.unsaid) and not stays)
    notes, exact = _losses(extended)
    if not proven:
        notes.append(why)
    notes += extended.length_notes
    if extended.unsaid:
        by_flags = verdict(line, _form(extended), from_original=True)[0] is not False
        notes.insert(0, stays or (_UNCONVERTED if by_flags else _CONVERT_FIRST))
        windowed = line.get("architecture") in (None, *WINDOWED)  # the others have no window to lift
        if windowed and {"sliding_window", "layer_types"} & extended.unsaid.keys():
            notes.append("No flag lifts the sliding window: convert the extended checkpoint (ctxext patch).")
            exact = False
    else:
        notes.insert(0, "Convert this checkpoint and pass all flags: converters leave out a part of the scaling.")
    if _is_capped(extended):
        raise_it = (
            f"llama-server caps its slots at the length in the GGUF. Raise it: --override-kv ARCH.context_length=int:"
            f"{extended.target_length}, with the file's general.architecture for ARCH."
        )
        notes.insert(1, _RAISED if line.get("architecture") else raise_it)
    overrides = _overrides(extended, line)
    flags = (*flags_of(extended), *(("--override-kv", overrides) if overrides else ()))
    return LlamaCpp().serving(extended, *flags, notes=notes, exact=exact and proven is True)


def _stays(extended: ExtensionInConfig, line: JsonObject) -> str:
    """Return a note where a GGUF of the original scales positions by a tensor, whatever the flags are; else ""."""
    kind = extended.files.get("rope_type")
    has_tensor = kind in ("llama3", "longrope") and line.get("forms", {}).get(kind, {}).get("tensors", True)
    return _STAYS.format(kind) if has_tensor else ""


def _is_capped(extended: ExtensionInConfig) -> bool:
    """Return whether the GGUF names a shorter length, at which llama-server stops."""
    return bool(extended.unsaid) or extended.target_length > longest(extended)


_RAISED = "--override-kv raises the length in the GGUF, at which llama-server caps its slots."
_UNCONVERTED = "These flags are for a GGUF of the original checkpoint."
_CONVERT_FIRST = (
    "No flag expresses these frequencies on a GGUF of the original checkpoint. Write the extended checkpoint (ctxext "
    "patch) and convert that one; the flags are for that GGUF."
)
_STAYS = (
    "A GGUF of the original checkpoint may hold its rope_type {!r} in a tensor, which no flag turns off. Write the "
    "extended checkpoint (ctxext patch) and convert that one; the flags are for that GGUF."
)
_COPY = (
    "Flags alone cannot express this extension. Add --gguf IN.gguf OUT.gguf to the same command: it writes a copy of "
    "the model's GGUF file with the extension in it. These flags are for that copy."
)
# Read in its tools/completion/completion.cpp at 0af8217; not run.
_OWN = {
    "self_extend": "Its llama-completion has a Self-Extend of its own, for a GGUF of the unextended checkpoint: "
    "-c TARGET --grp-attn-n GROUP --grp-attn-w WINDOW, the window a multiple of the group. There the window moves in "
    "steps of its own width, so results differ from ctxext's. llama-server has no Self-Extend. "
}
_OTHERWISE = "Choose a static method that llama.cpp knows: yarn, pi (linear), or ntk and abf (another base)."


def _version() -> str:
    return str(read_table(TABLE)["versions"]["converter"])


def _line(extended: ExtensionInConfig) -> JsonObject:
    """Return the table's entry for this model type; empty if there is none.

    The outer model type counts, not the text part's: Mistral3's text part is a mistral, but its GGUF is not.
    """
    line: JsonObject = read_table(TABLE)["types"].get(extended.config.model_type, {})
    return line


def verdict(line: JsonObject, form: str, *, from_original: bool) -> tuple[bool | None, str]:
    """Return whether a real llama.cpp with all flags computed the same as the patched model; None if not measured.

    Args:
        from_original: True to start from the GGUF of the original checkpoint, not of the extended checkpoint.

    Returns:
        The verdict, and the reason if it is not True.
    """
    measured = line.get("forms", {}).get(form, {})
    result = measured.get("original" if from_original else "extended")
    if form in ("llama3", "longrope") and measured.get("tensors") == []:
        return False, f"The converter of {_version()} writes no factors for this model type, and no flag sets them."
    if not isinstance(result, float) or math.isnan(result):
        missing = "this model type was not tried" if not line else f"rope_type {form!r} was not tried"
        of_line, of_form = ("aborts", "fails", "not_run"), ("refused", "fails")
        reasons = (*(line.get(key) for key in of_line), *(measured.get(key) for key in of_form), result)
        why = next((reason for reason in reasons if isinstance(reason, str)), missing)
        if why in (line.get("fails"), measured.get("fails")):
            why = (
                f"a small model of ctxext's could not be converted ({why.strip(': ')}); yours may be. Compare the two."
            )
        return None, f"Not proven for {_version()}: {why}"
    if is_close(result, measured["matters"]):
        return True, ""
    if not runs(line) or result <= measured["matters"] / 10:
        return None, f"Not proven for {_version()}: tiny models of this type differ there even without extension."
    return False, (
        f"{_version()} computes other positions for this model type, whatever the flags. It was {result:g} nats from "
        f"the patched model; the unextended model is {measured['matters']:g} away."
    )


def _form(extended: ExtensionInConfig) -> str:
    """Return the name of this scaling in the table."""
    kind = extended.rope_type
    if kind != "yarn":
        return "default" if kind == "proportional" else kind
    usual = extended.scales_scores or abs(attention_factor(extended) - 1) < 1e-6
    return "yarn" if usual else "yarn_attention"


def attention_factor(extended: ExtensionInConfig) -> float:
    """Compute YaRN's scale as a multiple of the scale that llama.cpp computes from the factor."""
    return extended.scale / extended.yarn_scale


def _refuse(extended: ExtensionInConfig) -> None:
    kind, model_type = extended.rope_type, extended.text.model_type
    if not extended.stock:
        raise IncompatibleError(
            f"llama.cpp cannot run {extended.method!r}: its converter does not know rope_type "
            f"{kind!r} and would write a GGUF without the extension. {_OWN.get(extended.method, '')}{_OTHERWISE}"
        )
    if kind == "dynamic":
        raise IncompatibleError(
            f"llama.cpp has no dynamic scaling: its converter drops rope_type 'dynamic', and the GGUF would run "
            f"unextended. {_OTHERWISE}"
        )
    if extended.loses_factor:
        raise IncompatibleError(
            f"llama.cpp would run this {model_type} unextended: its converter drops the factor of rope_type {kind!r}. "
            f"Choose another base: ntk or abf."
        )
    line = _line(extended)
    if "converter" in line and line["converter"] is None:
        raise IncompatibleError(
            f"llama.cpp cannot run this {extended.config.model_type}: the converter of {_version()} has no class for "
            f"it. Serve it with vLLM or transformers."
        )


def flags_of(extended: ExtensionInConfig) -> tuple[str, ...]:
    """Return the whole scaling as flags, including values that a GGUF may hold already."""
    rope, kind = extended.rope, extended.rope_type
    base = ("--rope-freq-base", _number(rope["rope_theta"]))
    if kind in ("default", "proportional"):
        return ("--rope-scaling", "none", *base)
    if kind == "linear":
        return ("--rope-scaling", "linear", "--rope-scale", _number(rope["factor"]), *base)
    if kind != "yarn":  # a tensor in the GGUF holds the rest
        return base
    return (
        *("--rope-scaling", "yarn", "--rope-scale", _number(rope["factor"])),
        *("--yarn-orig-ctx", str(extended.trained_length)),
        *("--yarn-beta-fast", _number(rope.get("beta_fast") or 32)),
        *("--yarn-beta-slow", _number(rope.get("beta_slow") or 1)),
        *base,
    )


def _number(value: float | int) -> str:
    return f"{value:.9g}"  # llama.cpp reads a float32, which nine digits determine


def _overrides(extended: ExtensionInConfig, line: JsonObject) -> str:
    """Return the value of --override-kv: keys of the GGUF that no other flag sets."""
    arch, keys = line.get("architecture"), []
    if arch and _is_capped(extended):
        keys.append(f"{arch}.context_length=int:{extended.target_length}")
    if arch and _form(extended) == "yarn_attention":
        keys.append(f"{arch}.rope.scaling.attn_factor=float:{_number(attention_factor(extended))}")
    if arch and extended.rope_type == "longrope" and abs(extended.scale - _baked(extended)) > 1e-6:
        keys.append(f"{arch}.rope.scaling.attn_factor=float:{_number(extended.scale)}")
    return ",".join(keys)


def _losses(extended: ExtensionInConfig) -> tuple[list[str], bool]:
    """Return notes on values that flags cannot carry, and whether llama.cpp is exact nevertheless."""
    rope, kind = extended.rope, extended.rope_type
    losses, exact = _differences(extended)
    if kind == "yarn":
        if rope.get("truncate") is False:
            losses.append(
                "llama.cpp always rounds the ends of YaRN's ramp to whole dimensions (truncate=False is lost)."
            )
            exact = False
        if extended.scales_scores and rope.get("mscale") != rope["mscale_all_dim"]:
            losses.append("mscale and mscale_all_dim differ; how llama.cpp combines them is not verified.")
            exact = False
        if _form(extended) == "yarn_attention":
            losses.append(
                f"llama.cpp replaces the attention factor {extended.scale:.6g} by YaRN's default, whatever the GGUF "
                f"and --yarn-attn-factor say. rope.scaling.attn_factor={attention_factor(extended):.9g} in the GGUF "
                f"(--override-kv) corrects the default."
            )
    if kind == "longrope" and abs(extended.scale - _baked(extended)) > 1e-6:
        losses.append(
            f"The converter writes the attention factor {_baked(extended):.6g}, not {extended.scale:.6g}; "
            f"--override-kv replaces it."
        )
    return losses, exact


def _baked(extended: ExtensionInConfig) -> float:
    """Return the attention factor that the converter writes for longrope, whatever the config says."""
    return longrope_scale_of(extended.text.max_position_embeddings, extended.trained_length)


def _differences(extended: ExtensionInConfig) -> tuple[list[str], bool]:
    """Return notes on differences that neither flags nor keys remove, and whether there are none."""
    notes = []
    if extended.has_two_sets:
        notes.append(
            f"llama.cpp chooses between short_factor and long_factor once, by -c (above {extended.trained_length} "
            f"long_factor). A copy that --gguf writes holds long_factor only, for short texts too."
        )
    window, architecture = extended.narrow_window, _line(extended).get("architecture")
    if window and architecture and architecture not in WINDOWED:
        notes.append(f"llama.cpp has no sliding window for this architecture: it attends beyond the {window} tokens.")
    return notes, not notes
