"""Ways to turn losses into one perplexity, as papers and their code do it, each with what it really computes.

All return the loss of every token that they score beside their own average, so that two models can be compared on the
same tokens whatever the average weighs.

========== =========================================== ======================== ==========================
protocol   what a token sees                           what is averaged         passes for N tokens
========== =========================================== ======================== ==========================
position   everything before it                        tokens                   1
sliding    window - stride + 1 to window tokens        tokens                   N / stride
yarn       the same, in published form                 means of windows         N / stride, once per length
longlora   0 to length - 1 tokens, each length alike   means of windows         N / stride, once per length
========== =========================================== ======================== ==========================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.perplexity import loss_by_position, truncated_loss

__all__ = [
    "STRIDE",
    "Scored",
    "Spread",
    "Window",
    "alone",
    "longlora",
    "longlora_windows",
    "sliding",
    "yarn",
    "yarn_windows",
]

# Of both published protocols, in tokens.
STRIDE = 256
Item = TypeVar("Item")
Found = TypeVar("Found")


@runtime_checkable
class Spread(Protocol):
    """Does a piece of work on every item and returns what was found, in order; perhaps on several processes."""

    def __call__(self, items: Sequence[Item], work: Callable[[Item], Found]) -> list[Found]: ...


def alone(items: Sequence[Item], work: Callable[[Item], Found]) -> list[Found]:
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
    bos: int | None = None,
    truncate: bool = False,
    spread: Spread = alone,
    **options: Any,
) -> Scored:
    """The number that ``eval/perplexity.py`` of YaRN prints for one ``--max-tokens``.

    Windows of ``length`` tokens, BOS included, start every ``stride`` tokens; each scores the tokens that no earlier
    one scored. The mean loss of *each window* counts the same, whether it scored ``length`` tokens (the first), the
    stride, or a ragged rest: shorter documents and first windows weigh more or less than their tokens. With
    ``truncate``, which made the published figures, every document is cut to its first window: then the number is the
    cumulative mean over the first ``length`` tokens, averaged over documents.

    Args:
        model: a causal language model in eval mode.
        documents: token ids of the texts, [1, tokens] each, without BOS.
        length: tokens in a window, BOS included; at least 2.
        stride: tokens between the starts of windows (the paper's "sliding window of 256"), at most what a window
            holds of the text.
        bos: put in front of every window; None for none, which leaves the first token of each text without a loss.
        truncate: as the option of that name.
        spread: over documents.
        **options: ``chunk`` and ``cached`` of ``loss_by_position``.

    Raises:
        InvalidParameterError: no documents, or a length or stride out of range.

    Source: Peng et al., arXiv:2309.00071, section 4.3.1; jquesnelle/yarn@995db5b, eval/perplexity.py.
    """
    _check(documents, length, stride)

    def read(ids: Tensor) -> list[tuple[Tensor, int]]:
        windows = yarn_windows(ids, length=length, stride=stride, bos=bos, truncate=truncate)
        return [(_score(model, window, options), window.input_ids.shape[1] - 1) for window in windows]

    found = spread(documents, read)
    losses = tuple(torch.cat([part for part, _ in parts]) for parts in found)
    shares = tuple(tuple(len(part) for part, _ in parts) for parts in found)
    return Scored(losses, shares, sum(map(len, shares)), sum(tokens for parts in found for _, tokens in parts))


def yarn_windows(
    input_ids: Int[Tensor, "1 tokens"], *, length: int, stride: int, bos: int | None, truncate: bool = False
) -> Iterator[Window]:
    """The windows of one text, as ``yarn`` reads them."""
    room = length - (bos is not None)
    if truncate:
        input_ids, stride = input_ids[:, :room], room
    most = room if truncate or bos is not None else room - 1
    if not 1 <= stride <= most:
        raise InvalidParameterError(
            f"stride must be from 1 to {most} for windows of {length} tokens, found {stride}: a longer one leaves "
            f"tokens without a loss."
        )
    front = input_ids.new_tensor([[] if bos is None else [bos]])
    scored, tokens = 0, input_ids.shape[1]
    for begin in range(0, tokens, stride):
        end = min(begin + room, tokens)
        window = torch.cat([front, input_ids[:, begin:end]], dim=1)
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
