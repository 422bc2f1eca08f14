"""What llama.cpp must be told, and what it then computes, as found by running its converter and itself.

``llama_cpp.json`` beside this file says for every model type which class of the converter writes its GGUF and how far
a real llama.cpp was from the patched model, per rope type; ``scripts/llama_cpp_table.py`` makes it. The flags say the
whole scaling every time, because converters leave out what they do not know and llama.cpp never reads some keys that
they do write (``yarn_beta_fast``, ``yarn_beta_slow``); flags replace what a GGUF holds, so that repeating it is safe.

What no flag says can stand in the file: some architectures load a tensor of divisors, one for each frequency, and that
expresses any frequencies. Beside it ``rope.scaling.type`` is "none", so that nothing else divides;
``rope.scaling.attn_factor`` multiplies cos and sin. Other architectures refuse to load a file with one tensor too many;
their files can hold what flags say, in the keys that llama.cpp starts from where no flag is given.

BLOOM has ALiBi there, with slopes that nothing changes.

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
from typing import Any, ClassVar

from ctxext.errors import IncompatibleError
from ctxext.runtimes.base import (
    Export,
    ExtensionInConfig,
    OwnALiBi,
    Runtime,
    is_close,
    longest,
    longrope_scale_of,
    read_table,
)
from ctxext.surgery.windows import window_of

TABLE = Path(__file__).with_name("llama_cpp.json")
# The model types whose ALiBi it computes and its converter knows; their names are those of their architectures.
ALIBI = ("bloom",)
# The architectures of the table that have sliding windows; phi3 reads its key and switches them off.
WINDOWED = (
    *("afmoe", "cohere2moe", "exaone-moe", "exaone4", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt-oss"),
    *("granite_swa", "laguna", "lfm2", "olmo2"),
)
# The tensor of divisors, half as many as dimensions rotate, in float32.
DIVISORS = "rope_freqs.weight"


class LlamaCpp(Runtime):
    """llama.cpp, as ``llama-server`` and ``llama-cli`` start it with a GGUF file."""

    name: ClassVar[str] = "llama.cpp"
    length_flag: ClassVar[str] = "-c"

    def start(self, checkpoint: str, gguf: str) -> tuple[str, ...]:
        return "llama-server", "-m", gguf

    def export(self, extended: ExtensionInConfig) -> Export:
        """Flags for ``llama-server`` and ``llama-cli``, with a GGUF converted by ``convert_hf_to_gguf.py``.

        Where flags do not say it all, and a copy of the GGUF file does, the flags are for such a copy.

        Raises:
            IncompatibleError: if llama.cpp would run the model without the extension, or with another one.
        """
        _refuse(extended)
        line = _line(extended)
        seen = [verdict(line, _form(extended), from_original=original)[0] for original in (False, True)]
        ways = [] if seen == [False, False] else [_by_flags(extended, line)]
        ways += [_to_copy(extended)] if _why_no_divisors(extended) is None else []
        if not ways:
            raise _other_positions(extended)
        return next((way for way in ways if way.exact), ways[0])

    def export_own_alibi(self, extended: OwnALiBi) -> Export:
        """Flags for a model that has ALiBi of its own and keeps its slopes.

        Raises:
            IncompatibleError: if llama.cpp knows the model's rotary form only, or not at all.
        """
        if extended.model_type not in ALIBI:
            raise IncompatibleError(
                f"llama.cpp was not seen to run the ALiBi of {extended.model_type}, only that of {', '.join(ALIBI)}: "
                f"the converter of {_version()} has no class for it, or one that rotates. Serve it with transformers."
            )
        flags: tuple[str, ...] = (self.length_flag, str(extended.target_length), "--flash-attn", "off")
        if extended.unsaid:
            flags = ("--override-kv", f"{extended.model_type}.context_length=int:{extended.target_length}", *flags)
        note = (
            "Its slopes are the checkpoint's own and distances are exact. With flash attention they would be rounded "
            "to float16, so to even numbers from 2,048 tokens on."
        )
        return Export(target=self.name, flags=flags, notes=(note,))


def _to_copy(extended: ExtensionInConfig) -> Export:
    made = in_file(extended)
    return dataclasses.replace(made, notes=(_COPY, *made.notes))


def in_file(extended: ExtensionInConfig) -> Export:
    """Flags for a GGUF file that holds the extension, in a tensor of divisors or in keys; see ``keys_of``.

    Raises:
        IncompatibleError: if llama.cpp does not load such a file for this model, or was not seen to.
    """
    _refuse(extended)
    by_keys = [] if holds_divisors(extended) else _why_no_keys(extended)
    if by_keys:
        why = f"{_why_no_divisors(extended)}; and keys do not say it, because {by_keys[0]}"
        raise IncompatibleError(
            f"A GGUF file of this {extended.config.model_type} cannot hold the extension: {why}. Leave --gguf out to "
            f"see what flags say."
        )
    notes, exact = _differences(extended)
    if extended.length_note:
        notes.append(extended.length_note)
    if abs(extended.scale - 1) > 1e-6:
        notes.append(
            "Leave llama-server's --context-shift off: it would multiply the keys that it moves by the attention "
            "factor once more (read in its src/llama-kv-cache.cpp, not run)."
        )
    flags = ("-c", str(extended.target_length))
    return Export(target="llama.cpp", flags=flags, notes=tuple(notes), exact=exact, in_file=True)


def holds_divisors(extended: ExtensionInConfig) -> bool:
    """Whether the file gets a tensor of divisors, and not the keys that flags stand for."""
    return _why_no_divisors(extended) is None


def _why_no_keys(extended: ExtensionInConfig) -> list[str]:
    """What speaks against saying the extension in keys of the file; nothing where they mean what proven flags mean."""
    rope, kind = extended.rope, extended.rope_type
    if extended.layer_type is not None:
        return ["they serve all layers, and only some are extended"]
    if kind not in ("default", "linear", "yarn") or rope.get("truncate") is False or extended.scales_scores:
        return [f"they have no word for this {kind}"]
    if kind == "yarn" and (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1) != (32, 1):
        return ["llama.cpp reads beta_fast and beta_slow from flags alone"]
    proven, why = verdict(_line(extended), _form(extended), from_original=True)
    return [] if proven else [why]


def _why_no_divisors(extended: ExtensionInConfig) -> str | None:
    """What speaks against a tensor of divisors in the GGUF file of a model type; None where it was seen to be right.

    One tensor expresses all frequencies, so that one proof for a model type is one for every method.
    """
    if extended.layer_type is not None:
        return f"one {DIVISORS} serves all layers, and only some are extended"
    found = _line(extended).get("written", {})
    error = found.get("error", "this model type was not tried")
    if "matters" in found and is_close(error, found["matters"]):
        return None
    said = error if isinstance(error, str) else f"{error:g} nats from the patched model"
    return f"{_version()} was not seen to load {DIVISORS} for this model type ({said})"


def architecture_of(extended: ExtensionInConfig) -> str:
    """llama.cpp's name for the model, which stands before the keys of its GGUF file."""
    return str(_line(extended)["architecture"])


