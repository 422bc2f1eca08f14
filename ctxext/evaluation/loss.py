"""Loss by position, with everything before it or with the old tokens thrown away.

A *position* is the one from which the model predicts: position ``i`` has seen tokens 0..i and is charged for token
``i + 1``. A text of N + 1 tokens therefore gives losses at positions 0..N-1, and a model trained for L tokens is
outside its window from position L on. All losses are natural logarithms (nats) per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.forward import check_token_ids, head_chunk, logits_as_read, logits_in_chunks


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


@torch.no_grad()
def loss_while(
    model: nn.Module,
    input_ids: Int[Tensor, "1 tokens"],
    *,
    piece: int,
    go_on: Callable[[Float[Tensor, " read"]], bool],
) -> Float[Tensor, " read"]:
    """The losses of one text from its beginning, for as long as somebody who looks at them wants more.

    Args:
        model: as in ``loss_by_position``.
        input_ids: a whole text.
        piece: tokens between two looks.
        go_on: told all losses so far, says whether to read another piece.

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
    for first, logits in logits_as_read(model, inputs, piece=piece, chunk=head_chunk(model)):
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
        pieces.append(loss_by_position(model, input_ids[:, : window + 1], start=start, **options))
    # Groups lie on the grid of the window, wherever the first position of interest is.
    begin = window + max(0, start - window) // stride * stride
    for first in range(begin, positions, stride):
        stop = min(first + stride, positions)
        kept = [input_ids[:, :prefix], input_ids[:, stop - window + prefix : stop + 1]]
        scored = stop - max(first, start)
        pieces.append(loss_by_position(model, torch.cat(kept, dim=1), start=window - scored, **options))
    return torch.cat(pieces, dim=1)


# Tokens between the starts of windows in both published protocols.
STRIDE = 256
# Does a piece of work on every item and returns what was found, in order; perhaps on several processes.
Spread = Callable[[Sequence[Any], Callable[[Any], Any]], list[Any]]


