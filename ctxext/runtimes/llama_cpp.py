"""What llama.cpp must be told, read off the llama.cpp that llama_cpp_python 0.3.36 vendors."""

from __future__ import annotations

import math

from ctxext.errors import IncompatibleError
from ctxext.runtimes.base import Export, Extended

__all__ = ["to_llama_cpp"]

# Model types whose converter (conversion/*.py) bakes these scalings into a tensor; the other converters drop them
# without a word, and no flag brings them back.
BAKES_LLAMA3 = frozenset(
    {"llama", "mistral", "mixtral", "llama4_text", "arcee", "smollm3", "apertus", "granite", "exaone4"}
)
BAKES_LONGROPE = frozenset({"phi3", "minicpm3"})


def to_llama_cpp(extended: Extended) -> Export:
    """Flags for ``llama-server`` and ``llama-cli``, with a GGUF converted by ``convert_hf_to_gguf.py``.

    Raises:
        IncompatibleError: if llama.cpp would run the model without the extension, or with another one.
    """
    _refuse(extended)
    scaling = _scaling_flags(extended)
    length = ("-c", str(extended.target_length))
    notes, exact = _losses(extended)
    if extended.unsaid:
        notes.insert(0, _UNCONVERTED.format(length=extended.target_length) if scaling else _CONVERT_FIRST)
        if "sliding_window" in extended.unsaid:
            notes.append("No flag lifts the sliding window: convert the extended checkpoint (ctxext patch).")
        flags = (*scaling, *length)
    else:
        notes.insert(
            0, "Convert this checkpoint; the GGUF then says it all and the flag only sets the length to serve."
        )
        if scaling:
            notes.append(f"A GGUF made from the original checkpoint needs also: {' '.join(scaling)}")
        flags = length
    return Export(target="llama.cpp", flags=flags, notes=tuple(notes), exact=exact)


_UNCONVERTED = (
    "These flags are for a GGUF of the original checkpoint, whose slots llama-server caps at the trained length. Raise "
    "that with --override-kv ARCH.context_length=int:{length} (ARCH is general.architecture in the GGUF), or convert "
    "an extended checkpoint (ctxext patch), which needs neither."
)
_CONVERT_FIRST = (
    "No flag expresses these frequencies: convert_hf_to_gguf.py bakes them into the GGUF. Write the extended "
    "checkpoint (ctxext patch) and convert that one."
)


def _refuse(extended: Extended) -> None:
    kind, model_type = extended.rope_type, extended.text.model_type
    if not extended.stock:
        raise IncompatibleError(
            f"llama.cpp cannot run {extended.method!r}: its converter does not know rope_type "
            f"{kind!r} and would write a GGUF without the extension. {_OTHERWISE}"
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
    if kind == "llama3" and model_type not in BAKES_LLAMA3:
        raise IncompatibleError(
            f"The converter of llama.cpp bakes rope_type 'llama3' into the GGUF for {_listed(BAKES_LLAMA3)} only; for "
            f"{model_type} it drops it. {_OTHERWISE}"
        )
    if kind == "longrope" and model_type not in BAKES_LONGROPE:
        raise IncompatibleError(
            f"The converter of llama.cpp bakes longrope factors into the GGUF for {_listed(BAKES_LONGROPE)} only; for "
            f"{model_type} it drops them. {_OTHERWISE}"
        )


_OTHERWISE = "Choose a static method that it knows: yarn, pi (linear), or ntk and abf (another base)."


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _scaling_flags(extended: Extended) -> tuple[str, ...]:
    """Flags that set the scaling; they replace what a GGUF holds, so repeating it does no harm."""
    rope, kind = extended.rope, extended.rope_type
    if kind in ("default", "proportional"):
        return ("--rope-freq-base", _number(rope["rope_theta"]))
    if kind == "linear":
        return ("--rope-scaling", "linear", "--rope-scale", _number(rope["factor"]))
    if kind != "yarn":
        return ()
    flags = ["--rope-scaling", "yarn", "--rope-scale", _number(rope["factor"])]
    flags += ["--yarn-orig-ctx", str(extended.trained_length)]
    for key in ("beta_fast", "beta_slow"):
        if rope.get(key) is not None:
            flags += [f"--yarn-{key.replace('_', '-')}", _number(rope[key])]
    return tuple(flags)


def _number(value: int | float) -> str:
    return f"{value:.9g}"  # llama.cpp reads a float32, which nine digits determine


def _losses(extended: Extended) -> tuple[list[str], bool]:
    """What llama.cpp computes otherwise, and whether that leaves it exact."""
    rope, kind, losses = extended.rope, extended.rope_type, []
    if kind == "yarn":
        usual = 0.1 * math.log(rope["factor"]) + 1
        if rope.get("truncate") is False:
            losses.append(
                "llama.cpp always rounds the ends of YaRN's ramp to whole dimensions (truncate=False is lost)."
            )
        if rope.get("mscale_all_dim") and hasattr(extended.text, "kv_lora_rank"):
            losses.append("mscale of latent attention has a converter of its own in llama.cpp, which is not verified.")
        elif abs(extended.scale - usual) > 1e-6:
            losses.append(
                f"llama.cpp replaces the attention factor {extended.scale:.6g} by YaRN's default {usual:.6g}, whatever "
                f"the GGUF and --yarn-attn-factor say. --override-kv ARCH.rope.scaling.attn_factor="
                f"float:{extended.scale / usual:.9g} multiplies it back (ARCH is general.architecture in the GGUF)."
            )
        if extended.layer_type is not None:
            losses.append(f"YaRN on the {extended.layer_type} positions alone is not verified for llama.cpp.")
    if kind == "longrope":
        stretch = extended.text.max_position_embeddings / extended.trained_length
        baked = math.sqrt(1 + math.log(max(stretch, 1.0)) / math.log(extended.trained_length))
        if abs(extended.scale - baked) > 1e-6:
            losses.append(f"The converter bakes the attention factor {baked:.6g}, not {extended.scale:.6g}.")
        if rope["short_factor"] != rope["long_factor"]:
            losses.append(
                f"llama.cpp chooses between short_factor and long_factor once, by -c: above {extended.trained_length} "
                f"every text gets long_factor, short ones included."
            )
    return losses, not losses
