"""Loss by position, with everything before it or with the old tokens thrown away.

A *position* is the one from which the model predicts: position ``i`` has seen tokens 0..i and is charged for token
``i + 1``. A text of N + 1 tokens therefore gives losses at positions 0..N-1, and a model trained for L tokens is
outside its window from position L on. All losses are natural logarithms (nats) per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ctxext.errors import InvalidParameterError
from ctxext.measuring.forward import check_token_ids, logits_as_read, logits_in_chunks


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
    """Compute the loss at every position from one forward pass.

    For a causal model whose positions do not depend on the length of the text (every method here but the dynamic
    ones), the losses at the first n positions equal the losses of the text cut to n + 1 tokens: one pass gives the
    perplexity at every shorter length. A dynamic method uses the frequencies of the full length at all positions.

    The head runs in the model's own dtype, as it does when the model generates; softmax and logarithm in float32.

    Args:
        input_ids: whole texts, at least 2 tokens, no padding. Put a BOS token in front where the model wants one.
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
    device = next(model.parameters()).device
    inputs, targets = input_ids[:, :-1].to(device), input_ids[:, 1:].to(device)
    losses = torch.empty(targets[:, start:].shape, dtype=torch.float32)
    for first, logits in logits_in_chunks(model, inputs, start=start, chunk=chunk, cached=cached):
        stop = first + logits.shape[1]
        wanted = targets[:, first:stop].flatten()
        piece = functional.cross_entropy(logits.flatten(0, 1).float(), wanted, reduction="none")
        losses[:, first - start : stop - start] = piece.view(-1, stop - first).cpu()
    return losses