def keys_of(extended: ExtensionInConfig, architecture: str) -> dict[str, str | int | float]:
    """What a GGUF file says beside the tensor of divisors, or in its place."""
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
        if extended.rope_type == "yarn":  # whose own scale llama.cpp computes from the factor
            keys["rope.scaling.original_context_length"] = extended.trained_length
            keys["rope.scaling.attn_factor"] = float(attention_factor(extended))
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def is_scaling(key: str) -> bool:
    """Whether a key of a GGUF file scales positions, and must not do so beside a tensor of divisors."""
    # ``finetuned`` is kept: of some architectures it says whether they rotate at all.
    return key.partition(".")[2].startswith(("rope.scaling.", "rope.scale_linear")) and not key.endswith(".finetuned")


def _by_flags(extended: ExtensionInConfig, line: dict[str, Any]) -> Export:
    proven, why = verdict(line, _form(extended), from_original=bool(extended.unsaid))
    notes, exact = _losses(extended)
    if not proven:
        notes.append(why)
    if extended.length_note:
        notes.append(extended.length_note)
    if extended.unsaid:
        by_flags = verdict(line, _form(extended), from_original=True)[0] is not False
        notes.insert(0, _UNCONVERTED if by_flags else _CONVERT_FIRST)
        if "sliding_window" in extended.unsaid or "layer_types" in extended.unsaid:
            notes.append("No flag lifts the sliding window: convert the extended checkpoint (ctxext patch).")
            exact = False
    else:
        notes.insert(0, "Convert this checkpoint and pass all flags: converters leave out a part of the scaling.")
    if _is_capped(extended):
        notes.insert(1, _RAISED if line.get("architecture") else _raise_it(extended.target_length))
    overrides = _overrides(extended, line)
    flags = (*flags_of(extended), *(("--override-kv", overrides) if overrides else ()))
    flags = (*flags, "-c", str(extended.target_length))
    return Export(target="llama.cpp", flags=flags, notes=tuple(notes), exact=exact and proven is True)


