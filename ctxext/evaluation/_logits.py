"""A causal model's own logits, a slice of positions at a time, for the price of one forward pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.evaluation._cached import CachedPieces
from ctxext.surgery.head import require_pieces, shell_of
from ctxext.surgery.wrappers import base_model

__all__ = ["check_token_ids", "logits_in_chunks"]


def logits_in_chunks(
    model: nn.Module,
    input_ids: Int[Tensor, "batch positions"],
    *,
    start: int = 0,
    chunk: int = 1024,
    cached: int | None = None,
) -> Iterator[tuple[int, Float[Tensor, "batch piece vocab"]]]:
    """Yield ``(first position, logits)`` for consecutive pieces of the positions from ``start`` on.

    The layers run once over all positions, uncached and without an attention mask (so that a causal kernel serves
    them and no positions x positions matrix exists). The part after the layers - projection, scaling, soft cap,
    whatever the model's class does there - then runs once per piece, so that positions x vocabulary never exists
    either. The model is not touched: the pieces go through a shallow copy of its outermost module, in which a
    stand-in replays slices of the hidden states.

    Args:
        model: a transformers causal language model, or a PEFT or compiled wrapper around one, in eval mode.
        input_ids: token ids, without padding.
        start: first position of interest, in tokens; the logits before it are not computed.
        chunk: positions per piece, at least 1. One piece takes about batch x chunk x vocabulary x 8 bytes.
        cached: run the layers over that many tokens at a time, with a KV cache; the same result up to rounding, in
            less memory and more time. None for one uncached pass.

    Raises:
        InvalidParameterError: empty input, or ``start``, ``chunk`` or ``cached`` out of range.
        IncompatibleError: the model is in training mode, is an encoder-decoder, adds virtual tokens (prompt
            learning), or does not put its layers behind one base model.
    """
    positions = input_ids.shape[1]
    for name, value in (("chunk", chunk), ("cached", 1 if cached is None else cached)):
        if value < 1:
            raise InvalidParameterError(f"{name} must be at least 1 position, found {value}.")
    if not 0 <= start < positions:
        raise InvalidParameterError(
            f"start must be from 0 to {positions - 1} for {positions} positions, found {start}."
        )
    causal = _causal_model(model)
    shell, replay = shell_of(causal)
    if cached is not None and cached < positions:
        replay.real = CachedPieces(causal, replay.real, positions=positions, piece=cached)
    for first in range(start, positions, chunk):
        replay.piece = slice(first, min(first + chunk, positions))
        replay.calls = 0
        # The first piece hands all tokens to the real layers; later ones only have to look like their piece.
        ids = input_ids if first == start else input_ids[:, replay.piece]
        logits = shell(input_ids=ids, use_cache=False, return_dict=True).logits
        require_pieces(causal, replay, logits)
        yield first, logits


def _causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside, refused where its losses would not be those of a plain causal model."""
    peft = getattr(model, "active_peft_config", None)
    if peft is not None and peft.is_prompt_learning:
        raise IncompatibleError(
            f"The adapter ({peft.peft_type}) puts virtual tokens before the text, so positions are not those of the "
            f"text. Evaluate the base model, or an adapter that changes weights (LoRA and its kin)."
        )
    causal = base_model(model)
    name = type(causal).__name__
    if causal.training:
        raise IncompatibleError(f"{name} is in training mode, where dropout is noise. Call model.eval() first.")
    return causal


def check_token_ids(input_ids: Tensor, *, least: int) -> None:
    """Raise ``InvalidParameterError`` unless ``input_ids`` is [batch, tokens], of integers, with enough tokens."""
    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise InvalidParameterError(
            f"input_ids must be integers of shape [batch, tokens], found {input_ids.dtype} {list(input_ids.shape)}."
        )
    if input_ids.shape[0] < 1 or input_ids.shape[1] < least:
        raise InvalidParameterError(
            f"input_ids must hold at least one row of {least} tokens, found {list(input_ids.shape)}."
        )