@torch.no_grad()
def loss_while(
    model: nn.Module,
    input_ids: Int[Tensor, "1 tokens"],
    *,
    piece: int,
    go_on: Callable[[Float[Tensor, " read"]], bool],
) -> Float[Tensor, " read"]:
    """Compute the losses of one text from its beginning, piece by piece, until ``go_on`` says stop.

    Returns:
        Nats per token, float32, on the CPU: of the whole text, or of as many pieces as were read.

    Raises:
        InvalidParameterError: as ``loss_by_position``.
        IncompatibleError: as ``loss_by_position``.
    """
    check_token_ids(input_ids, least=2)
    device = next(model.parameters()).device
    inputs, targets = input_ids[:, :-1].to(device), input_ids[0, 1:].to(device)
    read: list[Tensor] = []
    for first, logits in logits_as_read(model, inputs, piece=piece):
        stop = first + logits.shape[1]
        read.append(functional.cross_entropy(logits[0].float(), targets[first:stop], reduction="none").cpu())
        if stop % piece == 0 and stop < len(targets) and not go_on(torch.cat(read)):
            break
    return torch.cat(read)


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
    """Compute the losses when the model sees only the last ``window`` tokens: a sliding window, or truncation.

    On the unpatched model with its trained length or less, this is what a user without a longer context does.
    ``ctxext.measuring.truncation`` says which windows are tried, and which is the baseline. Positions below ``window``
    have nothing to lose and come from one pass. The positions from there on are taken ``stride`` at a time; each group
    is scored by one fresh pass over the ``window`` positions that end with it. So a position sees at least
    ``window - stride + 1`` and at most ``window`` tokens.

    Args:
        window: tokens that the model may see, at least 1.
        stride: positions scored per pass, from 1 to ``window - prefix``; default a quarter of the window.
        start: first position to score. The passes before it are not run; every position from there on sees the same
            tokens as without ``start``.
        prefix: leading tokens of the text that every window keeps in front (1 for a BOS token), below ``window``.

    Returns:
        Nats per token, float32, on the CPU, for the positions ``start`` to ``tokens - 2``.

    Raises:
        InvalidParameterError: an argument out of range.
        IncompatibleError: as in ``loss_by_position``.

    Source: Press et al., arXiv:2012.15832 (sliding window evaluation), with a window that is always full.
    """
    check_token_ids(input_ids, least=2)
    stride = max(1, (window - prefix) // 4) if stride is None else stride
    windows = truncation_windows(input_ids.shape[1] - 1, window=window, stride=stride, start=start, prefix=prefix)
    return torch.cat([each.losses(model, input_ids, chunk=chunk, cached=cached) for each in windows], dim=1)


# Tokens between the starts of windows in both published protocols.
STRIDE = 256


@dataclass(frozen=True)
class Window:
    """One pass over a stretch of a text, and which of its losses count.

    The last token predicts nothing and is not run, so a dynamic method sees a text one token shorter than published
    code does.

    Args:
        prefix: leading tokens of the text, placed in front of the stretch.
        chosen: spans of the text, begin and end of each, placed between the two.
    """

    begin: int
    end: int
    scored: int
    prefix: int = 0
    chosen: tuple[tuple[int, int], ...] = ()

    @property
    def positions(self) -> int:
        """Positions that the pass runs over."""
        return self.prefix + sum(end - begin for begin, end in self.chosen) + self.end - self.begin - 1

    def losses(self, model: nn.Module, input_ids: Int[Tensor, "batch tokens"], **options: Any) -> Tensor:
        """Return the losses that count, [batch, scored], in nats per token.

        ``loss_by_position`` describes the options and the errors.
        """
        spans = [(0, self.prefix), *self.chosen, (self.begin, self.end)]
        tokens = torch.cat([input_ids[:, slice(*span)] for span in spans], dim=1)
        return loss_by_position(model, tokens, start=self.positions - self.scored, **options)


def truncation_windows(
    positions: int, *, window: int, stride: int, start: int = 0, prefix: int = 0
) -> tuple[Window, ...]:
    """Lay out a sliding window: every position is scored once, by a window that is always full.

    Positions below ``window`` come from one pass. Those from there on are taken ``stride`` at a time, each group by the
    window that ends with it.

    Args:
        positions: Positions of the text, one fewer than its tokens.
        window: positions that the model may see, at least 1.
        stride: positions scored per pass, from 1 to ``window - prefix``.
        start: first position to score. The passes before it are left out; every position sees the same tokens as
            without ``start``.
        prefix: leading tokens of the text that every window keeps in front, below ``window``.

    Raises:
        InvalidParameterError: an argument out of range.

    Source: Press et al., arXiv:2012.15832, appendix B.
    """
    for name, value, low, high in (
        ("window", window, 1, None),
        ("prefix", prefix, 0, window - 1),
        ("stride", stride, 1, window - prefix),
        ("start", start, 0, positions - 1),
    ):
        if value < low or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"from {low} to {high}"
            raise InvalidParameterError(f"{name} must be {allowed} tokens, found {value}.")
    windows = []
    if start < window:
        first = min(window, positions)
        windows.append(Window(0, first + 1, first - start))
    # Groups lie on the grid of the window, wherever the first position of interest is.
    for begin in range(window + max(0, start - window) // stride * stride, positions, stride):
        stop = min(begin + stride, positions)
        windows.append(Window(stop - window + prefix, stop + 1, stop - max(begin, start), prefix))
    return tuple(windows)


def yarn_windows(
    tokens: int, *, length: int, stride: int = STRIDE, prefix: int = 0, truncate: bool = False
) -> tuple[Window, ...]:
    """Lay out one text as ``eval/perplexity.py`` of YaRN does for one ``--max-tokens``.

    Windows of ``length`` tokens, BOS included, start every ``stride`` tokens; each scores the tokens of the text that
    no earlier one scored. The published number is the mean of the windows' means (``mean_of_windows``): *each window*
    counts the same, whether it scored ``length`` tokens (the first), the stride, or a ragged rest. With ``truncate``,
    which made the published figures, every text is cut to its first window: then the number is the cumulative mean
    over the first ``length`` tokens, averaged over texts.

    Args:
        tokens: Tokens of the text, ``prefix`` included.
        length: tokens in a window, at least 2.
        stride: tokens between the starts of windows (the paper's "sliding window of 256"), at most what a window
            holds of the text.
        prefix: leading tokens, placed in front of every window and not scored: BOS, or all that the tokenizer puts
            in front. Without any, the first token of each text has no loss.

    Raises:
        InvalidParameterError: a length or stride out of range.

    Source: Peng et al., arXiv:2309.00071, section 4.3.1; jquesnelle/yarn@995db5b, eval/perplexity.py.
    """
    _check_window(length, stride)
    room = length - prefix
    tokens -= prefix
    if truncate:
        tokens, stride = min(tokens, room), room
    most = room if truncate or prefix else room - 1
    if not 1 <= stride <= most:
        raise InvalidParameterError(
            f"stride must be from 1 to {most} for windows of {length} tokens, found {stride}: a longer one leaves "
            f"tokens without a loss."
        )
    windows: list[Window] = []
    scored = 0
    for begin in range(0, tokens, stride):
        end = min(begin + room, tokens)
        # The token at index i is predicted at position i - 1; the very first one of a window has no prediction.
        positions = prefix + end - begin - 1
        if positions:
            windows.append(Window(prefix + begin, prefix + end, min(positions, end - scored), prefix))
        scored = end
        if end == tokens:
            break
    return tuple(windows)


def longlora_starts(tokens: int, *, length: int, stride: int = STRIDE) -> range:
    """Return where the windows begin that LongLoRA's ``eval.py`` reads for one ``--seq_len`` with ``--batch_size 1``.

    All texts are *one* stream of tokens without BOS, and windows of ``length`` tokens start every ``stride`` tokens,
    across the seams between texts; the last window is dropped. Every window scores *all* of its tokens, so each token
    is scored by up to ``length / stride`` windows, with everything from no context to nearly the full window: the
    published number is the mean over all context lengths from 1 to ``length - 1``, not the loss at ``length``, and
    cannot be compared with YaRN's or with a sliding window. (The script prints ``2.71828 ** loss``, ours differs from
    it in the sixth digit. With a larger batch it averages means of batches, and the last batch may be smaller.)

    Raises:
        InvalidParameterError: a length or stride out of range, or fewer tokens than two windows need.

    Source: Chen et al., arXiv:2309.12307; dvlab-research/LongLoRA@d4eb344, eval.py.
    """
    _check_window(length, stride)
    starts = range(0, tokens - length, stride)[:-1]
    if not starts:
        raise InvalidParameterError(
            f"LongLoRA's protocol drops the last window, so it needs more than {length + stride:,} tokens in all for "
            f"windows of {length:,}; found {tokens:,}."
        )
    return starts


def mean_of_windows(losses: Sequence[Tensor], scored: Sequence[Sequence[int]]) -> float:
    """Return the mean of the means of windows, each counting the same, as both published protocols average.

    Args:
        losses: Nats per token, [tokens], one tensor per text.
        scored: Numbers of losses that each window gave, for each text.
    """
    means = [
        part.mean()
        for text, sizes in zip(losses, scored, strict=True)
        for part in torch.split(text.double(), list(sizes))
    ]
    return torch.stack(means).mean().item()


def _check_window(length: int, stride: int) -> None:
    if length < 2 or stride < 1:
        raise InvalidParameterError(
            f"A window needs at least 2 tokens and a stride of at least 1, found length={length}, stride={stride}."
        )