def _is_capped(extended: ExtensionInConfig) -> bool:
    """Whether the GGUF names a shorter length, beyond which llama-server serves nothing."""
    return bool(extended.unsaid) or extended.target_length > longest(extended)


def _raise_it(length: int) -> str:
    return (
        f"llama-server caps its slots at the length in the GGUF. Raise it: --override-kv ARCH.context_length=int:"
        f"{length}, with the file's general.architecture for ARCH."
    )


_RAISED = "--override-kv raises the length in the GGUF, at which llama-server caps its slots."
_UNCONVERTED = "These flags are for a GGUF of the original checkpoint."
_CONVERT_FIRST = (
    "No flag expresses these frequencies on a GGUF of the original checkpoint. Write the extended checkpoint (ctxext "
    "patch) and convert that one; the flags are for that GGUF."
)
_COPY = (
    "Flags do not say all of it. Give the same command --gguf IN.gguf OUT.gguf: it writes a copy of the model's GGUF "
    "file with the extension in it, and these flags are for that copy."
)
# Read in its tools/completion/completion.cpp at 0af8217; not run.
_OWN = {
    "self_extend": "Its llama-completion has a Self-Extend of its own, for a GGUF of the unextended checkpoint: "
    "-c TARGET --grp-attn-n GROUP --grp-attn-w WINDOW, the window a multiple of the group. There the window moves in "
    "steps of its own width, so results differ from ctxext's; llama-server has none. "
}
_OTHERWISE = "Choose a static method that it knows: yarn, pi (linear), or ntk and abf (another base)."


def _version() -> str:
    return str(read_table(TABLE)["versions"]["converter"])


def _line(extended: ExtensionInConfig) -> dict[str, Any]:
    """What was found out about this model type; empty where it was not looked at.

    Of a model of several parts its text model says nothing: Mistral3's is a mistral, and its GGUF is none.
    """
    found: dict[str, Any] = read_table(TABLE)["types"].get(extended.config.model_type, {})
    return found


def verdict(line: dict[str, Any], form: str, *, from_original: bool) -> tuple[bool | None, str]:
    """Whether a real llama.cpp with all flags computed what the patched model does; None where that was not seen.

    Args:
        line: the model type's entry in the table.
        form: the rope type, as the table names it.
        from_original: from the GGUF of the original checkpoint instead of that of the extended one.

    Returns:
        The verdict, and the reason where it is not True.
    """
    found = line.get("forms", {}).get(form, {})
    result = found.get("original" if from_original else "extended")
    if form in ("llama3", "longrope") and found.get("tensors") == []:
        return False, f"The converter of {_version()} writes no factors for this model type, and no flag says them."
    if not isinstance(result, float) or math.isnan(result):
        missing = "this model type was not tried" if not line else f"rope_type {form!r} was not tried"
        reasons = (line.get("aborts"), line.get("fails"), line.get("not_run"), found.get("refused"), found.get("fails"))
        why = next((reason for reason in (*reasons, result) if isinstance(reason, str)), missing)
        return None, f"Not proven for {_version()}: {why}"
    if is_close(result, found["matters"]):
        return True, ""
    if not _runs_right(line) or result <= found["matters"] / 10:
        return None, f"Not proven for {_version()}: tiny models of this type differ there without any extension."
    return False, (
        f"{_version()} computes other positions for this model type, whatever the flags: {result:g} nats from the "
        f"patched model, when the unextended one is {found['matters']:g} away."
    )


def _runs_right(line: dict[str, Any]) -> bool:
    """Whether llama.cpp computes this model type as transformers does, in any form."""
    forms = [form for form in line["forms"].values() if isinstance(form.get("matters"), float)]
    results = [(form.get(route), form["matters"]) for form in forms for route in ("extended", "original")]
    results += [(line.get("noise"), form["matters"]) for form in forms]
    return any(is_close(error, matters) for error, matters in results)


