"""How much memory a forward pass takes, and in which pieces it fits a budget."""

from __future__ import annotations

import re

from torch import nn

from ctxext.errors import InvalidParameterError
from ctxext.surgery.wrappers import base_model

__all__ = ["cached_tokens_for", "head_chunk", "parse_bytes", "pass_bytes"]

UNITS = {"b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
LEAST = 256
# Bytes that the logits of one piece and their softmax may take, and the fewest positions that a piece is worth.
HEAD_BYTES, HEAD_LEAST = 128 * 2**20, 128


def parse_bytes(text: str) -> int:
    """``2GiB``, ``1.5 GB`` or ``800MiB`` as bytes.

    Raises:
        InvalidParameterError: anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|b)?b?\s*", text, flags=re.IGNORECASE)
    if found is None or not float(found[1]):
        raise InvalidParameterError(f"An amount of memory is written like 2GiB or 800MB; found {text!r}.")
    if not found[2]:
        raise InvalidParameterError(f"An amount of memory needs a unit, such as {found[1]}GiB; found {text!r}.")
    return int(float(found[1]) * UNITS[found[2].lower()])


def head_chunk(model: nn.Module) -> int:
    """Positions whose logits exist at a time, so that they and their softmax take about 128 MiB."""
    vocabulary = base_model(model).config.get_text_config(decoder=True).vocab_size
    return max(HEAD_LEAST, int(HEAD_BYTES // (vocabulary * 10)))


def pass_bytes(model: nn.Module, tokens: int, *, cached: int | None = None) -> int:
    """About what the model's weights and one pass over a text take at the peak, logits apart.

    Args:
        model: a causal language model.
        tokens: in the text.
        cached: tokens per call with a KV cache; None for one uncached pass.
    """
    base = base_model(model)
    config = base.config.get_text_config(decoder=True)
    weights: int = sum(parameter.numel() * parameter.element_size() for parameter in base.parameters())
    hidden, layers, heads = int(config.hidden_size), int(config.num_hidden_layers), int(config.num_attention_heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden) * experts
    size: int = base.dtype.itemsize
    # A layer's residual, norm (computed in float32), queries and keys before and after rotation; or its feed-forward.
    attention = size * (4 * hidden + 3 * (heads + 2 * key_heads) * head_dim) + 8 * hidden
    layer = max(attention, size * (3 * hidden + 3 * inner))
    # Without a fused kernel, scores exist for every query and key, in float32 for the softmax.
    scores = heads * tokens * (size + 4) if config._attn_implementation == "eager" else 0
    if cached is None:
        return weights + tokens * (layer + scores)
    cache = 2 * layers * key_heads * head_dim * size * tokens
    grown, mask = cache // layers, cached * tokens * (1 + max(4, size))
    return weights + cached * (layer + scores) + cache + grown + mask + 2 * tokens * hidden * size


def cached_tokens_for(model: nn.Module, tokens: int, budget: int | None) -> int | None:
    """Tokens per cached call that keep a pass within ``budget``; None where one uncached pass does.

    The uncached pass is preferred: it gives the same losses, is two to three times as fast on a CPU, and with a fused
    attention kernel it often takes less memory than a cache of all layers. Pieces help where scores of all queries and
    keys would exist, or where few heads have keys of their own.

    Args:
        model: a causal language model.
        tokens: in the longest text.
        budget: bytes for weights and pass; None for no limit.

    Raises:
        InvalidParameterError: not even pieces of 256 tokens fit.
    """
    if budget is None:
        return None
    head = HEAD_BYTES
    whole = pass_bytes(model, tokens) + head
    if whole <= budget:
        return None
    piece = LEAST
    least = pass_bytes(model, tokens, cached=piece) + head
    if least > budget:
        raise InvalidParameterError(
            f"A text of {tokens:,} tokens takes about {whole / 2**30:.3g} GiB in one pass and {least / 2**30:.3g} GiB "
            f"in cached pieces of {LEAST} tokens; found --memory {budget / 2**30:.3g}GiB. Allow more, or read less."
        )
    while 2 * piece < tokens and pass_bytes(model, tokens, cached=2 * piece) + head <= budget:
        piece *= 2
    return piece
