"""Names of methods, references and lengths, as a reader knows them."""

from __future__ import annotations

from collections.abc import Sequence

from ctxext.measuring.truncation import SELECTED, TRUNCATED, window_of

LABELS = {
    TRUNCATED: "best truncation",
    SELECTED: "selected chunks",
    "pi": "PI",
    "ntk": "NTK",
    "dynamic_ntk": "dynamic NTK",
    "ntk_by_parts": "NTK-by-parts",
    "yarn": "YaRN",
    "dynamic_yarn": "dynamic YaRN",
    "longrope": "LongRoPE",
    "llama3": "Llama 3",
    "abf": "ABF",
    "dynamic_pi": "dynamic PI",
    "alibi": "ALiBi",
    "self_extend": "Self-Extend",
    "retrieval_heads": "Retrieval heads",
    "rerope": "ReRoPE",
    "dual_chunk": "Dual Chunk",
    "string": "STRING",
    "dpe": "DPE",
    "streaming": "StreamingLLM",
    "nope": "NoPE",
    "rope": "RoPE",
    "t5_bias": "T5 buckets",
    "kerple": "KERPLE",
    "sandwich": "Sandwich",
    "fire": "FIRE",
    "shaw": "Shaw",
    "cope": "CoPE",
    "fox": "FoX",
    "path": "PaTH",
    "path_fox": "PaTH-FoX",
    "hierarchical_summary": "hierarchical summary",
    "mamba2": "Mamba-2",
    "xlstm": "xLSTM",
    "recurrent_gemma": "RecurrentGemma",
    "minimax": "MiniMax",
    "rwkv": "RWKV",
    "table": "given frequencies",
}


def tokens_label(tokens: int) -> str:
    """Write ``16384`` as ``16K``, and a number that is not a multiple of 1024 in full."""
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else f"{tokens:,}"


def few_of(names: Sequence[str]) -> str:
    """Join the first three names, and say how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def label_of(name: str) -> str:
    """Return a method's name as its paper writes it, or a reference's in plain words."""
    window = window_of(name)
    return LABELS.get(name, name) if window is None else f"last {tokens_label(window)}"


def all_of(names: Sequence[str]) -> str:
    """Join names as in a sentence: ``a``, ``a and b``, ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def capitalised(text: str) -> str:
    """Write the first letter large, and leave all others as they are."""
    return text[:1].upper() + text[1:]


def perplexity_label(value: float) -> str:
    """Write a perplexity with two digits after the point, with fewer from 100 and from 1,000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
