"""Loss by position, with everything before it or with the old tokens thrown away.

A *position* is the one from which the model predicts: position ``i`` has seen tokens 0..i and is charged for token
``i + 1``. A text of N + 1 tokens therefore gives losses at positions 0..N-1, and a model trained for L tokens is
outside its window from position L on. All losses are natural logarithms (nats) per token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ctxext.errors import InvalidParameterError
from ctxext.evaluation._logits import check_token_ids, logits_in_chunks
from ctxext.evaluation._memory import head_chunk
from ctxext.evaluation._paired import PairedDifference, document_difference, grouped_difference, paired_difference

__all__ = [
    "Bucket",
    "PairedDifference",
    "bucketed",
    "document_difference",
    "grouped_difference",
    "loss_by_position",
    "paired_difference",
    "truncated_loss",
]


@dataclass(frozen=True)
class Bucket:
    """The mean loss over the positions ``start <= i < stop``.

    Args:
        start: first position, in tokens.
        stop: one past the last position.
        tokens: how many losses were averaged, over all documents.
        loss: nats per token, every token weighing the same.
    """

    start: int
    stop: int
    tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        """``exp(loss)``, dimensionless."""
        return math.exp(self.loss)


# Not inference_mode: a dynamic method may leave its buffers behind, and inference tensors cannot be trained with.
@torch.no_grad()
def loss_by_position(
    model: nn.Module,
    input_ids: Int[Tensor, "batch tokens"],
    *,
    start: int = 0,
    chunk: int | None = None,
    cached: int | None = None,
) -> Float[Tensor, "batch positions"]:
    """The loss at every position, from one forward pass.

    For a causal model whose positions do not depend on the length of the text (every method here but the dynamic
    ones), the losses at the first n positions are those of the text cut to n + 1 tokens: one pass gives the
    perplexity at every shorter length. A dynamic method uses the frequencies of the full length at all positions.

    The head runs in the model's own dtype, as it does when the model generates; softmax and logarithm in float32.

    Args:
        model: a causal language model in eval mode; a PEFT or compiled wrapper will do.
        input_ids: whole texts, at least 2 tokens, no padding. Put a BOS token in front where the model wants one.
        start: first position of interest; the head is not run for those before it.
        chunk: positions for which logits exist at a time, at least 1; default as many as take about 128 MiB. The
            result does not depend on it.
        cached: None for an uncached pass; or tokens per call of a pass with a KV cache, which takes less memory and,
            on a CPU, two to three times as long. The result is the same up to rounding.

    Returns:
        Nats per token, float32, on the CPU; ``positions`` is ``tokens - 1 - start``.

    Raises:
        InvalidParameterError: ``input_ids`` or ``chunk`` out of range.
        IncompatibleError: the model's losses cannot be had this way (see ``logits_in_chunks``).
    """
    check_token_ids(input_ids, least=2)
    return _losses(model, input_ids, start=start, chunk=chunk, cached=cached)


@torch.no_grad()
def truncated_loss(
    model: nn.Module,
    input_ids: Int[Tensor, "batch tokens"],
    *,
    window: int,
    stride: int | None = None,
    start: int = 0,
    prefix: int = 0,
    chunk: int | None = None,
    cached: int | None = None,
) -> Float[Tensor, "batch positions"]:
    """The losses when the model sees only the last ``window`` tokens: a sliding window, or truncation.

    On the unpatched model with its trained length or less, this is what a user without a longer context does; which
    windows are tried, and which of them is the baseline, is in ``ctxext.evaluation.truncation``. Positions below
    ``window`` have nothing to lose and come from one pass. The positions from there on are taken ``stride`` at a time;
    each group is scored by one fresh pass over the ``window`` positions that end with it. So a position sees at least
    ``window - stride + 1`` and at most ``window`` tokens.

    Args:
        model: as in ``loss_by_position``; unpatched for what truncation gives.
        input_ids: whole texts, at least 2 tokens.
        window: tokens that the model may see, at least 1.
        stride: positions scored per pass, from 1 to ``window - prefix``; default a quarter of the window.
        start: first position to score. The passes before it are not run; every position from there on sees what it
            sees without ``start``.
        prefix: leading tokens of the text that every window keeps in front (1 for a BOS token), below ``window``.
        chunk: as in ``loss_by_position``.
        cached: as in ``loss_by_position``.

    Returns:
        Nats per token, float32, on the CPU, for the positions ``start`` to ``tokens - 2``.

    Raises:
        InvalidParameterError: an argument out of range.
        IncompatibleError: as in ``loss_by_position``.

    Source: Press et al., arXiv:2012.15832 (sliding window evaluation), with a window that is always full.
    """
    check_token_ids(input_ids, least=2)
    positions = input_ids.shape[1] - 1
    stride = max(1, (window - prefix) // 4) if stride is None else stride
    for name, value, low, high in (
        ("window", window, 1, None),
        ("prefix", prefix, 0, window - 1),
        ("stride", stride, 1, window - prefix),
        ("start", start, 0, positions - 1),
    ):
        if value < low or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"from {low} to {high}"
            raise InvalidParameterError(f"{name} must be {allowed} tokens, found {value}.")
    options = {"chunk": chunk, "cached": cached}
    pieces = []
    if start < window:
        pieces.append(_losses(model, input_ids[:, : window + 1], start=start, **options))
    # Groups lie on the grid of the window, wherever the first position of interest is.
    begin = window + max(0, start - window) // stride * stride
    for first in range(begin, positions, stride):
        stop = min(first + stride, positions)
        kept = [input_ids[:, :prefix], input_ids[:, stop - window + prefix : stop + 1]]
        scored = stop - max(first, start)
        pieces.append(_losses(model, torch.cat(kept, dim=1), start=window - scored, **options))
    return torch.cat(pieces, dim=1)


def bucketed(losses: Float[Tensor, "batch positions"], edges: Sequence[int]) -> tuple[Bucket, ...]:
    """Mean losses between consecutive ``edges``, over all rows.

    Args:
        losses: nats per token, column ``i`` being position ``i``.
        edges: positions, increasing, from 0 or more up to at most the number of columns; at least 2.

    Raises:
        InvalidParameterError: edges that do not increase or do not fit the losses.
    """
    if len(edges) < 2 or edges[0] < 0 or edges[-1] > losses.shape[1] or sorted(set(edges)) != list(edges):
        raise InvalidParameterError(
            f"edges must increase within 0..{losses.shape[1]}, the positions measured; found {list(edges)}."
        )
    spans = [(start, stop, losses[:, start:stop].double()) for start, stop in itertools.pairwise(edges)]
    return tuple(Bucket(start, stop, span.numel(), span.mean().item()) for start, stop, span in spans)


def _losses(
    model: nn.Module, input_ids: Tensor, *, start: int, chunk: int | None = None, cached: int | None = None
) -> Tensor:
    """Losses at the positions from ``start`` on."""
    device = next(model.parameters()).device
    inputs, targets = input_ids[:, :-1].to(device), input_ids[:, 1:].to(device)
    losses = torch.empty(targets[:, start:].shape, dtype=torch.float32)
    chunk = head_chunk(model) if chunk is None else chunk
    for first, logits in logits_in_chunks(model, inputs, start=start, chunk=chunk, cached=cached):
        stop = first + logits.shape[1]
        wanted = targets[:, first:stop].flatten()
        piece = functional.cross_entropy(logits.flatten(0, 1).float(), wanted, reduction="none")
        losses[:, first - start : stop - start] = piece.view(-1, stop - first).cpu()
    return losses