def alone(items: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    """All items on this process."""
    return [work(item) for item in items]


@dataclass(frozen=True, eq=False)
class Window:
    """What one pass reads and which of its losses count.

    The last token predicts nothing and is not run, so a dynamic method sees a text one token shorter than published
    code does.

    Args:
        input_ids: [1, tokens].
        start: first position whose loss counts.
    """

    input_ids: Int[Tensor, "1 tokens"]
    start: int


@dataclass(frozen=True, eq=False)
class Scored:
    """What a protocol measured.

    Args:
        losses: of every token scored, [tokens], one tensor per document (LongLoRA: per window).
        shares: for each document, how many of its tokens make up each mean that is averaged; None where every token
            weighs the same.
        passes: forward passes.
        tokens: that went through the model, in all passes.
    """

    losses: tuple[Tensor, ...]
    shares: tuple[tuple[int, ...], ...] | None
    passes: int
    tokens: int

    def average(self, losses: Sequence[Tensor]) -> float:
        """The protocol's average of losses of the same tokens, by this model or another; nats per token."""
        if self.shares is None:
            return torch.cat(list(losses)).double().mean().item()
        means = [
            part.mean()
            for one, share in zip(losses, self.shares, strict=True)
            for part in torch.split(one.double(), list(share))
        ]
        return torch.stack(means).mean().item()

    @property
    def loss(self) -> float:
        """The protocol's own average, nats per token."""
        return self.average(self.losses)


@torch.no_grad()
def sliding(
    model: nn.Module,
    documents: Sequence[Tensor],
    *,
    length: int,
    stride: int,
    prefix: int = 0,
    spread: Spread = alone,
    **options: Any,
) -> Scored:
    """True sliding window: every token is scored once, by a window that is always full, and weighs the same.

    Args:
        model: a causal language model in eval mode.
        documents: token ids, [1, tokens] each, prefix included.
        length: tokens in a window.
        stride: tokens scored by each window after the first, from 1 to ``length - prefix``; each of them sees at least
            ``length - stride + 1`` tokens.
        prefix: leading tokens that every window keeps in front.
        spread: over documents.
        **options: ``chunk`` and ``cached`` of ``loss_by_position``.

    Raises:
        InvalidParameterError: no documents, or as ``truncated_loss``.

    Source: Press et al., arXiv:2012.15832, appendix B.
    """
    _check(documents, length, stride)
    found = spread(
        documents,
        lambda ids: truncated_loss(model, ids, window=length, stride=stride, prefix=prefix, **options)[0],
    )
    later = [-(-max(0, len(losses) - length) // stride) for losses in found]
    tokens = sum(min(len(losses), length) + more * length for losses, more in zip(found, later, strict=True))
    return Scored(tuple(found), None, len(found) + sum(later), tokens)


@torch.no_grad()
def yarn(
    model: nn.Module,
    documents: Sequence[Tensor],
    *,
    length: int,
    stride: int = STRIDE,
    front: Sequence[int] = (),
    truncate: bool = False,
    spread: Spread = alone,
    **options: Any,
) -> Scored:
    """The number that ``eval/perplexity.py`` of YaRN prints for one ``--max-tokens``.

    Windows of ``length`` tokens, BOS included, start every ``stride`` tokens; each scores the tokens of the text that
    no earlier one scored. The mean loss of *each window* counts the same, whether it scored ``length`` tokens (the
    first), the stride, or a ragged rest: shorter documents and first windows weigh more or less than their tokens. With
    ``truncate``, which made the published figures, every document is cut to its first window: then the number is the
    cumulative mean over the first ``length`` tokens, averaged over documents.

    Args:
        model: a causal language model in eval mode.
        documents: token ids of the texts, [1, tokens] each, without BOS.
        length: tokens in a window, BOS included; at least 2.
        stride: tokens between the starts of windows (the paper's "sliding window of 256"), at most what a window
            holds of the text.
        front: token ids put in front of every window and not scored: BOS, or all that the tokenizer puts in front.
            Without any, the first token of each text has no loss.
        truncate: as the option of that name.
        spread: over documents.
        **options: ``chunk`` and ``cached`` of ``loss_by_position``.

    Raises:
        InvalidParameterError: no documents, or a length or stride out of range.

    Source: Peng et al., arXiv:2309.00071, section 4.3.1; jquesnelle/yarn@995db5b, eval/perplexity.py.
    """
    _check(documents, length, stride)

    def read(ids: Tensor) -> list[tuple[Tensor, int]]:
        windows = yarn_windows(ids, length=length, stride=stride, front=front, truncate=truncate)
        return [(_score(model, window, options), window.input_ids.shape[1] - 1) for window in windows]

    found = spread(documents, read)
    losses = tuple(torch.cat([part for part, _ in parts]) for parts in found)
    shares = tuple(tuple(len(part) for part, _ in parts) for parts in found)
    return Scored(losses, shares, sum(map(len, shares)), sum(tokens for parts in found for _, tokens in parts))


def yarn_windows(
    input_ids: Int[Tensor, "1 tokens"], *, length: int, stride: int, front: Sequence[int] = (), truncate: bool = False
) -> Iterator[Window]:
    """The windows of one text, as ``yarn`` reads them."""
    room = length - len(front)
    if truncate:
        input_ids, stride = input_ids[:, :room], room
    most = room if truncate or len(front) else room - 1
    if not 1 <= stride <= most:
        raise InvalidParameterError(
            f"stride must be from 1 to {most} for windows of {length} tokens, found {stride}: a longer one leaves "
            f"tokens without a loss."
        )
    prefix = input_ids.new_tensor([list(front)])
    scored, tokens = 0, input_ids.shape[1]
    for begin in range(0, tokens, stride):
        end = min(begin + room, tokens)
        window = torch.cat([prefix, input_ids[:, begin:end]], dim=1)
        # The token at index i is predicted at position i - 1; the very first one of a window has no prediction.
        first = max(0, window.shape[1] - (end - scored) - 1)
        if window.shape[1] > 1:
            yield Window(window, first)
        scored = end
        if end == tokens:
            break


@torch.no_grad()
def longlora(
    model: nn.Module,
    documents: Sequence[Tensor],
    *,
    length: int,
    stride: int = STRIDE,
    spread: Spread = alone,
    **options: Any,
) -> Scored:
    """The number that LongLoRA's ``eval.py`` prints for one ``--seq_len`` with ``--batch_size 1``.

    All texts are *one* stream of tokens without BOS, and windows of ``length`` tokens start every ``stride`` tokens,
    across the seams between texts; the last window is dropped. Every window scores *all* of its tokens, so each token
    is scored by up to ``length / stride`` windows, with everything from no context to nearly the full window: the
    number is the mean over all context lengths from 1 to ``length - 1``, not the loss at ``length``, and cannot be
    compared with YaRN's or with a sliding window. (The script prints ``2.71828 ** loss``, ours differs from it in the
    sixth digit. With a larger batch it averages means of batches, the last of which may be smaller.)

    Args:
        model: a causal language model in eval mode.
        documents: token ids of the texts, [1, tokens] each, without BOS.
        length: tokens in a window, at least 2.
        stride: tokens between the starts of windows.
        spread: over windows.
        **options: ``chunk`` and ``cached`` of ``loss_by_position``.

    Raises:
        InvalidParameterError: no documents, a stride below 1, or fewer tokens than two windows need.

    Source: Chen et al., arXiv:2309.12307; dvlab-research/LongLoRA@d4eb344, eval.py.
    """
    _check(documents, length, stride)
    windows = list(longlora_windows(documents, length=length, stride=stride))
    found = tuple(spread(windows, lambda window: _score(model, window, options)))
    return Scored(found, tuple((length - 1,) for _ in found), len(windows), len(windows) * (length - 1))


def longlora_windows(documents: Sequence[Tensor], *, length: int, stride: int) -> Iterator[Window]:
    """The windows of all texts, as ``longlora`` reads them."""
    stream = torch.cat(list(documents), dim=1)
    starts = range(0, stream.shape[1] - length, stride)[:-1]
    if not starts:
        raise InvalidParameterError(
            f"LongLoRA's protocol drops the last window, so it needs more than {length + stride:,} tokens in all for "
            f"windows of {length:,}; found {stream.shape[1]:,}."
        )
    yield from (Window(stream[:, begin : begin + length], 0) for begin in starts)


def _score(model: nn.Module, window: Window, options: dict[str, Any]) -> Tensor:
    return loss_by_position(model, window.input_ids, start=window.start, **options)[0]


def _check(documents: Sequence[Tensor], length: int, stride: int) -> None:
    if not documents:
        raise InvalidParameterError("There is no document to measure.")
    if length < 2 or stride < 1:
        raise InvalidParameterError(
            f"A window needs at least 2 tokens and a stride of at least 1, found length={length}, stride={stride}."
        )