def _form(extended: ExtensionInConfig) -> str:
    """The name under which the table holds this scaling."""
    kind = extended.rope_type
    if kind != "yarn":
        return "default" if kind == "proportional" else kind
    usual = extended.scales_scores or abs(attention_factor(extended) - 1) < 1e-6
    return "yarn" if usual else "yarn_attention"


def attention_factor(extended: ExtensionInConfig) -> float:
    """What YaRN's scale is, as a multiple of the one that llama.cpp computes from the factor."""
    return extended.scale / (0.1 * math.log(extended.rope["factor"]) + 1)


def _refuse(extended: ExtensionInConfig) -> None:
    kind, model_type = extended.rope_type, extended.text.model_type
    if not extended.stock:
        raise IncompatibleError(
            f"llama.cpp cannot run {extended.method!r}: its converter does not know rope_type "
            f"{kind!r} and would write a GGUF without the extension. {_OWN.get(extended.method, '')}{_OTHERWISE}"
        )
    if kind == "dynamic":
        raise IncompatibleError(
            f"llama.cpp has no dynamic scaling: its converter drops rope_type 'dynamic' and the GGUF would run "
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


def _other_positions(extended: ExtensionInConfig) -> IncompatibleError:
    at = _line(extended)["converter"]
    return IncompatibleError(
        f"llama.cpp would run this {extended.text.model_type} with other positions: its converter ({at}) loses "
        f"rope_type {extended.rope_type!r}, and no flag brings it back. {_OTHERWISE}"
    )


def flags_of(extended: ExtensionInConfig) -> tuple[str, ...]:
    """The whole scaling as flags, those that a GGUF may hold already included."""
    rope, kind = extended.rope, extended.rope_type
    base = ("--rope-freq-base", _number(rope["rope_theta"]))
    if kind in ("default", "proportional"):
        return ("--rope-scaling", "none", *base)
    if kind == "linear":
        return ("--rope-scaling", "linear", "--rope-scale", _number(rope["factor"]), *base)
    if kind != "yarn":  # a tensor in the GGUF holds what is left
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


def _overrides(extended: ExtensionInConfig, line: dict[str, Any]) -> str:
    """Metadata of the GGUF that have no flag of their own."""
    arch, found = line.get("architecture"), []
    if arch and _is_capped(extended):
        found.append(f"{arch}.context_length=int:{extended.target_length}")
    if arch and _form(extended) == "yarn_attention":
        found.append(f"{arch}.rope.scaling.attn_factor=float:{_number(attention_factor(extended))}")
    if arch and extended.rope_type == "longrope" and abs(extended.scale - _baked(extended)) > 1e-6:
        found.append(f"{arch}.rope.scaling.attn_factor=float:{_number(extended.scale)}")
    return ",".join(found)


def _losses(extended: ExtensionInConfig) -> tuple[list[str], bool]:
    """What llama.cpp computes otherwise, and whether that leaves it exact."""
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
                f"and --yarn-attn-factor say; rope.scaling.attn_factor={attention_factor(extended):.9g} in the GGUF "
                f"(--override-kv) multiplies it back."
            )
    if kind == "longrope" and abs(extended.scale - _baked(extended)) > 1e-6:
        losses.append(
            f"The converter writes the attention factor {_baked(extended):.6g}, not {extended.scale:.6g}; "
            f"--override-kv replaces it."
        )
    return losses, exact


def _baked(extended: ExtensionInConfig) -> float:
    """The attention factor that the converter writes for longrope, whatever the config says."""
    return longrope_scale_of(extended.text.max_position_embeddings, extended.trained_length)


def _differences(extended: ExtensionInConfig) -> tuple[list[str], bool]:
    """What llama.cpp computes otherwise whatever it is told, and whether that leaves it exact."""
    rope, found = extended.rope, []
    if extended.rope_type == "longrope" and rope["short_factor"] != rope["long_factor"]:
        found.append(
            f"llama.cpp chooses between short_factor and long_factor once, by -c (above {extended.trained_length} "
            f"long_factor), and a copy that --gguf writes holds long_factor alone: short texts get it too."
        )
    window, architecture = window_of(extended.text), _line(extended).get("architecture")
    if window and window < extended.target_length and architecture and architecture not in WINDOWED:
        found.append(f"llama.cpp has no sliding window for this architecture: it attends beyond the {window} tokens.")
    return found, not found
